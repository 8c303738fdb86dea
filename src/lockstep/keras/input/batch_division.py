"""A `PyDataset` whose batches are divided among the workers of a view, which hand over the rows.

A pass consists of cycles of R batches. At the first step of a cycle, each member makes some of its batches,
and sends each other member the rows of that member's replicas. In a new view, even within a cycle, the
members first tell each other which batches they hold. They hand over these, and make only the batches that no
member holds. With members on several hosts, they do so at the first step of each cycle instead, because some
enter a view one call later than others. Otherwise, a worker that lacks rows makes the batch itself, without a
call of the exchange. So all members make the same calls, and a batch does not depend on the worker that makes
it.
"""

import copy
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple, Self

import keras
import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Bytes, Communicator
from lockstep.data.batch import GlobalBatch, PendingBatch, owned_rows
from lockstep.data.digest import digest_arrays
from lockstep.errors import DataError
from lockstep.keras.input.held_state import held_generator, held_iterator, held_variable
from lockstep.keras.input.item_draws import ItemDraws
from lockstep.keras.input.readings import JOINT_INPUT, PassNumbers, ReadingWorker, Way, in_proportion
from lockstep.keras.input.sparse_rows import SparseRows
from lockstep.keras.input.streams import on_host, sliceable_rows
from lockstep.keras.input.visits import ReorderedDataset
from lockstep.keras.nests import leaves_of, parts_of
from lockstep.keras.private.common import OrderedEnqueuer
from lockstep.keras.randomness import changed_states, random_states
from lockstep.topology import View

HAND_OVER_SECONDS = 5e-4
HAND_OVER_SECONDS_PER_BYTE = 1e-9
"""A batch that takes less time to make is made by every worker: handing it over would take as long."""

DECIDE_EVERY = 16
"""Cycles for which the chief decides whether batches are divided; it also decides in each new view."""

CYCLE_BYTES = 1 << 30
"""Batches are not handed over if those of a cycle are larger: workers hold all of them at once."""

_PROBE = 2**64 - 1
"""In place of the number of a pass, for the batch that is read before the first."""

_ALIGNMENT = 64
_PADDING = np.zeros(_ALIGNMENT, np.uint8)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

Standardize = Callable[[Any], Any]
"""Converts what `__getitem__` returns to the batch that Keras trains on."""


def division(
    dataset: ReorderedDataset, standardize: Standardize, reader: ReadingWorker
) -> "BatchDivision | str":
    """Return a reading that divides the batches of a dataset, or why every worker has to read all of them."""
    if reader.joint:
        return JOINT_INPUT
    if dataset.num_batches == 0:
        return "it has no batches"
    inner, draws = dataset.inner, ItemDraws(reader.seed)
    if path := held_generator(("dataset", inner)):
        return (
            f"{path}, whose numbers depend on the batches that were read before: draw from numpy.random in "
            "__getitem__, or from numpy.random.default_rng((seed, index))"
        )
    if path := held_iterator(("dataset", inner)):
        return f"{path}, which yields its elements once and in order: read by index"
    if path := held_variable(("dataset", inner)):
        return f"{path}, whose values may change between two steps: compute with it in a callback"

    divided = BatchDivision(dataset, standardize, reader, draws)

    def probe(read: Any) -> tuple[bytes, bool, dict[str, Any]]:
        draws.drawn = False
        data = standardize(divided.made(_PROBE, 0, 0, read))
        divided.measured(HeldRows.whole(data, 0, {}))
        return _digest(data), draws.drawn, _attributes(read)

    try:
        read = copy.copy(inner)  # A dataset that counts its reads keeps its count.
        first, once, attributes = probe(read)
        second, again, after = probe(read)
    except Exception as error:
        return f"reading its first batch fails with {type(error).__name__}"
    if changed := _changed(attributes, after):
        return (
            f"its attribute {changed!r} changes when a batch is read: make batches depend on their index only"
        )
    if once != again:
        return "it keeps random numbers that it has drawn: draw in each __getitem__, or before the training"
    if first != second:
        return (
            "its first batch differs each time it is read: draw from numpy.random in __getitem__, or "
            "from numpy.random.default_rng((seed, index))"
        )
    return divided


