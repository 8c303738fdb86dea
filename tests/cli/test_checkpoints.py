"""What the command says of its folder of checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.checkpoint.store import Contents, Store
from lockstep.control.run_folder import claim_folder

JOB = {"replicas": 4, "seed": 7, "threads": 1}


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "a.py").write_text("print('ran')")
    return "a.py"


def keep(folder: Path, step: int) -> Path:
    return Store(folder).write(Contents(step, {"job": JOB}, {"a": np.arange(step)}))


def test_the_newest_whole_one_is_taken_and_says_what_the_job_is(tmp_path: Path, script: str) -> None:
    keep(tmp_path / "kept", 3)
    damaged = keep(tmp_path / "kept", 5)
    state = damaged / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    run = command("run", "-n", "1", "--backend", "jax", "--checkpoint", "kept", script, folder=tmp_path)
    assert run.returncode == 0
    assert f"checkpoint {damaged} is passed over: state.safetensors is damaged" in run.stderr
    assert "1 worker, 4 replicas, 1 thread each, seed 7" in run.stderr
    assert f"goes on from {tmp_path / 'kept' / 'step-000000000003'}" in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "3"), "was made with --replicas 4, not 3, on which the result depends"),
        (("--seed", "0"), "was made with --seed 7, not 0"),
        (("--checkpoint-every", "0"), "give a number of steps, or a time such as 30s, 10m or 1h"),
        (("--checkpoint-every", "1d"), "give a number of steps, or a time"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, script: str, options: tuple[str, ...], message: str
) -> None:
    keep(tmp_path / "kept", 3)
    run = command("run", "--backend", "jax", "--checkpoint", "kept", *options, script, folder=tmp_path)
    assert run.returncode == 2
    assert message in run.stderr
    assert not (tmp_path / "runs").exists()


def test_one_replica_is_refused_and_leaves_nothing_behind(tmp_path: Path, script: str) -> None:
    run = command("run", "--replicas", "1", "--checkpoint", "kept", script, folder=tmp_path)
    assert run.returncode == 2
    assert "--checkpoint needs at least two replicas" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == [script]


def test_two_jobs_do_not_share_a_folder(tmp_path: Path, script: str) -> None:
    lock = claim_folder(tmp_path / "kept")
    run = command("run", "--backend", "jax", "--checkpoint", "kept", script, folder=tmp_path)
    os.close(lock)
    assert run.returncode == 2
    assert "another run works in kept; wait for it, or give another --checkpoint" in run.stderr


def test_checkpoints_are_listed_and_verified(tmp_path: Path) -> None:
    whole, damaged = keep(tmp_path, 3), keep(tmp_path, 5)
    assert command("checkpoints", ".", folder=tmp_path).returncode == 0
    (damaged / "manifest.json").unlink()
    listed = command("checkpoints", ".", folder=tmp_path)
    assert listed.returncode == 1
    first, second = listed.stdout.splitlines()
    assert first.startswith(whole.name)
    assert first.endswith("whole")
    assert "manifest.json is missing" in second
