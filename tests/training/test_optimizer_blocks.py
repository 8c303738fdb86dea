"""The update by blocks has the bits of the whole one, for each elementwise optimizer, dtype and shape."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import keras
import numpy as np
import pytest

import dividing_optimizers
from dividing_optimizers import CLIPPED, OPTIMIZERS, REPLICAS, SHAPES, built
from lockstep.collectives.shared.divided_state import Array, DividedLayout, DividedState
from lockstep.keras.backends import optimizer_blocks
from lockstep.keras.backends.jax_blocks import JaxBlocks, JaxBlockUpdate, SharedSlot

QUICK = {"Adam", "AdamW", "SGD with momentum"}


def unused() -> NoReturn:
    raise AssertionError


def divided(
    functions: JaxBlocks, weights: list[Any], values: list[Any], gradients: Sequence[Sequence[Array]]
) -> tuple[list[Any], list[Any]]:
    """Return the weights and the optimizer's values after updates by blocks."""
    blocks = functions.blocks
    layout = DividedLayout(blocks.block_groups, blocks.elements, REPLICAS)
    shared = DividedState(layout, np.zeros(layout.size, np.uint8))
    state: Any = (weights, [], values, [])
    for number, of_step in enumerate(gradients):
        pending: list[Any] = []
        update = JaxBlockUpdate(functions, state, of_step, None, lambda: ({}, [], [], None), pending)

        def compute(block: int, slots: Sequence[Array], update: JaxBlockUpdate = update) -> Sequence[Array]:
            group, start, _ = layout.places[block]
            return update.compute(group, start // layout.elements, slots)

        for replica in range(REPLICAS):
            if not number:
                for block in layout.shards[replica]:
                    update.fill(shared, block)
            shared.update(number, replica, compute)
        _, state = update.finish(shared, unused)
        jax.block_until_ready(pending[1])
    return state[0], state[2]


@pytest.mark.ci(*OPTIMIZERS.keys() - QUICK)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in OPTIMIZERS),
        *(pytest.param(*half, marks=pytest.mark.ci) for half in (("AdamW", "bfloat16"), ("Adam", "float16"))),
    ],
)
def test_blocks_have_the_bits_of_the_whole_update(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_blocks, "BLOCK", 64)
    optimizer, variables = built(OPTIMIZERS[name], dtype)
    numbers = np.random.default_rng(1)
    like = [np.asarray(variable.value).dtype for variable in variables]
    gradients = [
        [numbers.normal(size=shape).astype(kind) for shape, kind in zip(SHAPES, like, strict=True)]
        for _ in range(4)
    ]
    functions = JaxBlocks.of(optimizer, REPLICAS)
    assert isinstance(functions, JaxBlocks), functions
    assert sum(group.blocks for group in functions.blocks.groups) > REPLICAS

    def start() -> tuple[list[Any], list[Any]]:
        return [jax.numpy.array(v.value) for v in variables], [
            jax.numpy.array(v.value) for v in optimizer.variables
        ]

    whole = jax.jit(optimizer.stateless_apply)
    weights, values = start()
    for of_step in gradients:
        weights, values = whole(values, of_step, weights)
    own_weights, own_values = divided(functions, *start(), gradients)
    assert any(isinstance(value, SharedSlot) for value in own_values) == bool(functions.blocks.slots)
    for variable, expected, value in zip(
        [*variables, *optimizer.variables], [*weights, *values], [*own_weights, *own_values], strict=True
    ):
        assert np.asarray(value).tobytes() == np.asarray(expected).tobytes(), variable.path


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: keras.optimizers.Adafactor(0.01), "blocks of Adafactor do not have its bits"),
        (
            lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
            "it clips by a norm, which needs whole gradients",
        ),
        (lambda: keras.optimizers.Adam(lambda: 0.01), "its learning rate is a function"),
    ],
)
def test_other_updates_are_not_cut(make: Callable[[], Any], why: str) -> None:
    optimizer, _ = built(make, "float32")
    assert JaxBlocks.of(optimizer, REPLICAS) == why


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("threads", "names"),
    [
        ("1", ["AdamW"]),
        pytest.param("1", [*OPTIMIZERS, *CLIPPED], marks=pytest.mark.ci),
        pytest.param("3", sorted({*OPTIMIZERS, *CLIPPED} - {"Ftrl"}), marks=pytest.mark.slow),
    ],
    ids=["AdamW", "all", "all with three threads"],
)
def test_blocks_have_the_bits_of_the_whole_update_on_pytorch(
    plain: Callable[..., str], backend: str, threads: str, names: list[str]
) -> None:
    lines = plain(str(dividing_optimizers.__file__), threads, *names, backend=backend).splitlines()
    assert len(lines) == (3 if threads == "1" else 2) * len(names) - (threads == "1" and "Nadam" in names)
    assert [line for line in lines if not line.endswith(": equal")] == []


def test_operations_get_copies_of_a_shared_slot_and_numpy_its_memory() -> None:
    memory = np.ones(4, np.float32)
    slot = SharedSlot(DividedState(DividedLayout((), 64, 1), np.zeros(64, np.uint8)), memory)
    copied = jax.numpy.asarray(slot)
    seen = np.asarray(slot)
    memory[:] = 2
    assert copied.tolist() == [1.0] * 4
    assert seen.tolist() == [2.0] * 4
