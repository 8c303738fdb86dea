"""Keras on JAX."""

import mmap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras.src.utils.tracking import TrackedList

import lockstep
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import ModelError
from lockstep.keras.backends.jax import JaxBackend, refuse_unsupported
from lockstep.keras.backends.jax_blocks import SharedValue
from lockstep.keras.fit import global_step


def test_a_model_is_built_with_the_dtypes_that_jax_computes_with() -> None:
    seen: list[str] = []

    class Noting(keras.Sequential):
        def _symbolic_build(self, iterator: Iterator[Any]) -> None:
            ((_, _, (batch,)),) = iterator
            seen.extend(str(leaf.dtype) for leaf in keras.tree.flatten(batch))

    batch = {"a": np.ones(3, "int64"), "b": np.ones(3), "c": np.ones(3, "uint8")}
    JaxBackend().build(Noting(), "train", lambda: batch)
    assert seen == ["int32", "float32", "uint8"]


def test_replicas_take_the_place_of_data_parallel_over_one_device(capfd: pytest.CaptureFixture[str]) -> None:
    distribution = keras.distribution
    device = distribution.list_devices()[:1]
    try:
        distribution.set_distribution(distribution.DataParallel(devices=device))
        refuse_unsupported(keras.Sequential(), "train")
        assert distribution.distribution() is None
        mesh = distribution.DeviceMesh((1, 1), ("batch", "model"), device)
        layout = distribution.LayoutMap(mesh)
        distribution.set_distribution(distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
        with pytest.raises(ModelError, match="is set to a ModelParallel, which can divide the weights"):
            refuse_unsupported(keras.Sequential(), "train")
    finally:
        distribution.set_distribution(None)
    assert "replicas replace keras.distribution.DataParallel" in capfd.readouterr().err


def test_keras_does_not_search_the_state_of_a_training_for_layers() -> None:
    searched: list[int] = []

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            state = self.model._jax_state
            searched.append(sum(isinstance(part, TrackedList) for part in state.values()))
            # Keras passes the weights of this step to the callback.
            assert self.model.get_weights()[0].all()

    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile("sgd", "mse")
    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=3, verbose=0, callbacks=[Noting()])
    assert searched == [0, 0]
    # Programs that restore checkpoints of their own change it in place.
    model._jax_state = {"trainable_variables": [np.full((2, 1), 3.0), np.zeros(1)]}
    model._jax_state["optimizer_variables"] = [np.array(7), np.array(0.5)]
    model._jax_state_synced = False
    model.jax_state_sync()
    assert model.get_weights()[0].tolist() == [[3.0], [3.0]]
    assert int(model.optimizer.iterations.numpy()) == 7


def test_the_memory_of_the_compiler_is_returned_after_the_steps_that_it_has_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(global_step, "return_freed_memory", lambda: seen.append("returned"))
    step = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append("step"))
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for epochs in (2, 1):
        model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=3, epochs=epochs, verbose=0, callbacks=[step])
    assert seen == ["returned", *["step"] * 6]


class MakesWhole:
    """A divided update that is not divided."""

    def make(self, program: Any, state: Any, totals: Any, *_: Any) -> Any:
        return program.apply(state, totals)


def test_the_memory_of_slots_is_returned_after_the_first_two_steps_that_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(global_step, "return_freed_memory", lambda: seen.append("returned"))
    monkeypatch.setattr(global_step.DividedUpdate, "of", lambda job: MakesWhole())
    step = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append("step"))
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((12, 2)), np.ones((12, 1)), batch_size=3, verbose=0, callbacks=[step])
    assert seen == [*["returned", "step"] * 2, *["step"] * 2]


class ListsTwice(keras.Sequential):
    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.total = keras.metrics.Sum(name="total")

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, self.total]

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        self.total.update_state(y)
        return super().compute_loss(x, y, y_pred, sample_weight)


