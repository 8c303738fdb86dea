"""How the workers of a job read one dataset of global batches: the contract of a reading, and its batches.

A reading yields the same global batches on every worker, and a worker fetches the rows of its own replicas.
The identity of a batch travels with each reduce as a hash. The rows themselves are compared in some steps:
there, every worker hashes the rows of one replica, and fetches them if necessary.

    input                          identified by            fetched by                        module
    arrays                         numbers of the rows      the owner of the replica          fit_inputs,
                                                                                              stored_arrays
    map-style DataLoader           indices of its sampler   the owner, in PyTorch's workers   loader_reading
    tf.data, maps before batch     rows before the maps     the owner, by a second pipeline   tf_reading
    PyDataset, grain.MapDataset    index of the batch       one worker, which hands over      batch_division
    tf.data, FILE or DATA shards   the position             the owner, its shard             shards, pipelines
    everything else                its first row            every worker                      fit_inputs

`read(rows)` returns rows that were read ahead, and fetches those that are missing, for example after a loss.
A batch that is not read costs only its identity, so a worker that joins or resumes skips batches without
fetching them. For a stream that every worker reads, spot checks find an unseeded shuffle in its first steps,
at a fraction of the cost of hashing everything. If such a stream is a distributed dataset, all rows are
hashed in each step.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.data.batch import Batch, GlobalBatch, PendingBatch, owned_rows, replica_rows
from lockstep.data.digest import digest_arrays
from lockstep.errors import DataError
from lockstep.keras.input.sparse_rows import SparseRows
from lockstep.keras.input.streams import on_host, sliceable_rows
from lockstep.keras.nests import leaves_of, parts_of
from lockstep.keras.seeds import GOLDEN, seed_at
from lockstep.system.notes import note
from lockstep.worker.job import Job

_COMPARED_STEPS = 32
"""One step in this many is drawn to compare the rows of one replica on all workers."""

JOINT_INPUT = "--input joint"
"""The reason for joint reading where the user asks for it."""

NOTHING_TO_DIVIDE = "the pipeline has no .map before .batch, so there is nothing to divide"
"""The reason for joint reading where it costs as little as any other."""

_noted: set[str] = set()
"""The notes on input that were printed."""


@dataclass(frozen=True)
class Way:
    """How the workers of a job read a dataset, for the user.

    Attributes:
        how: a sentence, without a full stop, on which rows a worker reads.
        why: the reason, and how to make reading faster if possible.
        changeable: whether each worker reads everything for a reason that the user can change.
    """

    how: str
    why: str
    changeable: bool = False

    @classmethod
    def joint(cls, why: str) -> "Way":
        """Return the way of a dataset that every worker reads completely."""
        return cls("every worker reads the whole dataset", why, why not in (JOINT_INPUT, NOTHING_TO_DIVIDE))

    @classmethod
    def by_rows(cls, why: str) -> "Way":
        """Return the way of a dataset from which each worker reads the rows that it computes."""
        return cls("each worker reads the rows of its replicas", why)

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


def explain_reading(job: Job, way: Way) -> None:
    """Print a note, on the chief and once for each reason, if workers could divide reading but do not."""
    if way.changeable and way.why and len(job.view.workers) > 1:
        note_once(job, f"input: {way}")


def note_once(job: Job, text: str) -> None:
    """Print a note on the chief, unless it has been printed."""
    if text not in _noted:
        _noted.add(text)
        if job.is_chief:
            note(text)


class Reading(Protocol):
    """How the workers of a job read one dataset together."""

    @property
    def way(self) -> Way:
        """How the workers read it, and why."""

    def begin(self) -> Iterator[GlobalBatch]:
        """Begin the next pass; yield its global batches. All workers do this together.

        If the dataset allows it, a batch that is not read costs only its identity: a joining worker skips the
        batches that others have computed.
        """


def _one_call() -> int:
    return 0


@dataclass(frozen=True)
class ReadingWorker:
    """The worker that reads, and the settings of its reading.

    Attributes:
        job: the job of the replicas.
        seed: 64 bits that, with the pass and the item, determine the random numbers of the dataset's items.
        joint: whether the user requests that every worker reads everything.
        call: returns the number of the call in progress.
    """

    job: Job
    seed: int
    joint: bool = False
    call: Callable[[], int] = _one_call

    def own_rows(self, examples: int) -> slice:
        """Return the rows of this worker's replicas in a batch of `examples` rows."""
        view = self.job.view
        return owned_rows(examples, view.replicas_of(self.job.worker), view.replicas)

    def compared_replica(self, number: int, step: int) -> int | None:
        """Return the replica whose rows all workers compare in a step of pass `number`, or None.

        Both count from 0. Most steps do not have one; the very first step does.
        """
        draw = seed_at(self.seed, number, step)
        step_draw, replica = draw % _COMPARED_STEPS, draw // _COMPARED_STEPS % self.job.view.replicas
        return replica if step_draw == 0 or number == step == 0 else None

    def compared_rows(self, examples: int, number: int, step: int) -> slice | None:
        """Return the rows of `compared_replica` in a batch of `examples` rows, or None if there is none."""
        replica = self.compared_replica(number, step)
        return None if replica is None else replica_rows(examples, replica, self.job.view.replicas)

    def partial_batch(
        self, examples: int, read: Callable[[slice], Any], identity: bytes, number: int, step: int
    ) -> GlobalBatch:
        """Return a global batch, of which this worker may hold only some rows.

        Args:
            examples: the number of its rows.
            read: returns a range of rows as a nest of arrays; fetches those that this worker does not hold.
            identity: the identity of the batch in its pass, equal on all workers that read the same data.
            number: the number of the pass, from 0.
            step: the index of the batch in the pass, from 0.
        """

        def check() -> bytes:
            rows = self.compared_rows(examples, number, step)
            arrays = () if rows is None else map(on_host, leaves_of(read(rows)))
            return digest_arrays(arrays, identity)

        return GlobalBatch(examples, self.job.view.replicas, read, computed_once(check))


