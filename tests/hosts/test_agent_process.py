"""A host with a slow disk or a slow connection shows that it lives, hears others, and loses no output."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.agent.worker_output import ForwardedOutput
from lockstep.checkpoint import hand_over
from lockstep.checkpoint.checkpoint_files import Contents, load
from lockstep.checkpoint.hand_over import held_of, parts_of_checkpoint
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError, ConfigError
from lockstep.hosts import agent_process, shared_checkpoints
from lockstep.hosts.agent_process import AgentProcess, CoordinatorGone, LeftBehind
from lockstep.hosts.gathering import AwaitedHost, Stopped, gather_facts
from lockstep.hosts.host_listener import WITHOUT_KEY
from lockstep.hosts.shared_checkpoints import SharedCheckpoints
from lockstep.local_job.composition import LocalHost
from lockstep.protocol.admin import StopChannel, StopRequest
from lockstep.protocol.host import (
    MOST_QUEUED,
    BeginJob,
    CheckpointPart,
    CheckpointTaken,
    EndHost,
    HostEnded,
    HostFacts,
    KeepAlive,
    OutputWritten,
    Prepare,
    RemoteInstruction,
    RemoteReport,
    SendCheckpoint,
    TakeCheckpoint,
)
from lockstep.protocol.job_spec import Checkpoints, JobHost, JobSpec
from lockstep.protocol.rendezvous import Rejected
from lockstep.system import disk_work
from lockstep.system.clock import SystemClock
from lockstep.system.disk_work import DiskWork
from lockstep.system.event_loop import EventLoop
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.stream_channel import StreamChannel
from virtual_clock import VirtualClock

PATIENCE = 600.0
FACTS = HostFacts("n", "3.11.2", "x86_64", {}, 4, "", "10.0.0.1", 4000, 7)


def write(folder: Path, step: int, size: int = 1000) -> Path:
    job = {"replicas": 2, "seed": 3, "threads": 1}
    return Store(folder).write(Contents(step, {"job": job}, {"weights": np.full(size, step, np.float32)}))


@dataclass
class Disk:
    """A disk that does nothing until it is released."""

    waits: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def slow(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any) -> Any:
            self.waits.set()
            assert self.released.wait(PATIENCE)
            return act(*arguments)

        return wait


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.released.set()


def test_an_address_that_sends_nothing_is_perhaps_no_coordinator() -> None:
    channel: Any = SimpleNamespace(received=0)
    clock = VirtualClock()
    silence = agent_process._Silence(channel, clock)
    silence.check(5.0)
    clock.advance(6.0)
    with pytest.raises(CoordinatorGone, match="for 5 s: another program listens there, or"):
        silence.check(5.0)
    channel.received = 1
    silence.check(5.0)
    clock.advance(6.0)
    with pytest.raises(CoordinatorGone, match="the coordinator has been silent for 5 s"):
        silence.check(5.0)


def contact_of(said: list[str], lost: str) -> Any:
    """The contact of a host whose coordinator has sent one byte, and no instruction."""
    dialer = SimpleNamespace(take=lambda: None, close=lambda: None)
    process: Any = SimpleNamespace(
        channel=SimpleNamespace(received=1),
        clock=VirtualClock(),
        say=said.append,
        address=SimpleNamespace(address="10.0.0.1:7000", dial=lambda: dialer),
        engine=None,
        joined=True,
        workers=SimpleNamespace(need_coordinator=lambda: True),
    )
    session: Any = SimpleNamespace(lost=lost, rejected="", received=0, keep_alive=lambda: None)
    spec = JobSpec(target="a.py", run_dir=Path("run"))
    agent: Any = SimpleNamespace(spec=spec, lacks_workers=False, pauses=lambda now: False)
    offer: Any = None
    return contextlib.closing(agent_process._Contact(process, session, agent, None, 600.0, offer))


def test_a_coordinator_that_starts_slowly_is_not_said_to_be_silent() -> None:
    said = list[str]()
    with contact_of(said, "") as contact:
        # A note precedes the start of its process.
        contact.process.channel.received = 2
        for _ in range(6):
            contact.serve()
            contact.process.clock.advance(10.0)
        contact.process.channel.received, contact.session.received = 3, 1
        contact.serve()
        assert said == []
        contact.process.clock.advance(6.0)
        contact.serve()
    assert said == [
        "the coordinator has been silent for 6 s; training continues while no worker is lost, and ends on "
        "this host after 600 s without a coordinator"
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_a_host_without_a_coordinator_says_whether_it_trains(broken: bool) -> None:
    """Once if it trains; each minute if it waits, with what to do and the time that is left."""
    said, lost = list[str](), "the connection to the coordinator ended"
    with contact_of(said, lost) as contact:
        clock = contact.process.clock
        contact.serve()
        clock.advance(3.0)
        contact.agent.lacks_workers = broken
        for _ in range(8):
            contact.serve()
            clock.advance(10.0)
    if broken:
        what = f"{lost}; a worker is lost too, so training waits for the coordinator at 10.0.0.1:7000"
        assert [text.removeprefix(what) for text in said] == [
            f": run the command of its host, or the tasks there, again within {left} s, or the job ends on "
            "this host"
            for left in (597, 537)
        ]
    else:
        assert said == [
            f"{lost}; training continues while no worker is lost, and ends on this host after 600 s without "
            "a coordinator"
        ]


def test_only_the_standby_takes_over_a_job_of_hosts() -> None:
    """Its command, run again, does not."""
    said = list[str]()
    with contact_of(said, "lost") as contact:
        contact.agent.spec, contact.agent.lacks_workers = (
            replace(contact.agent.spec, standby="node2:7001"),
            True,
        )
        contact.standby = SimpleNamespace(replaces_command=True, start=lambda now: None)
        for replaces_command in (True, False):
            contact.standby.replaces_command = replaces_command
            contact.serve()
            contact.process.clock.advance(61.0)
            contact.serve()
    only, or_again = said[0], said[-1]
    assert "coordinator at 10.0.0.1:7000: node2:7001 takes over within " in only
    assert (
        ": node2:7001 takes over, or run the command of its host, or the tasks there, again within"
        in or_again
    )


def test_an_agent_over_ssh_whose_place_was_wanted_stays_with_a_standby_that_leads() -> None:
    """Until then, a first command that has started another agent here may lead."""
    with contact_of([], "") as contact:
        told = list[bool]()
        place = contact.agent_place = SimpleNamespace(
            is_wanted=True, replace_other_jobs=lambda: told.append(contact.session.leads)
        )
        contact.process.joined = False
        for contact._moved, contact.session.leads in ((False, True), (True, False)):
            contact._due = 0.0
            contact.serve()
            assert place.is_wanted
        contact.session.leads, contact._due = True, 0.0
        contact.serve()
        assert not place.is_wanted
        # Once, and only after a coordinator leads.
        assert told == [True]


class Processes:
    """The processes of a host, none."""

    def prepare(self) -> None:
        pass

    def reap(self, owned: frozenset[int]) -> None:
        pass

    def end(self, grace: float) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        pass


class Workers:
    """The workers of a host, which have written something when the job begins."""

    def facts(self, prepare: Prepare, address: str, port: int) -> HostFacts:
        return FACTS

    def begin(self, begin: BeginJob, output: ForwardedOutput) -> LocalHost:
        _, show, _ = output.open(1)
        for piece in range(PIECES):
            show(bytes([piece]) * 65536)
        processes: Any = Processes()
        return LocalHost(output, processes, processes)


PIECES = 100
"""More than a socket takes."""


class Listening:
    """Where the host listens."""

    host_and_port = ("10.0.0.1", 4000)
    credentials = WITHOUT_KEY

    def network(self, job: bytes) -> None:
        pass

    def close(self) -> None:
        pass


class Agent:
    """An agent in a thread, and the coordinator's end of its channel."""

    def __init__(self, folder: Path, **options: Any) -> None:
        ours, theirs = socket.socketpair()
        self.channel: StreamChannel[RemoteInstruction, RemoteReport] = StreamChannel(
            RemoteReport, ours.fileno(), ours.detach()
        )
        self.command, command = LocalChannel.pair()
        self.outcome: Future[int] = Future()
        self.options = options
        self._thread = threading.Thread(target=self._run, args=(theirs, command, folder), daemon=True)
        self._thread.start()

    def _run(self, connection: socket.socket, command: "StopChannel", folder: Path) -> None:
        with EventLoop() as loop:
            descriptor = connection.detach()
            channel: StreamChannel[RemoteReport, RemoteInstruction] = StreamChannel(
                RemoteInstruction, descriptor, descriptor, most_queued=MOST_QUEUED
            )
            listening: Any = Listening()
            workers: Any = Workers()
            clock = SystemClock()
            agent = AgentProcess(
                channel, command, loop, clock, lambda _: listening, workers, folder, **self.options
            )
            try:
                self.outcome.set_result(agent.run())
            except BaseException as error:
                self.outcome.set_exception(error)

    def send(self, message: RemoteInstruction) -> None:
        assert self.channel.send(message)

    def next(self) -> RemoteReport:
        """The next message."""
        with EventLoop() as loop:
            loop.watch(self.channel.fileno(), lambda: None)
            while (message := self.channel.receive()) is None:
                loop.turn(PATIENCE)
        assert isinstance(message, RemoteReport), message
        return message

    def answer(self) -> RemoteReport:
        """The next message but heartbeats."""
        while isinstance(message := self.next(), KeepAlive):
            pass
        return message

    def lives(self) -> None:
        """Wait for heartbeats that it sends from now on."""
        for _ in range(3):
            assert self.next() == KeepAlive()

    def end(self) -> BaseException | None:
        return self.outcome.exception(PATIENCE)


