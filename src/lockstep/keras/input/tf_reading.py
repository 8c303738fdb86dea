"""A `tf.data` pipeline whose last maps each worker computes for the rows of its own replicas.

A pipeline is cut below its last maps before `batch`. Every worker reads the part below the cut: the same
global batches of unmapped rows, which identify a batch. It feeds its own rows to a second pipeline, which
applies the same traced functions ahead of time. If it later needs rows of others, it also feeds these, so no
row is read again from the source.

A map that draws random numbers, with TensorFlow's operations or from Keras's generators, is traced again,
with stateless operations. Their numbers are a function of the seed, the pass and the row's place in the pass.
If maps of whole batches draw, every worker maps all rows, and the numbers follow from the batch's place.
"""

import re
import struct
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.data.batch import GlobalBatch
from lockstep.data.digest import digest_arrays
from lockstep.errors import DataError, ModelError
from lockstep.keras.input.readings import NOTHING_TO_DIVIDE, PassNumbers, ReadingWorker, Way, joint_batch
from lockstep.keras.input.streams import easily_freed, host_nest, on_host, readable
from lockstep.keras.input.tf_order import operations, yields_any_order
from lockstep.keras.input.visits import draw_as_a_loader
from lockstep.keras.nests import Nest, parts_of
from lockstep.keras.private.common import KERAS_SEED
from lockstep.keras.private.tensorflow import (
    BATCHES,
    CACHE,
    MAPS,
    OPTIONS,
    PREFETCH,
    REPEAT,
    SHUFFLE,
    SKIP,
    TAKE,
    MappedDataset,
    argument_of,
    as_result,
    autograph_status,
    batching_of,
    buffer_of,
    converted,
    count_of,
    definition_of,
    eagerly,
    element_of,
    function_of,
    in_batches,
    input_of,
    inputs_of,
    is_dense,
    is_traced,
    not_converted,
    plain_map,
    tensor_specs,
    tensors_of,
    traced_for,
    traced_python_function,
    unbatched,
)
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.keras.seeds import seed_of
from lockstep.keras.tf_random_ops import ElementDraws, counts_its_runs, drawn_from, signed

READ_AHEAD = 2
"""The minimum number of batches whose rows are mapped ahead of the step that needs them."""

_COUNTS = (REPEAT, TAKE, SKIP)
"""Operations that keep elements, and commute with maps of single ones."""
_UNSEEN = (PREFETCH, OPTIONS)
"""Operations that affect no value."""

_HARMLESS = frozenset(
    (
        *("LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2"),
        *("StatefulPartitionedCall", "If", "While", "Case", "Assert", "Print", "PrintV2"),
        *("StatelessRandomGetAlg", "TensorArrayV3", "TensorArrayWriteV3", "TensorArrayReadV3"),
    )
)
"""Operations that count as stateful, with the same result wherever and however often they run."""

_FREE = frozenset(("Placeholder", "Const", "Identity", "NoOp"))
"""Operations that take no time."""

_SEED = tf.TensorSpec((2,), tf.int64)
"""The seed of a row."""

_NUMBER = re.compile(r"_\d+")
"""The part of the names of functions that makes them unique."""

_PYTHON = ("PyFunc", "EagerPyFunc")
_QUEUE_CAPACITY = 1 << 20


def tf_reading(dataset: Any, reader: ReadingWorker, *, weighed: bool) -> "MappedReading | str":
    """Return a reading that divides the maps of a pipeline, or why every worker maps all rows.

    Args:
        dataset: the dataset that Keras makes from a `tf.data.Dataset`.
        reader: this worker.
        weighed: whether Keras has added a map of batches for the weights of classes.
    """
    weigh = None
    if weighed:
        weigh = input_of(dataset)
        dataset = input_of(weigh)
    parts = _cut(dataset)
    if isinstance(parts, str):
        return parts
    if not is_dense(parts.every_map[-1].element_spec):
        return parts.why_joint or "the pipeline has ragged or sparse tensors: make them dense in .map"
    maps = _prepared(parts)
    if isinstance(maps, str):
        return parts.why_joint or maps
    return MappedReading(parts, maps, weigh, reader)


