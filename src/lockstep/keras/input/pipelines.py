"""Datasets with one pipeline per replica, which the worker that computes the replica reads.

A worker that takes over a replica creates its pipeline again and skips the elements that were read. Each
pipeline has its own random states, which are initially equal in all pipelines. They are in use while the
pipeline is created, a pass begins or an element is read. So pipelines shuffle in the same order before they
shard, and the number of pipelines in a process has no effect on the program's own random numbers.
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Communicator
from lockstep.data.batch import Batch, Share
from lockstep.data.digest import digest_arrays
from lockstep.data.input_context import InputContext
from lockstep.errors import DataError, InternalError
from lockstep.keras.input.batches_in_turn import batches_in_turn, has_fixed_shapes
from lockstep.keras.input.readings import Way
from lockstep.keras.input.sources import BatchValues, count_examples
from lockstep.keras.input.streams import Form, Reader, Stream, is_tensorflow, spec_of
from lockstep.keras.nests import Nest, leaves_of, packed
from lockstep.keras.per_replica import Spec
from lockstep.keras.randomness import RandomNumbers
from lockstep.keras.worker_exchange import Packed, pack, unpack
from lockstep.system.notes import note
from lockstep.topology import View
from lockstep.worker.job import Job
from lockstep.worker.tf_caches import caches_of_replica

_UNKNOWN = -1
_ENDLESS = -2
_ENDED = -1

_WAY = Way("each worker reads the datasets of its replicas", "distribute_datasets_from_function")

_EQUAL = (
    "the first batches of replicas {} and {} are equal; if replicas should read different "
    "examples, shard the dataset in dataset_fn, before or after you shuffle it: "
    "dataset.shard(context.num_input_pipelines, context.input_pipeline_id)"
)


class Pipelines:
    """The `Source` that a `dataset_fn` defines: one dataset per replica.

    Args:
        job: the job of the replicas.
        dataset_fn: creates the dataset of a replica from its `InputContext`; called on the worker that
            computes the replica when the worker first needs its examples.
        seed: the only source of the random numbers of the datasets, which are the same for all.
        way: how the workers read the datasets.
        compares: whether a note reports that two datasets begin with equal batches.
        in_turn: whether the datasets come from one dataset whose batches the replicas take in turn.

    Attributes:
        way: how the workers read them.
        read: for each pass, the number of elements requested so far.
    """

    def __init__(
        self,
        job: Job,
        dataset_fn: Callable[[InputContext], Any],
        seed: int,
        way: Way = _WAY,
        *,
        compares: bool = True,
        in_turn: bool = False,
    ) -> None:
        self.job = job
        self._dataset_fn = batches_in_turn(dataset_fn) if in_turn else dataset_fn
        self._seed = seed
        self._compares = compares and not in_turn
        self._in_turn = in_turn
        self.way = way
        self._pipelines: dict[int, Pipeline] = {}
        self.read: list[int] = []
        for replica in self.owned:
            self.pipeline(replica)

    @property
    def owned(self) -> range:
        """The replicas that this worker currently computes."""
        return self.job.view.replicas_of(self.job.worker)

    def pipeline(self, replica: int) -> "Pipeline":
        """Return the pipeline of a replica."""
        if replica not in self._pipelines:
            replicas, numbers = self.job.view.replicas, RandomNumbers(self._seed)
            context = InputContext(replicas, replica, replicas)
            with caches_of_replica(replica) if replicas > 1 else nullcontext():
                dataset = numbers.make(lambda: self._dataset_fn(context))
            # Batches of a fixed shape that replicas take in turn end together: no replica gets an empty batch
            # instead.
            whole = self._in_turn and is_tensorflow(dataset) and has_fixed_shapes(dataset)
            stream = Stream(dataset, numbers.drawn, parts=1 if whole else None)
            self._pipelines[replica] = Pipeline(stream, f"the dataset of replica {replica}")
        return self._pipelines[replica]

    @property
    def declares(self) -> bool:
        """Whether the pipelines declare the form of their elements."""
        return self.pipeline(self.owned[0]).stream.is_tensorflow

    def begin(self) -> "PipelinesPass":
        """Begin a pass over all of them; all workers do this together."""
        if self._compares and not self.read:
            self._warn_of_equals()
        self.read.append(0)
        return PipelinesPass(self, len(self.read) - 1, self.length)

    def values(self, batch: "PipelinesBatch", number: int) -> BatchValues:
        """Return the values of the replicas in a batch."""
        nest = batch.stand_in
        specs = self.form().specs if self.declares else tuple(map(spec_of, leaves_of(nest)))
        return BatchValues(batch, nest, specs, {})

    def form(self) -> Form:
        """Return the form of the elements."""
        return self.pipeline(self.owned[0]).stream.form()

    def sample(self) -> Nest:
        """Return the result of `peek`: beginning a pass here would change the count of passes."""
        return self.peek()

    def peek(self) -> Nest:
        """Return the first element of the next pass of an own replica, or zeros if all of these are empty."""
        return self.example_among(self.pipeline(replica).stream.peek() for replica in self.owned)

    def shared_example(self) -> Nest:
        """Return the first element of the next pass of the first replica that has examples in it.

        All workers call this together, and receive the same element: zeros if all pipelines are empty.

        Raises:
            DataError: the program has raised an error while this worker read.
        """
        label = "the first elements of the replicas' datasets"

        def first_of(replica: int) -> Nest:
            try:
                return self.pipeline(replica).stream.peek()
            except DataError:
                raise
            except Exception as error:
                raise DataError(f"cannot read the dataset of replica {replica}: {error!r}") from error

        counts = self.gather(lambda replica: _examples(first_of(replica)), label)
        if not any(counts):
            return self.zeros()
        first = next(replica for replica, examples in enumerate(counts) if examples)
        if len(self.job.view.workers) == 1:
            return first_of(first)

        def act(view: View, communicator: Communicator) -> list[Packed]:
            leaves: list[Packed] = []
            if first in view.replicas_of(self.job.worker):
                leaves = [pack("", leaf) for leaf in leaves_of(first_of(first))]
            blobs = communicator.gather(msgspec.msgpack.encode(leaves), what=label)
            return next(filter(None, (msgspec.msgpack.decode(blob, type=list[Packed]) for blob in blobs)))

        # Backends warn about arrays that cannot be written.
        leaves = [array.copy() for _, array in map(unpack, self.job.exchange(act))]
        return packed(self.peek(), leaves)

    def example_among(self, nests: Iterable[Nest]) -> Nest:
        """Return the first of some elements that has examples, or zeros like them if none has."""
        for nest in nests:
            if _examples(nest):
                return nest
        return self.zeros()

    def zeros(self) -> Nest:
        """Return an element of zeros like those of the pipelines."""
        form = self.form()
        return packed(form.nest, [_zeros(spec) for spec in form.specs])

    @property
    def length(self) -> float | None:
        """The number of elements of the longest pipeline; all workers read this together."""
        lengths = self.gather(self._length, "the lengths of the replicas' datasets")
        if _UNKNOWN in lengths:
            return None
        return float("inf") if _ENDLESS in lengths else max(lengths)

    def gather(self, count: Callable[[int], int], label: str) -> list[int]:
        """Return a number for each replica, computed by its worker; all workers call this together."""

        def act(view: View, communicator: Communicator) -> list[int]:
            counts = {replica: count(replica) for replica in view.replicas_of(self.job.worker)}
            blobs = communicator.gather(msgspec.msgpack.encode(counts), what=label)
            parts = [msgspec.msgpack.decode(blob, type=dict[int, int]) for blob in blobs]
            numbers = {replica: number for part in parts for replica, number in part.items()}
            return [numbers[replica] for replica in range(view.replicas)]

        return self.job.exchange(act)

    def _warn_of_equals(self) -> None:
        """Print a note, on the chief, if two replicas begin with the same examples."""
        digests = self.gather(self._first, "the first batches of the replicas' datasets")
        seen: dict[int, int] = {}
        for replica, digest in enumerate(digests):
            other = seen.setdefault(digest, replica)
            if digest and other != replica:
                if self.job.is_chief:
                    note(_EQUAL.format(other, replica))
                return

    def _first(self, replica: int) -> int:
        """Return a hash of a replica's first batch, or 0 if there is none."""
        nest = self.pipeline(replica).stream.peek()
        return 0 if nest is None else int.from_bytes(digest_arrays(leaves_of(nest))[:8], "little")

    def _length(self, replica: int) -> int:
        length = self.pipeline(replica).stream.length
        if length is None:
            return _UNKNOWN
        return _ENDLESS if length == float("inf") else int(length)


