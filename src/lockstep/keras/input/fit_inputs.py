"""The inputs of `fit`, `evaluate` and `predict` as global batches, in adapters like Keras's own.

A `PyDataset` may change in `on_epoch_end`, so its number of batches and their order are those at the
beginning of each pass. The test whether a dataset that holds an iterator can be divided does not read from
it. The adapter of a generator, which reads two batches, is made when Keras makes its own, because inputs may
share a generator. Parts of a batch with different numbers of rows are divided in proportion if possible, and
refused otherwise.
"""

import struct
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from math import inf
from types import GeneratorType
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from lockstep.data.batch import Batch, GlobalBatch, LocalGrouping, PendingBatch
from lockstep.data.digest import digest_arrays, sample_rows
from lockstep.data.order import Indices, Shuffle, reader_of
from lockstep.errors import DataError
from lockstep.keras.input.batch_division import BatchDivision, division
from lockstep.keras.input.distributed_dataset import DistributedDataset
from lockstep.keras.input.grain_batches import grain_batches
from lockstep.keras.input.loader_reading import is_loader, keras_batch, loader_reading
from lockstep.keras.input.pipelines import Pipelines, PipelinesBatch
from lockstep.keras.input.readings import (
    JOINT_INPUT,
    PassNumbers,
    Reading,
    ReadingWorker,
    Way,
    joint_batch,
    read_batch,
)
from lockstep.keras.input.shards import shard_pipelines
from lockstep.keras.input.sources import GlobalBatchSource, Source
from lockstep.keras.input.sparse_rows import is_sparse
from lockstep.keras.input.stored_arrays import StoredArray, stored
from lockstep.keras.input.streams import easily_freed, host_nest, is_ragged, on_host, readable, refuse_ragged
from lockstep.keras.input.visits import (
    NO_EXAMPLES,
    OrderSeed,
    ReorderedDataset,
    draw_as_a_loader,
    first_of_pass,
    visits,
)
from lockstep.keras.nests import Nest, has_weights, parts_of
from lockstep.keras.private.common import (
    NUM_BATCHES_FOR_TENSOR_SPEC,
    ArrayDataAdapter,
    DataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    TorchDataLoaderAdapter,
    array_parts,
    backend_sparse,
    batches_of,
    can_convert_arrays,
    get_data_adapter,
    get_tensor_spec,
    is_grain_dataset,
    is_tf_dataset,
    is_torch_dataloader,
    sliceable,
    sliced_array,
    split_rows,
    standardized,
)

ARRAYS = Way.by_rows("arrays")
"""How workers read arrays."""

_sampled: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
"""A batch of each `PyDataset` that is not divided: reading it once more may change the following ones."""

AN_ITERATOR = "an iterator yields its batches once and in order; a keras.utils.PyDataset returns any of them"
"""The reason for joint reading of a generator."""