@dataclass(frozen=True)
class _Parts:
    """A pipeline in parts.

    Attributes:
        rows: the dataset of unmapped rows.
        maps: the operations that map single rows, the first one first.
        batch_maps: the operations that map whole batches and draw random numbers, the first one first.
        batches: the dataset of batches of unmapped rows.
        options: the options of the pipeline.
        ahead: the number of batches that the pipeline itself reads ahead.
        why_joint: why every worker maps all rows; empty if rows are divided.
    """

    rows: Any
    maps: Sequence[Any]
    batch_maps: Sequence[Any]
    batches: Any
    options: Any
    ahead: int
    why_joint: str

    @property
    def every_map(self) -> Sequence[Any]:
        """All maps, in the order in which they are applied."""
        return (*self.maps, *self.batch_maps)


def _cut(dataset: Any) -> _Parts | str:
    """Cut a pipeline below its last maps before `batch`; return why that is impossible, if it is."""
    if yields_any_order(dataset):
        return (
            "all workers must read the same order, so deterministic=False is ignored: "
            "remove deterministic=False, and they can divide the maps"
        )
    above: list[Any] = []
    batch_maps: list[Any] = []
    operation = dataset
    while isinstance(operation, (*MAPS, *_COUNTS, *_UNSEEN)):
        (batch_maps if isinstance(operation, MAPS) else above).append(operation)
        operation = input_of(operation)
    batch = operation
    why_joint = _above_batch(batch_maps[0]) if batch_maps else ""
    if not isinstance(batch, BATCHES):
        return why_joint or _above_batch(batch)
    maps: list[Any] = []
    moved: list[Any] = []
    counted: list[Any] = []
    operation = input_of(batch)
    while isinstance(operation, (*MAPS, *_COUNTS, *_UNSEEN)):
        if isinstance(operation, MAPS):
            maps.append(operation)
            counted = moved.copy()
        elif isinstance(operation, _COUNTS):
            moved.append(operation)
        operation = input_of(operation)
    if batch_maps and not any(_draws(function_of(operation)) for operation in maps):
        maps, counted = [], []
    if not (maps or batch_maps):
        return _below_batch(operation)
    rows = _rebuilt(input_of(maps[-1] if maps else batch), counted)
    if not (_fixed(rows.element_spec) if maps else is_dense(rows.element_spec)):
        return why_joint or (
            "the elements before .map are not dense tensors of fixed shapes, so they cannot be read in "
            "batches: let the source yield values of fixed shapes, such as file names, and read them in .map"
        )
    batches = _rebuilt(rows.batch(*batching_of(batch)), above)
    buffers = [buffer_of(op) for op in above if isinstance(op, PREFETCH)]
    ahead = max([0, *buffers])
    return _Parts(
        rows=rows,
        maps=maps[::-1],
        batch_maps=batch_maps[::-1],
        batches=batches,
        options=dataset.options(),
        ahead=ahead,
        why_joint=why_joint,
    )


def _rebuilt(dataset: Any, operations: Sequence[Any]) -> Any:
    """Apply those operations that count elements to a dataset; the last one is applied first."""
    for operation in reversed(operations):
        if isinstance(operation, REPEAT):
            dataset = dataset.repeat(count_of(operation))
        elif isinstance(operation, TAKE):
            dataset = dataset.take(count_of(operation))
        elif isinstance(operation, SKIP):
            dataset = dataset.skip(count_of(operation))
    return dataset


def _fixed(spec: Any) -> bool:
    """Whether all rows of a dataset are dense tensors of one shape."""
    return is_dense(spec) and all(
        part.shape.is_fully_defined() for part in tf.nest.flatten(spec) if isinstance(part, tf.TensorSpec)
    )


def _above_batch(operation: Any) -> str:
    """Explain why a pipeline whose batches pass through `operation` is not divided."""
    if isinstance(operation, MAPS):
        return "the pipeline maps whole batches: call .map before .batch, on single examples"
    if isinstance(operation, SHUFFLE):
        return "the pipeline shuffles batches: call .shuffle before .map and .batch"
    if isinstance(operation, CACHE):
        return "the pipeline caches batches; without .cache, or with .cache before .map, .map is divided"
    if not _maps_below(operation):
        return NOTHING_TO_DIVIDE
    return f"the pipeline does not end with .map and .batch, but with {_name(operation)}"


