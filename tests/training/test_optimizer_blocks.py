"""The update by blocks has the bits of the whole one, for each elementwise optimizer, dtype and shape."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
import pytest

from lockstep.collectives.shared.divided_state import Array, DividedLayout, DividedState
from lockstep.keras.backends import optimizer_blocks
from lockstep.keras.backends.jax_blocks import JaxBlocks, JaxBlockUpdate, SharedSlot
from lockstep.keras.backends.optimizer_blocks import OptimizerBlocks, blocks_of

optimizers = keras.optimizers
SHAPES = ((), (1,), (7, 11), (130,), (0,), (3, 5, 4))
REPLICAS = 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD with momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam with amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.02),
    "Adam with averages": lambda: optimizers.Adam(
        0.01, clipvalue=0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "Adam that accumulates": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "Adamax": lambda: optimizers.Adamax(optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(0.1),
    "Lion": lambda: optimizers.Lion(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
}

QUICK = {"Adam", "AdamW", "SGD with momentum"}


def built(make: Callable[[], Any], dtype: str) -> tuple[Any, list[Any]]:
    numbers = np.random.default_rng(0)
    weights = [
        keras.Variable(numbers.normal(size=shape), dtype=dtype, name=f"bias{i}" if i % 2 else f"kernel{i}")
        for i, shape in enumerate(SHAPES)
    ]
    optimizer = make()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(weights)
    return optimizer, weights


def divided(
    blocks: OptimizerBlocks, weights: list[Any], values: list[Any], gradients: Sequence[Sequence[Array]]
) -> tuple[list[Any], list[Any]]:
    """Return the weights and the optimizer's values after updates by blocks."""
    functions, layout = JaxBlocks(blocks), DividedLayout(blocks.block_groups, blocks.elements, REPLICAS)
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
        _, state = update.finish(shared)
        jax.block_until_ready(pending[1])
    return state[0], state[2]


@pytest.mark.ci(*OPTIMIZERS.keys() - QUICK)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in OPTIMIZERS), ("AdamW", "bfloat16"), ("Adam", "float16")],
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
    blocks = blocks_of(optimizer, variables, REPLICAS)
    assert isinstance(blocks, OptimizerBlocks), blocks
    assert sum(group.blocks for group in blocks.groups) > REPLICAS

    def start() -> tuple[list[Any], list[Any]]:
        return [jax.numpy.array(v.value) for v in variables], [
            jax.numpy.array(v.value) for v in optimizer.variables
        ]

    whole = jax.jit(optimizer.stateless_apply)
    weights, values = start()
    for of_step in gradients:
        weights, values = whole(values, of_step, weights)
    own_weights, own_values = divided(blocks, *start(), gradients)
    assert any(isinstance(value, SharedSlot) for value in own_values) == bool(blocks.slots)
    for variable, expected, value in zip(
        [*variables, *optimizer.variables], [*weights, *values], [*own_weights, *own_values], strict=True
    ):
        assert np.asarray(value).tobytes() == np.asarray(expected).tobytes(), variable.path


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: optimizers.Adafactor(0.01), "blocks of Adafactor do not have its bits"),
        (lambda: optimizers.Nadam(0.01), "blocks of Nadam do not have its bits"),
        (lambda: optimizers.Adam(0.01, clipnorm=1.0), "it clips by a norm, which needs whole gradients"),
        (lambda: optimizers.Adam(lambda: 0.01), "its learning rate is a function"),
    ],
)
def test_other_updates_are_not_cut(make: Callable[[], Any], why: str) -> None:
    optimizer, variables = built(make, "float32")
    assert blocks_of(optimizer, variables, REPLICAS) == why


def test_operations_get_copies_of_a_shared_slot_and_numpy_its_memory() -> None:
    memory = np.ones(4, np.float32)
    slot = SharedSlot(DividedState(DividedLayout((), 64, 1), np.zeros(64, np.uint8)), memory)
    copied = jax.numpy.asarray(slot)
    seen = np.asarray(slot)
    memory[:] = 2
    assert copied.tolist() == [1.0] * 4
    assert seen.tolist() == [2.0] * 4
