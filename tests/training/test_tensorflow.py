"""Tests of the TensorFlow backend alone: graphs, variables and borrowed memory.

Keras has one backend a process: under another one, this file runs itself again.
"""

import inspect
import json
import random
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest

import lockstep
from lockstep.checkpoint.values import pack, unpack
from lockstep.collectives.layout import allocate
from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.job import Job, JobContext, by_itself
from metered import ListsTwice, Metered

HERE = keras.backend.backend() == "tensorflow"
here = pytest.mark.skipif(not HERE, reason="runs in a process of its own, with the TensorFlow backend")

if HERE:
    import tensorflow as tf
    from tensorflow.python.eager import context
    from tensorflow.python.eager.polymorphic_function import function_context
    from tensorflow.python.framework import op_def_registry, random_seed
    from tensorflow.python.framework.auto_control_deps import LEGACY_RANDOM_OPS
    from tensorflow.python.ops import gen_random_ops, random_ops

    from lockstep.keras import assignments, tf_random_ops
    from lockstep.keras.backends.adapter import adapter
    from lockstep.keras.backends.tensorflow import TensorFlowBackend, TensorFlowProgram
    from lockstep.keras.backends.tf_graphs import assign, borrowed, executable, read
    from lockstep.keras.backends.traces import Traces
    from lockstep.keras.changed_values import ChangedValues
    from lockstep.keras.fit.exactness import summed_occurrences
    from lockstep.keras.fit.other_values import changed, other_values
    from lockstep.keras.fit.random_rows import equal_draws
    from lockstep.keras.fit.trials import Trial
    from lockstep.keras.fit.tried_rows import TriedBatch
    from lockstep.keras.parameter_server.function_results import pack_result, unpack_results
    from lockstep.keras.parameter_server.function_run import FunctionRunner, ScopeVariables, plain
    from lockstep.keras.parameter_server.tf_functions import exchanged_in_graph
    from lockstep.keras.private.tensorflow import RANDOM_WITHOUT_EQUIVALENT
    from lockstep.keras.python_replicas import python_facts, saved_python, set_python
    from lockstep.keras.replica_run import merges, tf_merged_variables
    from lockstep.keras.replica_run.runner import SingleReplicaRunner
    from lockstep.keras.tf_checkpoints import save_once

MIRRORED = Path(__file__).with_name("mirrored_values.py")
MIRRORED_VALUES = runpy.run_path(str(MIRRORED)) if HERE else {}
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = X[:, :1]
LARGE = 70_000

Array = npt.NDArray[Any]


@pytest.mark.skipif(HERE, reason="this is that process")
def test_in_a_process_with_the_tensorflow_backend(run_tests: Callable[[str, str], None]) -> None:
    run_tests(__file__, "tensorflow")


def share(replica: int = 0, weight: float = 0.5) -> Share:
    return Share(replica, 4, weight, 1, lambda: (X[:4], Y[:4]))


def program(model: keras.Model, kind: Any = "train", **options: Any) -> "TensorFlowProgram":
    model.compile(**({"optimizer": "sgd", "loss": "mse"} | options))
    model._symbolic_build(data_batch=(X, Y))
    return TensorFlowBackend().program(model, kind)


def computed(steps: "TensorFlowProgram", one: Share) -> Any:
    """Return the arrays of a partial by their own names."""
    return steps.parts(0, {name: np.asarray(value) for name, value in steps.compute(None, one, []).items()})


def state(model: keras.Model) -> list[bytes]:
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [np.asarray(variable.value).tobytes() for variable in variables]


def as_total(partial: Any) -> dict[str, Array]:
    """Copy the arrays of a partial to memory like that of a reduce."""
    total = {}
    for name, tensor in partial.items():
        array = np.asarray(tensor)
        total[name] = allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        total[name][...] = array
        total[name].flags.writeable = False
    return total


def overwrite(total: dict[str, Array]) -> None:
    for array in total.values():
        memory = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
        )
        memory[:] = 85


def layers(*given: keras.Layer) -> keras.Model:
    return keras.Sequential([keras.layers.Input((6,)), *given, keras.layers.Dense(1)])


@here
def test_an_array_is_borrowed_without_a_copy_if_possible() -> None:
    total = as_total({"large": np.ones(LARGE, "float32"), "small": np.ones(3, "float32")})
    for name, in_place in (("large", True), ("small", False)):
        tensor = borrowed(total[name])
        assert (np.asarray(tensor).ctypes.data == total[name].ctypes.data) == in_place
        assert not total[name].flags.writeable
    assert np.asarray(borrowed(total["large"][1:])).ctypes.data % 64 == 0


if HERE:

    class Keeper(keras.optimizers.Optimizer):  # type: ignore[misc]
        """Assigns gradients to variables without a copy."""

        def build(self, variables: Any) -> None:
            if not self.built:
                super().build(variables)
                self.kept = [self.add_variable_from_reference(v, "kept") for v in variables]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.assign(self.kept[self._get_variable_index(variable)], gradient)
            self.assign(variable, gradient)


