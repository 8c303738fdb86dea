"""Custom loops with parameter servers: functions that a program schedules, and workers run, as in
`tf.distribute.coordinator`."""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras

from lockstep.errors import InputError
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.parameter_server.function_calls import Scheduled
from lockstep.keras.parameter_server.function_run import plain
from lockstep.keras.randomness import RandomNumbers
from lockstep.keras.replica_run.merges import Replica, SingleReplicaMerger, computing_as
from lockstep.keras.seeds import seed_of
from lockstep.strategy.parameter_server import DatasetFunction, ParameterServerStrategy


class PerWorkerValues:
    """A value of which each worker has its own, for the arguments of scheduled functions."""

    def _own(self) -> Any:
        """Return the value of this worker."""
        raise NotImplementedError

    def _fresh(self) -> Any:
        """Return a value for a trial run, which does not change that of the worker."""
        raise NotImplementedError


class PerWorkerDataset(PerWorkerValues):
    """A dataset that each worker creates for itself; `iter` returns an iterator to schedule functions with.

    Args:
        make: creates the dataset.
        seed: of the random numbers with which this worker creates it.
        trial: the same for trial runs, equal in all processes.
    """

    def __init__(self, make: Callable[[], Any], seed: int, trial: int) -> None:
        self._make, self._seed, self._trial = make, seed, trial

    def __iter__(self) -> "PerWorkerIterator":
        return PerWorkerIterator(self)

    def _own(self) -> Any:
        return RandomNumbers(self._seed).make(self._make)

    def _fresh(self) -> Any:
        return RandomNumbers(self._trial).make(self._make)

    def _iterators(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return what creates an iterator of this worker, and one for a trial run."""
        return (
            lambda: RandomNumbers(self._seed).make(lambda: iter(self._make())),
            lambda: RandomNumbers(self._trial).make(lambda: iter(self._make())),
        )


class PerWorkerIterator(PerWorkerValues):
    """An iterator of a dataset of each worker."""

    def __init__(self, dataset: PerWorkerDataset) -> None:
        self._create, self._create_fresh = dataset._iterators()
        self._iterator: Any = None

    def _own(self) -> Any:
        if self._iterator is None:
            self._iterator = self._create()
        return self._iterator

    def _fresh(self) -> Any:
        return self._create_fresh()

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> Any:
        raise InputError(
            "each worker has its own iterator of this dataset: pass it to a scheduled function, which calls "
            "next()"
        )


class Calls(Protocol):
    """Runs scheduled functions; see `lockstep.keras.parameter_server.function_calls.FunctionCalls`."""

    def schedule(self, scheduled: Scheduled) -> int:
        """Schedule a function; return its number."""

    def join(self) -> None:
        """Wait until all functions are complete."""

    def done(self) -> bool:
        """Whether all functions are complete."""

    def fetch(self, steps: Sequence[int]) -> list[Any]:
        """Return the results of functions."""

    def forget(self, step: int) -> None:
        """Forget the result of a function."""


class RemoteValue:
    """The result of a scheduled function."""

    def __init__(self, calls: Calls, step: int) -> None:
        self._calls, self._step = calls, step
        self._value: list[Any] = []
        self._forgotten = weakref.finalize(self, calls.forget, step)

    def fetch(self) -> Any:
        """Wait for the function; return its result, with arrays of NumPy instead of tensors.

        Raises:
            Exception: of the function.
        """
        return _fetched([self])[0]

    def get(self) -> Any:
        """Return the same with tensors instead of arrays."""
        return keras.tree.map_structure(
            lambda leaf: keras.ops.convert_to_tensor(leaf) if hasattr(leaf, "dtype") else leaf, self.fetch()
        )


class ClusterCoordinator:
    """Schedules functions on the workers of a job with parameter servers.

    All processes of the job make the same calls. A function runs on one worker: it reads the weights from the
    servers, and what it applies with an optimizer of Keras updates them there. Metrics and the state of
    layers change by the sum of the changes of all functions. Variables that the script itself reads have the
    values of the last `join`, `fetch`, or `done` that returned True. In one process without a job, `schedule`
    runs the function.

    Args:
        strategy: in whose scope models, optimizers and metrics were created.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise InputError("ClusterCoordinator needs a lockstep.ParameterServerStrategy")
        self._strategy = strategy
        self._datasets = itertools.count()
        self._local: LocalCalls | None = None if strategy.has_servers else LocalCalls()

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
        """Let a worker run `fn`; return its result-to-be at once.

        A function whose worker is lost runs again on another one. When a function is scheduled for the first
        time, all processes also run it once, and undo it, to learn what it changes.

        Args:
            fn: a function, also a `tf.function`.
            args: its arguments; each worker gets its own value of per-worker datasets and iterators in them.
            kwargs: its keyword arguments, likewise.

        Raises:
            Exception: of an earlier function; functions that no worker had begun then are dropped.
            ModelError: parameter servers do not support what `fn` changes.
        """
        positional, named = tuple(args or ()), dict(kwargs or {})
        scheduled = Scheduled(
            fn,
            lambda: _with_values((positional, named), lambda value: value._own()),
            lambda: _with_values((positional, named), lambda value: value._fresh()),
        )
        # Refuses results of functions among the arguments in all processes.
        _with_values((positional, named), lambda value: value)
        calls = self._calls()
        return RemoteValue(calls, calls.schedule(scheduled))

    def join(self) -> None:
        """Wait until all scheduled functions are complete.

        Raises:
            Exception: of one of them.
        """
        self._calls().join()

    def done(self) -> bool:
        """Whether all scheduled functions are complete."""
        return self._calls().done()

    def fetch(self, val: Any) -> Any:
        """Return a nest in which the results of functions replace their remote values.

        Raises:
            Exception: of one of the functions.
        """
        found: list[RemoteValue] = []
        _visit(val, lambda leaf: found.append(leaf) if isinstance(leaf, RemoteValue) else None)
        results = dict(zip(map(id, found), _fetched(found), strict=True))
        return _visit(val, lambda leaf: results[id(leaf)] if isinstance(leaf, RemoteValue) else leaf)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Let each worker create its own dataset.

        Args:
            dataset_fn: a function that returns a dataset: a `tf.data.Dataset`, a `DataLoader`, or any
                iterable. Random operations in it begin with another seed on each worker. Or a dataset, of
                which each worker reads all elements in the same order.
        """
        make = getattr(dataset_fn, "python_function", dataset_fn)
        number, job = next(self._datasets), self._strategy.job_of_scope

        def create() -> Any:
            made = make() if callable(make) and not hasattr(make, "__iter__") else make
            return made.create() if isinstance(made, DatasetFunction) else made

        seed = job.context.seed
        return PerWorkerDataset(
            create, seed_of(seed, "dataset", number, job.worker), seed_of(seed, "dataset", number)
        )

    def _calls(self) -> Calls:
        return self._local or self._strategy.function_calls()


class LocalCalls:
    """Runs functions where they are scheduled, in a process without a job."""

    def __init__(self) -> None:
        self._results: dict[int, Any] = {}
        self._errors: dict[int, Exception] = {}
        self._raised: Exception | None = None
        self._count = 0
        self._backend = adapter().functions()

    def schedule(self, scheduled: Scheduled) -> int:
        """Run a function; return its number.

        Raises:
            Exception: of an earlier function.
        """
        self._raise()
        step, self._count = self._count, self._count + 1
        try:
            with computing_as(Replica(0, SingleReplicaMerger())):
                args, kwargs = scheduled.own()
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


def _fetched(values: Sequence[RemoteValue]) -> list[Any]:
    """Return the results of functions, asking for those that this process does not have."""
    missing = list({value._step: value for value in values if not value._value}.values())
    if missing:
        calls = missing[0]._calls
        for value, result in zip(missing, calls.fetch([value._step for value in missing]), strict=True):
            value._value = [result]
            value._forgotten()
    known = {value._step: value._value for value in missing}
    return [(value._value or known[value._step])[0] for value in values]


def _with_values(nest: Any, choose: Callable[[PerWorkerValues], Any]) -> Any:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, RemoteValue):
            raise InputError("pass value.fetch() instead of the RemoteValue to a scheduled function")
        return choose(leaf) if isinstance(leaf, PerWorkerValues) else leaf

    return _visit(nest, one)


def _visit(nest: Any, act: Callable[[Any], Any]) -> Any:
    """Return a nest of lists, tuples and dicts with the results of `act` for its leaves."""
    if type(nest) is dict:
        return {key: _visit(value, act) for key, value in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(_visit(value, act) for value in nest)
    return act(nest)