class GlobalInput(DataAdapter):  # type: ignore[misc]
    """An input that yields one batch per step, the same on every worker.

    Args:
        inner: Keras's adapter, for sizes and conversions.
        unsplit: whether to yield Keras's own batches instead, because one replica has nothing to split.

    Attributes:
        held: the number of bytes of arrays in memory from which this worker reads rows.
        plain_first: whether the next pass yields only one of Keras's own batches, to call a model on it.
        before_pass: called before drawing or reading for a pass.
        grouping: makes the batches of outer steps; None without local steps.
    """

    def __init__(self, inner: DataAdapter, *, unsplit: bool) -> None:
        self._inner = inner
        self._unsplit = unsplit
        self.held = 0
        self.plain_first = False
        self.before_pass: Callable[[], None] = _nothing
        self.grouping: LocalGrouping | None = None

    def batches(self) -> Iterator[Batch | PendingBatch]:
        """Begin the next pass over the input; yield its global batches, which may not be read yet."""
        raise NotImplementedError

    @property
    def way(self) -> Way:
        """How the workers read the input."""
        raise NotImplementedError

    def facts(self) -> dict[str, str]:
        """Return the facts that must be equal on all workers before the first batch."""
        return {"data reading": str(self.way)}

    def first(self) -> Any:
        """Return a batch as Keras reads one to build a model on JAX and PyTorch. It does not count as a pass.

        It draws from the random states as Keras does.
        """
        raise NotImplementedError

    def peek(self) -> Any:
        """Return a batch of the same kind; the next pass repeats everything read and drawn for it."""
        return self.first()

    @property
    def weighs(self) -> bool:
        """Whether the batches have sample weights. This reads one; all workers call it together."""
        # Validation data may have no examples.
        if self.known_batches == 0:
            return False
        try:
            return has_weights(self.batch_to_try())
        except StopIteration:
            return False
        except DataError as error:
            # The other workers may not know of another error.
            if str(error) != NO_EXAMPLES:
                raise
            return False

    def batch_to_try(self) -> Any:
        """Return a batch of the same kind that is equal on all workers, which call this together."""
        return self.peek()

    def get_jax_iterator(self) -> Iterator[Any]:
        """Yield the input of the JAX backend's train function; the pass begins with its first batch."""
        yield from self._next_pass()

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Begin a pass; yield the input of the PyTorch backend's train function."""
        return map(_tensors, self._next_pass())

    def _next_pass(self) -> Iterator[Any]:
        if self.plain_first:
            self.plain_first = False
            return iter([self.first()])
        batches = self.batches()
        if self.grouping is not None:
            return self.grouping.batches(batches)
        return map(_whole, batches) if self._unsplit else batches

    def get_tf_dataset(self) -> Any:
        """Return an iterable with the input of the TensorFlow backend's train function, a pass each time.

        If nothing is split, it is a `tf.data.Dataset` without a fixed batch size, as in Keras: a static
        number of examples changes the bits and Keras's losses of single outputs.
        """
        if not self._unsplit:
            return self
        import tensorflow as tf

        # tf.data takes a list for an array.
        signature = keras.tree.lists_to_tuples(get_tensor_spec(self._samples()))
        options = tf.data.Options()
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1
        return tf.data.Dataset.from_generator(self._optional, output_signature=signature).with_options(
            options
        )

    def _sample(self, batch: Any) -> Any:
        """Return a batch that was read to build a model with, in the form in which replicas get rows."""
        if self._unsplit:
            return batch
        leaves, pack = parts_of(batch)
        for leaf in leaves:
            refuse_ragged(leaf)
        return pack([on_host(leaf) if is_sparse(leaf) else leaf for leaf in leaves])

    def _samples(self) -> list[Any]:
        """Return the batches that Keras reads on TensorFlow to infer the form of batches."""
        return [self.peek()]

    def _optional(self) -> Iterator[Any]:
        import tensorflow as tf

        for data in self.get_jax_iterator():
            yield keras.tree.map_structure(
                lambda leaf: tf.experimental.Optional.empty(None) if leaf is None else leaf,
                keras.tree.lists_to_tuples(data),
            )

    def __iter__(self) -> Iterator[Any]:
        yield from map(_tensors, self.get_jax_iterator())

    @property
    def num_batches(self) -> int | None:
        """The number of batches in a pass, or None if it never ends."""
        batches: int | None = self._inner.num_batches
        return batches if batches is None or self.grouping is None else self.grouping.count(batches)

    @property
    def known_batches(self) -> int | None:
        """Number of batches in a pass, if it is known without reading."""
        return None if isinstance(self._inner, LateAdapter) else self.num_batches

    @property
    def batch_size(self) -> int | None:
        """Number of examples in a global batch, if known."""
        size: int | None = self._inner.batch_size
        return size

    def on_epoch_begin(self) -> None:
        """Notify the user's input that an epoch begins."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the user's input that an epoch has ended."""
        self._inner.on_epoch_end()