class Pipeline:
    """The dataset of one replica.

    Args:
        stream: the dataset.
        label: names it in messages.
    """

    def __init__(self, stream: Stream, label: str) -> None:
        self.stream = stream
        self._label = label
        self._passes = 0
        self._latest: Cursor | None = None

    def begin(self, read: Sequence[int]) -> "Cursor":
        """Begin a pass after earlier passes, in each of which `read` elements were read, here or elsewhere.

        The elements of a pass may depend on the number of elements read in earlier passes (`shuffle`,
        `repeat`), so elements that were not read here are read now.
        """
        if self._latest is not None and self._passes <= len(read):
            self._latest.go_to(read[self._passes - 1])
        for count in read[self._passes :]:
            self._new().go_to(count)
        self._passes = len(read) + 1
        self._latest = self._new()
        return self._latest

    def _new(self) -> "Cursor":
        return Cursor(self.stream.begin(), self._label)


class Cursor:
    """A position in one pass over the dataset of one replica."""

    def __init__(self, reader: Reader, label: str) -> None:
        self._reader = reader
        self._label = label
        self._read = 0
        self._element: Nest = None
        self._ended = False

    def at(self, index: int) -> Nest:
        """Return the element at an index, not smaller than in the last call, or None after the end.

        Raises:
            DataError: the element has already been passed.
        """
        if index + 1 < self._read:
            raise DataError(f"element {index + 1} of {self._label} has passed and was not kept")
        self.go_to(index + 1)
        return None if self._ended else self._element

    def go_to(self, count: int) -> None:
        """Read until `count` elements have been requested."""
        while self._read < count and not self._ended:
            try:
                self._element = next(self._reader)
                label = f"element {self._read + 1} of {self._label}"
                count_examples(leaves_of(self._element), label, may_be_empty=True)
                self._read += 1
            except StopIteration:
                self._element, self._ended = None, True


