"""JAX, where functions run eagerly; see `lockstep.keras.replica_run.eager.Eager`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.replica_run.eager import Tensors
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
            _refuse_tracing()
        return np.asarray(array)

    def through(
        self, leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `meet(leaves)`, for which gradients are computed by `gradient`.

        `jax.grad` calls both with values, and not while it traces a function for later.
        """
        # What is made within `jax.jit` is a tracer; within `jax.grad` and `jax.vmap` it is an array.
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            _refuse_tracing()

        def met(leaves: list[Any]) -> list[Any]:
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                _refuse_tracing()
            return list(meet(leaves))

        differentiable = jax.custom_vjp(met)
        differentiable.defvjp(
            lambda leaves: (differentiable(leaves), None), lambda _, upstream: (list(gradient(upstream)),)
        )
        found: Tensors = differentiable(list(leaves))
        return found

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update from copies: operations go on reading when it returns."""
        update.apply([None if g is None else jnp.array(g, copy=True) for g in gradients])


def _refuse_tracing() -> NoReturn:
    """Raise ModelError: a value that replicas are to share has none yet."""
    raise ModelError(
        "replicas cannot synchronize in a function that JAX traces (jit, vmap, checkpoint): let the "
        "compiled function return gradients or values, and call optimizer.apply, all_reduce or all_gather "
        "with them in the function passed to strategy.run, or strategy.reduce after it; jax.grad and "
        "jax.value_and_grad go through all_reduce and all_gather where they are not compiled"
    )
