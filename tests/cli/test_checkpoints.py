"""The command and its folder of checkpoints."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.held import HeldCheckpoint, JobFacts
from lockstep.checkpoint.mirror import Head, StoredCheckpoint
from lockstep.checkpoint.resume import note_on_versions
from lockstep.checkpoint.store import Store
from lockstep.system.run_folder import claim_folder

JOB = {"replicas": 4, "seed": 7, "threads": 1, "input": "joint"}


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "a.py").write_text("print('ran')")
    return "a.py"


def keep(folder: Path, step: int, **facts: Any) -> Path:
    return Store(folder).write(Contents(step, {"job": {**JOB, **facts}}, {"a": np.arange(step)}))


def test_a_job_resumes_with_the_settings_of_the_newest_complete_checkpoint(
    tmp_path: Path, script: str
) -> None:
    keep(tmp_path / "kept", 3)
    damaged = keep(tmp_path / "kept", 5)
    state = damaged / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    run = command("run", "-n", "1", "--backend", "jax", "--checkpoint", "kept", script, folder=tmp_path)
    assert run.returncode == 0
    assert f"lockstep: {damaged}/state.safetensors is damaged" in run.stderr
    assert "; skipping this checkpoint\n" in run.stderr
    assert "lockstep: 1 worker, 4 replicas (" in run.stderr
    assert (
        "lockstep: 1 thread each, seed 7 unless the script sets one; each worker reads all input; "
        in run.stderr
    )
    resumed = f"resuming from {tmp_path / 'kept' / 'step-000000000003'}, checkpoints every 10 min"
    assert f"; {resumed}\n" in run.stderr


@pytest.mark.parametrize(
    ("interval", "said"),
    [("1", "every step"), ("50", "every 50 steps"), ("90s", "every 90 s"), ("2h", "every 2 h")],
)
def test_the_second_line_says_where_and_how_often_a_new_training_is_saved(
    tmp_path: Path, script: str, interval: str, said: str
) -> None:
    options = ("-n", "1", "--backend", "jax", "--checkpoint", "kept", "--checkpoint-every", interval)
    run = command("run", *options, script, folder=tmp_path)
    assert run.returncode == 0
    expected = f"; new training with checkpoints in {tmp_path / 'kept'}, {said}"
    assert run.stderr.splitlines()[1].endswith(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "3"), "was made with --replicas 4, not 3, which affects the result"),
        (("--seed", "0"), "was made with --seed 7, not 0"),
        (("--threads-per-worker", "2"), "was made with --threads-per-worker 1, not 2"),
        (("--input", "divided"), "was made with --input joint, not divided"),
        (("--checkpoint-every", "0"), "give a number of steps, or a time such as 30s, 10m or 1h"),
        (("--checkpoint-every", "1d"), "give a number of steps, or a time"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_refused(
    tmp_path: Path, script: str, options: tuple[str, ...], message: str
) -> None:
    keep(tmp_path / "kept", 3)
    run = command("run", "--backend", "jax", "--checkpoint", "kept", *options, script, folder=tmp_path)
    assert run.returncode == 2
    assert message in run.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [("--checkpoint-every", "50"), ("--keep", "3")])
def test_options_of_checkpoints_without_a_folder_are_refused(
    tmp_path: Path, script: str, options: tuple[str, ...]
) -> None:
    run = command("run", "--backend", "jax", *options, script, folder=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"lockstep: ConfigError: {options[0]} needs --checkpoint DIR, ")
    assert not (tmp_path / "runs").exists()


def resumes(folder: Path, script: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run with one worker; only `options` and `variables` select a backend."""
    line = [sys.executable, "-m", "lockstep", "run", "-n", "1", "--checkpoint", "kept", *options, script]
    inherited = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment = inherited | {"KERAS_HOME": str(folder)} | variables
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_the_backend_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("import os; print(os.environ['KERAS_BACKEND'])")
    keep(tmp_path / "kept", 3, backend="tensorflow")
    run = resumes(tmp_path, "b.py")
    assert (run.returncode, run.stdout) == (0, "tensorflow\n")


@pytest.mark.parametrize(
    ("options", "variables"), [(("--backend", "jax"), {}), ((), {"KERAS_BACKEND": "jax"})]
)
def test_another_backend_is_refused(
    tmp_path: Path, script: str, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    path = keep(tmp_path / "kept", 3, backend="tensorflow", libraries={"keras": "3.0.0"})
    run = resumes(tmp_path, script, *options, **variables)
    assert run.returncode == 2
    assert f"checkpoint {path} was made with the backend tensorflow, and" in run.stderr
    assert "give --backend tensorflow to resume" in run.stderr
    assert "lockstep.load_checkpoint" in run.stderr
    assert not (tmp_path / "runs").exists()


def test_other_versions_of_libraries_are_named_once(tmp_path: Path, script: str) -> None:
    numpy, keras, jax = (metadata.version(name) for name in ("numpy", "keras", "jax"))
    others = {"keras": "3.0.0", "jax": "0.1.0", "numpy": numpy, "not installed": "1.0"}
    path = keep(tmp_path / "kept", 3, backend="jax", libraries=others)
    run = resumes(tmp_path, script)
    assert (run.returncode, run.stdout) == (0, "ran\n")
    (note,) = [line for line in run.stderr.splitlines() if "was made with" in line]
    assert note == (
        f"lockstep: checkpoint {path} was made with keras 3.0.0 and jax 0.1.0, and training continues with "
        f"keras {keras} and jax {jax}: the bits may differ from those of an uninterrupted run"
    )


def test_versions_compare_across_package_names_and_spellings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = {"tensorflow": ["tensorflow-cpu"], "numpy": ["numpy"], "torch": ["torch"]}
    versions = {"tensorflow-cpu": "2.21.0rc1", "numpy": "2.4.0.dev3", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: packages)
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    recorded = {"tensorflow": "2.21.0-rc1", "numpy": "2.4.0-dev3", "torch": "2.13.0+cpu", "keras": "3.0.0"}
    assert note_on_versions(Path("a"), {"libraries": recorded}) == ""
    assert "torch 2.13.0, and" in note_on_versions(Path("a"), {"libraries": {"torch": "2.13.0"}})


def test_two_jobs_do_not_share_a_folder(tmp_path: Path, script: str) -> None:
    lock = claim_folder(tmp_path / "kept")
    run = command("run", "--backend", "jax", "--checkpoint", "kept", script, folder=tmp_path)
    os.close(lock)
    assert run.returncode == 2
    assert "another run uses kept; wait for it to end, or give another --checkpoint" in run.stderr


def test_checkpoints_are_listed_and_verified(tmp_path: Path) -> None:
    whole, damaged = keep(tmp_path, 3), keep(tmp_path, 5)
    assert command("checkpoints", ".", folder=tmp_path).returncode == 0
    (damaged / "manifest.json").unlink()
    listed = command("checkpoints", ".", folder=tmp_path)
    assert listed.returncode == 1
    first, second = listed.stdout.splitlines()
    assert first.startswith(whole.name)
    assert first.endswith("complete")
    assert "manifest.json is missing" in second


def test_names_in_a_store_do_not_control_the_terminal(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    held = HeldCheckpoint(5, "digest", JobFacts(**JOB))
    head = Head(checkpoints=(StoredCheckpoint("step-\x9b31mred", held, 0.0, {}),))
    (tmp_path / "head.json").write_bytes(msgspec.json.encode(head))
    listed = command("checkpoints", f"file://{tmp_path}", folder=tmp_path)
    assert (listed.returncode, listed.stdout.partition("  ")[0]) == (1, "step-?31mred"), listed.stderr