def test_an_agent_that_is_left_behind_leaves_the_coordinator_of_its_host_running(tmp_path: Path) -> None:
    """That may be the one which continues the job without this host. The agent joins it as a new host."""
    calls = list[str]()
    standby = SimpleNamespace(
        follow=lambda *_: calls.append("follow"),
        lacks=lambda: "",
        close=lambda: calls.append("close"),
        replaces_command=True,
        runs=True,
    )
    agent = Agent(tmp_path, standby=standby)
    agent.send(prepare(tmp_path))
    assert agent.answer() == FACTS
    spec = JobSpec(target="a.py", run_dir=tmp_path, threads=1, standby="127.0.0.1:7001")
    agent.send(BeginJob(spec, 1, JobHost("n", 1), 1))
    agent.send(Rejected("the job has continued without this host", again=True))
    assert isinstance(agent.end(), LeftBehind)
    assert calls == ["follow"]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life without a long wait."""
    for module in (agent_process, shared_checkpoints):
        monkeypatch.setattr(module, "ALIVE_EVERY", 0.01)


def prepare(folder: Path) -> Prepare:
    return Prepare(bytes(16), "", False, "train.py", False, (), "jax", "", {}, str(folder))


@pytest.mark.usefixtures("often")
def test_a_host_that_joins_again_waits_for_a_coordinator_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "SILENCE", 0.05)
    said, place = list[str](), SimpleNamespace(address="10.0.0.1:7000")
    first = Agent(tmp_path, address=place)
    assert "another program listens there" in str(first.end())
    agent = Agent(tmp_path, address=place, again=True, say=said.append)
    while not said:
        agent.lives()
    assert said == ["the coordinator has been silent for 0.05 s; this host waits for up to 600 s"]
    agent.send(prepare(tmp_path / "own"))
    assert isinstance(agent.answer(), HostFacts)
    agent.send(Rejected("no more"))
    assert str(agent.end()) == "no more"


@pytest.mark.usefixtures("often")
def test_before_the_job_begins_an_agent_leaves_a_coordinator_that_its_engine_has_replaced(
    tmp_path: Path,
) -> None:
    engine = SimpleNamespace(coordinator="10.0.0.1:7000")
    agent = Agent(tmp_path, address=SimpleNamespace(address="10.0.0.1:7000"), engine=engine)
    agent.send(prepare(tmp_path / "own"))
    assert isinstance(agent.answer(), HostFacts)
    engine.coordinator = "10.0.0.2:7000"
    assert isinstance(agent.end(), LeftBehind)


@pytest.mark.usefixtures("often")
def test_an_agent_lives_while_its_disk_is_slow(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "own", 2)
    source = write(tmp_path / "other", 4)
    agent = Agent(tmp_path)
    monkeypatch.setattr(shared_checkpoints, "newest_held", disk.slow(hand_over.newest_held))
    agent.send(prepare(tmp_path / "own"))
    assert disk.waits.wait(PATIENCE)
    agent.lives()
    disk.released.set()
    facts = agent.answer()
    assert isinstance(facts, HostFacts)
    assert facts.checkpoint is not None
    assert facts.checkpoint.step == 2
    writing = Disk()
    monkeypatch.setattr(hand_over, "sync", writing.slow(hand_over.sync))
    agent.send(TakeCheckpoint(held_of(source), 3))
    for file, part in parts_of_checkpoint(source, 1000):
        agent.send(CheckpointPart(file, part))
    agent.send(CheckpointPart(0, b""))
    assert writing.waits.wait(PATIENCE)
    agent.lives()
    writing.released.set()
    assert agent.answer() == CheckpointTaken()
    assert load(tmp_path / "own" / source.name).step == 4
    agent.send(Rejected("no more"))
    assert str(agent.end()) == "no more"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("how", ["stopped", "rejected", "left"])
def test_an_agent_ends_at_once_although_its_disk_hangs(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    agent = Agent(tmp_path)
    monkeypatch.setattr(shared_checkpoints, "newest_held", disk.slow(hand_over.newest_held))
    agent.send(prepare(tmp_path / "own"))
    assert disk.waits.wait(PATIENCE)
    if how == "stopped":
        agent.command.send(StopRequest(15))
    elif how == "rejected":
        agent.send(Rejected("no more"))
    else:
        agent.channel.close()
    ends = {"stopped": Stopped, "rejected": ConfigError, "left": CoordinatorGone}
    assert isinstance(agent.end(), ends[how])


@pytest.mark.usefixtures("often")
def test_an_agent_hears_of_a_stop_while_the_coordinator_takes_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "own", 2, size=5_000_000)
    agent = Agent(tmp_path)
    agent.send(prepare(tmp_path / "own"))
    assert isinstance(agent.answer(), HostFacts)
    agent.send(SendCheckpoint())
    assert isinstance(agent.answer(), CheckpointPart)
    agent.command.send(StopRequest(15))
    assert isinstance(agent.end(), Stopped)


def test_a_disk_that_never_answers_is_named(disk: Disk) -> None:
    class Later(SystemClock):
        def now(self) -> float:
            return super().now() + (disk_work.PATIENCE if disk.waits.is_set() else 0.0)

    with EventLoop() as loop:
        work = DiskWork(disk.slow(int), "reading it", loop, Later())
        assert disk.waits.wait(PATIENCE)
        assert work.is_over
        with pytest.raises(CheckpointError, match="reading it takes more than 3600 s"):
            work.result()


@pytest.mark.usefixtures("often")
def test_a_coordinator_lives_and_can_be_stopped_while_its_disk_hangs(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "other", 4)
    own: LocalChannel[RemoteInstruction, RemoteReport]
    own, agent = LocalChannel.pair()
    user, command = LocalChannel.pair()
    for file, part in parts_of_checkpoint(source, 1000):
        agent.send(CheckpointPart(file, part))
    agent.send(CheckpointPart(0, b""))
    monkeypatch.setattr(hand_over, "sync", disk.slow(hand_over.sync))
    facts = {0: FACTS, 1: msgspec.structs.replace(FACTS, checkpoint=held_of(source))}
    lives = []

    def stop_after_signs_of_life() -> None:
        while (message := agent.receive()) is not None:
            lives.append(message == KeepAlive() and disk.waits.is_set())
            if sum(lives) == 3:
                user.send(StopRequest(15))

    with EventLoop() as loop:
        loop.watch(agent.fileno(), stop_after_signs_of_life)
        shared = SharedCheckpoints(
            Checkpoints(tmp_path / "own", 1, None, 3),
            True,
            {1: AwaitedHost("node1", own, lambda: "its agent has ended")},
            facts,
            command,
            loop,
            SystemClock(),
            lambda note: None,
        )
        chosen = shared.choose()
        assert chosen is not None
        with pytest.raises(Stopped):
            shared.hand_over(chosen)
    assert [path.name for path in (tmp_path / "own").glob("*")] == []


class Jumps(SystemClock):
    """A clock on which a minute passes with each look."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 60.0
        return self._now


