"""Flattening and packing nests of arrays on the host."""

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

    Most inputs are (x, y), for which `keras.tree` would take as long as gathering a small batch.
    """
    if type(nest) is tuple and all(leaf is None or hasattr(leaf, "shape") for leaf in nest):
        return list(nest), tuple
    return keras.tree.flatten(nest), partial(keras.tree.pack_sequence_as, nest)


def on_host(leaf: Any) -> npt.NDArray[Any]:
    """Return an array or a tensor as a NumPy array, without a copy if NumPy can read its memory."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if type(leaf).__module__.startswith("torch"):
        leaf = leaf.detach().cpu()
    elif hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return np.asarray(keras.ops.convert_to_numpy(leaf))
