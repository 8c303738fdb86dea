"""Divides the reading of a map-style PyTorch `DataLoader`: each worker fetches its own replicas' items.

All workers iterate the loader's batch sampler, and make PyTorch's draws for it. So they know the items of
each batch, and a batch that is not read costs only its indices. The items of a replica are fetched and
collated together, by the loader's worker processes if it has some, with random states that depend on their
positions in the pass. So the values of a replica's rows do not depend on the worker that fetches them.
"""

import copy
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakSet

import keras
import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.data.batch import GlobalBatch, replica_rows
from lockstep.data.digest import digest_arrays
from lockstep.errors import DataError
from lockstep.keras.input.held_state import changed_path, held_generator, held_iterator, refers_to
from lockstep.keras.input.item_draws import ItemDraws, states_kept
from lockstep.keras.input.readings import (
    PassNumbers,
    ReadingWorker,
    Way,
    computed_once,
    rows_in_proportion,
)
from lockstep.keras.input.streams import on_host
from lockstep.keras.nests import parts_of

_PROBED = 8
"""The number of items that are read twice before a dataset is divided, or that of the replicas if higher."""

_JOINT = "read it whole on every worker: lockstep run --input joint"

Convert = Callable[[Any], Any]

_Form = tuple[tuple[np.dtype[Any], tuple[int, ...]] | None, ...]
"""Everything but the number of rows: the dtype and the shape of a row of each part of a batch."""


class _Items(NamedTuple):
    """Items of a dataset.

    Attributes:
        positions: their positions in the pass.
        indices: their indices in the dataset.
    """

    positions: Sequence[int]
    indices: list[Any]


