"""The update by blocks has the bits of the whole one, for each elementwise optimizer, dtype and shape."""

import functools
import mmap
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest

import dividing_optimizers
from dividing_optimizers import (
    ALL,
    CLIPPED,
    MIXED,
    OPTIMIZERS,
    REPLICAS,
    SHAPES,
    built,
    differing_on_jax,
    divide_on_jax,
    gradients_of,
)
from lockstep.collectives.shared.divided_state import DividedLayout, DividedState
from lockstep.collectives.shared.pool import SharedPool
from lockstep.keras.backends import optimizer_blocks
from lockstep.keras.backends.jax_blocks import JaxBlocks, JaxBlockUpdate, SharedValue

QUICK = {"Adam", "AdamW", "SGD with momentum"}


@pytest.mark.ci(*{*OPTIMIZERS, *CLIPPED} - QUICK)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in (*OPTIMIZERS, *CLIPPED)),
        *(
            pytest.param(*half, marks=pytest.mark.ci)
            for half in (("AdamW", "bfloat16"), ("Adam", "float16"), ("Adam clipped by norms", "float16"))
        ),
    ],
)
def test_blocks_have_the_bits_of_the_whole_update(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_blocks, "BLOCK", 64)
    assert differing_on_jax(name, dtype) == []


# If XLA optimizes little, the bits of these depend on the other operations of a function.
@pytest.mark.parametrize("backend", ["jax"], indirect=True)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["AdamW with a scaled loss", "Adam clipped by norms"], marks=pytest.mark.ci),
        pytest.param(sorted(ALL), marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_blocks_have_the_bits_of_the_whole_update_with_several_dtypes(
    plain: Callable[..., str], backend: str, names: list[str]
) -> None:
    output = plain(str(dividing_optimizers.__file__), "1", *names, backend=backend, optimized=True)
    lines = output.splitlines()
    assert len(lines) == 3 * len(names) - ("Nadam" in names)
    assert [line for line in lines if not line.endswith(": equal")] == []


def replacing(name: str) -> Any:
    optimizer = keras.optimizers.Adam(0.01)
    setattr(optimizer, name, getattr(optimizer, name))
    return optimizer


BASE = next(kind for kind in keras.optimizers.SGD.__mro__ if kind.__name__ == "BaseOptimizer")


class Own(keras.optimizers.Adam):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: keras.optimizers.Adafactor(0.01), "blocks of Adafactor do not have its bits"),
        (lambda: Own(0.01), "blocks of Own do not have its bits"),
        (lambda: keras.optimizers.LossScaleOptimizer(Own(0.01)), "blocks of Own do not have its bits"),
        (lambda: replacing("update_step"), "the program replaces Adam.update_step"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(replacing("_clip_gradients")),
            "the program replaces Adam._clip_gradients",
        ),
        (
            lambda: keras.optimizers.Adam(0.01, clipnorm=1.0, gradient_accumulation_steps=2),
            "it clips sums of gradients by their norms",
        ),
        (lambda: keras.optimizers.Adam(lambda: 0.01), "its learning rate is a function"),
    ],
)
def test_other_updates_are_not_cut(make: Callable[[], Any], why: str) -> None:
    optimizer, _ = built(make, "float32")
    assert JaxBlocks.of(optimizer, REPLICAS) == why


def test_an_optimizer_whose_other_variables_depend_on_the_first_weight_is_not_cut() -> None:
    optimizer, _ = built(lambda: keras.optimizers.Nadam(0.01), MIXED)
    assert JaxBlocks.of(optimizer, REPLICAS) == "its variables are not known"


