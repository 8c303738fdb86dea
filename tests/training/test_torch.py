"""Tests of the PyTorch backend alone: mutable variables and global state.

Keras has one backend a process: under another one, this file runs itself again.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any, ClassVar

import keras
import ml_dtypes
import numpy as np
import pytest

import lockstep
from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras import randomness
from lockstep.keras.backends.growth import Growths, set_growths
from lockstep.keras.fit.random_rows import equal_draws
from lockstep.keras.nests import structure_of
from lockstep.keras.variables import assign, step_state
from lockstep.worker import job
from metered import ListsTwice, Metered

HERE = keras.backend.backend() == "torch"
here = pytest.mark.skipif(not HERE, reason="runs in a process of its own, with the PyTorch backend")

if HERE:
    import torch

    from lockstep.keras.backends.torch import TorchBackend, TorchProgram
    from lockstep.keras.backends.torch_eager import list_existing_parameters
    from lockstep.keras.backends.torch_tensors import borrowed, copied
    from lockstep.keras.fit.torch_modules import constant_modules
    from lockstep.keras.private.torch import normalizing_or_dropping

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = X[:, :1]


@pytest.mark.skipif(HERE or not find_spec("torch"), reason="this is that process, or there is no PyTorch")
def test_in_a_process_with_the_pytorch_backend(run_tests: Callable[[str, str], None]) -> None:
    run_tests(__file__, "torch")


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    yield
    if HERE:
        torch.use_deterministic_algorithms(False)


def share(replica: int = 0, weight: float = 0.5, seed: int = 1) -> Share:
    return Share(replica, 4, weight, seed, lambda: (X[:4], Y[:4]))


def layers(*given: Any, cls: Any = keras.Sequential) -> keras.Model:
    return cls([keras.layers.Input((6,)), *given, keras.layers.Dense(1)], name="wanted")


def program(model: keras.Model, kind: Any = "train", **options: Any) -> "TorchProgram":
    model.compile(**({"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]} | options))
    model._symbolic_build(data_batch=(X, Y))
    return TorchBackend().program(model, kind)


def bits(model: keras.Model) -> list[bytes]:
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable.value).tobytes() for variable in variables]


def as_total(partial: Any) -> dict[str, Any]:
    """Copy a partial to read-only memory."""
    backend = TorchBackend()
    total = {name: backend.to_numpy(value).copy() for name, value in partial.items()}
    for array in total.values():
        array.flags.writeable = False
    return total


def same(one: Any, other: Any) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def step_with(then: Any) -> type[keras.Model]:
    """A model whose train_step calls `then(model)` after Keras's own."""

    class Stepping(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            return logs | (then(self) or {})

    return Stepping


@here
def test_a_compute_changes_no_bit() -> None:
    model = layers(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3))
    prepared = program(model, optimizer="adam")
    before, states = bits(model), (random.getstate(), torch.get_rng_state(), np.random.get_state()[1])
    for replica in (0, 1):
        partial = prepared.compute(None, share(replica), [])
        assert bits(model) == before
        assert all(variable.value.grad is None for variable in model.trainable_variables)
        assert len([name for name in partial if name.startswith("state/")]) == 3
    after = random.getstate(), torch.get_rng_state(), np.random.get_state()[1]
    assert states[0] == after[0]
    assert torch.equal(states[1], after[1])
    assert (states[2] == after[2]).all()


@here
@pytest.mark.parametrize("constant", [False, True])
def test_a_trial_draws_equal_rows(constant: bool) -> None:
    def drawn() -> list[Any]:
        model = keras.Sequential([keras.layers.AlphaDropout(0.5), keras.layers.GaussianNoise(1.0)])
        return [torch.rand(size=(4, 2)), torch.randn(4, 2), model(np.ones((4, 3), "float32"), training=True)]

    with equal_draws(lambda name: None, constant=constant):
        first, second = drawn(), drawn()
    assert all(bool((rows == rows[0]).all()) for rows in first)
    assert all(map(torch.equal, first, second)) is constant


@here
def test_values_of_variables_that_torch_stores_in_another_dtype_fit() -> None:
    model = layers()
    model.counter = model.add_weight(shape=(), dtype="uint32", initializer="zeros", trainable=False)
    program(model)
    values = {name: np.array(variable.value.detach()) for name, variable in step_state(model).items()}
    assert "int64" in {str(value.dtype) for value in values.values()}
    assign(model, values, whole=True)