def is_loader(dataset: Any) -> bool:
    """Whether a dataset is a `DataLoader`."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(dataset, data.DataLoader)


def loader_reading(
    loader: Any, reader: ReadingWorker, convert: Convert | None = None
) -> "LoaderReading | str":
    """Return how the workers divide the reading of a `DataLoader`; or the reason why they cannot.

    To decide, this reads a few items twice, with the same random states, from a copy of the batch sampler.
    The random states and the loader do not change.

    Args:
        loader: the `DataLoader`.
        reader: this worker.
        convert: converts results of the collate function to a nest of arrays; by default, as Keras does.
    """
    from torch.utils.data import IterableDataset, MapDataPipe

    from lockstep.keras.private.torch import iterates_as_defined

    kind = type(loader)
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no items that can be read alone; use a map-style dataset"
    if isinstance(loader.dataset, MapDataPipe):
        return "a data pipe can hold state; use a map-style dataset"
    if loader.batch_sampler is None:
        return "with batch_size=None, the dataset gives whole batches; give the DataLoader a batch size"
    if not iterates_as_defined(kind):
        return f"{kind.__qualname__} has its own iteration; use a plain DataLoader"
    code = (("dataset", loader.dataset), ("collate_fn", loader.collate_fn))
    if (path := held_generator(*code)) is not None:
        return (
            f"{path}, whose numbers depend on the items that were read before; draw from the global states "
            "of numpy.random, random or torch, which depend on the item here"
        )
    if (path := held_iterator(*code)) is not None:
        return f"{path}, which yields its elements once and in order: read by index"
    if loader.num_workers:
        start = ("worker_init_fn", loader.worker_init_fn)
        if (path := refers_to("get_worker_info", *code, start)) is not None:
            return f"{path} calls get_worker_info, so an item can depend on the process that reads it"
        if (path := changed_path(start)) is not None:
            return f"{path} changes objects in the worker processes, so an item can depend on its process"
    return _probed(loader, reader, convert or keras_batch)


class LoaderReading:
    """The `Reading` of a map-style `DataLoader` whose rows are read by the workers that compute them.

    Args:
        loader: the `DataLoader`.
        reader: this worker.
        convert: converts results of the collate function to a nest of arrays.
        drawn: whether an item is known to draw random numbers.
    """

    def __init__(self, loader: Any, reader: ReadingWorker, convert: Convert, drawn: bool) -> None:
        self._loader = loader
        self._reader = reader
        self._convert = convert
        self._source = _ReplicaSource(loader.dataset, loader.collate_fn, reader.seed, drawn)
        self._numbers = PassNumbers(reader)
        self.way = Way.by_rows("a map-style dataset, whose items are the same on any worker")

    def begin(self) -> Iterator[GlobalBatch]:
        """Begin the next pass; yield its global batches."""
        current = _LoaderPass(self._loader, self._reader, self._source, self._numbers, self._convert)
        if keras.backend.backend() == "torch":
            current.begin()  # Keras also does so there. Elsewhere, the first batch begins the pass.
        return current.batches()


class _ReplicaItems(NamedTuple):
    """The items to read of one batch.

    Attributes:
        number: the number of the pass.
        step: the index of the batch in the pass.
        items: the items of each replica.
    """

    number: int
    step: int
    items: dict[int, _Items]


class _ReplicaSource:
    """Reads the rows of a replica, in this process or in PyTorch's worker processes, as their dataset."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, drawn: bool = False) -> None:
        from torch.utils.data import default_collate

        self._dataset = dataset
        self._collate = collate
        self._by_rows = collate is default_collate
        self._seed = seed
        self._draws = ItemDraws(seed)
        self._draws.drawn = drawn

    @property
    def drawn(self) -> bool:
        """Whether an item has drawn random numbers."""
        return self._draws.drawn

    def __getitems__(self, request: "_ReplicaItems | _TwiceRead") -> Any:
        """Return the requested rows. PyTorch's worker processes call this."""
        return self[request] if isinstance(request, _ReplicaItems) else request.read(self)

    def __getitem__(self, request: _ReplicaItems) -> dict[int, Any]:
        """Return the rows of each replica as the collate function returns them.

        A dataset that reads several items at once reads those of a replica.
        """
        number, groups = request.number, list(request.items.values())
        if not hasattr(self._dataset, "__getitems__"):
            positions = [position for items in groups for position in items.positions]
            groups = [_Items(positions, [index for items in groups for index in items.indices])]
        samples = iter([sample for items in groups for sample in self.samples(number, items)])
        return {
            replica: self.collated(number, items, list(islice(samples, len(items.indices))))
            for replica, items in request.items.items()
        }

    def anew(self) -> "_ReplicaSource":
        """Return a source in which no item is known to draw."""
        return _ReplicaSource(self._dataset, self._collate, self._seed)

    def samples(self, number: int, items: _Items) -> list[Any]:
        """Return items of pass `number`."""
        return self._draws.read(number, items.positions, items.indices, self._fetch)

    def collated(self, number: int, items: _Items, samples: list[Any]) -> Any:
        """Return the result of the collate function for the samples of some items.

        Raises:
            DataError: the collate function draws random numbers.
        """
        if self._by_rows:
            return self._collate(samples)
        draws = ItemDraws(self._seed)
        (batch,) = draws.read(
            number, items.positions[:1], [samples], lambda groups: [self._collate(group) for group in groups]
        )
        if draws.drawn:
            raise DataError(
                "the DataLoader's collate_fn draws random numbers, which would depend on the rows that it "
                f"gets; draw them in the dataset, or {_JOINT}"
            )
        return batch

    def _fetch(self, indices: list[Any]) -> Sequence[Any]:
        """Return items as PyTorch does."""
        fetch = getattr(self._dataset, "__getitems__", None)
        samples: Sequence[Any] = fetch(indices) if fetch else [self._dataset[index] for index in indices]
        return samples


@dataclass(eq=False)
class _SampledBatch:
    """A batch as the batch sampler gives it.

    Attributes:
        step: its index in the pass.
        first: the position of its first item in the pass.
        indices: the indices of its items.
        next: the batch after it, if that has been sampled.
    """

    step: int
    first: int
    indices: list[Any]
    next: "_SampledBatch | None" = None

    def items(self, rows: slice) -> _Items:
        """Return the items of some rows."""
        positions = range(self.first + rows.start, self.first + rows.stop)
        return _Items(positions, self.indices[rows.start : rows.stop])

    @property
    def identity(self) -> bytes:
        """A hash of the batch's index, and of its items' indices if they are numbers or strings."""
        try:
            indices = np.asarray(self.indices)
        except (TypeError, ValueError, RuntimeError):
            indices = np.empty(0)
        hashed = indices if indices.dtype.kind != "O" else np.empty(0)
        return digest_arrays([hashed], struct.pack("<3q", self.step, self.first, len(self.indices)))


