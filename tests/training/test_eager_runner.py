"""`strategy.run` with functions that run eagerly, in one process: results, changes and refusals."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import DataError, DisagreementError, ModelError
from lockstep.keras.replica_run.merges import Replica, SingleReplicaMerger, computing_as
from lockstep.topology import place
from lockstep.worker.job import Job, by_itself

ops = keras.ops
X = np.arange(12, dtype="float32").reshape(6, 2)


@pytest.fixture(scope="module")
def strategy() -> lockstep.Strategy:
    return lockstep.MultiWorkerMirroredStrategy()


@pytest.fixture
def batch(strategy: lockstep.Strategy) -> Any:
    return next(iter(strategy.experimental_distribute_dataset([X])))


@pytest.fixture
def job_of_two_workers(job_of_one_worker: Job) -> Iterator[Job]:
    """This process owns the first two replicas; no process computes the third."""
    job = job_of_one_worker
    before = job._entered
    job._entered = place(3, (0, 1)), job.communicator
    yield job
    job._entered = before


def variable(value: Any = 0.0, **options: Any) -> keras.Variable:
    return keras.Variable(np.asarray(value), **{"name": "wanted", "trainable": False, **options})


def test_results_have_the_nest_that_a_replica_returns(strategy: lockstep.Strategy, batch: Any) -> None:
    def results(x: Any) -> Any:
        return {"rows": x, "sum": ops.sum(x), "number": 2, "nothing": None, "text": "some"}

    found = strategy.run(results, args=(batch,))
    assert found["nothing"] is None
    local = strategy.experimental_local_results(found)
    assert [int(one["sum"]) for one in local] == [6, 22, 38]
    assert local[1]["text"] == "some"
    assert int(strategy.reduce("SUM", found["sum"])) == 66
    assert float(strategy.reduce("MEAN", found["number"])) == 2
    assert float(strategy.reduce("MEAN", found["rows"], axis=0)[1]) == 6
    np.testing.assert_array_equal(strategy.gather(found["rows"], axis=0), X)
    again = strategy.run(lambda x, y: ops.sum(x) - y, args=(found["rows"], found["sum"]))
    assert [int(value) for value in again.values] == [0, 0, 0]


def test_a_replica_without_examples_computes_on_zero_rows(
    strategy: lockstep.Strategy,
) -> None:
    """As under `tf.distribute`, a mean over zero rows is not a number."""
    single = next(iter(strategy.experimental_distribute_dataset([X[:1]])))
    mean, bn = keras.metrics.Mean(), keras.layers.BatchNormalization(momentum=0.5)

    def step(x: Any) -> Any:
        assert lockstep.get_replica_context().all_reduce("SUM", ops.shape(x)[0]) == 1
        mean.update_state(x[:, 1])
        bn(x, training=True)
        loss = keras.losses.MeanSquaredError()(ops.zeros_like(x), x)
        return {"rows": x, "sum": ops.sum(x), "mean": ops.mean(x), "loss": loss}

    found = strategy.run(step, args=(single,))
    assert [value.shape for value in found["rows"].values] == [(1, 2), (0, 2), (0, 2)]
    np.testing.assert_array_equal(strategy.gather(found["rows"], axis=0), X[:1])
    assert float(strategy.reduce("SUM", found["sum"])) == 1
    assert np.isnan(float(strategy.reduce("SUM", found["mean"])))
    assert float(strategy.reduce("SUM", found["loss"])) == pytest.approx(0.5 / 3)
    np.testing.assert_array_equal(strategy.reduce("MEAN", found["rows"], axis=0), X[0])
    assert (float(mean.total), float(mean.count)) == (1, 1)
    # A replica without examples has no statistics, and changes nothing.
    np.testing.assert_allclose(bn.moving_mean, X[0] / 2 / 3, rtol=1e-6)
    with pytest.raises(ValueError, match="max") as caught:
        strategy.run(ops.max, args=(single,))
    assert "replica 1 has no examples in this batch" in caught.value.__notes__[-1]


def test_the_mean_of_integers_is_a_float(strategy: lockstep.Strategy) -> None:
    def own(value: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: value[context.replica_id_in_sync_group]
        )

    def mean(value: Any) -> Any:
        return lockstep.get_replica_context().all_reduce("MEAN", value)

    numbers, rows = own([0, 3, 2]), own([np.array([0, 1]), np.array([3, 1]), np.array([2, 2])])
    flags = own([True, True, False])
    assert float(strategy.reduce("MEAN", numbers)) == pytest.approx(5 / 3)
    assert float(strategy.reduce("MEAN", rows, axis=0)) == 1.5
    assert float(strategy.reduce("MEAN", np.array([0, 3]), axis=0)) == 1.5
    assert float(strategy.reduce("MEAN", flags)) == pytest.approx(2 / 3)
    for given, wanted in ((numbers, 5 / 3), (flags, 2 / 3)):
        assert float(strategy.run(mean, args=(given,)).values[0]) == pytest.approx(wanted)
    assert int(strategy.reduce("SUM", numbers)) == 5
    with pytest.raises(ModelError, match="add up booleans"):
        strategy.reduce("SUM", flags)


def test_a_per_replica_value_is_printed_and_is_no_tensor(strategy: lockstep.Strategy, batch: Any) -> None:
    found = strategy.run(ops.sum, args=(batch,))
    assert str(found) == (
        "PerReplica:{\n  0: Array(6., dtype=float32),\n  1: Array(22., dtype=float32),\n"
        "  2: Array(38., dtype=float32)\n}"
    )
    uses: list[Callable[[Any], Any]] = [
        float,
        ops.mean,
        np.asarray,
        lambda value: value + 1,
        lambda value: ops.ones(()) * value,
        lambda value: f"{value:.3f}",
        lambda value: value.numpy(),
    ]
    for use in uses:
        with pytest.raises(ModelError, match="it holds a value for each replica"):
            use(found)


@pytest.mark.parametrize(("op", "slope"), [("SUM", 3 * 2 * X.sum()), ("MEAN", 2 * X.sum() / 3)])
def test_each_replica_has_the_gradient_of_all_losses_through_a_merge(
    strategy: lockstep.Strategy, batch: Any, op: str, slope: float
) -> None:
    def loss(x: Any) -> Any:
        return lockstep.get_replica_context().all_reduce(op, ops.sum(x)) ** 2

    found = strategy.run(jax.grad(loss), args=(batch,))
    for gradient in found.values:
        np.testing.assert_allclose(gradient, np.full((2, 2), slope), rtol=1e-6, atol=1e-6)


def test_gradients_through_merges_are_refused_where_jax_traces(
    strategy: lockstep.Strategy, batch: Any
) -> None:
    def summed(x: Any) -> Any:
        return ops.sum(lockstep.get_replica_context().all_reduce("SUM", ops.sum(x)) ** 2)

    constant = lockstep.get_replica_context
    for function in (jax.jit(summed), jax.vmap(summed), jax.jit(lambda x: constant().all_reduce("SUM", 1))):
        with pytest.raises(ModelError, match="cannot synchronize in a function that JAX traces"):
            strategy.run(function, args=(batch,))


def test_values_that_are_no_results_are_shared_by_all_replicas(strategy: lockstep.Strategy) -> None:
    assert float(strategy.reduce("MEAN", np.float32(2))) == 2
    assert float(strategy.reduce("SUM", np.ones((2, 2), "float32"), axis=(0, 1))) == 12
    assert strategy.gather(7, axis=0) == 7
    assert strategy.experimental_local_results(7) == (7,)
    assert strategy.experimental_local_results([7]) == ([7],) * 3
    with pytest.raises(ValueError, match="of a value of type float, which all 3 replicas share"):
        strategy.reduce("SUM", [2.0])


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), [1], ()])
def test_a_reduction_takes_any_axes(strategy: lockstep.Strategy, batch: Any, axis: Any) -> None:
    axes = tuple(axis) if isinstance(axis, list) else axis
    np.testing.assert_array_equal(
        strategy.reduce("SUM", batch, axis=axis), sum(X[i : i + 2].sum(axes) for i in (0, 2, 4))
    )
    np.testing.assert_allclose(
        strategy.reduce("MEAN", batch, axis=axis), sum(X[i : i + 2].mean(axes) for i in (0, 2, 4)) / 3
    )
    with pytest.raises(DataError, match=r"strategy\.reduce over axis 2 of a value of shape \[2, 2\]"):
        strategy.reduce("SUM", batch, axis=2)


def test_names_that_lockstep_lacks_say_what_to_use(strategy: lockstep.Strategy) -> None:
    assert not hasattr(strategy, "extended")
    assert lockstep.get_strategy().cluster_resolver is None
    with pytest.raises(AttributeError, match=r"'unwrap': use strategy\.experimental_local_results"):
        strategy.unwrap(1)
    with pytest.raises(AttributeError, match=r"no attribute 'unknown'$"):
        strategy.unknown()


def test_one_strategy_is_active_at_a_time(strategy: lockstep.Strategy) -> None:
    other = lockstep.MirroredStrategy()
    with strategy.scope(), strategy.scope():
        with pytest.raises(RuntimeError, match="the scope of another strategy is active"):
            other.run(lambda: 1)
        with (
            pytest.raises(RuntimeError, match="scope of another"),
            lockstep.get_strategy().scope(),
            other.scope(),
        ):
            pass
        assert lockstep.get_strategy() is strategy
    with other.scope():
        assert lockstep.get_strategy() is other


def test_replicas_update_shared_metrics_and_states(strategy: lockstep.Strategy, batch: Any) -> None:
    metric, state, seeds = keras.metrics.Sum(), variable(1.0), keras.random.SeedGenerator(3)
    metric.update_state(100)
    # Unlike a list, it is not state that replicas would have to leave equal.
    seen: SimpleQueue[tuple[float, float, float]] = SimpleQueue()

    def step(x: Any) -> None:
        before = float(metric.total), float(state)
        metric.update_state(x)
        state.assign_add(ops.sum(x))
        seen.put((*before, float(keras.random.uniform((), seed=seeds))))

    strategy.run(step, args=(batch,))
    last = [seen.get() for _ in range(seen.qsize())][-3:]
    assert [one[:2] for one in last] == [(100.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    assert len({one[2] for one in last}) == 3
    assert float(metric.result()) == 166
    assert float(state) == pytest.approx(1 + 22)
    assert np.asarray(seeds.state.value).tolist() == [3, 1]
    # The metrics and seeds of the function are known: its second run computes no replica twice.
    strategy.run(step, args=(batch,))
    assert seen.qsize() == 3


def test_an_error_in_the_function_restores_variables(strategy: lockstep.Strategy) -> None:
    metric, state = keras.metrics.Sum(), variable(1.0)

    def step() -> None:
        metric.update_state(5)
        state.assign(7)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        strategy.run(step)
    assert (float(metric.total), float(state)) == (0, 1)


def test_all_replicas_use_the_layer_that_the_first_one_builds(
    strategy: lockstep.Strategy, batch: Any
) -> None:
    layer = keras.layers.BatchNormalization(momentum=0.0)
    strategy.run(lambda x: layer(x, training=True), args=(batch,))
    np.testing.assert_allclose(layer.moving_mean, X.mean(axis=0), rtol=1e-6)


def test_a_metric_created_in_the_function_is_per_replica(strategy: lockstep.Strategy, batch: Any) -> None:
    def own(x: Any) -> Any:
        metric = keras.metrics.Mean()
        metric.update_state(x)
        return metric.result()

    assert [float(value) for value in strategy.run(own, args=(batch,)).values] == [1.5, 5.5, 9.5]


def test_the_losses_of_keras_sum_up_to_that_of_the_batch(strategy: lockstep.Strategy, batch: Any) -> None:
    loss = keras.losses.MeanSquaredError()
    parts = strategy.run(lambda x: loss(ops.zeros_like(x), x), args=(batch,))
    assert float(strategy.reduce("SUM", parts)) == pytest.approx(float(np.mean(X**2)))


def test_a_note_says_once_that_the_updates_of_functions_are_not_divided(
    strategy: lockstep.Strategy, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(strategy._runner, "_says_whole", True)
    for _ in range(2):
        weight, optimizer = variable(1.0, trainable=True), keras.optimizers.SGD(1.0)
        strategy.run(lambda o=optimizer, w=weight: o.apply([ops.ones(())], [w]))
        assert float(weight) == 1 - 3
    errors = capfd.readouterr().err
    assert errors.count("computes the whole update: a function of strategy.run makes it") == 1


def test_runs_draw_other_numbers_and_none_from_the_states_of_the_script(strategy: lockstep.Strategy) -> None:
    """So a script creates the same models after a run as with one replica."""
    state = random.getstate()
    numbers = {float(value) for _ in range(3) for value in strategy.run(lambda: random.random()).values}
    assert len(numbers) == 9
    assert random.getstate() == state


def test_stateless_updates_are_per_replica(strategy: lockstep.Strategy, batch: Any) -> None:
    weight = variable(1.0, trainable=True)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight])

    @jax.jit
    def updated(x: Any, state: Any) -> Any:
        return optimizer.stateless_apply(state, [ops.sum(x)], [weight.value])[0][0]

    state = [one.value for one in optimizer.variables]
    found = strategy.run(lambda x: updated(x, state), args=(batch,))
    assert [float(value) for value in found.values] == [1 - 6, 1 - 22, 1 - 38]
    assert float(weight) == 1


@pytest.mark.parametrize("updates", [False, True])
def test_an_error_of_the_function_that_names_unknown_values_is_raised(
    strategy: lockstep.Strategy, updates: bool
) -> None:
    weight, optimizer = variable(1.0, trainable=True), keras.optimizers.SGD(1.0)

    def step() -> None:
        if updates:
            optimizer.apply([ops.ones(())], [weight])
        raise ValueError("UnknownValue colour")

    with pytest.raises(ValueError, match="UnknownValue colour"):
        strategy.run(step)
    assert float(weight) == 1


class Penalty(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.mean(inputs))
        return inputs


def test_losses_of_layers_count_once_in_a_loss_of_keras(strategy: lockstep.Strategy, batch: Any) -> None:
    regularizer = keras.regularizers.L2(0.5)
    layers = [keras.layers.Input((2,)), keras.layers.Dense(2, kernel_regularizer=regularizer), Penalty()]
    model = keras.Sequential(layers)
    model.compile(loss="mse")

    def loss(x: Any) -> Any:
        return model.compute_loss(x, x, model(x))

    total = strategy.reduce("SUM", strategy.run(loss, args=(batch,)))
    assert float(total) == pytest.approx(float(loss(X)), rel=1e-6)


def test_a_step_of_keras_that_was_bound_before_tracks_the_loss_of_the_batch(
    strategy: lockstep.Strategy, batch: Any
) -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.compile(loss="mse")
    test_step = model.test_step

    def step(x: Any) -> None:
        groups = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
        _, (_, _, metrics) = test_step([[v.value for v in variables] for variables in groups], (x, x))
        for metric, value in zip(model.metrics_variables, metrics, strict=True):
            metric.assign(value)

    strategy.run(step, args=(batch,))
    loss = float(model.compute_loss(X, X, model(X)))
    assert float(model.get_metrics_result()["loss"]) == pytest.approx(loss, rel=1e-6)


class EarlyLimit(keras.optimizers.SGD):
    """Limits gradients. The strategy is created after it."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([ops.clip(gradient, -3.0, 3.0) for gradient in grads], trainable_variables)


