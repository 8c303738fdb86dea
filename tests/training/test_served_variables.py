"""What a parameter server has of a model and its optimizer, and what it refuses, in this process."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import keras
import numpy as np
import pytest

import lockstep
from lockstep.collectives.layout import allocate
from lockstep.errors import DataError, ModelError
from lockstep.keras.backends.losses import divided
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.fit.served import refuse_callbacks
from lockstep.keras.input.readings import whole_batch
from lockstep.keras.parameter_server.process import UsedIterators
from lockstep.keras.parameter_server.served_optimizers import built_copy, refuse_unserved, shapes_of
from lockstep.keras.parameter_server.server_shards import ServedVariables
from lockstep.keras.parameter_server.servers import ServedState, Servers, same_bits
from lockstep.keras.parameter_server.table_rows import put_rows, take_rows
from lockstep.keras.patches import adapter
from lockstep.keras.state.checkpoint_callback import Checkpoint
from lockstep.parameter_server.partitioners import FixedShardsPartitioner, Shard, place_variables
from lockstep.protocol.parameter_server import ServedValues

optimizers = keras.optimizers
SERVERS = 2
WHOLE: tuple[str, ...] = ("SGD", "RMSprop", "Adam", "AdamW", "Adagrad", "Adamax", "Nadam", "Lion")


class Factor(optimizers.SGD):
    """Keeps a hyperparameter out of its config."""

    def __init__(self, learning_rate: float = 0.1, factor: float = 1.0, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        self.factor = factor


class OwnStep(keras.Sequential):
    def train_step(self, *data: Any) -> Any:
        return super().train_step(*data)


class OwnPairs(optimizers.SGD):
    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
        return super().apply_gradients(grads_and_vars, **options)


def model(optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(7, **options), keras.layers.Dense(3)])
    made.compile(optimizer, "mse")
    made.optimizer.build(made.trainable_variables)
    return made


def placed(made: keras.Model, partitioner: Any = None) -> tuple[Shard, ...]:
    return place_variables(shapes_of(made.trainable_variables), SERVERS, partitioner)


@pytest.mark.ci(*[*WHOLE][::2])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_servers_together_update_like_the_optimizer_of_the_model(name: str, divided: bool) -> None:
    made, twin = (model(getattr(optimizers, name)(0.01)) for _ in range(2))
    shards = placed(made, FixedShardsPartitioner(3) if divided else None)
    refuse_unserved(made, shards)
    generator = np.random.default_rng(0)
    weights = twin.trainable_variables
    steps = [[generator.normal(size=one.shape).astype("float32") for one in weights] for _ in range(3)]

    def apply(of: keras.Model, gradients: Any) -> None:
        tensors = [keras.ops.convert_to_tensor(one) for one in gradients]
        of.optimizer.apply(tensors, of.trainable_variables)

    # The servers begin with the variables of an optimizer that has been used.
    for one in (made, twin):
        apply(one, steps[0])
    found = [np.empty(one.shape, "float32") for one in weights]
    for server in range(SERVERS):
        own = [one for one in shards if one.server == server]
        served = ServedVariables(adapter().steps())
        served.add(Update(made.optimizer, made.trainable_variables), own)
        for gradients in steps[1:]:
            served.update({k: one.part_of(gradients[one.variable]) for k, one in enumerate(own)})
        for shard, value in zip(own, served.values(), strict=True):
            shard.part_of(found[shard.variable])[...] = value
    for gradients in steps[1:]:
        apply(twin, gradients)
    for value, expected in zip(found, weights, strict=True):
        np.testing.assert_allclose(value, keras.ops.convert_to_numpy(expected), rtol=1e-5, atol=1e-6)


def test_a_copy_has_hyperparameters_outside_of_the_config_and_shares_the_schedule() -> None:
    schedule = optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    made = model(Factor(schedule, factor=3.0))
    copy, _ = built_copy(made.optimizer, made.trainable_variables)
    assert copy.factor == 3.0
    assert copy._learning_rate is schedule


def test_without_gradients_only_the_iterations_advance() -> None:
    made = model("adam")
    served = ServedVariables(adapter().steps())
    served.add(Update(made.optimizer, made.trainable_variables), placed(made))
    before = served.values()
    served.update({})
    assert [(one == two).all() for one, two in zip(before, served.values(), strict=True)] == [True] * 4
    assert int(served.changes()[0][4]) == 1


@pytest.mark.parametrize(
    ("make", "partitioner", "said"),
    [
        (lambda: model(optimizers.Adam(global_clipnorm=1.0)), None, "global_clipnorm=1.0"),
        (
            lambda: model(optimizers.LossScaleOptimizer(optimizers.SGD())),
            None,
            "LossScaleOptimizer scales the loss",
        ),
        (lambda: model("adafactor"), None, "Adafactor"),
        (
            lambda: model(optimizers.Lamb()),
            FixedShardsPartitioner(2),
            "Lamb may not update each element independently",
        ),
        (lambda: model(optimizers.SGD(clipnorm=1.0)), FixedShardsPartitioner(2), "clipnorm"),
        (
            lambda: model("sgd", kernel_constraint=keras.constraints.MaxNorm()),
            FixedShardsPartitioner(2),
            "whose constraint is for the whole variable",
        ),
    ],
)
def test_what_servers_cannot_update_is_refused(make: Callable[[], Any], partitioner: Any, said: str) -> None:
    made = make()
    with pytest.raises(ModelError, match=said):
        refuse_unserved(made, placed(made, partitioner))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("backend", "own_step", "refused"),
    [("tensorflow", False, True), ("torch", True, True), ("torch", False, False), ("jax", True, False)],
)
def test_an_apply_gradients_of_the_program_is_refused_where_steps_call_it(
    backend: str, own_step: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (OwnStep if own_step else keras.Sequential)([keras.Input((6,)), keras.layers.Dense(1)])
    made.compile(OwnPairs(), "mse")
    made.optimizer.build(made.trainable_variables)
    shards = placed(made)
    if not refused and backend != keras.backend.backend():
        pytest.skip("that backend would create variables")
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    said = pytest.raises(ModelError, match="OwnPairs has apply_gradients of the program's own")
    with said if refused else nullcontext():
        refuse_unserved(made, shards)


def test_an_apply_of_one_optimizer_alone_is_refused() -> None:
    made = model("sgd")
    made.optimizer.apply = lambda *args: None
    with pytest.raises(ModelError, match="SGD has apply of the program's own"):
        refuse_unserved(made, placed(made))


def test_a_layer_frozen_after_compile_is_refused() -> None:
    made = model("adam")
    made.layers[0].trainable = False
    with pytest.raises(ModelError, match="is no longer trainable"):
        refuse_unserved(made, placed(made))


def test_an_iterator_is_read_once() -> None:
    used, iterator = UsedIterators(), iter([1, 2])
    for data in ([1, 2], [1, 2], iterator):
        used.refuse_again(data)
    with pytest.raises(DataError, match="was read by an earlier fit"):
        used.refuse_again(iterator)


def test_saving_within_an_epoch_is_refused() -> None:
    refuse_callbacks([keras.callbacks.ModelCheckpoint("x.keras")])
    with pytest.raises(ModelError, match="ModelCheckpoint has save_freq=3"):
        refuse_callbacks([keras.callbacks.ModelCheckpoint("x.keras", save_freq=3)])


def test_checkpoints_of_lockstep_are_refused() -> None:
    with pytest.raises(ModelError, match="Checkpoint is not supported with parameter servers: use"):
        refuse_callbacks([keras.callbacks.ModelCheckpoint("x.keras"), Checkpoint("saved")])


class Written:
    """Takes the place of the servers, and notes what is written."""

    def __init__(self) -> None:
        self.variables: dict[int, Any] = {}
        self.slots: dict[tuple[int, int], Any] = {}
        self.lent: list[Any] = []

    def lends(self, array: Any) -> bool:
        return any(array is lent for lent in self.lent)

    def write(self, step: int, variables: Any, slots: Any) -> None:
        self.variables, self.slots = variables, slots


def test_only_what_has_changed_is_written_and_copied() -> None:
    """The present values are the memory of variables, which change in place later."""
    state, servers = ServedState(), Written()
    state.slots = [(0, 0), (1, 0)]
    state.weights = [np.zeros(3), np.ones(3), np.full(3, 2.0)]
    state.values = [np.zeros(3), np.ones(3)]
    same, *_ = before = list(state.weights)
    # The third variable is in the memory of the array that was read.
    now = [np.zeros(3), np.array([1.0, 1.0, np.nan]), before[2]]
    written = state.write_changes(cast(Servers, servers), 1, now, [np.full(3, 9.0), np.ones(3)])
    assert written == ([1], [(0, 0)])
    assert state.weights[0] is same
    assert servers.variables.keys() == {1}
    assert servers.slots[0, 0].tolist() == [9.0] * 3
    for array in now:
        array[0] = -0.0 if array is now[0] else 7
    assert state.write_changes(cast(Servers, servers), 2, now, state.values) == ([0, 1, 2], [])
    assert servers.variables[2].tolist() == [7, 2, 2]


def test_a_table_in_the_memory_of_its_variable_is_not_copied() -> None:
    state, servers = ServedState(), Written()
    state.weights = servers.lent = [np.ones((3, 2))]
    table = state.weights[0]
    assert state.write_changes(cast(Servers, servers), 1, [table.view()], []) == ([], [])
    assert state.weights[0] is table


class Answering:
    """Takes the place of the connection to a server, and answers with rows of a table and its slot.

    Attributes:
        answer: the numbers of the rows, the rows, and those of the slot.
    """

    def __init__(self) -> None:
        self.answer: Any = None

    def send(self, message: Any, arrays: Any = ()) -> None:
        """Ask."""

    def receive(self) -> Any:
        numbers, rows, slots = self.answer
        return ServedValues(((0, 0),), (0,)), [rows, slots, numbers]


def test_reads_of_a_table_use_the_memory_that_nobody_else_uses() -> None:
    count, width = 50, 3
    channel, generator = Answering(), np.random.default_rng(0)
    servers, state = Servers([cast(Any, channel)], [Shard(0, 0, count, whole=True, server=0)]), ServedState()
    state.slots = [(0, 0)]
    expected = [generator.normal(size=(count, width)).astype(np.float32) for _ in range(2)]
    state.weights, state.values = [expected[0].copy()], [expected[1].copy()]
    updated, addresses, kept = set[int](), [], []
    for read in range(10):
        numbers = np.sort(generator.choice(count, 7, replace=False))
        changes = generator.normal(size=(2, 7, width)).astype(np.float32)
        channel.answer = numbers, *changes
        for array, rows in zip(expected, changes, strict=True):
            array[numbers] = rows
        state.read(servers, read)
        assert state.weights[0].tobytes() == expected[0].tobytes()
        assert state.values[0].tobytes() == expected[1].tobytes()
        addresses.append(state.weights[0].ctypes.data)
        updated |= {*numbers.tolist()}
        assert servers.updated_rows[0].tolist() == sorted(updated)
        if read == 4:
            # As a variable or a state for a joiner does; it does not matter what the view is.
            kept = [(state.weights[0][:, 1:], state.weights[0][:, 1:].copy())]
        if read == 7:
            expected[0] = expected[0] + 1
            state.weights[0] = expected[0].copy()
    for view, value in kept:
        assert view.tobytes() == value.tobytes()
    # The first two arrays are used in turn, until one of them is kept; another takes its place.
    assert addresses[:6] == addresses[:2] * 3
    assert addresses[6] not in addresses[:6]
    assert addresses[7] == addresses[5]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(9, 4), (9, 0), (9, 3, 2), (9,), (0, 4)])
def test_rows_are_taken_and_put(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(np.dtype(dtype))
    numbers = np.array([6, 0, 8, 3] if shape[0] else [], np.int64)
    assert take_rows(array, numbers).tobytes() == array[numbers].tobytes()
    rows = np.asfortranarray(array[numbers] * array.dtype.type(2))
    expected = array.copy()
    expected[numbers] = rows
    put_rows(array, numbers, rows)
    assert array.tobytes() == expected.tobytes()


def test_a_row_outside_is_refused() -> None:
    array = np.zeros((3, 2), np.float32)
    with pytest.raises(IndexError):
        put_rows(array, np.array([3]), array[:1])
    with pytest.raises(IndexError):
        take_rows(array, np.array([3]))
    with pytest.raises(AssertionError):
        put_rows(array[:, :1], np.array([0]), array[:1, :1])


@pytest.mark.ci
def test_a_variable_does_not_change_the_array_that_it_was_given() -> None:
    """Its array is as large as those that TensorFlow takes in place."""
    layers, backend = keras.layers, adapter().steps()
    made = keras.Sequential(
        [keras.Input((2,), dtype="int32"), layers.Embedding(5000, 4), layers.Flatten(), layers.Dense(3)]
    )
    with lockstep.MultiWorkerMirroredStrategy().scope():
        made.compile("adagrad", "mse")
    made.optimizer.build(made.trainable_variables)
    groups = (
        made.trainable_variables,
        made.non_trainable_variables,
        made.optimizer.variables,
        made.metrics_variables,
    )
    state: Any = None
    if keras.backend.backend() == "jax":
        state = tuple([variable.value for variable in group] for group in groups)
    program: Any = backend.program(made, "train")
    batch = whole_batch((np.zeros((4, 2), np.int32), np.zeros((4, 3), np.float32)), 1)
    program.compute(state, batch.share(0, 5), ())

    def given(variables: Any) -> list[Any]:
        arrays = []
        for number, variable in enumerate(variables, 1):
            dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
            arrays.append(
                allocate(math.prod(variable.shape) * dtype.itemsize).view(dtype).reshape(variable.shape)
            )
            arrays[-1][...] = number
        return arrays

    weights, slots = given(made.trainable_variables), given(made.optimizer.variables)
    before = [array.copy() for array in (*weights, *slots)]
    state = program.put(state, weights, {}, slots)
    if state is not None:
        for group, values in zip(groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)
    for variable, array in zip((*groups[0], *groups[2]), (*weights, *slots), strict=True):
        assert backend.to_numpy(variable.value).tobytes() == array.tobytes()
        variable.assign_add(keras.ops.ones_like(variable.value))
        variable.assign(variable.value * 2)
    if keras.backend.backend() == "tensorflow":
        for variable, array in zip(groups[0], weights, strict=True):
            variable.assign(array)
            variable.value.scatter_nd_update([[0] * array.ndim], [7.0])
    made.fit(np.zeros((4, 2), np.int32), np.zeros((4, 3), np.float32), verbose=0)
    for array, value in zip((*weights, *slots), before, strict=True):
        assert array.tobytes() == value.tobytes()


@pytest.mark.ci
def test_metrics_of_several_steps_are_added_in_the_order_of_the_steps() -> None:
    """As if they were added after each step: the sums depend on the order."""
    backend = adapter().steps()
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    with lockstep.MultiWorkerMirroredStrategy().scope():
        made.compile("sgd", "mse", metrics=["mae"])
    made.optimizer.build(made.trainable_variables)
    # The variables of metrics exist from now on.
    made.test_on_batch(np.zeros((4, 6), np.float32), np.zeros((4, 3), np.float32))
    program: Any = backend.program(made, "train")

    def begun() -> Any:
        made.reset_metrics()
        if keras.backend.backend() != "jax":
            return None
        groups = (made.trainable_variables, made.non_trainable_variables, made.optimizer.variables)
        return tuple([variable.value for variable in group] for group in (*groups, made.metrics_variables))

    def sums(state: Any) -> list[bytes]:
        values = state[3] if state is not None else [variable.value for variable in made.metrics_variables]
        return [np.array(backend.to_numpy(value)).tobytes() for value in values]

    def numbers(logs: Any) -> dict[str, bytes]:
        return {name: np.array(backend.to_numpy(value)).tobytes() for name, value in logs.items()}

    totals, generator = [], np.random.default_rng(5)
    for scale in generator.uniform(0.1, 30, 30).astype("float32"):
        x, y = (scale * generator.standard_normal((4, width), np.float32) for width in (6, 3))
        partial = program.compute(begun(), whole_batch((x, y), 1).share(0, 5), ())
        arrays = {name: np.array(backend.to_numpy(value)) for name, value in partial.items()}
        totals.append(divided(made, "train", program.parts(0, arrays)))
    state = begun()
    for total in totals:
        logs, state = program.finish(state, [total])
    expected = sums(state), numbers(logs)
    state = begun()
    logs, state = program.finish(state, totals)
    assert (sums(state), numbers(logs)) == expected
    state = begun()
    for some in (totals[:3], totals[3:]):
        logs, state = program.finish(state, some)
    assert (sums(state), numbers(logs)) == expected
    # Another order has other sums.
    state = begun()
    assert sums(program.finish(state, totals[::-1])[1]) != expected[0]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 2**20, 2**20 + 8, 3 * 2**20 + 5])
def test_arrays_are_compared_bit_by_bit(size: int) -> None:
    one = np.arange(size, dtype=np.uint8)
    assert same_bits(one, one.copy())
    assert not same_bits(one, one.copy().reshape(1, size))
    for position in {0, 7, 8, 2**20 - 1, 2**20, size - 1} & {*range(size)}:
        other = one.copy()
        other[position] ^= 128
        assert not same_bits(one, other)
        assert not same_bits(other[::-1], one[::-1])
    zeros = np.zeros(size, np.float32)
    assert same_bits(-zeros, zeros) == (size == 0)
    assert same_bits(zeros * np.nan, zeros * np.nan)