class _LoaderPass:
    """One pass over a loader.

    Args:
        loader: the `DataLoader`.
        reader: this worker.
        source: reads rows.
        numbers: numbers the passes over the loader.
        convert: converts rows to a nest of arrays.

    Attributes:
        number: the number of the pass, from 0, after its first batch has been taken.
    """

    def __init__(
        self,
        loader: Any,
        reader: ReadingWorker,
        source: _ReplicaSource,
        numbers: PassNumbers,
        convert: Convert,
    ) -> None:
        self.convert = convert
        self.loader = loader
        self.reader = reader
        self.source = source
        self.number = 0
        self._numbers = numbers
        self._sampled: Iterator[Any] | None = None
        self._following: deque[_SampledBatch] = deque()
        self._last: _SampledBatch | None = None
        self._steps = 0
        self._items = 0
        self._processes: _ReadAhead | None = None

    def begin(self) -> None:
        """Begin to sample, unless this has been done, and make PyTorch's draws for an iteration."""
        if self._sampled is None:
            self._sampled = _sampled(self.loader)
            self._look_ahead()

    def batches(self) -> Iterator[GlobalBatch]:
        """Yield the global batches."""
        self.number = self._numbers.next()
        self.begin()
        try:
            while (batch := self.following(0)) is not None:
                self._following.popleft()
                self._look_ahead()
                yield self._global_batch(batch)
        finally:
            self._processes = None

    def following(self, position: int) -> _SampledBatch | None:
        """Return the batch at a position among those that have not been taken, or None after the last."""
        assert self._sampled is not None
        while len(self._following) <= position:
            indices = next(self._sampled, None)
            if indices is None:
                return None
            batch = _SampledBatch(self._steps, self._items, list(indices))
            if self._last is not None:
                self._last.next = batch
            self._last = batch
            self._following.append(batch)
            self._steps += 1
            self._items += len(batch.indices)
        return self._following[position]

    def after(self, batch: _SampledBatch) -> _SampledBatch | None:
        """Return the batch after one that has been taken or follows, or None after the last.

        With local steps, several batches are taken before the first one is read.
        """
        if batch.next is None:
            self.following(len(self._following))
        return batch.next

    def _look_ahead(self) -> None:
        """Ask the sampler for the batches that PyTorch requests when a batch is taken."""
        if batches := self.loader.num_workers * (self.loader.prefetch_factor or 0):
            self.following(batches - 1)

    def _global_batch(self, batch: _SampledBatch) -> GlobalBatch:
        if not batch.indices:
            raise DataError(f"batch {batch.step + 1} of the input has no rows")
        rows = _BatchRows(self, batch)
        count, identity = len(batch.indices), batch.identity
        unformed = self.reader.partial_batch(count, rows.read, identity, self.number, batch.step)
        check = computed_once(lambda: xxhash.xxh3_128_digest(unformed.check() + rows.form()))
        return GlobalBatch(count, unformed.replicas, rows.read, check)

    def read_ahead(self, batch: _SampledBatch) -> dict[int, Any]:
        """Return the rows of replicas that PyTorch's processes have read; begin with this batch if needed."""
        if not self.loader.num_workers:
            return {}
        if self._processes is None or self._processes.step != batch.step:
            self._processes = _ReadAhead(self, batch)
        return next(self._processes)

    def read_now(self, batch: _SampledBatch, missing: dict[int, _Items]) -> dict[int, Any]:
        """Return at least the rows of replicas that were not read ahead.

        In a new view, the processes restart reading ahead at the first such batch.
        """
        request = _ReplicaItems(self.number, batch.step, missing)
        if not self.loader.num_workers:
            return self.source[request]
        if missing.keys() <= set(self.replicas_to_read(batch)):
            at, view = self._processes, self.reader.job.view.number
            if at is None or (at.step, at.view) != (batch.step, view):
                self._processes = at = _ReadAhead(self, batch)
            return next(at)
        rows: dict[int, Any] = next(_in_processes(self.loader, self.source, [request], 1))
        return rows

    def replicas_to_read(self, batch: _SampledBatch) -> list[int]:
        """Return the replicas with rows in a batch that this worker computes or compares in this view."""
        view = self.reader.job.view
        owned = view.replicas_of(self.reader.job.worker)
        compared = self.reader.compared_replica(self.number, batch.step)
        return [
            replica
            for replica in range(min(view.replicas, len(batch.indices)))
            if replica in owned or replica == compared
        ]