class ArrayInput(GlobalInput):
    """Indexable arrays: a worker reads only the rows of its own replicas."""

    way = ARRAYS

    def __init__(
        self,
        inner: ArrayDataAdapter,
        shuffle: Shuffle,
        seed: OrderSeed,
        reader: ReadingWorker,
        *,
        unsplit: bool,
    ) -> None:
        super().__init__(inner, unsplit=unsplit)
        self._job = reader.job
        arrays, self._count, size = array_parts(inner)
        leaves, self._pack = parts_of(arrays)
        rows = [_rows_of(leaf) for leaf in leaves]
        self.held = sum(getattr(leaf.array, "nbytes", 0) for leaf in rows if hasattr(leaf, "array"))
        self._readers = [_reader(leaf) for leaf in rows]
        self._hashed_readers = [reader for reader in self._readers if reader is not _read_nothing]
        self._visits = visits(self._count, size, shuffle, seed)

    def batches(self) -> Iterator[GlobalBatch]:
        """Begin the next pass; yield its global batches."""
        self.before_pass()
        draw_as_a_loader()
        return (self._batch(indices, step) for step, indices in enumerate(self._visits.begin()))

    def facts(self) -> dict[str, str]:
        """Describe shapes, dtypes and a sample of the rows."""
        sample = self._read(sample_rows(self._count))
        shapes = [f"{leaf.dtype}{[self._count, *leaf.shape[1:]]}" for leaf in sample]
        return super().facts() | {
            "data": " ".join(shapes),
            "data sample": digest_arrays(sample).hex()[:16],
            "order": self._visits.fact(),
        }

    def first(self) -> Any:
        """Return the first rows of a pass."""
        draw_as_a_loader()
        return self._rows_at(self._visits.sample())

    @property
    def weighs(self) -> bool:
        """Whether the batches have sample weights."""
        return has_weights(self._rows_at(slice(0, 1)))

    def peek(self) -> Any:
        """Return the first rows in the arrays' order, without drawing random numbers."""
        return self._rows_at(slice(0, min(self._count, self._inner.batch_size)))

    def _batch(self, indices: Indices, step: int) -> GlobalBatch:
        if isinstance(indices, slice):
            start, stop = indices.start, indices.stop
            return GlobalBatch(
                stop - start,
                self._job.view.replicas,
                lambda rows: self._rows_at(slice(start + rows.start, start + rows.stop)),
                lambda: self._check(start, struct.pack("<3q", step, start, stop)),
            )
        return GlobalBatch(
            len(indices),
            self._job.view.replicas,
            lambda rows: self._rows_at(indices[rows]),
            lambda: self._check(int(indices[0]), struct.pack("<q", step) + indices.tobytes()),
        )

    def _check(self, first: int, position: bytes) -> bytes:
        """Hash the row numbers of a step, and its first rows: no worker reads the rows of others."""
        return digest_arrays(self._read(slice(first, first + 1)), position)

    def _read(self, indices: Indices) -> list[Any]:
        return [read(indices) for read in self._hashed_readers]

    def _rows_at(self, indices: Indices) -> Any:
        return self._pack([read(indices) for read in self._readers])


