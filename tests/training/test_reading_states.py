"""What callbacks draw on the chief does not change what it reads."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lockstep.keras.input.held_state import ChangedNumbers, states_held
from lockstep.keras.parameter_server.reading_states import ReadingStates


class Noisy:
    """Draws from the global states, and from generators of its own."""

    def __init__(self) -> None:
        self.own = {"numpy": np.random.default_rng(1), "old": np.random.RandomState(2)}
        self.python = random.Random(3)

    def batches(self) -> Iterator[list[float]]:
        start = np.random.random()  # Before the first batch, as a loader of PyTorch.
        return (self._batch(start) for _ in range(3))

    def _batch(self, start: float) -> list[float]:
        drawn = [random.random(), np.random.normal(), self.python.random()]
        return [start, *drawn, self.own["numpy"].random(), self.own["old"].random()]


def seeded() -> Noisy:
    random.seed(4)
    np.random.seed(5)
    return Noisy()


def read(data: Noisy, after_batch: Callable[[], object]) -> list[Any]:
    states = ReadingStates(states_held(("x", data)).values())
    found = []
    for _ in range(2):
        for batch in states.read(data.batches):
            found.append(batch)
            after_batch()
    states.resume()
    return found


def test_the_generators_of_an_input_are_found_once() -> None:
    data = seeded()
    found = states_held(("x", [data, data.python]))
    (numbers,) = (path for path, held in found.items() if isinstance(held, ChangedNumbers))
    assert list(found[numbers].identities) == ["x[0]"]
    del found[numbers]
    assert {id(one) for one in found.values()} == {id(data.python), *map(id, data.own.values())}
    assert len(found) == 3
    assert states_held(("x", (np.zeros(3), {"y": [1, 2]}))) == {}


def test_what_others_draw_does_not_change_what_is_read() -> None:
    expected = read(seeded(), lambda: None)
    end = random.random(), np.random.random()
    data, others = seeded(), []

    def draw() -> None:
        others.append([random.random(), np.random.normal(), data.python.random(), data.own["old"].random()])

    assert read(data, draw) == expected
    # They draw other numbers each time, and the program continues as if only the input had drawn.
    assert len({tuple(one) for one in others}) == 6
    assert (random.random(), np.random.random()) == end


def test_states_from_which_the_input_does_not_draw_belong_to_the_others() -> None:
    random.seed(1)
    expected = [random.random() for _ in range(3)]
    random.seed(1)
    states, drawn = ReadingStates(()), []
    for _ in states.read(lambda: iter([np.random.random() for _ in range(2)])):
        drawn.append(random.random())
    states.resume()
    assert [*drawn, random.random()] == expected


def test_generators_of_pytorch_are_kept_apart() -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(1)
    loader = torch.utils.data.DataLoader(torch.arange(12), 4, shuffle=True, generator=generator)
    expected = [batch.tolist() for _ in range(2) for batch in loader]
    generator.manual_seed(1)
    states = ReadingStates(states_held(("x", loader)).values())
    found = []
    for _ in range(2):
        for batch in states.read(lambda: iter(loader)):
            found.append(batch.tolist())
            torch.randperm(9, generator=generator)
            torch.rand(2)
    assert found == expected
