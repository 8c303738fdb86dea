"""What callbacks change in variables of Python is taken over; what the script sets is not."""

import copy
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.checkpoint.values import pack, unpack
from lockstep.keras import reached_objects
from lockstep.keras.changed_values import ChangedValues, set_values
from lockstep.keras.state.journal import Journal

WEIGHT = 1.0
BATCH = 64
PHASES = [{"weight": 1.0}, {"weight": 2.0}]
CURRENT = PHASES[0]
CONFIG: dict[str, Any] = {"powers": [1.0, 2.0], "name": "first"}
STEPS: tuple[int, ...] = ()
CENTER = np.zeros(2, "float32")
HELD = SimpleNamespace(level=0)
EMPTY = SimpleNamespace()
HOOK: Any = None
PAIR = namedtuple("PAIR", "a b")(1, 2)
SHARED: Any = None
LATER: Any = None
LOST = 1
LARGE = (np.zeros(1 << 19), [np.zeros(1 << 19)], SimpleNamespace(x=np.zeros(1 << 19)))
NAMES = ("WEIGHT", "BATCH", "PHASES", "CURRENT", "CONFIG", "STEPS", "CENTER", "HELD", "EMPTY", "HOOK")
NAMES += ("PAIR", "SHARED", "LATER", "LOST")
FIRST = copy.deepcopy({name: globals()[name] for name in NAMES})


class Options:
    scale = 1.0


class Weighs(keras.Sequential):  # type: ignore[misc]
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        weight = WEIGHT * Options.scale * CONFIG["powers"][0] + BETA
        return weight * keras.ops.mean(y_pred) + BATCH


class Program:
    """One process of a program: its model and callback, and the values that its script sets."""

    def __init__(self, changes: Any, **constants: Any) -> None:
        level = 0

        def rises(self: Any) -> None:
            nonlocal level
            level += 1

        self.level: Callable[[], int] = lambda: level
        methods = {"on_epoch_end": changes, "on_train_end": rises}
        self.callbacks = [type("Changes", (keras.callbacks.Callback,), {"__module__": __name__, **methods})()]
        self.model = Weighs([keras.Input((2,)), keras.layers.Dense(1)])
        BETA.assign(0.0)
        fresh = copy.deepcopy(FIRST)
        fresh["CURRENT"] = fresh["PHASES"][0]
        globals().update({**fresh, **constants})
        Options.scale = 1.0

    def values(self, **ways: bool) -> Any:
        """Return what travels after one epoch."""
        values = ChangedValues(self.model, self.callbacks, **ways)
        values.note_beginning()
        assert values.packed() == {"values": [], "others": []}
        for method in ("on_epoch_end", "on_train_end"):
            getattr(self.callbacks[0], method)()
        return unpack(*pack(values.packed(), ""))


def names_in(packed: Any) -> tuple[set[str], set[str]]:
    """Return the names of the values that travel, and of those that do not."""
    return {each[1] for each in packed["values"]} - {"level"}, {
        name.rpartition(".")[2] for name in packed["others"]
    }


def changes(self: Any) -> None:
    global WEIGHT, STEPS, HOOK
    WEIGHT, STEPS, HOOK = 3.0 + 0 * BATCH, (1, 2), changes
    CONFIG["powers"][1] += 1.0
    CONFIG["name"] = "second"
    HELD.level += 5
    EMPTY.level = 7
    Options.scale = 2.0
    CENTER[0] += 1


def test_another_process_takes_over_what_callbacks_have_changed(capfd: pytest.CaptureFixture[str]) -> None:
    packed = Program(changes).values()
    other = Program(changes, BATCH=128, WEIGHT=2.0)
    powers, center = CONFIG["powers"], CENTER
    set_values(other.model, other.callbacks, packed)
    # What the script sets otherwise is its own.
    assert (WEIGHT, BATCH, STEPS, other.level()) == (2.0, 128, (1, 2), 1)
    assert (CONFIG, HELD.level, Options.scale) == ({"powers": [1.0, 3.0], "name": "second"}, 5, 2.0)
    assert (CENTER.tolist(), vars(EMPTY)) == ([1, 0], {"level": 7})
    # Other references see the changes.
    assert (powers is CONFIG["powers"], center is CENTER) == (True, True)
    notes = capfd.readouterr().err
    assert f"{__name__}.WEIGHT is 2.0 in the script, and was 1.0 when it was changed to 3.0 during" in notes
    assert f"{__name__}.HOOK changed during training and is not handed over" in notes
    assert notes.count("lockstep:") == 2


