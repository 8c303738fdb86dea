"""TensorFlow, where functions run eagerly; see `lockstep.keras.replica_run.eager.Eager`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lockstep.keras.backends.drawing import eagerly
from lockstep.keras.backends.graphs import with_gradient
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.replica_run.eager import Tensors


class EagerTensorFlow:
    """Tensors of TensorFlow: nobody writes to them, only to variables."""

    def apart(self, seed: int) -> AbstractContextManager[None]:
        """Within the block a replica computes."""
        return eagerly(seed)

    def kept(self, variable: Any) -> Any:
        """Return the value of a variable."""
        return variable._value.read_value()

    def own(self, leaf: Any) -> Any:
        """Return a leaf as a tensor."""
        return leaf.read_value() if isinstance(leaf, tf.Variable) else tf.convert_to_tensor(leaf)

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """View a tensor in place (on a CPU), or copy it to the host; gradients of embeddings become dense."""
        return np.asarray(tf.convert_to_tensor(array))

    def through(
        self, leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `meet(leaves)`, for which gradients are computed by `gradient`."""
        return with_gradient(leaves, meet, gradient)

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update from copies."""
        update.apply([None if g is None else tf.constant(g) for g in gradients])
