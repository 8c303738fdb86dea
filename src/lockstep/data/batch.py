"""Batches: the data of one step, of which each replica has a share.

`fit` and custom loops train on the same batches, read by the same readers:

    Reading         reads a dataset of global batches on all workers: keras/input/readings.py
      GlobalBatch   rows; the share of a replica is a range of them
    Pipelines       reads a dataset for each replica: keras/input/pipelines.py
      PipelinesBatch    the next batch of each of these datasets; the share of a replica is its own batch

`fit` gives shares to the backend's program. A distributed dataset is a `Source` (keras/input/sources.py): a
reading or pipelines, and the form of their batches. Its iterator shows shares as the `Values` of a
`PerReplica`, which `strategy.run` gives to the function of a replica; a share becomes `Values`, and never the
other way round.

A batch is the same on all workers: `check` returns what they compare in the reduce of the step. A share is
read when it is needed, by the worker that computes the replica; after a loss, that is another one.

One fact is not known to all of them. The weight of a share is its part of the global batch. The batch of
pipelines has no rows of its own, so only an exchange before the step tells how many examples the other
replicas have. `fit` makes it, because it averages over examples. A custom loop does not: its function divides
by what it likes, and a dataset with a known length then needs no exchange to be read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple


class Share(NamedTuple):
    """The examples of one replica.

    Attributes:
        replica: the replica's id.
        examples: their number; may be 0 if the batch is smaller than the number of replicas.
        weight: `examples` divided by the number of examples of the batch; NaN if that is not known.
        seed: 64 bits, the same for all replicas of a step; with the replica's id, it determines the random
            numbers that do not come from a generator of the model.
        data: reads the examples, as `(x, y, sample_weight)` nests of arrays.
    """

    replica: int
    examples: int
    weight: float
    seed: int
    data: Callable[[], Any]


class Batch(ABC):
    """The data of one step."""

    __slots__ = ()

    @property
    @abstractmethod
    def examples(self) -> int:
        """The number of examples, over all replicas.

        Raises:
            InternalError: it is not known.
        """

    @abstractmethod
    def share(self, replica: int, seed: int = 0) -> Share:
        """Return the share of a replica in a step with this seed.

        A share without examples may read some of the same form.
        """

    @abstractmethod
    def check(self) -> bytes:
        """Return bytes that are equal on all workers that have the same batch."""

    def is_here(self, replica: int) -> bool:
        """Whether this worker can read the share of a replica without reading ahead of another worker."""
        return True


class GlobalBatch(Batch):
    """A batch of rows. Each replica has a contiguous range of them.

    Args:
        examples: the number of rows.
        replicas: R.
        read: reads a range of rows.
        check: returns bytes that are equal on all workers that have the same batch.
    """

    __slots__ = ("check", "examples", "read", "replicas")

    examples: int
    check: Callable[[], bytes]

    def __init__(
        self, examples: int, replicas: int, read: Callable[[slice], Any], check: Callable[[], bytes]
    ) -> None:
        self.examples = examples
        self.replicas = replicas
        self.read = read
        self.check = check

    def share(self, replica: int, seed: int = 0) -> Share:
        """Return the rows of a replica; the shares of two replicas differ by at most one row."""
        rows = replica_rows(self.examples, replica, self.replicas)
        count = rows.stop - rows.start
        return Share(replica, count, count / self.examples, seed, lambda: self.read(rows))

    def whole(self) -> Any:
        """Read all rows."""
        return self.read(slice(0, self.examples))


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
