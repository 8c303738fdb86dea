"""What the processes of a job with a standby do, one at a time: who may lead, who listens, who only lives."""

import dataclasses
import errno
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from lockstep.checkpoint.object_store import Conflict, StoreLease
from lockstep.cli import task_role
from lockstep.coordinator import admin_socket
from lockstep.coordinator.admin_client import call_job
from lockstep.coordinator.admin_socket import take_name
from lockstep.coordinator.job_record import JobRecord, encode_record
from lockstep.errors import CheckpointError, ConfigError, LockstepError, NetworkError, UnfitError
from lockstep.hosts import agent_command, agent_server, coordinator_process, gate, job_on_hosts, standby
from lockstep.hosts.agent_command import AgentOptions
from lockstep.hosts.agent_process import CoordinatorGone, LeftOut
from lockstep.hosts.agent_server import AgentServer
from lockstep.hosts.coordinator_process import CoordinatorProcess
from lockstep.hosts.gate import Gate
from lockstep.hosts.gathering import AwaitedHost, Stopped
from lockstep.hosts.host_listener import WITHOUT_KEY, HostListener
from lockstep.hosts.job_on_hosts import JobOnHosts, ThisHost
from lockstep.hosts.joining import CoordinatorAddress
from lockstep.hosts.leadership import Leadership
from lockstep.hosts.roster import OpenRoster
from lockstep.hosts.standby import Standby, is_led_at
from lockstep.hosts.where import Listen
from lockstep.observability.console import Console
from lockstep.protocol.admin import (
    Refused,
    Reply,
    ScaleRequest,
    Status,
    StatusRequest,
    StopChannel,
    StopRequest,
)
from lockstep.protocol.channel import Attachment, Channel
from lockstep.protocol.coordinator import Coordinate, CoordinatorCommand, CoordinatorReport
from lockstep.protocol.host import (
    LEFT_OUT,
    BeginJob,
    EndHost,
    HostEnded,
    HostFacts,
    KeepRecord,
    Prepare,
    RemoteInstruction,
    RemoteReport,
    ShowNote,
)
from lockstep.protocol.job_spec import Checkpoints, JobHost, JobLimits, JobSpec
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.system.clock import SystemClock
from lockstep.system.environment import KEY_FILE
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.transport.keys import JobKey
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import PacketChannel

SAVED = Checkpoints(Path("/c"), 1, None, 2, store=StoreLease("s3://bucket/job", "job"))
SPEC = JobSpec(target="a.py", threads=1, run_dir=Path("run"), standby="10.0.0.2:7001", checkpoints=SAVED)
PREPARE = Prepare(b"job", "", True, "a.py", False, (), None, "", {})


class OtherJob:
    """A store that names the coordinator of another job."""

    def read(self, name: str) -> tuple[bytes, str]:
        return msgspec.json.encode(Leadership("another", "w", "10.0.0.9:7000", 1)), "tag"


def no_library(lease: StoreLease, retry_seconds: float) -> Any:
    raise UnfitError("no obstore")


def record_of(spec: JobSpec) -> bytes:
    """The record of a job before its first step."""
    return encode_record(JobRecord(spec, State.of(SPEC.view, TimeLimits(), JobSize.of(1, 1, 1)), ()))


@pytest.mark.parametrize(
    ("term", "opens", "leaves"),
    [(0, no_library, False), (1, no_library, True), (1, lambda *_: OtherJob(), False)],
    ids=["a job that has not begun", "a host that cannot lead", "another job"],
)
def test_a_coordinator_that_cannot_lead_leaves_a_job_that_another_one_may_continue(
    monkeypatch: pytest.MonkeyPatch, term: int, opens: Callable[[StoreLease], Any], leaves: bool
) -> None:
    """Otherwise, it ends the job on all hosts."""
    monkeypatch.setattr(coordinator_process, "open_leased", opens)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper: PacketChannel[CoordinatorCommand, CoordinatorReport] = PacketChannel(ours, CoordinatorReport)
    channel: PacketChannel[CoordinatorReport, CoordinatorCommand] = PacketChannel(theirs, CoordinatorCommand)
    content = Attachment.holding(record_of(SPEC))
    kept = KeepRecord(term, 1, b"")
    keeper.send(Coordinate(kept, content, term + 1, 0, "run", False, "here:1", None, None, None, None))
    with EventLoop() as loop, closing(keeper), closing(channel):
        process = CoordinatorProcess(channel, loop)
        with pytest.raises(LockstepError) as caught:
            process.run()
        assert process.leaves(caught.value) is leaves


