"""Commands find the jobs of their user, and report the replies."""

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

import pytest
from played_jobs import Jobs, OwnSockets

from lockstep.cli.main import main
from lockstep.coordinator.admin_client import running_jobs, send, table, wait_until_gone
from lockstep.coordinator.admin_socket import address
from lockstep.errors import ConfigError
from lockstep.protocol.admin import (
    MAX_PACKET,
    Refused,
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
    """Run a script that prints a line when it is ready; kill it at the end."""
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
    assert young.requests == [StatusRequest()]


def test_a_job_that_does_not_answer_is_named(jobs: Jobs) -> None:
    silent = jobs.play_silent()
    assert running_jobs(patience=0.01) == ((), (silent.name,))


def test_a_job_with_a_full_backlog_is_named(jobs: Jobs) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as paused, contextlib.ExitStack() as clients:
        paused.bind(address(jobs.name))
        paused.listen(0)
        crowd(jobs.name, clients)
        assert running_jobs(patience=0.01) == ((), (jobs.name,))
        with pytest.raises(ConfigError, match=rf"{jobs.name} has not replied in 0.01 seconds; try again$"):
            send(jobs.name, StatusRequest(), patience=0.01)


def crowd(name: str, clients: contextlib.ExitStack) -> None:
    """Connect until the backlog is full."""
    with contextlib.suppress(BlockingIOError):
        while True:
            client = clients.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.setblocking(False)
            client.connect(address(name))


def test_a_prefix_of_the_name_selects_a_job(jobs: Jobs) -> None:
    job, other = jobs.play("-a"), jobs.play("-ab")
    assert send(job.admin.name, ScaleRequest(2)) == job.status
    assert send(f"{jobs.name}-ab", ScaleRequest(3)) == other.status
    other.close()
    assert send(jobs.name, ScaleRequest(4)) == job.status
    assert (job.requests, other.requests) == ([ScaleRequest(2), ScaleRequest(4)], [ScaleRequest(3)])


def test_an_ambiguous_or_unknown_name_is_refused(jobs: Jobs) -> None:
    first, second = jobs.play("-a"), jobs.play("-b")
    with pytest.raises(
        ConfigError, match=f"^'{jobs.name}-' is ambiguous: {jobs.name}-a or {jobs.name}-b; give more"
    ):
        send(f"{jobs.name}-", StopRequest())
    for wrong in ("", "x"):
        expected = f"^there is no job '{wrong}'; running jobs: {jobs.name}-a, {jobs.name}-b$"
        with pytest.raises(ConfigError, match=expected):
            send(wrong, StopRequest())
    assert first.requests == second.requests == []


def test_a_request_without_a_running_job_is_refused(jobs: Jobs) -> None:
    assert running_jobs() == ((), ())
    with pytest.raises(ConfigError, match=f"^there is no job '{jobs.name}'; no job is running$"):
        send(jobs.name, StopRequest())


def test_the_error_without_a_reply_says_how_to_kill_the_job(jobs: Jobs) -> None:
    admin = jobs.play_silent()
    advice = f"try again, or kill the whole job with kill -KILL {os.getpid()}"
    with pytest.raises(ConfigError, match=f"^{admin.name} has not replied in 0.01 seconds; {advice}$"):
        send(admin.name, StopRequest(), patience=0.01)


@pytest.mark.parametrize("packet", [b"hello", b'"' + b"x" * MAX_PACKET + b'"'], ids=["garbage", "long"])
def test_a_reply_of_another_version_is_named(jobs: Jobs, packet: bytes) -> None:
    with (
        replying(jobs.name, [packet]),
        pytest.raises(ConfigError, match=r"cannot read .* use the version of Lockstep"),
    ):
        send(jobs.name, StatusRequest())


def test_a_rejected_client_tries_again(jobs: Jobs) -> None:
    reply = Refused("no")
    with replying(jobs.name, [b"", b"", encode(reply)]):
        assert send(jobs.name, StatusRequest()) == reply


def test_a_job_that_ends_without_a_reply_has_just_ended(jobs: Jobs) -> None:
    with replying(jobs.name, [b""]), pytest.raises(ConfigError, match=f"^{jobs.name} has just ended$"):
        send(jobs.name, StatusRequest())


@contextlib.contextmanager
def replying(name: str, packets: list[bytes]) -> Iterator[None]:
    """Reply to each request with the next packet, unless that is empty; stop after the last one."""

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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("code", [LISTENS, FULL], ids=["accepts", "accepts no more"])
def test_another_users_process_with_the_name_of_a_job_is_ignored(jobs: Jobs, code: str) -> None:
    with process(code, "65534", address(jobs.name).hex()):
        assert running_jobs() == ((), ())
        wait_until_gone(jobs.name)
        with pytest.raises(ConfigError, match="no job is running"):
            send(jobs.name, StopRequest())
        assert jobs.play().admin.name == f"{jobs.name}-2"


def test_waiting_ends_with_the_job(jobs: Jobs) -> None:
    job = jobs.play()
    send(job.admin.name, StopRequest())
    wait_until_gone(job.admin.name)
    assert running_jobs() == ((), ())


def test_waiting_ends_though_another_job_takes_the_name(jobs: Jobs) -> None:
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
        Status("train-2", "b.py", 2, "/runs/b", 0.0, 16, (0,), (), 1, "", "1 lost"),
    )
    assert table(running, 1192.5) == [
        "JOB      PROCESS  WORKERS            REPLICAS  SINCE        DOING  FOLDER   SO FAR",
        "a        1        2 of 3 +1 joining  4         3 min 12 s   fit 1  /runs/a",
        "train-2  2        1 of 1             16        19 min 52 s         /runs/b  1 lost",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0 s"), (59.9, "1 min 0 s"), (7384, "2 h 3 min"), (90000, "1 d 1 h")],
)
def test_start_times(seconds: float, shown: str) -> None:
    status = Status("a", "a.py", 1, "/a", -seconds, 1, (0,), (), 1, "")
    assert f"  {shown}  " in table([status], 0.0)[1]


