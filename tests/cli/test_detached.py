"""`lockstep run --detach` and `lockstep attach`, on real jobs and a real terminal."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.admin_client import running_jobs
from lockstep.system.locks import try_lock

LOCKSTEP = [sys.executable, "-m", "lockstep"]
ENDS = """
signal.signal(signal.SIGUSR1, lambda number, _: sys.exit(7))
print('works', flush=True)
announce('worker')
stay()
"""
Gone = Callable[[list[int], float], bool]


@pytest.fixture
def name(request: pytest.FixtureRequest, lockstep: Any) -> Iterator[str]:
    """A job name that is unique for this user; the job is killed at the end."""
    made = f"detached-{os.getpid()}-{request.node.name.replace('/', '-')[:40]}"
    yield made
    with contextlib.suppress(ProcessLookupError, ValueError):
        os.kill(command_of(lockstep.folder / made), signal.SIGKILL)


def command_of(folder: Path) -> int:
    """Return the process id of the command of the job in a folder."""
    (pid,) = [status.pid for status in running_jobs(60.0).running if status.run_dir == str(folder)]
    return pid


def detach(lockstep: Any, name: str, text: str = ENDS, *options: str) -> list[int]:
    """Start a detached job; return the pidfds of its workers."""
    running = lockstep.start("--detach", "-n", "2", *options, lockstep.script(text), run=name)
    done = running.end()
    assert (done.status, done.err.splitlines()[-1]) == (0, f"lockstep: {said(name)}")
    return running.announced(2)["worker"]


def said(name: str) -> str:
    return (
        f"{name} runs without this terminal: lockstep attach {name} shows its output, lockstep stop {name} "
        "ends it"
    )


def attach(name: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Show the output of a job that has ended."""
    command = [*LOCKSTEP, "attach", name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@contextlib.contextmanager
def attached(name: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Follow a job, and go on when the output of its worker has appeared."""
    command = [*LOCKSTEP, "attach", name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True) as follower:
        assert follower.stdout is not None
        try:
            assert "works\n" in iter(follower.stdout.readline, "")
            yield follower
        finally:
            follower.kill()


def test_a_job_outlives_its_terminal(lockstep: Any, is_gone: Gone, name: str) -> None:
    words = [*LOCKSTEP, "run", "--detach", "--run-dir", name, "-n", "2", lockstep.script(ENDS)]
    leader, terminal = os.openpty()
    variables = {**os.environ, "ANNOUNCEMENTS": str(lockstep.folder / "announcements")}
    shell = subprocess.Popen(
        ["setsid", "--ctty", "/bin/sh", "-c", '"$@"; echo status $?; exec sleep 1000', "sh", *words],
        cwd=lockstep.folder,
        env=variables,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    while b"status " not in shown:
        shown += os.read(leader, 4096)
    assert f"lockstep: {said(name)}\r\nstatus 0".encode() in shown
    # The kernel sends SIGHUP to the session of the terminal.
    os.close(leader)
    assert shell.wait(600) == -signal.SIGHUP
    workers = lockstep.running(shell, name).announced(2)["worker"]
    command = os.pidfd_open(command_of(lockstep.folder / name))
    with attached(name, lockstep.folder) as follower:
        follower.send_signal(signal.SIGINT)
        _, notes = follower.communicate(timeout=600)
    assert follower.returncode == 130
    assert notes == (
        f"lockstep: {name} continues; lockstep attach {name} shows its output again, lockstep stop {name} "
        "ends it\n"
    )
    with attached(name, lockstep.folder) as follower:
        for worker in workers:
            signal.pidfd_send_signal(worker, signal.SIGUSR1)
        rest, _ = follower.communicate(timeout=600)
    assert follower.returncode == 7
    assert re.search(r"^lockstep: worker [01] exited with status 7$", rest, re.MULTILINE), rest
    assert is_gone([*workers, command], 300)
    # In the morning, the job has ended.
    done = attach(name, lockstep.folder)
    assert (done.returncode, done.stderr) == (7, "")
    # On a busy machine, notes may stand between what the worker has printed and what the follower saw.
    assert done.stdout.endswith(rest)
    assert "works\n" in done.stdout.removesuffix(rest)


@pytest.mark.ci
def test_a_job_whose_processes_were_killed_says_so(lockstep: Any, is_gone: Gone, name: str) -> None:
    workers = detach(lockstep, name)
    command = command_of(lockstep.folder / name)
    processes = [command, *map(int, Path(f"/proc/{command}/task/{command}/children").read_text().split())]
    with attached(name, lockstep.folder) as follower:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                os.kill(process, number)
        _, notes = follower.communicate(timeout=600)
    killed = f"lockstep: the end of {name} is not recorded: its processes were killed\n"
    assert (follower.returncode, notes) == (1, killed)
    assert is_gone(workers, 300)


@pytest.mark.ci
def test_a_job_that_starts_again_stays_what_it_is(lockstep: Any, is_gone: Gone, name: str) -> None:
    workers = detach(lockstep, name, ENDS, "--restart-job", "1")
    command = command_of(lockstep.folder / name)
    with attached(name, lockstep.folder) as follower:
        for worker in workers:
            signal.pidfd_send_signal(worker, signal.SIGUSR1)
        assert follower.stdout is not None
        assert "works\n" in iter(follower.stdout.readline, "")
        again = lockstep.running(None, name).announced(2)["worker"]
        assert command_of(lockstep.folder / name) == command
        assert subprocess.run([*LOCKSTEP, "stop", name], stdout=subprocess.DEVNULL).returncode == 0
        rest, _ = follower.communicate(timeout=600)
    assert follower.returncode == 143
    assert rest.splitlines()[-2:] == [
        "lockstep: stopped by SIGTERM",
        "lockstep: until then: started again 1 time, and all figures are from the last start",
    ]
    assert is_gone([*workers, *again], 300)


def test_a_job_that_ends_at_once_gives_its_status(lockstep: Any, name: str) -> None:
    # The job cannot begin: the folder of checkpoints is that of another job.
    (lockstep.folder / "saved").write_text("a file")
    refused = lockstep.run("--detach", "--checkpoint", "saved", lockstep.script(ENDS), run=name)
    assert refused.status == 2
    assert not (lockstep.folder / name).exists()
    done = lockstep.run("--detach", "-n", "1", lockstep.script("print('said'); sys.exit(3)"), run=name)
    # It may have begun.
    assert done.status in (0, 3)
    shown = attach(name, lockstep.folder)
    assert shown.returncode == 3
    assert "said\n" in shown.stdout


def test_only_detached_jobs_can_be_attached(lockstep: Any, name: str) -> None:
    assert lockstep.run("-n", "1", lockstep.script(""), run=name).status == 0
    done = attach(name, lockstep.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"lockstep: ConfigError: {name} was not started with --detach on this machine; lockstep logs {name} "
        "shows the output of its workers\n"
    )


def test_attach_shows_the_end_of_a_long_output(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(20_000)]
    (tmp_path / "output.log").write_text("".join(lines))
    (tmp_path / "events.jsonl").write_text(
        '{"time":1,"event":"job"}\n{"time":2,"event":"finished","status":0}\n'
    )
    done = attach(str(tmp_path), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.splitlines(keepends=True)
    assert shown == lines[-len(shown) :]
    assert 60_000 < len(done.stdout) <= 65_536


@pytest.mark.parametrize(
    ("command", "log", "status"), [(["attach"], "output.log", 5), (["logs", "-f"], "worker-0.log", 0)]
)
def test_a_job_in_another_container_is_followed(
    tmp_path: Path, command: list[str], log: str, status: int
) -> None:
    # No job has its name here, but its folder is locked.
    lock = try_lock(tmp_path / "lock")
    assert lock is not None
    (tmp_path / log).write_text("begun\n")
    (tmp_path / "events.jsonl").write_text('{"time":1,"event":"job"}\n')
    words = [*LOCKSTEP, *command, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline().endswith("begun\n")
        with (tmp_path / log).open("a") as output:
            output.write("more\n")
        assert follower.stdout.readline().endswith("more\n")
        with (tmp_path / "events.jsonl").open("a") as events:
            events.write('{"time":2,"event":"finished","status":5}\n')
        os.close(lock)
        assert follower.communicate(timeout=600) == ("", None)
    assert follower.returncode == status
