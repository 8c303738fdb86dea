"""What a distributed dataset reads from: the contract of a source, and datasets of global batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt

from lockstep.data.batch import GlobalBatch, Share
from lockstep.data.digest import digest_arrays
from lockstep.errors import DataError
from lockstep.keras.input.readings import Reading, ReadingWorker, Way
from lockstep.keras.input.streams import Form, Reader, Stream, spec_of
from lockstep.keras.nests import Nest, leaves_of
from lockstep.keras.per_replica import Spec, Values


@dataclass(frozen=True)
class Element:
    """The data of one step.

    Attributes:
        nest: a nest with the structure of the dataset's own elements; None in it is None on every replica.
        values: the values of each replica, with a leaf for each leaf of `nest` that is not None.
    """

    nest: Nest
    values: Values


class Pass(Protocol):
    """One pass over a dataset."""

    def __next__(self) -> Element:
        """Return the next element."""

    def skip(self) -> None:
        """Skip an element without communication between workers.

        Raises:
            StopIteration: there is none.
        """

    def form(self) -> Form:
        """Return the form of the elements, without taking one.

        Raises:
            DataError: there is no element.
        """


class Source(Protocol):
    """A source of elements.

    Attributes:
        way: how the workers read it.
    """

    way: Way

    def begin(self) -> Pass:
        """Begin a pass."""

    def form(self) -> Form:
        """Return the form of the elements, without taking one.

        Raises:
            DataError: there is no element.
        """

    def sample(self) -> Nest:
        """Return a sample element, which later passes still yield; None if there is none."""

    def peek(self) -> Nest:
        """Return a sample element, with which the next pass begins; None if there is none."""

    @property
    def length(self) -> float | None:
        """The number of elements in a pass; infinite if it never ends, None if unknown."""


class GlobalBatchSource:
    """The `Source` of a dataset of global batches, all of which every worker reads.

    Args:
        dataset: of any kind; the first axis of each array is that of the examples.
        replicas: R.
        why: the reason.
    """

    def __init__(self, dataset: Any, replicas: int, why: str = "") -> None:
        self.stream = Stream(dataset, parts=replicas)
        self.way = Way.joint(why)
        self._replicas = replicas

    def begin(self) -> "GlobalBatchPass":
        """Begin a pass."""
        return self.begun(self.stream.begin())

    def begun(self, reader: Reader | None) -> "GlobalBatchPass":
        """Return a pass in progress; without a reader, its elements are passed to `element`."""
        return GlobalBatchPass(self.stream, reader, self._replicas)

    def form(self) -> Form:
        """Return the form of the elements."""
        return self.stream.form()

    def sample(self) -> Nest:
        """Return a sample element, read as Keras does."""
        return self.stream.sample()

    def peek(self) -> Nest:
        """Return the first element of the next pass."""
        return self.stream.peek()

    @property
    def length(self) -> float | None:
        """The dataset's own."""
        return self.stream.length

    @property
    def in_tensors(self) -> Any:
        """The `tf.data.Dataset` whose elements are split; None if the dataset is of another kind."""
        return self.stream.dataset if self.stream.is_tensorflow else None


class GlobalBatchPass:
    """One pass over a dataset of global batches."""

    def __init__(self, stream: Stream, reader: Reader | None, replicas: int) -> None:
        self.reader = reader
        self._stream = stream
        self._replicas = replicas
        self._taken = 0

    def __next__(self) -> Element:
        assert self.reader is not None
        return self.element(next(self.reader))

    def skip(self) -> None:
        """Read and discard an element."""
        assert self.reader is not None
        next(self.reader)
        self._taken += 1

    def element(self, nest: Nest) -> Element:
        """Split the next batch, a nest of NumPy arrays, over the replicas.

        Raises:
            DataError: it cannot be split.
        """
        specs = self._stream.known_form().specs if self._stream.is_tensorflow else None
        step, self._taken = self._taken, self._taken + 1
        return Element(nest, BatchValues(leaves_of(nest), self._replicas, step, specs))

    def form(self) -> Form:
        """Return the form of the elements."""
        if self.reader is not None and not self._stream.is_tensorflow:
            self.reader.peek()
        return self._stream.known_form()


class DividedSource(GlobalBatchSource):
    """The `Source` of a dataset whose global batches the workers read together, each the rows that it needs.

    Args:
        dataset: of any kind.
        reader: this worker.
        reading: the reading of the dataset; its batches are nests like those of the dataset.
    """

    def __init__(self, dataset: Any, reader: ReadingWorker, reading: Reading) -> None:
        super().__init__(dataset, reader.job.view.replicas)
        self.way = reading.way
        self._reader = reader
        self._reading = reading
        self._begun: DividedPass | None = None

    def begin(self) -> "DividedPass":  # type: ignore[override]
        """Begin a pass."""
        begun, self._begun = self._begun, None
        declared = self.stream.known_form() if self.stream.is_tensorflow else None
        return begun or DividedPass(self._reading.begin(), self._reader, declared)

    @property
    def in_tensors(self) -> None:
        """None: no `tf.data.Dataset` yields the elements as they are divided."""

    def form(self) -> Form:
        """Return the form of the elements, of which the next pass still yields the first."""
        if self.stream.is_tensorflow:
            return self.stream.form()
        self._begun = self._begun or self.begin()
        return self._begun.form()

    def peek(self) -> Nest:
        """Return the first element of the next pass, which still yields it; None if it is empty."""
        self._begun = self._begun or self.begin()
        return self._begun.peek()


