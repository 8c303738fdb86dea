"""Custom loops with parameter servers: functions that a program schedules, and workers run.

The names are those of `tf.distribute.coordinator`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.errors import InputError
from lockstep.keras.parameter_server.function_calls import Scheduled
from lockstep.keras.parameter_server.per_worker import PerWorkerDataset, dataset_maker
from lockstep.keras.parameter_server.remote_values import (
    Calls,
    RemoteValue,
    fetched,
    visit,
    with_values,
)
from lockstep.strategy.parameter_server import ParameterServerStrategy


class ClusterCoordinator:
    """Schedules functions on the workers of a job with parameter servers.

    All processes of the job must make the same calls. A function runs on one worker and reads the weights
    from the servers. If it passes gradients to an optimizer of Keras, the servers update the weights. Metrics
    and the state of layers get the changes of all functions. The script sees the values that variables had at
    the last `join`, `fetch`, or `done` that returned True. In one process without a job, `schedule` runs the
    function.

    A strategy has one coordinator: a second call returns the same object.

    Args:
        strategy: the strategy in whose scope models, optimizers and metrics were created.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.ParameterServerStrategy()
        >>> coordinator = lockstep.ClusterCoordinator(strategy)
        >>> results = [coordinator.schedule(lambda a, b: a * b, args=(2, b)) for b in range(3)]
        >>> coordinator.join()
        >>> coordinator.fetch(results)
        [0, 2, 4]
    """

    _strategy: ParameterServerStrategy
    _datasets: Iterator[int]

    def __new__(cls, strategy: ParameterServerStrategy) -> "ClusterCoordinator":
        """Return the only coordinator of a strategy.

        Raises:
            InputError: the argument is not a `ParameterServerStrategy`.
        """
        if not isinstance(strategy, ParameterServerStrategy):
            raise InputError("ClusterCoordinator needs a lockstep.ParameterServerStrategy")
        coordinator: ClusterCoordinator | None = strategy._coordinator
        if coordinator is None:
            strategy._coordinator = coordinator = super().__new__(cls)
            coordinator._strategy, coordinator._datasets = strategy, itertools.count()
        return coordinator

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Let a worker run `fn`, and return a handle of its result without waiting.

        If the worker is lost, the function runs again on another one. When a function is scheduled for the
        first time, all processes also run it and undo it, to learn which variables it changes. They do this
        once, and on TensorFlow both eagerly and as a graph.

        Args:
            fn: a function, or a `tf.function`.
            args: its arguments; each worker gets its own value of per-worker datasets and iterators in them.
            kwargs: its keyword arguments, likewise.

        Raises:
            TypeError: `fn` is not a function.
            Exception: an earlier function raised it. Functions that no worker had begun are dropped.
            ModelError: parameter servers do not support a change that `fn` makes.
        """
        if not callable(fn):
            raise TypeError(f"schedule needs a function or a tf.function, not {fn!r}")
        positional, named = tuple(args or ()), dict(kwargs or {})
        scheduled = Scheduled(
            fn,
            lambda: with_values((positional, named), lambda value: value._worker_value()),
            lambda: with_values((positional, named), lambda value: value._trial_value()),
        )
        # This refuses results of functions among the arguments in all processes.
        with_values((positional, named), lambda value: value)
        calls = self._calls()
        return RemoteValue(calls, calls.schedule(scheduled))

    def join(self) -> None:
        """Wait until all scheduled functions are complete.

        Raises:
            Exception: one of them raised it.
        """
        self._calls().join()

    def done(self) -> bool:
        """Whether all scheduled functions are complete."""
        return self._calls().done()

    def fetch(self, val: Any) -> Any:
        """Return a nest with the results of functions in place of their remote values.

        Raises:
            Exception: one of the functions raised it.
        """
        remote_values: list[RemoteValue] = []
        visit(val, lambda leaf: remote_values.append(leaf) if isinstance(leaf, RemoteValue) else None)
        results = dict(zip(map(id, remote_values), fetched(remote_values), strict=True))
        return visit(val, lambda leaf: results[id(leaf)] if isinstance(leaf, RemoteValue) else leaf)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Let each worker create its own dataset.

        Args:
            dataset_fn: a function that returns a dataset: a `tf.data.Dataset`, a `DataLoader`, or any
                iterable. Random operations in it begin with a different seed on each worker. It may also be a
                dataset: each worker then reads all elements in the same order.

        Example:
            >>> import lockstep
            >>> coordinator = lockstep.ClusterCoordinator(lockstep.ParameterServerStrategy())
            >>> batches = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
            >>> coordinator.schedule(lambda own: next(own), args=(batches,)).fetch()
            1
        """
        number = next(self._datasets)
        return self._strategy.per_worker_dataset(dataset_maker(dataset_fn), number)

    def _calls(self) -> Calls:
        return self._strategy.function_calls()