@here
@pytest.mark.parametrize("options", [{"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}])
@pytest.mark.parametrize("units", [3, LARGE // 6, 200_000])
def test_nothing_reads_a_total_that_was_applied(options: dict[str, Any], units: int) -> None:
    model = layers(keras.layers.Dense(units))
    steps = program(model, optimizer=Keeper(0.1), metrics=["mae"], **options)
    for _ in range(2):
        total = as_total(steps.compute(None, share(), []))
        gradients = [steps.parts(0, total)[f"gradient/{i}"].copy() for i in range(4)]
        logs, _ = steps.apply(None, [total])
        TensorFlowBackend().settle()
        metrics, figures = state(model)[-8:], {name: float(value) for name, value in logs.items()}
        overwrite(total)
        for weight, kept, gradient in zip(
            model.trainable_variables, model.optimizer.kept, gradients, strict=True
        ):
            assert np.array_equal(np.asarray(weight.value), gradient)
            assert np.array_equal(np.asarray(kept.value), gradient)
        assert metrics == state(model)[-8:]
        assert figures == {name: float(value) for name, value in logs.items()}


@here
def test_an_executable_graph_gets_its_tensors_by_name() -> None:
    kept = tf.Variable(0.0)

    def function(number: Any, named: Any, *others: Any) -> Any:
        kept.assign_add(named["b"])
        return {"y": number - named["a"], "x": [others[0] * kept, named["b"]]}

    def given(*names: str) -> Any:
        named = {name: tf.constant(float(ord(name))) for name in names}
        return tf.constant(1.0), named, tf.constant(2.0)

    call = executable(function, False, *given("a", "b"))
    for times, names in enumerate(("ab", "ba"), 1):
        found = call(*given(*names))
        assert {"y": float(found["y"]), "x": [*map(float, found["x"])]} == {
            "y": 1.0 - ord("a"),
            "x": [2.0 * times * ord("b"), ord("b")],
        }
    for other in (given("a", "c"), given("a"), given("a", "b")[:2]):
        with pytest.raises(TypeError):
            call(*other)
    assert float(kept) == 2.0 * ord("b")


@here
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"run_eagerly": True}])
@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_computing_changes_nothing(kind: str, options: dict[str, Any]) -> None:
    model = layers(
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)
    )
    steps = program(model, kind, optimizer="adam", metrics=["mae", "AUC"], **options)
    before = state(model)
    first = {name: array.tobytes() for name, array in computed(steps, share()).items()}
    other = {name: array.tobytes() for name, array in computed(steps, share(1)).items()}
    again = {name: array.tobytes() for name, array in computed(steps, share()).items()}
    assert state(model) == before
    assert first == again
    assert first.keys() == other.keys()
    if kind == "train":
        assert first["gradient/0"] != other["gradient/0"]


if HERE:

    class Annealed(keras.Sequential):  # type: ignore[misc]
        """Keeps the number of its steps, and a mean of its losses, in variables that are not Keras's."""

        def __init__(self) -> None:
            super().__init__([keras.layers.Input((6,)), keras.layers.Dense(1)])
            self.held = {"steps": tf.Variable(0), "losses": [tf.Variable(0.0)]}

        def train_step(self, data: Any) -> Any:
            x, y = data
            steps, (losses,) = self.held["steps"], self.held["losses"]
            steps.assign_add(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2) / tf.cast(steps, tf.float32)
            losses.assign(losses / 2 + loss / 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

        def kept(self) -> list[float]:
            return [float(self.held["steps"]), float(self.held["losses"][0])]


@here
@pytest.mark.parametrize("eager", [False, True])
def test_variables_of_tensorflow_are_state_of_a_step(eager: bool) -> None:
    keras.utils.set_random_seed(1)
    model = Annealed()
    steps = program(model, run_eagerly=eager)
    losses = []
    for step in (1, 2):
        before = model.kept()
        total = as_total(steps.compute(None, share(weight=1.0), []))
        assert model.kept() == before
        logs, _ = steps.apply(None, [total])
        losses.append(float(logs["loss"]))
        assert model.kept()[0] == step
    assert model.kept()[1] == pytest.approx(losses[0] / 4 + losses[1] / 2, rel=1e-6)


@here
@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (keras.optimizers.SGD(0.1, momentum=0.9), []),
        (keras.optimizers.Adagrad(0.1), ["Adagrad with repeated ids of an Embedding"]),
        (keras.optimizers.Adam(0.1), ["Adam with repeated ids of an Embedding"]),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, epsilon=0.01)),
            ["LossScaleOptimizer with repeated ids of an Embedding"],
        ),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), []),
    ],
    ids=["sgd", "adagrad", "adam", "a scaled loss", "a scaled loss, sgd"],
)
def test_optimizers_for_which_repeated_ids_are_not_their_sum_are_named(
    optimizer: Any, named: list[str]
) -> None:
    """Plain Keras passes each occurrence of an id to the optimizer, replicas their sum."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(5, 2), keras.layers.Flatten()])
    model.compile(optimizer, "mse")
    assert summed_occurrences(model) == named
    assert not optimizer.built
    model.layers[0].trainable = False
    assert summed_occurrences(model) == []


@here
def test_a_variable_with_a_tensor_of_a_graph_does_not_travel() -> None:
    """TensorFlow's tutorials keep the attention scores of the last call in an attribute."""
    kept: list[Any] = []

    class Keeps(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            self.last = inputs * 2
            kept.append(inputs)
            return inputs

    model = layers(Keeps())
    values = ChangedValues(model, [], compiled=True)
    traces = Traces(model, "train")
    traces.begin()
    tf.function(model)(tf.zeros((2, 6)))
    packed = values.packed()
    assert packed["values"] == []
    assert [name.rpartition(".")[2] for name in packed["others"]] == ["kept"]
    assert traces.saved(values.places()) == []


@here
def test_variables_of_tensorflow_are_part_of_what_is_saved_and_compared() -> None:
    first, second = Annealed(), Annealed()
    for model in (first, second):
        program(model)
    assert python_facts(first) == python_facts(second)
    first.held["steps"].assign(3)
    first.held["losses"][0].assign(0.5)
    assert python_facts(first) != python_facts(second)
    saved = saved_python(first)
    packed, arrays = pack(saved, "python")
    set_python(second, unpack(packed, arrays))
    assert second.kept() == first.kept() == [3, 0.5]
    assert python_facts(first) == python_facts(second)


@here
def test_values_that_are_not_those_of_examples_are_refused_in_a_graph() -> None:
    class GathersViews(keras.Sequential):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
            return keras.ops.mean(lockstep.gather(keras.ops.concatenate([y_pred, y_pred])))

    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = GathersViews([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd")
    with pytest.raises(ModelError, match=r"lockstep\.gather got a value of the shape \[.*, 2\]"):
        model.fit(X, Y, batch_size=8, verbose=0)


@here
def test_trials_leave_variables_of_tensorflow() -> None:
    model = Annealed()
    model.compile("sgd", "mse")
    trial = Trial(job.current(), adapter().steps(), model, TriedBatch(lambda: (X, Y)), nullcontext)
    trial.measure(["train"])
    assert model.kept() == [0, 0]
    assert trial.names == []
    weights, counts = other_values(model, [], runs_python=False)
    with changed(weights):
        assert model.kept() == [0, pytest.approx(0.3)]
    with changed(counts):
        assert model.kept() == [7_654_321, 7654.25]
    assert model.kept() == [0, 0]


@here
def test_a_step_that_is_not_the_same_for_half_of_the_rows_is_named() -> None:
    class Counting(keras.Sequential):
        def test_step(self, data: Any) -> Any:
            return {"few" if len(data[0]) < 8 else "many": tf.constant(1.0)}

    model = Counting([keras.layers.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    trial = Trial(job.current(), adapter().steps(), model, TriedBatch(lambda: (X, Y)), nullcontext)
    trial.measure(["test"])
    assert trial.names == ["test_step of Counting (possibly: it could not be tested)"]


@here
def test_a_partial_has_only_the_variables_that_a_step_assigns() -> None:
    frozen = keras.layers.BatchNormalization()
    frozen.trainable = False
    model = layers(
        keras.layers.Dense(4), frozen, keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)
    )
    names = computed(program(model, metrics=["mae"]), share()).keys()
    assert {name for name in names if name.startswith(("seed/", "layer/"))} == {
        "seed/0",
        "layer/0",
        "layer/1",
    }
    assert sum(name.startswith("gradient/") for name in names) == 6
    assert not computed(program(model, "test"), share()).keys() & {"seed/0", "layer/0", "gradient/0"}


class Assigning(keras.layers.Layer):  # type: ignore[misc]
    """Counts its calls in one of the ways in which TensorFlow nests graphs."""

    def __init__(self, how: str, dtype: str) -> None:
        super().__init__()
        self.how, self.kind = how, dtype

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(
            shape=(), dtype=self.kind, initializer="zeros", trainable=False, name="calls"
        )

    def call(self, inputs: Any) -> Any:
        def count(result: Any = True) -> Any:
            self.calls.assign(self.calls + keras.ops.ones((), self.kind))
            return tf.constant(result) if result is True else result

        total = tf.reduce_sum(tf.abs(inputs))
        if self.how == "branch":
            tf.cond(total >= 0, count, lambda: tf.constant(False))
        elif self.how == "loop":
            tf.while_loop(lambda i: i < 2, lambda i: (count(i + 1),), [tf.constant(0)])
        else:
            tf.function(tf.function(count))()
        return inputs


@here
@pytest.mark.parametrize("how", ["branch", "loop", "function"])
def test_assignments_within_nested_graphs_are_found(how: str) -> None:
    model = layers(Assigning(how, "float32"))
    steps = program(model)
    partial = computed(steps, share())
    once = 2.0 if how == "loop" else 1.0
    assert float(partial["layer/0"]) == 0.5 * once
    assert float(model.layers[0].calls) == 0.0
    steps.apply(None, [as_total(partial)])
    assert float(model.layers[0].calls) == 0.5 * once
    model = layers(Assigning(how, "int32"))
    partial = computed(program(model), share())
    assert [int(value) for name, value in partial.items() if name.startswith("equal/0/")] == [int(once)]
    assert int(model.layers[0].calls) == 0


@here
def test_a_generator_outside_of_layers_is_mixed_like_the_others() -> None:
    class Noise(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs + keras.random.normal(keras.ops.shape(inputs))

    model = layers(Noise())
    steps = program(model, "predict")
    first, other, again = (computed(steps, share(replica)) for replica in (0, 1, 0))
    rows = [np.asarray(nest) for _, nest in steps.outputs()]
    assert np.array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])
    assert np.any(np.asarray(first["seed/0"]))
    assert not np.any(np.asarray(other["seed/0"]))
    steps.apply(None, [as_total(again)])
    steps.compute(None, share(), [])
    assert not np.array_equal(np.asarray(steps.outputs()[0][1]), rows[0])


@here
def test_gradients_are_dense_and_missing_ones_are_omitted() -> None:
    class Both(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table, self.unused = keras.layers.Embedding(5, 1), keras.layers.Dense(1)

        def build(self, shape: Any) -> None:
            self.table.build(shape)
            self.unused.build((None, 1))

        def call(self, inputs: Any) -> Any:
            return self.table(keras.ops.cast(keras.ops.abs(inputs[:, 0]), "int32") % 5)

    model = Both()
    steps = program(model)
    partial = computed(steps, share())
    total = as_total(partial)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        steps.apply(None, [total])
    assert partial["gradient/0"].shape == (5, 1)
    assert [name for name in partial if name.startswith("gradient/")] == ["gradient/0"]


def drawn(model: Any, data: Any) -> Any:
    noise = [tf.random.normal(tf.shape(data[0])) for _ in range(2)]
    again = [tf.random.uniform((), seed=seed) for seed in (1, 1, 2)]
    return keras.Model.train_step(model, (data[0] + noise[0], data[1])) | {
        "twice": tf.reduce_sum(noise[0] - noise[1]),
        "one seed": again[0] - again[1],
        "two seeds": again[0] - again[2],
    }


@here
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_random_operations_draw_by_seed_step_and_replica(options: dict[str, Any]) -> None:
    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return drawn(self, data)

    def plain() -> list[float]:
        tf.random.set_seed(3)
        return [float(tf.random.normal(())), float(tf.random.uniform((), seed=4))]

    before = plain()
    steps = program(Own([keras.layers.Input((6,)), keras.layers.Dense(1)]), **options)
    shares = [share(), share(1), share()._replace(seed=2), share()]
    partials = [computed(steps, one) for one in shares]
    gradients = [partial["gradient/0"].tobytes() for partial in partials]
    assert gradients[0] == gradients[3]
    assert len(set(gradients)) == 3
    for partial in partials:
        assert float(partial["log/twice"]) != 0 != float(partial["log/two seeds"])
        assert (float(partial["log/one seed"]) == 0) != ("run_eagerly" in options)
    assert plain() == before
    assert not tf.config.functions_run_eagerly()


def clipped(model: Any, data: Any) -> Any:
    logs = keras.Model.train_step(model, data)
    for weight in model.trainable_variables:
        weight.assign(keras.ops.clip(weight, -0.01, 0.01))
    return logs


def branched(model: Any, data: Any) -> Any:
    logs = keras.Model.train_step(model, data)
    weight = model.trainable_variables[0].value
    tf.function(tf.function(lambda: weight.assign_add(weight)))()
    return logs


def conditional(model: Any, data: Any) -> Any:
    return tf.cond(
        tf.reduce_sum(data[0]) < 1e9,
        lambda: keras.Model.train_step(model, data),
        lambda: model.get_metrics_result(),
    )


def stray(model: Any, data: Any) -> Any:
    # The model has no attribute for the optimizer.
    keras.optimizers.SGD().apply(
        [tf.ones_like(v) for v in model.trainable_variables], model.trainable_variables
    )
    return {}


def noised(model: Any, data: Any, noise: Any) -> Any:
    return keras.Model.train_step(model, (data[0] + noise, data[1]))


def raw(model: Any, data: Any) -> Any:
    return noised(model, data, tf.raw_ops.RandomStandardNormal(shape=tf.shape(data[0]), dtype=tf.float32))


def loaded(model: Any, data: Any) -> Any:
    with tf.init_scope():
        graph = tf.function(lambda: tf.random.normal((6,))).get_concrete_function()
    return noised(model, data, graph())


def vectorized(model: Any, data: Any) -> Any:
    return noised(model, data, tf.vectorized_map(lambda row: row + tf.random.normal((6,)), data[0]))


def sampled(model: Any, data: Any) -> Any:
    sample = tf.random.log_uniform_candidate_sampler([[1]], 1, 6, True, 6)[0]
    return noised(model, data, tf.cast(sample, tf.float32))


def boxed(model: Any, data: Any) -> Any:
    begin = tf.image.sample_distorted_bounding_box([6, 6, 1], [[[0.0, 0.0, 1.0, 1.0]]])[0]
    return noised(model, data, tf.cast(begin[0], tf.float32))


def pooled(model: Any, data: Any) -> Any:
    return noised(model, data, tf.nn.fractional_max_pool(tf.zeros((1, 8, 8, 1)), 1.3)[0][0, 0, 0, 0])


def normalised(model: Any, data: Any) -> Any:
    weight = model.trainable_variables[0]
    weight.assign(weight / 2)
    return keras.Model.train_step(model, data)


@here
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (clipped, r"assigns the variable '.*kernel.*' itself"),
        (branched, r"assigns the variable '.*kernel.*' itself"),
        (conditional, "applies its optimizer, .* within a condition"),
        (stray, "applies no optimizer of the model|assigns the variable '.*kernel.*' itself"),
        (raw, "the operation RandomStandardNormal"),
        (loaded, "the operation RandomStandardNormal"),
        (vectorized, "in tf.vectorized_map"),
        (sampled, "(?i)the operation log_?uniform_?candidate_?sampler"),
        (boxed, "(?i)the operation sample_?distorted_?bounding_?box"),
        (pooled, "(?i)the operation fractional_?max_?pool"),
        (normalised, r"assigns the variable '.*kernel.*' itself"),
    ],
)
@pytest.mark.parametrize("eager", [False, True])
def test_a_step_that_replicas_cannot_compute_is_refused(
    step: Callable[..., Any], message: str, eager: bool
) -> None:
    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return step(self, data)

    if eager and step in (conditional, raw, loaded):
        pytest.skip("without a graph there is no condition, and no telling which operations a step has")
    model = Own([keras.layers.Input((6,)), keras.layers.Dense(1)])
    steps = program(model, run_eagerly=eager)
    with pytest.raises(ModelError, match=message):
        steps.compute(None, share(), [as_total(steps.compute(None, share(), []))])


@here
def test_an_error_in_a_layer_is_not_hidden_by_its_consequences() -> None:
    class Broken(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            raise ValueError("no good")

    model = keras.Sequential([Broken()])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no good"):
        TensorFlowBackend().build(model, "train", lambda: (X, Y))


@here
def test_an_update_that_xla_does_not_support_is_applied_without_xla() -> None:
    class Printing(keras.optimizers.SGD):  # type: ignore[misc]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            tf.py_function(lambda: None, [], [])
            super().update_step(gradient, variable, learning_rate)

    model = layers(keras.layers.Dense(200_000))
    steps = program(model, optimizer=Printing(0.5))
    for number in (1, 2):
        total = as_total(steps.compute(None, share(), []))
        before = [np.asarray(variable.value).copy() for variable in model.trainable_variables]
        parts = steps.parts(0, total)
        expected = [weight - np.float32(0.5) * parts[f"gradient/{i}"] for i, weight in enumerate(before)]
        steps.apply(None, [total])
        assert int(model.optimizer.iterations) == number
        for variable, value in zip(model.trainable_variables, expected, strict=True):
            np.testing.assert_allclose(np.asarray(variable.value), value, rtol=1e-5, atol=1e-7)


@here
def test_a_total_is_divided_by_its_density_in_every_mode() -> None:
    weights = np.array([0, 1, 2, 0.5], "float32")
    one = share(weight=1.0)._replace(data=lambda: (X[:4], Y[:4], weights))
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def made() -> keras.Model:
        keras.utils.set_random_seed(1)
        return layers(keras.layers.Dense(3))

    def slots(model: keras.Model) -> Array:
        return np.concatenate([np.asarray(v).reshape(-1) for v in model.optimizer.variables])

    plain = made()
    plain.compile("adam", loss, run_eagerly=True)
    for _ in range(2):
        inspect.unwrap(keras.Model.train_on_batch)(plain, X[:4], Y[:4], sample_weight=weights)
    for options in ({}, {"jit_compile": True}, {"run_eagerly": True}):
        model = made()
        steps = program(model, optimizer="adam", loss=loss, **options)
        for _ in range(2):
            total = as_total(steps.compute(None, one, []))
            assert float(steps.parts(0, total)["density"]) == weights.mean() != 1
            steps.apply(None, [total])
        np.testing.assert_allclose(slots(model), slots(plain), rtol=1e-4, atol=1e-9)


@here
def test_the_private_parts_of_tensorflow_exist() -> None:
    from tensorflow.python.framework import auto_control_deps_utils
    from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

    # keras/replica_run/tf_merged_variables.py
    assert all(callable(getattr(BaseResourceVariable, f"assign{kind}")) for kind in ("", "_add", "_sub"))
    assert context.async_wait() is None
    assert callable(auto_control_deps_utils.get_read_only_resource_input_indices_graph)
    model = layers()
    model.compile("sgd", ["mse"])
    model.evaluate(X, Y, verbose=0)
    assert model._compile_loss.metrics == []
    assert function_context.make_function_context().context.xla_context_id == 0
    tf.random.set_seed(3)
    state = context.context()._seed, context.context()._rng.getstate()
    assert state == (3, random.Random(3).getstate())
    assert not any(graph.is_building_function for graph in context.context().context_switches.stack)


@here
def test_the_operations_that_count_their_runs_are_known() -> None:
    """If this fails, TensorFlow has a new operation, or calls one in another way."""
    for module, name in RANDOM_WITHOUT_EQUIVALENT:
        assert callable(getattr(module, name))
    for name in tf_random_ops._EQUIVALENTS:
        assert {"seed", "seed2"} <= inspect.signature(getattr(gen_random_ops, name)).parameters.keys()
        assert f"gen_random_ops.{name}(" in inspect.getsource(random_ops)
    assert "random_seed.get_seed(seed)" in inspect.getsource(random_ops)
    assert random_seed.get_seed(5)[1] == 5
    stateful = {name for name in LEGACY_RANDOM_OPS if op_def_registry.get(name).is_stateful}
    replaced = {"".join(part.capitalize() for part in name.split("_")) for name in tf_random_ops._EQUIVALENTS}
    assert stateful - replaced == {"ParameterizedTruncatedNormal", "RandomPoisson"}


@here
def test_xla_compiles_a_layer_with_a_loop() -> None:
    """Its gradient needs a loop that is compiled for XLA."""
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(
            [keras.layers.Input((3, 2)), keras.layers.SimpleRNN(2), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=True)
    history = model.fit(X.reshape(-1, 3, 2), X[:, :1], batch_size=4, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@here
def test_an_assignment_in_a_function_of_replicas_is_merged_as_the_variable_says() -> None:
    kinds = tf.VariableAggregation
    first, total, mean = (
        tf.Variable(100.0, aggregation=kind) for kind in (kinds.ONLY_FIRST_REPLICA, kinds.SUM, kinds.MEAN)
    )

    def step() -> None:
        number = tf.cast(lockstep.get_replica_context().replica_id_in_sync_group, tf.float32)
        for variable in (first, total, mean):
            variable.assign(number + 5)
            variable.assign_add(10 * (number + 1))

    strategy = lockstep.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 3
    strategy.run(step)
    assert float(first) == 5 + 10
    assert float(total) == (5 + 6 + 7) + (10 + 20 + 30)
    assert float(mean) == 6 + 20


@here
@pytest.mark.parametrize("name", MIRRORED_VALUES.get("CASES", ()))
def test_a_program_of_tf_distribute_computes_the_values_of_tensorflow(name: str) -> None:
    program = MIRRORED_VALUES["Program"](lockstep)
    assert MIRRORED_VALUES["CASES"][name](program) == MIRRORED_VALUES["VALUES"][name]


@pytest.mark.slow
@pytest.mark.skipif(HERE, reason="runs in the other process")
def test_the_values_of_tensorflow_are_those_of_its_own_strategy() -> None:
    command = [sys.executable, str(MIRRORED)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == runpy.run_path(str(MIRRORED))["VALUES"]


@here
def test_what_replicas_cannot_combine_is_named() -> None:
    kinds = tf.VariableAggregation
    strategy = lockstep.MultiWorkerMirroredStrategy()
    number, flag = tf.Variable(1, aggregation=kinds.MEAN), tf.Variable(False, aggregation=kinds.SUM)
    rows = tf.Variable([1.0], aggregation=kinds.MEAN)
    slices = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))
    context = lockstep.get_replica_context
    text = tf.Variable("old", trainable=False)
    ragged = strategy.run(lambda: tf.RaggedTensor.from_row_lengths(tf.range(2), [2, 0]))
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: strategy.run(lambda: number.assign(2)), "whose dtype int32 has no mean"),
        (lambda: strategy.run(lambda: flag.assign(True)), "all_reduce cannot add up booleans"),
        (lambda: strategy.run(lambda: text.assign("new")), "a variable of strings"),
        (lambda: strategy.run(lambda: rows.scatter_max(slices)), "scatter_max .* whose aggregation is MEAN"),
        (lambda: strategy.run(lambda: context().all_gather(slices, 0)), "does not join IndexedSlices"),
        (lambda: strategy.reduce("SUM", ragged), "not a RaggedTensor of each replica"),
        (lambda: strategy.gather(ragged, axis=0), "not a RaggedTensor of each replica"),
    ]
    for act, said in refused:
        with pytest.raises(ModelError, match=said):
            act()


if HERE:

    class Alternating(keras.optimizers.SGD):
        """Doubles the gradients of every second update, which is a condition in a graph."""

        def apply(self, grads: Any, trainable_variables: Any = None, scale: float = 1.0) -> None:
            factor = scale
            if self.iterations % 2 == 0:
                factor = 2 * scale
            super().apply([factor * gradient for gradient in grads], trainable_variables)

    class AlternatingPairs(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, scale: float = 1.0) -> Any:
            factor = scale
            if self.iterations % 2 == 0:
                factor = 2 * scale
            return super().apply_gradients(
                [(factor * gradient, weight) for gradient, weight in grads_and_vars]
            )


@here
@pytest.mark.parametrize("name", ["Alternating", "AlternatingPairs"])
def test_autograph_converts_an_update_of_the_program(name: str) -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    kind = globals()[name]
    of_replicas, alone = (keras.Variable([10.0]) for _ in range(2))
    optimizers = kind(0.1), kind(0.1)
    for optimizer, weight in zip(optimizers, (of_replicas, alone), strict=True):
        optimizer.build([weight])

    def update(weight: Any, optimizer: Any) -> None:
        gradients = [tf.constant([1.0])]
        if isinstance(optimizer, Alternating):
            optimizer.apply(gradients, [weight], scale=3.0)
        else:
            optimizer.apply_gradients(zip(gradients, [weight], strict=True), 3.0)

    def step() -> None:
        update(of_replicas, optimizers[0])

    @tf.function
    def outside() -> None:
        update(alone, optimizers[1])

    @tf.function
    def inside() -> None:
        strategy.run(step)

    outside()
    outside()
    assert alone.numpy() == pytest.approx(10 - 0.6 - 0.3)
    inside()
    inside()
    assert of_replicas.numpy() == pytest.approx(10 - 3 * (0.6 + 0.3))
    # A function that no other function calls is a graph, too.
    strategy.run(step)
    assert of_replicas.numpy() == pytest.approx(10 - 3 * (0.6 + 0.3 + 0.6))


@here
def test_a_checkpoint_is_written_elsewhere_and_renamed(tmp_path: Path) -> None:
    """Workers of several hosts, which share only a disk, write the same one at the same time."""
    prefixes: list[str] = []

    def write(saver: Any, prefix: str) -> None:
        prefixes.append(prefix)
        type(saver).save(saver, prefix)

    view = place(2, (0, 1))
    own = Job(
        JobContext(0, Bus(SystemClock(), 0), JobSettings(threads=1), tmp_path / "run"),
        (view, by_itself(view)),
    )
    final = tmp_path / "new" / "ckpt"
    checkpoint = tf.train.Checkpoint(kept=tf.Variable([1.0, 2.0]))
    save_once(own, lambda: False, write, checkpoint._saver, str(final))
    (prefix,) = prefixes
    assert Path(prefix).parent.parent == final.parent
    names = sorted(path.name for path in final.parent.iterdir())
    assert names == ["ckpt.data-00000-of-00001", "ckpt.index"]
    found = tf.Variable([0.0, 0.0])
    tf.train.Checkpoint(kept=found).restore(str(final)).expect_partial()
    assert found.numpy().tolist() == [1.0, 2.0]


@here
def test_a_scheduled_function_draws_random_numbers_with_operations_of_tensorflow() -> None:
    assignments.install()
    merges.install()
    tf_merged_variables.install()
    runner = FunctionRunner(ScopeVariables(), adapter().functions())

    @tf.function
    def draw() -> Any:
        return tf.random.normal((2,))

    for function in (draw, lambda: tf.random.normal((2,))):
        runner.try_out(function, function, 1)
        first, again, other = (runner.run(function, function, step, step).result for step in (4, 4, 5))
        assert first.tolist() == again.tolist() != other.tolist()


@here
def test_a_scheduled_function_returns_strings() -> None:
    texts = tf.constant([["one", "\0"], ["", "two"]])
    result, arrays = pack_result(plain({"all": texts, "first": texts[0, 0]}, adapter().functions()))
    assert arrays == []
    assert unpack_results([result], arrays) == [{"all": [[b"one", b"\0"], [b"", b"two"]], "first": b"one"}]


@here
def test_a_graph_that_waits_for_new_weights_uses_nothing_that_other_functions_change() -> None:
    weight, seen = keras.Variable(np.float32(1)), keras.Variable(np.float32(0), trainable=False)

    @tf.function
    def step() -> None:
        seen.assign(seen + 1.0)
        exchanged_in_graph(lambda _: [np.array(weight.value)], {0: tf.ones(())}, [weight], [weight, seen])
        seen.assign(seen + 2.0)

    graph = step.get_concrete_function().graph
    (call,) = (one for one in graph.get_operations() if one.type == "EagerPyFunc")
    given = {id(one) for one in call.inputs}
    reads = [one for one in graph.get_operations() if one.type == "ReadVariableOp"]
    before, after = (one for one in reads if id(one.inputs[0]) in given)
    assert call in after.control_inputs
    assert call not in before.control_inputs
    assert any(one.type == "AssignVariableOp" for one in call.control_inputs)
    step()
    assert float(seen.value) == 3.0


@here
def test_variables_of_tensorflows_own_strategies_are_read_and_assigned() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        variable = tf.Variable(np.float32([1, 2]))
    assert isinstance(variable, tf.distribute.DistributedValues)
    assign(variable, np.float32([3, 4]))
    assert read(variable).numpy().tolist() == [3.0, 4.0]


@here
@pytest.mark.parametrize("where", ["class", "instance", "scaled"])
@pytest.mark.parametrize("eager", [False, True])
def test_an_apply_gradients_of_the_program_gets_the_gradients_of_all_replicas(
    where: str, eager: bool
) -> None:
    """The gradient is 6, those of the replicas are 12, 6 and 0; limited to 3, the weight becomes 0.7."""

    def limited(pairs: Any) -> list[Any]:
        return [(tf.clip_by_value(gradient, -3.0, 3.0), variable) for gradient, variable in pairs]

    class Limiting(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
            return super().apply_gradients(limited(grads_and_vars), **options)

    class LimitingScale(keras.optimizers.LossScaleOptimizer):
        def apply_gradients(self, grads_and_vars: Any) -> Any:
            scale = 8.0
            pairs = [(gradient / scale, variable) for gradient, variable in grads_and_vars]
            return super().apply_gradients([(scale * g, variable) for g, variable in limited(pairs)])

    optimizer: Any = keras.optimizers.SGD(0.1)
    if where == "class":
        optimizer = Limiting(0.1)
    elif where == "scaled":
        optimizer = LimitingScale(optimizer, initial_scale=8.0)
    else:
        plain = optimizer.apply_gradients
        optimizer.apply_gradients = lambda pairs: plain(limited(pairs))
    with lockstep.MultiWorkerMirroredStrategy().scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.layers.Input((1,)), dense])
        model.compile(optimizer, "mae", run_eagerly=eager)
    x = np.array([[12.0]] * 3 + [[0.0]] * 3, "float32")
    model.fit(x, np.zeros((6, 1)), batch_size=6, shuffle=False, verbose=0)
    assert model.get_weights()[0].item() == pytest.approx(0.7)
    assert int(optimizer.iterations) == 1


def negative_is_zero(number: Any) -> Any:
    """AutoGraph converts it only where it is called, because it is defined outside."""
    if number > 0:
        return number
    return 0.0


@here
@pytest.mark.parametrize("converts", [True, False])
def test_autograph_converts_a_function_of_one_replica_in_a_graph(converts: bool) -> None:
    @tf.function(autograph=converts)
    def step(number: Any) -> Any:
        return SingleReplicaRunner().run(negative_is_zero, (number,), {})

    assert SingleReplicaRunner().run(negative_is_zero, (-2.0,), {}) == 0
    if converts:
        assert [float(step(tf.constant(number))) for number in (2.0, -2.0)] == [2, 0]
        return
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        step(tf.constant(2.0))


@here
@pytest.mark.parametrize("eager", [False, True])
def test_an_update_of_the_program_gets_further_arguments_in_fit(eager: bool) -> None:
    """The gradient is 6, as above."""

    class Limiting(keras.optimizers.SGD):
        def apply(self, grads: Any, weights: Any = None, limit: float = 1.0) -> None:
            super().apply([tf.clip_by_value(gradient, -limit, limit) for gradient in grads], weights)

    class Limited(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(data[0], data[1], self(data[0]))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, weights=self.trainable_variables, limit=3.0)
            return {"figure": loss}

    with lockstep.MultiWorkerMirroredStrategy().scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = Limited([keras.layers.Input((1,)), dense])
        model.compile(Limiting(0.1), "mae", run_eagerly=eager)
    x = np.array([[12.0]] * 3 + [[0.0]] * 3, "float32")
    model.fit(x, np.zeros((6, 1)), batch_size=6, shuffle=False, verbose=0)
    assert model.get_weights()[0].item() == pytest.approx(0.7)


@here
@pytest.mark.parametrize("eager", [False, True])
def test_integer_state_that_all_replicas_change_equally_is_kept(eager: bool) -> None:
    class Counter(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.steps = self.add_weight(shape=(), dtype="int64", trainable=False, name="steps")
            self.odd = self.add_weight(shape=(), dtype="bool", trainable=False, name="odd")
            self.rows = self.add_weight(shape=(), dtype="int32", trainable=False, name="rows")
            self.counts = False

        def call(self, inputs: Any) -> Any:
            self.steps.assign(self.steps + 2**40)
            self.odd.assign(tf.logical_not(self.odd))
            if self.counts:
                self.rows.assign(keras.ops.shape(inputs)[0])
            return inputs

    layer = Counter()
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = layers(layer)
        model.compile("sgd", "mse", run_eagerly=eager)
    model.fit(X[:7], Y[:7], batch_size=3, epochs=3, verbose=0)
    assert (int(layer.steps), bool(layer.odd.numpy())) == (9 * 2**40, True)
    layer.counts = True
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model.compile("sgd", "mse", run_eagerly=eager)
    with pytest.raises(ModelError, match=r"replicas set the int32 variable '.*/rows' to different values"):
        model.fit(X, Y, batch_size=8, verbose=0)


@here
@pytest.mark.parametrize("kind", ["train", "predict"])
@pytest.mark.parametrize("within", ["layer", "sequential", "model"])
def test_an_error_of_build_is_raised_as_plain_keras_raises_it(kind: Any, within: str) -> None:
    """A second attempt finds half of the layers built, and fails for that reason."""

    class Uneven(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], 2))
            raise KeyError("units must be even")

        def call(self, inputs: Any) -> Any:
            return inputs @ self.kernel

    class Composed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            inner = keras.layers.Dense(2) if within == "model" else Uneven()
            self.inner = keras.Sequential([inner]) if within == "sequential" else inner

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

        if within == "model":

            def build(self, shape: Any) -> None:
                self.inner.build(shape)
                raise KeyError("units must be even")

    model = Composed()
    model.compile("sgd", "mse")
    data = np.ones((4, 3), "float32"), np.ones((4, 2), "float32"), None
    with pytest.raises(KeyError, match="units must be even"):
        TensorFlowBackend().build(model, kind, lambda: data)