@pytest.mark.parametrize(
    ("led_at", "lives", "refused"),
    [
        ("10.0.0.2:7001", True, "the job continues at 10.0.0.2:7001, without this command"),
        ("10.0.0.2:7001", False, "another job has begun"),
        ("10.0.0.9:7000", True, "another job has begun .*, and its coordinator is at 10.0.0.9:7000, so"),
        ("", True, "another job has begun with the same --checkpoint, so this one ends"),
    ],
)
def test_a_command_begins_no_job_that_its_standby_has_just_taken_over(
    monkeypatch: pytest.MonkeyPatch, led_at: str, lives: bool, refused: str
) -> None:
    """It was lost a short time ago, and is run again. The store names the standby once that leads."""
    content = msgspec.json.encode(Leadership("another", "w", led_at, 2))
    # A job that is not refused begins, and finds that the object has changed once more.
    store = Mock(read=Mock(return_value=(content, "tag")), replace=Mock(side_effect=Conflict))
    asked: list[str] = []

    def is_led(address: str, encrypted: bool) -> bool:
        asked.append(address)
        return lives

    monkeypatch.setattr(coordinator_process, "is_led_at", is_led)
    monkeypatch.setattr(coordinator_process, "open_leased", lambda *_: store)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper: PacketChannel[CoordinatorCommand, CoordinatorReport] = PacketChannel(ours, CoordinatorReport)
    channel: PacketChannel[CoordinatorReport, CoordinatorCommand] = PacketChannel(theirs, CoordinatorCommand)
    kept = KeepRecord(0, 1, b"")
    record = Attachment.holding(record_of(SPEC))
    keeper.send(Coordinate(kept, record, 1, 0, "run", False, "", None, None, None, None))
    with EventLoop() as loop, closing(keeper), closing(channel):
        process = CoordinatorProcess(channel, loop)
        with pytest.raises(LockstepError, match=refused) as caught:
            process.run()
        assert not process.leaves(caught.value)
    is_standby = led_at == SPEC.standby
    assert asked == [SPEC.standby] * is_standby
    assert store.replace.called is not (is_standby and lives)


@pytest.fixture
def waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]]]:
    """A coordinator that may wait for its store, and the channel of its keeper."""
    monkeypatch.setattr(coordinator_process, "ALIVE_EVERY", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper: PacketChannel[CoordinatorCommand, CoordinatorReport] = PacketChannel(ours, CoordinatorReport)
    channel: PacketChannel[CoordinatorReport, CoordinatorCommand] = PacketChannel(theirs, CoordinatorCommand)
    with EventLoop() as loop, closing(keeper), closing(channel):
        yield CoordinatorProcess(channel, loop, _patience=600.0), keeper


def bounded(show_life: Callable[[], None]) -> Callable[[], None]:
    """Return the function, which fails if a wait for the store calls it without end."""
    calls = itertools.count()

    def show() -> None:
        assert next(calls) < 3000, "the coordinator does not hear the keeper"
        show_life()

    return show


@pytest.mark.parametrize(
    ("signals", "grace", "limit", "number"),
    [
        ([signal.SIGINT], 0.0, math.inf, signal.SIGINT),
        ([signal.SIGTERM, signal.SIGINT], 600.0, math.inf, signal.SIGINT),
        ([signal.SIGINT], 600.0, 600.0, signal.SIGINT),
        ([], 600.0, 0.0, signal.SIGTERM),
    ],
    ids=["one signal", "two signals", "a signal to a stopped job", "the limit of a stopped job"],
)
def test_a_wait_for_the_store_ends_if_the_user_stops_the_job(
    waiting: tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]],
    signals: Sequence[int],
    grace: float,
    limit: float,
    number: int,
) -> None:
    process, keeper = waiting
    process._grace = grace
    answers = threading.Event()
    for each in signals:
        keeper.send(StopRequest(each))
    with pytest.raises(Stopped) as stopped:
        process._persist(answers.wait, bounded(lambda: None), limit)
    answers.set()
    assert stopped.value.signal == number