def computed_once(function: Callable[[], bytes]) -> Callable[[], bytes]:
    """Return a function that calls `function` the first time, and returns its result each time.

    In each step, making it takes a fraction of the time of `functools.cache`.
    """
    result: bytes | None = None

    def remembered() -> bytes:
        nonlocal result
        if result is None:
            result = function()
        return result

    return remembered


class PassNumbers:
    """Numbers the passes over a dataset, equally on workers that have skipped whole calls: validations.

    In the call that has made this object, the numbers count from 0.

    Args:
        reader: this worker.
    """

    def __init__(self, reader: ReadingWorker) -> None:
        self._call = reader.call
        self._first = self._latest = self._call()
        self._passes = 0

    def next(self) -> int:
        """Return the number of the pass whose first batch is being read."""
        if self._latest != self._call():
            self._latest, self._passes = self._call(), 0
        number = (self._latest - self._first) * GOLDEN + self._passes
        self._passes += 1
        return number % 2**64


def whole_batch(
    data: Any, replicas: int, step: int = 0, compared: Callable[[int], slice | None] | None = None
) -> GlobalBatch:
    """Wrap a batch whose rows this worker all holds, without copying it.

    Args:
        data: a nest of arrays or tensors.
        replicas: R.
        step: the index of the batch in its pass.
        compared: returns the rows that all workers hash, given the number of examples; None for only the
            first row. By default, all rows.

    Raises:
        DataError: the batch has no rows.
    """
    leaves, pack = parts_of(data)
    leaves = [None if leaf is None else sliceable_rows(leaf) for leaf in leaves]
    arrays = [leaf for leaf in leaves if leaf is not None]
    if not arrays or not arrays[0].shape or not arrays[0].shape[0]:
        raise DataError(f"batch {step + 1} of the input has no rows")

    examples = arrays[0].shape[0]

    def read(rows: slice) -> Any:
        return pack(
            [None if leaf is None else leaf[rows_in_proportion(rows, examples, leaf)] for leaf in leaves]
        )

    def check() -> bytes:
        rows = slice(0, examples) if compared is None else compared(examples) or slice(0, 1)
        hashed = (_near(leaf, rows, examples) for leaf in arrays)
        return digest_arrays(hashed, struct.pack("<2q", step, examples))

    return GlobalBatch(examples, replicas, read, computed_once(check))


def read_batch(
    element: Any,
    replicas: int = 1,
    catching_up: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Batch:
    """Return the batch of an element of Keras's loop; all members of a view do this together.

    Args:
        element: a batch that is read or still pending, or a nest of arrays or tensors with all rows.
        replicas: R; 1 if a process trains by itself.
        catching_up: see `lockstep.worker.job.Job.exchange`.
    """
    if isinstance(element, PendingBatch):
        return element.read(catching_up)
    if isinstance(element, GlobalBatch):
        # In a `fit` with parameter servers, each process reads its first batch, and then leaves the view.
        return element.among(replicas)
    return element if isinstance(element, Batch) else whole_batch(element, replicas)


def joint_batch(data: Any, reader: ReadingWorker, number: int, step: int) -> GlobalBatch:
    """Wrap a batch of pass `number` that every worker holds; in some steps, some of its rows are compared."""
    replicas = reader.job.view.replicas
    return whole_batch(data, replicas, step, lambda examples: reader.compared_rows(examples, number, step))


def rows_in_proportion(rows: slice, examples: int, leaf: npt.NDArray[Any] | SparseRows) -> slice:
    """Return the rows of one part of a batch that belong to `rows` of its first part; see `in_proportion`."""
    return in_proportion(rows, examples, len(leaf) if leaf.shape else 0)


def in_proportion(rows: slice, examples: int, count: int) -> slice:
    """Return the rows of a part of a batch with `count` rows that belong to `rows` of its `examples` rows.

    Raises:
        DataError: replicas cannot split both in proportion.
    """
    if count == examples:
        return rows
    start, first = divmod(rows.start * count, examples)
    stop, last = divmod(rows.stop * count, examples)
    if first or last or not count:
        raise DataError(
            f"a batch has parts of {examples} and {count} rows, which replicas cannot split in proportion: "
            "give all parts the same number of rows, or multiples of the number of replicas"
        )
    return slice(start, stop)


def _near(leaf: npt.NDArray[Any] | SparseRows, rows: slice, examples: int) -> npt.NDArray[Any]:
    """Return at least the rows of one part of a batch that belong to `rows` of its first part."""
    if isinstance(leaf, np.ndarray) and not leaf.shape:
        return leaf
    count = len(leaf)
    return leaf[rows.start * count // examples : -(-rows.stop * count // examples)]
