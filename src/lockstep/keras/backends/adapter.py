"""Chooses the `Backend` and the `EagerBackend` for the backend on which Keras runs."""

from collections.abc import Callable
from dataclasses import dataclass

import keras

from lockstep.errors import BackendError
from lockstep.keras.backends.contract import Backend
from lockstep.keras.backends.eager_contract import EagerBackend


@dataclass(frozen=True)
class Adapter:
    """The parts that the files of a backend define.

    Attributes:
        steps: creates the `Backend`, which computes the steps of Keras's loops.
        functions: creates the `EagerBackend`, which computes functions of `strategy.run` eagerly.
    """

    steps: Callable[[], Backend]
    functions: Callable[[], EagerBackend]


def adapter() -> Adapter:
    """Return the adapter of Keras's backend.

    Raises:
        BackendError: Lockstep does not support the backend.
    """
    match keras.backend.backend():
        case "jax":
            from lockstep.keras.backends.jax import JaxBackend, JaxEagerBackend

            return Adapter(JaxBackend, JaxEagerBackend)
        case "tensorflow":
            from lockstep.keras.backends.tensorflow import TensorFlowBackend, TensorFlowEagerBackend

            return Adapter(TensorFlowBackend, TensorFlowEagerBackend)
        case "torch":
            from lockstep.keras.backends.torch import TorchBackend
            from lockstep.keras.backends.torch_eager import TorchEagerBackend

            return Adapter(TorchBackend, TorchEagerBackend)
        case name:
            raise BackendError(
                f"Keras runs on {name!r}, which Lockstep does not support; set KERAS_BACKEND to jax, "
                "tensorflow or torch, or start the script with `lockstep run --backend`"
            )
