"""Gradients through what replicas do together, on JAX; see `lockstep.keras.functions.gradients`."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from lockstep.errors import ModelError
from lockstep.keras.functions.gradients import Tensors


def through(
    leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
) -> Tensors:
    """Return `meet(leaves)`, for which gradients are computed by `gradient`.

    `jax.grad` calls both with values, and not while it traces a function for later.
    """
    # What is made within `jax.jit` is a tracer; within `jax.grad` and `jax.vmap` it is an array.
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        refuse_tracing()

    def met(leaves: list[Any]) -> list[Any]:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            refuse_tracing()
        return list(meet(leaves))

    differentiable = jax.custom_vjp(met)
    differentiable.defvjp(
        lambda leaves: (differentiable(leaves), None), lambda _, upstream: (list(gradient(upstream)),)
    )
    found: Tensors = differentiable(list(leaves))
    return found


def refuse_tracing() -> NoReturn:
    """Raise ModelError: a value that replicas are to share has none yet."""
    raise ModelError(
        "replicas cannot meet within a function that JAX traces (jax.jit, jax.vmap, jax.checkpoint): let the "
        "compiled function return gradients or values, and call optimizer.apply, all_reduce or all_gather "
        "with them in the function that strategy.run is given, or strategy.reduce after it; jax.grad and "
        "jax.value_and_grad go through all_reduce and all_gather where they are not compiled"
    )
