"""JAX, where functions run eagerly; see `lockstep.keras.functions.eager.Eager`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from lockstep.keras.backends.rounds import Update
from lockstep.keras.functions.gradients_jax import refuse_tracing
from lockstep.keras.state.randomness import random_numbers


class EagerJax:
    """Arrays of JAX: nobody writes to them, so none is ever copied."""

    def apart(self, seed: int) -> AbstractContextManager[None]:
        """Within the block a replica computes."""
        return random_numbers(seed)

    def kept(self, variable: Any) -> Any:
        """Return the value of a variable."""
        return variable._value

    def own(self, leaf: Any) -> Any:
        """Return a leaf as an array of JAX, a copy if it was none."""
        if isinstance(leaf, jax.Array):
            return leaf
        array = np.asarray(leaf)
        return leaf if array.dtype.kind in "OSUM" else jnp.array(array, copy=True)

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """Wait for an array and view it in place (on a CPU), or copy it to the host."""
        if isinstance(array, jax.core.Tracer):
            refuse_tracing()
        return np.asarray(array)

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update from copies: operations go on reading when it returns."""
        update.apply([None if g is None else jnp.array(g, copy=True) for g in gradients])
