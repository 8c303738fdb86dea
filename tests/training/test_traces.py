"""What tracing a step changes in Python happens once, and does not depend on what a worker traces."""

import random
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.checkpoint.values import pack, unpack
from lockstep.data.batch import Share
from lockstep.keras.backends.jax import JaxBackend
from lockstep.keras.backends.traces import Traces, seed_traces

GENERATOR = np.random.default_rng(11)
HELD = SimpleNamespace(calls=0)
X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
ROWS = (slice(0, 4), slice(4, 7), slice(7, 10))
"""Of three replicas: two forms of examples."""

Draw = Callable[[Any], Any]


class Scaled(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, draw: Draw) -> None:
        super().__init__(name="scaled")
        self.draw = draw
        self.calls, self.seen, self.generator = 0, [], random.Random(3)

    def call(self, x: Any) -> Any:
        return x * float(self.draw(self))


def counted(layer: Any) -> int:
    layer.calls += 1
    HELD.calls += 1
    layer.seen.append(layer.calls)
    return len(layer.seen) + 10 * HELD.calls


def drawn_outside(layer: Any) -> float:
    return float(GENERATOR.uniform(1, 2))


def new_model(draw: Draw) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), Scaled(draw), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    JaxBackend().build(model, "train", lambda: (X, X[:, :1], None))
    seed_traces(model, "model 1")
    return model


def gradients(model: Any, replicas: Sequence[int]) -> dict[int, bytes]:
    """Return the partials of replicas, computed by one process in this order."""
    program = JaxBackend().program(model, "train")
    state, found = program.present(), {}
    for replica in replicas:
        x = X[ROWS[replica]]
        data = (x, x[:, :1], None)
        partial = program.compute(state, Share(replica, len(x), len(x) / 10, 5, lambda data=data: data), ())
        found[replica] = b"".join(np.asarray(partial[name]).tobytes() for name in sorted(partial))
    assert program.traced == len({len(X[ROWS[replica]]) for replica in replicas})
    return found


@pytest.mark.parametrize(
    "draw",
    [
        lambda layer: np.random.uniform(1, 2),
        lambda layer: random.uniform(1, 2),
        lambda layer: layer.generator.uniform(1, 2),
        drawn_outside,
        counted,
    ],
    ids=["numpy", "python", "attribute", "outside", "counted"],
)
def test_each_trace_begins_with_the_same_state(draw: Draw) -> None:
    numbers, calls = GENERATOR.bit_generator.state, HELD.calls
    both = gradients(new_model(draw), [0, 1, 2])
    GENERATOR.bit_generator.state, HELD.calls = numbers, calls
    assert gradients(new_model(draw), [2, 1]) == {2: both[2], 1: both[1]}


def test_the_changes_of_one_trace_last() -> None:
    model = new_model(counted)
    layer = model.layers[0]
    before, calls, states = layer.calls, HELD.calls, (random.getstate(), np.random.get_state()[1].tolist())
    gradients(model, [1, 0, 2])
    assert (layer.calls, layer.seen[before:], HELD.calls) == (before + 1, [before + 1], calls + 1)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())
    # What the program changes in between stays, and is not what a later form of examples begins with.
    layer.calls = 40
    program = JaxBackend().program(model, "train")
    share = Share(0, 2, 1.0, 5, lambda: (X[:2], X[:2, :1], None))
    program.compute(program.present(), share, ())
    assert layer.calls == 41
    layer.calls = 50
    program.compute(program.present(), share._replace(data=lambda: (X[:3], X[:3, :1], None)), ())
    assert (layer.calls, layer.seen[-1]) == (50, 41)


def test_an_error_while_tracing_leaves_the_state() -> None:
    def failing(layer: Any) -> float:
        counted(layer)
        raise ValueError("of the step")

    model = new_model(lambda layer: 1.0)
    layer = model.layers[0]
    layer.draw = failing
    with pytest.raises(ValueError, match="of the step"):
        gradients(model, [0])
    assert (layer.calls, layer.seen) == (0, [])


@pytest.mark.ci
def test_any_number_of_workers_traces_alike(launch: Callable[..., Any]) -> None:
    one, two = (
        launch(options, "traced_draws.py").marked(0, "result ") for options in ("-n 1 --replicas 2", "-n 2")
    )
    assert len(one) == 2
    assert one == two


LEVELS = [1.0]
FACTOR = 1.0


def levelled(layer: Any) -> float:
    return FACTOR * LEVELS[0]


def test_another_process_traces_with_the_values_of_the_first_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It joins after the values have changed, and changes them once more before its trace."""

    def computed(model: Any, traces: Traces, replica: int) -> bytes:
        program = JaxBackend().program(model, "train", traces.trace)
        x = X[ROWS[replica]]
        share = Share(replica, len(x), len(x) / 10, 5, lambda: (x, x[:, :1], None))
        partial = program.compute(program.present(), share, ())
        return b"".join(np.asarray(partial[name]).tobytes() for name in sorted(partial))

    def change(factor: float, level: float) -> None:
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        LEVELS[0] = level

    change(2.0, 3.0)
    member, joins = (Traces(new_model(levelled), "train") for _ in range(2))
    models = [traces._model for traces in (member, joins)]
    before = [computed(models[0], member, replica) for replica in (0, 1)]
    change(5.0, 7.0)
    joins.begin_with(unpack(*pack(member.saved(()), "")))
    joins.begin()
    change(11.0, 13.0)
    assert [computed(models[1], joins, replica) for replica in (0, 1)] == before
    assert [computed(models[0], member, 0)] == before[:1]
    assert (FACTOR, LEVELS) == (11.0, [13.0])