@here
@pytest.mark.parametrize("eager", [False, True])
def test_replica_0_writes_the_summaries_of_a_step_once(eager: bool, tmp_path: Path) -> None:
    """The rows have the numbers from 0 to 7, of which replica 0 has the first two."""

    writer = tf.summary.create_file_writer(str(tmp_path))

    class Summarizing(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            with writer.as_default(step=5):
                tf.summary.scalar("highest", tf.reduce_max(inputs))
            return inputs

    x = np.repeat(np.arange(8, dtype="float32")[:, None], 6, axis=1)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = layers(Summarizing())
        model.compile("sgd", "mse", run_eagerly=eager)
    with pytest.warns(UserWarning, match="they describe its examples alone"):
        model.fit(x, Y, batch_size=4, shuffle=False, verbose=0)
    writer.close()
    (path,) = tmp_path.iterdir()
    events = [tf.compat.v1.Event.FromString(one.numpy()) for one in tf.data.TFRecordDataset(str(path))]
    written = [
        (event.step, value.tag.rpartition("/")[2], float(tf.make_ndarray(value.tensor)))
        for event in events
        for value in event.summary.value
    ]
    assert written == [(5, "highest", 1.0), (5, "highest", 5.0)]


@here
@pytest.mark.parametrize("kind", ["train", "test"])
def test_a_metric_that_a_program_lists_twice_counts_once(kind: str) -> None:
    metered = Metered()
    model = ListsTwice([keras.layers.Input((6,)), metered, keras.layers.Dense(1)])
    steps = program(model, kind)
    total = as_total(steps.compute(None, share(weight=1.0), []))
    steps.apply(None, [total])
    assert float(metered.meter.count) == 4


@here
def test_numpy_sees_scalars_of_bfloat16() -> None:
    for scalar in (tf.constant(1.5, tf.bfloat16), tf.Variable(tf.constant(1.5, tf.bfloat16))):
        seen = TensorFlowBackend().to_numpy(scalar)
        assert (seen.shape, seen.dtype.name, float(seen)) == ((), "bfloat16", 1.5)


@here
@pytest.mark.parametrize("constant", [False, True])
def test_a_draw_of_tensorflow_repeats_its_row_unless_the_program_has_replaced_it(
    monkeypatch: pytest.MonkeyPatch, constant: bool
) -> None:
    monkeypatch.setattr(tf.random, "normal", lambda like: 2 * like)
    with equal_draws(lambda name: None, constant=constant):
        np.testing.assert_array_equal(tf.random.normal(X), 2 * X)
        for draw in (tf.random.uniform, tf.random.truncated_normal):
            rows = draw((4, 2)).numpy()
            np.testing.assert_array_equal(rows, rows[[0, 0, 0, 0]])
