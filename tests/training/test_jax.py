"""Keras on JAX."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from lockstep.keras.backends.jax import JaxBackend


def test_a_model_is_built_with_the_dtypes_that_jax_computes_with() -> None:
    seen: list[str] = []

    class Noting(keras.Sequential):
        def _symbolic_build(self, iterator: Iterator[Any]) -> None:
            ((_, _, (batch,)),) = iterator
            seen.extend(str(leaf.dtype) for leaf in keras.tree.flatten(batch))

    batch = {"a": np.ones(3, "int64"), "b": np.ones(3), "c": np.ones(3, "uint8")}
    JaxBackend().build(Noting(), "train", lambda: batch)
    assert seen == ["int32", "float32", "uint8"]
