"""The job that repeats a run: the command that starts it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.run import run
from lockstep.diff.recording import Recording
from lockstep.diff.repetition import repeat

JOB: dict[str, Any] = {
    "target": "train.py",
    "arguments": ["--epochs", "2"],
    "module": False,
    "threads": 2,
    "seed": 7,
    "backend": "jax",
    "timeout": 90.0,
    "joint_input": False,
    "tf_distribute": False,
    "adopts": True,
}
PROGRAM: dict[str, Any] = {"flags": {}, "sources": {}}


def options_of_repetition(folder: Path, monkeypatch: pytest.MonkeyPatch, **job: Any) -> dict[str, Any]:
    """Return the options with which `lockstep run` repeats a run, as it reads them."""
    started: list[list[str]] = []

    def start(words: list[str], **options: Any) -> "subprocess.CompletedProcess[bytes]":
        started.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", start)
    recording = Recording(folder / "old", JOB | {"directory": str(folder)} | job, PROGRAM)
    assert repeat(recording, folder / "new") == 0
    ((_, *command),) = started
    assert command[:4] == ["-P", "-m", "lockstep", "run"]
    with run.make_context("run", command[4:]) as context:
        return context.params


def test_the_options_that_bits_depend_on_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = options_of_repetition(tmp_path, monkeypatch, workers=3, replicas=5, parameter_servers=0)
    expected: dict[str, Any] = {"workers": 3, "replicas": 5, "servers": None, "run_dir": tmp_path / "new"}
    expected |= {name: JOB[name] for name in ("threads", "seed", "backend", "timeout", "module")}
    expected |= {"script": "train.py", "arguments": ("--epochs", "2"), "reading": None, "no_adopt": False}
    assert expected.items() <= found.items()


def test_servers_replay_a_run_without_workers_in_the_place_of_lost_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that repeats what a lost one did also repeats what its replacement did."""
    found = options_of_repetition(tmp_path, monkeypatch, workers=7, replicas=6, parameter_servers=2)
    assert {"workers": 3, "servers": 2, "max_restarts": 0}.items() <= found.items()