class _ReadAhead:
    """PyTorch's worker processes, which read this worker's rows ahead, beginning with a batch.

    Attributes:
        step: the step whose rows they return next.
        view: the number of the view in which they began.
    """

    def __init__(self, current: _LoaderPass, batch: _SampledBatch) -> None:
        self.step, self.view = batch.step, current.reader.job.view.number
        self._read = _in_processes(current.loader, current.source, _requests(current, batch))

    def __next__(self) -> dict[int, Any]:
        rows: dict[int, Any] = next(self._read)
        self.step += 1
        return rows


def _in_processes(
    loader: Any, source: "_ReplicaSource", requests: Iterable[Any], processes: int | None = None
) -> Iterator[Any]:
    """Return an iterator over the results of a loader's worker processes, in the order of the requests.

    If a loader has worker processes, no other process reads its dataset, because later forks would share a
    file that an item opens.
    """
    import torch
    from torch.utils.data import DataLoader

    return iter(
        DataLoader(
            source,
            batch_sampler=requests,
            num_workers=processes or loader.num_workers,
            collate_fn=_unchanged,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),
            prefetch_factor=loader.prefetch_factor,
        )
    )


def _requests(current: _LoaderPass, batch: _SampledBatch | None) -> Iterator[_ReplicaItems]:
    """Yield the items to read of `batch` and of later batches, in the view in which PyTorch asks for them."""
    while batch is not None:
        examples, replicas = len(batch.indices), current.reader.job.view.replicas
        rows = {
            replica: batch.items(replica_rows(examples, replica, replicas))
            for replica in current.replicas_to_read(batch)
        }
        yield _ReplicaItems(current.number, batch.step, rows)
        batch = current.after(batch)


class _BatchRows:
    """The rows of a batch, which are read when they are first needed, each replica's rows together."""

    def __init__(self, current: _LoaderPass, batch: _SampledBatch) -> None:
        self._pass = current
        self._batch = batch
        self._examples = len(batch.indices)
        self._replicas = current.reader.job.view.replicas
        self._parts: dict[int, tuple[list[Any], Callable[[Sequence[Any]], Any]]] = {}
        self._form: _Form = ()
        self._was_read = False

    def read(self, rows: slice) -> Any:
        """Return some rows as a nest of arrays."""
        first, last = self._replica_with(rows.start), self._replica_with(max(rows.stop - 1, rows.start))
        self._need(range(first, last + 1))
        taken = []
        for replica in range(first, last + 1):
            leaves, pack = self._parts[replica]
            span = self._rows(replica)
            start, stop = max(rows.start, span.start) - span.start, min(rows.stop, span.stop) - span.start
            if stop - start < span.stop - span.start:
                part = slice(start, stop)
                count = span.stop - span.start
                leaves = [
                    leaf if leaf is None else leaf[rows_in_proportion(part, count, leaf)] for leaf in leaves
                ]
            taken.append(leaves)
        if len(taken) == 1:
            return pack(taken[0])
        return pack(
            [None if column[0] is None else np.concatenate(column) for column in zip(*taken, strict=True)]
        )

    def form(self) -> bytes:
        """Describe the rows that this worker reads in this step, or those of replica 0 if there are none."""
        self._need(self._pass.replicas_to_read(self._batch) or [0])
        return _text(self._form).encode()

    def _need(self, replicas: Sequence[int]) -> None:
        """Read the rows of replicas with examples, unless this has been done.

        Raises:
            DataError: the rows of replicas do not fit together.
        """
        if not self._was_read:
            self._was_read = True
            self._keep(self._pass.read_ahead(self._batch))
            replicas = sorted({*replicas, *self._pass.replicas_to_read(self._batch)})
        missing = {
            replica: self._batch.items(self._rows(replica))
            for replica in replicas
            if replica not in self._parts
        }
        if missing:
            self._keep(self._pass.read_now(self._batch, missing))

    def _keep(self, rows_of_replicas: dict[int, Any]) -> None:
        for replica, rows in rows_of_replicas.items():
            self._add(replica, rows)

    def _add(self, replica: int, rows: Any) -> None:
        span = self._rows(replica)
        part = parts_of(checked_part(self._pass.convert(rows), span.stop - span.start))
        form = tuple(None if leaf is None else (leaf.dtype, leaf.shape[1:]) for leaf in part[0])
        if self._parts and form != self._form:
            raise DataError(
                f"batch {self._batch.step + 1} of the DataLoader has rows of {_text(self._form)}, and rows "
                f"of {_text(form)} for replica {replica}: the items have different forms, or the collate_fn "
                "makes rows that depend on the other rows, such as padding to the longest; give all rows one "
                f"form, or {_JOINT}"
            )
        self._parts[replica], self._form = part, form

    def _rows(self, replica: int) -> slice:
        return replica_rows(self._examples, replica, self._replicas)

    def _replica_with(self, row: int) -> int:
        """Return the replica that has a row; for rows after the last, the last replica with examples."""
        replicas = range(min(self._replicas, self._examples))
        return next((replica for replica in replicas if row < self._rows(replica).stop), replicas[-1])


