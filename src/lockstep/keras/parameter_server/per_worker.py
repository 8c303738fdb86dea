"""Values that differ between workers: the datasets and iterators of scheduled functions."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from lockstep.data.input_context import InputContext
from lockstep.errors import InputError
from lockstep.keras.randomness import RandomNumbers


class PerWorkerValues:
    """A value that each worker has for itself, as an argument of scheduled functions.

    Example:
        >>> import lockstep
        >>> coordinator = lockstep.ClusterCoordinator(lockstep.ParameterServerStrategy())
        >>> dataset = coordinator.create_per_worker_dataset(lambda: [1, 2, 3])
        >>> isinstance(dataset, lockstep.PerWorkerValues), isinstance(iter(dataset), lockstep.PerWorkerValues)
        (True, True)
    """

    def _worker_value(self) -> Any:
        """Return the value of this worker."""
        raise NotImplementedError

    def _trial_value(self) -> Any:
        """Return a value for a trial run, which leaves the worker's value unchanged."""
        raise NotImplementedError


class PerWorkerDataset(PerWorkerValues):
    """A dataset that each worker creates for itself; `iter` returns an iterator for scheduled functions.

    Args:
        make: creates the dataset.
        seed: returns the seed of the random numbers with which this worker creates it.
        trial: the seed of the random numbers in trial runs, equal in all processes.
        worker: returns which worker this process is now: the id of its task, and `Job.replacement`.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        seed: Callable[[], int],
        trial: int,
        worker: Callable[[], tuple[int, int]],
    ) -> None:
        self._make, self._seed, self._trial, self._worker = make, seed, trial, worker

    def __iter__(self) -> "PerWorkerIterator":
        return PerWorkerIterator(self)

    @cached_property
    def element_spec(self) -> Any:
        """The form of the elements, which a `tf.data.Dataset` declares."""
        return self._trial_value().element_spec

    def _worker_value(self) -> Any:
        return RandomNumbers(self._seed()).make(self._make)

    def _trial_value(self) -> Any:
        return RandomNumbers(self._trial).make(self._make)

    def _iterators(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return functions that create an iterator of this worker, and one for a trial run."""
        return (
            lambda: RandomNumbers(self._seed()).make(lambda: iter(self._make())),
            lambda: RandomNumbers(self._trial).make(lambda: iter(self._make())),
        )


class PerWorkerIterator(PerWorkerValues):
    """An iterator of a dataset of each worker."""

    def __init__(self, dataset: PerWorkerDataset) -> None:
        self._create, self._create_for_trial = dataset._iterators()
        self._dataset = dataset
        self._worker = dataset._worker
        self._of_task: dict[int, tuple[int, Any]] = {}

    def _worker_value(self) -> Any:
        # In a replay, one process repeats a lost worker and its replacement, or all workers.
        task, replacement = self._worker()
        if task not in self._of_task or self._of_task[task][0] != replacement:
            self._of_task[task] = replacement, self._create()
        return self._of_task[task][1]

    def _trial_value(self) -> Any:
        return self._create_for_trial()

    @property
    def element_spec(self) -> Any:
        """The form of the elements, which a `tf.data.Dataset` declares."""
        return self._dataset.element_spec

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> Any:
        raise InputError(
            "each worker has its own iterator of this dataset: pass it to a scheduled function, which calls "
            "next()"
        )


def process_dataset(dataset_fn: Callable[[InputContext], Any]) -> Any:
    """Return the dataset that a function creates in this process, as one pipeline."""
    return dataset_fn(InputContext())


def dataset_maker(dataset_fn: Any) -> Callable[[], Any]:
    """Return a function that creates the dataset, where `dataset_fn` is a function or the dataset itself."""
    make = getattr(dataset_fn, "python_function", dataset_fn)
    if hasattr(make, "__next__"):
        raise InputError(
            "create_per_worker_dataset needs a dataset, or a function that returns one, not an iterator: "
            "each worker begins at the start"
        )

    def create() -> Any:
        return make() if callable(make) and not hasattr(make, "__iter__") else make

    return create
