"""Computes gradients in custom loops that run on any backend."""

from collections.abc import Callable
from typing import Any

import keras


def gradients_of(variables: list[Any], compute: Callable[[], Any], state: list[Any]) -> tuple[Any, list[Any]]:
    """Return (loss, gradients) of the present values of variables.

    Args:
        variables: of which to compute gradients.
        compute: returns the loss.
        state: the other variables that it changes.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = compute()
        return loss, tape.gradient(loss, [variable.value for variable in variables])
    if keras.backend.backend() == "torch":
        for variable in variables:
            variable.value.grad = None
        loss = compute()
        loss.backward()
        return loss.detach(), [variable.value.grad for variable in variables]
    import jax

    def stateless(values: list[Any]) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
            loss = compute()
        return loss, [scope.get_current_value(variable) for variable in state]

    values = [variable.value for variable in variables]
    (loss, changed), gradients = jax.value_and_grad(stateless, has_aux=True)(values)
    for variable, value in zip(state, changed, strict=True):
        if value is not None:
            variable.assign(value)
    return loss, gradients
