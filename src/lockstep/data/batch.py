"""A global batch, and the share of each replica."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from lockstep.errors import InternalError


class Share(NamedTuple):
    """The examples of one replica.

    Attributes:
        replica: the replica's id.
        examples: their number; may be 0 if the batch is smaller than the number of replicas.
        weight: `examples` divided by the number of examples of the global batch.
        seed: 64 bits, the same for all replicas of a step; with the replica's id, it determines the random
            numbers that do not come from a generator of the model.
        data: reads the examples, as `(x, y, sample_weight)` nests of arrays.
    """

    replica: int
    examples: int
    weight: float
    seed: int
    data: Callable[[], Any]


@dataclass(eq=False, slots=True)
class GlobalBatch:
    """The examples of one step. Immutable by convention: creating a frozen object takes as long as the split.

    Attributes:
        examples: their number, over all replicas.
        read: reads a range of rows of this batch.
        check: returns bytes that are equal on all workers that have the same batch.
    """

    examples: int
    read: Callable[[slice], Any]
    check: Callable[[], bytes]

    def share(self, replica: int, replicas: int, seed: int = 0) -> Share:
        """Return the contiguous rows of `replica`; the shares of `replicas` differ by at most one row."""
        rows = replica_rows(self.examples, replica, replicas)
        count = rows.stop - rows.start
        return Share(replica, count, count / self.examples, seed, lambda: self.read(rows))


@dataclass(eq=False, slots=True)
class JoinedBatch(GlobalBatch):
    """The examples of one step, each of which belongs to a certain replica.

    Attributes:
        counts: the number of examples of each replica; `examples` is their sum.
        part: reads the examples of a replica.
    """

    counts: Sequence[int]
    part: Callable[[int], Any]

    @classmethod
    def of(
        cls, counts: Sequence[int], part: Callable[[int], Any], check: Callable[[], bytes]
    ) -> "JoinedBatch":
        """Return the batch in which replica r has `counts[r]` examples, which `part(r)` reads."""
        return cls(sum(counts), _scattered, check, counts, part)

    def share(self, replica: int, replicas: int, seed: int = 0) -> Share:
        """Return the examples of `replica`."""
        count = self.counts[replica]
        return Share(replica, count, count / self.examples, seed, lambda: self.part(replica))


@dataclass(eq=False, slots=True)
class PendingBatch:
    """The global batch of a step, before it is read.

    Attributes:
        read: reads it; the members of a view call this together at the beginning of the step, because they
            may divide the work. A worker that skips the step does not call it. The argument is the
            `catching_up` of `lockstep.worker.job.Job.exchange`.
    """

    read: Callable[[Callable[[], AbstractContextManager[None]]], GlobalBatch]


def replica_rows(examples: int, replica: int, replicas: int) -> slice:
    """Return the contiguous rows of `replica` in a batch; the counts of `replicas` differ by at most one."""
    quotient, remainder = divmod(examples, replicas)
    start = replica * quotient + min(replica, remainder)
    return slice(start, start + quotient + (replica < remainder))


def owned_rows(examples: int, owned: range, replicas: int) -> slice:
    """Return the rows of consecutive replicas in a batch, which are contiguous."""
    if not owned:
        return slice(0, 0)
    first, last = (replica_rows(examples, replica, replicas) for replica in (owned[0], owned[-1]))
    return slice(first.start, last.stop)


def _scattered(rows: slice) -> NoReturn:
    raise InternalError("each replica has its own part of this batch; no part has rows of the whole batch")