class DividedPass:
    """One pass over a dataset whose global batches the workers read together.

    Args:
        batches: the batches of the pass.
        reader: this worker.
        declared: the form of the elements, if it is known without reading.
    """

    def __init__(
        self, batches: Iterator[GlobalBatch], reader: ReadingWorker, declared: Form | None = None
    ) -> None:
        self._batches = batches
        self._reader = reader
        self._declared = declared
        self._ahead: list[GlobalBatch] = []
        self._taken = 0

    def __next__(self) -> Element:
        batch = self.batch()
        values = ShareValues(batch, self._reader, f"batch {self._taken} of the dataset", self._declared)
        return Element(values.form.nest, values)

    def batch(self) -> GlobalBatch:
        """Take the next global batch.

        Raises:
            StopIteration: there is none.
        """
        batch = self._ahead.pop() if self._ahead else next(self._batches)
        self._taken += 1
        return batch

    def skip(self) -> None:
        """Skip an element, without reading rows."""
        self.batch()

    def form(self) -> Form:
        """Return the form of the elements.

        Raises:
            DataError: there is none.
        """
        if self._declared is not None:
            return self._declared
        first = self._first()
        if first is None:
            raise DataError("the dataset is empty, so the structure of its elements is unknown")
        return ShareValues(first, self._reader, f"batch {self._taken + 1} of the dataset").form

    def peek(self) -> Nest:
        """Return all of the next element without taking it; None at the end."""
        first = self._first()
        return None if first is None else first.read(slice(0, first.examples))

    def _first(self) -> GlobalBatch | None:
        if not self._ahead:
            self._ahead.extend(islice(self._batches, 1))
        return self._ahead[0] if self._ahead else None


class ShareValues:
    """The `Values` of a global batch whose rows are read when they are needed.

    Args:
        batch: the global batch.
        reader: this worker.
        what: names the batch in messages.
        declared: the form of the batch, if it is known without reading.
    """

    anywhere = True

    def __init__(
        self, batch: GlobalBatch, reader: ReadingWorker, what: str, declared: Form | None = None
    ) -> None:
        self._batch = batch
        self._declared = declared
        self._reader = reader
        self._replicas = reader.job.view.replicas
        self._what = what

    @cached_property
    def form(self) -> Form:
        """The form of the batch, from rows of this worker's replicas if it has some here."""
        if self._declared is not None:
            return self._declared
        own = self._reader.job.view.replicas_of(self._reader.job.worker)
        sample = own[0] if own and self.examples(own[0]) else 0
        nest = self._batch.share(sample, self._replicas).data()
        leaves = leaves_of(nest)
        count_examples(leaves, self._what)
        marks = keras.tree.map_structure(lambda leaf: None if leaf is None else True, nest)
        return Form(marks, tuple(spec_of(leaf) for leaf in leaves))

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of the leaves."""
        return self.form.specs

    def of(self, replica: int) -> Sequence[Any]:
        """Return the rows of a replica."""
        return leaves_of(self._batch.share(replica, self._replicas).data())

    def leaf(self, position: int, replica: int) -> Any:
        """Return the rows of a replica in one leaf."""
        return self.of(replica)[position]

    def examples(self, replica: int) -> int | None:
        """Return the number of rows of a replica."""
        return self._batch.share(replica, self._replicas).examples

    def check(self) -> bytes:
        """Return the check of the batch."""
        return self._batch.check()


class BatchValues:
    """The `Values` of a batch of which this worker holds all rows; each replica gets its share of them.

    Args:
        leaves: arrays whose first axis is that of the examples.
        replicas: R.
        step: the batch's index in its pass, from 0.
        specs: the specs of the shares; None for those of the leaves.

    Raises:
        DataError: the leaves have no examples, or different numbers of them.
    """

    anywhere = True

    def __init__(
        self,
        leaves: Sequence[npt.NDArray[Any]],
        replicas: int,
        step: int,
        specs: Sequence[Spec] | None = None,
    ) -> None:
        rows = count_examples(leaves, f"batch {step + 1} of the dataset")
        self.specs = tuple(specs or (spec_of(leaf) for leaf in leaves))
        self._replicas = replicas
        self._whole = GlobalBatch(
            rows,
            lambda rows: [leaf[rows] for leaf in leaves],
            lambda: digest_arrays([np.array(step), *leaves]),
        )
        self._check: bytes | None = None

    def of(self, replica: int) -> Sequence[Any]:
        """Return the rows of a replica."""
        rows: Sequence[Any] = self._share(replica).data()
        return rows

    def leaf(self, position: int, replica: int) -> Any:
        """Return the rows of a replica in one leaf."""
        return self.of(replica)[position]

    def examples(self, replica: int) -> int | None:
        """Return the number of rows of a replica."""
        return self._share(replica).examples

    def check(self) -> bytes:
        """Hash the whole batch and its index."""
        if self._check is None:
            self._check = self._whole.check()
        return self._check

    def _share(self, replica: int) -> Share:
        return self._whole.share(replica, self._replicas)


def count_examples(leaves: Sequence[npt.NDArray[Any]], what: str, *, may_be_empty: bool = False) -> int:
    """Return the number of examples of arrays, which is the size of the first axis of each.

    Raises:
        DataError: they have none, although they may not be empty, or different numbers of them.
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
