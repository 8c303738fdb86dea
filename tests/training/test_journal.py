"""The journal of finished calls replays them after packing and unpacking."""

import random
from typing import Any

import numpy as np

from lockstep.checkpoint.values import pack, unpack
from lockstep.keras.randomness import set_random_states
from lockstep.keras.state.journal import Journal

RESULTS: list[Any] = [
    [0.5, float("nan")],
    [1.5],
    [],
    {"loss": 0.25, "mae": 2.0},
    3.5,
    np.arange(3),
    None,
    {"loss": [1.0, 2.0]},
    [np.float32(1.5)],
]


def test_calls_are_replayed() -> None:
    dice, journal = random.Random(3), Journal()
    methods: dict[str, int] = {}
    expected = []
    taken = 0
    saved = random.getstate()
    try:
        for _ in range(300):
            method = dice.choice(["fit", "train_on_batch", "evaluate"])
            methods[method] = methods.get(method, 0) + 1
            taken += dice.choice([0, 1, 7])
            if dice.random() < 0.1:
                random.seed(dice.random())
            result = dice.choice(RESULTS)
            journal.add(result, methods, taken)
            expected.append((repr(result), dict(methods), taken, random.getstate()))
            if dice.random() < 0.02:
                packed, arrays = pack(journal.packed(), "journal")
                journal = Journal.unpacked(unpack(packed, arrays))
        for number in [*range(300), 7, 290]:
            before = random.getstate()
            finished = journal.finished(number)
            assert random.getstate() == before
            assert finished.states is not None
            set_random_states(finished.states)
            found = (repr(finished.result), dict(finished.methods), finished.taken, random.getstate())
            assert found == expected[number]
    finally:
        random.setstate(saved)


def test_figures_of_many_calls_are_arrays() -> None:
    journal = Journal()
    for step in range(1000):
        journal.add([float(step), 0.0], {"train_on_batch": step + 1}, step + 1)
    packed, arrays = pack(journal.packed(), "journal")
    assert arrays["journal/figures"].shape == (2000,)
    assert len(repr(packed)) < 20_000