class BatchDivision:
    """The `Reading` of a dataset in which each batch depends only on its index.

    Args:
        dataset: the dataset, in the order in which its batches are visited.
        standardize: converts what `__getitem__` returns.
        reader: this worker.
        draws: gives the batches their random states.

    Attributes:
        drawn_elsewhere: the random states from which steps draw, but batches do not.
        divides: whether the members of the view divide batches, as they have decided together.
    """

    def __init__(
        self,
        dataset: ReorderedDataset,
        standardize: Standardize,
        reader: ReadingWorker,
        draws: ItemDraws,
    ) -> None:
        self.dataset = dataset
        self.standardize = standardize
        self.reader = reader
        self.draws = draws
        self._numbers = PassNumbers(reader)
        self._version = 0
        self._seconds: deque[float] = deque(maxlen=reader.job.view.replicas)
        self._bytes = 0
        self.drawn_elsewhere: frozenset[str] = frozenset()
        self._opaque = False
        self._decided_in: int | None = None
        self.divides = False
        self.way = Way(
            "each worker makes some of the batches, and sends the others their rows",
            "a batch depends only on its index; every worker makes batches that take no longer to make than "
            "to send",
        )

    def begin(self) -> Iterator[PendingBatch]:
        """Begin the next pass; yield its batches, which are not made yet."""
        current = _Pass(self, self._numbers.next(), self.dataset.begin_pass())
        for step in count() if current.count is None else range(current.count):
            try:
                yield PendingBatch(partial(current.read, step))
            except GeneratorExit:
                current.end()
                raise

    def note_epoch(self) -> None:
        """Note that the dataset was notified of an epoch, because earlier batches may differ."""
        kind, base = type(self.dataset.inner), keras.utils.PyDataset
        if kind.on_epoch_begin is not base.on_epoch_begin or kind.on_epoch_end is not base.on_epoch_end:
            self._version += 1

    @property
    def state(self) -> dict[str, Any]:
        """Values that show, to some extent, whether the dataset still returns the same batches."""
        return {"": self._version, **_attributes(self.dataset.inner)}

    @property
    def reads_ahead(self) -> bool:
        """Whether Keras's workers read batches. Threads do not, if batches draw from states they share."""
        inner = self.dataset.inner
        if inner.use_multiprocessing:
            return bool(inner.workers > 0)
        return bool(inner.workers > 1 and not self.draws.drawn)

    @property
    def pays(self) -> bool:
        """Whether batches take longer to make than to hand over; the chief decides, for all workers."""
        if self._opaque or self._bytes * self.reader.job.view.replicas > CYCLE_BYTES:
            return False
        least = HAND_OVER_SECONDS + HAND_OVER_SECONDS_PER_BYTE * self._bytes
        return self.reads_ahead or min(self._seconds) > least

    def calls(self, cycle: int, view: View) -> bool:
        """Whether the members of a view make calls of the exchange to read `cycle`, from 0, of a pass."""
        return len(view.workers) > 1 and (self.divides or self.is_undecided(cycle, view))

    def is_undecided(self, cycle: int, view: View) -> bool:
        """Whether the members of a view have not decided yet whether they divide a cycle.

        With members on several hosts, some enter a view in the last call before a cycle, and some in its
        first one. So their calls must not depend on the view, and they decide for each cycle.
        """
        over_hosts = self.reader.job.context.over_hosts
        return over_hosts or cycle % DECIDE_EVERY == 0 or self._decided_in != view.number

    def decide(self, view: View, divides: bool) -> None:
        """Note whether the members of a view divide batches, as its chief has decided for all of them."""
        self.divides, self._decided_in = divides, view.number

    def made(self, number: int, step: int, index: int, dataset: Any = None) -> Any:
        """Make a batch on this thread, from a copy of the dataset if there is one."""
        read = self.dataset.inner if dataset is None else dataset
        begun = time.perf_counter()
        (data,) = self.draws.read(number, (step,), [index], lambda items: [read[item] for item in items])
        self._seconds.append(time.perf_counter() - begun)
        return data

    def measured(self, rows: "HeldRows") -> None:
        """Note the size of a batch."""
        self._bytes = sum(part.array.nbytes for part in rows.parts if part is not None)

    def note_drawn_elsewhere(self, states: frozenset[str]) -> None:
        """Note that a batch does not depend on random states that changed while a thread read it.

        On PyTorch, each step of a model with dropout changes a state that its datasets rarely use.
        """
        if keras.backend.backend() == "torch":
            self.drawn_elsewhere |= states & {"torch"}

    def note_opaque(self) -> None:
        """Note that a batch of this worker is in a form that cannot be handed over."""
        self._opaque = True


