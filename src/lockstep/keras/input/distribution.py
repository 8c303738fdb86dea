"""A strategy distributes datasets, and the values that a function returns for each replica."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from lockstep.data.input_context import InputContext
from lockstep.errors import DataError
from lockstep.keras.input.distributed_dataset import DistributedDataset
from lockstep.keras.input.loader_reading import is_loader, loader_reading
from lockstep.keras.input.pipelines import Pipelines
from lockstep.keras.input.readings import Reading, ReadingWorker, explain_reading, note_once
from lockstep.keras.input.shards import policy_of, shard_pipelines
from lockstep.keras.input.sources import GlobalBatchSource, Source, StreamReading
from lockstep.keras.input.streams import Stream, array_of, host_nest, spec_of
from lockstep.keras.per_replica import KnownValues, Spec, ValueStore
from lockstep.keras.replica_run.runner import Runner
from lockstep.worker.job import Job


def distribute(
    job: Job, runner: Runner, dataset: Any, seed: Callable[[], int], call: Callable[[], int]
) -> Any:
    """Split each element of `dataset`, a global batch, over the replicas.

    The replicas' numbers of rows of an element differ by at most one. With the auto-shard policy FILE or DATA
    of `tf.data`, each replica reads its own shard. With one replica this returns the dataset itself.

    Args:
        job: the job of the replicas.
        runner: gives each replica its values.
        seed: returns the seed of shards, or of the random numbers of items; called only for `tf.data` and a
            `DataLoader`.
        call: returns the number of the call in progress.
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
    stream = Stream(dataset, parts=job.view.replicas)
    shards = None if job.settings.joint_input else shard_pipelines(job, dataset, seed)
    source: Source = shards or GlobalBatchSource(job, stream, _reading(job, stream, dataset, seed, call))
    explain_reading(job, source.way)
    return _dataset(runner, source)


def _reading(
    job: Job, stream: Stream, dataset: Any, seed: Callable[[], int], call: Callable[[], int]
) -> Reading:
    """Return how the workers read a dataset of global batches: divided if the result is the same."""
    if job.settings.joint_input or not (is_loader(dataset) or stream.is_tensorflow):
        return StreamReading(stream, job.view.replicas)
    reader = ReadingWorker(job, seed(), call=call)
    divided: Reading | str
    if is_loader(dataset):
        divided = loader_reading(dataset, reader, host_nest)
    else:
        from lockstep.keras.input.tf_reading import tf_reading

        divided = tf_reading(dataset, reader, weighed=False)
    return StreamReading(stream, job.view.replicas, divided) if isinstance(divided, str) else divided


def distribute_from_function(
    job: Job,
    runner: Runner,
    dataset_fn: Callable[[InputContext], Any],
    seed: Callable[[], int],
    *,
    in_turn: bool = False,
) -> Any:
    """Give each replica its own dataset, which the worker that computes the replica reads.

    A pass ends when all datasets have ended; a replica whose dataset ends earlier has no examples until then.
    With one replica this returns its dataset.

    Args:
        job: the job of the replicas.
        runner: gives each replica its values.
        dataset_fn: creates the dataset of a replica from its `InputContext`. The dataset can be of any kind
            that `distribute` accepts, must be the same on any worker, and has the replica's own batches.
        seed: returns the seed of all pipelines; called only if there are several replicas.
        in_turn: whether there is one pipeline, whose batches the replicas take in turn.

    Raises:
        DataError: its elements do not have examples to count.
    """
    if job.view.replicas == 1:
        return dataset_fn(InputContext())
    return _dataset(runner, Pipelines(job, dataset_fn, seed(), in_turn=in_turn))


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
    """Return the results of `value_fn(context)` for all replicas, with a `PerReplica` for each leaf.

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
    leaves = runner.per_replica(KnownValues(tuple(described[0]), columns), _values)
    return keras.tree.pack_sequence_as(nests[0], leaves)


_values = ValueStore()
"""Where the values of such functions are stored."""


_OFF = (
    "AutoShardPolicy.OFF: each replica takes its rows of each batch, which is global; a dataset that gives "
    "each worker different examples belongs in strategy.distribute_datasets_from_function"
)


def explain_sharding(job: Job, dataset: Any) -> None:
    """Print a note, once and on the chief, on how Lockstep handles the auto-shard policy OFF."""
    if policy_of(dataset) == "OFF":
        note_once(job, _OFF)