def test_the_waits_for_the_store_of_a_job_that_is_stopped_share_one_grace_period(
    waiting: tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]],
) -> None:
    """Otherwise, the command kills the coordinator, and the standby continues a job that the user stopped."""
    process, keeper = waiting
    process._grace = 600.0
    answers = threading.Event()
    process._postponed.append((StopRequest(signal.SIGINT, 1.0), process._clock.now() - 599.0))
    with pytest.raises(Stopped) as stopped:
        process._persist(answers.wait, bounded(lambda: None))
    assert stopped.value.signal == signal.SIGINT
    process._postponed[0] = StopRequest(signal.SIGINT), process._clock.now()
    keeper.send(StopRequest(signal.SIGTERM))
    with pytest.raises(Stopped) as stopped:
        process._persist(answers.wait, bounded(lambda: None))
    answers.set()
    assert stopped.value.signal == signal.SIGTERM


def test_a_stop_of_another_terminal_ends_a_wait_for_the_store_within_the_grace_period(
    waiting: tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """If it is repeated, or follows a signal, it does not end the job at once."""
    process, _ = waiting
    process._grace = 0.1
    answers = threading.Event()
    with pytest.raises(Stopped) as stopped:
        process._persist(answers.wait, lambda: StopRequest(signal.SIGTERM))
    assert stopped.value.signal == signal.SIGTERM
    assert capfd.readouterr().err.count("stopping (SIGTERM): waiting up to 0.1 s for the object store") == 1
    assert process._requested is not None
    process._grace, process._requested = 600.0, None
    process._postponed.append((StopRequest(signal.SIGINT), process._clock.now()))
    asks = itertools.count()

    def show_life() -> StopRequest:
        if next(asks) > 3:
            answers.set()
        return StopRequest(signal.SIGTERM)

    assert process._persist(answers.wait, show_life)
    assert process._requested is None


def test_other_terminals_are_answered_before_it_is_known_who_leads_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator of a standby over ssh has no terminal: `lockstep stop` is the only way to stop it."""
    answers, replies = threading.Event(), list[Reply | None]()
    monkeypatch.setattr(coordinator_process, "ALIVE_EVERY", 0.01)
    away = Mock(read=Mock(side_effect=lambda name: answers.wait()))
    monkeypatch.setattr(coordinator_process, "open_leased", lambda *_: away)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper: PacketChannel[CoordinatorCommand, CoordinatorReport] = PacketChannel(ours, CoordinatorReport)
    channel: PacketChannel[CoordinatorReport, CoordinatorCommand] = PacketChannel(theirs, CoordinatorCommand)
    spec = dataclasses.replace(SPEC, limits=JobLimits(grace=0.5))
    content = Attachment.holding(record_of(spec))
    kept = KeepRecord(1, 1, b"")
    name = f"waits-{os.getpid()}"
    with EventLoop() as loop, closing(keeper), closing(channel), take_name(name) as listener:
        terminals = Attachment.copy_of(listener.fileno())
        keeper.send(Coordinate(kept, content, 2, 0, "run", False, "here:1", terminals, None, None, None))
        process = CoordinatorProcess(channel, loop)

        def ask() -> None:
            try:
                for request in (StatusRequest(), ScaleRequest(2), StopRequest()):
                    replies.append(call_job(name, request, 60.0))
            except TimeoutError:
                keeper.close()
                raise

        asks = threading.Thread(target=ask)
        asks.start()
        with pytest.raises(Stopped):
            process.run()
        asks.join()
        assert process._requests is not None
        process._requests.close()
    answers.set()
    status, refused, stopped = replies
    assert isinstance(status, Status)
    assert (status.job, status.script, status.workers) == (name, "a.py", (0,))
    assert isinstance(refused, Refused)
    assert "waits for the object store" in refused.reason
    assert isinstance(stopped, Status)


def test_a_coordinator_without_descriptors_for_terminals_goes_on(
    waiting: tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It only loses `lockstep stop` and the like."""
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(admin_socket, "select", Mock(epoll=Mock(side_effect=full)))
    monkeypatch.setattr(CoordinatorProcess, "_coordinate", lambda process, *_: 7)
    process, keeper = waiting
    spec = JobSpec(target="a.py", threads=1, run_dir=Path("run"))
    content, kept = Attachment.holding(record_of(spec)), KeepRecord(0, 1, b"")
    with take_name(f"full-{os.getpid()}") as listener:
        terminals = Attachment.copy_of(listener.fileno())
        keeper.send(Coordinate(kept, content, 1, 0, "run", False, "here:1", terminals, None, None, None))
        assert process.run() == 7
    assert process._requests is None
    assert "Too many open files" in str(process._unanswered)


def test_a_stop_that_has_waited_for_the_store_has_the_rest_of_the_grace_period(
    waiting: tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]],
) -> None:
    process, keeper = waiting
    commands: tuple[StopChannel, StopChannel] = LocalChannel.pair()
    process._postponed.append((StopRequest(signal.SIGINT, 2.0), process._clock.now() - 17.0))
    keeper.send(StopRequest(signal.SIGTERM))
    process._hear(None, commands[0])  # type: ignore[arg-type]
    first, second = commands[1].receive(), commands[1].receive()
    assert isinstance(first, StopRequest)
    assert first.signal == signal.SIGINT
    assert first.waited >= 19.0
    assert second == StopRequest(signal.SIGTERM)
    for end in commands:
        end.close()


