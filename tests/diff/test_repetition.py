"""The job that repeats a run: the command that starts it."""

import subprocess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from lockstep.cli.run import run
from lockstep.diff.recording import Recording
from lockstep.diff.repetition import repeat
from lockstep.errors import ConfigError
from lockstep.parameter_server.order import OrderFile, OrderWriter, RecordKind
from lockstep.system.environment import variable_marks
from lockstep.system.paths import RunPaths

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
    "exact_batch": True,
    "local_steps": "5,nesterov,0.7,0.9",
    "adopts": True,
}
PROGRAM: dict[str, Any] = {"flags": {}, "sources": {}}


def recording_of(folder: Path, **job: Any) -> Recording:
    return Recording(folder / "old", JOB | {"directory": str(folder)} | job, PROGRAM)


def options_of_repetition(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, changed: Any = MappingProxyType({}), **job: Any
) -> dict[str, Any]:
    """Return the options with which `lockstep run` repeats a run, as it reads them."""
    started: list[list[str]] = []

    def start(words: list[str], **options: Any) -> "subprocess.CompletedProcess[bytes]":
        started.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", start)
    recording = recording_of(folder, **job)
    assert repeat(recording, folder / "new", variables=changed) == 0
    ((_, *command),) = started
    assert command[:4] == ["-P", "-m", "lockstep", "run"]
    with run.make_context("run", command[4:]) as context:
        return context.params


def test_the_options_that_bits_depend_on_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = options_of_repetition(tmp_path, monkeypatch, workers=3, replicas=5, parameter_servers=0)
    expected: dict[str, Any] = {"workers": 3, "replicas": 5, "servers": None, "run_dir": tmp_path / "new"}
    expected |= {
        name: JOB[name]
        for name in ("threads", "seed", "backend", "timeout", "module", "exact_batch", "local_steps")
    }
    expected |= {"script": "train.py", "arguments": ("--epochs", "2"), "reading": None, "no_adopt": False}
    assert expected.items() <= found.items()


def test_servers_replay_a_run_without_workers_in_the_place_of_lost_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that repeats what a lost one did also repeats what its replacement did."""
    found = options_of_repetition(tmp_path, monkeypatch, workers=7, replicas=6, parameter_servers=2)
    assert {"workers": 3, "servers": 2, "max_restarts": 0}.items() <= found.items()


@pytest.mark.parametrize(
    ("calls", "written", "missing"),
    [
        (
            {"fit 1": False},
            {},
            "fit 1 is missing in order/chief (the chief), order/ps-0 (parameter server 0);",
        ),
        ({"fit 1": False}, {"ps-0": [1]}, "fit 1 is missing in order/chief (the chief);"),
        (
            {"fit 1": True, "evaluate 1": True, "fit 2": False},
            {"chief": [1, 3], "ps-0": [1]},
            "fit 2 is missing in order/ps-0 (parameter server 0);",
        ),
        ({"functions 1": False}, {}, "functions 1 is missing in order/chief (the chief), order/ps-0"),
    ],
)
def test_a_run_without_whole_orders_is_refused_before_a_process_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: dict[str, bool],
    written: dict[str, list[int]],
    missing: str,
) -> None:
    recording = recording_of(tmp_path, workers=3, replicas=3, parameter_servers=1)
    recording.calls = calls
    recording.folder.mkdir()
    for name, numbers in written.items():
        writer = OrderWriter(OrderFile(RunPaths(recording.folder).orders / name).write)
        for number in numbers:
            writer.add(RecordKind.CALL, 0, number)
            writer.end()
        writer.close()
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(ConfigError) as error:
        repeat(recording, tmp_path / "new")
    assert f"old cannot be repeated: the end of {missing}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_that_ended_before_its_first_call_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recording_of(tmp_path, workers=2, replicas=2, parameter_servers=0)
    recording.program = {}
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(ConfigError, match="old cannot be repeated: it ended before its first call of fit"):
        repeat(recording, tmp_path / "new")


def test_the_variables_of_the_run_are_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"workers": 3, "replicas": 5, "parameter_servers": 0, "env": {"COLOR": "blue", "API_KEY": None}}
    monkeypatch.delenv("API_KEY", raising=False)
    with pytest.raises(ConfigError, match="old has not recorded the value of API_KEY: set the variable here"):
        options_of_repetition(tmp_path, monkeypatch, **job)
    monkeypatch.setenv("API_KEY", "abc")
    assert options_of_repetition(tmp_path, monkeypatch, **job)["env"] == ("COLOR=blue", "API_KEY")
    changed = {"COLOR": "red", "SIZE": None}
    with pytest.raises(ConfigError, match="--env SIZE: set the variable here first"):
        options_of_repetition(tmp_path, monkeypatch, changed=changed, **job)
    monkeypatch.setenv("SIZE", "3")
    again = options_of_repetition(tmp_path, monkeypatch, changed=changed, **job)
    assert again["env"] == ("API_KEY", "COLOR=red", "SIZE")


def test_numeric_flags_are_those_of_the_run_except_for_those_named_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str]] = []

    def start(words: list[str], **options: Any) -> "subprocess.CompletedProcess[bytes]":
        environments.append(options["env"])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setitem(PROGRAM, "flags", {"XLA_FLAGS": "old", "TF_USE_CUDNN": "old"})
    for name in ("XLA_FLAGS", "JAX_ENABLE_X64", "TORCH_NUMBER"):
        monkeypatch.setenv(name, "new")
    monkeypatch.delenv("TF_USE_CUDNN", raising=False)
    recording = recording_of(tmp_path, workers=3, replicas=5, parameter_servers=0)
    repeat(recording, tmp_path / "new")
    repeat(recording, tmp_path / "new", variables={"XLA_FLAGS": None, "JAX_ENABLE_X64": None})
    names = ("XLA_FLAGS", "TF_USE_CUDNN", "JAX_ENABLE_X64", "TORCH_NUMBER")
    assert [[each.get(name) for name in names] for each in environments] == [
        ["old", "old", None, None],
        ["new", "old", "new", None],
    ]


@pytest.mark.parametrize(
    ("recorded", "changed", "backend"),
    [
        ({}, {}, "jax"),
        ({}, {"KERAS_BACKEND": "torch"}, None),
        ({}, {"KERAS_BACKEND": None}, None),
        ({"KERAS_BACKEND": "torch"}, {}, None),
        ({"KERAS_BACKEND": None}, {}, "jax"),
    ],
)
def test_a_variable_chooses_the_backend_in_the_place_of_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Any, changed: Any, backend: str | None
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    job = {"workers": 3, "replicas": 5, "parameter_servers": 0, "env": recorded}
    again = options_of_repetition(tmp_path, monkeypatch, changed=changed, **job)
    assert again["backend"] == backend


def test_variables_that_are_not_what_they_were_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATE", "0.1")
    monkeypatch.setenv("DATA", "/data")
    marks = variable_marks(["RATE", "DATA"]) | {"A_TOKEN": "set", "COLOR": "aaaa"}
    monkeypatch.setenv("DATA", "/other")
    monkeypatch.setitem(PROGRAM, "variables", marks)
    job = {"workers": 3, "replicas": 5, "parameter_servers": 0, "env": {"COLOR": "blue"}}
    options_of_repetition(tmp_path, monkeypatch, **job)
    texts = "DATA has another value here and A_TOKEN is not set here"
    assert f"the script reads environment variables, of which {texts}: set them" in capsys.readouterr().err