class DatasetInput(GlobalInput):
    """A `PyDataset`: a batch of it is a global batch.

    Batches that depend only on their index are divided among the workers. All workers read other batches.
    """

    def __init__(
        self, dataset: ReorderedDataset, class_weight: Any, reader: ReadingWorker, *, unsplit: bool
    ) -> None:
        adapter = PyDatasetAdapter(dataset, class_weight=class_weight)
        super().__init__(adapter, unsplit=unsplit)
        self._standardize = standardized(adapter)
        self._dataset = dataset
        self._class_weight = class_weight
        self._reader = reader
        divided = "" if unsplit else division(dataset, self._standardize, reader)
        self._division = divided if isinstance(divided, BatchDivision) else None
        self._way = divided.way if isinstance(divided, BatchDivision) else Way.joint(divided)
        self._numbers = PassNumbers(reader)
        self._sampled: list[Any] = []

    @property
    def way(self) -> Way:
        """How the workers read the batches, which they divide if possible."""
        return self._way

    def batches(self) -> Iterator[GlobalBatch | PendingBatch]:
        """Begin the next pass; yield its global batches.

        Keras's readers end with the pass, because across epochs they would drop batches that they have read
        ahead.
        """
        self.before_pass()
        draw_as_a_loader()
        return self._read() if self._division is None else self._division.begin()

    def _read(self) -> Iterator[GlobalBatch]:
        number = self._numbers.next()
        for step, data in enumerate(self._read_by_keras()):
            yield joint_batch(data, self._reader, number, step)

    def _read_by_keras(self) -> Iterator[Any]:
        self._dataset.begin_pass()
        readers = PyDatasetAdapter(self._dataset, class_weight=self._class_weight)
        readers.on_epoch_begin()
        try:
            yield from batches_of(readers)
        finally:
            readers.on_epoch_end()

    def _next_pass(self) -> Iterator[Any]:
        """Begin a pass; if nothing is split, yield Keras's own batches, including sparse ones."""
        if not self._unsplit or self.plain_first:
            return super()._next_pass()
        self.before_pass()
        draw_as_a_loader()
        return map(_own_batch, self._read_by_keras())

    def facts(self) -> dict[str, str]:
        """Describe the number of batches, which are compared when they are read, and how they are read."""
        facts = super().facts()
        facts["data"] = f"{type(self._dataset.inner).__name__} of {self.num_batches} batches"
        order = self._dataset.fact()
        return facts if order is None else facts | {"order": order}

    def first(self) -> Any:
        """Return the first batch of a pass."""
        draw_as_a_loader()
        self._sampled = [self._sample(self._standardize(self._dataset.first()))]
        self._keep_sample()
        return self._sampled[0]

    def peek(self) -> Any:
        """Return a sample batch: one that was read before, or the first in the dataset's own order."""
        if self._sampled:
            return self._sampled[0]
        if self._division is not None:
            return self._sample(self._standardize(self._dataset.inner[0]))
        if keras.backend.backend() == "tensorflow":
            return self._samples()[0]
        dataset = self._dataset.inner
        batch = _sampled.get(dataset) if isinstance(dataset, Hashable) else None
        if batch is not None:
            return batch
        self._sampled = [self._sample(self._standardize(dataset[0]))]
        self._keep_sample()
        return self._sampled[0]

    def _keep_sample(self) -> None:
        if self._division is None and isinstance(self._dataset.inner, Hashable):
            _sampled[self._dataset.inner] = self._sampled[0]

    def get_tf_dataset(self) -> Any:
        """Return the input of the train function; read Keras's samples unless the batches are divided.

        A dataset that is not divided may yield other batches after each read.
        """
        if self._division is None:
            self._samples()
        return super().get_tf_dataset()

    def _samples(self) -> list[Any]:
        if not self._sampled:
            batches = NUM_BATCHES_FOR_TENSOR_SPEC
            if self.num_batches is not None:
                batches = min(batches, self.num_batches)
            read = (self._standardize(self._dataset.inner[number]) for number in range(batches))
            self._sampled = [self._sample(batch) for batch in read]
        return self._sampled

    def on_epoch_begin(self) -> None:
        """Notify the user's dataset that an epoch begins."""
        self._dataset.inner.on_epoch_begin()
        self._note_epoch()

    def on_epoch_end(self) -> None:
        """Notify the user's dataset that an epoch has ended."""
        self._dataset.inner.on_epoch_end()
        self._note_epoch()

    def _note_epoch(self) -> None:
        if self._division is not None:
            self._division.note_epoch()


class GrainInput(DatasetInput):
    """A `grain.MapDataset` that is read by its indices. As in Keras, the number of its batches is unknown."""

    num_batches = None

    @classmethod
    def divided(cls, dataset: Any, seed: OrderSeed, reader: ReadingWorker) -> "GrainInput | str":
        """Return an input that the workers divide, or why every worker has to read all of the dataset."""
        batches = grain_batches(dataset)
        if isinstance(batches, str):
            return batches
        divided_input = cls(ReorderedDataset(batches, False, seed), None, reader, unsplit=False)
        return divided_input if divided_input._division is not None else divided_input.way.why


class JointReading:
    """The `Reading` of a dataset that every worker reads completely.

    Args:
        inner: Keras's adapter of the dataset.
        reader: this worker.
        why: the reason.

    Attributes:
        inner: Keras's adapter.
    """

    def __init__(self, inner: DataAdapter, reader: ReadingWorker, why: str = "") -> None:
        self.inner = inner
        self._reader = reader
        self._numbers = PassNumbers(reader)
        self.way = Way.joint(why)

    def begin(self) -> Iterator[GlobalBatch]:
        """Begin the next pass; yield its global batches, which every worker reads."""
        return self._batches(_begin(self.inner))

    def _batches(self, begun: Iterator[Any]) -> Iterator[GlobalBatch]:
        number = self._numbers.next()
        for step, data in enumerate(begun):
            yield joint_batch(data, self._reader, number, step)