@here
@pytest.mark.parametrize("draw", ["dropout", "layer", "numpy", "random", "torch"])
def test_draws_depend_only_on_the_seed_of_the_step_and_the_replica(draw: str) -> None:
    class Noise(keras.Layer):
        def call(self, inputs: Any) -> Any:
            drawn = {
                "layer": lambda: keras.random.normal((1, 6)),
                "numpy": lambda: np.random.normal(size=(1, 6)).astype("float32"),
                "random": random.random,
                "torch": lambda: torch.randn(1, 6),
            }
            return inputs + keras.ops.convert_to_tensor(drawn[draw]())

    prepared = program(layers(keras.layers.Dropout(0.5) if draw == "dropout" else Noise()))
    first = prepared.compute(None, share(), [])
    others = [prepared.compute(None, share(replica, seed=seed), []) for replica, seed in ((1, 1), (0, 2))]
    assert same(first, prepared.compute(None, share(), []))
    assert not any(torch.equal(first["gradient/0"], other["gradient/0"]) for other in others)


@here
@pytest.mark.parametrize("writes", [True, False])
def test_no_optimizer_writes_to_a_total_or_keeps_it(writes: bool) -> None:
    class Rough(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([grad.mul_(2) for grad in grads], trainable_variables)

    model = layers()
    prepared = program(model, optimizer=Rough(0.1) if writes else keras.optimizers.SGD(0.1, momentum=0.9))
    partial = prepared.compute(None, share(), [])
    total = as_total(partial)
    expected = [
        v.numpy() - (0.2 if writes else 0.1) * total[f"gradient/{i}"]
        for i, v in enumerate(model.trainable_variables)
    ]
    copies = {name: array.copy() for name, array in total.items()}
    logs, _ = prepared.apply(None, [total])
    assert all((total[name] == copies[name]).all() for name in total)
    found = bits(model)
    for array in total.values():
        array.flags.writeable = True
        array[...] = 85
    assert bits(model) == found
    assert {type(value) for value in logs.values()} == {float}
    for variable, value in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6, atol=1e-6)


@here
def test_a_variable_without_a_gradient_keeps_its_value() -> None:
    class Forgetful(keras.layers.Dense):
        def call(self, inputs: Any) -> Any:
            return keras.ops.matmul(inputs, self.kernel)

    model = layers(Forgetful(6))
    prepared = program(model, optimizer=keras.optimizers.Adam(0.1, weight_decay=0.5))
    partial = prepared.compute(None, share(), [])
    assert partial["present"].tolist() == [1, 0, 1, 1]
    assert not partial["gradient/1"].any()
    model.trainable_variables[1].assign(np.ones(6))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        prepared.apply(None, [as_total(partial)])
    assert model.trainable_variables[1].numpy().tolist() == [1] * 6


@here
@pytest.mark.parametrize(
    "then",
    [
        lambda model: {"norm": keras.ops.norm(model.trainable_variables[0])},
        lambda model: {"norm": model.trainable_variables[0].value.norm()},
        lambda model: {"norm": keras.ops.sum(model(X)), "rate": model.optimizer.learning_rate.value},
        lambda model: [model.optimizer.apply([1 + v for v in model.trainable_variables]), {}][1],
    ],
)
def test_a_step_that_uses_new_weights_is_computed_again(then: Any) -> None:
    model = layers(cls=step_with(then))
    prepared = program(model)
    before = bits(model)
    totals: list[Any] = [as_total(prepared.compute(None, share(weight=1.0), []))]
    assert not prepared.is_last(0)
    assert not any(name.startswith(("metric/", "log/")) for name in totals[0])
    while not prepared.is_last(len(totals) - 1):
        totals.append(as_total(prepared.compute(None, share(weight=1.0), totals)))
    assert bits(model) == before
    logs, _ = prepared.apply(None, totals)

    alone = layers(cls=step_with(then))
    program(alone)
    for variable, value in zip(alone.variables, before, strict=False):
        variable.assign(np.frombuffer(value, variable.dtype).reshape(variable.shape))
    expected = alone.train_step((keras.ops.convert_to_tensor(X[:4]), keras.ops.convert_to_tensor(Y[:4])))
    assert {name: float(keras.ops.convert_to_numpy(value)) for name, value in expected.items()} == logs
    assert bits(model) == bits(alone)


