"""An update on TensorFlow: an optimizer applied to a total."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lockstep.keras.backends.graphs import own, traced
from lockstep.keras.backends.multi_update import Update

_WORTH_COMPILING = 1 << 22
"""Bytes of gradients from which on XLA's fused update pays for its compilation."""


class GlobalUpdate:
    """An update that all replicas make together."""

    def __init__(self, update: Update, eager: bool, jit: bool) -> None:
        self._update = update
        self._eager = eager
        self._jit = jit
        self._in_place = False
        self._function: Callable[..., Any] | None = None

    def make(self, scale: Any, total: Mapping[str, Any]) -> None:
        """Make the update from its total times `scale`, which the graph must not know, even if it is 1.

        It is 1 unless the total has a density, as all totals of a program have or none.
        """
        gradients = gradients_in(total, self._update)
        if self._function is None:
            self._in_place = "density" not in total and self._update.kernel is not None
            self._function = self._traced(scale, gradients)
        self._function(scale, gradients)

    def _traced(self, scale: Any, gradients: list[Any]) -> Any:
        """Return what makes the update.

        The optimizer's operations are few and simple, and XLA makes one pass over the memory of them; so
        they are compiled where they are large, also on a CPU, where Keras compiles nothing by itself, unless
        there is a kernel that does the same.
        """
        if self._eager:
            return self._apply
        size = sum(g.shape.num_elements() * g.dtype.size for g in gradients if g is not None)
        small = size < _WORTH_COMPILING or self._update.kernel is not None
        if self._jit or small or tf.config.list_logical_devices("GPU"):
            return traced(self._apply, self._jit, scale, gradients)
        compiled = traced(self._apply, True, scale, gradients)

        def first(scale: Any, gradients: list[Any]) -> None:
            try:
                compiled(scale, gradients)
                self._function = compiled
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
                # XLA knows not all operations, and says so before it runs any.
                self._function = traced(self._apply, False, scale, gradients)
                self._function(scale, gradients)

        return first

    def _apply(self, scale: Any, gradients: list[Any]) -> None:
        self._update.apply(gradients if self._in_place else scaled(gradients, scale))


def scaled(gradients: Sequence[Any], scale: Any) -> list[Any]:
    """Return copies of gradients, times `scale`."""
    return [None if gradient is None else own(gradient, scale) for gradient in gradients]


def gradients_in(total: Mapping[str, Any], update: Update) -> list[Any]:
    """Return the gradients of an update in its total, None where no replica has one."""
    return [total.get(f"gradient/{i}") for i in range(len(update.variables))]