def test_a_host_that_reads_a_big_checkpoint_is_waited_for() -> None:
    own: LocalChannel[RemoteInstruction, RemoteReport]
    own, agent = LocalChannel.pair()
    _, command = LocalChannel.pair()
    signs = [*[KeepAlive()] * 20, FACTS]
    notes = []

    def say(note: str) -> None:
        notes.append(note)
        agent.send(signs.pop(0))

    with EventLoop() as loop:
        hosts = {1: AwaitedHost("node1", own, lambda: "its agent has ended")}
        found = gather_facts(
            hosts, prepare(Path()), command, loop=loop, clock=Jumps(), patience=600.0, say=say
        )
    assert found == {1: FACTS}
    assert len(notes) == 21


def begun(folder: Path) -> Agent:
    """An agent whose job has begun and is to end; its coordinator has not read the output yet."""
    agent = Agent(folder)
    agent.send(msgspec.structs.replace(prepare(folder), checkpoints=""))
    assert agent.answer() == FACTS
    spec = JobSpec(
        target="a.py",
        workers=2,
        replicas=2,
        threads=1,
        run_dir=folder,
        hosts=(JobHost("a", 1), JobHost("b", 1)),
    )
    agent.send(BeginJob(spec, 1, spec.hosts[1], 1))
    agent.send(EndHost(0.0, status=3))
    return agent


def test_all_output_arrives_over_a_slow_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_process, "SILENCE", PATIENCE)
    agent = begun(tmp_path)
    with pytest.raises(TimeoutError):
        # For longer than the agent would need to end without its output.
        agent.outcome.result(2.0)
    for piece in range(PIECES):
        assert agent.answer() == OutputWritten(1, 1, bytes([piece]) * 65536)
    assert agent.answer() == HostEnded()
    assert agent.outcome.result(PATIENCE) == 3


def test_a_connection_that_does_not_move_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_process, "SILENCE", 0.1)
    assert begun(tmp_path).outcome.result(PATIENCE) == 3