@here
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_updates_weights_without_its_optimizers_is_refused(when: str) -> None:
    # The model has no attribute for it.
    other = keras.optimizers.SGD(0.1)

    class Past(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            if when == "after":
                super().train_step(data)
            other.apply([keras.ops.ones_like(v) for v in self.trainable_variables], self.trainable_variables)
            return super().train_step(data) if when == "before" else {}

    prepared = program(layers(cls=Past))
    with pytest.raises(ModelError, match=r"assigns the variable 'wanted/dense.*/kernel' itself"):
        prepared.compute(None, share(), [as_total(prepared.compute(None, share(), []))])


@here
@pytest.mark.parametrize("through", ["assign", "in_place"])
def test_state_may_change_only_later(through: str) -> None:
    """Its value from before is known, or the change is refused by name."""

    class Late(keras.Layer):
        def build(self, shape: Any) -> None:
            self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")
            self.changes = False

        def call(self, inputs: Any) -> Any:
            if self.changes and through == "assign":
                self.kept.assign(self.kept + 1)
            elif self.changes:
                self.kept.value.add_(1)
            return inputs

    layer = Late()
    prepared = program(layers(layer))
    before = layer.kept.numpy()
    assert not any(name.startswith("state/") for name in prepared.compute(None, share(), []))
    layer.changes = True
    if through == "in_place":
        with pytest.raises(ModelError, match=r"'wanted/late.*/kept' in place, but its first step did not"):
            prepared.compute(None, share(), [])
        return
    partial = prepared.compute(None, share(weight=0.5), [])
    assert layer.kept.numpy() == before
    assert [float(value) for name, value in partial.items() if name.startswith("state/")] == [0.5]
    prepared.apply(None, [as_total(partial)])
    assert layer.kept.numpy() == before + 0.5
    layer.changes = False
    assert not any(name.startswith("state/") for name in prepared.compute(None, share(), []))


@here
@pytest.mark.parametrize("through", ["assign", "data"])
def test_layer_state_changes_by_the_weighted_mean(through: str) -> None:
    class Mean(keras.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training and through == "assign":
                self.mean.assign(self.mean + 8)
            elif training:
                self.mean.value.data += 8
            return inputs

    layer = Mean()
    prepared = program(layers(layer))
    assert prepared.compute(None, share(weight=0.25), [])["state/0"].tolist() == 2
    assert prepared.compute(None, share(weight=0.5), [])["state/0"].tolist() == 4


@here
def test_a_replica_gives_the_new_value_of_integer_layer_state() -> None:
    class Counter(keras.Layer):
        def build(self, shape: Any) -> None:
            self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")

        def call(self, inputs: Any) -> Any:
            self.calls.assign(self.calls + 1)
            return inputs

    layer = Counter()
    prepared = program(layers(layer))
    layer.calls.assign(6)
    partial = prepared.compute(None, share(), [])
    (name,) = (name for name in partial if name.startswith("equal/"))
    assert name.endswith("/calls")
    assert (int(partial[name]), int(layer.calls)) == (7, 6)
    prepared.apply(None, [as_total(partial)])
    assert int(layer.calls) == 7


@here
@pytest.mark.parametrize("mode", [True, False])
def test_modules_that_normalize_or_drop_are_named_in_each_mode(mode: bool) -> None:
    modules = [torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0), torch.nn.Dropout(0.1)]
    module = torch.nn.Sequential(*modules).train(mode)
    assert normalizing_or_dropping(module) == [modules[1], modules[3]]
    assert [one.training for one in module.modules()] == [mode] * 5


@here
def test_a_trial_leaves_modules_as_they_were() -> None:
    normalization = torch.nn.BatchNorm1d(6)
    module = torch.nn.Sequential(normalization, torch.nn.Dropout(0.1)).eval()
    rows = torch.from_numpy(X)
    with constant_modules(list(module.modules())):
        module.train()
        assert [one.training for one in module] == [False, True]
        normalization.running_mean = normalization.running_mean + 1
        normalization.running_var.add_(1)
    assert not any(one.training for one in module.modules())
    torch.testing.assert_close(module(rows), rows / (1 + normalization.eps) ** 0.5)


@here
def test_the_averages_of_pytorchs_own_normalization_are_layer_state() -> None:
    module = torch.nn.BatchNorm1d(6)

    class Holder(keras.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.held = module

        def call(self, inputs: Any) -> Any:
            return self.held(inputs)

    model = layers(Holder())
    prepared = program(model)
    module.running_mean.zero_()
    module.num_batches_tracked.zero_()
    model.train()
    partials = [prepared.compute(None, share(replica), []) for replica in (0, 1)]
    assert not module.running_mean.any()
    total = as_total({name: sum(partial[name] for partial in partials) for name in partials[0]})
    prepared.apply(None, [total])
    np.testing.assert_allclose(module.running_mean.numpy(), 0.1 * X[:4].mean(axis=0), rtol=1e-5)
    assert module.num_batches_tracked == 1


@here
def test_tensors_over_read_only_memory() -> None:
    for dtype in ("float32", "float16", ml_dtypes.bfloat16, "int32"):
        array = np.arange(6).astype(dtype).reshape(2, 3)
        array.flags.writeable = False
        tensor = borrowed(array)
        assert (tensor.data_ptr(), tensor.tolist()) == (array.ctypes.data, [[0, 1, 2], [3, 4, 5]])
        back = TorchBackend().to_numpy(tensor)
        assert (back.dtype, back.ctypes.data) == (array.dtype, array.ctypes.data)


@here
def test_inputs_are_copied_to_aligned_memory() -> None:
    rows = np.arange(70, dtype="float32").reshape(10, 7)
    for leaf in (rows[3:], torch.from_numpy(rows)[3:], rows[::-1], rows.astype("uint32")[1:]):
        tensor = copied(leaf)
        assert (tensor.data_ptr() % 64, tensor.is_contiguous()) == (0, True)
        assert tensor.tolist() == leaf.tolist()
    assert copied(rows.astype("uint32")).dtype == torch.int64
    assert copied(rows.astype(ml_dtypes.bfloat16)).dtype == torch.bfloat16
    assert copied(None) is None


@here
def test_features_that_keras_lacks_on_pytorch_are_refused_or_reported() -> None:
    with pytest.raises(ModelError, match="steps_per_execution is 2"):
        program(layers(), steps_per_execution=2)
    with pytest.warns(UserWarning, match="jit_compile=True is ignored"):
        program(layers(), jit_compile=True)


@here
def test_determinism_is_on_and_a_note_reports_that_the_script_disables_it() -> None:
    torch.set_num_threads(2)
    model, backend = layers(), TorchBackend()
    model.compile("sgd", "mse")
    backend.program(model, "predict")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1
    torch.use_deterministic_algorithms(False)
    with pytest.warns(UserWarning, match="equal bits are no longer guaranteed"):
        backend.program(model, "predict")


@here
def test_replicas_begin_without_gradients_and_keep_outer_ones() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    first, second = (keras.Variable(np.ones(2, "float32")) for _ in range(2))
    first.value.sum().backward()

    def gradients() -> Any:
        (first.value.sum() + second.value.sum()).backward()
        first.value.sum().backward()
        return first.value.grad, second.value.grad

    found = strategy.run(gradients)
    assert [gradient.tolist() for gradient in found[0].values] == [[2, 2]] * 3
    assert [gradient.tolist() for gradient in found[1].values] == [[1, 1]] * 3
    assert first.value.grad.tolist() == [1, 1]
    assert second.value.grad is None


@here
def test_an_optimizer_of_keras_and_one_of_the_functions_own_tensors_are_allowed() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    made, optimizer, moved = layers(), keras.optimizers.SGD(0.1, momentum=0.9), []
    mean = keras.Variable(np.zeros(2, "float32"), trainable=False)

    def step(x: Any) -> None:
        for _ in range(2):
            made.zero_grad()
            made(x).sum().backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in made.trainable_variables], made.trainable_variables)
        point = torch.zeros(2, requires_grad=True)
        other = torch.nn.Parameter(torch.zeros(2))
        (point + other - 1).square().sum().backward()
        torch.optim.SGD([point], 0.5).step()
        other.data -= other.grad
        mean.assign(mean + x.shape[0])
        moved.append([*point.tolist(), *other.tolist()])

    batch = next(iter(strategy.experimental_distribute_dataset([X[:6]])))
    for count in (1, 2):
        strategy.run(step, args=(batch,))
        assert moved[-1] == [1, 1, 2, 2]
        assert keras.ops.convert_to_numpy(mean).tolist() == [2 * count] * 2


