"""A global batch and the share of it that each replica sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from lockstep.errors import InternalError


class Share(NamedTuple):
    """The examples of one replica.

    Attributes:
        replica: the replica's id.
        examples: how many; 0 where the batch is smaller than the number of replicas.
        weight: `examples` divided by the examples of the global batch.
        seed: 64 bits, the same for all replicas of a step: random numbers that no generator of the model's
            gives follow from it and the replica.
        data: reads the examples, as `(x, y, sample_weight)` nests of arrays.
    """

    replica: int
    examples: int
    weight: float
    seed: int
    data: Callable[[], Any]


@dataclass(eq=False, slots=True)
class GlobalBatch:
    """The examples of one step. Nobody changes one: to be frozen would cost as much as sharing it out.

    Attributes:
        examples: how many, over all replicas.
        read: reads the rows `start <= row < stop` of this batch.
        check: bytes that are equal on all workers that see the same batch.
    """

    examples: int
    read: Callable[[slice], Any]
    check: Callable[[], bytes]

    def share(self, replica: int, replicas: int, seed: int = 0) -> Share:
        """Return the contiguous rows of `replica`; the shares of `replicas` differ by at most one row."""
        quotient, remainder = divmod(self.examples, replicas)
        count = quotient + (replica < remainder)
        start = replica * quotient + min(replica, remainder)
        rows = slice(start, start + count)
        return Share(replica, count, count / self.examples, seed, lambda: self.read(rows))


@dataclass(eq=False, slots=True)
class JoinedBatch(GlobalBatch):
    """The examples of one step, of which each replica brings its own.

    Attributes:
        counts: how many examples each replica has; `examples` is their sum.
        part: reads the examples of a replica.
    """

    counts: Sequence[int]
    part: Callable[[int], Any]

    @classmethod
    def of(
        cls, counts: Sequence[int], part: Callable[[int], Any], check: Callable[[], bytes]
    ) -> "JoinedBatch":
        """Return the batch of which replica r has `counts[r]` examples, which `part(r)` reads."""
        return cls(sum(counts), _scattered, check, counts, part)

    def share(self, replica: int, replicas: int, seed: int = 0) -> Share:
        """Return what `replica` has brought."""
        count = self.counts[replica]
        return Share(replica, count, count / self.examples, seed, lambda: self.part(replica))


def _scattered(rows: slice) -> NoReturn:
    raise InternalError("a batch of which each replica has its own part has no rows in one place")