def _below_batch(operation: Any) -> str:
    """Explain why a pipeline with `operation` between its maps and `batch` is not divided."""
    if not _maps_below(operation):
        return NOTHING_TO_DIVIDE
    name = _name(operation)
    if isinstance(operation, CACHE):
        return f"{name} keeps the mapped examples; without it, or with it before .map, .map is divided"
    return f"{name} follows .map: call .map after {name}, right before .batch"


def _maps_below(dataset: Any) -> bool:
    return isinstance(dataset, MAPS) or any(map(_maps_below, inputs_of(dataset)))


def _name(operation: Any) -> str:
    """Return the name of an operation's method, if its class shows it."""
    words = type(operation).__name__.strip("_").removesuffix("Dataset")
    return "." + "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in words)[1:]


@dataclass(frozen=True)
class _Map:
    """A map of rows, or of batches.

    Attributes:
        operation: the operation that the program has made.
        function: the traced function of the map.
    """

    operation: Any
    function: Any

    def apply(self, dataset: Any) -> MappedDataset:
        """Map another dataset."""
        one_thread = _in_a_row(self.function)
        return MappedDataset(dataset, self.operation, self.function, one_thread=one_thread)


def _in_a_row(function: Any) -> bool:
    """Whether each operation of a traced function needs the one before, so that one thread runs them fastest.

    Handing a small operation to another thread takes longer than the operation.
    """
    graph = function.function.graph
    if graph.as_graph_def().library.function:
        return False
    depths: dict[Any, int] = {}
    for operation in graph.get_operations():
        if operation.control_inputs:
            return False
        before = max((depths[tensor.op] for tensor in operation.inputs), default=0)
        depths[operation] = before + (operation.type not in _FREE)
    return max(depths.values()) == sum(operation.type not in _FREE for operation in depths)


@dataclass(frozen=True)
class _Maps:
    """The maps of a pipeline.

    Attributes:
        steps: the maps of single rows, in the order in which they are applied.
        batch_steps: the maps of whole batches.
        draw: whether they draw random numbers; the first argument of each is then the seed of a row, or the
            seeds of the rows of a batch. All maps but the last return it.
    """

    steps: Sequence[_Map]
    batch_steps: Sequence[_Map]
    draw: bool


def _prepared(parts: _Parts) -> _Maps | str:
    """Return a pipeline's maps, traced again if they draw random numbers, or why all workers map all rows."""
    functions = [function_of(operation) for operation in parts.every_map]
    refusals = [_refusal(function) for function in functions]
    for refusal in refusals:
        if refusal:
            return refusal
    if not any(_draws(function) for function in functions):
        if parts.batch_maps:
            return parts.why_joint
        return _Maps([_Map(*pair) for pair in zip(parts.maps, functions, strict=True)], (), draw=False)
    before = random_states()
    try:
        for operation, function in zip(parts.every_map, functions, strict=True):
            if _draws(function) and not _same_graph(function, _plainly_traced(operation)):
                return (
                    "a map that draws random numbers changes when it is traced again: use only Python "
                    "values that do not change in it, as with functools.partial"
                )
        steps = _traced_again(parts)
    except Exception as error:
        # Other messages may contain addresses, and the reasons must be equal on all workers.
        why = str(error) if isinstance(error, ModelError) else type(error).__name__
        return f"a map draws random numbers and cannot be traced with stateless operations: {why}"
    finally:
        set_random_states(before)
    for step in steps:
        if left := operations(step.function, counts_its_runs):
            return f"a map draws with the operation {left[0]}, which no stateless operation replaces"
        if refusal := _kept_state(step.function):
            return refusal
    last, expected = steps[-1].function.output_structure, functions[-1].output_structure
    if last != expected:
        return f"a map that draws random numbers returns {last}, not {expected}, when it is traced again"
    return _Maps(steps[: len(parts.maps)], steps[len(parts.maps) :], draw=True)