def of_the_whole_gradient(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
    optimizer.assign_sub(variable, gradient * keras.ops.sum(gradient))


@pytest.mark.parametrize(
    ("kind", "name", "method"),
    [
        (keras.optimizers.SGD, "update_step", of_the_whole_gradient),
        (
            keras.optimizers.SGD,
            "update_step",
            functools.wraps(keras.optimizers.SGD.update_step)(lambda *args: of_the_whole_gradient(*args)),
        ),
        (keras.optimizers.SGD, "update_step", functools.partialmethod(of_the_whole_gradient)),
        (keras.optimizers.SGD, "learning_rate", property(lambda optimizer: 0.1)),
        # The method of the derived class calls it.
        (BASE, "build", functools.wraps(BASE.build)(lambda *args: None)),
    ],
    ids=["plain", "wrapping", "partial", "property", "of a base"],
)
def test_a_method_that_the_program_replaces_in_a_class_is_not_cut(
    kind: Any, name: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, _ = built(lambda: keras.optimizers.SGD(0.01), "float32")
    assert isinstance(JaxBlocks.of(optimizer, REPLICAS), JaxBlocks)
    monkeypatch.setattr(kind, name, method)
    assert JaxBlocks.of(optimizer, REPLICAS) == f"the program replaces SGD.{name}"


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("threads", "names"),
    [
        ("1", ["AdamW", "SGD with a scaled loss, averages and norms"]),
        pytest.param("1", list(ALL), marks=pytest.mark.ci),
        pytest.param("3", sorted({*ALL} - {"Ftrl"}), marks=pytest.mark.slow),
    ],
    ids=["two", "all", "all with three threads"],
)
def test_blocks_have_the_bits_of_the_whole_update_on_pytorch(
    plain: Callable[..., str], backend: str, threads: str, names: list[str]
) -> None:
    lines = plain(str(dividing_optimizers.__file__), threads, *names, backend=backend).splitlines()
    # Keras's own Nadam takes only one of the dtypes on PyTorch.
    dtypes, without = (6, 3) if threads == "1" else (2, 0)
    assert len(lines) == dtypes * len(names) - without * ("Nadam" in names)
    assert [line for line in lines if not line.endswith(": equal")] == []


@pytest.mark.parametrize("dtype", ["float32", MIXED])
def test_an_update_takes_shared_values_for_what_was_made_from_them_until_they_change(dtype: str) -> None:
    optimizer, variables = built(ALL["AdamW"], dtype)
    functions = JaxBlocks.of(optimizer, REPLICAS)
    assert isinstance(functions, JaxBlocks)
    start = [[jax.numpy.array(v.value) for v in group] for group in (variables, optimizer.variables)]
    weights, values = divide_on_jax(functions, *start, gradients_of("AdamW", dtype, 2, SHAPES))
    pool = weights[0]._pool

    def epoch_end() -> tuple[list[Any], list[Any]]:
        return [jax.numpy.asarray(value) for value in weights], [jax.numpy.asarray(value) for value in values]

    def are_shared(values: list[Any]) -> list[bool]:
        return [isinstance(value, SharedValue) for value in values]

    first, second = epoch_end()
    latest_first, latest_second = epoch_end()
    functions.take_back(latest_first, latest_second)
    assert all(map(operator.is_, latest_first, weights))
    assert are_shared(latest_second) == are_shared(values)
    functions.take_back(first, second)
    assert not any(are_shared([*first, *second]))
    first, second = epoch_end()
    first[0] = first[0] + 0
    functions.take_back(first, second)
    assert not any(are_shared(first))
    assert are_shared(second) == are_shared(values)
    first, second = epoch_end()
    pool.keep_shown()
    functions.take_back(first, second)
    assert not any(are_shared([*first, *second]))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("dtype", ["float32", MIXED])
def test_a_worker_that_joins_uses_values_in_shared_memory_where_they_are(name: str, dtype: str) -> None:
    optimizer, variables = built(ALL[name], dtype)
    functions = JaxBlocks.of(optimizer, REPLICAS)
    assert isinstance(functions, JaxBlocks)
    start = [[jax.numpy.array(v.value) for v in group] for group in (variables, optimizer.variables)]
    gradients = gradients_of(name, dtype, 3, SHAPES)
    weights, values = divide_on_jax(functions, *start, gradients[:2])
    pool, shared = weights[0]._pool, weights[0].state
    assert shared.updates == 2

    def update_of(weights: list[Any], values: list[Any]) -> JaxBlockUpdate:
        joining = JaxBlocks.of(optimizer, REPLICAS)
        assert isinstance(joining, JaxBlocks)
        return JaxBlockUpdate(joining, (weights, [], values, []), gradients[2], None, lambda *_: None, [])

    def loaded() -> Iterator[list[Any]]:
        for of_chief in (weights, values):
            arrays = [np.asarray(value) for value in of_chief]
            yield [SharedValue.of(pool, array) or jax.numpy.array(array) for array in arrays]

    of_joiner = [*loaded()]
    update = update_of(*of_joiner)
    assert not update.has(shared) or not functions.blocks.slots
    assert not update.adopt(shared, 1, pool)
    assert update.adopt(shared, 2, pool)
    assert update.has(shared)
    assert all(v.state is shared for v in [*of_joiner[0], *of_joiner[1]] if isinstance(v, SharedValue))
    for one in (0, -1):
        weights_of_joiner, values_of_joiner = loaded()
        weights_of_joiner[one] = jax.numpy.array(weights_of_joiner[one])
        update = update_of(weights_of_joiner, values_of_joiner)
        assert not update.adopt(shared, 2, pool)
        update.own_values()
        own = update._weights + update._values
        for slots in (*shared.slots, shared.weights_after(2)):
            for array in slots:
                array[:] = 0
        assert not any(isinstance(value, SharedValue) for value in own)
    tried, tried_slots = start
    shapes = [value.shape for value in (*tried, *tried_slots)]
    update_of(tried, tried_slots).forget_values()
    assert [value.shape for value in (*tried, *tried_slots)] == shapes
    assert not any(isinstance(value, jax.Array) for value in tried)
    others = [value for value in tried_slots if isinstance(value, jax.Array)]
    assert len(others) == len(functions.blocks.others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operations_get_what_keeps_a_shared_value_and_numpy_its_memory(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SharedPool.create()
    pool.grow(size := 3 * mmap.PAGESIZE)
    memory = np.frombuffer(pool.map(size), np.uint8)[64:-64].view(jax.numpy.dtype(dtype))
    memory[:] = 1
    value = SharedValue(pool, DividedState(DividedLayout((), 64, 1), np.zeros(64, np.uint8)), memory)
    first, seen = jax.numpy.asarray(value), np.asarray(value)
    by_numpy = np.asarray(jax.numpy.asarray(value))
    pool.keep_shown()
    memory[:] = 2
    monkeypatch.setattr("lockstep.collectives.shared.pool._TAKE_PAGES", -1)
    copied = jax.numpy.asarray(value)
    memory[:] = 3
    assert set(first.tolist()) == set(by_numpy.tolist()) == {1.0}
    assert set(copied.tolist()) == {2.0}
    assert set(seen.tolist()) == {3.0}
    pool.close()