class LateAdapter(DataAdapter):  # type: ignore[misc]
    """Keras's adapter of a generator, made when Keras asks for the number of batches, for which it reads two.

    Until then, another input may take batches from the same generator, for example if one generator feeds
    both training and validation.

    Args:
        make: makes the adapter.
    """

    def __init__(self, make: Callable[[], DataAdapter]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> DataAdapter:
        return self._make()

    @property
    def num_batches(self) -> int | None:
        """Number of batches in a pass, which is unknown."""
        batches: int | None = self._made.num_batches
        return batches

    @property
    def batch_size(self) -> int | None:
        """Number of examples in a batch, which is unknown."""
        size: int | None = self._made.batch_size
        return size

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Begin a pass."""
        batches: Iterator[Any] = self._made.get_numpy_iterator()
        return batches


class StreamInput(GlobalInput):
    """An input that can only be read in its own order: `tf.data`, a PyTorch `DataLoader`, a generator.

    Args:
        inner: Keras's adapter.
        kind: the kind of the dataset, for messages.
        reading: how the workers read it.
    """

    def __init__(self, inner: DataAdapter, kind: str, reading: Reading, *, unsplit: bool) -> None:
        super().__init__(inner, unsplit=unsplit)
        self._kind = kind
        self._reading = reading
        self._begun: Iterator[GlobalBatch] | None = None

    @property
    def way(self) -> Way:
        """How the workers read the input: as `reading` does."""
        return self._reading.way

    def batches(self) -> Iterator[GlobalBatch]:
        """Begin the next pass; yield its global batches."""
        begun, self._begun = self._begun, None
        return begun or self._begin()

    def _begin(self) -> Iterator[GlobalBatch]:
        self.before_pass()
        return self._reading.begin()

    def get_jax_iterator(self) -> Iterator[Any]:
        """Yield the input of the train function: if nothing is split, as Keras does, sparse batches too."""
        adapter = type(self._inner).__name__
        yields_its_own = self._unsplit and adapter in ("GeneratorDataAdapter", "GrainDatasetAdapter")
        if not yields_its_own or self.plain_first or self._begun is not None:
            yield from super().get_jax_iterator()
            return
        self.before_pass()
        yield from self._inner.get_jax_iterator()

    def get_tf_dataset(self) -> Any:
        """Return Keras's own dataset if nothing is split."""
        return self._inner.get_tf_dataset() if self._unsplit else self

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass. At the end of an epoch, Keras also begins one, which draws the seeds of shuffles."""
        return map(_tensors, self._next_pass())

    def facts(self) -> dict[str, str]:
        """Describe the number of batches, which are compared when they are read, and how they are read."""
        return super().facts() | {"data": f"{self._kind} of {self.known_batches or 'some'} batches"}

    def first(self) -> Any:
        """Return the first batch by beginning a pass, as Keras does if a model is not built.

        On TensorFlow, Keras does not read a batch before training, so return zeros of the same kind.
        """
        if self._unsplit and keras.backend.backend() == "tensorflow":
            return keras.tree.map_structure(_zeros, self._inner.get_tf_dataset().element_spec)
        return self._sample(first_of_pass(_begin(self._inner)))

    def peek(self) -> Any:
        """Return the first batch of the next pass, which still yields it.

        Raises:
            DataError: the pass has no batch.
        """
        if self._unsplit and keras.backend.backend() == "tensorflow":
            return self.first()
        rest = self._begun or self._begin()
        if (first := next(rest, None)) is None:
            raise DataError(NO_EXAMPLES)
        self._begun = chain([first], rest)
        return first.whole()


class DistributedInput(StreamInput):
    """A dataset of global batches that the program has distributed, which is visited like the dataset itself.

    Args:
        source: the dataset, whose elements are `(x, y, sample_weight)` or its first parts.
    """

    def __init__(self, source: GlobalBatchSource) -> None:
        super().__init__(_DistributedSize(source), "a distributed dataset", source, unsplit=False)
        self._source = source

    def _begin(self) -> Iterator[GlobalBatch]:
        """Begin the next pass when Keras would begin one over the dataset itself."""
        self.before_pass()
        if self._source.is_joint:  # Divided readings draw and begin as Keras does.
            _draw_for(self._source)
            if not _begins_at_once(self._source.stream.dataset):
                return self._begin_late()
        return map(_as_tuples, self._source.begin())

    def _begin_late(self) -> Iterator[GlobalBatch]:
        yield from map(_as_tuples, self._source.begin())

    def first(self) -> Any:
        """Return an element to build a model with."""
        _draw_for(self._source)
        return _as_tuple(self._source.sample())


class PipelinesInput(GlobalInput):
    """Datasets of replicas that the program has distributed; elements are `(x, y, sample_weight)` or less.

    Args:
        source: the datasets.
    """

    def __init__(self, source: Pipelines) -> None:
        super().__init__(_DistributedSize(source), unsplit=False)
        self._source = source

    @property
    def way(self) -> Way:
        """How the workers read the datasets."""
        return self._source.way

    def batches(self) -> Iterator[PipelinesBatch]:
        """Yield the global batches of the next pass, which begins with the first one."""
        current = self._source.begin()
        while (counts := current.counts()) is not None:
            batch = current.batch()
            if any(counts):
                yield replace(batch, counts=counts, convert=_as_tuple)

    def facts(self) -> dict[str, str]:
        """Describe the number of elements, which are compared when they are read."""
        return super().facts() | {"data": f"a distributed dataset of {self.num_batches or 'some'} batches"}

    def first(self) -> Any:
        """Return an element to build a model with."""
        return _as_tuple(self._source.sample())

    def peek(self) -> Any:
        """Return the first element of the next pass, which still yields it."""
        return _as_tuple(self._source.peek())

    def batch_to_try(self) -> Any:
        """Return the first element of the first replica that has examples in it."""
        return _as_tuple(self._source.shared_example())


class _DistributedSize:
    """The attributes that Keras requires of an adapter, for a distributed dataset."""

    batch_size = None

    def __init__(self, source: Source) -> None:
        length = source.length
        self.num_batches = None if length is None or length == inf else int(length)

    def on_epoch_begin(self) -> None:
        """Do nothing: the dataset is not notified."""

    def on_epoch_end(self) -> None:
        """Do nothing: the dataset is not notified."""


def _draw_for(source: GlobalBatchSource) -> None:
    """Draw the random numbers that Keras draws at the start of a pass; a `DataLoader` draws them itself."""
    if not is_torch_dataloader(source.stream.dataset):
        draw_as_a_loader()


def _begins_at_once(dataset: Any) -> bool:
    """Whether Keras begins a pass over a dataset before it needs the first batch, as over a backend's own."""
    is_of_backend = {"tensorflow": is_tf_dataset, "torch": is_torch_dataloader}.get(keras.backend.backend())
    return is_of_backend is not None and bool(is_of_backend(dataset))


def _as_tuples(batch: GlobalBatch) -> GlobalBatch:
    """Return a batch whose rows have a form that Keras accepts."""
    return GlobalBatch(batch.examples, batch.replicas, lambda rows: _as_tuple(batch.read(rows)), batch.check)


def _as_tuple(nest: Nest) -> Any:
    """Return an element in a form that Keras accepts: a tuple for (x, y), not a list."""
    return tuple(nest) if isinstance(nest, list) else nest


def global_input(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None,
    steps: int | None,
    shuffle: Shuffle,
    class_weight: Any = None,
    seed: OrderSeed,
    unsplit: bool,
    reader: ReadingWorker,
    in_order: bool = False,
) -> GlobalInput:
    """Convert the input of `fit` or `evaluate` into global batches.

    Args:
        x: the input, or its examples.
        y: their targets.
        sample_weight: their weights.
        batch_size: the global batch size, for arrays.
        steps: the number of steps in an epoch.
        shuffle: whether arrays and a `PyDataset` are visited in a random order.
        class_weight: weights by class.
        seed: the seed of that order.
        unsplit: see `GlobalInput`.
        reader: this worker.
        in_order: whether the order of the examples counts, so that replicas do not have their own shards.

    Raises:
        DataError: an input of this type, or in this combination, is not supported.
        ValueError: Keras rejects sizes or combinations.
    """
    if isinstance(x, DistributedDataset):
        if y is not None or sample_weight is not None or class_weight is not None:
            raise DataError(
                "with a distributed dataset, targets and weights come from the dataset itself: make its "
                "elements (x, y) or (x, y, sample_weight), and give no class_weight"
            )
        if isinstance(x.source, Pipelines):
            return PipelinesInput(x.source)
        assert isinstance(x.source, GlobalBatchSource)
        return DistributedInput(x.source)
    if x is not None and can_convert_arrays((x, y, sample_weight)):
        inner = ArrayDataAdapter(
            x, y, sample_weight, batch_size, steps, shuffle=shuffle, class_weight=class_weight
        )
        return ArrayInput(inner, shuffle, seed, reader, unsplit=unsplit)
    if isinstance(x, keras.utils.PyDataset):
        if y is not None or sample_weight is not None:
            raise DataError("with a PyDataset, targets and sample weights come from the PyDataset itself")
        return DatasetInput(ReorderedDataset(x, bool(shuffle), seed), class_weight, reader, unsplit=unsplit)
    if is_tf_dataset(x) or is_torch_dataloader(x) or is_grain_dataset(x) or isinstance(x, GeneratorType):
        adapter = partial(get_data_adapter, x, y, sample_weight, class_weight=class_weight)
        inner = LateAdapter(adapter) if isinstance(x, GeneratorType) and not unsplit else adapter()
        if not (unsplit or in_order or reader.joint):

            def weighted(shard: Any) -> Any:
                return get_data_adapter(shard, class_weight=class_weight).get_tf_dataset()

            if source := shard_pipelines(reader.job, x, lambda: reader.seed, weighted):
                return PipelinesInput(source)
        reading: Reading = JointReading(inner, reader)
        if is_grain_dataset(x) and not unsplit:
            divided_input = GrainInput.divided(x, seed, reader)
            if isinstance(divided_input, GrainInput):
                return divided_input
            reading = JointReading(inner, reader, divided_input)
        elif not unsplit:
            reading = _reading(x, inner, reader, class_weight)
            inner = reading.inner if isinstance(reading, JointReading) else inner
        return StreamInput(inner, type(x).__name__, reading, unsplit=unsplit)
    raise DataError(
        f"an input of type {type(x).__module__}.{type(x).__qualname__} cannot be split over replicas; give "
        "arrays, nests of them, a keras.utils.PyDataset, a tf.data.Dataset, a torch DataLoader, a grain "
        "dataset or a generator"
    )


def _reading(dataset: Any, inner: DataAdapter, reader: ReadingWorker, class_weight: Any) -> Reading:
    """Return how the workers read a dataset with Keras's adapter `inner`: divided if that gives the same."""
    divided: Reading | str
    if reader.joint:
        divided = JOINT_INPUT
    elif isinstance(dataset, GeneratorType):
        divided = AN_ITERATOR
    elif is_loader(dataset):
        divided = loader_reading(dataset, reader)
    else:
        from lockstep.keras.input.tf_reading import tf_reading

        divided = tf_reading(inner.get_tf_dataset(), reader, weighed=class_weight is not None)
    if not isinstance(divided, str):
        return divided
    if is_tf_dataset(dataset):
        inner = get_data_adapter(readable(dataset), class_weight=class_weight)
    return JointReading(inner, reader, divided)


def split_validation(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[Any, Any]:
    """Split off the last `fraction` of the rows, as Keras does: ((x, y, weight), (x, y, weight))."""
    data = (x, y, sample_weight)
    # Keras would read all of an array on disk. This splits the numbers of the rows instead.
    numbered = keras.tree.map_structure(
        lambda leaf: leaf if stored(leaf) is None else np.arange(len(leaf)), data
    )
    halves = split_rows(numbered, fraction)
    training, validation = (keras.tree.map_structure(_half, data, half) for half in halves)
    return training, validation


def _half(leaf: Any, half: Any) -> Any:
    """Return the half of an array on disk whose rows have the numbers `half`; `half` itself for others."""
    array = stored(leaf)
    return half if array is None else array.part(slice(int(half[0]), int(half[-1]) + 1))


def _rows_of(leaf: Any) -> Any:
    """Return an array in a form with rows that can be read, such as Keras's own; None for None."""
    array = stored(leaf)
    return sliceable(leaf) if array is None else array


def _reader(leaf: Any) -> Callable[[Indices], Any]:
    """Return a function that reads rows of an array as Keras does, or faster."""
    if leaf is None:
        return _read_nothing
    if isinstance(leaf, StoredArray):
        return leaf.__getitem__
    if (array := sliced_array(leaf)) is not None:
        return reader_of(array)
    return lambda indices: leaf.convert_to_numpy(leaf[indices])


def _read_nothing(indices: Indices) -> None:
    """Return None for a missing array."""


def _begin(stream: DataAdapter) -> Iterator[Any]:
    """Begin a pass, and draw random numbers as Keras does, which begins backends' own inputs at once."""
    backend = keras.backend.backend()
    if isinstance(stream, TorchDataLoaderAdapter) and backend == "torch":
        return map(keras_batch, iter(stream.get_torch_dataloader()))
    draw_as_a_loader()
    if isinstance(stream, TFDatasetAdapter) and backend == "tensorflow":
        return _elements(stream)
    return _lazily(stream)


def _lazily(stream: DataAdapter) -> Iterator[Any]:
    """Yield a stream's batches; the pass begins with the first."""
    yield from _elements(stream) if isinstance(stream, TFDatasetAdapter) else stream.get_numpy_iterator()


def _elements(stream: DataAdapter) -> Iterator[Any]:
    """Begin a pass over a `tf.data.Dataset`, without Keras's copies of dense tensors."""
    dataset = stream.get_tf_dataset()
    kinds = {type(spec).__name__ for spec in keras.tree.flatten(dataset.element_spec)}
    if kinds <= {"TensorSpec", "NoneTensorSpec"}:
        return _to_the_end(map(host_nest, iter(_read_ahead(dataset))), stream.num_batches)
    return iter(stream.get_numpy_iterator())


def _to_the_end(batches: Iterator[Any], count: int | None) -> Iterator[Any]:
    """Yield batches. Read to the end before the last of `count`, which completes a cache of the dataset.

    Keras takes no more than `count`.
    """
    for number, batch in enumerate(batches, 1):
        if number == count:
            next(batches, None)
        yield batch


def _read_ahead(dataset: Any) -> Any:
    """Return a dataset without autotuning that reads one element ahead, as an autotuned one would.

    Reading two elements ahead would cost more than it gains, because the memory would not be reused.
    """
    freed = easily_freed(dataset)
    return freed if freed is dataset or "Prefetch" in type(dataset).__name__ else freed.prefetch(1)


def _own_batch(data: Any) -> Any:
    """Return a batch of a `PyDataset` as Keras gets it if nothing is split."""
    leaves, pack = parts_of(data)
    return pack([_own_leaf(leaf) for leaf in leaves])


def _own_leaf(leaf: Any) -> Any:
    if leaf is None or is_ragged(leaf):
        return leaf
    if is_sparse(leaf) and keras.backend.backend() != "torch":
        return backend_sparse(leaf)
    return on_host(leaf)


def _whole(batch: Batch | PendingBatch) -> Any:
    rows = read_batch(batch)
    assert isinstance(rows, GlobalBatch)
    return rows.whole()


def _nothing() -> None:
    """Do nothing before a pass."""


def _tensors(data: Any) -> Any:
    if isinstance(data, Batch | PendingBatch):
        return data
    return keras.tree.map_structure(_tensor, data)


def _tensor(leaf: Any) -> Any:
    return None if leaf is None else keras.ops.convert_to_tensor(leaf)


def _zeros(spec: Any) -> Any:
    if not hasattr(spec, "dtype"):
        return None  # This is tf.data's representation of a missing leaf.
    return np.zeros([1 if size is None else size for size in spec.shape], spec.dtype.as_numpy_dtype)
