"""The comparison beside a run: what it says, and that the run neither waits for it nor fails with it."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from lockstep.system.landlock import can_restrict

pytestmark = pytest.mark.skipif(not can_restrict(), reason="nothing is compared without Landlock")
SCRIPT = Path(__file__).with_name("beside.py")
PATIENCE = 600.0
# On a busy machine, a comparison of low priority takes long.
AT_ONCE = """
from lockstep.cli import main, witness
witness.DELAY, witness.NICE, witness.SHARE = 0.0, 0, {share}
main.main()
"""

Start = Callable[..., "subprocess.Popen[str]"]


FASTEST = "torch" if find_spec("torch") else "jax"
"""The backend whose comparison takes the least time."""


@pytest.fixture
def start(environment: dict[str, str], lean: Callable[..., dict[str, str]], tmp_path: Path) -> Start:
    """Start a run beside which a comparison begins at once."""

    (tmp_path / "tmp").mkdir()
    (tmp_path / "cache").mkdir()

    def run(
        what: str, *, backend: str = FASTEST, witness: str = "first", share: float = 1.0
    ) -> "subprocess.Popen[str]":
        words = ["run", "-n", "2", "--backend", backend, "--witness", witness, "--run-dir", "run"]
        command = [
            sys.executable,
            "-P",
            "-c",
            AT_ONCE.format(share=share),
            *words,
            str(SCRIPT),
            what,
            str(tmp_path / "run"),
            "cache/pipe",
        ]
        folders = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
        variables = environment | lean(SCRIPT, backend) | folders
        return subprocess.Popen(command, env=variables, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    return run


def lines(process: "subprocess.Popen[str]") -> list[str]:
    """Return the lines of a run that succeeds."""
    _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    return text.splitlines()


def test_a_difference_without_a_name_is_told(start: Start, tmp_path: Path) -> None:
    told = lines(start("fault"))
    (note,) = [line for line in told if "numbers of one process" in line]
    assert note.startswith(
        "lockstep: fit 1 does not have the numbers of one process: gradient sequential/dense/kernel: double "
    )
    assert note.endswith(f"more parts in {tmp_path}/run/comparison.json; please report it with the script")
    assert "; compared with one process: " in told[-1]
    assert json.loads((tmp_path / "run/comparison.json").read_text())["ended"].endswith(" writes trained")


@pytest.mark.ci
def test_a_script_is_compared_once(start: Start, tmp_path: Path) -> None:
    changed = []
    for _ in range(2):
        told = lines(start("equal", backend="jax"))
        assert "16 steps on 2 workers; compared with one process: equal; digest " in told[-1]
        changed.append((tmp_path / "run/comparison").stat().st_mtime_ns)
    assert len(list((tmp_path / "cache/lockstep/compared").iterdir())) == 1
    assert changed[0] == changed[1]


@pytest.mark.ci
def test_a_script_that_cannot_be_compared_says_why(start: Start) -> None:
    told = lines(start("writes"))
    reason = "not compared with one process: beside.py:51 writes out.csv"
    assert f"lockstep: {reason}" in told, "\n".join(told)
    assert f"; {reason}; digest " in told[-1]


@pytest.mark.ci
def test_the_processor_time_is_limited(start: Start) -> None:
    told = lines(start("equal", share=1e-9))
    assert "; not compared with one process: it takes more than 1 s of processor time; " in told[-1]


@contextmanager
def held(start: Start, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", list[int], int]]:
    """Yield a run, its workers, and a descriptor of the process that compares; all of them wait."""
    # A comparison may write to the cache.
    os.mkfifo(folder / "cache/pipe")
    with start("holds") as process:
        # Open for writing, too: the pipe does not end when a worker closes it.
        with os.fdopen(os.open(folder / "cache/pipe", os.O_RDWR), buffering=1) as pipe:
            pids = [int(pipe.readline()) for _ in range(3)]
        compares = os.pidfd_open(pids[2])
        yield process, pids, compares
        os.close(compares)


def has_ended(descriptor: int, timeout: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout)[0])


@pytest.mark.ci
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_does_not_wait_for_the_comparison(start: Start, tmp_path: Path, killed: bool) -> None:
    with held(start, tmp_path) as (process, pids, compares):
        deadline = time.monotonic() + PATIENCE
        while "compared" not in json.loads((tmp_path / "run/comparison.json").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if killed:
            family = psutil.Process(process.pid).children()
            (witness,) = (
                each for each in family if pids[2] in [one.pid for one in each.children(recursive=True)]
            )
            witness.kill()
            assert has_ended(compares, PATIENCE)
        for worker in pids[:2]:
            os.kill(worker, signal.SIGUSR1)
        told = lines(process)
        assert has_ended(compares, 0)
    assert not (tmp_path / "run/comparison/temporary").exists()
    # Its script has not ended, but its step was compared.
    assert "; compared with one process: equal; digest " in told[-1]


@pytest.mark.ci
def test_nothing_is_left_if_the_command_is_killed(start: Start, tmp_path: Path) -> None:
    with held(start, tmp_path) as (process, _, compares):
        process.kill()
        assert has_ended(compares, PATIENCE)


def test_nothing_is_said_if_nothing_is_wanted(start: Start, tmp_path: Path) -> None:
    with start("plain", witness="off") as process:
        _, text = process.communicate(timeout=PATIENCE)
    assert "one process" not in text
    assert not (tmp_path / "run/comparison.json").exists()
