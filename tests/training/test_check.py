"""The command `lockstep check`, and its exit status."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.system.landlock import can_restrict

SCRIPT = Path(__file__).with_name("checking.py")

PATIENCE = 600.0

Check = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def check(environment: dict[str, str], lean: Callable[..., dict[str, str]], tmp_path: Path) -> Check:
    def run(backend: str, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "lockstep", "check", "--backend", backend, *words]
        variables = environment | lean(SCRIPT, backend)
        return subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=1200
        )

    return run


@pytest.mark.slow("jax")
@pytest.mark.ci
def test_a_difference_that_is_named_is_no_failure(check: Check, quicker_backend: str, tmp_path: Path) -> None:
    done = check(quicker_backend, "-n", "3", str(SCRIPT), "named")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].startswith("fit 1, training step of sequential: ")
    assert lines[0].endswith(" parts equal")
    assert lines[1].startswith("evaluate 1, evaluation step of sequential_1: ")
    assert lines[1].endswith("differs") or lines[1].endswith("differ")
    assert lines[2].startswith("  loss: ")
    assert lines[2].endswith(", from layer centered on [named: the layer centered]")
    others, models = lines[3:-2], ["forked"]
    if quicker_backend == "torch":
        models += ["with_optimizer", "with_optimizer_1"]
        *others, of_layer, spread = others
        assert of_layer == "evaluate 3, evaluation step of watched: 4 parts equal, 1 differs"
        assert spread.startswith("  spread: ")
        assert spread.endswith(" [named: the metric spread]")
    assert [line.partition(" step of ")[2].partition(":")[0] for line in others] == models
    assert all(line.endswith(" parts equal") for line in others)
    assert lines[-2].startswith("the check ends here: checking.py:")
    assert lines[-2].endswith(" writes out.csv")
    assert lines[-1].startswith("compared with one process: ")
    assert ", as noted at the start of lockstep run. " in lines[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_difference_that_nobody_names_is_a_failure(check: Check) -> None:
    done = check("jax", "--json", str(SCRIPT), "fault")
    assert done.returncode == 1
    result = json.loads(done.stdout)["jax"]
    (step,) = result["compared"]
    differences: list[dict[str, Any]] = step["differences"]
    assert not any(part["named"] for part in differences)
    gradients = {part["deviation"] for part in differences if part["part"].startswith("gradient ")}
    assert gradients == {"double (differs by 100 %)"}
    if can_restrict():
        reason = " writes a file: sqlite3.OperationalError: unable to open database file"
        assert result["ended"].startswith("checking.py:")
        assert result["ended"].endswith(reason)
        assert result["failed"] == ""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)],
)
def test_the_job_ends_with_the_command(
    environment: dict[str, str],
    lean: Callable[..., dict[str, str]],
    tmp_path: Path,
    number: int,
    status: int,
) -> None:
    # A check may write to the cache.
    pipe, folder = tmp_path / "cache/pipe", tmp_path / "temporary"
    folder.mkdir()
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "lockstep", "check", "--backend", "jax", str(SCRIPT), "waits", str(pipe)]
    variables = environment | lean(SCRIPT, "jax")
    variables |= {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(pipe.parent)}
    with subprocess.Popen(command, env=variables, cwd=tmp_path) as process:
        worker = os.pidfd_open(int(pipe.read_text()))
        process.send_signal(number)
        assert process.wait(PATIENCE) == status
        assert select.select([worker], [], [], PATIENCE)[0] == [worker]
    os.close(worker)
    if number == signal.SIGTERM:
        assert list(folder.glob("lockstep-check-*")) == []


def test_a_script_that_trains_nothing_cannot_be_checked(check: Check) -> None:
    done = check("jax", str(SCRIPT), "nothing")
    assert done.returncode == 2
    assert (
        done.stdout
        == "not compared with one process: the script has called no fit, evaluate or predict on replicas\n"
    )
