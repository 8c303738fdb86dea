"""What a Keras backend must do so that replicas can compute a function eagerly, one after the other."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy.typing as npt

from lockstep.keras.backends.multi_update import Update

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


class Eager(Protocol):
    """One backend, where functions run eagerly."""

    def apart(self, seed: int) -> AbstractContextManager[None]:
        """Within the block a replica computes: its random numbers follow from `seed`.

        Nothing of what it does to global random states and to gradients that the backend keeps is left
        behind.

        Raises:
            ModelError: it has changed something that cannot be combined over replicas.
        """

    def kept(self, variable: Any) -> Any:
        """Return the value of a variable, which stays what it is whatever the variable is assigned."""

    def own(self, leaf: Any) -> Any:
        """Return a leaf of a nest as a tensor that nobody else writes to; as it is, if it is no array."""

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """Return the array as NumPy sees it, without a copy where the backend's memory allows it.

        Raises:
            ModelError: it has no value, since it belongs to a function that is being traced.
        """

    @property
    def through(self) -> Through:
        """What lets gradients pass through a meeting of the replicas."""

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update; has read the gradients when it returns."""
