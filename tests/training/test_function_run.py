"""What a worker finds out about a scheduled function, and what parameter servers refuse, in this process."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.errors import InputError, ModelError
from lockstep.keras import assignments
from lockstep.keras.assignments import observed_by
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.parameter_server.function_run import FunctionRunner, RanFunction, ScopeVariables
from lockstep.keras.parameter_server.per_worker import PerWorkerDataset, dataset_maker
from lockstep.keras.replica_run import merges

ops = keras.ops


@pytest.fixture
def made() -> SimpleNamespace:
    """A runner, and variables of its scope."""
    assignments.install()
    merges.install()
    scope = ScopeVariables()
    with observed_by(scope):
        found = SimpleNamespace(
            weight=keras.Variable(np.float32(2), name="weight"),
            other=keras.Variable(np.float32(3), name="other"),
            mean=keras.Variable(np.float32(1), trainable=False, name="mean"),
            total=keras.Variable(np.int32(5), trainable=False, name="total"),
            counted=keras.Variable(np.int32(5), trainable=False, aggregation="sum", name="counted"),
            metric=keras.metrics.Mean(),
            draws=keras.random.SeedGenerator(3),
            sgd=keras.optimizers.SGD(0.1, momentum=0.9),
        )
    found.outside = keras.Variable(np.float32(0), trainable=False, name="outside")
    found.runner = FunctionRunner(scope, adapter().functions())
    found.scope = scope
    return found


def run(made: SimpleNamespace, function: Callable[[], Any], step: int = 0) -> RanFunction:
    """Try a function out if it is new, and run it."""
    if made.runner.is_new(function):
        made.runner.try_out(function, function, 1)
    return made.runner.run(function, function, step, 2)


def test_gradients_are_kept_and_changes_measured_and_undone(made: SimpleNamespace) -> None:
    def step() -> Any:
        made.metric.update_state([1.0, 3.0])
        made.mean.assign(made.mean * 0.5)
        made.counted.assign(made.counted + 2)
        made.sgd.apply([ops.ones(()) * 4.0], [made.weight])
        return {"loss": ops.ones(()) * 7.0, "names": ["a", 1, None]}

    found = run(made, step)
    assert found.result["loss"] == np.float32(7)
    assert found.result["names"] == ["a", 1, None]
    assert (found.gradients, found.updates) == ({0: np.float32(4)}, (0,))
    changed = {made.scope.variables[i].name: float(end - start) for i, (start, end) in found.changes.items()}
    assert changed == {"mean": -0.5, "counted": 2.0, "total": 4.0, "count": 2.0}
    assert [float(one.value) for one in (made.weight, made.mean, made.counted)] == [2.0, 1.0, 5.0]
    assert float(made.metric.result()) == 0.0
    assert int(made.sgd.iterations.value) == 0
    assert [one.name for one in made.runner.served][:2] == ["weight", "iteration"]


def test_the_servers_alone_make_an_update_of_the_program(made: SimpleNamespace) -> None:
    """Only an `apply_gradients`, which servers do not call, changes the gradients before."""

    class Halving(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([gradient / 2.0 for gradient in grads], trainable_variables)

    class HalvingPairs(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
            return super().apply_gradients([(gradient / 2.0, weight) for gradient, weight in grads_and_vars])

    optimizers = Halving(), HalvingPairs()

    def step() -> None:
        optimizers[0].apply([ops.ones(()) * 4.0], [made.weight])
        optimizers[1].apply_gradients([(ops.ones(()) * 4.0, made.other)])

    assert run(made, step).gradients == {0: np.float32(4), 1: np.float32(2)}


def test_arguments_of_the_program_for_an_update_of_the_servers_are_refused(made: SimpleNamespace) -> None:
    class Scaling(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None, scale: float = 1.0) -> None:
            super().apply([scale * gradient for gradient in grads], trainable_variables)

    optimizer = Scaling()
    with pytest.raises(ModelError, match="passes custom arguments to apply of Scaling"):
        run(made, lambda: optimizer.apply([ops.ones(())], [made.weight], scale=2.0))


def test_random_numbers_follow_from_the_number_of_the_function(made: SimpleNamespace) -> None:
    def draw() -> Any:
        return [keras.random.uniform((), seed=made.draws), keras.random.normal(()), np.random.rand()]

    first, again, other = (run(made, draw, step).result for step in (4, 4, 5))
    assert first == again
    assert first[0] != other[0]


def test_an_optimizer_has_a_number_and_its_variables_too(made: SimpleNamespace) -> None:
    adam = keras.optimizers.Adam()

    def first() -> None:
        made.sgd.apply([ops.ones(())], [made.weight])

    def second() -> None:
        adam.apply([ops.zeros(()) + 3.0], [made.other])

    assert run(made, first).updates == (0,)
    found = run(made, second)
    assert (found.gradients, found.updates) == ({1: np.float32(3)}, (1,))


def test_an_error_of_a_trial_run_waits_for_the_function_itself(made: SimpleNamespace) -> None:
    def fail() -> None:
        made.mean.assign(9.0)
        raise KeyError("wrong")

    made.runner.try_out(fail, fail, 1)
    assert float(made.mean.value) == 1.0
    with pytest.raises(KeyError, match="wrong"):
        made.runner.run(fail, fail, 0, 2)
    assert float(made.mean.value) == 1.0


def test_variables_that_a_function_creates_belong_to_the_scope(made: SimpleNamespace) -> None:
    layers: list[Any] = []

    def build() -> None:
        if not layers:
            layers.append(keras.layers.Dense(1))
        layer = layers[0]
        layer(ops.ones((1, 2)))
        made.sgd.apply([ops.ones((2, 1)), ops.ones((1,))], layer.trainable_variables)

    before = len(made.scope.variables)
    assert sorted(run(made, build).gradients) == [0, 1]
    assert {one.name for one in made.scope.variables[before:]} >= {"kernel", "bias"}


def assigns_weight(made: SimpleNamespace) -> None:
    made.weight.assign(2.0)


def assigns_integer(made: SimpleNamespace) -> None:
    made.total.assign(made.total + 1)


def assigns_outside(made: SimpleNamespace) -> None:
    made.outside.assign(made.outside + 1.0)


def trains_outside(made: SimpleNamespace) -> None:
    made.sgd.apply([ops.zeros(())], [keras.Variable(0.0)] if made.runner.updates else [made.outside])


def clips(made: SimpleNamespace) -> None:
    keras.optimizers.SGD(global_clipnorm=1.0).apply([ops.zeros(())], [made.weight])


def trains_a_weight_twice(made: SimpleNamespace) -> None:
    for _ in range(2):
        keras.optimizers.SGD().apply([ops.zeros(())], [made.weight])


def excludes(made: SimpleNamespace) -> None:
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=[made.weight])
    optimizer.apply([ops.zeros(())], [made.weight])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (assigns_weight, "assigns the weight 'weight' itself"),
        (assigns_integer, "changes 'total', an integer: create it with aggregation=\"sum\""),
        (
            assigns_outside,
            "'outside' is assigned by a scheduled function and was created outside of the scope",
        ),
        (trains_outside, "'outside' is trained by a scheduled function and was created outside of the scope"),
        (clips, "SGD has global_clipnorm=1.0"),
        (trains_a_weight_twice, "apply two optimizers to 'weight'"),
        (excludes, "exclude_from_weight_decay with a list of variables"),
    ],
)
def test_what_parameter_servers_do_not_support_is_refused(
    made: SimpleNamespace, function: Callable[[Any], Any], reason: str
) -> None:
    with pytest.raises(ModelError) as refused:
        made.runner.try_out(function, lambda: function(made), 1)
    assert reason in str(refused.value)


def test_an_integer_may_get_its_own_value(made: SimpleNamespace) -> None:
    """A loop on JAX assigns whatever `stateless_call` returns, such as the count of a Normalization."""
    counts = [0, 0, 1]

    def assign() -> None:
        made.total.assign(made.total + counts.pop(0))

    assert run(made, assign).changes == {}
    with pytest.raises(ModelError, match="changes 'total', an integer"):
        made.runner.run(assign, assign, 1, 2)


def test_new_weights_come_from_the_servers_where_a_function_needs_them(made: SimpleNamespace) -> None:
    def twice() -> Any:
        before = made.weight * 1.0
        for _ in range(2):
            made.sgd.apply([made.weight * 0.5], [made.weight])
        return [before, made.weight * 1.0]

    def once() -> Any:
        made.sgd.apply([ops.ones(())], [made.weight])
        return made.weight * 10.0

    given: list[Any] = []

    def exchange(number: int, gradients: Any) -> list[Any]:
        given.append((number, {i: float(one) for i, one in gradients.items()}))
        return [np.float32(len(given) + 10)]

    for function, expected, exchanged in (
        (twice, [2.0, 12.0], [(0, {0: 1.0}), (0, {0: 5.5})]),
        (once, 110.0, [(0, {0: 1.0})]),
    ):
        given.clear()
        made.runner.try_out(function, function, 1)
        assert float(made.weight.value) == 2.0
        made.runner.pulled = [made.weight]
        found = made.runner.run(function, function, 0, 2, exchange)
        assert np.array(found.result).tolist() == expected
        assert (found.gradients, found.updates) == ({}, ())
        assert given == exchanged
        made.weight.assign(2.0)


def test_a_bound_of_staleness_is_for_functions_that_apply_an_optimizer_once(made: SimpleNamespace) -> None:
    runner = FunctionRunner(made.scope, adapter().functions(), None, 2)

    def step() -> Any:
        made.sgd.apply([ops.ones(())], [made.weight])
        return made.weight * 1.0

    with pytest.raises(ModelError, match="max_staleness=2 is for functions that apply an optimizer once"):
        runner.try_out(step, step, 1)


def test_an_optimizer_that_is_first_applied_later_is_refused(made: SimpleNamespace) -> None:
    times: list[int] = []

    def step() -> None:
        times.append(1)
        if len(times) > 1:
            made.sgd.apply([ops.zeros(())], [made.weight])

    with pytest.raises(ModelError, match="applies SGD only in some steps"):
        run(made, step)


def test_a_result_without_a_value_is_refused(made: SimpleNamespace) -> None:
    with pytest.raises(InputError, match="returns a object, which has no value to send"):
        run(made, object)


def test_a_per_worker_dataset_has_the_form_of_its_elements() -> None:
    def rows() -> Any:
        return SimpleNamespace(element_spec="of elements", __iter__=lambda: iter([1]))

    dataset = PerWorkerDataset(dataset_maker(rows), lambda: 1, 2, lambda: (0, 0))
    assert dataset.element_spec == "of elements"
    assert iter(dataset).element_spec == "of elements"