class Inherited(EarlyLimit):
    pass


def late_limit() -> type:
    class LateLimit(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([ops.clip(gradient, -3.0, 3.0) for gradient in grads], trainable_variables)

    return LateLimit


def limit_of_pairs() -> type:
    class LimitOfPairs(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
            pairs = [(ops.clip(gradient, -3.0, 3.0), weight) for gradient, weight in grads_and_vars]
            return super().apply_gradients(pairs, **options)

    return LimitOfPairs


@pytest.mark.ci
@pytest.mark.parametrize("kind", [lambda: EarlyLimit, lambda: Inherited, late_limit, limit_of_pairs])
def test_an_update_of_the_program_gets_the_gradients_of_all_replicas(
    strategy: lockstep.Strategy, kind: Callable[[], Any]
) -> None:
    """The gradients of the replicas are 4, 4 and -6. Limited before the sum, it would be 3 and not 2."""
    weight = variable(1.0, trainable=True)
    optimizer = kind()(0.1)
    gradients = strategy.experimental_distribute_values_from_function(
        lambda context: [4.0, 4.0, -6.0][context.replica_id_in_sync_group]
    )

    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(ops.convert_to_tensor(gradient), weight)])

    strategy.run(step, args=(gradients,))
    assert float(weight) == pytest.approx(0.8)
    assert int(optimizer.iterations) == 1
    # Outside of a function, it limits what it gets.
    optimizer.apply_gradients([(ops.convert_to_tensor(4.0), weight)])
    assert float(weight) == pytest.approx(0.5)