def test_list(jobs: Jobs, command: Command) -> None:
    assert command("list") == Done(0, ["no job is running"], [])
    jobs.play("-a")
    listed = command("list")
    assert (listed.status, listed.err) == (0, [])
    assert [line.split()[:5] for line in listed.out] == [
        ["JOB", "PROCESS", "WORKERS", "REPLICAS", "SINCE"],
        [f"{jobs.name}-a", "7", "2", "of", "3"],
    ]


def test_list_names_jobs_that_do_not_answer(
    jobs: Jobs, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.coordinator.admin_client.running_jobs", partial(running_jobs, 0.01))
    admin = jobs.play_silent()
    expected = f"lockstep: {admin.name} does not respond; it may be paused or about to end"
    assert command("list") == Done(0, [], [expected])


def test_scale(jobs: Jobs, command: Command) -> None:
    job = jobs.play()
    done = command("scale", job.admin.name, "4")
    expected = f"{job.admin.name}: workers now 2, wanted 4; run lockstep list to see its progress"
    assert done == Done(0, [expected], [])
    refused = command("scale", job.admin.name, "5")
    assert refused == Done(2, [], ["lockstep: ConfigError: 5 workers are more than the 4 replicas"])
    assert command("scale", job.admin.name, "0").status == 2
    assert job.requests == [ScaleRequest(4), ScaleRequest(5)]


def test_stop(jobs: Jobs, command: Command) -> None:
    job = jobs.play()
    done = command("stop", jobs.name)
    assert done == Done(
        0,
        [
            f"stopping {job.admin.name}; Ctrl-C stops only this wait",
            f"{job.admin.name} has ended",
        ],
        [],
    )
    assert job.requests == [StopRequest()]
    assert command("stop", jobs.name).status == 2
