"""The contract of a Keras backend whose replicas compute functions of `strategy.run` eagerly."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy.typing as npt

from lockstep.keras.backends.multi_update import Update

Tensors = Sequence[Any]


class CustomGradient(Protocol):
    """Defines the gradient of a merge for the automatic differentiation of a backend."""

    def __call__(
        self, leaves: Tensors, merge: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `merge(leaves)`, for which `gradient` computes the gradients.

        Args:
            leaves: floating-point tensors.
            merge: returns floating-point tensors. It is called once.
            gradient: takes the gradients of the results of `merge`, and returns those of `leaves`. It is
                differentiable itself.

        Raises:
            ModelError: the script calls it in a function that is traced separately.
        """


class EagerBackend(Protocol):
    """One backend, for functions that run eagerly."""

    def isolated(
        self, seed: int, assigned: Callable[[], Iterable[Any]] = tuple
    ) -> AbstractContextManager[None]:
        """Within the block a replica computes, with random numbers derived from `seed`.

        Afterwards, global random states, and gradients that the backend stores, have their old values.

        Args:
            seed: determines the random numbers.
            assigned: returns the variables of Keras that the replica has assigned.

        Raises:
            ModelError: the replica has changed a value that cannot be combined over replicas.
        """

    def saved_value(self, variable: Any) -> Any:
        """Return the value of a variable, which later assignments do not change."""

    def to_tensor(self, leaf: Any) -> Any:
        """Return an array as a tensor to which nothing else writes, and any other leaf unchanged."""

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Return the array as NumPy sees it, without a copy if the backend's memory allows it.

        Raises:
            ModelError: the array belongs to a function that is being traced, and does not have a value.
        """

    @property
    def custom_gradient(self) -> CustomGradient:
        """The definition of the gradients of merges."""

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update. When the method returns, it has read the gradients."""