class Scaling(keras.optimizers.SGD):
    """Has names and parameters of its own."""

    def apply(self, grads: Any, weights: Any = None, scale: float = 1.0) -> str:
        super().apply([scale * gradient for gradient in grads], weights)
        return "applied"


class ScalingPairs(keras.optimizers.SGD):
    def apply_gradients(self, pairs: Any, *scales: float, scale: float = 1.0) -> str:
        factor = np.prod([scale, *scales])
        super().apply_gradients([(factor * gradient, weight) for gradient, weight in pairs])
        return "applied"


CALLS: list[tuple[type, Callable[[Any, Any, Any], Any]]] = [
    (Scaling, lambda own, g, v: own.apply(g, v, 2.0)),
    (Scaling, lambda own, g, v: own.apply(g, scale=2.0)),
    (Scaling, lambda own, g, v: own.apply(weights=v, scale=2.0, grads=g)),
    (ScalingPairs, lambda own, g, v: own.apply_gradients(zip(g, v, strict=True), 2.0)),
    (ScalingPairs, lambda own, g, v: own.apply_gradients(pairs=zip(g, v, strict=True), scale=2.0)),
]


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_an_update_of_the_program_keeps_its_parameters(strategy: lockstep.Strategy, call: int) -> None:
    kind, update = CALLS[call]
    weight = variable(2.0, trainable=True)
    optimizer = kind(0.1)
    optimizer.build([weight])

    def step() -> Any:
        return update(optimizer, [ops.convert_to_tensor(1.0)], [weight])

    assert step() == "applied"
    assert float(weight) == pytest.approx(2 - 0.2)
    strategy.run(step)
    assert float(weight) == pytest.approx(2 - 0.2 - 0.6)
    assert int(optimizer.iterations) == 2
    with computing_as(Replica(0, SingleReplicaMerger())):
        assert step() == "applied"
    assert float(weight) == pytest.approx(2 - 0.2 - 0.6 - 0.2)


