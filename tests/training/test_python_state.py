"""The state in Python attributes: what a step changes is found, undone, and made again."""

import argparse
import collections
import copy
import random
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.keras.python_state import ObjectGraph
from lockstep.keras.python_values import disturbed, encoded, text_of
from lockstep.keras.reached_objects import graph_of, numbers_of

_PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
_VALUES = st.recursive(
    st.one_of(_PLAIN, st.lists(st.integers(0, 9), max_size=3).map(lambda some: np.array(some, "int64"))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.lists(inner, max_size=3).map(collections.deque),
        st.lists(inner, max_size=2).map(tuple),
        st.frozensets(st.integers(0, 9), max_size=3).map(set),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda some: SimpleNamespace(**some)),
    ),
    max_leaves=8,
)


def shown(value: Any) -> Any:
    """The value as nested tuples, with types and bits."""
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value).__name__, [(key, shown(one)) for key, one in value.items()]
    if isinstance(value, SimpleNamespace):
        return "namespace", sorted((key, shown(one)) for key, one in vars(value).items())
    if isinstance(value, set):
        return "set", sorted(value)
    if isinstance(value, list | tuple | collections.deque):
        return type(value).__name__, [shown(one) for one in value]
    return type(value).__name__, repr(value)


def mutables(value: Any) -> list[Any]:
    """The objects within a value that can change, each once."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            continue
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, SimpleNamespace):
            waiting += vars(one).values()
        elif isinstance(one, list | tuple | collections.deque):
            waiting += one
        if isinstance(one, dict | list | set | SimpleNamespace | collections.deque | np.ndarray):
            found[id(one)] = one
    return list(found.values())


def mutate(one: Any, value: Any) -> None:
    """Change an object in place."""
    if isinstance(one, dict):
        one["new"] = value
    elif isinstance(one, SimpleNamespace):
        if "a" in vars(one):
            del one.a
        one.b = value
    elif isinstance(one, set):
        one.symmetric_difference_update({1, 77})
    elif isinstance(one, np.ndarray):
        one += 1
    else:
        if len(one) > 1:
            one[0] = one[-1]
        one.append(value)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), _VALUES, min_size=1), st.data())
def test_changes_are_undone_and_made_again_like_in_a_deep_copy(state: dict[str, Any], data: Any) -> None:
    root = SimpleNamespace(**state)
    twin_before = copy.deepcopy(root)
    graph = ObjectGraph([("root", root)])
    targets = mutables(root)
    for _ in range(data.draw(st.integers(0, 3))):
        mutate(data.draw(st.sampled_from(targets)), data.draw(_VALUES))
    twin_after = copy.deepcopy(root)

    changes = graph.restore()
    assert shown(root) == shown(twin_before)
    assert changes or shown(twin_before) == shown(twin_after)
    assert not graph.changes()
    graph.adopt(changes)
    assert shown(root) == shown(twin_after)
    assert not graph.changes()
    # Objects that the changes have brought belong to the graph.
    for one in mutables(root):
        mutate(one, 5)
    graph.restore()
    assert shown(root) == shown(twin_after)


@pytest.mark.parametrize(
    "generator",
    [random.Random(1), np.random.default_rng(1), np.random.RandomState(1)],
    ids=["Python", "Generator", "RandomState"],
)
def test_generators_of_random_numbers_begin_again(generator: Any) -> None:
    graph = ObjectGraph([("root", SimpleNamespace(generator=generator))])
    draw = generator.random
    first = draw()
    changes = graph.restore()
    assert draw() == first
    second = draw()
    graph.restore()
    graph.adopt(changes)
    assert draw() == second


def test_equal_changes_have_equal_texts() -> None:
    def texts(seen: list[int]) -> list[str]:
        root = SimpleNamespace(steps=0, seen=[], rate=0.5, same=1)
        graph = ObjectGraph([("root", root)])
        root.steps, root.rate, root.same = 1, 0.25, int("1")
        root.seen += seen
        changes = graph.restore()
        assert {name for _, name in changes.values} == {"steps", "rate", ""}
        return changes.texts([key for key in changes.values if key[1] == "rate"])

    assert texts([8]) == ["root.seen = list(8)", "root.steps = 1"]
    assert texts([8]) != texts([7])


def test_a_tensor_without_numbers_is_shown_and_not_saved() -> None:
    """Keras calls models with such tensors to find shapes."""
    torch = pytest.importorskip("torch")
    kept = [torch.empty(2, device="meta")]
    assert text_of(kept) == "list(Tensor)"
    with pytest.raises(TypeError, match="a Tensor cannot be saved"):
        encoded(kept)


def test_what_keras_keeps_itself_is_no_state_of_the_program() -> None:
    class Counting(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(2)
            self.steps, self.seen = 0, [SimpleNamespace(last=None)]

        def call(self, x: Any) -> Any:
            self.steps += 1
            self.seen[0].last = self.steps
            self.add_loss(keras.ops.sum(x))
            return self.inner(x)

    layer = Counting()
    model = keras.Sequential([keras.layers.Input((3,)), layer, keras.layers.Dropout(0.5)])
    model.compile("adamw", keras.losses.MeanSquaredError(), metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    graph = graph_of(model)
    graph.refresh()
    model(np.zeros((2, 3), "float32"), training=True)
    # AdamW remembers which weights decay, by numbers of this process.
    model.optimizer.apply([keras.ops.zeros(v.shape) for v in model.trainable_variables])
    changes = graph.restore()
    path = f"layer {layer.path!r}"
    assert changes.texts() == [
        f"{path}.seen[0].last = {layer.steps + 1}",
        f"{path}.steps = {layer.steps + 1}",
    ]


def test_a_metric_that_is_built_by_its_first_update_is_built_once() -> None:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.score = keras.metrics.R2Score()
    graph = graph_of(model)
    rows = np.ones((4, 2), "float32")
    model.score.update_state(rows, rows)
    variables = [id(variable) for variable in model.score.variables]
    graph.restore()
    model.score.update_state(rows, rows)
    assert [id(variable) for variable in model.score.variables] == variables


def test_a_layer_may_have_attributes_that_keras_gives_models() -> None:
    class Recent(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[int] = []
            self.compiled = 0

        def call(self, x: Any) -> Any:
            self.history.append(self.compiled)
            self.compiled += 1
            return x

    layer = Recent()
    model = keras.Sequential([keras.Input((2,)), layer])
    graph, before = graph_of(model), (list(layer.history), layer.compiled)
    model(np.ones((1, 2), "float32"))
    assert layer.compiled > before[1]
    graph.restore()
    assert (list(layer.history), layer.compiled) == before


def test_what_a_layer_sets_when_it_is_built_is_kept() -> None:
    """A layer without a bias sets it to None."""
    model = keras.Sequential([keras.layers.Dense(2, use_bias=False)])
    graph = graph_of(model)
    first = model(np.ones((2, 3), "float32"))
    graph.restore()
    assert np.array_equal(model(np.ones((2, 3), "float32")), first)


def test_parts_that_keras_creates_once_are_kept() -> None:
    class Lazy(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.inner, self.grown = 0, keras.layers.Dense(2), None

        def call(self, x: Any) -> Any:
            self.steps += 1
            self.grown = self.grown or keras.layers.Dense(2)
            return self.grown(self.inner(x))

    layer = Lazy()
    model = keras.Sequential([layer])
    graph = graph_of(model)
    first = model(np.ones((2, 3), "float32"))
    graph.restore()
    assert layer.steps == 0
    weights = [id(weight) for weight in model.weights]
    assert len(weights) == 4
    assert np.array_equal(model(np.ones((2, 3), "float32")), first)
    graph.refresh()
    assert [id(weight) for weight in model.weights] == weights
    layer.grown.steps = 1
    assert graph.changes().texts() == [f"layer {layer.name!r}.grown.steps = 1"]


@pytest.mark.parametrize("value", [True, 3, 0.5, "text", b"bytes", np.ones(2), np.float32(2), np.array(True)])
def test_a_disturbed_value_is_another_of_the_same_kind(value: Any) -> None:
    other = disturbed(value)
    assert type(other) is type(value) or isinstance(other, np.generic)
    assert np.any(np.asarray(other != value))
    assert disturbed(None) is None


WEIGHT = 0.25
OPTIONS = argparse.Namespace(weight=np.float32(6), steps=3, verbose=True)


class Numbers(keras.Sequential):
    inherited, depth = 7.0, 2

    def compute_loss(self, *_: Any, **__: Any) -> Any:
        return WEIGHT * self.own * OPTIONS.weight


def test_numbers_to_which_a_program_refers_can_be_set_and_reset() -> None:
    enclosed, named = 0.5, {"a": [1, (2.0, [3.0])], "b": np.array(4.0), "c": "text", "d": np.array(5)}

    def loss(y: Any, p: Any) -> Any:
        return enclosed * named["b"] * p

    model = Numbers([keras.Input((2,)), keras.layers.Dense(1)])
    model.own = True
    model.compile("sgd", loss)

    def values() -> list[float]:
        return sorted(float(number.value) for number in numbers_of(model))

    expected = [0.25, 0.5, 3, 4, 6, 7]
    numbers = numbers_of(model)
    assert values() == sorted(expected)
    for number in numbers:
        number.set(number.value + 1)
    assert (model.inherited, WEIGHT, enclosed, named["b"], OPTIONS.weight) == (8, 1.25, 1.5, 5, 7)
    for number in numbers:
        number.reset()
    assert values() == sorted(expected)
    assert type(OPTIONS.weight) is np.float32
    assert "inherited" not in vars(model)


def test_an_attribute_may_have_the_name_of_a_global_variable_and_of_an_enclosing_one() -> None:
    config = SimpleNamespace(WEIGHT=1.0)

    def loss_of(WEIGHT: float) -> Any:
        return lambda y, p: WEIGHT * config.WEIGHT * p

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss_of(2.0))
    numbers = numbers_of(model)
    for number in numbers:
        number.set(number.value + 1)
    for number in reversed(numbers):
        number.reset()
    assert model.loss(None, 1.0) == 2.0
    assert WEIGHT == 0.25
