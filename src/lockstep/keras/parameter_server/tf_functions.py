"""What parameter servers need on TensorFlow: quick access to variables, and the gradients of graphs.

A `tf.function` returns only what the program lets it return, so its graph assigns the gradients to variables,
which Python reads afterwards.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lockstep.keras.backends.tf_graphs import natives

Array = npt.NDArray[Any]


class VariableTransfers:
    """The `Transfers` of TensorFlow, by operations on the variables' resources.

    The methods of a variable take several times as long.
    """

    def read(self, variables: Sequence[Any]) -> list[Array]:
        """Return copies of the values of variables."""
        return [
            np.array(tf.raw_ops.ReadVariableOp(resource=own.handle, dtype=own.dtype).numpy())
            for own in natives(variables)
        ]

    def assign(self, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
        """Assign values to variables."""
        for own, array in zip(natives(variables), arrays, strict=True):
            tf.raw_ops.AssignVariableOp(resource=own.handle, value=tf.constant(array, own.dtype))


class OptimizerGradients:
    """The gradients of one optimizer.

    Args:
        variables: of the optimizer.

    Attributes:
        state: variables of TensorFlow: how often the optimizer was applied, and each variable had a gradient;
            and the gradients.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._kept = [tf.Variable(tf.zeros_like(one.value), trainable=False) for one in variables]
        self._counts = tf.Variable(tf.zeros(1 + len(variables), tf.int32), trainable=False)
        self._zeros = tf.zeros_like(self._counts)
        self.state = [self._counts, *self._kept]

    def add(self, gradients: Mapping[int, Any]) -> None:
        """Add operations to the graph that keep gradients, by position."""
        for position, gradient in gradients.items():
            kept = self._kept[position]
            kept.assign(tf.cast(tf.convert_to_tensor(gradient), kept.dtype))
        present = [1, *(int(position in gradients) for position in range(len(self._kept)))]
        self._counts.assign_add(tf.constant(present, tf.int32))

    def reset(self) -> None:
        """Forget everything."""
        tf.raw_ops.AssignVariableOp(resource=self._counts.handle, value=self._zeros)

    @staticmethod
    def kept_in(state: Sequence[Array]) -> list[dict[int, Array]]:
        """Return the gradients, given the values of `state`, once for each time the optimizer was applied."""
        counts, *gradients = state
        times, *present = counts.tolist()
        return [{i: gradients[i] for i, count in enumerate(present) if count}] * times