def step_of_pytorch(weight: Any, optimizer: Any) -> None:
    optimizer.step()


def write_to_data(weight: Any, optimizer: Any) -> None:
    weight.data -= 0.1 * weight.grad


def write_to_a_view_of_data(weight: Any, optimizer: Any) -> None:
    weight.data.data[0].mul_(0.5)


def replace_data(weight: Any, optimizer: Any) -> None:
    weight.data = weight.data - 1


def write_before_any_backward_pass(weight: Any, optimizer: Any) -> None:
    teachers_weight, students = layers_of_teachers[0].kernel.value, layers_of_teachers[1].kernel.value
    with torch.no_grad():
        teachers_weight.lerp_(students, 0.1)


layers_of_teachers: list[Any] = []


@here
@pytest.mark.parametrize(
    "write",
    [step_of_pytorch, write_to_data, write_to_a_view_of_data, replace_data, write_before_any_backward_pass],
)
def test_a_function_of_replicas_that_changes_weights_in_place_is_refused(write: Callable[..., None]) -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    made = layers()
    optimizer = torch.optim.SGD([weight.value for weight in made.trainable_variables], 0.1)
    layers_of_teachers[:] = [layers().layers[-1], layers().layers[-1]]

    def step(x: Any) -> None:
        made.zero_grad()
        made(x).sum().backward()
        write(made.layers[-1].kernel.value, optimizer)

    batch = next(iter(strategy.experimental_distribute_dataset([X[:6]])))
    with pytest.raises(ModelError, match=r"changes a weight in place, of the shape \(6, 1\)"):
        strategy.run(step, args=(batch,))


