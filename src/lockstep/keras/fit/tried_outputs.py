"""The inputs and outputs of a model with which a trial tries functions that may compare rows.

Equal rows, such as the nearly equal ones of a new model, would hide whether a function compares them. So it
also gets changed rows, which differ more.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.keras.fit.layer_calls import largest_of
from lockstep.keras.fit.tried_rows import TriedRows
from lockstep.keras.nests import Nest
from lockstep.worker.patch_registry import replaced

Array = npt.NDArray[Any]


def outputs_to_try(model: Any, rows: TriedRows) -> Iterator[tuple[Nest, Nest]]:
    """Yield the outputs of the model and the sample weights, then changed values.

    Equal rows, such as the nearly equal ones of a new model, would hide whether a function compares them.
    """
    x, _, weight = rows.data
    with keras.StatelessScope():
        # The sum is a new tensor without a mask, which would change the examples in the mean.
        outputs = keras.tree.map_structure(lambda leaf: leaf + 0, model(x, training=False))
    yield outputs, weight
    generator = np.random.default_rng(0)
    changed = partial(_rescaled, generator=generator)
    yield keras.tree.map_structure(changed, outputs), keras.tree.map_structure(changed, weight)
    # Parts of many elements can be nearly equal, such as the pixels of two halves of a batch.
    yield keras.tree.map_structure(_graded, outputs), weight
    right = [_partly_right(*pair) for pair in _pairs(outputs, rows.data[1])]
    if right and None not in right:
        yield keras.tree.pack_sequence_as(outputs, right), weight


def inputs_to_try(rows: TriedRows) -> Iterator[Nest]:
    """Yield the inputs of the rows, then changed inputs, whose rows differ more."""
    x = rows.data[0]
    yield x
    factors = np.linspace(0.1, 3.0, rows.count)
    yield keras.tree.map_structure(lambda leaf: _multiplied(leaf, factors), x)


@contextmanager
def near_outputs(model: Any) -> Iterator[None]:
    """Within the block, the program's own `compute_loss` gets outputs that are close to each other."""
    original = model.compute_loss
    # The program may give the outputs another name.
    name = (*inspect.signature(original).parameters, "", "", "")[2]

    def near(output: Any) -> Any:
        if output is None or not keras.backend.is_float_dtype(output.dtype):
            return output
        return output * 0.01

    @functools.wraps(original)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 2:
            args = (*args[:2], keras.tree.map_structure(near, args[2]), *args[3:])
        else:
            name_here = name if name in kwargs else "y_pred"
            kwargs[name_here] = keras.tree.map_structure(near, kwargs[name_here])
        return original(*args, **kwargs)

    with replaced(model, "compute_loss", compute_loss):
        yield


def _multiplied(leaf: Any, factors: Array) -> Any:
    """Return a floating-point tensor with its rows, or its elements, multiplied by factors."""
    dtype = None if leaf is None else keras.backend.standardize_dtype(leaf.dtype)
    if dtype is None or not keras.backend.is_float_dtype(dtype):
        return leaf
    factors = factors.reshape(factors.shape + (1,) * (len(leaf.shape) - factors.ndim))
    return leaf * keras.ops.convert_to_tensor(factors, dtype)


def _rescaled(leaf: Any, generator: np.random.Generator) -> Any:
    """Return a tensor with each element multiplied by a number; small values, such as logits, grow."""
    if leaf is None:
        return None
    factors = generator.uniform(0.3, 1.0, tuple(leaf.shape))
    array = keras.ops.convert_to_numpy(leaf)
    if array.dtype.kind == "f" and not np.any(array):
        return keras.ops.convert_to_tensor(factors, leaf.dtype)
    if array.dtype.kind == "f" and np.any(array < 0):
        factors /= min(1.0, largest_of(array))
    return _multiplied(leaf, factors)


def _graded(leaf: Any) -> Any:
    """Return outputs whose level rises from row to row: that of logits or the like, or probabilities."""
    if leaf is None:
        return None
    array = keras.ops.convert_to_numpy(leaf)
    if array.dtype.kind != "f" or not np.any(array < 0):
        return _multiplied(leaf, np.linspace(0.05, 1.0, len(array)))
    levels = 2 * max(1.0, largest_of(array)) * np.linspace(-1.0, 1.0, len(array))
    graded = array + levels.reshape((-1,) + (1,) * (array.ndim - 1))
    return keras.ops.convert_to_tensor(graded, leaf.dtype)


def _pairs(outputs: Nest, labels: Nest) -> list[tuple[Any, Any]]:
    """Return the outputs with their labels, or an empty list if they do not correspond one to one."""
    leaves, targets = keras.tree.flatten(outputs), keras.tree.flatten(labels)
    return list(zip(leaves, targets, strict=True)) if len(leaves) == len(targets) else []


def _partly_right(output: Any, label: Any) -> Any:
    """Return an output that is the label, or its class, for every second example, or None if it cannot be."""
    array = keras.ops.convert_to_numpy(output)
    target = None if label is None else keras.ops.convert_to_numpy(label)
    if target is None or array.dtype.kind != "f" or target.dtype.kind not in "biuf":
        return None
    if target.shape != array.shape:
        classes = array.shape[-1]
        if target.size != array.size // classes or not np.all((target >= 0) & (target < classes)):
            return None
        target = 0.05 + 0.9 * np.eye(classes)[target.astype("int64").reshape(array.shape[:-1])]
    even = (np.arange(len(array)) % 2 == 0).reshape((-1,) + (1,) * (array.ndim - 1))
    return keras.ops.convert_to_tensor(np.where(even, target, array), output.dtype)
