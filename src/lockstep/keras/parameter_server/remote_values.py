"""Results of scheduled functions, and the functions of a process without a job."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from lockstep.errors import InputError
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.parameter_server.function_calls import Scheduled
from lockstep.keras.parameter_server.function_run import plain
from lockstep.keras.parameter_server.per_worker import PerWorkerValues
from lockstep.keras.replica_run.merges import Replica, SingleReplicaMerger, computing_as


class Calls(Protocol):
    """Runs scheduled functions; see `lockstep.keras.parameter_server.function_calls.FunctionCalls`."""

    def schedule(self, scheduled: Scheduled) -> int:
        """Schedule a function, and return its number."""

    def join(self) -> None:
        """Wait until all functions are complete."""

    def done(self) -> bool:
        """Whether all functions are complete."""

    def fetch(self, steps: Sequence[int]) -> list[Any]:
        """Return the results of functions."""

    def forget(self, step: int) -> None:
        """Forget the result of a function."""


class RemoteValue:
    """The result of a scheduled function.

    Example:
        >>> import lockstep
        >>> coordinator = lockstep.ClusterCoordinator(lockstep.ParameterServerStrategy())
        >>> value = coordinator.schedule(lambda: 3)
        >>> isinstance(value, lockstep.RemoteValue), value.fetch()
        (True, 3)
    """

    def __init__(self, calls: Calls, step: int) -> None:
        self._calls, self._step = calls, step
        self._value: list[Any] = []
        self._forgotten = weakref.finalize(self, calls.forget, step)

    def fetch(self) -> Any:
        """Wait for the function, and return its result with arrays of NumPy instead of tensors.

        Raises:
            Exception: the function raised it.
        """
        return fetched([self])[0]

    def get(self) -> Any:
        """Wait for the function, and return its result with tensors."""
        return keras.tree.map_structure(
            lambda leaf: keras.ops.convert_to_tensor(leaf) if hasattr(leaf, "dtype") else leaf, self.fetch()
        )


class LocalCalls:
    """Runs functions where they are scheduled, in a process without a job."""

    def __init__(self) -> None:
        self._results: dict[int, Any] = {}
        self._errors: dict[int, Exception] = {}
        self._raised: Exception | None = None
        self._count = 0
        self._backend = adapter().functions()

    def schedule(self, scheduled: Scheduled) -> int:
        """Run a function, and return its number.

        Raises:
            Exception: an earlier function raised it.
        """
        self._raise()
        step, self._count = self._count, self._count + 1
        try:
            with computing_as(Replica(0, SingleReplicaMerger())):
                args, kwargs = scheduled.worker_arguments()
                self._results[step] = plain(scheduled.function(*args, **kwargs), self._backend)
        except Exception as error:
            self._errors[step] = self._raised = error
        return step

    def join(self) -> None:
        """Raise the exception of a function, if one has raised."""
        self._raise()

    def done(self) -> bool:
        """Return True."""
        return True

    def fetch(self, steps: Sequence[int]) -> list[Any]:
        """Return the results of functions."""
        for step in steps:
            if step in self._errors:
                raise self._errors[step]
        return [self._results[step] for step in steps]

    def forget(self, step: int) -> None:
        """Forget the result of a function."""
        self._results.pop(step, None)

    def _raise(self) -> None:
        error, self._raised = self._raised, None
        if error is not None:
            raise error


def fetched(values: Sequence[RemoteValue]) -> list[Any]:
    """Return the results of functions; request results that this process does not have."""
    missing = list({id(value): value for value in values if not value._value}.values())
    for calls in {id(value._calls): value._calls for value in missing}.values():
        group = [value for value in missing if value._calls is calls]
        for value, result in zip(group, calls.fetch([value._step for value in group]), strict=True):
            value._value = [result]
            value._forgotten()
    return [value._value[0] for value in values]


def with_values(nest: Any, choose: Callable[[PerWorkerValues], Any]) -> Any:
    """Return a nest of arguments in which values that `choose` returns replace `PerWorkerValues`.

    Raises:
        InputError: a result of a function is among them.
    """

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, RemoteValue):
            raise InputError("pass value.fetch() instead of the RemoteValue to a scheduled function")
        if hasattr(leaf, "__next__") and not isinstance(leaf, PerWorkerValues):
            raise InputError(
                "an iterator that is passed to a scheduled function has to be one of a dataset of "
                "create_per_worker_dataset: other iterators are at another position in each process"
            )
        return choose(leaf) if isinstance(leaf, PerWorkerValues) else leaf

    return visit(nest, replaced)


def visit(nest: Any, act: Callable[[Any], Any]) -> Any:
    """Return a nest of lists, tuples and dicts with the results of `act` for its leaves."""
    if type(nest) is dict:
        return {key: visit(value, act) for key, value in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(visit(value, act) for value in nest)
    return act(nest)
