"""A table of the examples that each replica reads in `fit`, without calling `fit`."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, TypeVar

import keras

from lockstep.data.input_context import InputContext
from lockstep.data.input_table import InputTable, ReplicaRows, Rows, input_table
from lockstep.data.order import Indices, Shuffle
from lockstep.errors import DataError
from lockstep.keras.input.distributed_dataset import DistributedDataset
from lockstep.keras.input.fit_inputs import AN_ITERATOR, ARRAYS, global_input
from lockstep.keras.input.readings import ReadingWorker, Way
from lockstep.keras.input.shards import Shards, shards_of
from lockstep.keras.input.sources import GlobalBatchSource, count_examples
from lockstep.keras.input.streams import Stream
from lockstep.keras.input.visits import BatchVisits, draw_as_a_loader, order_seed, visits
from lockstep.keras.nests import leaves_of
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.topology import View, place
from lockstep.worker import job

Item = TypeVar("Item")


def show_input(
    x: Any,
    y: Any = None,
    *,
    batch_size: int = 32,
    shuffle: Shuffle = True,
    steps: int = 4,
    replicas: int | None = None,
    workers: int | None = None,
    epoch: int = 1,
    call: int = 1,
    new: bool = True,
) -> InputTable:
    """Return a table of the examples that each replica reads in `fit`, to print or iterate over.

    The attribute `way`, which is also the first line, says how the workers read the input, and why.

    Args:
        x: the `x` of `fit`: arrays, or a dataset that can be read more than once.
        y: the `y` of `fit`; its rows match those of `x`.
        batch_size: the global batch size, for arrays.
        shuffle: the `shuffle` of `fit`.
        steps: the number of steps of the epoch to show.
        replicas: R; by default that of this process's job.
        workers: the number of workers that compute them; by default that of the job.
        epoch: the epoch of the call, from 1.
        call: the number of the call among the script's calls of `fit`, `evaluate`, `predict` and of
            single-batch methods, from 1. It has no effect after `keras.utils.set_random_seed`, because the
            order then follows from the random states: the table shows the next `fit`.
        new: whether the model has been compiled since its last `fit` or `evaluate`. If so, Keras first reads
            a batch. On JAX and PyTorch, this draws from the random states.

    Raises:
        DataError: a dataset has a pipeline for each replica, so each replica reads its own.
        ConfigError: there are more workers than replicas.

    Example:
        >>> import lockstep
        >>> import numpy as np
        >>> lockstep.show_input(np.zeros(8), batch_size=4, shuffle=False, replicas=2, workers=2)
        each worker reads the rows of its replicas: arrays
        step  replica  worker  examples
           1        0       0  0, 1
           1        1       1  2, 3
           2        0       0  4, 5
           2        1       1  6, 7
    """
    view_of_job = job.current().view
    view = view_of_job
    if replicas is not None or workers is not None:
        replicas = replicas or view_of_job.replicas
        view = place(replicas, tuple(range(workers or min(len(view_of_job.workers), replicas))))
    if isinstance(x, DistributedDataset):
        if not isinstance(x.source, GlobalBatchSource):
            raise DataError("each replica reads all of the dataset that the function makes for it")
        way, x = x.source.way, x.source.stream.dataset
    else:
        way = _way(x) if _is_dataset(x) else ARRAYS
        shards = shards_of(x, view.replicas) if view.replicas > 1 else None
        if isinstance(shards, Shards) and not job.current().settings.joint_input:
            rows_of_replicas = islice(_read_shards(shards, view), steps * view.replicas)
            return InputTable(str(shards.way), tuple(rows_of_replicas))
    seed = order_seed(job.current().settings.seed, call)
    if not _is_dataset(x):
        order = visits(len(keras.tree.flatten(x)[0]), batch_size, shuffle, seed)
        visited = map(_numbers, _visited(order.begin, order.sample, epoch, steps, new=new))
        return input_table(map(Rows, visited), view, str(way))
    if isinstance(x, keras.utils.PyDataset) and (batches := x.num_batches) is not None:
        numbers: Iterable[int] = range(min(batches, steps))
        if shuffle:
            drawn = BatchVisits(seed)
            begin, sample = partial(drawn.begin, batches), partial(drawn.sample, batches)
            numbers = _visited(begin, sample, epoch, steps, new=new)
        rows_of_steps = _chosen(x, numbers)
    else:
        rows_of_steps = islice(_read(x), steps)
    return input_table(rows_of_steps, view, str(way))


def _way(dataset: Any) -> Way:
    """Return how `fit` reads a dataset, without changing the random states."""
    if isinstance(dataset, Iterator):
        return Way.joint(AN_ITERATOR)  # `fit` reads its first batch at once.
    current, states = job.current(), random_states()
    try:
        reader = ReadingWorker(current, 0, joint=current.settings.joint_input)
        options: dict[str, Any] = {"batch_size": None, "steps": None, "shuffle": False, "seed": ()}
        return global_input(dataset, **options, unsplit=False, reader=reader, in_order=True).way
    except DataError:
        return Way.joint("")  # Only `strategy` distributes this kind of dataset.
    finally:
        set_random_states(states)


def _is_dataset(x: Any) -> bool:
    return not all(hasattr(leaf, "shape") for leaf in keras.tree.flatten(x))


def _visited(
    begin: Callable[[], Iterable[Item]], sample: Callable[[], object], epoch: int, steps: int, *, new: bool
) -> list[Item]:
    """Return the items of the first batches of an epoch, without changing the random states.

    Args:
        begin: begins a pass; returns the items of each batch.
        sample: makes Keras's draws for a sample batch.
        epoch: the epoch, from 1.
        steps: the number of batches.
        new: whether Keras first reads a sample batch.
    """
    states = random_states()
    try:
        if new and keras.backend.backend() != "tensorflow":
            draw_as_a_loader()
            sample()
        for _ in range(epoch - 1):
            draw_as_a_loader()
            deque(begin(), maxlen=0)
            draw_as_a_loader()
        draw_as_a_loader()
        return list(islice(begin(), steps))
    finally:
        set_random_states(states)


def _numbers(indices: Indices) -> Sequence[int]:
    return range(indices.start, indices.stop) if isinstance(indices, slice) else indices.tolist()


def _chosen(dataset: keras.utils.PyDataset, numbers: Iterable[int]) -> Iterator[Rows]:
    """Yield the rows of some batches."""
    for number in numbers:
        yield Rows(range(count_examples(leaves_of(dataset[number]), f"batch {number}")), number)


def _read(dataset: Any) -> Iterator[Rows]:
    """Yield the rows of each batch of a pass."""
    for number, nest in enumerate(Stream(dataset).begin()):
        yield Rows(range(count_examples(leaves_of(nest), f"batch {number}")), number)


def _read_shards(shards: Shards, view: View) -> Iterator[ReplicaRows]:
    """Yield the rows of each replica in each step, in the batches of its shard."""
    contexts = [InputContext(view.replicas, replica, view.replicas) for replica in range(view.replicas)]
    readers = [Stream(shards.shard(context)).begin() for context in contexts]
    for step in count(1):
        batches = [next(reader, None) for reader in readers]
        if all(nest is None for nest in batches):
            return
        for replica, nest in enumerate(batches):
            rows = range(0 if nest is None else len(leaves_of(nest)[0]))
            yield ReplicaRows(step, replica, view.owners[replica], Rows(rows, step - 1))
