"""Distributed datasets read sources: the contract of a source, and the source of global batches.

A source is a dataset whose elements are batches (`lockstep.data.batch`), read by a `Reading` or by the
pipelines of the replicas. Before a program takes an element, it may request the form of the elements, their
number, and a sample. `fit` takes the batches themselves. The iterator of a distributed dataset shows each
batch as `BatchValues`, from which a program gets a `PerReplica` for each leaf.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy.typing as npt

from lockstep.data.batch import Batch, GlobalBatch
from lockstep.errors import DataError
from lockstep.keras.input.readings import Reading, Way, whole_batch
from lockstep.keras.input.streams import Form, Reader, Stream, spec_of
from lockstep.keras.nests import Nest, leaves_of
from lockstep.keras.per_replica import Spec
from lockstep.worker.job import Job


class Pass(Protocol):
    """One pass over a source."""

    def __next__(self) -> Batch:
        """Return the next batch."""

    def skip(self) -> None:
        """Skip a batch without communication between workers.

        Raises:
            StopIteration: there is no further batch.
        """

    def form(self) -> Form:
        """Return the form of the elements, without taking one.

        Raises:
            DataError: there is no element.
        """


class Source(Protocol):
    """The dataset that a distributed dataset reads."""

    @property
    def way(self) -> Way:
        """How the workers read it."""

    def begin(self) -> Pass:
        """Begin a pass."""

    def values(self, batch: Any, number: int) -> "BatchValues":
        """Return the values of the replicas in a batch of this source.

        Args:
            batch: the batch.
            number: its number in its pass, from 1.
        """

    def form(self) -> Form:
        """Return the form of the elements, without taking one.

        Raises:
            DataError: there is no element.
        """

    def sample(self) -> Nest:
        """Return a sample element, which later passes still yield, or None if there is none."""

    def peek(self) -> Nest:
        """Return a sample element, with which the next pass begins, or None if there is none."""

    @property
    def length(self) -> float | None:
        """The number of elements in a pass; infinite if it never ends, None if unknown."""


class BatchValues:
    """The `Values` of a batch: the leaves of each replica's share.

    Args:
        batch: the batch.
        nest: a nest with the structure of the shares. A leaf that is None is None on every replica.
        specs: the specs of the leaves that are not None.
        leaves: the leaves of replicas whose shares have been read.

    Attributes:
        nest: see above.
        specs: see above.
    """

    anywhere = True

    def __init__(
        self, batch: Batch, nest: Nest, specs: tuple[Spec, ...], leaves: dict[int, Sequence[Any]]
    ) -> None:
        self._batch = batch
        self._leaves = leaves
        self.nest = nest
        self.specs = specs

    def of(self, replica: int) -> Sequence[Any]:
        """Return the leaves of a replica, without rows if it has no examples."""
        leaves = self._leaves.get(replica)
        if leaves is None:
            share = self._batch.share(replica)
            leaves = leaves_of(share.data())
            if not share.examples:
                leaves = [leaf[:0] for leaf in leaves]
            self._leaves[replica] = leaves
        return leaves

    def is_here(self, replica: int) -> bool:
        """Whether this worker has the share of a replica, or can read it."""
        return self._batch.is_here(replica)

    def leaf(self, position: int, replica: int) -> Any:
        """Return one leaf of a replica.

        Raises:
            DataError: another worker has the share.
        """
        if not self.is_here(replica):
            raise DataError(
                f"the examples of replica {replica} are on another worker: get them with strategy.gather"
            )
        return self.of(replica)[position]

    def examples(self, replica: int) -> int | None:
        """Return the number of examples of a replica."""
        return self._batch.share(replica).examples

    def check(self) -> bytes:
        """Return the check of the batch."""
        return self._batch.check()


class GlobalBatchSource:
    """The `Source` of a dataset of global batches.

    Args:
        job: the job of the replicas.
        stream: the dataset, whose elements have the structure of the batches.
        reading: how the workers read the batches together.

    Attributes:
        stream: the dataset.
        shown_form: the form of the elements, if the dataset or an element has shown it.
    """

    def __init__(self, job: Job, stream: Stream, reading: Reading) -> None:
        self.stream = stream
        self._job = job
        self._reading = reading
        self._declared = stream.known_form() if stream.is_tensorflow else None
        self.shown_form = self._declared
        self._begun: GlobalBatchPass | None = None

    @property
    def way(self) -> Way:
        """How the workers read the dataset."""
        return self._reading.way

    @property
    def is_joint(self) -> bool:
        """Whether every worker reads all elements, as the dataset itself yields them."""
        return isinstance(self._reading, StreamReading)

    @property
    def in_tensors(self) -> Any:
        """The `tf.data.Dataset` that yields the batches, or None if there is none."""
        return self.stream.dataset if self.is_joint and self.stream.is_tensorflow else None

    def begin(self) -> "GlobalBatchPass":
        """Begin a pass."""
        begun, self._begun = self._begun, None
        return begun or GlobalBatchPass(self, self._reading.begin())

    def begin_in_graph(self) -> "GlobalBatchPass":
        """Begin a pass whose rows a graph of TensorFlow reads."""
        return GlobalBatchPass(self, StreamBatches(None, self._job.view.replicas))

    def values(self, batch: Batch, number: int) -> BatchValues:
        """Return the values of the replicas in a batch.

        If the dataset does not declare the form of the elements, the rows of one of this worker's replicas
        show it.

        Raises:
            DataError: the leaves have no examples, or different numbers of them.
        """
        if self._declared is not None:
            return BatchValues(batch, self._declared.nest, self._declared.specs, {})
        owned = self._job.view.replicas_of(self._job.worker)
        share = batch.share(owned[0] if owned else 0)
        if not share.examples:
            share = batch.share(0)
        nest = share.data()
        leaves = leaves_of(nest)
        if not self.is_joint:
            count_examples(leaves, f"batch {number} of the dataset")
        if self.shown_form is None:
            self.shown_form = Form.of(nest)
        return BatchValues(batch, nest, tuple(map(spec_of, leaves)), {share.replica: leaves})

    def form(self) -> Form:
        """Return the form of the elements; if necessary, read the first element of the next pass."""
        if self.shown_form is not None:
            return self.shown_form
        self._begun = self.begin()
        return self._begun.form()

    def sample(self) -> Nest:
        """Return an element as Keras reads one to build a model: by beginning a pass, unless that loses data.

        Later passes then yield the same elements as in plain Keras.
        """
        return self.peek() if isinstance(self.stream.dataset, Iterator) else self.stream.opened().peek()

    def peek(self) -> Nest:
        """Return all rows of the first batch of the next pass, or None if it is empty."""
        self._begun = self.begin()
        first = self._begun.first()
        return None if first is None else first.whole()

    @property
    def length(self) -> float | None:
        """The number of elements of the dataset in a pass; see `Source`."""
        return self.stream.length


class GlobalBatchPass:
    """One pass over a dataset of global batches.

    Args:
        source: the source of the batches.
        batches: the batches of the pass.
    """

    def __init__(self, source: GlobalBatchSource, batches: Iterator[GlobalBatch]) -> None:
        self.batches = batches
        self._source = source
        self._ahead: list[GlobalBatch] = []
        self._taken = 0

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        batch = self._ahead.pop() if self._ahead else next(self.batches)
        self._taken += 1
        return batch

    def skip(self) -> None:
        """Skip a batch. A divided reading does not read its rows."""
        next(self)

    def first(self) -> GlobalBatch | None:
        """Return the next batch without taking it, or None at the end."""
        if not self._ahead:
            self._ahead.extend(islice(self.batches, 1))
        return self._ahead[0] if self._ahead else None

    def form(self) -> Form:
        """Return the form of the elements; if necessary, read the next one ahead."""
        if self._source.shown_form is None and (first := self.first()) is not None:
            self._source.values(first, self._taken + 1)
        if self._source.shown_form is None:
            raise DataError("the dataset is empty, so the structure of its elements is unknown")
        return self._source.shown_form


class StreamReading:
    """The `Reading` of a dataset in its own form. Every worker reads all of it.

    Args:
        stream: the dataset.
        replicas: R.
        why: the reason.
    """

    def __init__(self, stream: Stream, replicas: int, why: str = "") -> None:
        self._stream = stream
        self._replicas = replicas
        self.way = Way.joint(why)

    def begin(self) -> "StreamBatches":
        """Begin the next pass."""
        return StreamBatches(self._stream.begin(), self._replicas)


class StreamBatches:
    """The global batches of a pass over a stream.

    Args:
        reader: reads their rows; None if a graph of TensorFlow reads them.
        replicas: R.
    """

    def __init__(self, reader: Reader | None, replicas: int) -> None:
        self.reader = reader
        self._replicas = replicas
        self._taken = 0

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        assert self.reader is not None
        return self.batch_of(next(self.reader))

    def batch_of(self, nest: Nest) -> GlobalBatch:
        """Return the next batch, whose rows are in a nest of arrays; workers compare all of them.

        Raises:
            DataError: the batch cannot be split.
        """
        self._taken += 1
        count_examples(leaves_of(nest), f"batch {self._taken} of the dataset")
        return whole_batch(nest, self._replicas, self._taken - 1)


def count_examples(leaves: Sequence[npt.NDArray[Any]], what: str, *, may_be_empty: bool = False) -> int:
    """Return the number of examples of arrays: the size of the first axis of each.

    Raises:
        DataError: the arrays have different numbers of examples, or none although that is not allowed.
    """
    if not leaves or not all(leaf.ndim for leaf in leaves):
        raise DataError(
            f"{what} has a value without an axis of examples, so it cannot be split over the "
            "replicas; batch the dataset before it is distributed"
        )
    counts = {len(leaf) for leaf in leaves}
    if len(counts) > 1:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        raise DataError(f"{what} has arrays of shapes {shapes}, whose first axes must be equally long")
    if counts == {0} and not may_be_empty:
        raise DataError(f"{what} has no rows")
    return counts.pop()
