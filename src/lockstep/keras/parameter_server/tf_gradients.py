"""Gradients that functions of TensorFlow apply in graphs, kept in variables until the graph has run.

A `tf.function` returns only what the program lets it return, so its graph assigns the gradients to variables,
which Python reads afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Array = npt.NDArray[Any]


class OptimizerGradients:
    """The gradients of one optimizer.

    Args:
        variables: of the optimizer.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._kept = [tf.Variable(tf.zeros_like(one.value), trainable=False) for one in variables]
        # How often the optimizer was applied, and how often each variable had a gradient.
        self._counts = tf.Variable(tf.zeros(1 + len(variables), tf.int32), trainable=False)

    def add(self, gradients: Mapping[int, Any]) -> None:
        """Add operations to the graph that keep gradients, by position."""
        for position, gradient in gradients.items():
            kept = self._kept[position]
            kept.assign(tf.cast(tf.convert_to_tensor(gradient), kept.dtype))
        present = [1, *(int(position in gradients) for position in range(len(self._kept)))]
        self._counts.assign_add(tf.constant(present, tf.int32))

    def reset(self) -> None:
        """Forget everything."""
        self._counts.assign(tf.zeros_like(self._counts))

    def collect(self) -> Iterator[dict[int, Array]]:
        """Yield the kept gradients once for each time that the optimizer was applied."""
        times, *present = self._counts.numpy().tolist()
        for _ in range(times):
            yield {i: np.asarray(self._kept[i].numpy()) for i, count in enumerate(present) if count}


class GraphGradients:
    """The gradients of all optimizers, by their numbers."""

    def __init__(self) -> None:
        self._optimizers: dict[int, OptimizerGradients] = {}

    def of(self, number: int, variables: Sequence[Any]) -> OptimizerGradients:
        """Return those of an optimizer."""
        if number not in self._optimizers:
            self._optimizers[number] = OptimizerGradients(variables)
        return self._optimizers[number]

    def reset(self) -> None:
        """Forget all gradients."""
        for one in self._optimizers.values():
            one.reset()

    def collect(self) -> Iterator[tuple[int, dict[int, Array]]]:
        """Yield the number of each applied optimizer, and its gradients."""
        for number, one in self._optimizers.items():
            for gradients in one.collect():
                yield number, gradients