class PipelinesPass:
    """One pass over all pipelines, which ends when all have ended; ended ones yield no examples.

    Args:
        source: the pipelines.
        number: the number of the pass, from 0.
        length: the length of the longest pipeline; if it is None, workers tell each other before every
            element whether there is another.

    Attributes:
        number: the number of the pass.
    """

    def __init__(self, source: Pipelines, number: int, length: float | None) -> None:
        self._source = source
        self.number = number
        self._length = length
        self._taken = 0
        self._cursors: dict[int, Cursor] = {}
        for replica in source.owned:
            self.cursor(replica)

    def __next__(self) -> "PipelinesBatch":
        if self._length is None:
            if self.counts() is None:
                raise StopIteration
        elif self._taken >= self._length:
            self._refuse_more()
            raise StopIteration
        return self.batch()

    def skip(self) -> None:
        """Skip an element; each pipeline skips it when it is next read."""
        self._taken += 1
        self._request(self._taken)

    def counts(self) -> list[int] | None:
        """Return each replica's number of examples in the next element, or None if all pipelines have ended.

        All workers call this together.
        """
        self._request(self._taken + 1)

        def count(replica: int) -> int:
            nest = self.cursor(replica).at(self._taken)
            return _ENDED if nest is None else _examples(nest)

        counts = self._source.gather(count, f"element {self._taken + 1} of the replicas' datasets")
        if all(examples == _ENDED for examples in counts):
            return None
        return [max(0, examples) for examples in counts]

    def batch(self) -> "PipelinesBatch":
        """Take the next batch, of which at least one replica has an element."""
        index, self._taken = self._taken, self._taken + 1
        self._request(self._taken)
        nests = {replica: self.cursor(replica).at(index) for replica in self._source.owned}
        return PipelinesBatch(self, index, nests, self._source.example_among(nests.values()))

    def cursor(self, replica: int) -> Cursor:
        """Return the cursor of a replica's pass, which begins now if it was not read here."""
        if replica not in self._cursors:
            before = self._source.read[: self.number]
            self._cursors[replica] = self._source.pipeline(replica).begin(before)
        return self._cursors[replica]

    def _request(self, elements: int) -> None:
        """Record that `elements` elements of this pass have been requested."""
        self._source.read[self.number] = max(self._source.read[self.number], elements)

    def _refuse_more(self) -> None:
        """Read beyond the declared length; raise DataError if a dataset has more elements."""
        self._request(self._taken + 1)
        for replica in self._source.owned:
            if self.cursor(replica).at(self._taken) is not None:
                raise DataError(
                    f"the dataset of replica {replica} gives more than the {self._taken} elements that its "
                    "length promises; correct `__len__`, or remove it"
                )

    def form(self) -> Form:
        """Return the form of the elements."""
        return self._source.form()


