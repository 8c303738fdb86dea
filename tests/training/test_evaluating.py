"""An evaluator and the folder that it watches, which changes while it waits."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError, ConfigError, PeerLostError, PeerStuckError
from lockstep.keras.fit.trainer import bind
from lockstep.keras.sidecar_evaluator import EvaluatorFit, follow
from lockstep.keras.variables import step_state
from lockstep.rendezvous.take_part import take_part_with_servers
from lockstep.system.locks import share_lock
from lockstep.worker.job import Job
from virtual_clock import VirtualClock

NEVER = float("inf")
random = np.random.default_rng(0)
X, Y = random.normal(size=(50, 3)).astype("float32"), random.normal(size=(50, 1)).astype("float32")

Event = Callable[[], object]


def small(*, built: bool = True, width: int = 4) -> Any:
    inputs = [keras.layers.Input((3,))] if built else []
    model = keras.Sequential([*inputs, keras.layers.Dense(width), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


class RecordedCalls(keras.callbacks.Callback):  # type: ignore[misc]
    """Records its calls and those of `set_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.calls.append("model")

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append("begin")

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(f"end {sorted(logs)}")


class Folder:
    """A folder of checkpoints, and the job that saves them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.expected: dict[int, dict[str, float]] = {}
        self._job = -1

    def begin(self) -> None:
        """Begin a job."""
        self.path.mkdir()
        self._job = share_lock(self.path / ".training")
        os.truncate(self._job, 1)

    def end(self) -> None:
        """End the job."""
        os.close(self._job)

    def keep(self, step: int) -> Path:
        """Save a checkpoint with distinct values; record Keras's evaluation of it in `expected`."""
        model = small()
        for variable in model.trainable_variables:
            variable.assign(np.random.default_rng(step).normal(size=variable.shape))
        figures = model.evaluate(X, Y, verbose=0, batch_size=16, return_dict=True)
        self.expected[step] = {f"val_{name}": value for name, value in figures.items()}
        arrays = {
            f"current/{name}": keras.ops.convert_to_numpy(value) for name, value in step_state(model).items()
        }
        manifest = {"job": {"backend": "tensorflow"}, "training": {"call": "fit 1", "steps": 1}}
        return Store(self.path).write(Contents(step, manifest, arrays))

    def check(self, history: Any, *steps: int) -> None:
        """Check that `history` has these checkpoints, with the bits of Keras's own evaluation."""
        assert history.epoch == list(steps)
        assert history.history == {
            name: [self.expected[step][name] for step in steps] for name in ("val_loss", "val_mae")
        }


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "saved")


def watch(folder: Folder, *events: Event, since: float = NEVER, model: Any = None, **options: Any) -> Any:
    """Follow the folder; call one of `events` each time that the evaluator waits."""
    clock, left = VirtualClock(), list(events)

    def pause(seconds: float) -> None:
        clock.advance(seconds)
        if left:
            left.pop(0)()

    evaluator = lockstep.SidecarEvaluator(model or small(), (X, Y), folder.path, batch_size=16, **options)
    try:
        return follow(evaluator, since, clock, pause)
    finally:
        assert left == []


def nothing() -> None:
    """Do nothing."""


def test_each_new_checkpoint_is_evaluated_until_the_job_ends(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, model = RecordedCalls(), small(built=False)
    history = watch(
        folder,
        *[nothing] * 10,
        folder.begin,
        nothing,
        lambda: folder.keep(10),
        # The newest of several; the last checkpoint of a job is found.
        lambda: [folder.keep(step) for step in (20, 30)],
        lambda: [folder.keep(40), folder.end()],
        model=model,
        callbacks=[recorded],
    )
    folder.check(history, 10, 30, 40)
    assert model.history is history
    assert recorded.calls == ["model", *["begin", "end ['loss', 'mae']"] * 3]
    text = capsys.readouterr()
    figures = {
        step: [f"{folder.expected[step][name]:.4f}" for name in ("val_loss", "val_mae")] for step in (10, 40)
    }
    lines = text.out.splitlines()
    assert len(lines) == 3
    assert lines[0] == "step 10: val_loss {}, val_mae {}".format(*figures[10])
    assert lines[2] == "step 40: val_loss {}, val_mae {}".format(*figures[40])
    assert text.err.splitlines() == [
        f"lockstep: the evaluator waits for a job that saves checkpoints in {folder.path}",
        f"lockstep: the evaluator waits for a job that saves checkpoints in {folder.path}, 5 of 600 s",
    ]


def test_notes_report_the_wait_while_a_job_trains(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.begin()
    long = [nothing] * 130
    watch(folder, *long, lambda: folder.keep(10), *long, folder.end)
    text = f"lockstep: the evaluator waits for {{}} in {folder.path}"
    a, another = text.format("a checkpoint"), text.format("one after step 10")
    assert capsys.readouterr().err.splitlines() == [a, a, another]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_no_error(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.begin()
    torn = folder.keep(10)
    (torn / "manifest.json").unlink()
    # The evaluator looks again at once, and then finds another one.
    read, looks = Store.steps, []

    def steps(store: Store) -> dict[int, Path]:
        looks.append(len(looks))
        if len(looks) == 2:
            folder.keep(20)
        return read(store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "steps", steps)
        history = watch(folder, folder.end)
    folder.check(history, 20)
    assert "skipping this checkpoint" not in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named_once_and_an_older_one_evaluated(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.begin()
    folder.keep(10)
    damaged = folder.keep(20)
    (damaged / "manifest.json").unlink()
    folder.check(watch(folder, nothing, folder.end), 10)
    said = [line for line in capsys.readouterr().err.splitlines() if "skipping this checkpoint" in line]
    assert len(said) == 1
    assert said[0].startswith(f"lockstep: {damaged}/manifest.json is missing")


def test_the_checkpoint_of_a_job_that_has_ended_is_evaluated(folder: Folder) -> None:
    folder.begin()
    folder.keep(10)
    folder.end()
    folder.check(watch(folder, since=folder.path.stat().st_mtime), 10)


def test_the_evaluator_does_not_end_with_an_earlier_job(folder: Folder) -> None:
    folder.begin()
    folder.keep(10)
    folder.end()
    with pytest.raises(PeerStuckError, match=r"has waited 600 s for a job .* start the other tasks within"):
        watch(folder, *[nothing] * 1200)


def test_a_job_without_checkpoints_is_an_error(folder: Folder) -> None:
    folder.begin()
    with pytest.raises(PeerLostError, match=r"has ended without a complete one, so nothing was eval"):
        watch(folder, nothing, folder.end)


def test_max_evaluations_ends_the_evaluation(folder: Folder) -> None:
    folder.begin()
    folder.keep(10)
    folder.check(watch(folder, lambda: folder.keep(20), max_evaluations=2), 10, 20)
    folder.end()


def test_checkpoints_of_another_model_are_refused(folder: Folder) -> None:
    folder.begin()
    folder.keep(10)
    with pytest.raises(CheckpointError, match="does not fit model"):
        watch(folder, model=small(width=5))
    folder.end()


def test_steps_limits_the_evaluation(folder: Folder) -> None:
    folder.begin()
    folder.keep(10)
    model = small()
    history = watch(folder, max_evaluations=1, steps=2, model=model)
    folder.end()
    expected = model.evaluate(X[:32], Y[:32], batch_size=16, verbose=0, return_dict=True)
    assert history.history == {f"val_{name}": [value] for name, value in expected.items()}


def test_an_evaluator_in_the_training_process_is_refused(
    folder: Folder, job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_of_one_worker.checkpoints, "_scheduler", object())
    with pytest.raises(
        ConfigError, match=r"saves the checkpoints itself, .* give lockstep.SidecarEvaluator max_eval"
    ):
        lockstep.SidecarEvaluator(small(), (X, Y), folder.path).start()


class Files:
    """The files of a `ModelCheckpoint`, saved two seconds after one another."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path / name, name
        self.expected: list[dict[str, float]] = []
        self._time = 0

    def keep(self, epoch: int, *, torn: bool = False) -> Path:
        model = small()
        for variable in model.trainable_variables:
            variable.assign(np.random.default_rng(epoch).normal(size=variable.shape))
        file = Path(str(self.path).format(epoch=epoch, val_loss=1.5))
        if torn:
            file.write_bytes(b"torn")
        else:
            model.save(file) if file.suffix == ".keras" else model.save_weights(file)
            self.expected.append(model.evaluate(X, Y, verbose=0, batch_size=16, return_dict=True))
        self._time += 2
        os.utime(file, (self._time, self._time))
        return file


def watch_files(files: Files, *events: Event, model: Any = None, **options: Any) -> Any:
    """As `watch`, for files; all pauses after the last event are waits."""
    clock, left = VirtualClock(), list(events)

    def pause(seconds: float) -> None:
        clock.advance(seconds)
        if left:
            left.pop(0)()

    clock.advance(100)
    evaluator = lockstep.SidecarEvaluator(model or small(), (X, Y), files.path, batch_size=16, **options)
    return follow(evaluator, NEVER, clock, pause)


@pytest.mark.ci("best.weights.h5", "{epoch}.weights.h5")
@pytest.mark.parametrize(
    ("name", "epochs"),
    [
        ("w-{epoch:03d}-{val_loss:.2f}.weights.h5", [2, 4]),
        ("{epoch}.weights.h5", [2, 4]),
        ("best.weights.h5", [1, 2]),
    ],
)
def test_the_files_of_a_model_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, epochs: list[int]
) -> None:
    files, model = Files(tmp_path, name), small(built=False)
    (tmp_path / "other.weights.h5").touch()
    history = watch_files(
        files,
        nothing,
        lambda: files.keep(2),
        nothing,
        lambda: [files.keep(3), files.keep(4)],
        model=model,
    )
    assert history.epoch == ([2, 4] if "epoch" in name else epochs)
    assert history.history["val_loss"] == [files.expected[0]["loss"], files.expected[-1]["loss"]]
    text = capsys.readouterr()
    assert [line.split(":")[0] for line in text.out.splitlines()] == [f"epoch {one}" for one in epochs]
    waits = f"lockstep: the evaluator waits for one after epoch {epochs[-1]} in {files.path}"
    assert text.err.splitlines()[-1] == waits


@pytest.mark.ci
@pytest.mark.parametrize("name", ["{epoch}.weights.h5", "{epoch}.keras"])
def test_a_file_that_cannot_be_read_is_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    files = Files(tmp_path, name)
    files.keep(1)
    torn = files.keep(2, torn=True)
    assert watch_files(files, max_evaluations=1).epoch == [1]
    assert f"lockstep: {torn} cannot be read" in capsys.readouterr().err


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    files = Files(tmp_path, "{epoch}.weights.h5")
    files.keep(1)
    with pytest.raises(CheckpointError, match=r"1\.weights\.h5 does not fit model"):
        watch_files(files, model=small(width=5))


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerStuckError, match="has waited 600 s for a job"):
        watch_files(Files(tmp_path, "{epoch}.weights.h5"))


@pytest.mark.parametrize(
    ("kind", "evaluates"), [("evaluator", True), ("chief", False), ("worker", False), ("ps", False)]
)
def test_only_the_command_starts_tasks_with_parameter_servers(
    job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch, kind: str, evaluates: bool
) -> None:
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3", "localhost:4"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}}))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(job_of_one_worker, "task", "worker")
    expected = pytest.raises(ConfigError, match=r"lockstep run --tf-config --ps 2 SCRIPT`$")
    with nullcontext() if evaluates else expected:
        take_part_with_servers()
    assert job_of_one_worker.evaluates == evaluates


