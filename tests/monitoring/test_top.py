"""`lockstep top` on real jobs, in a terminal and elsewhere."""

import contextlib
import csv
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from lockstep.cli.main import cli
from lockstep.coordinator.admin_client import send
from lockstep.errors import LockstepError
from lockstep.protocol.admin import Refused, StackReply, StackRequest

from .terminals import Terminal

STAYS = """
import os, signal
from lockstep.worker import job
file = os.open(os.environ["ANNOUNCEMENTS"], os.O_WRONLY)
os.write(file, b"x")
def wait_here():
    while True:
        signal.pause()
wait_here()
"""
TOP = [sys.executable, "-m", "lockstep", "top"]


class LongJob:
    """A job of two workers that stay until they are told to end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"top-{os.getpid()}-{folder.name}"
        (folder / "stays.py").write_text(STAYS)
        os.mkfifo(folder / "announcements")
        pipe = os.open(folder / "announcements", os.O_RDWR)
        command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--run-dir", self.name]
        self.process = subprocess.Popen(
            [*command, "--replicas", "4", "stays.py"],
            cwd=folder,
            env=os.environ | {"ANNOUNCEMENTS": str(folder / "announcements")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        read = b""
        while len(read) < 2:
            read += os.read(pipe, 2)
        os.close(pipe)

    def coordinator(self) -> int:
        """The process id of coordinator and agent, the only child of the command."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=300)
        return self.process.returncode


@pytest.fixture
def long_job(tmp_path: Path) -> Iterator[LongJob]:
    running = LongJob(tmp_path)
    yield running
    running.end()


