"""Workers that are started and restarted by hand have the bits of `lockstep run`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "training.py"
ASKED = os.environ.get("BACKENDS", "jax")
ALL = ["jax", "tensorflow", "torch"] if ASKED == "all" else ASKED.split()
BACKENDS = [name if name == "jax" else pytest.param(name, marks=pytest.mark.slow) for name in ALL]

Undisturbed = Callable[..., str]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], lean: Callable[..., Any]
) -> Undisturbed:
    """The digest of an undisturbed `lockstep run`."""

    @cache
    def run(backend: str, how: str = "nothing") -> str:
        command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--backend", backend, PROGRAM, how]
        where = {
            "cwd": tmp_path_factory.mktemp("undisturbed"),
            "env": environment | lean(PROGRAM, backend),
        }
        return digest(subprocess.run(command, **where, check=True, capture_output=True, text=True).stdout)

    return run


def digest(text: str) -> str:
    # A note may follow in the same line: if Python does not buffer, `print` writes the end of a line apart.
    (found,) = re.findall(r"^digest \w+ -?0x[01]\.[0-9a-f]+p[-+][0-9]+", text, re.MULTILINE)
    return str(found)


@pytest.fixture
def start(host: Any, environment: dict[str, str], lean: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Start the program as some tasks, each in a new terminal."""

    def started(how: str, backend: str, *tasks: int) -> list[Any]:
        variables = environment | {"KERAS_BACKEND": backend} | lean(PROGRAM, backend)
        return [host.start(host.config(task), str(PROGRAM), how, **variables) for task in tasks]

    return started


@pytest.mark.slow("jax")
@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chief_that_is_killed_and_restarted_joins(
    start: Callable[..., list[Any]], undisturbed: Undisturbed, backend: str
) -> None:
    chief, other = start("killed", backend, 0, 1)
    assert chief.status() == -signal.SIGKILL
    (again,) = start("killed", backend, 0)
    assert digest(other.end()) == digest(again.end()) == undisturbed(backend)
    assert (
        "worker 0 ended (exit status unknown); start it again and it joins; worker 1 continues" in other.text
    )
    assert "lockstep: the job is running; worker 0 restarts the script as worker 2" in again.text
    for terminal in (other, again):
        assert "worker 2 joined (2 workers)" in terminal.text


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("how", "without"),
    [pytest.param("backup", "unshuffled", marks=pytest.mark.slow), ("checkpoint", "nothing")],
)
def test_workers_that_are_all_killed_at_step_7_resume_there(
    start: Callable[..., list[Any]], undisturbed: Undisturbed, how: str, without: str, backend: str
) -> None:
    for terminal in start(how, backend, 1, 0):
        assert terminal.status() == -signal.SIGKILL
        assert "resumes at step 1\n" in terminal.text
    for terminal in start(how, backend, 0, 1):
        assert digest(terminal.end()) == undisturbed(backend, without)
        assert "resumes at step 7\n" in terminal.text
