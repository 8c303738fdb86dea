"""Optimizers whose updates are cut into blocks. As a program, it compares them with whole ones.

dividing_optimizers.py THREADS NAME...
"""

import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.collectives.shared.divided_state import Array, DividedLayout, DividedState
from lockstep.collectives.shared.pool import SharedPool
from lockstep.keras.backends import optimizer_blocks
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.backends.optimizer_blocks import updating_part
from lockstep.keras.private.common import with_clipped

optimizers = keras.optimizers
LARGE = ((100_001,), (70_003,))
"""Shapes for which PyTorch uses several threads."""
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
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Adamax": lambda: optimizers.Adamax(optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(0.1),
    "Lion": lambda: optimizers.Lion(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
}


CLIPPED: dict[str, Callable[[], Any]] = {
    "Adam clipped by norms": lambda: optimizers.Adam(0.01, clipnorm=0.5),
    "AdamW clipped by the global norm": lambda: optimizers.AdamW(0.01, global_clipnorm=0.5),
    "SGD clipped by the global norm": lambda: optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.5, loss_scale_factor=8.0
    ),
}
SCALING: dict[str, Callable[[], Any]] = {
    "AdamW with a scaled loss": lambda: optimizers.LossScaleOptimizer(
        optimizers.AdamW(0.01, weight_decay=0.02), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "SGD with a scaled loss, averages and norms": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3, use_ema=True, ema_overwrite_frequency=2),
        initial_scale=4.0,
        dynamic_growth_steps=2,
    ),
    "Adam with a scaled loss, by the global norm": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, global_clipnorm=0.5), initial_scale=4.0
    ),
}
ALL = {**OPTIMIZERS, **CLIPPED, **SCALING}
MIXED = "bfloat16 and float32"
"""The dtypes of weights that have several."""


def dtypes_of(dtype: str, weights: int) -> list[str]:
    """Return the dtype of each weight."""
    return [(dtype.split(" and ") * weights)[i] for i in range(weights)]


def gradients_of(
    name: str, dtype: str, steps: int, shapes: Sequence[tuple[int, ...]]
) -> list[list[npt.NDArray[Any]]]:
    """Return gradients of each step; if the loss is scaled, those of the second step are not all finite."""
    numbers = np.random.default_rng(1)
    gradients = [
        [
            np.asarray(numbers.normal(size=shape)).astype(np.dtype(kind))
            for shape, kind in zip(shapes, dtypes_of(dtype, len(shapes)), strict=True)
        ]
        for _ in range(steps)
    ]
    if name in SCALING:
        gradients[1][-1][-1] = np.inf
    return gradients


