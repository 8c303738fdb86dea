"""Datasets whose elements are split over the replicas of a job, for custom loops."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from lockstep.errors import DataError
from lockstep.keras.input.sources import BatchValues, Pass, Source
from lockstep.keras.input.streams import Form
from lockstep.keras.nests import packed
from lockstep.keras.per_replica import ValueStore
from lockstep.keras.replica_run.runner import Runner
from lockstep.worker import job


class ElementPosition(NamedTuple):
    """A position in a dataset: the number of passes begun, and of elements taken from the last one."""

    passes: int
    taken: int


class DistributedIterator:
    """One pass over a `DistributedDataset`: each step yields a nest with a `PerReplica` for each leaf.

    Example:
        In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

        >>> import lockstep
        >>> import numpy as np
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> iterator = iter(strategy.experimental_distribute_dataset([np.arange(4), np.arange(4, 8)]))
        >>> iterator.skip(1)
        >>> next(iterator)
        PerReplica:{
          0: array([4, 5]),
          1: array([6, 7])
        }
        >>> iterator.position.taken, iterator.get_next_as_optional().has_value()
        (2, False)
    """

    def __init__(self, dataset: "DistributedDataset", current: Pass, number: int) -> None:
        self._dataset = dataset
        self._current = current
        self._number = number
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._dataset.distributed(job.current().timer.charging("input", self._next)())

    def get_next(self) -> Any:
        """Return the next element, or raise the error of `next` at the end."""
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """Return the next element, or an empty optional at the end."""
        try:
            return Optional([next(self)])
        except StopIteration:
            return Optional([])

    @property
    def element_spec(self) -> Any:
        """A nest of (dtype, shape) for the leaves of the elements, with None for unknown sizes."""
        return _described(self._current.form())

    @property
    def position(self) -> ElementPosition:
        """The place in the dataset of the next element."""
        return ElementPosition(self._number, self._taken)

    def skip(self, elements: int) -> None:
        """Skip elements without distributing them. No worker waits for another.

        Raises:
            DataError: fewer elements remain.
        """
        for _ in range(elements):
            try:
                self._current.skip()
            except StopIteration:
                raise DataError(
                    f"the dataset ended after {self._taken} elements, and more were taken from it before"
                ) from None
            self._taken += 1

    def _next(self) -> BatchValues:
        batch = next(self._current)
        self._taken += 1
        return self._dataset.source.values(batch, self._taken)


@dataclass(frozen=True)
class Optional:
    """An element or none."""

    _elements: list[Any]

    def has_value(self) -> bool:
        """Whether there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Return the element.

        Raises:
            DataError: there is no element.
        """
        if not self._elements:
            raise DataError("the dataset has ended: ask has_value() first")
        return self._elements[0]


class DistributedDataset:
    """A dataset whose elements are split over the replicas. Each iterator is a new pass.

    Attributes:
        source: the source of the elements.
        store: the store of the replicas' values.

    Example:
        In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

        >>> import lockstep
        >>> import numpy as np
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> batches = strategy.experimental_distribute_dataset([np.zeros((4, 3)), np.ones((4, 3))])
        >>> isinstance(batches, lockstep.DistributedDataset), len(batches)
        (True, 2)
        >>> batches.element_spec
        Spec(dtype='float64', shape=(None, 3))
    """

    def __init__(self, runner: Runner, source: Source) -> None:
        self._runner = runner
        self._passes = 0
        self.source = source
        self.store = ValueStore()

    def __iter__(self) -> DistributedIterator:
        self._passes += 1
        return DistributedIterator(self, self.source.begin(), self._passes)

    def __len__(self) -> int:
        length = self.source.length
        if length is None or length == inf:
            raise TypeError(f"the dataset has {'no end' if length else 'a length that is not known'}")
        return int(length)

    @property
    def element_spec(self) -> Any:
        """A nest of (dtype, shape) for the leaves of the elements, as far as they are known."""
        return _described(self.source.form())

    def distributed(self, values: BatchValues) -> Any:
        """Return an element with a `PerReplica` for each leaf."""
        return packed(values.nest, self._runner.per_replica(values, self.store))


def _described(form: Form) -> Any:
    return packed(form.nest, form.specs)