@pytest.mark.parametrize(
    ("scale", "refusal"),
    [
        (lambda number: ops.convert_to_tensor(2.0) + number, "or a tensor"),
        (float, "with different arguments"),
    ],
)
def test_arguments_that_replicas_pass_to_an_update_are_equal_numbers(
    strategy: lockstep.Strategy, scale: Callable[[int], Any], refusal: str
) -> None:
    weight = variable(2.0, trainable=True)
    optimizer = Scaling(0.1)

    def step() -> None:
        number = lockstep.get_replica_context().replica_id_in_sync_group
        optimizer.apply([ops.convert_to_tensor(1.0)], [weight], scale(number))

    with pytest.raises(ModelError, match=refusal):
        strategy.run(step)
    assert float(weight) == 2


class Amount:
    """A class from which an optimizer inherits."""

    def apply(self, amount: float) -> float:
        return 2 * amount


def test_a_class_that_is_not_an_optimizer_keeps_a_method_that_one_inherits(
    strategy: lockstep.Strategy,
) -> None:
    class Inheriting(Amount, keras.optimizers.SGD):
        pass

    assert Inheriting.apply is Amount.apply
    assert [*strategy.run(lambda: Amount().apply(3.0)).values] == [6.0] * 3


def apply_in_a_traced_function(strategy: lockstep.Strategy) -> None:
    weight = variable(1.0, trainable=True)
    optimizer = keras.optimizers.SGD(1.0)
    strategy.run(lambda: jax.jit(lambda x: optimizer.apply([x], [weight]))(1.0))


