"""What a parameter server has of a model and its optimizer, and what it refuses, in this process."""

from collections.abc import Callable
from typing import Any, cast

import keras
import numpy as np
import pytest

from lockstep.errors import DataError, ModelError
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.fit.served import refuse_callbacks
from lockstep.keras.parameter_server.process import UsedIterators
from lockstep.keras.parameter_server.served_optimizers import built_copy, refuse_unserved, shapes_of
from lockstep.keras.parameter_server.server_shards import ServedVariables
from lockstep.keras.parameter_server.servers import ServedState, Servers, same_bits
from lockstep.keras.patches import adapter
from lockstep.keras.state.checkpoint_callback import Checkpoint
from lockstep.parameter_server.partitioners import FixedShardsPartitioner, Shard, place_variables

optimizers = keras.optimizers
SERVERS = 2
WHOLE: tuple[str, ...] = ("SGD", "RMSprop", "Adam", "AdamW", "Adagrad", "Adamax", "Nadam", "Lion")


class Factor(optimizers.SGD):
    """Keeps a hyperparameter out of its config."""

    def __init__(self, learning_rate: float = 0.1, factor: float = 1.0, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        self.factor = factor


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
            "Lamb may not update each element on its own",
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