@here
def test_a_parameter_that_was_created_before_the_strategy_is_a_weight() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    # As if nothing were replaced in PyTorch yet.
    weight = torch.Tensor._make_subclass(torch.nn.Parameter, torch.zeros(3), True)
    list_existing_parameters()

    def step() -> None:
        with torch.no_grad():
            weight.add_(1)

    with pytest.raises(ModelError, match=r"changes a weight in place, of the shape \(3,\)"):
        strategy.run(step)


class Adding:
    def __init__(self) -> None:
        self.sum, self.count = torch.zeros(()), torch.zeros(())

    def step(self, x: Any) -> Any:
        self.sum.data += x.sum()
        self.count.data += 1
        return self.sum + self.count


@here
def test_tensors_that_replicas_change_in_place_are_combined_or_refused() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    batch, total = next(iter(strategy.experimental_distribute_dataset([X[:6]]))), torch.zeros(())
    equal, adding = Adding(), Adding()
    for count in (1, 2):
        found = strategy.run(lambda: equal.step(torch.zeros(2)))
        assert [float(value) for value in found.values] == [count] * 3
        assert (float(equal.sum), float(equal.count)) == (0, count)

    strategy.run(adding.step, args=(batch,))
    with pytest.raises(ModelError, match=r"reads Adding\.sum, and replicas have left different values"):
        strategy.run(adding.step, args=(batch,))
    for add in (lambda x: total.add_(x.sum()), lambda x: total.data.add_(x.sum())):
        with pytest.raises(ModelError, match="in place, in the variable 'total' outside of the function"):
            strategy.run(add, args=(batch,))


class Penalized(keras.layers.Dense):
    """A layer whose kernel adds to the loss, and its mean output."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, kernel_regularizer=keras.regularizers.L2(0.5), **options)

    def call(self, inputs: Any, training: Any = None) -> Any:
        outputs = super().call(inputs, training)
        self.add_loss(keras.ops.mean(outputs))
        return outputs


def passed_on(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that a decorator of a program has wrapped."""

    @wraps(step)
    def wrapped(model: Any, data: Any) -> Any:
        return step(model, data)

    return wrapped


STEP_OF_KERAS = keras.Model.train_step


class OwnStep(keras.Sequential):
    """A model whose own step halves the labels."""

    before_any_strategy = keras.Model.train_step
    decorated = passed_on(keras.Model.train_step)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept = {"bound": [super().train_step]}

    def train_step(self, data: Any) -> Any:
        return super().train_step((data[0], data[1] / 2))

    def step_of_keras(self) -> Any:
        return super().train_step

    def by_method(self, data: Any) -> Any:
        return self.before_any_strategy(data)


@here
@pytest.mark.parametrize("layer", [None, Penalized])
def test_a_step_of_keras_in_a_function_of_replicas_is_that_of_the_batch(layer: Any) -> None:
    """With all losses: those of regularizers and `add_loss` count once, however the program keeps it."""
    strategy = lockstep.MultiWorkerMirroredStrategy()
    made, plain = (
        OwnStep([keras.layers.Input((6,)), (layer or partial(keras.layers.Dense, 1))()]) for _ in "12"
    )
    plain.set_weights(made.get_weights())
    for model in (made, plain):
        model.compile(keras.optimizers.SGD(0.1), "mse")
    rows = X[:6], Y[:6]
    batch = next(iter(strategy.experimental_distribute_dataset([rows])))

    def in_a_closure(model: OwnStep) -> Any:
        step = model.step_of_keras()
        return lambda data: step(data)

    for steps in (
        lambda model: model.train_step,
        # In a function, a method is looked up when it is called.
        lambda model: lambda data: model.test_step(data),
        lambda model: model.test_step,
        lambda model: partial(model.test_step),
        lambda model: model.step_of_keras(),
        in_a_closure,
        lambda model: partial(STEP_OF_KERAS, model),
        lambda model: lambda data: type(model).train_step(model, data),
        lambda model: lambda data: model.kept["bound"][0](data),
        lambda model: model.decorated,
        lambda model: model.by_method,
    ):
        step, expected = steps(made), steps(plain)
        made.reset_metrics()
        plain.reset_metrics()
        strategy.run(step, kwargs={"data": batch})
        expected(data=rows)
        losses = (float(model.get_metrics_result()["loss"]) for model in (made, plain))
        assert next(losses) == pytest.approx(next(losses), rel=1e-5)
        for weight, wanted in zip(made.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-7)


