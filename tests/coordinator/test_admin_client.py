"""Commands find the jobs of their user, and say what they answer."""

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.coordinator.admin_client import running_jobs, send, table, wait_until_gone
from lockstep.coordinator.admin_socket import AdminSocket, address
from lockstep.errors import ConfigError
from lockstep.protocol.admin import (
    MAX_PACKET,
    AdminRequest,
    Refused,
    Reply,
    ScaleRequest,
    Status,
    StatusRequest,
    StopRequest,
    encode,
)

LISTENS = """
import os, signal, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(bytes.fromhex(sys.argv[2]))
listener.listen()
print("listens", flush=True)
signal.pause()
"""
FULL = LISTENS.replace(
    "listener.listen()",
    """listener.listen(0)
waits = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
waits.connect(listener.getsockname())""",
)
TAKES_OVER = """
import signal, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.listen()
print("listens", flush=True)
signal.pause()
"""
numbers = itertools.count()


class PlayedJob:
    """A job whose agent is a thread; it ends when it is asked to."""

    def __init__(self, name: str, since: float) -> None:
        self.door = AdminSocket.open(name, self.answer)
        self.orders: list[AdminRequest] = []
        self.since = since
        self.wanted = 3
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def status(self) -> Status:
        name = self.door.name
        return Status(name, "a.py", 7, f"/runs/{name}", self.since, 4, (0, 2), (), self.wanted, "fit 1")

    def answer(self, order: AdminRequest) -> Reply:
        self.orders.append(order)
        match order:
            case ScaleRequest(workers) if workers > 4:
                return Refused(f"{workers} workers are more than the 4 replicas")
            case ScaleRequest(workers):
                self.wanted = workers
            case StopRequest():
                self._wake.close()
        return self.status

    def _run(self) -> None:
        while self._woken not in select.select([self.door, self._woken], [], [])[0]:
            self.door.serve()
        self.door.close()

    def close(self) -> None:
        self._wake.close()
        self._thread.join()
        self._woken.close()


class Jobs:
    def __init__(self, name: str) -> None:
        self.name = name
        self.opened: list[PlayedJob | AdminSocket] = []

    def play(self, suffix: str = "", since: float = 0.0) -> PlayedJob:
        job = PlayedJob(self.name + suffix, since)
        self.opened.append(job)
        return job

    def play_silent(self, suffix: str = "") -> AdminSocket:
        """Open an admin socket that no process serves."""
        door = AdminSocket.open(self.name + suffix, pytest.fail)
        self.opened.append(door)
        return door

    def close(self) -> None:
        for job in self.opened:
            job.close()


