"""Gradients through what replicas do together, on TensorFlow; see `lockstep.keras.functions.gradients`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.keras.functions.gradients import Tensors


def through(
    leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
) -> Tensors:
    """Return `meet(leaves)`, for which gradients are computed by `gradient`."""
    if not leaves:
        return meet(leaves)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def met(*leaves: Any) -> Any:
        # What was looked up with several indices has a gradient that is a list of occurrences.
        return list(meet(leaves)), lambda *upstream: gradient([tf.convert_to_tensor(one) for one in upstream])

    found: Tensors = met(*leaves)
    return found
