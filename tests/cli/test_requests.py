"""`lockstep list`, `lockstep scale` and `lockstep stop` from another terminal, on real jobs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gone = Callable[[list[int], float], bool]

STAYS = "announce('worker'); stay()"


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments], capture_output=True, text=True, timeout=600
    )


def listed(name: str) -> list[str]:
    """Return the lines of `lockstep list` about one job; other jobs may run on this machine."""
    done = command("list")
    assert done.returncode == 0
    return [line for line in done.stdout.splitlines() if line.split()[0] == name]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A job name that is unique for this user."""
    return f"requests-{os.getpid()}-{request.node.name.replace('/', '-')[:40]}"


def begin(lockstep: Any, name: str, *options: str, text: str = STAYS) -> tuple[Any, list[int]]:
    running = lockstep.start("-n", "2", *options, lockstep.script(text), run=name)
    return running, running.announced(2)["worker"]


def test_a_job_is_listed_until_it_ends(lockstep: Any, is_gone: Gone, name: str) -> None:
    running, workers = begin(lockstep, name, "--replicas", "4")
    (line,) = listed(name)
    assert line.split()[1:6] == [str(running.process.pid), "2", "of", "2", "4"]
    assert line.endswith(str(Path(lockstep.folder / name)))
    running.process.send_signal(signal.SIGTERM)
    assert running.end().status == 143
    assert is_gone(workers, 0)
    assert listed(name) == []


def test_stop_ends_a_job_as_sigterm_does(lockstep: Any, is_gone: Gone, name: str) -> None:
    running, workers = begin(lockstep, name)
    done = command("stop", name)
    assert is_gone(workers, 0)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"{name} has ended"
    assert running.end().status == 143
    assert listed(name) == []


@pytest.mark.ci
def test_stop_kills_workers_that_ignore_sigterm(lockstep: Any, is_gone: Gone, name: str) -> None:
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAYS
    running, workers = begin(lockstep, name, text=ignores)
    assert command("stop", name).returncode == 0
    assert is_gone(workers, 0)
    assert running.end().status == 143


def test_more_workers_than_replicas_are_refused(lockstep: Any, is_gone: Gone, name: str) -> None:
    running, workers = begin(lockstep, name, "--replicas", "4")
    done = command("scale", name, "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lockstep: ")
    assert "4" in done.stderr
    assert not is_gone(workers[:1], 0)
    running.process.send_signal(signal.SIGTERM)
    assert running.end().status == 143


def test_a_killed_job_is_not_listed(lockstep: Any, is_gone: Gone, name: str) -> None:
    running, workers = begin(lockstep, name)
    agent = os.pidfd_open(running.agent())
    signal.pidfd_send_signal(agent, signal.SIGKILL)
    running.process.kill()
    assert is_gone([*workers, agent], 300)
    running.end()
    assert listed(name) == []
    assert command("stop", name).returncode == 2


def test_two_jobs_with_one_name_are_distinguished(lockstep: Any, is_gone: Gone, name: str) -> None:
    first, workers = begin(lockstep, name)
    second, others = begin(lockstep, f"elsewhere/{name}")
    assert command("stop", f"{name}-2").returncode == 0
    assert second.end().status == 143
    assert is_gone(others, 0)
    assert len(listed(name)) == 1
    assert command("stop", name).returncode == 0
    assert first.end().status == 143
    assert is_gone(workers, 0)