@pytest.mark.ci
def test_a_metric_that_a_program_lists_twice_counts_once() -> None:
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = ListsTwice([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert [id(metric) for metric in model.metrics].count(id(model.total)) == 2
    history = model.fit(np.ones((8, 2)), np.arange(8.0)[:, None], batch_size=4, verbose=0).history
    assert history["total"] == [28]


@pytest.mark.ci
def test_a_loaded_state_has_the_memory_of_the_one_that_it_replaces() -> None:
    """Its pages exist: to write values there takes a tenth of the time of new memory."""
    state, before = compiled_state()
    # A metric that is listed twice.
    before[3][1] = before[3][0]
    values = numbered(state, before)
    memory = [array.unsafe_buffer_pointer() for group in before[:3] for array in group]
    kept = state.load(before, values)
    assert {array.unsafe_buffer_pointer() for group in kept for array in group}.isdisjoint(memory)
    state.prepare_load(before)
    # The script may see the values that were there before.
    assert np.asarray(before[0][0]).any()
    after = state.load(before, values, in_place=True)
    assert [array.unsafe_buffer_pointer() for group in after[:3] for array in group] == memory
    # The memory of this state is in use.
    again = state.load(before, values, in_place=True)
    # What is loaded may change afterwards.
    expected = {name: array.copy() for name, array in values.items()}
    for array in values.values():
        array[...] = 0
    for loaded in (kept, after, again):
        for name, value in state.named_state(loaded).items():
            np.testing.assert_array_equal(np.asarray(value), expected[name])


@pytest.mark.ci
def test_weights_and_slots_that_are_in_shared_memory_stay_there() -> None:
    pool = SharedPool.create()
    pool.grow(1 << 20)
    memory = np.frombuffer(pool.map(1 << 20), np.uint8)
    state, before = compiled_state()
    values, end = numbered(state, before), 0
    for name, array in values.items():
        if array.ndim:
            values[name] = memory[end : end + array.nbytes].view(array.dtype).reshape(array.shape)
            values[name][...] = array
            end += array.nbytes
    state.prepare_load(before)
    loaded = state.load(before, values, in_place=True, shared=pool)
    shared = [[isinstance(value, SharedValue) for value in group] for group in loaded]
    assert [sum(group) for group in shared] == [2, 0, 4, 0]
    expected = {name: array if array.ndim else array.copy() for name, array in values.items()}
    for array in values.values():
        array[...] = 0
    for name, value in state.named_state(loaded).items():
        np.testing.assert_array_equal(np.asarray(value), expected[name])
    pool.close()


@pytest.mark.ci
def test_a_loaded_state_leaves_arrays_of_steps_that_are_not_compiled() -> None:
    state, before = compiled_state(run_eagerly=True)
    state.load(before, numbered(state, before), in_place=True)
    assert not any(array.is_deleted() for group in before for array in group)


def test_copies_are_complete_while_other_computations_run() -> None:
    """`jnp.array` alone returns before it has read its argument: 58 of 60 copies were wrong."""
    power = jax.jit(lambda matrix: jnp.linalg.matrix_power(matrix, 60))
    matrix = jnp.full((500, 500), 1 / 500)
    backend, state = JaxBackend(), keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(1024)])
    state.compile("sgd", "mse")
    training = backend.training_state(state)
    before = training.present()
    for _ in range(10):
        busy = [power(matrix) for _ in range(3)]
        values = {name: np.full(v.shape, 5, v.dtype) for name, v in training.named_state(before).items()}
        loaded = training.load(before, values)
        for array in values.values():
            array[...] = 0
        for value in training.named_state(loaded).values():
            assert (np.asarray(value) == 5).all()
        jax.block_until_ready(busy)


def test_variables_do_not_share_the_memory_of_a_loaded_state() -> None:
    """Keras alone takes over memory that is aligned."""
    model = keras.Sequential([keras.layers.Input((256,)), keras.layers.Dense(256)])
    model.compile("sgd", "mse")
    state = JaxBackend().training_state(model)
    memory = {name: page_of(value) for name, value in numbered(state, None).items()}
    state.load(None, memory)
    expected = {name: array.copy() for name, array in memory.items()}
    for array in memory.values():
        array[...] = 0
    for name, value in state.named_state(None).items():
        np.testing.assert_array_equal(np.asarray(value), expected[name])


def page_of(array: Any) -> Any:
    """Return a copy in memory of its own that begins with a page."""
    page = np.frombuffer(mmap.mmap(-1, max(1, array.nbytes)), array.dtype, array.size).reshape(array.shape)
    page[...] = array
    return page


def compiled_state(**options: Any) -> tuple[Any, Any]:
    """Return the training state of a model, and the values of its variables."""
    model = ListsTwice([keras.layers.Input((256,)), keras.layers.Dense(256)])
    model.compile("adam", "mse", **options)
    model.optimizer.build(model.trainable_variables)
    state = JaxBackend().training_state(model)
    return state, state.present()


def numbered(state: Any, values: Any) -> dict[str, Any]:
    """Return arrays for the values of a state: each has its number, from 1, everywhere."""
    named = state.named_state(values)
    return {name: np.full(value.shape, i, value.dtype) for i, (name, value) in enumerate(named.items(), 1)}
