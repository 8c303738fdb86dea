"""The replica whose function runs in this thread, and what it does together with the others.

Within `strategy.run`, `apply` of every optimizer of Keras adds gradients up over the replicas first.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import keras

from lockstep.worker.patch_registry import PATCHES, definer

Op = Literal["sum", "mean"]


class Merges(Protocol):
    """What the replicas of a run do together; all make the same calls in the same order."""

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any] | None) -> None:
        """Apply an optimizer to the sum of all replicas' gradients, once."""

    def all_reduce(self, op: Op, value: Any) -> Any:
        """Return the sum or the mean over the replicas of each leaf of a nest."""

    def all_gather(self, value: Any, axis: int) -> Any:
        """Return the leaves of all replicas, joined along `axis` in the order of the replicas."""


@dataclass(frozen=True)
class Replica:
    """A replica that computes.

    Attributes:
        number: its id; a scalar tensor within a graph that serves all replicas.
        merges: what it does together with the others.
    """

    number: Any
    merges: Merges


class _Running(threading.local):
    replica: Replica | None = None


_running = _Running()


def current() -> Replica | None:
    """Return the replica whose function runs in this thread."""
    return _running.replica


@contextmanager
def entered(replica: Replica | None) -> Iterator[None]:
    """Within the block this thread computes `replica`, or none."""
    before, _running.replica = _running.replica, replica
    try:
        yield
    finally:
        _running.replica = before


class Single:
    """The `Merges` of a job of one replica: everything is as in a program without a strategy."""

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any] | None) -> None:
        """Apply the optimizer."""
        with entered(None):
            optimizer.apply(gradients, variables)

    def all_reduce(self, op: Op, value: Any) -> Any:
        """Return the value."""
        return value

    def all_gather(self, value: Any, axis: int) -> Any:
        """Return the value."""
        return value


def install() -> None:
    """Let Keras's optimizers know of replicas."""
    if PATCHES.has(__name__):
        return
    optimizers = keras.optimizers
    kinds = [optimizers.Optimizer, optimizers.LossScaleOptimizer]
    # One that serves several others calls their `apply`; Keras does not name it publicly.
    known = [*kinds, *optimizers.Optimizer.__subclasses__()]
    for owner in dict.fromkeys(definer(kind, "apply") for kind in known):
        PATCHES.replace(__name__, owner, "apply", _noticed)
        if "stateless_apply" in vars(owner):
            PATCHES.replace(__name__, owner, "stateless_apply", _by_itself)


def _by_itself(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `stateless_apply`, which changes nothing, as each replica makes it for itself."""

    @functools.wraps(original)
    def stateless_apply(*args: Any, **kwargs: Any) -> Any:
        with entered(None):
            return original(*args, **kwargs)

    return stateless_apply


def _noticed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = current()
        if replica is None:
            return original(self, grads, trainable_variables)
        variables = None if trainable_variables is None else list(trainable_variables)
        return replica.merges.apply(self, list(grads), variables)

    return apply
