"""Parts of a model that differ from one process by more than rounding, and the notes on them."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from lockstep.errors import DataError, PeerError
from lockstep.keras.backends.losses import observed_denominators
from lockstep.keras.fit.part_names import OCCURRENCES, VARIABLES
from lockstep.keras.fit.tried_rows import TriedBatch, TriedRows
from lockstep.keras.private.common import compiled_loss, layers_of, modules_of, own_trainable_variables
from lockstep.keras.randomness import random_numbers
from lockstep.keras.variables import optimizers_of
from lockstep.system.prose import count
from lockstep.topology import View

Result = TypeVar("Result")

_ROUNDING = 1e-5
"""The part of a value that counts as rounding."""
_OF_CHANGE = 1e-4
"""The part of its largest change by which layer state may differ and still be a mean over examples."""
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")
"""Attributes of Keras's layers. A layer whose attributes here are all zero does not draw random numbers."""


def introduction(method: str, view: View, parts: Sequence[str]) -> str:
    """Return the note that a method of `keras.Model` is distributed, with the names of per-replica parts."""
    over = count(len(view.workers), "worker")
    if len(view.workers) != view.replicas:
        over = f"{count(view.replicas, 'replica')} on {over}"
    text = f"plain Keras script: model.{method} is distributed over {over}"
    return f"{text}; {per_replica_note(parts)}" if parts else text


def per_replica_note(parts: Sequence[str]) -> str:
    """Return the note on the parts that are computed per replica."""
    return f"computed per replica: {', '.join(parts)}"


def whole_batch_note(parts: Sequence[str]) -> str:
    """Return the note on the parts for which replicas exchange their outputs."""
    return f"computed from the whole batch: {', '.join(parts)}"


def kinds_per_replica(model: Any) -> list[str]:
    """Name the kinds of layers of a model that normalize over the batch, or draw different random numbers.

    The sum of float16 gradients over fewer rows may not overflow where that of the whole batch does.
    """
    counted = Counter(name for layer in layers_of(model) for name in _statistics_and_draws(layer))
    kinds = [f"{name} ({number} layers)" if number > 1 else name for name, number in counted.items()]
    scales = any(isinstance(each, keras.optimizers.LossScaleOptimizer) for each in optimizers_of(model))
    is_half = any(layer.compute_dtype == "float16" for layer in layers_of(model))
    return [*kinds, "the overflow of float16 gradients"] if scales and is_half else kinds


def summed_occurrences(model: Any) -> list[str]:
    """Name the optimizers that update an Embedding differently from plain Keras where ids repeat.

    On TensorFlow, the gradient of an Embedding is a list of occurrences of ids, which plain Keras passes to
    the optimizer. Replicas first add up the occurrences of an id. A trial shows whether that differs.
    """
    if keras.backend.backend() != "tensorflow":
        return []
    if not any(isinstance(layer, keras.layers.Embedding) and layer.trainable for layer in layers_of(model)):
        return []
    return [
        f"{type(optimizer).__name__} {OCCURRENCES}"
        for optimizer in optimizers_of(model)
        if _tells_occurrences_apart(optimizer)
    ]


def occurrences_note(parts: Sequence[str]) -> str:
    """Return the note on the result of `summed_occurrences`."""
    return (
        f"{', '.join(parts)}: the gradient of an id is the sum of its occurrences in a batch, as on JAX and "
        "PyTorch; plain Keras on TensorFlow passes each occurrence to the optimizer"
    )


def _tells_occurrences_apart(optimizer: Any) -> bool:
    """Whether an update from two occurrences of a row differs from an update from their sum."""
    import tensorflow as tf

    def updated(gradient: Any) -> list[Any]:
        tried = type(optimizer).from_config(optimizer.get_config())
        weight = keras.Variable(np.ones((2, 1), "float32"))
        # Two updates, because the second one depends on the state that the first one has left.
        for _ in range(2):
            tried.apply([gradient], [weight])
        # A large `epsilon` or a loss scale may hide a difference in the weight that its averages show.
        return [keras.ops.convert_to_numpy(part) for part in (weight, *tried.variables)]

    with random_numbers(0):
        try:
            apart = updated(tf.IndexedSlices(tf.constant([[0.5], [0.25]]), tf.constant([0, 0]), (2, 1)))
            together = updated(tf.constant([[0.75], [0.0]]))
            return not all(
                np.allclose(*pair, rtol=_ROUNDING, atol=0) for pair in zip(apart, together, strict=True)
            )
        except Exception:  # An optimizer of the program may need more than its settings.
            return True