def _probed(loader: Any, reader: ReadingWorker, convert: Convert) -> LoaderReading | str:
    """Return the `LoaderReading` if some items are equal when they are read twice, or the reason."""
    try:
        with states_kept():
            return _compared(loader, reader, convert)
    except DataError as error:
        return str(error)
    except Exception as error:  # Joint reading raises it again, if it is an error of the program.
        return f"reading some items fails with {type(error).__name__}"


def _compared(loader: Any, reader: ReadingWorker, convert: Convert) -> LoaderReading | str:
    """Read and collate some items together, and again in the groups of replicas, the last first."""
    replicas = reader.job.view.replicas
    try:
        sampler = copy.deepcopy(loader.batch_sampler, {id(part): part for part in _shared(loader.dataset)})
    except Exception as error:
        return (
            f"the batch sampler cannot be copied ({type(error).__name__}); use a sampler of torch.utils.data"
        )
    first_batch = next(iter(sampler), None)
    if first_batch is None:
        return "it has no batches"
    indices = list(first_batch)[: max(_PROBED, replicas)]
    source = _ReplicaSource(loader.dataset, loader.collate_fn, reader.seed)
    request = _TwiceRead(replicas, indices)
    items = next(_in_processes(loader, source, [request], 1)) if loader.num_workers else request.read(source)
    once, again = items.drawn
    if once != again:
        return "the dataset keeps values that it has drawn; draw in each item, or store the values earlier"
    joint, second = (checked_part(convert(batch), len(indices)) for batch in (items.joint, items.second))
    parts = [
        (rows, checked_part(convert(part), rows.stop - rows.start)) for rows, part in items.parts.items()
    ]
    if all(_same_rows(joint, len(indices), rows, part) for rows, part in parts):
        return LoaderReading(loader, reader, convert, once)
    if _same_rows(joint, len(indices), slice(0, len(indices)), second):
        return "the collate_fn combines rows of a batch; make each row from one item"
    return "an item differs when it is read again; make it depend on its index and on random states only"


class _FirstItems(NamedTuple):
    """The items of a batch, read and collated together, and again in the groups of replicas, the last first.

    Attributes:
        drawn: whether items have drawn random numbers in the first and in the second reading.
        joint: the batch.
        parts: the items of the second reading, collated for each replica, by its rows.
        second: the items of the second reading, collated together.
    """

    drawn: tuple[bool, bool]
    joint: Any
    parts: dict[range, Any]
    second: Any