def apply_different_optimizers(strategy: lockstep.Strategy) -> None:
    weight = variable(1.0, trainable=True)
    optimizers = [keras.optimizers.SGD(1.0), keras.optimizers.SGD(1.0)]

    def step() -> None:
        replica = lockstep.get_replica_context().replica_id_in_sync_group
        optimizers[min(replica, 1)].apply([ops.ones(())], [weight])

    strategy.run(step)


def set_an_update_on_an_optimizer(name: str, strategy: lockstep.Strategy) -> None:
    weight, optimizer = variable(1.0, trainable=True), keras.optimizers.SGD(0.1)
    original = getattr(optimizer, name)
    setattr(optimizer, name, lambda *args: original(*args))
    # Outside of a function, this does not matter.
    optimizer.apply_gradients([(ops.ones(()), weight)])
    strategy.run(lambda: optimizer.apply_gradients([(ops.ones(()), weight)]))


ARRAY = np.zeros(1)
ARRAYS = {"first": [ARRAY], "second": ARRAY}


def change(array: Any) -> None:
    array += 1


def take_different_paths(strategy: lockstep.Strategy) -> None:
    metric = keras.metrics.Sum()

    def step() -> None:
        if lockstep.get_replica_context().replica_id_in_sync_group:
            metric.update_state(1)

    strategy.run(step)


