"""What callbacks change in variables of Python is taken over; what the script sets is not."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.checkpoint.values import pack, unpack
from lockstep.keras.changed_values import ChangedValues, set_values

WEIGHT = 1.0
BATCH = 64
PHASES = [{"weight": 1.0}, {"weight": 2.0}]
CURRENT = PHASES[0]
CONFIG: dict[str, Any] = {"powers": [1.0, 2.0], "name": "first"}
STEPS: tuple[int, ...] = ()
CENTER = np.zeros(2, "float32")
HELD = SimpleNamespace(level=0)
HOOK: Any = None
NAMES = ("WEIGHT", "BATCH", "PHASES", "CURRENT", "CONFIG", "STEPS", "CENTER", "HELD", "HOOK")
FIRST = copy.deepcopy({name: globals()[name] for name in NAMES})


class Options:
    scale = 1.0


class Weighs(keras.Sequential):  # type: ignore[misc]
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return WEIGHT * Options.scale * CONFIG["powers"][0] * keras.ops.mean(y_pred) + BATCH


class Program:
    """One process of a program: its model and callback, and the values that its script sets."""

    def __init__(self, **constants: Any) -> None:
        level = 0

        def rises(self: Any) -> None:
            nonlocal level
            level += 1

        self.level: Callable[[], int] = lambda: level
        methods = {"on_epoch_end": changes, "on_train_end": rises}
        self.callbacks = [type("Changes", (keras.callbacks.Callback,), {"__module__": __name__, **methods})()]
        self.model = Weighs([keras.Input((2,)), keras.layers.Dense(1)])
        globals().update({**copy.deepcopy(FIRST), **constants})
        Options.scale = 1.0


def changes(self: Any) -> None:
    global WEIGHT, STEPS, CURRENT, HOOK
    WEIGHT, STEPS, CURRENT, HOOK = 3.0 + 0 * BATCH, (1, 2), PHASES[1], changes
    CONFIG["powers"][1] += 1.0
    CONFIG["name"] = "second"
    HELD.level += 5
    Options.scale = 2.0
    CENTER[0] += 1


def test_another_process_takes_over_what_callbacks_have_changed(capfd: pytest.CaptureFixture[str]) -> None:
    first = Program()
    values = ChangedValues(first.model, first.callbacks)
    assert values.packed() == {"values": [], "others": []}
    for method in ("on_epoch_end", "on_train_end"):
        getattr(first.callbacks[0], method)()
    packed = unpack(*pack(values.packed(), ""))

    other = Program(BATCH=128, WEIGHT=2.0)
    phases, powers = PHASES, CONFIG["powers"]
    set_values(other.model, other.callbacks, packed, is_edited=True)
    assert (WEIGHT, BATCH, STEPS, CURRENT, other.level()) == (3.0, 128, (1, 2), {"weight": 2.0}, 1)
    assert (CONFIG, HELD.level, Options.scale) == ({"powers": [1.0, 3.0], "name": "second"}, 5, 2.0)
    assert CENTER.tolist() == [1, 0]
    # Other references see the change of a list; a variable that has another one leaves the first one alone.
    assert powers is CONFIG["powers"]
    assert phases == FIRST["PHASES"]
    notes = capfd.readouterr().err
    assert f"{__name__}.WEIGHT is 2.0 in the script, and was 1.0: the value that it had during" in notes
    assert f"{__name__}.HOOK changed during training, but a checkpoint cannot hold its value" in notes
    assert notes.count("lockstep:") == 2