@dataclass(frozen=True)
class _HandOver:
    """An agreement of the members of a view on the batches that they are about to hand over.

    Attributes:
        view: the number of the view.
        steps: the steps of the batches.
        makers: the worker that hands over the batch of a step.
        plan: the plan for Keras's workers, which read ahead; None if members already hold batches.
    """

    view: int
    steps: range
    makers: Mapping[int, int]
    plan: "_Plan | None"

    def makers_in(self, view: View) -> Mapping[int, int]:
        """Return the makers, with replacements for those that a later view lacks."""
        there = {step: maker for step, maker in self.makers.items() if maker in view.workers}
        return there if view.number == self.view else with_makers(self.steps, there, view.workers)


def with_makers(steps: range, makers: Mapping[int, int], workers: Sequence[int]) -> Mapping[int, int]:
    """Return `makers`, and one of `workers` in turn for each of the other steps.

    If only one step is missing, and it is not the first one, its batch need not delay the others: every
    worker makes it in that step.
    """
    missing = [step for step in steps if step not in makers]
    if len(missing) == 1 and missing != [steps.start]:
        return makers
    return {**makers, **{step: workers[at % len(workers)] for at, step in enumerate(missing)}}


class _Pass:
    """One pass over the batches.

    Attributes:
        count: the number of batches; None if they never end.
    """

    def __init__(self, division: BatchDivision, number: int, order: Sequence[int]) -> None:
        self.count = division.dataset.num_batches
        self._division = division
        self._reader = division.reader
        self._number = number
        self._order = order
        self._cycle = division.reader.job.view.replicas
        self._held: dict[int, HeldRows] = {}
        self._view: int | None = None
        self._ahead: _KerasWorkers | None = None
        self._ended = False

    def read(self, step: int, catching_up: Callable[[], AbstractContextManager[None]]) -> GlobalBatch:
        """Return the batch of a step, at its beginning; see `PendingBatch`."""
        job = self._reader.job
        for done in [other for other in self._held if other < step]:
            del self._held[done]
        is_new_view = self._view != job.view.number and not job.context.over_hosts
        begins = step % self._cycle == 0 or is_new_view
        if begins and self._division.calls(step // self._cycle, job.view):
            job.exchange(partial(self._hand_over, step, []), catching_up)
        held = self._held.get(step)
        if held is None or _changed(held.state, self._division.state):
            is_single = len(job.view.workers) == 1 and not job.joins
            held = self._held[step] = self._made(step, _Plan(step, 0, 1, self._cycle) if is_single else None)
        if step + 1 == self.count:
            self.end()
        identity = f"batch {self._index(step)} in step {step} of pass {self._number}".encode()
        return self._reader.partial_batch(
            held.examples, partial(self._rows, step), identity, self._number, step
        )

    def end(self) -> None:
        """Stop reading ahead."""
        self._ended = True
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def _rows(self, step: int, rows: slice) -> Any:
        held = self._held.get(step)
        if held is None or not held.cover(rows):
            held = self._held[step] = self._made(step)
        return held.read(rows)

    def _hand_over(
        self, first: int, begun: "list[_HandOver]", view: View, communicator: Communicator
    ) -> None:
        """Hand over rows of the batches from step `first` to the end of its cycle, after making them.

        The content of `begun` was agreed in an earlier view, which has ended since then: that call is
        complete.
        """
        worker = self._reader.job.worker
        if len(view.workers) == 1:
            return
        label = f"the batches from step {first + 1} of the pass on"
        last = (first // self._cycle + 1) * self._cycle
        steps = range(first, last if self.count is None else min(last, self.count))
        if not begun:
            begun.append(self._begun(steps, view, communicator, label))
        agreed = begun[0]
        if self._division.divides:
            makers = agreed.makers_in(view)
            for step in [step for step in steps if makers.get(step) == worker and not self._holds(step)]:
                # If a batch fails now, every worker makes it in its own step, where it fails again.
                with suppress(Exception):
                    self._held[step] = self._made(step, agreed.plan if view.number == agreed.view else None)
            batches = {
                step: self._held[step] for step in steps if makers.get(step) == worker and self._holds(step)
            }
            parts = [
                [] if other == worker else self._encoded(batches, view.replicas_of(other), view.replicas)
                for other in view.workers
            ]
            for part in communicator.all_to_all(parts, what=label):
                received = decoded(part, self._division.state)
                self._held |= {step: held for step, held in received.items() if not self._holds(step)}
        self._view = agreed.view

    def _begun(self, steps: range, view: View, communicator: Communicator, label: str) -> "_HandOver":
        """Agree on the member that hands over each batch.

        Members hold batches of `steps` only in a new view, in which they also decide whether to divide them.
        """
        cycle, offset = divmod(steps.start, self._cycle)
        undecided = self._division.is_undecided(cycle, view)
        holders: dict[int, int] = {}
        if undecided or self._view != view.number:
            worker = self._reader.job.worker
            pays = view.chief == worker and self._division.pays
            offer = worker, pays, [step for step in steps if self._holds(step)]
            offers = communicator.gather(msgspec.msgpack.encode(offer), what=label)
            told = [msgspec.msgpack.decode(blob, type=tuple[int, bool, list[int]]) for blob in offers]
            if undecided:
                self._division.decide(view, told[0][1])
            holders = {step: member for member, _, held in reversed(told) for step in held}
        plan = None
        if not holders and not offset:
            position = view.workers.index(self._reader.job.worker)
            plan = _Plan(steps.start, position, len(view.workers), self._cycle)
        return _HandOver(view.number, steps, with_makers(steps, holders, view.workers), plan)

    def _holds(self, step: int) -> bool:
        """Whether this worker holds all rows of the batch of a step."""
        held = self._held.get(step)
        return (
            held is not None
            and held.cover(slice(0, held.examples))
            and not _changed(held.state, self._division.state)
        )

    def _encoded(self, batches: Mapping[int, "HeldRows"], owned: range, replicas: int) -> list[Bytes]:
        """Return the rows of the `owned` replicas, without batches that cannot be handed over."""
        sent = {}
        for step, held in batches.items():
            try:
                sent[step] = held.cut(owned_rows(held.examples, owned, replicas))
            except DataError:
                self._division.note_opaque()
        try:
            return encoded(sent)
        except _OpaqueError:
            self._division.note_opaque()
            return []

    def _made(self, step: int, plan: "_Plan | None" = None) -> "HeldRows":
        """Make a batch: by Keras's workers if there is a plan for them and the dataset has some."""
        division = self._division
        if plan is not None and division.reads_ahead and not self._ended:
            state = division.state
            data = self._checked(step, self._read_ahead(step, plan, state))
        else:
            data = division.made(self._number, step, self._index(step))
            state = division.state  # Reading the first batch may have opened a file.
        held = HeldRows.whole(division.standardize(data), step, state)
        division.measured(held)
        return held

    def _read_ahead(self, step: int, plan: "_Plan", state: Mapping[str, Any]) -> "_Fetched":
        ahead = self._ahead
        if ahead is None or not ahead.continues(step, plan, state):
            if ahead is not None:
                ahead.stop()
                self._ahead = None
            if plan.step(0) != step:  # They begin again with the next cycle.
                return _Fetched(None, failed=True)
            batches = _OwnBatches(self._division, self._number, self._order, plan, self.count)
            ahead = self._ahead = _KerasWorkers(batches, plan, state)
        return ahead.take()

    def _checked(self, step: int, fetched: "_Fetched") -> Any:
        """Return a batch that one of Keras's workers has read, or make it again.

        A thread cannot tell its own draws from those of others. If a random state has changed while it read a
        batch, the batch is made again with the states of its place. If that gives a different batch, it does
        draw. Then threads stop reading batches, because draws in a thread would change those on this one.
        """
        division, index = self._division, self._index(step)
        if not fetched.failed and fetched.drawn <= division.drawn_elsewhere:
            return fetched.data
        data = division.made(self._number, step, index)
        if fetched.failed:
            return data
        if not division.draws.drawn and _digest(data) == _digest(fetched.data):
            division.note_drawn_elsewhere(fetched.drawn)
            return data
        division.draws.drawn = True
        if self._ahead is not None:
            self._ahead.stop(wait=True)
            self._ahead = None
        return division.made(self._number, step, index)

    def _index(self, step: int) -> int:
        return self._order[step] if self._order else step


class _Plan(NamedTuple):
    """The batches that a worker makes, from step `first` on: in each cycle, those at its position.

    Attributes:
        first: a step.
        position: the position of the worker.
        members: the number of workers that divide batches.
        cycle: the number of batches in a cycle.
    """

    first: int
    position: int
    members: int
    cycle: int

    def step(self, number: int) -> int:
        """Return the step of the worker's batch `number`, from 0."""
        positions = range(self.position, self.cycle, self.members)
        cycles, offset = divmod(number, len(positions))
        return self.first + cycles * self.cycle + positions[offset]

    def steps(self, stop: int) -> list[int]:
        """Return the steps before `stop` whose batches the worker makes."""
        following = (step for step in range(self.first, stop))
        return [
            step for step in following if (step - self.first) % self.cycle % self.members == self.position
        ]


class _Fetched(NamedTuple):
    """A batch that one of Keras's workers has read.

    Attributes:
        data: the batch; None if reading it has failed.
        drawn: the random states that changed meanwhile: the batch may depend on them.
        failed: whether reading it has failed.
    """

    data: Any
    drawn: frozenset[str] = frozenset()
    failed: bool = False


class _OwnBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of a pass that this worker makes, for Keras's workers; can be sent to its processes."""

    def __init__(
        self, division: BatchDivision, number: int, order: Sequence[int], plan: _Plan, batches: int | None
    ) -> None:
        inner = division.dataset.inner
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self._inner = inner
        self._draws = division.draws
        self._number = number
        self._order = order
        self._plan = plan
        self._count = None if batches is None else len(plan.steps(batches))

    @property
    def num_batches(self) -> int | None:
        """The number of batches, or None if they never end."""
        return self._count

    def __getitem__(self, number: int) -> _Fetched:
        step = self._plan.step(number)
        index = self._order[step] if self._order else step
        try:
            if self.use_multiprocessing:
                (data,) = self._draws.read(
                    self._number, (step,), [index], lambda items: [self._inner[item] for item in items]
                )
                return _Fetched(data)
            before = random_states()
            data = self._inner[index]
            return _Fetched(data, changed_states(before, random_states()))
        except Exception:
            return _Fetched(None, failed=True)


class _KerasWorkers:
    """Keras's threads or processes, which read some batches of a pass ahead.

    Args:
        batches: the batches to read.
        plan: their steps.
        state: the state of the dataset at the beginning.
    """

    def __init__(self, batches: _OwnBatches, plan: _Plan, state: Mapping[str, Any]) -> None:
        self._enqueuer = OrderedEnqueuer(
            batches, batches.workers, batches.use_multiprocessing, batches.max_queue_size
        )
        self._plan = plan
        self._state = state
        self._taken = 0
        self._enqueuer.start()
        self._batches = self._enqueuer.get()

    def continues(self, step: int, plan: _Plan, state: Mapping[str, Any]) -> bool:
        """Whether the next batch is that of `step`, of a worker in the position of `plan`."""
        return (
            self._plan[1:] == plan[1:]
            and self._plan.step(self._taken) == step
            and not _changed(self._state, state)
        )

    def take(self) -> _Fetched:
        """Return the next batch."""
        self._taken += 1
        fetched: _Fetched = next(self._batches)
        return fetched

    def stop(self, *, wait: bool = False) -> None:
        """Stop; with `wait`, return when no batch is being read any more."""
        if sys.is_finalizing():
            # A pass that was not read to its end is collected last. A thread that starts now never runs.
            return

        def stop() -> None:
            with suppress(Exception):
                self._enqueuer.stop()

        stopping = threading.Thread(target=stop, daemon=True)
        stopping.start()
        if wait:
            stopping.join()


@dataclass(eq=False, slots=True)
class HeldPart:
    """Rows of one part of a batch. It is not changed; a frozen object would take longer to create.

    Attributes:
        array: the rows.
        start: the number of the first of these rows.
        count: the number of rows of the whole part.
    """

    array: npt.NDArray[Any] | SparseRows
    start: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows: a part is a leaf of a nest."""
        return self.array.shape

    def cut(self, rows: slice, examples: int) -> "HeldPart":
        """Return the part's share in some of the `examples` rows of the batch; see `in_proportion`."""
        cut = in_proportion(rows, examples, self.count)
        return HeldPart(self.array[cut.start - self.start : cut.stop - self.start], cut.start, self.count)


@dataclass(eq=False, slots=True)
class HeldRows:
    """Rows of a batch that this worker holds: all, or those of its replicas.

    Attributes:
        parts: the parts of the batch; None for a missing one.
        pack: packs parts, or their replacements, in the structure of the batch.
        examples: the number of rows of the whole batch.
        rows: the range of the held rows.
        state: the state of the dataset when the batch was made or handed over.
    """

    parts: list[HeldPart | None]
    pack: Callable[[Sequence[Any]], Any]
    examples: int
    rows: slice
    state: Mapping[str, Any]

    @classmethod
    def whole(cls, data: Any, step: int, state: Mapping[str, Any]) -> Self:
        """Return all rows of a batch, without copying them.

        Raises:
            DataError: the batch has no rows.
        """
        leaves, pack = parts_of(data)
        parts: list[HeldPart | None] = []
        for leaf in leaves:
            if leaf is None:
                parts.append(None)
                continue
            array = sliceable_rows(leaf)
            parts.append(HeldPart(array, 0, len(array) if array.shape else 0))
        examples = next((part.count for part in parts if part is not None), 0)
        if not examples:
            raise DataError(f"batch {step + 1} of the input has no rows")
        return cls(parts, pack, examples, slice(0, examples), state)

    def cover(self, rows: slice) -> bool:
        """Whether the held rows include these."""
        return bool(self.rows.start <= rows.start and rows.stop <= self.rows.stop)

    def read(self, rows: slice) -> Any:
        """Return rows that are held, as a nest of arrays.

        Raises:
            DataError: parts of the batch cannot be split in proportion.
        """
        return self.pack(
            [None if part is None else part.cut(rows, self.examples).array for part in self.parts]
        )

    def cut(self, rows: slice) -> Self:
        """Return some of the rows held; see `read`."""
        parts = [None if part is None else part.cut(rows, self.examples) for part in self.parts]
        return type(self)(parts, self.pack, self.examples, rows, self.state)


class _OpaqueError(Exception):
    """A batch has a structure or a dtype that has no plain description."""


_Described = tuple[int, int, int, int, Any, list[tuple[str, list[int], int, int]]]
"""A step; the number of examples, the first of the rows and their end; the structure; of each part its dtype,
shape, first row and number of rows."""


def encoded(batches: Mapping[int, HeldRows]) -> list[Bytes]:
    """Return rows of some batches, by their steps, as arrays of bytes.

    Raises:
        _OpaqueError: one has a structure or a dtype that has no plain description.
    """
    described: list[_Described] = []
    arrays: list[Bytes] = []
    for step, held in batches.items():
        parts: list[HeldPart] = []
        structure = _structure_of(held.pack(held.parts), parts)
        forms = [(_name_of(p.array.dtype), list(p.array.shape), p.start, p.count) for p in parts]
        described.append((step, held.examples, held.rows.start, held.rows.stop, structure, forms))
        arrays += (np.ascontiguousarray(part.array[:]).reshape(-1).view(np.uint8) for part in parts)
    header = msgspec.msgpack.encode(described)
    front = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    padded = []
    for array in (front, *arrays):
        padded += [array, _PADDING[: -array.size % _ALIGNMENT]]
    return padded


def decoded(sent: Bytes, state: Mapping[str, Any]) -> dict[int, HeldRows]:
    """Return the argument of `encoded`, in the memory of `sent`, or an empty dict for no bytes."""
    if not sent.size:
        return {}
    size = int.from_bytes(sent[:8].tobytes(), "little")
    described = msgspec.msgpack.decode(sent[8 : 8 + size].tobytes(), type=list[_Described])
    start = _padded(8 + size)
    batches = {}
    for step, examples, first, stop, structure, forms in described:
        parts = []
        for name, shape, begin, rows in forms:
            dtype = np.dtype(name)
            nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            parts.append(HeldPart(sent[start : start + nbytes].view(dtype).reshape(shape), begin, rows))
            start += _padded(nbytes)
        leaves, pack = parts_of(_nest_of(structure, iter(parts)))
        batches[step] = HeldRows(leaves, pack, examples, slice(first, stop), state)
    return batches


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _structure_of(nest: Any, parts: list[HeldPart]) -> Any:
    """Return a plain description of the structure of a nest; append its parts to `parts`."""
    if nest is None:
        return None
    if isinstance(nest, HeldPart):
        parts.append(nest)
        return 0
    kind = type(nest)
    if kind is tuple or kind is list:
        return [kind is tuple, [_structure_of(item, parts) for item in nest]]
    if kind is dict and all(type(key) is str for key in nest):
        return {key: _structure_of(item, parts) for key, item in nest.items()}
    raise _OpaqueError


def _nest_of(structure: Any, parts: Iterator[HeldPart]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, dict):
        return {key: _nest_of(item, parts) for key, item in structure.items()}
    if isinstance(structure, list):
        is_tuple, items = structure
        nests = [_nest_of(item, parts) for item in items]
        return tuple(nests) if is_tuple else nests
    return next(parts)


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype; raise `_OpaqueError` if it has none, or means Python's objects."""
    try:
        if not dtype.hasobject and dtype.itemsize and np.dtype(str(dtype)) == dtype:
            return str(dtype)
    except TypeError:
        pass
    raise _OpaqueError


def _digest(data: Any) -> bytes:
    return digest_arrays(map(on_host, leaves_of(data)))


def _attributes(dataset: Any) -> dict[str, Any]:
    """Return the identities of a dataset's attributes, not their contents."""
    return dict(getattr(dataset, "__dict__", {}))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the name of an attribute that is a different object, or a different plain value, from before."""
    for name in before.keys() | now.keys():
        old, new = before.get(name), now.get(name)
        if old is not new and not (type(old) is type(new) and isinstance(old, _PLAIN) and old == new):
            return name
    return None