def own_id() -> Any:
    return lockstep.get_replica_context().replica_id_in_sync_group


def return_different_nests(strategy: lockstep.Strategy) -> None:
    strategy.run(lambda: [1] * (1 + lockstep.get_replica_context().replica_id_in_sync_group))


def set_an_update_on_a_class(strategy: lockstep.Strategy) -> None:
    class SetLater(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply(grads, trainable_variables)

    def limited(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        limits = [ops.clip(gradient, -3.0, 3.0) for gradient in grads]
        keras.optimizers.SGD.apply(optimizer, limits, trainable_variables)

    SetLater.apply = limited  # type: ignore[method-assign]
    optimizer = SetLater(0.1)
    strategy.run(lambda: optimizer.apply([ops.ones(())], [weight]))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda s: s.run(lambda: counter.assign(own_id())), "set the int32 variable 'wanted' to different"),
        (lambda s: s.run(lambda: weight.assign(1.0)), "assigns the weight 'wanted' itself"),
        (lambda s: s.run(lambda: s.run(lambda: None)), "strategy.run is called in a function"),
        (apply_in_a_traced_function, "cannot synchronize in a function that JAX traces"),
        (apply_different_optimizers, "applies a different optimizer from before"),
        (partial(set_an_update_on_an_optimizer, "apply"), "has set apply of the optimizer 'sgd'"),
        (partial(set_an_update_on_an_optimizer, "apply_gradients"), "has set apply_gradients of"),
        (set_an_update_on_a_class, "has set apply of SetLater while Lockstep was in use"),
        (lambda s: s.run(lambda: change(ARRAY)), "changes an array or a tensor in place, in .* 'ARRAY'"),
        (lambda s: s.run(lambda: change(ARRAYS["second"])), "in place, in the variable 'ARRAYS' outside"),
        (return_different_nests, "replicas return nests of different structures"),
        (take_different_paths, r"replicas compute different things in one step \(.*metric/0/sum/total"),
    ],
)
def test_functions_that_replicas_cannot_run_are_refused_by_name(
    strategy: lockstep.Strategy, act: Any, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        act(strategy)


counter = variable(0, dtype="int32")
weight = variable(0.0, trainable=True)


def test_integers_that_all_replicas_set_equally_are_kept(strategy: lockstep.Strategy) -> None:
    odd = variable(False, dtype="bool")
    counter.assign(3)

    def step() -> None:
        counter.assign(counter + 4)
        odd.assign(keras.ops.logical_not(odd))

    for _ in range(3):
        strategy.run(step)
    assert (int(counter.numpy()), bool(odd.numpy())) == (15, True)
    counter.assign(0)


def test_values_without_an_axis_are_not_joined(strategy: lockstep.Strategy) -> None:
    with pytest.raises(DataError, match="single numbers have none"):
        strategy.gather(strategy.run(lambda: 1.0), axis=0)


def test_a_joiner_does_not_follow_a_loop_that_lockstep_does_not_drive(
    strategy: lockstep.Strategy, job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_of_one_worker, "_joins", True)
    with pytest.raises(DisagreementError, match=r"let strategy\.steps drive the loop"):
        strategy.run(lambda: 1)


def test_results_of_a_lost_worker_are_computed_again(
    strategy: lockstep.Strategy, batch: Any, job_of_two_workers: Job
) -> None:
    found = strategy.run(lambda x: x * 2, args=(batch,))
    assert len(found.values) < 3
    view = place(3, (0,))
    job_of_two_workers._entered = view, by_itself(view)
    np.testing.assert_array_equal(strategy.gather(found, axis=0), 2 * X)


def test_results_of_a_lost_worker_are_lost_after_a_change(
    strategy: lockstep.Strategy, batch: Any, job_of_two_workers: Job
) -> None:
    found = strategy.run(lambda x: x * 2, args=(batch,))
    view = place(3, (0,))
    job_of_two_workers._entered = view, by_itself(view)
    counter.assign(1)
    with pytest.raises(DataError, match="the value of replica 2 was on the lost worker"):
        strategy.gather(found, axis=0)


def test_a_sum_can_be_used_and_reset_within_a_function(strategy: lockstep.Strategy, batch: Any) -> None:
    mean = keras.metrics.Mean()
    mean.update_state(np.full(4, 10.0))

    def add(x: Any) -> None:
        mean.update_state(ops.sum(x, axis=1))

    def begin_again(x: Any) -> Any:
        so_far = mean.total.value + 0
        mean.reset_state()
        add(x)
        return so_far

    strategy.run(add, args=(batch,))
    assert [float(variable.value) for variable in mean.variables] == [40 + 66, 4 + 6]
    found = strategy.run(begin_again, args=(batch,))
    assert [float(variable.value) for variable in mean.variables] == [66, 6]
    assert [float(value) for value in found.values] == [106, 0, 0]


GENERATOR = np.random.default_rng(2)


class Counting:
    """A loop of the program, with state in Python."""

    def __init__(self) -> None:
        self.layer = keras.layers.Dense(1)
        self.layer.calls = 0
        self.steps, self.seen, self.last = 0, [], None
        self.generator = np.random.default_rng(4)

    def step(self, x: Any) -> Any:
        self.layer(x)
        self.steps += 1
        self.seen.append(self.steps)
        self.layer.calls += 1
        self.last = float(ops.sum(x))
        return self.steps + self.generator.uniform() + GENERATOR.uniform()

    def count_rows(self, x: Any) -> Any:
        self.seen.append(float(ops.sum(x)))

    def keep_highest(self, x: Any) -> Any:
        self.last = max(self.last or 0.0, float(ops.max(x)))
        return self.last


def test_replicas_change_python_attributes_once(strategy: lockstep.Strategy, batch: Any) -> None:
    loop, own, outside = Counting(), np.random.default_rng(4), GENERATOR.bit_generator.state
    for count in (1, 2, 3):
        found = strategy.run(loop.step, args=(batch,))
        assert (loop.steps, loop.layer.calls, loop.seen) == (count, count, list(range(1, count + 1)))
        numbers = {float(value) for value in found.values}
        assert len(numbers) == 1
        assert own.uniform() > 0
        assert loop.generator.bit_generator.state == own.bit_generator.state
    now, GENERATOR.bit_generator.state = GENERATOR.bit_generator.state, outside
    GENERATOR.uniform(size=3)
    assert now == GENERATOR.bit_generator.state


def test_replicas_leave_equal_values_in_python(strategy: lockstep.Strategy, batch: Any) -> None:
    loop = Counting()
    with pytest.raises(ModelError, match=r"\(Counting\.seen\)") as caught:
        strategy.run(loop.count_rows, args=(batch,))
    assert "leave equal values in Python attributes" in str(caught.value)
    assert loop.seen == []
    strategy.run(loop.keep_highest, args=(batch,))
    with pytest.raises(ModelError, match=r"the step reads Counting\.last, and replicas have left different"):
        strategy.run(loop.keep_highest, args=(batch,))


STEPS, NOTES, TOTAL = 0, {"steps": 0}, 0.0


class Tally:
    steps = 0


def test_replicas_change_variables_of_python_once(strategy: lockstep.Strategy, batch: Any) -> None:
    """Global ones, those of enclosing functions and of classes, and what is in containers there."""
    steps, seen, metric = 0, list[int](), None

    def step(x: Any) -> Any:
        global STEPS
        nonlocal steps, metric
        STEPS, steps = STEPS + 1, steps + 1
        Tally.steps += 1
        NOTES["steps"] += 1
        seen.append(steps)
        if metric is None:
            metric = keras.metrics.Sum()
        metric.update_state(x)
        return STEPS + steps + Tally.steps + NOTES["steps"]

    for count in (1, 2, 3):
        found = strategy.run(step, args=(batch,))
        assert [int(value) for value in found.values] == [4 * count] * 3
        assert (STEPS, steps, Tally.steps, NOTES) == (count, count, count, {"steps": count})
        assert seen == list(range(1, count + 1))
    assert metric is not None
    assert float(metric.result()) == 3 * X.sum()


def test_replicas_leave_equal_values_in_variables_of_python(strategy: lockstep.Strategy, batch: Any) -> None:
    sums: list[float] = []

    def total(x: Any) -> None:
        global TOTAL
        TOTAL = TOTAL + float(ops.sum(x))

    with pytest.raises(ModelError, match=r"compute different things in one step .*leave equal values in"):
        strategy.run(lambda x: sums.append(float(ops.sum(x))), args=(batch,))
    assert sums == []
    strategy.run(total, args=(batch,))
    with pytest.raises(ModelError, match=r"the step reads .*\.TOTAL, and replicas have left different"):
        strategy.run(total, args=(batch,))
