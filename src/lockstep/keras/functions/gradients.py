"""How gradients pass through what replicas do together: one contract, and who keeps it on which backend."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

Tensors = Sequence[Any]


class Through(Protocol):
    """Gives the automatic differentiation of a backend the gradient of a meeting."""

    def __call__(
        self, leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `meet(leaves)`, for which gradients are computed by `gradient`.

        Args:
            leaves: floating-point tensors.
            meet: returns floating-point tensors; called once.
            gradient: returns the gradients of `leaves`, given those of what `meet` has returned. It can be
                differentiated itself.

        Raises:
            ModelError: the program is within a function that is traced by itself.
        """


def through() -> Through:
    """Return what does it on Keras's backend."""
    name = keras.backend.backend()
    if name == "jax":
        from lockstep.keras.functions import gradients_jax

        return gradients_jax.through
    if name == "torch":
        from lockstep.keras.functions import gradients_torch

        return gradients_torch.through
    from lockstep.keras.functions import gradients_tensorflow

    return gradients_tensorflow.through
