"""Nests of arrays, as in Keras's methods and datasets, and arrays that count as writable."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

Nest = Any
"""A nest of arrays or placeholders; None for a missing leaf."""


def parts_of(nest: Nest) -> tuple[list[Any], Callable[[Sequence[Any]], Nest]]:
    """Return the leaves of a nest, including None, and a function that packs others in the same structure.

    Most inputs are (x, y). For these, `keras.tree` would take as long as gathering a small batch.
    """
    nest_class = type(nest)
    if (nest_class is tuple or nest_class is list) and all(
        leaf is None or hasattr(leaf, "shape") for leaf in nest
    ):
        return list(nest), nest_class
    return keras.tree.flatten(nest), partial(keras.tree.pack_sequence_as, nest)


def structure_of(nest: Nest) -> str:
    """Return a text that is equal for nests of the same structure."""
    leaves, pack = parts_of(nest)
    return repr(pack([0] * len(leaves)))


def leaves_of(nest: Nest) -> list[Any]:
    """Return the leaves of a nest that are not None."""
    return [leaf for leaf in parts_of(nest)[0] if leaf is not None]


def has_weights(batch: Nest) -> bool:
    """Whether a batch (x, y, sample_weight) has sample weights. A batch of another form has none."""
    weights = batch[2] if isinstance(batch, tuple | list) and len(batch) == 3 else None
    return any(leaf is not None for leaf in keras.tree.flatten(weights))


def packed(nest: Nest, leaves: Sequence[Any]) -> Nest:
    """Return a nest like `nest` with other leaves, in the order of `leaves_of`; None stays None.

    On PyTorch, `keras.tree.map_structure` visits the keys of a dict in a different order.
    """
    following = iter(leaves)
    padded = [None if leaf is None else next(following) for leaf in keras.tree.flatten(nest)]
    return keras.tree.pack_sequence_as(nest, padded)


def repeated(nest: Nest, examples: int, count: int) -> Nest:
    """Return a nest with another number of examples: the same ones, repeated from the beginning.

    Args:
        nest: arrays with rows along the first axis, in proportion to the number of examples.
        examples: the number of examples of `nest`.
        count: the number of examples of the result.
    """

    def rows(leaf: Any) -> Any:
        indices = np.arange(len(leaf) * count // examples) % len(leaf)
        return leaf[indices] if isinstance(leaf, np.ndarray) else keras.ops.take(leaf, indices, axis=0)

    return packed(nest, [rows(leaf) for leaf in leaves_of(nest)])


class _Writable:
    """An array's memory, declared as writable."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def declared_writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array of the same memory, which may be read-only, for libraries that refuse such arrays.

    NumPy does not export read-only arrays, and PyTorch warns about them. Nothing may write to the result.
    """
    return np.asarray(_Writable(array))
