"""R replicas change Python attributes once; what cannot be counted once is refused by name."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.errors import ModelError
from lockstep.keras.python_replicas import PythonOfReplicas, python_facts, saved_python, set_python
from lockstep.keras.reached_objects import unchanged

Step = Callable[[Any, int], float]


def new_model() -> Any:
    layer = keras.layers.Dense(1, name="only")
    layer.steps, layer.last, layer.seen, layer.held = 0, None, [], SimpleNamespace(most=0)
    model = keras.Sequential([keras.layers.Input((2,)), layer], name="small")
    model.compile("sgd", "mse")
    return model


def take(model: Any, step: Step, rows: list[int], steps: int = 3) -> Iterator[list[str]]:
    """Take steps with so many rows for each replica on one worker; yield the forms of the replicas."""
    python = PythonOfReplicas.of_model(model, np.asarray, trains=True)
    for _ in range(steps):
        python.begin()
        forms = []
        for replica, count in enumerate(rows):
            python.compute(
                lambda rows: {"loss": np.float64(step(model.layers[0], rows))},
                replica,
                count,
                "step",
                first_round=True,
            )
            forms.append(python.form())
        python.end()
        yield forms


def counted(layer: Any, rows: int) -> float:
    layer.steps += 1
    layer.seen.append(layer.steps)
    return float(layer.steps)


def test_replicas_count_once_and_leave_equal_values() -> None:
    model = new_model()
    forms = list(take(model, counted, [3, 2, 2]))
    layer = model.layers[0]
    assert (layer.steps, layer.seen) == (3, [1, 2, 3])
    assert all(len(set(one)) == 1 for one in forms)
    assert "small/only'.steps = 3" in forms[-1][0]
    assert "small/only'.seen = list(1, 2, 3)" in forms[-1][0]


def test_a_worker_that_joins_has_the_forms_of_the_members() -> None:
    """It takes a step before it gets the state, as it compiles its program then."""
    member, joiner = new_model(), new_model()
    of_member, of_joiner = take(member, counted, [3, 2], 6), take(joiner, counted, [3, 2], 6)
    for _ in range(3):
        next(of_member)
    next(of_joiner)
    set_python(joiner, saved_python(member))
    assert list(of_joiner)[:3] == list(of_member)
    assert joiner.layers[0].seen[:6] == member.layers[0].seen


def test_a_value_that_is_only_written_may_differ() -> None:
    def step(layer: Any, rows: int) -> float:
        layer.last, layer.held.most = float(rows), rows
        return counted(layer, 0)

    forms = list(take(new_model(), step, [3, 2], 4))
    assert all(len(set(one)) == 1 for one in forms)
    assert "last" not in forms[-1][0]
    assert "most" not in forms[-1][0]


def test_a_value_that_is_read_has_to_be_equal() -> None:
    def step(layer: Any, rows: int) -> float:
        layer.held.most = max(layer.held.most, 10 - rows)
        return float(layer.held.most)

    taken = take(new_model(), step, [3, 2])
    next(taken)
    with pytest.raises(ModelError, match=r"the step reads layer 'small/only'\.held\.most, and replicas have"):
        next(taken)
    # Two workers with one replica each have other values.
    first, second = (list(take(new_model(), step, [rows], 2)) for rows in (3, 2))
    assert "most was 7" in first[1][0]
    assert "most was 8" in second[1][0]


def test_a_value_that_counts_examples_is_refused_if_replicas_are_equal() -> None:
    def step(layer: Any, rows: int) -> float:
        layer.steps += rows
        return float(layer.steps)

    taken = take(new_model(), step, [3, 3])
    next(taken)
    with pytest.raises(ModelError, match=r"leaves layer 'small/only'\.steps = 6 after 3 examples"):
        next(taken)


def test_contents_of_containers_have_to_be_equal() -> None:
    def step(layer: Any, rows: int) -> float:
        layer.seen.append(float(rows))
        return 0.0

    (first, second) = next(take(new_model(), step, [3, 2]))
    assert first != second


def keep(layer: Any, rows: int) -> float:
    """Keep values in containers and arrays as layers keep activations, each set anew before it is read."""
    layer.outputs, layer.skips = [np.full(rows, 1.0)], []
    layer.outputs.append(layer.outputs[-1] + 1)
    layer.skips.append((rows, {"sum": layer.outputs[-1].sum()}))
    layer.seen[:] = [layer.outputs[-1], None]
    layer.held.__dict__.setdefault("named", {})["only"] = layer.outputs[0]
    layer.held.__dict__.setdefault("filled", np.zeros(1))[:] = rows
    return 2.0 * len(layer.outputs) + len(layer.skips)


def test_containers_that_are_only_written_may_differ() -> None:
    model = new_model()
    forms = list(take(model, keep, [3, 2], 5))
    assert forms == [["", ""]] * 5
    layer = model.layers[0]
    assert [one.tolist() for one in layer.outputs] == [[1.0, 1.0], [2.0, 2.0]]
    assert (list(layer.skips), layer.held.filled.tolist()) == ([(2, {"sum": 4.0})], [2.0])
    # They are no state for another process, either.
    assert python_facts(model) == {}
    assert [name for _, name, _, _ in saved_python(model)] == []


def test_a_container_whose_length_or_first_value_counts_is_state() -> None:
    def longer(layer: Any, rows: int) -> float:
        layer.outputs = [rows] * (1 + len(getattr(layer, "outputs", ())))
        return float(len(layer.outputs))

    def first(layer: Any, rows: int) -> float:
        begins = layer.last is None
        layer.last = rows
        return float(begins)

    for step, name in ((longer, "outputs"), (first, "last")):
        taken = take(new_model(), step, [3, 2])
        next(taken)
        with pytest.raises(
            ModelError, match=rf"the step reads layer 'small/only'\.{name}, and replicas have"
        ):
            next(taken)


def test_objects_that_steps_have_replaced_are_forgotten() -> None:
    def step(layer: Any, rows: int) -> float:
        layer.seen = [layer.steps]
        layer.steps += 1
        return keep(layer, rows) + layer.steps

    model = new_model()
    python = PythonOfReplicas.of_model(model, np.asarray, trains=True)
    sizes = []
    for _ in range(300):
        python.begin()
        python.compute(
            lambda rows: {"loss": np.float64(step(model.layers[0], rows))}, 0, 2, "step", first_round=True
        )
        python.end()
        sizes.append(len(python._graph.nodes))
    assert max(sizes) < 100


def test_state_out_of_reach_is_refused_where_it_changes_bits() -> None:
    calls: list[int] = []

    def step(layer: Any, rows: int) -> float:
        calls.append(rows)
        return float(len(calls))

    with pytest.raises(ModelError, match=r"step: computed twice .* replica 0 gives different bits \(loss\)"):
        next(take(new_model(), step, [3, 2]))


def test_an_error_leaves_the_values_before_the_step() -> None:
    model = new_model()

    def step(layer: Any, rows: int) -> float:
        counted(layer, rows)
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        next(take(model, step, [3, 2]))
    assert (model.layers[0].steps, model.layers[0].seen) == (0, [])


def test_another_process_continues_with_the_values() -> None:
    def step(layer: Any, rows: int) -> float:
        layer.fresh = [*getattr(layer, "fresh", []), len(layer.seen)]
        layer.held.most += 1
        return counted(layer, rows)

    model, other = new_model(), new_model()
    list(take(model, step, [2, 2]))
    set_python(other, saved_python(model))
    first, second = model.layers[0], other.layers[0]
    assert (second.steps, second.seen, second.held.most, second.fresh) == (3, [1, 2, 3], 3, [0, 1, 2])
    assert first.seen is not second.seen
    assert python_facts(other) == python_facts(model)
    assert python_facts(new_model()) == {}
    list(take(other, step, [2, 2], 1))
    assert second.seen == [1, 2, 3, 4]


def test_trials_leave_nothing() -> None:
    model = new_model()
    with unchanged(model):
        counted(model.layers[0], 1)
    assert (model.layers[0].steps, model.layers[0].seen) == (0, [])


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)], indirect=True)
def test_a_lost_worker_is_replaced_by_one_with_the_same_counts(
    launch: Callable[..., Any], backend: str
) -> None:
    one = launch("-n 1 --replicas 2", "counting.py", "whole", backend=backend)
    lost = launch("-n 2 --min-workers 2", "counting.py", "lost", backend=backend)
    assert (one.status, lost.status) == (0, 0), one.stderr + lost.stderr
    assert "worker 2 joined" in lost.stderr
    (result,) = one.marked(0, "result ")
    assert "] 16 [4, 0, 1] " in result
    assert lost.marked(0, "result ") == lost.marked(2, "result ") == [result]