def built(
    make: Callable[[], Any], dtype: str, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> tuple[Any, list[Any]]:
    numbers = np.random.default_rng(0)
    weights = [
        keras.Variable(numbers.normal(size=shape), dtype=kind, name=f"bias{i}" if i % 2 else f"kernel{i}")
        for i, (shape, kind) in enumerate(zip(shapes, dtypes_of(dtype, len(shapes)), strict=True))
    ]
    optimizer = make()
    getattr(optimizer, "inner_optimizer", optimizer).exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(weights)
    return optimizer, weights


def differing_on_jax(name: str, dtype: str) -> list[str]:
    """Return the paths of the variables whose bits differ after updates by blocks on JAX."""
    import jax

    from lockstep.keras.backends.jax_blocks import JaxBlocks, SharedValue

    optimizer, variables = built(ALL[name], dtype)
    gradients = gradients_of(name, dtype, 4, SHAPES)
    functions = JaxBlocks.of(optimizer, REPLICAS)
    assert isinstance(functions, JaxBlocks), functions
    assert sum(group.blocks for group in functions.blocks.groups) > REPLICAS

    def start() -> tuple[list[Any], list[Any]]:
        return [jax.numpy.array(v.value) for v in variables], [
            jax.numpy.array(v.value) for v in optimizer.variables
        ]

    apply = whole_update_on_jax(optimizer)
    weights, values = start()
    for of_step in gradients:
        weights, values = apply(values, of_step, weights)
    own_weights, own_values = divide_on_jax(functions, *start(), gradients)
    assert any(isinstance(value, SharedValue) for value in own_values) == bool(functions.blocks.slots)
    return [
        variable.path
        for variable, expected, value in zip(
            [*variables, *optimizer.variables], [*weights, *values], [*own_weights, *own_values], strict=True
        )
        if np.asarray(value).tobytes() != np.asarray(expected).tobytes()
    ]


def whole_update_on_jax(optimizer: Any) -> Callable[[list[Any], Sequence[Array], list[Any]], Any]:
    """Return the update of a job whose workers do not divide it."""
    import jax

    from lockstep.keras.backends.jax_blocks import WholeGradients

    whole_gradients = WholeGradients.of(optimizer)
    assert whole_gradients is not None

    def applied(values: Any, gradients: Any, weights: Any, clipped: Any) -> Any:
        with nullcontext() if clipped is None else with_clipped(updating_part(optimizer), clipped):
            return optimizer.stateless_apply(values, gradients, weights)

    compiled = jax.jit(applied)

    def apply(values: list[Any], gradients: Sequence[Array], weights: list[Any]) -> Any:
        _, clipped = whole_gradients.compute(values, None, gradients)
        assert (clipped is None) != whole_gradients.clips
        return compiled(values, gradients, weights, clipped)

    return apply


def divide_on_jax(
    functions: Any, weights: list[Any], values: list[Any], gradients: Sequence[Sequence[Array]]
) -> tuple[list[Any], list[Any]]:
    """Return the weights and the optimizer's values after updates by blocks."""
    from lockstep.keras.backends.jax_blocks import JaxBlockUpdate

    blocks = functions.blocks
    layout = DividedLayout(blocks.block_groups, blocks.elements, REPLICAS, versions=2)
    pool = SharedPool.create()
    pool.grow(layout.size)
    shared = DividedState(layout, np.frombuffer(pool.map(layout.size), np.uint8))
    state: Any = (weights, [], values, [])
    for number, of_step in enumerate(gradients):
        pending: list[Any] = []
        update = JaxBlockUpdate(functions, state, of_step, None, lambda *_: ({}, [], [], None), pending)

        def compute(block: int, slots: Sequence[Array], update: JaxBlockUpdate = update) -> Sequence[Array]:
            group, start, _ = layout.places[block]
            return update.compute(group, start // layout.elements, slots)

        for replica in range(REPLICAS):
            if not number:
                for block in layout.shards[replica]:
                    update.fill(shared, block)
            shared.update(number, replica, compute)
        _, state = update.finish(shared, number + 1, pool)
    return state[0], state[2]


def compare_on_jax(names: Sequence[str]) -> None:
    """Print, for each optimizer and dtypes, which variables differ after updates by blocks."""
    optimizer_blocks.BLOCK = 64
    for name in names:
        for dtype in ("float32", "float16", MIXED):
            if (name, dtype) != ("Nadam", MIXED):
                differing = differing_on_jax(name, dtype)
                print(f"{name}, {dtype}: {', '.join(differing) or 'equal'}", flush=True)


def compare_on_torch(threads: int, names: Sequence[str]) -> None:
    """Print, for each optimizer and dtype, which variables differ after updates by blocks."""
    import torch

    from lockstep.keras.backends.torch_blocks import TorchBlocks, TorchBlockUpdate
    from lockstep.keras.backends.torch_tensors import borrowed, to_numpy

    torch.set_num_threads(threads)
    shapes, dtypes = SHAPES, ["float32", "float64", "bfloat16", "float16", MIXED, "float32 and bfloat16"]
    optimizer_blocks.BLOCK = 64
    if threads > 1:
        shapes, dtypes, optimizer_blocks.BLOCK = LARGE, dtypes[:2], 1 << 14
        for other, dtype in ((optimizers.Adam, "bfloat16"), (optimizers.Ftrl, "float32")):
            assert "several threads" in str(TorchBlocks.of(Update(*built(other, dtype)), REPLICAS))
    check_changes()
    for name in names:
        make = ALL[name]
        for dtype in dtypes:
            if name == "Nadam" and dtype.startswith(("bfloat16", "float16")):
                # Keras's own does not take it on PyTorch.
                continue
            steps: list[dict[int, Array]] = []
            for step, arrays in enumerate(gradients_of(name, dtype, 4, shapes)):
                # A weight without a gradient, where the others do not change it.
                absent = 1 if step == 2 and "averages" not in name and "accumulates" not in name else None
                steps.append({i: array for i, array in enumerate(arrays) if i != absent})
            whole, weights = built(make, dtype, shapes)
            update: Any = Update(whole, weights)
            for of_step in steps:
                with torch.no_grad():
                    update.apply([borrowed(of_step[i]) if i in of_step else None for i in range(len(shapes))])
            own, own_weights = built(make, dtype, shapes)
            blocks = TorchBlocks.of(Update(own, own_weights), REPLICAS)
            assert isinstance(blocks, TorchBlocks), blocks
            update, shared = divide(blocks, TorchBlockUpdate, steps)
            pairs = zip([*weights, *whole.variables], [*own_weights, *own.variables], strict=True)
            differing = [
                a.path for a, b in pairs if to_numpy(a.value).tobytes() != to_numpy(b.value).tobytes()
            ]
            print(f"{name}, {dtype}: {', '.join(differing) or 'equal'}", flush=True)
            # What the script writes stays in this process, whatever it writes with, and lasts.
            for position in list(blocks.blocks.slots)[:1]:
                value = own.variables[position].value
                before = [slot.copy() for slots in shared.slots for slot in slots]
                value.data.fill_(7)
                assert not update.has(shared)
                after = [slot for slots in shared.slots for slot in slots]
                assert all(np.array_equal(*both) for both in zip(before, after, strict=True))
                address = value.data_ptr()
                update.release()
                assert value.data_ptr() != address
                assert bool((value == 7).all())


def check_changes() -> None:
    """What the program changes in an optimizer after its first update counts."""
    from lockstep.keras.backends.torch_blocks import TorchBlocks

    optimizer, weights = built(lambda: optimizers.Adam(0.1, gradient_accumulation_steps=2), "float32")
    update = Update(optimizer, weights)
    step = optimizers.Adam.update_step

    @functools.wraps(step)
    def update_step(optimizer: Any, gradient: Any, *args: Any) -> None:
        step(optimizer, gradient / keras.ops.norm(gradient), *args)

    changes: list[tuple[Any, str, Any, str]] = [
        (optimizer, "clipnorm", 1.0, "it clips sums of gradients by their norms"),
        (optimizer, "gradient_accumulation_steps", None, ""),
        (optimizer, "weight_decay", 0.1, ""),
        (optimizer, "learning_rate", optimizers.schedules.CosineDecay(0.1, 9), ""),
        (weights[0], "constraint", keras.constraints.NonNeg(), "a weight has a constraint"),
        (weights[0], "constraint", None, ""),
        (optimizers.Adam, "update_step", update_step, "the program replaces Adam.update_step"),
        (optimizers.Adam, "update_step", step, ""),
        (optimizer, "learning_rate", lambda: 0.1, "its learning rate is a function"),
        (optimizer, "update_step", optimizer.update_step, "the program replaces Adam.update_step"),
    ]
    before = TorchBlocks.decisive(update)
    assert all(map(operator.is_, before, TorchBlocks.decisive(update)))
    for thing, name, value, refusal in changes:
        setattr(thing, name, value)
        after = TorchBlocks.decisive(update)
        assert len(before) != len(after) or not all(map(operator.is_, before, after)), name
        blocks, before = TorchBlocks.of(update, REPLICAS), after
        assert (blocks if isinstance(blocks, str) else "") == refusal


def check_fork(update: Any, shared: DividedState) -> None:
    """A process that is forked has the values of that time, and so has this one."""
    slots = [slot for slots in shared.slots for slot in slots]
    before = [slot.copy() for slot in slots]
    values = [slot.array.tobytes() for slot in update.own_slots()]
    assert all(slot.is_in(shared) for slot in update.own_slots())
    readable, writable = os.pipe()
    if not (child := os.fork()):
        os.read(readable, 1)
        os._exit(values != [slot.array.tobytes() for slot in update.own_slots()])
    for slot in slots:
        slot.view(np.uint8)[:] = 1
    os.write(writable, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert values == [slot.array.tobytes() for slot in update.own_slots()]
    for slot, value in zip(slots, before, strict=True):
        slot[:] = value
    assert not update.has(shared)
    assert all(slot.is_in(shared) for slot in update.own_slots())


def divide(blocks: Any, make: Any, steps: Sequence[dict[int, Array]]) -> tuple[Any, DividedState]:
    """Make updates by blocks; return the last one, and the memory."""
    layout = DividedLayout(blocks.blocks.block_groups, blocks.blocks.elements, REPLICAS)
    assert len(layout.places) > REPLICAS
    pool = SharedPool.create()
    pool.grow(layout.size)
    shared = DividedState(layout, np.frombuffer(pool.map(layout.size), np.uint8))
    for number, gradients in enumerate(steps):
        update = make(blocks, gradients, lambda: "logs")

        def compute(block: int, slots: Sequence[Array], update: Any = update) -> Any:
            group, start, _ = layout.places[block]
            return update.compute(group, start // layout.elements, slots)

        assert update.has(shared) == (number > 0)
        for replica in range(REPLICAS):
            if not number:
                for block in layout.shards[replica]:
                    update.fill(shared, block)
            shared.update(number, replica, compute)
        assert update.finish(shared, number + 1, pool) == ("logs", None)
        assert update.has(shared)
        if number == len(steps) - 2:
            check_fork(update, shared)
            update.finish(shared, number + 1, pool)
    return update, shared


if __name__ == "__main__":
    if keras.backend.backend() == "jax":
        compare_on_jax(sys.argv[2:])
    else:
        compare_on_torch(int(sys.argv[1]), sys.argv[2:])