def _refusal(function: Any) -> str:
    """Return why a map must not be computed by only one worker, or an empty string if it may."""
    if not is_traced(function):
        return "a map has a legacy function"
    if operations(function, lambda node: node.op in _PYTHON):
        return (
            "a map calls Python code, which may keep a state: if its results depend only on its arguments, "
            "declare that by tf.numpy_function(..., stateful=False)"
        )
    return "" if _generators_only(function) else _kept_state(function)


def _generators_only(function: Any) -> bool:
    """Whether a map uses variables, all of which hold the states of Keras's generators."""
    variables = function.function.graph.variables
    return bool(variables) and all(KERAS_SEED in variable.name for variable in variables)


def _kept_state(function: Any) -> str:
    """Return the state used by a map that may differ from row to row, or an empty string if there is none."""
    if variables := [variable.name for variable in function.function.graph.variables]:
        return (
            f"a map uses the variable {variables[0]}: instead of tf.random.Generator, use "
            "keras.layers.Random*, tf.image.random_* or tf.random.uniform; instead of variables that are "
            "only read, constants"
        )
    if stateful := operations(function, _keeps_state):
        return f"a map has the operation {stateful[0]}, whose result may depend on earlier ones"
    return ""


def _plainly_traced(operation: Any) -> Any:
    """Trace the function of a map again, without changes."""
    traced = function_of(operation)
    return traced_for(traced_python_function(traced), argument_of(traced))


def _same_graph(traced: Any, other: Any) -> bool:
    """Whether two traced functions are equal, except for the seeds of random operations.

    They differ if a Python value that the function uses has changed since the program called `map`.
    """
    captures = zip(traced.function.captured_inputs, other.function.captured_inputs, strict=True)
    return _described(traced) == _described(other) and all(
        capture is other_capture for capture, other_capture in captures
    )


def _described(function: Any) -> list[bytes]:
    """Describe the operations of a traced function and of the functions that it calls, without seeds."""
    definition = function.function.graph.as_graph_def()
    parts = [definition.node, *(function.node_def for function in definition.library.function)]
    for part in parts:
        for node in part:
            node.ClearField("experimental_debug_info")
            for name in ("seed", "seed2"):
                node.attr.pop(name, None)
            for value in node.attr.values():
                for reference in [value.func] if value.HasField("func") else value.list.func:
                    reference.name = _NUMBER.sub("", reference.name)
    main, *called = (b"".join(node.SerializeToString(deterministic=True) for node in part) for part in parts)
    return [main, *sorted(called)]


def _draws(function: Any) -> bool:
    """Whether a map draws random numbers that depend on how often it has run."""
    return is_traced(function) and (_generators_only(function) or bool(operations(function, counts_its_runs)))


def _keeps_state(node: Any) -> bool:
    definition = definition_of(node.op)
    return (
        definition is not None
        and definition.is_stateful
        and node.op not in _HARMLESS
        and not counts_its_runs(node)
    )


def _traced_again(parts: _Parts) -> list[_Map]:
    """Trace the maps of a pipeline with random numbers derived from a seed, their first argument.

    The program's random states do not affect this: a map that used them would differ from the traced one.
    """
    status = autograph_status()
    seeded = (_SEED, parts.rows.element_spec)
    steps: list[_Map] = []
    counts: Counter[int] = Counter()
    for number, operation in enumerate(parts.every_map):
        if number == len(parts.maps):
            seeded = (in_batches(_SEED), argument_of(function_of(operation)))
        last = number == len(parts.every_map) - 1
        drawing = _drawing(function_of(operation), number, counts, status, last)
        function = traced_for(drawing, seeded)
        seeded = function.output_structure
        steps.append(_Map(operation, function))
    return steps


def _drawing(
    original: Any, number: int, counts: Counter[int], status: Any, last: bool
) -> Callable[[Any, Any], Any]:
    """Return the function of map `number` with a row's seed as its first argument, which it passes on.

    The seed of a batch is that of its first row.
    """

    def drawing(seed: Any, row: Any) -> Any:
        if _draws(original):
            function = converted(traced_python_function(original), status)
            seed_of_first = seed if seed.shape.rank == 1 else seed[0]
            with drawn_from(ElementDraws(seed_of_first, number, counts)):
                mapped = function(*row) if type(row) is tuple else function(row)
        else:
            tensors = original.function(*tensors_of(argument_of(original), row))
            mapped = element_of(original.output_structure, tensors)
        mapped = as_result(mapped)
        return mapped if last else (seed, mapped)

    return not_converted(drawing)