class OwnSockets:
    """The system's list, without the jobs of others: this user may run some while the tests do."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def read_bytes(self) -> bytes:
        lines = Path("/proc/net/unix").read_bytes().split(b"\n")
        return b"\n".join(line for line in lines if self._name in line)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    made = Jobs(f"jobs-{os.getpid()}-{next(numbers)}")
    monkeypatch.setattr("lockstep.coordinator.admin_client._SOCKETS", OwnSockets(made.name))
    yield made
    made.close()


@dataclass
class Done:
    status: int
    out: list[str]
    err: list[str]


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return Done(status, said.out.splitlines(), said.err.splitlines())

    return call


@contextlib.contextmanager
def process(script: str, *arguments: str, inherits: int | None = None) -> Iterator[None]:
    """Run a script that says in one line that it is ready, and kill it at the end."""
    line = [sys.executable, "-c", script, *arguments]
    descriptors = () if inherits is None else (inherits,)
    with subprocess.Popen(line, stdout=subprocess.PIPE, pass_fds=descriptors) as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        try:
            yield
        finally:
            running.send_signal(signal.SIGKILL)


def test_all_jobs_are_found_the_oldest_first(jobs: Jobs) -> None:
    young, old = jobs.play("-a", since=2.0), jobs.play("-b", since=1.0)
    assert running_jobs() == ((old.status, young.status), ())
    assert young.orders == [StatusRequest()]


def test_a_job_that_does_not_answer_is_named(jobs: Jobs) -> None:
    silent = jobs.play_silent()
    assert running_jobs(patience=0.01) == ((), (silent.name,))


def test_a_job_that_nobody_can_reach_any_more_is_named(jobs: Jobs) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as paused, contextlib.ExitStack() as clients:
        paused.bind(address(jobs.name))
        paused.listen(0)
        crowd(jobs.name, clients)
        assert running_jobs(patience=0.01) == ((), (jobs.name,))
        with pytest.raises(ConfigError, match=rf"{jobs.name} has not replied in 0.01 seconds; try again$"):
            send(jobs.name, StatusRequest(), patience=0.01)


def crowd(name: str, clients: contextlib.ExitStack) -> None:
    """Connect until no other client can."""
    with contextlib.suppress(BlockingIOError):
        while True:
            client = clients.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.setblocking(False)
            client.connect(address(name))


def test_an_order_is_sent_by_the_name_or_its_beginning(jobs: Jobs) -> None:
    job, other = jobs.play("-a"), jobs.play("-ab")
    assert send(job.door.name, ScaleRequest(2)) == job.status
    assert send(f"{jobs.name}-ab", ScaleRequest(3)) == other.status
    other.close()
    assert send(jobs.name, ScaleRequest(4)) == job.status
    assert (job.orders, other.orders) == ([ScaleRequest(2), ScaleRequest(4)], [ScaleRequest(3)])


def test_a_name_must_mean_one_job(jobs: Jobs) -> None:
    first, second = jobs.play("-a"), jobs.play("-b")
    with pytest.raises(
        ConfigError, match=f"^'{jobs.name}-' is ambiguous: {jobs.name}-a or {jobs.name}-b; give more"
    ):
        send(f"{jobs.name}-", StopRequest())
    for nobody in ("", "x"):
        expected = f"^there is no job '{nobody}'; running jobs: {jobs.name}-a, {jobs.name}-b$"
        with pytest.raises(ConfigError, match=expected):
            send(nobody, StopRequest())
    assert first.orders == second.orders == []


def test_nothing_can_be_sent_to_nobody(jobs: Jobs) -> None:
    assert running_jobs() == ((), ())
    with pytest.raises(ConfigError, match=f"^there is no job '{jobs.name}'; no job is running$"):
        send(jobs.name, StopRequest())


def test_a_job_that_does_not_answer_can_be_killed(jobs: Jobs) -> None:
    door = jobs.play_silent()
    advice = f"try again, or kill the whole job with kill -KILL {os.getpid()}"
    with pytest.raises(ConfigError, match=f"^{door.name} has not replied in 0.01 seconds; {advice}$"):
        send(door.name, StopRequest(), patience=0.01)


@pytest.mark.parametrize("packet", [b"hello", b'"' + b"x" * MAX_PACKET + b'"'], ids=["garbage", "long"])
def test_an_answer_of_another_version_is_said_to_be_one(jobs: Jobs, packet: bytes) -> None:
    with (
        replying(jobs.name, [packet]),
        pytest.raises(ConfigError, match=r"cannot read .* use the version of Lockstep"),
    ):
        send(jobs.name, StatusRequest())


def test_whoever_is_turned_away_tries_again(jobs: Jobs) -> None:
    reply = Refused("no")
    with replying(jobs.name, [b"", b"", encode(reply)]):
        assert send(jobs.name, StatusRequest()) == reply


def test_a_job_that_ends_meanwhile_has_ended(jobs: Jobs) -> None:
    with replying(jobs.name, [b""]), pytest.raises(ConfigError, match=f"^{jobs.name} has just ended$"):
        send(jobs.name, StatusRequest())


@contextlib.contextmanager
def replying(name: str, packets: list[bytes]) -> Iterator[None]:
    """Answer each request with the next packet, if it is not empty, and none after the last one."""

    def reply() -> None:
        rest = iter(packets)
        packet = next(rest, None)
        while packet is not None:
            connection, _ = listener.accept()
            with connection:
                if not connection.recv(MAX_PACKET):
                    continue
                if packet:
                    connection.send(packet)
                packet = next(rest, None)
                if packet is None:
                    listener.close()

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address(name))
    listener.listen()
    thread = threading.Thread(target=reply)
    thread.start()
    yield
    thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("code", [LISTENS, FULL], ids=["accepts", "accepts no more"])
def test_whoever_takes_a_name_of_this_user_is_nobody(jobs: Jobs, code: str) -> None:
    with process(code, "65534", address(jobs.name).hex()):
        assert running_jobs() == ((), ())
        wait_until_gone(jobs.name)
        with pytest.raises(ConfigError, match="no job is running"):
            send(jobs.name, StopRequest())
        assert jobs.play().door.name == f"{jobs.name}-2"


def test_waiting_ends_with_the_job(jobs: Jobs) -> None:
    job = jobs.play()
    send(job.door.name, StopRequest())
    wait_until_gone(job.door.name)
    assert running_jobs() == ((), ())


def test_another_job_of_the_same_name_is_not_waited_for(jobs: Jobs) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address(jobs.name))
        listener.listen()
        waiter = threading.Thread(target=wait_until_gone, args=(jobs.name,), daemon=True)
        waiter.start()
        select.select([listener], [], [])
        with process(TAKES_OVER, str(listener.fileno()), inherits=listener.fileno()):
            waiter.join(300)
        assert not waiter.is_alive()


def test_the_table() -> None:
    running = (
        Status("a", "a.py", 1, "/runs/a", 1000.0, 4, (0, 2), (3,), 3, "fit 1"),
        Status("train-2", "b.py", 2, "/runs/b", 0.0, 16, (0,), (), 1, ""),
    )
    assert table(running, 1192.5) == [
        "JOB      WORKERS            REPLICAS  SINCE    DOING  FOLDER",
        "a        2 of 3 +1 joining  4         3m 12s   fit 1  /runs/a",
        "train-2  1 of 1             16        19m 52s         /runs/b",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0s"), (59.9, "59s"), (60, "1m 0s"), (3600, "1h 0m"), (7384, "2h 3m"), (90000, "1d 1h")],
)
def test_since_when(seconds: float, shown: str) -> None:
    status = Status("a", "a.py", 1, "/a", -seconds, 1, (0,), (), 1, "")
    assert f"  {shown}  " in table([status], 0.0)[1]


def test_list(jobs: Jobs, command: Command) -> None:
    assert command("list") == Done(0, ["no job is running"], [])
    jobs.play("-a")
    listed = command("list")
    assert (listed.status, listed.err) == (0, [])
    assert [line.split()[:4] for line in listed.out] == [
        ["JOB", "WORKERS", "REPLICAS", "SINCE"],
        [f"{jobs.name}-a", "2", "of", "3"],
    ]


def test_list_names_the_silent(jobs: Jobs, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.coordinator.admin_client.running_jobs", partial(running_jobs, 0.01))
    door = jobs.play_silent()
    expected = f"lockstep: {door.name} does not respond; it may be paused or about to end"
    assert command("list") == Done(0, [], [expected])


def test_scale(jobs: Jobs, command: Command) -> None:
    job = jobs.play()
    done = command("scale", job.door.name, "4")
    expected = f"{job.door.name}: workers now 2, wanted 4; run lockstep list to see its progress"
    assert done == Done(0, [expected], [])
    refused = command("scale", job.door.name, "5")
    assert refused == Done(2, [], ["lockstep: 5 workers are more than the 4 replicas"])
    assert command("scale", job.door.name, "0").status == 2
    assert job.orders == [ScaleRequest(4), ScaleRequest(5)]


def test_stop(jobs: Jobs, command: Command) -> None:
    job = jobs.play()
    done = command("stop", jobs.name)
    assert done == Done(
        0,
        [
            f"stopping {job.door.name}; Ctrl-C stops only this wait",
            f"{job.door.name} has ended",
        ],
        [],
    )
    assert job.orders == [StopRequest()]
    assert command("stop", jobs.name).status == 2