@dataclass(frozen=True)
class _TwiceRead:
    """Asks for items to be read twice.

    Attributes:
        replicas: R.
        indices: the indices of the items.
    """

    replicas: int
    indices: list[Any]

    def read(self, source: _ReplicaSource) -> _FirstItems:
        """Read the items with equal random states."""
        batch, examples = _SampledBatch(0, 0, self.indices), len(self.indices)
        once, again = source.anew(), source.anew()
        whole = batch.items(slice(0, examples))
        samples = once.samples(0, whole)
        groups: dict[range, list[Any]] = {}
        for replica in reversed(range(min(self.replicas, examples))):
            rows = replica_rows(examples, replica, self.replicas)
            groups[range(rows.start, rows.stop)] = again.samples(0, batch.items(rows))
        in_order = sorted(groups.items(), key=lambda group: group[0].start)
        return _FirstItems(
            (once.drawn, again.drawn),
            once.collated(0, whole, samples),
            {
                rows: again.collated(0, batch.items(slice(rows.start, rows.stop)), group)
                for rows, group in in_order
            },
            again.collated(0, whole, [sample for _, group in in_order for sample in group]),
        )


def _shared(dataset: Any) -> Iterator[Any]:
    """Yield a dataset, its inner datasets and the objects they hold, which a sampler's copy shares."""
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        yield part
        members = getattr(part, "__dict__", {})
        yield from members.values()
        waiting.extend(members[name] for name in ("dataset",) if name in members)
        several = members.get("datasets")
        waiting.extend(several if isinstance(several, list | tuple) else [])


def _same_rows(joint: Any, examples: int, rows: slice | range, part: Any) -> bool:
    """Whether a part of a batch has the bits of its rows in the whole batch."""
    whole, rows_of_part = parts_of(joint)[0], parts_of(part)[0]
    if len(whole) != len(rows_of_part) or [leaf is None for leaf in whole] != [
        leaf is None for leaf in rows_of_part
    ]:
        return False
    rows = slice(rows.start, rows.stop)
    expected = [leaf[rows_in_proportion(rows, examples, leaf)] for leaf in whole if leaf is not None]
    return digest_arrays(expected) == digest_arrays(leaf for leaf in rows_of_part if leaf is not None)


def keras_batch(batch: Any) -> Any:
    """Return a batch of a loader in the form in which Keras gives it to a step, on the host."""
    leaves, pack = parts_of(batch)
    if keras.backend.backend() == "torch":
        # Keras takes a tensor, a dict or a list as the loader yields it.
        return pack([None if leaf is None else on_host(leaf) for leaf in leaves])
    return tuple(pack([None if leaf is None else np.asarray(leaf.cpu()) for leaf in leaves]))


def checked_part(part: Any, items: int) -> Any:
    """Return the rows of some items.

    Raises:
        DataError: there are more or fewer rows than items.
    """
    leaves: list[npt.NDArray[Any]] = [leaf for leaf in parts_of(part)[0] if leaf is not None]
    if not leaves or not all(leaf.ndim for leaf in leaves) or len(leaves[0]) != items:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        raise DataError(
            f"the DataLoader's collate_fn makes arrays of shapes {shapes} of {items} items; make one row "
            f"of each item, or {_JOINT}"
        )
    return part


@lru_cache
def _text(form: _Form) -> str:
    """Describe rows; cached, since formatting a dtype takes longer than hashing a row."""
    return ", ".join("None" if leaf is None else f"{leaf[0]}{list(leaf[1])}" for leaf in form)


def _sampled(loader: Any) -> Iterator[Any]:
    """Begin to sample batches of indices as an iteration of PyTorch does, and draw what it draws.

    PyTorch draws the seed of its worker processes last, and only once if they are persistent.
    """
    import torch

    from lockstep.keras.private.torch import keeps_iterator

    sampled: Iterator[Any] = iter(loader.batch_sampler)
    if not loader.persistent_workers or not (keeps_iterator(loader) or loader in _persistent):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    if loader.persistent_workers:
        _persistent.add(loader)
    return sampled


_persistent: "WeakSet[Any]" = WeakSet()
"""The loaders with persistent workers that have been iterated."""


def _unchanged(value: Any) -> Any:
    return value