def test_a_cluster_without_parameter_servers_is_refused(
    job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ConfigError, match="no task ps, which a ParameterServerStrategy needs"):
        take_part_with_servers()
    assert not job_of_one_worker.evaluates


class TestFit:
    """`fit` in an evaluator."""

    def fit(self, evaluating: EvaluatorFit, **options: Any) -> Any:
        model = small()
        return evaluating.fit(model, bind(keras.Model.fit, model, (X, Y), options).arguments)

    def test_calls_after_the_training_end_at_once(self, folder: Folder) -> None:
        folder.begin()
        folder.keep(10)
        folder.end()
        evaluating = EvaluatorFit()
        first = self.fit(
            evaluating,
            batch_size=16,
            validation_data=(X, Y),
            callbacks=[lockstep.callbacks.Checkpoint(folder.path)],
        )
        folder.check(first, 10)
        # Without watching the folder, this process would take the job for an old one.
        for path in (folder.path / ".training", folder.path):
            os.utime(path, (5, 5))
        folder.check(self.fit(evaluating, validation_data=(X, Y), validation_batch_size=16), 10)
        split = self.fit(evaluating, validation_split=0.2, batch_size=16)
        assert split.epoch == [10]
        assert split.history["val_loss"] != first.history["val_loss"]

    def test_missing_arguments_of_fit_are_named(self, folder: Folder) -> None:
        files = Files(folder.path.parent, "{epoch}.weights.h5")
        files.keep(3)
        saving = keras.callbacks.ModelCheckpoint(files.path, save_weights_only=True)
        with pytest.raises(ConfigError, match="give fit validation_data, in all tasks"):
            self.fit(EvaluatorFit(), callbacks=[saving])
        with pytest.raises(
            ConfigError, match=r"callbacks=\[lockstep.callbacks.Checkpoint\(folder\)\] or a keras"
        ):
            self.fit(EvaluatorFit(), validation_data=(X, Y))
        with pytest.raises(ConfigError, match="give fit validation_data, in all tasks"):
            self.fit(EvaluatorFit(), callbacks=[lockstep.callbacks.Checkpoint(folder.path)])
