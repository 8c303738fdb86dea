"""What reading changes in a dataset: found by path, given as plain values, and restored in another one."""

import random
from typing import Any

import numpy as np

from lockstep.checkpoint.values import pack, unpack
from lockstep.keras.input.held_state import ChangedNumbers, states_held
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.keras.state.journal import Journal


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
        self.epoch, self.best, self.name = 0, None, "a"
        self.names, self.large = ["a", "b"], np.zeros(2**22)
        self.part, self.noise = Part(), random.Random(3)


def read(data: Any) -> None:
    """Change all of it."""
    data.rows[:] = data.rows[::-1].copy()
    data.order.reverse()
    data.pair, data.best, data.name = (3, 4.5), 0.5, "b"
    data.epoch += 1
    data.part.count = 7
    data.names.reverse()
    data.large[0] = 1
    data.noise.random()


def test_the_numbers_that_have_changed_are_those_of_another_object_then() -> None:
    data, other = Data(), Data()
    states_held(("x", data))
    held, rows = states_held(("x", other)), other.rows
    before = random_states(held)["held"]
    assert before["numbers of x"] == before["numbers of x.part"] == {}
    read(data)
    packed, arrays = pack(random_states(states_held(("x", data))), "states")
    states = unpack(packed, arrays)
    assert sorted(states["held"]["numbers of x"]) == ["best", "epoch", "order", "pair", "rows"]
    set_random_states(states, held)
    assert other.rows is rows
    assert (rows.tolist(), other.order) == ([5, 4, 3, 2, 1, 0], [2, 1, 0])
    assert (other.pair, other.epoch, other.best, other.part.count) == ((3, 4.5), 1, 0.5, 7)
    assert other.noise.getstate() == data.noise.getstate()
    # Text may be a path, and large arrays are data.
    assert (other.name, other.names, other.large[0]) == ("a", ["a", "b"], 0)
    set_random_states(random_states() | {"held": before}, held)
    assert (rows.tolist(), other.epoch, other.best, other.pair) == ([0, 1, 2, 3, 4, 5], 0, None, (1, 2.5))


def test_objects_of_libraries_and_without_numbers_are_left_alone() -> None:
    assert states_held(("x", (np.zeros(3), {"y": [1, 2]}, random, Data))) == {}
    assert states_held(("x", [Named(1), Named(2)])) == {}
    assert [type(held) for held in states_held(("x", Part())).values()] == [ChangedNumbers]


def test_a_finished_call_has_what_reading_has_changed() -> None:
    data, journal = Data(), Journal()
    for number in range(3):
        held = states_held(("x", data))
        journal.add(None, {"fit": number + 1}, number, held=held if number < 2 else {})
        read(data)
    first, second, third = (journal.finished(number).states or {} for number in range(3))
    assert first["held"]["numbers of x"] == {}
    assert second["held"]["numbers of x"]["epoch"] == 1
    assert third
    assert "held" not in third
