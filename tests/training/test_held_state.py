"""What reading changes in a dataset: found by path, given as plain values, and restored in another one."""

import random
import sys
import sysconfig
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.checkpoint.values import pack, unpack
from lockstep.keras.input import held_state
from lockstep.keras.input.held_state import ChangedNumbers, held_iterator, states_held
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.keras.state.journal import Journal
from lockstep.system.notes import RepeatedNotes


class Part:
    def __init__(self) -> None:
        self.count = 0


class Named:
    """Equal to all others, of which each has its own count."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named)

    def __hash__(self) -> int:
        return 0


class Data:
    def __init__(self) -> None:
        self.rows, self.order, self.pair = np.arange(6), [0, 1, 2], (1, 2.5)
        self.epoch, self.best, self.weights = 0, None, np.ones(2, int)
        self.large, self.part, self.noise = np.zeros(2**22), Part(), random.Random(3)


class Lazy:
    """Reads a table when it is needed, and keeps a shard of its data."""

    def __init__(self) -> None:
        self.ready, self.table, self.names, self.shard = False, None, list[str](), -1
        self.rows, self.part = np.arange(6), Part()

    def read(self, shard: int) -> None:
        if not self.ready:
            self.table, self.ready = {"scale": 2}, True  # type: ignore[assignment]
            self.names.append("a")
        self.shard = self.part.count = shard
        self.rows[:] = self.rows[::-1].copy()


def read(data: Any) -> None:
    """Change all of it that is a number."""
    data.rows[:] = data.rows[::-1].copy()
    data.order.reverse()
    data.pair, data.best, data.weights = (3, 4.5), 0.5, data.weights / 1
    data.epoch += 1
    data.part.count = 7
    data.noise.random()


def test_the_numbers_that_have_changed_are_those_of_another_object_then() -> None:
    data, other = Data(), Data()
    states_held(("x", data))
    held, rows = states_held(("x", other)), other.rows
    before = random_states(held)["held"]
    assert before["numbers of x"] == {}
    read(data)
    packed, arrays = pack(random_states(states_held(("x", data))), "states")
    states = unpack(packed, arrays)
    numbers = states["held"]["numbers of x"]
    assert sorted(numbers["x"]) == ["best", "epoch", "order", "pair", "rows", "weights"]
    assert numbers["x.part"] == {"count": 7}
    set_random_states(states, held)
    assert other.rows is rows
    assert (rows.tolist(), other.order) == ([5, 4, 3, 2, 1, 0], [2, 1, 0])
    assert (other.pair, other.epoch, other.best, other.part.count) == ((3, 4.5), 1, 0.5, 7)
    assert other.weights.dtype == np.float64
    assert other.noise.getstate() == data.noise.getstate()
    set_random_states(random_states() | {"held": before}, held)
    assert (rows.tolist(), other.epoch, other.best, other.pair) == ([0, 1, 2, 3, 4, 5], 0, None, (1, 2.5))


@pytest.mark.parametrize("reads", [True, False])
def test_of_objects_that_change_other_attributes_only_orders_are_kept(
    reads: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(held_state, "_note", RepeatedNotes())
    data, other = Lazy(), Lazy()
    states_held(("x", data))
    held = states_held(("x", other))
    data.read(3)
    if reads:
        other.read(0)
    set_random_states(random_states(states_held(("x", data))), held)
    assert (other.ready, other.table is not None, other.names) == (reads, reads, ["a"] * reads)
    assert (other.shard, other.part.count) == ((0, 0) if reads else (-1, 0))
    assert other.rows.tolist() == [5, 4, 3, 2, 1, 0]
    if reads:
        assert "x.ready, x.shard, x.part.count: not restored" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["name", "names", "large", "new", "table"])
def test_other_attributes_may_change_in_any_way(change: str) -> None:
    data: Any = Data()
    data.name, data.names, data.table = "a", ["a", "b"], {0: None}
    held = states_held(("x", data))
    data.epoch = 5
    assert random_states(held)["held"] == {"numbers of x": {"x": {"epoch": 5}}} | {
        path: state.getstate() for path, state in held.items() if path != "numbers of x"
    }
    match change:
        case "name":
            data.name = "b"
        case "names":
            data.names.reverse()
        case "large":
            data.large += 1
        case "new":
            data.other = "a"
        case "table":
            data.table[0] = "a"
    assert held["numbers of x"].getstate() == {"left out": {"x.epoch": True}}


@pytest.mark.parametrize("value", [None, [2, 1, 0, 3], 1, (0, 1, 2, 3), np.float32(1)])
def test_an_array_may_become_another_kind_of_number(value: Any) -> None:
    data: Any = Part()
    data.count = np.arange(4)
    held = states_held(("x", data))
    data.count = value
    assert random_states(held)["held"] == {"numbers of x": {"x": {"count": value}}}


def test_attributes_that_a_class_computes_are_not_read() -> None:
    class Closed:
        __slots__ = ("__weakref__", "open", "part")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    closed = Closed()
    closed.part = Part()
    assert list(states_held(("x", closed))["numbers of x"].identities) == ["x.part"]


def test_many_large_parts_are_data() -> None:
    parts: list[Any] = [Part() for _ in range(40)]
    for part in parts:
        part.image = np.zeros(2**18)
    held = states_held(("x", parts))["numbers of x"]
    assert len(held.identities) == 32


def test_objects_of_libraries_and_without_numbers_are_left_alone() -> None:
    assert states_held(("x", (np.zeros(3), {"y": [1, 2]}, random, Data))) == {}
    assert states_held(("x", [Named(1), Named(2)])) == {}
    # A class of a compiled extension may have no text for its module.
    unnamed = type("Unnamed", (Part,), {"__module__": property(lambda self: "any")})
    assert states_held(("x", unnamed())) == {}
    assert [type(held) for held in states_held(("x", Part())).values()] == [ChangedNumbers]
    assert states_held(("x", Part())).keys() == {"numbers of x"}


def test_a_finished_call_has_what_reading_has_changed() -> None:
    data, journal = Data(), Journal()
    for number in range(3):
        held = states_held(("x", data))
        journal.add(None, {"fit": number + 1}, number, held=held if number < 2 else {})
        read(data)
    first, second, third = (journal.finished(number).states or {} for number in range(3))
    assert first["held"]["numbers of x"] == {}
    assert second["held"]["numbers of x"]["x"]["epoch"] == 1
    assert third
    assert "held" not in third


def test_finished_calls_keep_large_orders_once() -> None:
    data, other, journal = Data(), Data(), Journal()
    data.rows = np.arange(1000)
    other.rows = np.arange(1000)
    states_held(("x", data), ("y", other))
    for number, each in enumerate([data, other, data, data]):
        each.rows = np.roll(each.rows, 1)
        each.epoch += 1
        journal.add(None, {"fit": number + 1}, number, held=states_held(("x", each)))
    calls = [(journal.finished(number).states or {})["held"]["numbers of x"]["x"] for number in range(4)]
    # The states after the first two calls are the same.
    assert ["rows" in numbers for numbers in calls] == [True, True, False, True]
    assert [numbers["epoch"] for numbers in calls] == [1, 1, 2, 3]
    assert calls[3]["rows"].tolist() == data.rows.tolist()


def test_calls_that_change_nothing_keep_no_order_of_their_own() -> None:
    data, journal = Data(), Journal()
    data.rows = np.arange(1000)
    for number in range(6):
        held = states_held(("x", data))
        data.rows = np.roll(data.rows, number % 2)
        journal.add(None, {"fit": number + 1}, number, held=held)
    held_after = [(journal.finished(number).states or {})["held"] for number in range(6)]
    calls = [held["numbers of x"].get("x", {}) for held in held_after]
    assert ["rows" in numbers for numbers in calls] == [False, False, False, False, False, True]
    assert calls[5]["rows"].tolist() == data.rows.tolist()


class Proxy:
    """Has methods of all classes, as parts of some libraries do."""

    def __init__(self, held: Any) -> None:
        self.held = held

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def __next__(self) -> Any:
        return next(self.held)


def test_a_proxy_iterates_if_what_it_stands_for_does() -> None:
    assert held_iterator(("data", [Proxy(1)])) is None
    assert held_iterator(("data", [Proxy(iter("ab"))])) == "data[0] is a Proxy"


def test_globals_of_installed_packages_are_not_iterators_of_the_program() -> None:
    for folder, path in (
        (sysconfig.get_path("purelib"), None),
        ("/home", "module.NAMES is a str_ascii_iterator"),
    ):
        members: dict[str, Any] = {"NAMES": iter("ab"), "__name__": "module"}
        exec(compile("def read(): return next(NAMES)", f"{folder}/module.py", "exec"), members)
        assert held_iterator(("data", [members["read"]])) == path


def test_a_module_of_the_program_may_have_the_name_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for file, paths in (
        ("/home/datasets.py", ["numbers of data"]),
        (f"{sysconfig.get_path('purelib')}/d.py", []),
    ):
        module = ModuleType("datasets")
        module.__file__ = file
        monkeypatch.setitem(sys.modules, "datasets", module)
        monkeypatch.setattr(Part, "__module__", "datasets")
        assert list(states_held(("data", Part()))) == paths
