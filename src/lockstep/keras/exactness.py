"""The parts of a training that are computed per replica and so differ from one process, beyond rounding."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from lockstep.keras.metrics import metrics_across_examples, rows_of, tried_rows
from lockstep.keras.state.randomness import random_numbers
from lockstep.system.prose import count
from lockstep.topology import View

_ACROSS_EXAMPLES = ("circle", "dice", "tversky")
"""Keras's losses that compare the examples of a batch, or normalize over all of them."""


def introduction(method: str, view: View, parts: Sequence[str]) -> str:
    """Return the note that a method of `keras.Model` is distributed, and which parts are per replica."""
    over = count(len(view.workers), "worker")
    if len(view.workers) != view.replicas:
        over = f"{count(view.replicas, 'replica')} on {over}"
    text = f"plain Keras script: model.{method} is distributed over {over}"
    return f"{text}; {said_of(parts)}" if parts else text


def said_of(parts: Sequence[str]) -> str:
    """Return a text on which parts are computed per replica."""
    return f"computed per replica: {', '.join(parts)}"


def per_replica(model: Any, rows: Callable[[], Any]) -> list[str]:
    """Name the parts of a model's training that differ from one process by more than rounding.

    These use several examples at once: the statistics of BatchNormalization, a loss or a metric that compares
    examples, a sum that a layer adds to the loss, and perhaps a custom step. Random layers draw different
    numbers in each replica; they are not named.

    Args:
        model: built.
        rows: reads some rows of the input, as `(x, y, sample_weight)`; called only if a part must be tested.
    """
    counted = Counter(
        type(layer).__name__
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    )
    parts = [f"{name} ({number} layers)" if number > 1 else name for name, number in counted.items()]
    parts += [
        f"{name} of {type(model).__name__}"
        for name in ("train_step", "compute_loss")
        if not getattr(type(model), name).__module__.startswith("keras.")
    ]
    parts += _losses_across_examples(model, rows) + _sums_of_layers(model, rows)
    return parts + [f"the metric {name}" for name in metrics_across_examples(model, rows)]


def _losses_across_examples(model: Any, rows: Callable[[], Any]) -> list[str]:
    """Name the losses that are not means over examples; test those for which this is unknown."""
    given = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    doubtful = [loss for loss in given if _may_compare_examples(loss)]
    if not doubtful:
        return []
    names = [
        f"the loss {getattr(loss, 'name', None) or getattr(loss, '__name__', loss)}" for loss in doubtful
    ]
    try:
        whole, first, second = _in_parts(rows(), lambda x, y: _compiled_loss(model, x, y))
    except Exception:  # A custom step may pass anything to losses.
        return [f"{name} (possibly: it could not be tested)" for name in names]
    return [] if _near(whole, (first + second) / 2) or _near(whole, first + second) else names


def _sums_of_layers(model: Any, rows: Callable[[], Any]) -> list[str]:
    """Name the program's own layers if the loss that they add is not a mean over examples."""
    layers = [layer for layer in model._flatten_layers() if _adds_losses(type(layer))]
    if not layers:
        return []
    names = list(dict.fromkeys(f"add_loss of {type(layer).__name__}" for layer in layers))
    try:
        whole, first, second = _in_parts(rows(), lambda x, _: _added_losses(model, x))
    except Exception:
        return [f"{name} (possibly: it could not be tested)" for name in names]
    return [] if _near(whole, (first + second) / 2) else names


def _adds_losses(cls: type) -> bool:
    own = [one for one in cls.__mro__ if not one.__module__.startswith(("keras.", "builtins"))]
    codes = [getattr(member, "__code__", None) for one in own for member in vars(one).values()]
    return any(code is not None and "add_loss" in code.co_names for code in codes)


def _may_compare_examples(loss: Any) -> bool:
    found = keras.losses.get(loss)
    function = getattr(found, "fn", found)
    name = getattr(function, "__name__", type(function).__name__).lower()
    modules = {type(found).__module__} if not callable(getattr(found, "fn", None)) else set()
    modules.add(getattr(function, "__module__", None) or "")
    return name in _ACROSS_EXAMPLES or not all(one.startswith(("keras.", "builtins")) for one in modules)


def _compiled_loss(model: Any, x: Any, y: Any) -> Any:
    with keras.StatelessScope():
        # The sum is a new tensor without a mask, which would change the examples in the mean.
        outputs = keras.tree.map_structure(lambda leaf: leaf + 0, model(x, training=False))
        return model._compile_loss(y, outputs)


def _added_losses(model: Any, x: Any) -> Any:
    with keras.StatelessScope(collect_losses=True) as scope:
        model(x, training=False)
        return sum(keras.ops.sum(loss) for loss in scope.losses)


def _in_parts(data: Any, compute: Callable[[Any, Any], Any]) -> tuple[float, float, float]:
    """Return `compute(x, y)` of some rows of `data` and of each half of them; zeros for fewer than two."""
    half = tried_rows(data)
    if not half:
        return 0.0, 0.0, 0.0

    def of(rows: slice) -> float:
        x, y, _ = rows_of(data, rows)
        # Random numbers drawn here must not affect later ones.
        with random_numbers(0):
            return float(keras.ops.convert_to_numpy(compute(x, y)))

    return of(slice(0, 2 * half)), of(slice(0, half)), of(slice(half, 2 * half))


def _near(one: float, other: float) -> bool:
    return bool(np.isclose(one, other, 1e-4))