def rebinds(self: Any) -> None:
    global CURRENT, PAIR, SHARED, LATER, WEIGHT, LOST
    CURRENT = PHASES[1]
    CURRENT["weight"] *= 2
    PAIR = PAIR._replace(a=5)
    SHARED = LATER = [1.0]
    WEIGHT = keras.KerasTensor((2,))
    del LOST


def test_what_could_lose_its_type_or_its_references_does_not_travel() -> None:
    packed = Program(rebinds).values()
    assert names_in(packed) == ({"PHASES"}, {"CURRENT", "PAIR", "SHARED", "LATER", "WEIGHT", "LOST"})
    other = Program(rebinds)
    set_values(other.model, other.callbacks, packed)
    assert (PHASES[1], CURRENT is PHASES[0]) == ({"weight": 4.0}, True)


def test_only_what_differs_from_both_beginnings_counts() -> None:
    """An `on_train_begin` sets what differs between processes, such as paths."""
    global WEIGHT
    first = Program(changes)
    values = ChangedValues(first.model, first.callbacks)
    WEIGHT = 2.0
    values.note_beginning()
    assert values.packed() == {"values": [], "others": []}
    WEIGHT = 1.0
    assert values.places() == []
    WEIGHT = 4.0
    assert names_in(values.packed()) == ({"WEIGHT"}, set())


def test_a_script_with_another_shape_keeps_its_array(capfd: pytest.CaptureFixture[str]) -> None:
    packed = Program(changes).values()
    other = Program(changes, CENTER=np.ones(3, "float32"), CONFIG=[1.0])
    set_values(other.model, other.callbacks, packed)
    assert (CENTER.tolist(), CONFIG) == ([1, 1, 1], [1.0])
    notes = capfd.readouterr().err
    assert f"{__name__}.CENTER changed during training and is not handed over" in notes
    assert f"{__name__}.CONFIG changed during training and is not handed over" in notes


BETA = keras.Variable(0.0)
GENERATOR = np.random.default_rng(3)


def anneals(self: Any) -> None:
    BETA.assign(0.5)
    GENERATOR.random()


def test_variables_that_are_not_the_models_travel_where_steps_read_them() -> None:
    """A compiled step of JAX has their first value. Generators of random numbers do not travel."""
    packed = Program(anneals).values()
    assert names_in(packed) == ({"BETA"}, {"GENERATOR"})
    other = Program(anneals)
    set_values(other.model, other.callbacks, packed)
    assert float(keras.ops.convert_to_numpy(BETA)) == 0.5
    packed = Program(anneals).values(compiled=True)
    is_read = keras.backend.backend() != "jax"
    assert ("BETA" in names_in(packed)[0]) == is_read


def test_one_replica_leaves_a_compiled_step_the_values_of_the_script() -> None:
    """Its steps follow the values of their first call, and no process traces them with those of another."""
    travels, named = names_in(Program(changes).values(compiled=True, alone=True))
    assert (travels, named) == (
        {"STEPS", "CENTER"},
        {"WEIGHT", "CONFIG", "scale", "HOOK"},
    )


def names_large(self: Any) -> Any:
    return LARGE


def test_large_arrays_are_neither_copied_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(names_large)
    program.model.loss = names_large
    graph = reached_objects.graph_of(program.model, named=True)
    large = {id(LARGE[0]), id(LARGE[1][0]), id(LARGE[2].x)}
    assert not large & {id(node.value) for node in graph.nodes.values()}
    for array in (LARGE[0], LARGE[1][0], LARGE[2].x):
        array[0] += 1
    assert ChangedValues(program.model, program.callbacks).packed() == {"values": [], "others": []}


def test_a_journal_keeps_large_values_of_the_last_call_only() -> None:
    def result(size: int, *, same: bool) -> Any:
        items = {"kind": "array", "same": same, "items": np.full(size, 1.0)}
        return {
            "callbacks": [],
            "values": {"values": [["m", "A", items, ""], ["m", "B", 1, ""]], "others": []},
        }

    journal = Journal()
    for number in range(6):
        journal.add(result(1000, same=number > 2), {"fit": number + 1}, number + 1)
    kept = [[each[1] for each in journal.finished(n).kept["values"]["values"]] for n in range(6)]
    # The first that is changed in place belongs to the last that was set.
    assert kept == [["B"], ["B"], ["A", "B"], ["B"], ["B"], ["A", "B"]]
    other = Journal.unpacked(unpack(*pack(journal.packed(), "")))
    other.add(result(1000, same=False), {"fit": 7}, 7)
    kept = [[each[1] for each in other.finished(n).kept["values"]["values"]] for n in range(7)]
    assert kept == [["B"]] * 6 + [["A", "B"]]