class MapStage:
    """A pipeline that maps groups of rows of one size, in the order in which they are fed.

    Args:
        maps: applied to single rows.
        specs: the specs of the tensors of a row.
        group_maps: applied to groups of mapped rows.
        size: the number of rows of a group.
        options: the options of the pipeline.

    Attributes:
        failed: whether a map has failed; no group follows.
    """

    def __init__(
        self, maps: Sequence[_Map], specs: Sequence[Any], group_maps: Sequence[_Map], size: int, options: Any
    ) -> None:
        self.failed = False
        self._queue = queue = tf.queue.FIFOQueue(_QUEUE_CAPACITY, [spec.dtype for spec in specs])

        def take(_: Any) -> Any:
            tensors = queue.dequeue() if len(specs) > 1 else [queue.dequeue()]
            return tuple(
                tf.ensure_shape(tensor, (size, *spec.shape))
                for tensor, spec in zip(tensors, specs, strict=True)
            )

        endless = tf.data.Dataset.from_tensors(0).repeat()
        dataset = plain_map(endless, take)
        if maps:
            dataset = unbatched(dataset)
            for step in maps:
                dataset = step.apply(dataset)
            dataset = dataset.batch(size, drop_remainder=True)
        for step in group_maps:
            dataset = step.apply(dataset)
        self._mapped = [iter(easily_freed(dataset.with_options(options)).prefetch(1))]
        self._waiting: deque[MappedRows] = deque()
        weakref.finalize(self, _free, queue, self._mapped)

    @property
    def idle(self) -> bool:
        """Whether all groups that were fed have been taken, and no map has failed."""
        return not (self._waiting or self.failed)

    def feed(self, tensors: Sequence[Any]) -> "MappedRows":
        """Begin to map a group of rows."""
        with tf.device("CPU:0"):
            self._queue.enqueue(tensors)
        rows = MappedRows(self)
        self._waiting.append(rows)
        return rows

    def next_group(self) -> None:
        """Wait for the next group of mapped rows.

        Raises:
            DataError: a map has failed.
        """
        if self.failed:
            raise DataError("a map has failed on earlier rows: see the first error")
        try:
            mapped = self._mapped[0].get_next()
        except tf.errors.OpError as error:
            self.failed = True
            text = re.sub("^{{.*?}} ", "", error.message)
            raise DataError(f"a map of a tf.data pipeline failed: {text}") from error
        self._waiting.popleft().data = host_nest(mapped)


def _free(queue: Any, mapped: list[Any]) -> None:
    """Free a pipeline before its queue, because a thread that waited for rows of a freed queue would crash.

    This may happen at any time, even while a graph is being built.
    """
    with eagerly():
        queue.close(cancel_pending_enqueues=True)
        mapped.clear()


class MappedRows:
    """A group of rows that a stage maps."""

    def __init__(self, stage: MapStage) -> None:
        self._stage = stage
        self.data: Nest = None

    def result(self) -> Nest:
        """Wait for the mapped rows; return a nest of arrays."""
        while self.data is None:
            self._stage.next_group()
        return self.data


