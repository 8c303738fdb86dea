"""What keeps the connections of a job leaves no agent without a word, unless the job is to be taken over."""

import sys
from pathlib import Path

import pytest

from lockstep.hosts.keeper import ConnectedHost, Keeper
from lockstep.observability.console import Console
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.channel import Channel, PeerGone
from lockstep.protocol.host import EndHost, HostReport, Instruction, KeepRecord, ShowNote
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.transport.local_channel import LocalChannel


def test_a_job_that_no_coordinator_can_continue_ends_on_all_hosts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Otherwise, its agents would wait for another coordinator until the limit."""
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
            notifies=True,
        )
        assert keeper.run() == 2
    assert keeper._process is not None
    assert keeper._process.wait(60.0) == 2
    assert "lockstep: UnfitError: no other coordinator can take over: " in capfd.readouterr().err
    received = [ends[1].receive() for _ in range(4)]
    notes = [one.text for one in received if isinstance(one, ShowNote)]
    assert notes[0].startswith("the job ends: UnfitError: no other coordinator can take over: ")
    assert EndHost(0.0, status=2) in received, received
    for end in (*ends, *commands):
        end.close()


def test_a_job_whose_command_is_lost_waits_on_other_hosts_to_be_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agents are not told to end; the command, when it is started again, finds them."""
    # A coordinator that says nothing.
    quiet = tmp_path / "quiet"
    quiet.write_text("#!/bin/sh\nexec sleep 600\n")
    quiet.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(quiet))
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
            notifies=True,
        )
        commands[1].close()
        assert keeper.run() == 1
    assert keeper._process is not None
    keeper._process.kill()
    keeper._process.wait(60.0)
    assert ends[1].receive() == PeerGone()
    for end in (*ends, *commands):
        end.close()
