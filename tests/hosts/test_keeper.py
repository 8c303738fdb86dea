"""What keeps the connections of a job leaves no agent without a word, unless the job is to be taken over."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from lockstep.hosts.keeper import ConnectedHost, Keeper
from lockstep.observability.console import Console
from lockstep.protocol.admin import StopChannel, StopRequest
from lockstep.protocol.channel import Attachment, Channel, PeerGone
from lockstep.protocol.coordinator import CoordinatorCommand, CoordinatorReport, RecordMade
from lockstep.protocol.host import EndHost, HostReport, Instruction, KeepAlive, KeepRecord, ShowNote
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import PacketChannel


@contextmanager
def kept(
    *, notifies: bool = False, shows_life: bool = False
) -> Iterator[tuple[Keeper, Channel[HostReport, Instruction], StopChannel]]:
    """Yield the keeper of a job on one more host, the channel of its agent, and that of the command."""
    ends: tuple[Channel[Instruction, HostReport], Channel[HostReport, Instruction]] = LocalChannel.pair()
    commands: tuple[StopChannel, StopChannel] = LocalChannel.pair()
    with EventLoop() as loop:
        keeper = Keeper(
            KeepRecord(0, 0, b""),
            [ConnectedHost("node2", None, 1, 1, ends[0])],
            commands[0],
            loop,
            SystemClock(),
            Console(Sink(1), Sink(2), "all", 0),
            "run",
            set(),
            notifies=notifies,
            shows_life=shows_life,
        )
        yield keeper, ends[1], commands[1]
    for end in (*ends, *commands):
        end.close()


def test_a_job_that_no_coordinator_can_continue_ends_on_all_hosts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Otherwise, its agents would wait for another coordinator until the limit."""
    with kept(notifies=True) as (keeper, agent, _):
        assert keeper.run() == 2
        assert keeper._process is not None
        assert keeper._process.wait(60.0) == 2
        assert "lockstep: UnfitError: no other coordinator can take over: " in capfd.readouterr().err
        received = [agent.receive() for _ in range(4)]
    notes = [one.text for one in received if isinstance(one, ShowNote)]
    assert notes[0].startswith("the job ends: UnfitError: no other coordinator can take over: ")
    assert EndHost(0.0, status=2) in received, received


def test_a_stop_keeps_its_grace_period_when_its_coordinator_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[CoordinatorCommand] = []
    with kept() as (keeper, _, command):
        command.send(StopRequest(15, 2.0))
        keeper._hear_command()
        stop, since = keeper._stops[0]
        keeper._stops[0] = stop, since - 17.0
        keeper.hosts.clear()
        monkeypatch.setattr(sys, "executable", "/bin/true")
        monkeypatch.setattr(keeper, "_tell", told.append)
        keeper._start()
        assert keeper._process is not None
        keeper._process.wait(60.0)
        assert keeper._coordinator is not None
        keeper._coordinator.close()
        os.close(keeper._pidfd)
    again = told[-1]
    assert isinstance(again, StopRequest)
    assert again.waited >= 19.0


def test_a_job_whose_command_is_lost_waits_on_other_hosts_to_be_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agents are not told to end; the command, when it is started again, finds them."""
    # A coordinator that says nothing.
    quiet = tmp_path / "quiet"
    quiet.write_text("#!/bin/sh\nexec sleep 600\n")
    quiet.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(quiet))
    with kept(notifies=True) as (keeper, agent, command):
        command.close()
        assert keeper.run() == 1
        assert keeper._process is not None
        keeper._process.kill()
        keeper._process.wait(60.0)
        assert agent.receive() == PeerGone()


def test_a_keeper_shows_that_it_lives_while_its_coordinator_does_not() -> None:
    """With a standby, agents leave a host that says nothing."""
    heard = {}
    for shows in (True, False):
        with kept(shows_life=shows) as (keeper, agent, _):
            keeper._tend()
            heard[shows] = agent.receive()
    assert heard == {True: KeepAlive(), False: None}


def test_a_coordinator_leads_its_job_once_it_has_made_a_record() -> None:
    """Until then, it may find that another one leads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    coordinator: PacketChannel[CoordinatorReport, CoordinatorCommand] = PacketChannel(
        theirs, CoordinatorCommand
    )
    with kept() as (keeper, _, _), closing(coordinator):
        keeper._coordinator = PacketChannel(ours, CoordinatorReport)
        coordinator.send(KeepAlive())
        keeper._hear_coordinator()
        assert not keeper.leads
        coordinator.send(RecordMade(KeepRecord(2, 1, b""), Attachment.holding(b"the record")))
        keeper._hear_coordinator()
        assert keeper.leads
        assert keeper.kept.record == b"the record"
        keeper._coordinator.close()