class UnmappedBatch:
    """A global batch of unmapped rows, and the groups of them that have been fed to be mapped.

    Args:
        tensors: the rows.
        start: the number of rows in the pass before it.
        step: its index in the pass, from 0.

    Attributes:
        begun: whether the rows of this worker's replicas have been fed.
    """

    def __init__(self, tensors: Sequence[Any], start: int, step: int) -> None:
        self.tensors = tensors
        self.examples = int(tensors[0].shape[0])
        self.start = start
        self.step = step
        self.begun = False
        self._fed: list[tuple[slice, MappedRows]] = []

    def identity(self) -> bytes:
        """Hash the numbers of the first row, and the start.

        Strings are omitted, because names of files may differ between workers that use different folders.
        """
        numbers = (tensor for tensor in self.tensors if tensor.dtype != tf.string)
        first = (on_host(_slice(tensor, slice(0, 1))) for tensor in numbers)
        return digest_arrays(first, struct.pack("<3q", self.step, self.start, self.examples))

    def whole(self) -> Nest:
        """Wait for a batch all of whose rows have been fed at once; return it mapped."""
        ((_, rows),) = self._fed
        return rows.result()

    def feed(self, rows: slice, feed: Callable[[slice], MappedRows]) -> None:
        """Feed those of the rows that have not been fed."""
        for gap in self._gaps(rows):
            self._fed.append((gap, feed(gap)))

    def _gaps(self, rows: slice) -> list[slice]:
        gaps, start = [], rows.start
        for fed, _ in sorted(self._fed, key=lambda pair: pair[0].start):
            if start < min(fed.start, rows.stop):
                gaps.append(slice(start, min(fed.start, rows.stop)))
            start = max(start, fed.stop)
        return [*gaps, slice(start, rows.stop)] if start < rows.stop else gaps

    def mapped(self, rows: slice) -> Nest:
        """Wait for rows that have been fed; return them mapped."""
        parts = [
            _rows_of(mapped.result(), slice(max(rows.start, fed.start) - fed.start, rows.stop - fed.start))
            for fed, mapped in sorted(self._fed, key=lambda pair: pair[0].start)
            if max(rows.start, fed.start) < min(rows.stop, fed.stop)
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)


def _rows_of(nest: Nest, rows: slice) -> Nest:
    leaves, pack = parts_of(nest)
    return pack([None if leaf is None else leaf[rows] for leaf in leaves])


def _joined(nests: Sequence[Nest]) -> Nest:
    """Join the rows of nests."""
    _, pack = parts_of(nests[0])
    columns = zip(*(parts_of(nest)[0] for nest in nests), strict=True)
    return pack([None if column[0] is None else np.concatenate(column) for column in columns])


class MappedPass:
    """A pass over a pipeline.

    Args:
        feed: begins to map a group of rows.
        reader: this worker.
        number: the number of the pass.
        draw: whether the maps draw random numbers.
        whole: whether every worker maps all rows.
        ahead: the number of batches to map ahead.
    """

    def __init__(
        self,
        feed: Callable[[int, Sequence[Any]], MappedRows],
        reader: ReadingWorker,
        number: int,
        *,
        draw: bool,
        whole: bool,
        ahead: int,
    ) -> None:
        self._feed_rows = feed
        self._reader = reader
        self._number = number
        self._key = signed(seed_of(reader.seed, number)) if draw else None
        self._whole = whole
        self._ahead = ahead
        self._following: deque[UnmappedBatch] = deque()

    def batches(self, rows: Iterator[Sequence[Any]]) -> Iterator[GlobalBatch]:
        """Yield the global batches of batches of unmapped rows.

        Rows are mapped ahead while batches are read, so skipped batches do not cost maps.
        """
        step = start = 0
        while True:
            while len(self._following) <= self._ahead and (tensors := next(rows, None)) is not None:
                batch = UnmappedBatch(tensors, start, step)
                self._following.append(batch)
                step, start = step + 1, start + batch.examples
            if not self._following:
                return
            batch = self._following.popleft()
            yield self._mapped_by_all(batch) if self._whole else self._global(batch)

    def _mapped_by_all(self, batch: UnmappedBatch) -> GlobalBatch:
        """Map a whole batch, because only then is it known how many rows the maps return."""
        for following in (batch, *self._following):
            following.feed(slice(0, following.examples), partial(self._feed, following))
        return joint_batch(batch.whole(), self._reader, self._number, batch.step)

    def _global(self, batch: UnmappedBatch) -> GlobalBatch:
        def read(rows: slice) -> Nest:
            if rows.start == rows.stop:
                return _rows_of(read(slice(0, 1)), slice(0, 0))
            if not self._reader.job.joins:
                # A joiner computes all replicas of one batch by itself, and then only its own replicas.
                for following in (batch, *self._following):
                    self._feed_own(following)
            batch.feed(rows, partial(self._feed, batch))
            return batch.mapped(rows)

        return self._reader.partial_batch(batch.examples, read, batch.identity(), self._number, batch.step)

    def _feed_own(self, batch: UnmappedBatch) -> None:
        """Feed the rows of this worker's replicas, and those that all workers compare."""
        if batch.begun:
            return
        batch.begun = True
        compared = self._reader.compared_rows(batch.examples, self._number, batch.step)
        feed = partial(self._feed, batch)
        batch.feed(self._reader.own_rows(batch.examples), feed)
        if compared is not None:
            batch.feed(compared, feed)

    def _feed(self, batch: UnmappedBatch, rows: slice) -> MappedRows:
        size = rows.stop - rows.start
        whole = size == batch.examples
        tensors = [tensor if whole else _slice(tensor, rows) for tensor in batch.tensors]
        if self._key is not None:
            numbers = np.arange(batch.start + rows.start, batch.start + rows.stop)
            tensors.insert(0, np.stack([np.full(size, self._key), numbers], axis=1))
        return self._feed_rows(size, tensors)