@dataclass(eq=False)
class PipelinesBatch(Batch):
    """The next elements of all pipelines. Each replica's share is the element of its own pipeline.

    Attributes:
        current: the pass.
        index: the index of the elements in it, from 0.
        nests: the elements of replicas that this worker has read; None for those whose pipeline has ended.
        stand_in: an element of the same form, with examples; replicas without examples read it.
        counts: the number of examples of each replica; None before the workers have exchanged it.
        convert: converts the element of a replica.
    """

    current: PipelinesPass
    index: int
    nests: dict[int, Nest]
    stand_in: Nest
    counts: Sequence[int] | None = None
    convert: Callable[[Nest], Nest] = lambda nest: nest

    @property
    def examples(self) -> int:
        """The number of examples, over all replicas.

        Raises:
            InternalError: the workers have not exchanged the number.
        """
        if self.counts is None:
            raise InternalError("the workers have not exchanged the numbers of examples of their replicas")
        return sum(self.counts)

    def share(self, replica: int, seed: int = 0) -> Share:
        """Return the element of a replica.

        A worker that did not own the replica when the batch was taken reads its element now.
        """
        if self.counts is None:
            count, weight, start = _examples(self._nest(replica)), math.nan, 0
        else:
            count = self.counts[replica]
            weight, start = count / self.examples, sum(self.counts[:replica])
        return Share(replica, count, weight, seed, lambda: self._read(replica), start)

    def check(self) -> bytes:
        """Identify the elements by their position, because their data differ between replicas."""
        return struct.pack("<2Q", self.current.number, self.index)

    def is_here(self, replica: int) -> bool:
        """Whether this worker has read the element of a replica."""
        return replica in self.nests

    def _read(self, replica: int) -> Nest:
        nest = self._nest(replica)
        return self.convert(nest if _examples(nest) else self.stand_in)

    def _nest(self, replica: int) -> Nest:
        if replica not in self.nests:
            self.nests[replica] = self.current.cursor(replica).at(self.index)
        return self.nests[replica]


def _examples(nest: Nest) -> int:
    return 0 if nest is None else len(leaves_of(nest)[0])


def _zeros(spec: Spec) -> npt.NDArray[Any]:
    shape = [1 if size is None else size for size in spec.shape]
    return np.full(shape, b"", object) if spec.dtype == "string" else np.zeros(shape, spec.dtype)