@here
def test_replicas_draw_distinct_numbers_and_keep_the_global_states() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    draws = (lambda: torch.rand(())), np.random.random, (lambda: keras.random.uniform(())), random.random
    found = strategy.run(lambda: tuple(draw() for draw in draws))
    assert [len({float(value) for value in leaf.values}) for leaf in found] == [3] * 4
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert states[2] == random.getstate()


@here
def test_results_keep_their_values_when_variables_change() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    metric, weight = keras.metrics.Sum(), keras.Variable(np.ones(2, "float32"))

    def step() -> Any:
        metric.update_state(2.0)
        return metric.result(), weight, weight.value

    found = strategy.run(step)
    weight.assign([5, 5])
    rows = [[leaf.values[replica].tolist() for leaf in found] for replica in range(3)]
    assert rows == [[2, [1, 1], [1, 1]]] * 3


@here
def test_state_of_pytorch_modules_is_refused_in_functions_of_replicas() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    module = torch.nn.BatchNorm1d(6)
    with pytest.raises(ModelError, match=r"changes BatchNorm1d\.running_mean, the state of a PyTorch module"):
        strategy.run(lambda: module(torch.from_numpy(X)))
    assert not module.running_mean.any()
    assert len(strategy.run(lambda: module.eval()(torch.from_numpy(X))).values) == 3


@here
def test_values_keep_their_keys() -> None:
    """On PyTorch, `keras.tree.map_structure` visits the keys of a dict in another order than `flatten`."""
    strategy = lockstep.MultiWorkerMirroredStrategy()
    batches = strategy.experimental_distribute_dataset([{"x": X, "label": 100 + Y}])
    (batch,) = batches
    found = strategy.run(lambda rows: {"x": rows["x"].sum(), "label": rows["label"].mean()}, args=(batch,))
    assert float(strategy.reduce("SUM", found["x"])) == pytest.approx(float(X.sum()), abs=1e-4)
    assert 90 < float(strategy.reduce("MEAN", found["label"])) < 110
    assert strategy.reduce("SUM", found["x"]).shape == ()


@here
def test_a_sum_of_losses_in_a_custom_step_is_that_of_the_whole_batch() -> None:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return {"error": loss}

    with lockstep.MultiWorkerMirroredStrategy().scope():
        inputs = keras.Input((6,))
        model = Own(inputs, keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)(inputs))
        model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(reduction="sum"))
    model.train_on_batch(X, Y)
    np.testing.assert_allclose(model.get_weights()[0], 0.2 * X.T @ Y, rtol=1e-4, atol=1e-6)


@here
def test_a_plain_step_leaves_gradients_as_they_were() -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            loss = keras.ops.mean(keras.ops.square(self(data[0]) - data[1]))
            loss.backward()
            return {"gradient": self.trainable_weights[0].value.grad.sum()}

    model = layers(cls=Own)
    program(model)
    backend = TorchBackend()
    first, second = (
        backend.plain_step(model, "train", lambda batches: model.train_step(*batches), (X, Y))[0]
        for _ in range(2)
    )
    assert first == second
    assert [variable.value.grad for variable in model.trainable_variables] == [None, None]