def _slice(tensor: Any, rows: slice) -> Any:
    """Return rows of a tensor; NumPy's slice is faster, but would convert strings."""
    return tensor[rows] if tensor.dtype == tf.string else on_host(tensor)[rows]


class MappedReading:
    """The `Reading` of a pipeline whose maps each worker computes; maps of single rows, only for its rows.

    Args:
        parts: the parts of the pipeline.
        maps: its maps.
        weigh: Keras's map of whole batches that adds the weights of classes; None without them.
        reader: this worker.
    """

    def __init__(self, parts: _Parts, maps: _Maps, weigh: Any, reader: ReadingWorker) -> None:
        self._parts = parts
        self._maps = maps
        self._group_maps = list(maps.batch_steps)
        if weigh is not None:
            self._group_maps.append(_weighing(weigh, parts))
        self._reader = reader
        self._batches = readable(parts.batches.with_options(parts.options)).prefetch(1)
        self._stages: dict[int, MapStage] = {}
        self._numbers = PassNumbers(reader)
        if parts.why_joint:
            self.way = Way.joint(parts.why_joint)
            return
        names = "maps" if len(maps.steps) > 1 else "map"
        drawn = ", with random numbers by the place of a row in its pass" if maps.draw else ""
        self.way = Way.by_rows(f"the last {names} before .batch{drawn}")

    def begin(self) -> Iterator[GlobalBatch]:
        """Begin the next pass; yield its global batches."""
        draw_as_a_loader()
        # As in Keras, a pass begins at once on TensorFlow, and otherwise with its first batch.
        begun = iter(self._batches) if keras.backend.backend() == "tensorflow" else None
        return self._read(begun)

    def _read(self, begun: Any) -> Iterator[GlobalBatch]:
        spec = self._batches.element_spec
        elements = iter(self._batches) if begun is None else begun
        rows = (tensors_of(spec, element) for element in elements)
        ahead = max(self._parts.ahead, READ_AHEAD)
        # A pass that has ended early leaves groups, and perhaps errors, that the next one does not need.
        self._stages = {size: stage for size, stage in self._stages.items() if stage.idle}
        following = MappedPass(
            self._feed,
            self._reader,
            self._numbers.next(),
            draw=self._maps.draw,
            whole=bool(self._parts.batch_maps),
            ahead=ahead,
        )
        yield from following.batches(rows)

    def _feed(self, size: int, tensors: Sequence[Any]) -> MappedRows:
        """Begin to map a group of rows; pipelines for each size of a group serve all passes."""
        stage = self._stages.get(size)
        if stage is None or stage.failed:
            specs = tensor_specs(self._parts.rows.element_spec)
            specs = [_SEED, *specs] if self._maps.draw else specs
            stage = MapStage(self._maps.steps, specs, self._group_maps, size, self._parts.options)
            self._stages[size] = stage
        return stage.feed(tensors)


def _weighing(operation: Any, parts: _Parts) -> _Map:
    """Return Keras's map of batches, traced again for any number of mapped rows."""
    batch = parts.every_map[-1].element_spec
    if not parts.batch_maps:
        batch = tf.nest.map_structure(in_batches, batch)
    return _Map(operation, traced_for(traced_python_function(function_of(operation)), batch))