def test_a_stop_of_another_terminal_that_has_waited_for_the_store_has_the_rest_of_the_grace_period(
    waiting: tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]],
) -> None:
    process, _ = waiting
    process._turned, process._requested = (
        True,
        (StopRequest(signal.SIGTERM, 2.0), process._clock.now() - 17.0),
    )
    coordinator = Mock()
    process._tend(coordinator, Mock())
    (stop,) = coordinator.stop_for_terminal.call_args.args
    assert stop.signal == signal.SIGTERM
    assert stop.waited >= 19.0
    assert process._requested is None


def test_each_error_of_the_store_is_told_once(
    waiting: tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Errors that alternate would print a line at each try otherwise."""
    process, _ = waiting
    monkeypatch.setattr(coordinator_process, "_PAUSE", 0.0)
    errors = iter(("no connection", "no answer", "no connection", "no answer"))

    def act() -> str:
        for why in errors:
            raise CheckpointError(why)
        return "answered"

    assert process._persist(act, lambda: None) == "answered"
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == ["lockstep: no connection", "lockstep: no answer"]


def test_what_the_keeper_says_during_a_wait_for_the_store_is_not_lost(
    waiting: tuple[CoordinatorProcess, Channel[CoordinatorCommand, CoordinatorReport]],
) -> None:
    """The store answers within `--grace`: the job then stops as always, with a checkpoint."""
    process, keeper = waiting
    process._grace = 600.0
    answers = threading.Event()
    said: list[CoordinatorCommand] = [ShowNote("a note"), StopRequest(signal.SIGINT)]
    for message in said:
        keeper.send(message)

    def show_life() -> None:
        if process._postponed:
            answers.set()

    assert process._persist(answers.wait, bounded(show_life))
    assert [message for message, _ in process._postponed] == said


@pytest.mark.parametrize("role", ["agent", "gathers", "waits for its store", "leads"])
def test_only_a_coordinator_that_leads_the_job_passes_for_one(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """An agent may listen at the address of the standby, and a standby that is cut off tries to lead."""
    monkeypatch.delenv(KEY_FILE, raising=False)
    monkeypatch.setattr(agent_server, "ALIVE_EVERY", 0.01)
    clock, answers, leads = SystemClock(), list[bool](), role == "leads"
    monkeypatch.setattr(standby, "_ANSWER", 60.0 if leads else 0.5)
    with EventLoop() as loop:
        server = AgentServer(WITHOUT_KEY, lambda agent, offer: "", print, loop=loop, clock=clock)
        if role in ("waits for its store", "leads"):
            server.pass_on(lambda agent, offer: "", lambda agent: None, lambda: leads)
        agents = server if role != "agent" else None
        opened = HostListener.open("127.0.0.1:0", WITHOUT_KEY, print, loop=loop, clock=clock, agents=agents)
        with closing(opened) as listener, closing(server):
            address = listener.listener.address
            asks = threading.Thread(target=lambda: answers.append(is_led_at(address, encrypted=False)))
            asks.start()
            while asks.is_alive():
                loop.turn(0.01)
    assert answers == [leads]


def test_an_agent_waits_for_the_upload_of_its_coordinator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator has closed its channel, and ends when the upload does."""
    monkeypatch.setattr(standby, "_FAREWELL", 0.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        made = Standby()
        made._process, made._channel = process, PacketChannel(ours, StopRequest)
        waits = threading.Thread(target=made.see_off)
        waits.start()
        process.communicate(b"\n")
        waits.join()
    assert process.returncode == 0
    made.close()
    assert capsys.readouterr().err == ""


def test_the_name_of_the_standby_may_be_unknown_when_the_job_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[str] = []

    def resolve(host: str, port: int) -> Any:
        if host not in known:
            raise NetworkError("unknown")
        return socket.AF_INET, ("127.0.0.1", port)

    monkeypatch.setattr(standby, "resolve_host", resolve)
    begin = BeginJob(SPEC, 1, JobHost("node2", 1), 1)
    made = Standby()
    made.follow(PREPARE, begin, "127.0.0.1")
    assert not made.is_here()
    known.append("10.0.0.2")
    assert made.is_here()
    assert made.lacks() == ""


def test_a_standby_listens_only_where_other_hosts_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a host often leads to 127.0.1.1 on this host. Its coordinator would be alone."""
    resolved = socket.AF_INET, ("127.0.1.1", 7001)
    monkeypatch.setattr(standby, "resolve_host", lambda host, port: resolved)
    begin = BeginJob(SPEC, 1, JobHost("node2", 1), 1)
    made = Standby()
    made.follow(PREPARE, begin, "10.0.0.2")
    assert "at 10.0.0.2:7001, which is 127.0.1.1 here, where no other host can connect" in made.lacks()
    made.start(100.0)
    assert not made.runs


@pytest.mark.parametrize("leads", [False, True])
def test_the_command_of_hosts_does_not_begin_a_job_that_its_standby_continues(
    monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    monkeypatch.setattr(standby, "is_led_at", lambda address, encrypted: leads)
    with pytest.raises(ConfigError, match="is an address of this host"):
        task_role._refuse_with_led_standby("127.0.0.1:7001", encrypted=True)
    expected = pytest.raises(ConfigError, match=r"continues at 192\.0\.2\.1:7001") if leads else nullcontext()
    with expected:
        task_role._refuse_with_led_standby("192.0.2.1:7001", encrypted=True)


def test_the_first_host_comes_back_as_the_standby_of_the_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own port stays free for a coordinator, and the other port of the cluster is that of its agent."""
    joined: list[AgentOptions] = []
    monkeypatch.setattr(standby, "is_led_at", lambda address, encrypted: True)
    monkeypatch.setattr(agent_command, "join_and_run", joined.append)
    for where in (Listen(3, "node1:7000", task="worker 0"), Listen(3, "node1:7000")):
        with pytest.raises(SystemExit):
            task_role.follow_standby(where, {"standby": "10.0.0.2:7001", "plain": False})
    of_task, by_command = joined
    assert (of_task.coordinator, of_task.others, of_task.leads_at) == (
        "10.0.0.2:7001",
        ("node1:7000",),
        "node1:7000",
    )
    assert (of_task.port, by_command.port) == (7001, 0)
    begin = BeginJob(SPEC, 3, JobHost("node1", 1), 1)
    made = Standby(of_task.leads_at)
    made.follow(PREPARE, begin, "10.0.0.1")
    assert made.address == "node1:7000"


@pytest.mark.parametrize(("leads_at", "error"), [("", UnfitError), ("127.0.0.1:1", LeftOut)])
def test_a_first_host_that_finds_no_coordinator_may_be_started_again(
    leads_at: str, error: type[Exception]
) -> None:
    """It then leads the job. In Kubernetes, another end of its pod would be the end of the job."""
    commands: tuple[StopChannel, StopChannel] = LocalChannel.pair()
    options = AgentOptions("127.0.0.1:2", patience=0.0, leads_at=leads_at)
    with EventLoop() as loop:
        address = CoordinatorAddress(options.coordinator, WITHOUT_KEY, loop)
        with pytest.raises(error, match="did not answer in 0 s"):
            agent_command._connect(options, address, commands[0], loop, SystemClock(), Standby())
    for end in commands:
        end.close()


def test_a_host_that_was_left_behind_starts_the_coordinator_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has left it behind may end before it leads the job. No agent runs the job here then."""
    started: list[float] = []
    made = Standby()
    monkeypatch.setattr(made, "start", started.append)
    commands: tuple[StopChannel, StopChannel] = LocalChannel.pair()
    options = AgentOptions("127.0.0.1:2", patience=0.0)
    for silence in (3600.0, -1.0):
        monkeypatch.setattr(agent_command, "SILENCE", silence)
        with EventLoop() as loop:
            address = CoordinatorAddress(options.coordinator, WITHOUT_KEY, loop)
            with pytest.raises(UnfitError):
                agent_command._connect(options, address, commands[0], loop, SystemClock(), made)
        assert bool(started) == (silence < 0.0)
    for end in commands:
        end.close()


def test_a_host_that_joins_the_standby_anew_keeps_the_key_and_the_run_folder() -> None:
    """The coordinator of the standby sends neither, and the hosts of ssh have no key file."""
    made = Standby()
    assert not made.replaces_command
    prepare = msgspec.structs.replace(PREPARE, key="the key", folder="/home")
    made.follow(prepare, BeginJob(SPEC, 1, JobHost("node2", 1), 1), "127.0.0.1")
    without_key = msgspec.structs.replace(prepare, key="")
    theirs = dataclasses.replace(SPEC, run_dir=Path("run-standby"))
    made.follow(without_key, BeginJob(theirs, 3, JobHost("node2", 1), 1), "127.0.0.1")
    assert (made.prepare.key, made.begin.spec.run_dir, made.begin.host) == ("the key", Path("run"), 3)
    assert made.replaces_command
    other = msgspec.structs.replace(without_key, job=b"other", folder="")
    made.follow(other, BeginJob(theirs, 3, JobHost("node2", 1), 1), "127.0.0.1")
    assert (made.prepare.key, made.begin.spec.run_dir) == ("", Path("run-standby"))
    assert not made.replaces_command
    made.follow(
        other, BeginJob(dataclasses.replace(SPEC, standby=""), 1, JobHost("node2", 1), 1), "127.0.0.1"
    )
    assert not made.is_here()
    assert made.lacks() == ""


@pytest.mark.parametrize("is_full", [False, True])
def test_a_coordinator_over_ssh_that_cannot_lead_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Its port is in use. Its log says so, and also if its folder is another one than expected."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "job/run-standby"
    if is_full:
        # Also root cannot create a folder in a file.
        folder.parent.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        spec = dataclasses.replace(SPEC, run_dir=tmp_path / "job/run", standby=place)
        prepare = msgspec.structs.replace(PREPARE, key=JobKey.generate().text)
        made = Standby()
        made.follow(prepare, BeginJob(spec, 1, JobHost("node2", 1), 1), "127.0.0.1")
        made.start(100.0)
        made.see_off()
        assert not made.runs
    if is_full:
        (folder,) = tmp_path.glob("lockstep-run-*")
    said = RunPaths(folder).output.read_text()
    assert f"{place} cannot be used" in said or "in use" in said, said
    assert (f"the run folder of this host is {folder} instead" in said) == is_full
    assert not RunPaths(folder).lock.exists()


@pytest.mark.parametrize("ends", [False, True])
def test_a_host_that_may_not_join_again_keeps_the_coordinator_of_the_others(ends: bool) -> None:
    """It waits until that has ended, or until it is stopped itself."""
    commands: tuple[StopChannel, StopChannel] = LocalChannel.pair()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        made = Standby()
        made._process, made._channel = process, PacketChannel(ours, StopRequest)
        waits = threading.Thread(target=made.outlast, args=(commands[0],))
        waits.start()
        if ends:
            theirs.close()
            process.communicate(b"\n")
        else:
            commands[1].send(StopRequest(15))
        waits.join()
        assert made.runs != ends
        made.close()
    for end in commands:
        end.close()


def test_an_agent_that_may_not_join_ends_after_the_coordinator_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Standby, "outlast", lambda self, command: calls.append("outlast"))
    monkeypatch.setattr(Standby, "close", lambda self: calls.append("close"))
    monkeypatch.setattr(agent_command, "run_in_job_process", lambda serve, grace, lifeline: serve(None))
    for error, expected in ((LeftOut("full"), ["outlast", "close"]), (CoordinatorGone("lost"), ["close"])):
        calls.clear()
        assert agent_command._run(Mock(side_effect=error)) == LEFT_OUT
        assert calls == expected


def test_a_job_that_cannot_begin_on_its_first_host_ends_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have begun it. Their agents would wait for a coordinator that takes over."""
    facts = HostFacts("n", "3.11.2", "x86_64", {}, 4, "", "10.0.0.1", 4000, 7)
    monkeypatch.setattr(JobOnHosts, "_compare_hosts", lambda _: {0: facts, 1: facts})
    monkeypatch.setattr(job_on_hosts, "start_here", Mock(side_effect=UnfitError("no process starts")))
    agents: tuple[Channel[RemoteInstruction, RemoteReport], Channel[RemoteReport, RemoteInstruction]]
    agents = LocalChannel.pair()
    commands: tuple[StopChannel, StopChannel] = LocalChannel.pair()
    listener: Any = None
    spec = dataclasses.replace(
        SPEC, hosts=(JobHost("node1", 1), JobHost("node2", 1)), workers=2, replicas=2, checkpoints=None
    )
    assert agents[1].send(HostEnded())
    with EventLoop() as loop, pytest.raises(UnfitError, match="no process starts"):
        JobOnHosts(
            spec,
            PREPARE,
            commands[0],
            console=Console(Sink(1), Sink(2), "chief", 0),
            loop=loop,
            here=ThisHost(0, listener, facts),
            others={1: AwaitedHost("node2", agents[0], str)},
        ).run()
    assert isinstance(agents[1].receive(), BeginJob)
    assert agents[1].receive() == EndHost(0.0, status=LEFT_OUT)
    for end in (*agents, *commands):
        end.close()


@pytest.fixture
def standby_gate() -> Any:
    """The gate of a standby, which waits for agents that run a job."""
    commands: tuple[StopChannel, StopChannel] = LocalChannel.pair()
    console = Console(Sink(1), Sink(2), "all", 0)
    with EventLoop() as loop:
        made = Gate(lambda: OpenRoster(1, waits=True), WITHOUT_KEY, commands[0], console, loop)
        with closing(made):
            made.listen("127.0.0.1:0")
            yield made
    for end in commands:
        end.close()


def test_a_standby_begins_no_job(standby_gate: Gate) -> None:
    with pytest.raises(UnfitError, match="no agent that runs the job is connected"):
        standby_gate.run(SPEC, begins=False)


def test_a_standby_waits_on_if_the_agents_that_run_the_job_leave(
    standby_gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ["an agent"]

    def wait(missing: str) -> float:
        raise UnfitError(f"waits for {missing}")

    monkeypatch.setattr(gate, "running_jobs", lambda agents: list(there))
    monkeypatch.setattr(gate, "wait_for_hosts", lambda *_: there.clear())
    with pytest.raises(UnfitError, match="waits for "):
        standby_gate.gather(wait)


@pytest.mark.parametrize("reason", ["a file", "another run"])
def test_a_standby_over_ssh_that_cannot_use_the_folder_beside_that_of_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    job = dataclasses.replace(SPEC, run_dir=tmp_path / "run")
    beside = tmp_path / "run-standby"
    assert standby._run_folder_beside(job, said.append) == beside
    assert said == []
    if reason == "a file":
        # The other folder is locked by now.
        job, beside = dataclasses.replace(SPEC, run_dir=tmp_path / "file"), tmp_path / "file-standby"
        beside.write_text("")
    folder = standby._run_folder_beside(job, said.append)
    assert folder.parent == Path("runs")
    (note,) = said
    assert str(beside) in note
    assert note.endswith(f"; the run folder of this host is {folder} instead")


def test_a_standby_whose_disk_is_full_takes_the_job_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have no room for its run folder. The job continues, and a note names the folder of its logs."""
    said: list[str] = []
    full, temporary = tmp_path / "full", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    free = dataclasses.replace(SPEC, run_dir=tmp_path / "free/run")
    assert standby._run_folder(free, said.append) == free.run_dir
    # Also root cannot create a folder in a file.
    full.write_text("")
    job = dataclasses.replace(SPEC, run_dir=full / "run")
    folder = standby._run_folder(job, said.append)
    assert folder.parent == temporary
    (note,) = said
    assert note.startswith(f"the run's folder {full / 'run'} cannot be used: Not a directory; ")
    assert note.endswith(f"the run folder of this host is {folder} instead")
    # The disk of temporary files is full too.
    no_room = ConfigError("the run's folder cannot be used: No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(standby, "_claimed", Mock(side_effect=no_room))
        with pytest.raises(ConfigError, match="cannot take the job over: the run's folder"):
            standby._run_folder(job, said.append)
    assert list(temporary.iterdir()) == [folder]
    monkeypatch.setattr(tempfile, "tempdir", str(full))
    with pytest.raises(ConfigError, match="cannot take the job over: the run's folder"):
        standby._run_folder(job, said.append)
