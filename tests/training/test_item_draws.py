"""Items of a dataset draw random numbers that depend on their position in the pass, not on who reads them."""

import pickle
import random
from collections.abc import Callable
from importlib.util import find_spec
from timeit import timeit
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.keras.input.item_draws import ItemDraws
from lockstep.keras.randomness import current_states, random_states, same_states


def torch_number() -> float:
    import torch

    return float(torch.rand(()))


def tensorflow_numbers() -> tuple[float, ...]:
    import tensorflow as tf

    return float(tf.random.normal(())), float(tf.random.uniform((), seed=4)), float(tf.random.uniform(()))


def keras_numbers() -> tuple[float, ...]:
    drawn = keras.random.uniform((2,)), keras.random.uniform((2,))
    return tuple(float(number) for numbers in drawn for number in keras.ops.convert_to_numpy(numbers))


DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.normal,
    "keras": keras_numbers,
    "layer": lambda: float(keras.ops.sum(keras.layers.GaussianNoise(1.0)(np.ones(3), training=True))),
    **({"torch": torch_number} if find_spec("torch") else {}),
    **({"tensorflow": tensorflow_numbers} if find_spec("tensorflow") else {}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_of_an_item_depend_on_its_position_alone(name: str) -> None:
    def fetch(items: list[int]) -> list[Any]:
        return [(item, DRAWS[name]()) for item in items]

    DRAWS[name]()  # Creates what the framework keeps.
    items = [position % 4 for position in range(6)]
    before = random_states()
    whole = ItemDraws(7).read(2, range(6), items, fetch)
    assert same_states(random_states(), before)
    assert len({numbers for _, numbers in whole}) == 6, "an item that is read twice is drawn twice"

    part = ItemDraws(7)
    assert part.read(2, (4,), [0], fetch) == whole[4:5]
    DRAWS[name]()
    assert (
        part.read(
            2,
            (
                1,
                2,
            ),
            [1, 2],
            fetch,
        )
        == whole[1:3]
    )
    assert pickle.loads(pickle.dumps(part)).read(2, (5,), [1], fetch) == whole[5:]
    assert part.drawn
    assert ItemDraws(7).read(3, range(6), items, fetch) != whole
    assert ItemDraws(8).read(2, range(6), items, fetch) != whole


def test_items_that_draw_nothing_are_read_once_and_together() -> None:
    fetched: list[list[int]] = []

    def fetch(items: list[int]) -> list[int]:
        fetched.append(items)
        return items

    draws = ItemDraws(1)
    assert draws.read(
        0,
        (
            5,
            6,
        ),
        [50, 60],
        fetch,
    ) == [50, 60]
    assert fetched == [[50, 60]]
    assert not draws.drawn


def test_an_item_that_draws_is_read_again_from_its_own_states() -> None:
    draws = ItemDraws(1)

    def fetch(items: list[int]) -> list[float]:
        return [np.random.normal() if item else 0.0 for item in items]

    assert draws.read(
        0,
        (
            0,
            1,
        ),
        [0, 0],
        fetch,
    ) == [0.0, 0.0]
    alone = draws.read(0, (3,), [1], fetch)
    assert draws.read(
        0,
        (
            2,
            3,
        ),
        [0, 1],
        fetch,
    ) == [0.0, *alone]


def test_the_second_of_two_normal_numbers_is_part_of_the_state() -> None:
    np.random.seed(3)
    np.random.normal()  # NumPy keeps the second.
    before = current_states()["numpy"]
    draws = ItemDraws(1)
    first = draws.read(0, (0,), [0], lambda items: [np.random.normal() for _ in items])
    assert draws.drawn
    after = current_states()["numpy"]
    assert after[3:] == before[3:]
    assert np.array_equal(after[1], before[1])
    assert draws.read(0, (0,), [0], lambda items: [np.random.normal() for _ in items]) == first


def test_a_second_normal_number_is_seen_where_the_words_are_known() -> None:
    np.random.seed(3)
    np.random.normal()
    np.random.normal()
    # The words are those after one number, too.
    assert current_states()["numpy"][3] == 0
    np.random.seed(3)
    np.random.normal()
    assert current_states()["numpy"][3:] == np.random.get_state()[3:]
    assert np.random.get_state()[3] == 1


def test_states_are_restored_after_an_error() -> None:
    before = random_states()

    def fetch(items: list[int]) -> list[int]:
        np.random.normal()
        raise KeyError(items[0])

    with pytest.raises(KeyError):
        ItemDraws(1).read(0, (0,), [0], fetch)
    assert same_states(random_states(), before)


def test_an_item_that_seeds_the_states_itself_does_not_seed_the_program() -> None:
    def fetch(items: list[int]) -> list[float]:
        keras.utils.set_random_seed(5)
        return [random.random() + np.random.uniform() for _ in items]

    before = random_states()
    draws = ItemDraws(1)
    assert draws.read(0, (0,), [0], fetch) == draws.read(4, (9,), [0], fetch)
    assert same_states(random_states(), before)


def test_seeding_an_item_costs_little() -> None:
    draws = ItemDraws(1)

    def fetch(items: list[int]) -> list[float]:
        return [np.random.normal() for _ in items]

    positions, items = range(100), [*range(100)]
    draws.read(0, positions, items, fetch)
    fastest = min(timeit(lambda: draws.read(0, positions, items, fetch), number=1) for _ in range(50))
    assert fastest / 100 < 500e-6, "about 25 us on a quiet machine"
