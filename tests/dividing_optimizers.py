"""Optimizers whose updates are cut into blocks. As a program, it compares them with whole ones on PyTorch.

dividing_optimizers.py THREADS NAME...
"""

import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from lockstep.collectives.shared.divided_state import Array, DividedLayout, DividedState
from lockstep.collectives.shared.pool import SharedPool
from lockstep.keras.backends import optimizer_blocks
from lockstep.keras.backends.multi_update import Update

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
"""Those that PyTorch divides, but JAX does not."""


def built(
    make: Callable[[], Any], dtype: str, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> tuple[Any, list[Any]]:
    numbers = np.random.default_rng(0)
    weights = [
        keras.Variable(numbers.normal(size=shape), dtype=dtype, name=f"bias{i}" if i % 2 else f"kernel{i}")
        for i, shape in enumerate(shapes)
    ]
    optimizer = make()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(weights)
    return optimizer, weights


def compare(threads: int, names: Sequence[str]) -> None:
    """Print, for each optimizer and dtype, which variables differ after updates by blocks."""
    import torch

    from lockstep.keras.backends.torch_blocks import TorchBlocks, TorchBlockUpdate
    from lockstep.keras.backends.torch_tensors import borrowed, to_numpy

    torch.set_num_threads(threads)
    shapes, dtypes = SHAPES, ["float32", "float64", "bfloat16"]
    optimizer_blocks.BLOCK = 64
    if threads > 1:
        shapes, dtypes, optimizer_blocks.BLOCK = LARGE, dtypes[:2], 1 << 14
        for other, dtype in ((optimizers.Adam, "bfloat16"), (optimizers.Ftrl, "float32")):
            assert "several threads" in str(TorchBlocks.of(Update(*built(other, dtype)), REPLICAS))
    check_changes()
    for name in names:
        make = {**OPTIMIZERS, **CLIPPED}[name]
        for dtype in dtypes:
            if name == "Nadam" and dtype == "bfloat16":
                # Keras's own does not take it on PyTorch.
                continue
            numbers = np.random.default_rng(1)
            steps: list[dict[int, Array]] = []
            for step in range(4):
                arrays = [numbers.normal(size=shape).astype(np.dtype(dtype)) for shape in shapes]
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
    changes: list[tuple[Any, str, Any, str]] = [
        (optimizer, "clipnorm", 1.0, "it clips sums of gradients by their norms"),
        (optimizer, "gradient_accumulation_steps", None, ""),
        (optimizer, "weight_decay", 0.1, ""),
        (optimizer, "learning_rate", optimizers.schedules.CosineDecay(0.1, 9), ""),
        (weights[0], "constraint", keras.constraints.NonNeg(), "a weight has a constraint"),
        (weights[0], "constraint", None, ""),
        (optimizer, "learning_rate", lambda: 0.1, "its learning rate is a function"),
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
        assert update.finish(shared, lambda: pool.map_privately(layout.size)) == ("logs", None)
        assert update.has(shared)
        if number == len(steps) - 2:
            check_fork(update, shared)
            update.finish(shared, lambda: pool.map_privately(layout.size))
    return update, shared


if __name__ == "__main__":
    compare(int(sys.argv[1]), sys.argv[2:])