@pytest.fixture
def in_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start a command in a new terminal."""
    opened: list[Terminal] = []

    def start(*command: str, size: tuple[int, int] = (100, 30)) -> Terminal:
        opened.append(Terminal(command, tmp_path, os.environ, size))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def top(*arguments: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=600, **more)


def test_keys_on_a_real_job(long_job: LongJob, in_terminal: Callable[..., Terminal]) -> None:
    # Any beginning of the name that no other job has.
    terminal = in_terminal(*TOP, long_job.name[:-1], size=(80, 30))
    terminal.wait_for(r"2 of 2 workers")
    terminal.wait_for(r"0 +\d+ +running the script")
    terminal.type("w1\r")
    terminal.wait_for(r"worker 1 is here \(most recent call first\):")
    terminal.wait_for(r"wait_here +.*stays.py:8")
    terminal.forget()
    terminal.type("+")
    terminal.wait_for(r"no worker can\s+join or leave;")
    # As a shell would, after Ctrl-Z and fg.
    terminal.type("\x1a")
    terminal.reported("stopped restored\n")
    terminal.forget()
    terminal.foreground()
    terminal.wait_for("2 of 2 workers")
    terminal.resize(60, 12)
    terminal.forget()
    terminal.type("s")
    terminal.wait_for(r"lockstep\s+stop\s+does\?\s+y/n")
    terminal.type("y")
    terminal.reported("ended 0 restored\n")
    assert long_job.process.wait(300) == 143
    # After the picture, in the terminal as it was before.
    after = terminal.raw.rpartition("\x1b[?1049l")[2]
    assert f"{long_job.name} ended with status 143: stopped by SIGTERM" in after


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("q", 0, marks=pytest.mark.slow),
        ("\x03", 0),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
    ids=["q", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_the_terminal_is_as_before_however_it_ends(
    in_terminal: Callable[..., Terminal], end: str | signal.Signals, status: int
) -> None:
    terminal = in_terminal(*TOP)
    terminal.wait_for("q quit")
    if isinstance(end, str):
        terminal.type(end)
    else:
        os.kill(terminal.pid, end)
    terminal.reported(f"ended {status} restored\n")
    assert terminal.raw.count("\x1b[?1049h") == terminal.raw.count("\x1b[?1049l") == 1
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")


@pytest.mark.ci
def test_elsewhere_it_prints_once(long_job: LongJob) -> None:
    done = top(long_job.name)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{long_job.name}  stays.py  2 of 2 workers  since ")
    assert [line.split()[0] for line in lines[2:5]] == ["WORKER", "0", "1"]
    assert "\x1b" not in done.stdout
    # An earlier end of the reader is no error.
    with subprocess.Popen([*TOP, long_job.name, "--json", "-i", "0.1"], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        first, second = (json.loads(running.stdout.readline()) for _ in range(2))
        running.stdout.close()
        assert running.wait(300) == 0
    assert first["time"] < second["time"]
    assert [row["worker"] for row in first["workers"]] == [0, 1]


@pytest.mark.ci
def test_the_end_of_the_job_ends_lines(long_job: LongJob) -> None:
    command = [*TOP, long_job.name, "--csv", "-i", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        heads = running.stdout.readline()
        running.stdout.readline()
        assert long_job.end() == 143
        rest = running.stdout.read()
        assert running.wait(300) == 0
    rows = list(csv.DictReader(io.StringIO(heads + rest)))
    assert {row["worker"] for row in rows} == {"0", "1"}
    # Then its folder has the same figures.
    done = top(str(long_job.folder / long_job.name))
    assert done.returncode == 0
    assert done.stdout.splitlines()[1] == f"{long_job.name} ended with status 143: stopped by SIGTERM"


@pytest.mark.ci
def test_a_stopped_coordinator_is_named_with_the_data_so_far(long_job: LongJob) -> None:
    os.kill(long_job.coordinator(), signal.SIGSTOP)
    try:
        done = top(long_job.name)
    finally:
        os.kill(long_job.coordinator(), signal.SIGCONT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no answer from the coordinator since " in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if line[:1].isdigit()] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-job"], "'no-such-job' is neither a running job nor the folder of a run"),
        (["-i", "0"], "-i 0: give a number of seconds from 0.1 to 86400"),
        (["--csv", "--json"], "give --csv or --json, not both"),
    ],
)
def test_mistakes_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises((LockstepError, click.UsageError)) as raised:
        cli.main(["top", *arguments], standalone_mode=False)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def stays(reply: Any) -> bool:
    """Whether a worker is in the line where it stays."""
    return (
        isinstance(reply, StackReply)
        and reply.frames[:1] != ()
        and reply.frames[0].endswith('stays.py", line 3 in here')
    )


@pytest.mark.slow
def test_workers_of_other_hosts_have_a_load_and_a_stack(tmp_path: Path) -> None:
    # A worker that answers on each host, until this test has what it needs.
    (tmp_path / "stays.py").write_text("import time\ndef here():\n    time.sleep(600)\nhere()\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    name, lockstep = f"top-{os.getpid()}-hosts", [sys.executable, "-m", "lockstep"]
    run = ["run", "--listen", address, "--workers-here", "1", "-n", "2", "--plain", "--run-dir", name]
    quiet: Any = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        subprocess.Popen([*lockstep, *run, "stays.py"], **quiet) as job,
        subprocess.Popen([*lockstep, "agent", "--join", address, "--plain"], **quiet) as agent,
    ):
        measured: dict[int, str] = {}
        deadline = time.monotonic() + 300
        while len(measured) < 2:
            assert time.monotonic() < deadline
            with contextlib.suppress(FileNotFoundError):
                for line in (tmp_path / name / "measurements.jsonl").read_text().splitlines(keepends=True):
                    load = json.loads(line) if line.endswith("\n") else {"workers": ()}
                    measured |= {one["worker"]: load["host"] for one in load["workers"]}
        # A worker may be measured before it is where it stays.
        stacks: list[Any] = [None, None]
        while not all(map(stays, stacks)):
            assert time.monotonic() < deadline, stacks
            stacks = [send(name, StackRequest(worker), patience=300.0) for worker in (0, 1)]
        refused = send(name, StackRequest(7))
        job.terminate()
        assert (job.wait(300), agent.wait(300)) == (143, 143)
    assert measured == {0: "127.0.0.1", 1: "127.0.0.1 (2)"}
    assert refused == Refused("no worker 7 is running")