def _statistics_and_draws(layer: Any) -> list[str]:
    """Return the class of a layer, or of modules in it, that normalizes over the batch or draws numbers."""
    if (isinstance(layer, keras.layers.BatchNormalization) and layer.trainable) or _draws(layer):
        return [type(layer).__name__]
    modules = modules_of(layer)
    if not modules:
        return []
    from lockstep.keras.private.torch import normalizing_or_dropping

    return [type(module).__name__ for module in normalizing_or_dropping(modules[0])]


def _draws(layer: Any) -> bool:
    """Whether a layer has a generator of random numbers, and its rates let it draw numbers."""
    attributes = vars(layer)
    rates = [attributes[name] for name in _RATES if isinstance(attributes.get(name), (int, float))]
    holds = any(isinstance(value, keras.random.SeedGenerator) for value in attributes.values())
    return holds and (any(rates) or not rates)


def different_denominators(model: Any, batch: TriedBatch) -> list[str]:
    """Name several losses if one of them is a mean over unmasked elements, or over the sum of weights."""
    # Only the program's own step, which is tried, trains a model without a call.
    if model.loss is None or type(model).call is keras.Model.call:
        return []
    losses = keras.tree.flatten(model.loss)
    weighs = any(getattr(loss, "reduction", "") == "mean_with_sample_weight" for loss in losses)
    if len(getattr(model, "output_names", None) or (None, None)) < 2:
        return []
    if not (weighs or any(map(_masks, layers_of(model, include_self=False)))):
        return []
    name = "the sum of losses with different denominators"
    try:
        x, y, weight = batch.whole.data
        with random_numbers(0), keras.StatelessScope(), observed_denominators() as denominators:
            compiled_loss(model)(y, model(x, training=False), weight)
    except (DataError, PeerError):  # Workers may read the batch together.
        raise
    except Exception:  # A custom step may pass any values to losses.
        return [f"{name} (possibly: it could not be tested)"]
    return [name] if len(denominators) > 1 and any(denominators) else []


def _masks(layer: Any) -> bool:
    """Whether a layer may give its outputs a mask that its inputs do not have."""
    has_own_mask = not type(layer).compute_mask.__module__.startswith("keras.")
    return bool(getattr(layer, "mask_zero", False) or isinstance(layer, keras.layers.Masking) or has_own_mask)


def tried_parts(model: Any, batch: TriedBatch) -> list[str]:
    """Name the states of layers that a trial shows not to be means over examples.

    Args:
        model: the model, built.
        batch: the batch whose rows to try.
    """
    variables = _own_states(model)
    if not variables:
        return []
    before = [_float64(variable.value) for variable in variables]

    def states(x: Any, _: Any) -> list[Any]:
        with keras.StatelessScope() as scope:
            model(x, training=True)
        values = map(scope.get_current_value, variables)
        return [old if value is None else _float64(value) for old, value in zip(before, values, strict=True)]

    try:
        parts = _each_part(batch, states)
    except (DataError, PeerError):
        raise
    except Exception:  # The program may call the model differently.
        return [f"{VARIABLES}{variable.path} (possibly: it could not be tested)" for variable in variables]
    if not parts:
        return []
    return [
        f"{VARIABLES}{variable.path}"
        for variable, old, whole, first, second in zip(variables, before, *parts, strict=True)
        if not np.allclose(
            whole, (first + second) / 2, _ROUNDING, _OF_CHANGE * np.max(np.abs(whole - old), initial=0)
        )
    ]


def _float64(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value).astype("float64")


def _own_states(model: Any) -> list[Any]:
    """Return the variables that layers of the program may update, without frozen weights."""
    owners: dict[int, tuple[Any, Any]] = {}
    weights: set[int] = set()
    for layer in layers_of(model):
        # The innermost layer comes last.
        owners |= {id(variable): (variable, layer) for variable in layer.non_trainable_weights}
        weights |= {id(variable) for variable in own_trainable_variables(layer)}
    return [
        variable
        for variable, layer in owners.values()
        if id(variable) not in weights and not type(layer).__module__.startswith("keras.")
    ]


def _each_part(batch: TriedBatch, compute: Callable[[Any, Any], Result]) -> list[Result]:
    """Return `compute(x, y)` for some rows of `batch` and for each half of them, if there are several."""

    def of(rows: TriedRows) -> Result:
        x, y, _ = rows.data
        # Random numbers drawn here must not affect later ones.
        with random_numbers(0):
            return compute(x, y)

    return [of(rows) for rows in batch.halves] if batch.count > 1 else []
