"""The changes that count as other settings when a training resumes from a checkpoint."""

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.utils import module_utils

from lockstep.errors import ChangedError
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.state import settings
from lockstep.keras.state.settings import differences, settings_of_call, settings_of_model, settings_of_parts
from lockstep.keras.state.snapshots import Snapshots
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.job import Job, JobContext

layers, optimizers, callbacks = keras.layers, keras.optimizers, keras.callbacks

TEXT = '''
class Scale(keras.layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def call(self, x):
        """Multiply."""
        return x * self.factor * 1.0
class Net(keras.Sequential):
    def train_step(self, *given):
        return super().train_step(*given)
def loss(y, own):
    return keras.ops.mean((y - own) ** 2)
def schedule(epoch, rate):
    return rate * 0.5
class Mine(keras.callbacks.Callback):
    def __init__(self, path, every):
        super().__init__()
        self.path, self.every, self.clock = path, every, CLOCK
'''


def program(edit: Callable[[str], str] = str, **changes: Any) -> dict[str, str]:
    """The settings of a small program, with an edit of its text, or other values."""
    given = {
        "rate": 0.2,
        "activation": "relu",
        "trainable": True,
        "more": [],
        "optimizer": optimizers.Adam(0.01),
        "patience": 2,
        "path": "out",
        "every": 3,
        "clock": 1.0,
        "trained": False,
    } | changes
    made: dict[str, Any] = {"keras": keras, "__name__": __name__, "CLOCK": given["clock"]}
    exec(edit(TEXT), made)
    hidden = layers.Dense(3, activation=given["activation"], trainable=given["trainable"])
    model = made["Net"](
        [keras.Input((2,)), hidden, layers.Dropout(given["rate"]), *given["more"], made["Scale"](2.0)]
    )
    model.compile(given["optimizer"], made["loss"])
    listed = [
        callbacks.EarlyStopping("loss", patience=given["patience"]),
        callbacks.CSVLogger(f"{given['path']}.csv"),
        callbacks.LearningRateScheduler(made["schedule"]),
        made["Mine"](given["path"], given["every"]),
    ]
    if given["trained"]:
        fit = inspect.unwrap(keras.Model.fit)
        fit(model, np.ones((4, 2)), np.ones((4, 3)), verbose=0, epochs=2, callbacks=[listed[0], listed[2]])
    of_call = settings_of_call(model, listed, first=not given["trained"])
    return {**of_call, **settings_of_model(model)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rate": 0.5}, "layer dropout: rate was 0.2, and is 0.5"),
        ({"activation": "tanh"}, 'layer dense: activation was "relu", and is "tanh"'),
        ({"trainable": False}, "layer dense: trainable was true, and is false"),
        ({"more": [layers.ReLU()]}, "layer re_lu: class was absent, and is ReLU"),
        ({"optimizer": optimizers.SGD(0.01)}, "optimizer: class was Adam, and is SGD"),
        ({"optimizer": optimizers.Adam(0.02)}, "optimizer: learning_rate was 0.0"),
        ({"optimizer": optimizers.Adam(0.01, clipnorm=1.0)}, "optimizer: clipnorm was null, and is 1.0"),
        ({"patience": 3}, "callback 0 (EarlyStopping): patience was 2, and is 3"),
        ({"every": 4}, "callback 3 (Mine): every was 3, and is 4"),
        ({"edit": lambda text: text.replace("* 1.0", "* 2.0")}, "layer scale: code (Python "),
        ({"edit": lambda text: text.replace("(*given)", "(given[0])")}, "layer net: code (Python "),
        ({"edit": lambda text: text.replace("** 2", "** 4")}, "loss was "),
        (
            {"edit": lambda text: text.replace("* 0.5", "* 0.1")},
            "callback 2 (LearningRateScheduler): schedule",
        ),
    ],
)
def test_values_that_affect_the_result_are_settings(changes: dict[str, Any], named: str) -> None:
    found = differences(program(), program(**changes))
    assert named in found
    assert found.count("; ") == (1 if "more" in changes else 0), found


def test_paths_clocks_comments_and_trained_values_are_no_settings() -> None:
    commented = program(
        lambda text: "\n\n# A comment\n" + text.replace("Multiply.", "Multiply it."), path="new", clock=2.0
    )
    assert differences(program(), commented) == ""
    before, after = program(trained=True), program(trained=True, optimizer=optimizers.Adam(0.02))
    assert differences(before, after) == ""
    assert differences(program(), before) == ""


def test_code_of_another_python_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = program()
    monkeypatch.setattr(settings, "_BEHAVES_AS_WRITTEN", "Python 3.0")
    assert differences(before, program(lambda text: text.replace("* 1.0", "* 2.0"))) == ""


def test_parts_of_a_loop_have_settings() -> None:
    before = settings_of_parts({"net": layers.Dropout(0.2), "how": optimizers.SGD(0.1), "rows": []})
    now = settings_of_parts(
        {"net": layers.Dropout(0.5), "how": optimizers.SGD(0.2, momentum=0.5), "rows": []}
    )
    assert differences(before, now) == (
        "net, layer dropout: rate was 0.2, and is 0.5; how: momentum was 0.0, and is 0.5"
    )


def test_other_settings_have_to_be_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    view, calls = place(3, (0,)), NumberedCalls()
    own = Job(
        JobContext(0, Bus(SystemClock(), 0), JobSettings(seed=7, threads=1)), (view, job.by_itself(view))
    )
    snapshots = Snapshots(own, None, calls)  # type: ignore[arg-type]
    facts = {"settings": settings_of_parts({"net": layers.Dropout(0.2)}), "sources": {}}
    held: Any = SimpleNamespace(parts={"net": layers.Dropout(0.5)})
    with pytest.raises(
        ChangedError, match=r"the checkpoint of step 9: net, layer dropout: rate was 0.2, and"
    ):
        snapshots.compare_settings(9, facts, None, held)
    # Earlier versions saved none.
    snapshots.compare_settings(9, {}, None, held)
    assert capsys.readouterr().err == ""
    own.checkpoints.accept_changes()
    snapshots.compare_settings(9, facts, None, held)
    said = capsys.readouterr().err
    assert said.startswith(
        "lockstep: resuming from the checkpoint of step 9 with other settings: net, layer d"
    )


def test_the_exchange_of_large_rows_is_a_setting() -> None:
    """What trials have shown with another one, which a job that resumes takes over, would be wrong."""
    view = place(3, (0,))
    own = Job(JobContext(0, Bus(SystemClock(), 0)), (view, job.by_itself(view)))
    snapshots = Snapshots(own, None, NumberedCalls())  # type: ignore[arg-type]
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    facts = {"settings": snapshots._settings(model, None)}
    snapshots.compare_settings(9, facts, model, None)
    own.exact_batch = True
    with pytest.raises(ChangedError, match=r"of step 9: exact batch was absent, and is true\. Undo"):
        snapshots.compare_settings(9, facts, model, None)


def test_comparing_settings_does_not_import_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, *details: Any) -> None:
            asked.append(name)

    asked: list[str] = []
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3), layers.Dense(1, kernel_regularizer="l2")])
    with_tensorflow = settings_of_model(model)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(module_utils.tensorflow, "_available", None)
    assert settings_of_model(model) == with_tensorflow
    assert "tensorflow" not in asked
    assert module_utils.tensorflow._available is None
