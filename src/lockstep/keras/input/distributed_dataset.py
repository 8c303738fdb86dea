"""Datasets whose elements are split over the replicas of a job, for custom loops."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import keras

from lockstep.data.input_context import InputContext
from lockstep.errors import DataError
from lockstep.keras.input.batches import Joint, Pass, Source
from lockstep.keras.input.pipelines import Pipelines
from lockstep.keras.input.streams import Form, array_of, is_tensorflow, packed, spec_of
from lockstep.keras.per_replica import KnownValues, Spec, Values, ValueStore
from lockstep.keras.replica_run.runner import Runner
from lockstep.system.notes import note
from lockstep.worker.job import Job


class ElementPosition(NamedTuple):
    """A position in a dataset: the number of passes begun, and of elements taken from the last one."""

    passes: int
    taken: int


class DistributedIterator:
    """One pass over a `DistributedDataset`: each step yields a nest with a `PerReplica` for each leaf."""

    def __init__(self, dataset: "DistributedDataset", current: Pass, number: int) -> None:
        self._dataset = dataset
        self._current = current
        self._number = number
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._dataset.distributed(*self._take())

    def get_next(self) -> Any:
        """Return the next element; at the end, raise the error of `next`."""
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """Return the next element, or an empty optional at the end."""
        try:
            return Optional([next(self)])
        except StopIteration:
            return Optional([])

    @property
    def element_spec(self) -> Any:
        """The known specs of the elements' leaves: a nest of (dtype, shape)."""
        return _described(self._current.form())

    @property
    def position(self) -> ElementPosition:
        """The place in the dataset of the next element."""
        return ElementPosition(self._number, self._taken)

    def skip(self, elements: int) -> None:
        """Skip elements without distributing them; no worker waits for another.

        Raises:
            DataError: fewer elements remain.
        """
        self._current.skip(elements)
        self._taken += elements

    def _take(self) -> tuple[Any, Values]:
        element = next(self._current)
        self._taken += 1
        return element.nest, element.values


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
            DataError: there is none.
        """
        if not self._elements:
            raise DataError("the dataset has ended: ask has_value() first")
        return self._elements[0]


class DistributedDataset:
    """A dataset whose elements are split over the replicas; each iterator is a new pass over it.

    Attributes:
        source: of the elements.
        store: where they are stored.
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
        """The known specs of the elements' leaves: a nest of (dtype, shape)."""
        return _described(self.source.form())

    def distributed(self, nest: Any, values: Values) -> Any:
        """Return an element with a `PerReplica` for each leaf."""
        return packed(nest, self._runner.per_replica(values, self.store))


def distribute(job: Job, runner: Runner, dataset: Any) -> Any:
    """Split each element of `dataset`, a global batch, over the replicas.

    Every worker reads the whole dataset, and the replicas' numbers of rows of an element differ by at most
    one. With one replica this returns the dataset itself.

    Args:
        job: of the replicas.
        runner: gives each replica its values.
        dataset: a `tf.data.Dataset`, a PyTorch `DataLoader`, a `keras.utils.PyDataset`, or any iterable of
            nests of arrays, all with the examples along their first axis.

    Raises:
        DataError: its elements cannot be split.
    """
    if job.view.replicas == 1:
        return dataset
    if isinstance(dataset, DistributedDataset):
        raise DataError("the dataset is already distributed")
    explain_sharding(job, dataset)
    return _dataset(runner, Joint(dataset, job.view.replicas))


def distribute_from_function(
    job: Job, runner: Runner, dataset_fn: Callable[[InputContext], Any], seed: Callable[[], int]
) -> Any:
    """Give each replica its own dataset, which the worker that computes the replica reads.

    A pass ends when all datasets have ended; a replica whose dataset ends earlier has no examples until then.
    With one replica this returns its dataset.

    Args:
        job: of the replicas.
        runner: gives each replica its values.
        dataset_fn: creates the dataset of a replica, of any kind that `distribute` accepts, from its
            `InputContext`, with the same result on any worker. Its batches are the replica's own.
        seed: returns the seed of all pipelines; called only if there are several replicas.

    Raises:
        DataError: its elements have no examples to count.
    """
    if job.view.replicas == 1:
        return dataset_fn(InputContext())
    return _dataset(runner, Pipelines(job, dataset_fn, seed()))


def _described(form: Form) -> Any:
    return packed(form.nest, form.specs)


def _dataset(runner: Runner, source: Source) -> DistributedDataset:
    if keras.backend.backend() != "tensorflow":
        return DistributedDataset(runner, source)
    from lockstep.keras.input.tf_distributed_dataset import TensorFlowDataset

    return TensorFlowDataset(runner, source)


@dataclass(frozen=True)
class ValueContext:
    """The replica for which a value is requested.

    Attributes:
        replica_id_in_sync_group: its id, from 0.
        num_replicas_in_sync: R, the number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def values_from_function(job: Job, runner: Runner, value_fn: Callable[[ValueContext], Any]) -> Any:
    """Return what `value_fn(context)` returns for each replica, with a `PerReplica` for each leaf.

    Every worker computes the values of all replicas. With one replica this returns its value.

    Raises:
        DataError: the replicas' values are not nests of the same structure, shapes and dtypes.
    """
    replicas = job.view.replicas
    nests = [value_fn(ValueContext(replica, replicas)) for replica in range(replicas)]
    if replicas == 1:
        return nests[0]
    rows = [[array_of(leaf) for leaf in keras.tree.flatten(nest)] for nest in nests]
    described = [[Spec(spec_of(leaf[None]).dtype, leaf.shape) for leaf in row] for row in rows]
    for replica, specs in enumerate(described):
        if specs != described[0]:
            raise DataError(
                f"the value function gave {described[0]} for replica 0 and {specs} for replica {replica}; "
                "the values of all replicas must have the same structure"
            )
    columns = tuple(dict(enumerate(column)) for column in zip(*rows, strict=True))
    leaves = runner.per_replica(KnownValues(tuple(described[0]), columns), _given)
    return keras.tree.pack_sequence_as(nests[0], leaves)


_given = ValueStore()
"""Where the values of such functions are stored."""


_INSTEAD = (
    "every worker reads the dataset's batches, which are global, and each replica takes its rows of each"
)
_EXPLANATIONS = {
    "FILE": f"AutoShardPolicy.FILE: {_INSTEAD}; so the number and sizes of files do not matter",
    "OFF": (
        f"AutoShardPolicy.OFF: {_INSTEAD}; a dataset that gives each worker different examples belongs in "
        "strategy.distribute_datasets_from_function"
    ),
}


def explain_sharding(job: Job, dataset: Any) -> None:
    """Print a note, once and on the chief, on what Lockstep does with a dataset's auto-shard policy."""
    if not is_tensorflow(dataset):
        return
    policy = dataset.options().experimental_distribute.auto_shard_policy.name
    if policy in _EXPLANATIONS and policy not in _explained:
        _explained.add(policy)
        if job.is_chief:
            note(_EXPLANATIONS[policy])


_explained: set[str] = set()