class Noisy(keras.layers.Layer):
    """Draws from all random states, changes its state, and adds to the loss; notes its calls."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.count = self.add_weight(name="count", shape=(), initializer="ones", trainable=False)
        self.note = lambda: calls.append("forward")

    def call(self, x: Any) -> Any:
        self.note()
        self.count.assign(self.count + keras.ops.mean(x))
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x + sum(np.ravel(drawn_numbers()[1:-1])) * torch.rand(1)


class Scaling(Noisy):
    """Changes its state, of which the gradient depends."""

    def call(self, x: Any) -> Any:
        return super().call(x) * self.count


@here
@pytest.mark.parametrize(("cls", "forwards"), [(Noisy, 0), (Scaling, 1)])
def test_a_step_that_goes_on_from_a_kept_forward_pass_has_the_bits_of_another_pass(
    cls: type[Noisy], forwards: int
) -> None:
    def contrast(y: Any, p: Any) -> Any:
        drawn = sum(np.ravel(drawn_numbers()[1:-1]))
        return keras.ops.mean(keras.ops.matmul(p, keras.ops.transpose(p))) * drawn * torch.rand(())

    calls: list[str] = []
    model = layers(keras.layers.Dense(3), cls(calls), keras.layers.Dropout(0.5))
    found = program(model, loss=contrast, metrics=[])
    set_growths(model, Growths(whole=frozenset({"loss"})))
    own, other = (
        share(r)._replace(data=lambda r=r: (X[4 * r :][:4], Y[4 * r :][:4]), start=4 * r) for r in (0, 1)
    )

    def bits(*, keeps: bool, between: bool = False) -> dict[str, bytes]:
        found.keep_passes(keeps)
        rows = [found.compute(None, each, ()) for each in (other, own)]
        if between:
            found.compute(None, other, ())
        joined = {name: np.concatenate([part[name] for part in reversed(rows)]) for name in rows[0]}
        calls.clear()
        partial = found.compute(None, own, [joined])
        return {name: np.asarray(a).tobytes() for name, a in partial.items()}

    wanted = bits(keeps=False)
    assert len(calls) == 1
    # The pass of one replica at a time is kept.
    assert bits(keeps=True, between=True) == wanted
    assert len(calls) == 1
    assert bits(keeps=True) == wanted
    assert len(calls) == forwards
    assert any(name.startswith("state/") for name in wanted)


class NotesGraphs(keras.layers.Layer):
    """Notes whether PyTorch makes graphs: some of its modules compute other bits without."""

    graphs: ClassVar[list[bool]] = []

    def call(self, x: Any) -> Any:
        self.graphs.append(torch.is_grad_enabled())
        return x


@here
def test_rounds_that_gather_make_a_graph_in_each_step() -> None:
    def contrast(y: Any, p: Any) -> Any:
        return keras.ops.mean(keras.ops.matmul(p, keras.ops.transpose(p)))

    model = layers(NotesGraphs())
    found = program(model, loss=contrast, metrics=[])
    set_growths(model, Growths(whole=frozenset({"loss"})))
    NotesGraphs.graphs.clear()
    for keeps in (False, False, True):
        found.keep_passes(keeps)
        assert all(name.startswith("gather/") for name in found.compute(None, share(), ()))
    assert NotesGraphs.graphs == [True, True, True]


def states_now() -> list[Any]:
    """Return everything that random numbers depend on, as copies."""
    generator = randomness.global_generator()
    kind, words, *rest = np.random.get_state()
    state = None if generator is None else generator.state.numpy().tolist()
    return [random.getstate(), kind, words.tolist(), rest, state, torch.get_rng_state().tolist()]


def drawn_numbers() -> list[Any]:
    numbers = keras.random.normal((2,)), random.random(), random.gauss(0, 1), np.random.normal()
    return [np.asarray(keras.ops.convert_to_numpy(one)).tolist() for one in (*numbers, torch.rand(2))]


@here
@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("normals", [0, 1])
def test_seeds_set_the_states_that_were_created_from_them(seed: int, normals: int) -> None:
    random.seed(7)
    np.random.seed(7)
    np.random.normal(size=normals)
    keras.random.normal((1,))
    before, passes = states_now(), []
    for _ in range(3):
        with randomness.random_numbers(seed):
            wanted = randomness._seeded(seed)
            (kind, words, *rest), (_, generator) = wanted["numpy"], wanted["keras"]
            state = generator.state.numpy().tolist()
            of_torch = wanted["torch"].tolist()
            assert states_now() == [wanted["python"], kind, words.tolist(), rest, state, of_torch]
            passes.append(drawn_numbers())
            passes[-1] += drawn_numbers()
        assert states_now() == before
    assert passes == [passes[0]] * 3


@here
@pytest.mark.parametrize("is_worker", [True, False])
def test_a_worker_computes_deterministically_before_it_prepares_a_step(
    monkeypatch: pytest.MonkeyPatch, is_worker: bool
) -> None:
    """A single replica takes steps that Lockstep does not prepare; a plain program stays as it is."""
    monkeypatch.setattr(job, "is_worker", lambda: is_worker)
    torch.use_deterministic_algorithms(False)
    TorchBackend()
    assert torch.are_deterministic_algorithms_enabled() == is_worker


@here
@pytest.mark.parametrize(
    "clears", ["before", "before_to_zero", "after", "after_to_zero", "never", "sometimes"]
)
def test_a_step_that_adds_to_the_gradients_of_the_step_before_is_refused(clears: str) -> None:
    class Adding(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            if clears.startswith("before") or (clears == "sometimes" and int(self.optimizer.iterations) > 1):
                torch.nn.Module.zero_grad(self, set_to_none=clears == "before")
            loss = self.compute_loss(data[0], data[1], self(data[0]))
            loss.backward()
            weights = self.trainable_variables
            with torch.no_grad():
                self.optimizer.apply([one.value.grad for one in weights], weights)
            if clears.startswith("after"):
                torch.nn.Module.zero_grad(self, set_to_none=clears == "after")
            return {"loss": loss}

    prepared = program(layers(cls=Adding))
    refused = pytest.raises(ModelError, match=r"adds to the gradient of 'wanted/dense.*/bias' that the step")
    for number in range(3):
        with refused if number == 1 and clears in ("never", "sometimes") else nullcontext():
            # Each replica begins with what the step before has left.
            partials = [prepared.compute(None, share(replica), []) for replica in (0, 1)]
        if number == 1 and clears in ("never", "sometimes"):
            return
        prepared.apply(None, [as_total(partials[0])])


@here
def test_predictions_update_the_metrics_of_layers() -> None:
    metered = Metered()
    computed = program(layers(metered), "predict")
    partials = [computed.compute(None, share(replica), ()) for replica in range(2)]
    assert [sorted(partial) for partial in partials] == [["metric/4", "metric/5"]] * 2
    assert float(metered.meter.count) == 0
    total = {name: sum(partial[name] for partial in partials) for name in partials[0]}
    computed.apply(None, [total])
    np.testing.assert_allclose(float(metered.meter.result()), X[:4].mean(), rtol=1e-6)
    assert float(metered.meter.count) == 8


@here
@pytest.mark.parametrize("kind", ["train", "test"])
def test_a_metric_that_a_program_lists_twice_counts_once(kind: str) -> None:
    metered = Metered()
    steps = program(layers(metered, cls=ListsTwice), kind)
    steps.apply(None, [steps.compute(None, share(weight=1.0), ())])
    assert float(metered.meter.count) == 4


@here
@pytest.mark.parametrize("whole", [False, True])
def test_weights_that_a_masked_loss_scales_in_place_are_those_of_plain_keras(whole: bool) -> None:
    times = keras.layers.Reshape((6, 1))
    model = layers(keras.layers.ReLU(), times, keras.layers.Masking(0.0))
    steps = program(model, "test", metrics=[], weighted_metrics=["mae"])
    y, weights = np.repeat(Y[:, None], 6, axis=1), np.linspace(0.1, 2, 48, dtype="float32").reshape(8, 6)

    def batch(rows: slice) -> Any:
        return X[rows], y[rows], weights[rows].copy()

    def rows(replica: int, rows: slice) -> Share:
        count = rows.stop - rows.start
        return Share(replica, count, count / 8, 1, lambda: batch(rows), rows.start)

    with torch.no_grad():
        model.test_step([torch.tensor(part) for part in batch(slice(0, 8))])
    plain = [float(variable) for variable in model.metrics_variables]
    model.reset_metrics()
    set_growths(model, Growths(whole=frozenset({"loss"} if whole else ())))
    shares = [rows(replica, part) for replica, part in enumerate((slice(0, 3), slice(3, 8)))]
    earlier = []
    if whole:
        gathered = [steps.compute(None, each, ()) for each in shares]
        earlier.append({name: np.concatenate([one[name] for one in gathered]) for name in gathered[0]})
    partials = [steps.compute(None, each, earlier) for each in shares]
    total = {name: sum(partial[name] for partial in partials) for name in partials[0]}
    # What was gathered has served its purpose.
    steps.apply(None, [*({} for _ in earlier), as_total(total)])
    np.testing.assert_allclose([float(variable) for variable in model.metrics_variables], plain, rtol=1e-6)


@here
def test_a_step_gets_the_batches_of_a_loader_in_their_own_form() -> None:
    torch.use_deterministic_algorithms(True)
    batches = []

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            batches.append(data)
            return {}

    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = Own([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd")
    rows = [*torch.tensor(X)]
    for items in (rows, [{"y": row[0], "x": row} for row in rows], [[row, row[0]] for row in rows]):
        batches.clear()
        loader = torch.utils.data.DataLoader(items, batch_size=4)
        model.fit(loader, verbose=0)
        assert {structure_of(batch) for batch in batches} == {structure_of(next(iter(loader)))}
