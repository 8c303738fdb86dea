"""What differs from one process on the global batch by more than rounding: it is computed per replica."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from lockstep.prose import count
from lockstep.topology import View

_ACROSS_EXAMPLES = ("circle", "dice", "tversky")
"""Keras's losses that compare the examples of a batch, or divide by what is in all of them."""

_TRIED_ROWS = 8


def introduction(method: str, view: View, parts: Sequence[str]) -> str:
    """Say that a method of `keras.Model` is distributed, and which parts are computed per replica."""
    over = count(len(view.workers), "worker")
    if len(view.workers) != view.replicas:
        over = f"{count(view.replicas, 'replica')} on {over}"
    text = f"plain Keras script: model.{method} is distributed over {over}"
    return f"{text}; {said_of(parts)}" if parts else text


def said_of(parts: Sequence[str]) -> str:
    """Say which parts are computed per replica."""
    return f"computed per replica: {', '.join(parts)}"


def per_replica(model: Any, rows: Callable[[], Any]) -> list[str]:
    """Name what of a model's training differs from that of one process by more than rounding.

    That is what looks at several examples at once: the statistics of BatchNormalization, a loss that compares
    examples, and perhaps a step of the program's own. Random layers draw other numbers in each replica; they
    are not named.

    Args:
        model: built.
        rows: reads some rows of the input, as `(x, y, sample_weight)`; called only if a loss is tried.
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
    return parts + _losses_across_examples(model, rows)


def _losses_across_examples(model: Any, rows: Callable[[], Any]) -> list[str]:
    """Name the losses that are no means over examples; those of which this is not known are tried."""
    given = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    doubtful = [loss for loss in given if _may_compare_examples(loss)]
    if not doubtful:
        return []
    names = [
        f"the loss {getattr(loss, 'name', None) or getattr(loss, '__name__', loss)}" for loss in doubtful
    ]
    try:
        return [] if _is_mean_or_sum(model, rows()) else names
    except Exception:  # A step of the program's own may give losses what it likes.
        return [f"{name} (perhaps: it could not be tried)" for name in names]


def _may_compare_examples(loss: Any) -> bool:
    found = keras.losses.get(loss)
    function = getattr(found, "fn", found)
    name = getattr(function, "__name__", type(function).__name__).lower()
    modules = {type(found).__module__} if not callable(getattr(found, "fn", None)) else set()
    modules.add(getattr(function, "__module__", None) or "")
    return name in _ACROSS_EXAMPLES or not all(one.startswith(("keras.", "builtins")) for one in modules)


def _is_mean_or_sum(model: Any, data: Any) -> bool:
    """Whether the model's loss of some rows is the mean, or the sum, of those of either half."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    half = min(
        _TRIED_ROWS, min(leaf.shape[0] for leaf in keras.tree.flatten((x, y)) if leaf is not None) // 2
    )
    if not half:
        return True

    def loss_of(rows: slice) -> float:
        inputs, targets = keras.tree.map_structure(
            lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf[rows]), (x, y)
        )
        with keras.StatelessScope():
            # A sum is a tensor of its own, without a mask, which would change what the mean is over.
            outputs = keras.tree.map_structure(lambda leaf: leaf + 0, model(inputs, training=False))
            return float(keras.ops.convert_to_numpy(model._compile_loss(targets, outputs)))

    first, second = loss_of(slice(0, half)), loss_of(slice(half, 2 * half))
    both = loss_of(slice(0, 2 * half))
    return bool(np.isclose(both, (first + second) / 2, 1e-4) or np.isclose(both, first + second, 1e-4))
