"""Batches: the data of one step, in which each replica has a share.

`fit` and custom loops train on the same two kinds of batches:

    kind            the share of a replica             read by
    GlobalBatch     a range of the rows of the batch   a reading of one dataset: keras/input/readings.py
    PipelinesBatch  the next batch of its own dataset  the replicas' pipelines: keras/input/pipelines.py

With local steps, `fit` trains on `LocalBatches`: several global batches in each outer step
(`LocalGrouping`).

`fit` gives shares to the program of the backend. The iterator of a distributed dataset shows them as values
of a `PerReplica` (`BatchValues` in keras/input/sources.py), which `strategy.run` gives to the function of a
replica. Shares become values, and values never become batches.

All workers have the same batch: `check` returns the bytes that they compare in the reduce of the step. The
worker that computes a replica reads its share when it needs it. After a loss, that is another worker.

A share of a `PipelinesBatch` has no weight in a custom loop. Only an exchange in each step tells the workers
how many examples the replicas of others have. `fit` makes this exchange, because it averages over the
examples of the whole batch. A function of `strategy.run` divides by a number of its own choice, so a loop
over datasets of known lengths does not exchange anything while it reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lockstep.data.digest import digest_arrays

Element = TypeVar("Element")


class Share(NamedTuple):
    """The examples of one replica.

    Attributes:
        replica: the replica's id.
        examples: the number of examples, which may be 0 if the batch is smaller than the number of replicas.
        weight: `examples` divided by the number of examples of the batch; NaN if that number is unknown.
        seed: 64 bits, the same for all replicas of a step; with the replica's id, it determines the random
            numbers that do not come from a generator of the model.
        data: reads the examples, as `(x, y, sample_weight)` nests of arrays.
        start: the place of the first example among the examples of all replicas, in their order.
        batches: the numbers of examples, over all replicas, of the inner steps of an outer step.
    """

    replica: int
    examples: int
    weight: float
    seed: int
    data: Callable[[], Any]
    start: int = 0
    batches: tuple[int, ...] = ()


class Batch(ABC):
    """The data of one step."""

    __slots__ = ()

    @property
    @abstractmethod
    def examples(self) -> int:
        """The number of examples, over all replicas.

        Raises:
            InternalError: the number is unknown.
        """

    @abstractmethod
    def share(self, replica: int, seed: int = 0) -> Share:
        """Return the share of a replica in a step with this seed.

        A share without examples may read some examples of the same form.
        """

    @abstractmethod
    def check(self) -> bytes:
        """Return bytes that are equal on all workers that have the same batch."""

    def is_counted(self, replica: int) -> bool:
        """Whether values that a replica sets count, if it has examples."""
        return True

    def is_here(self, replica: int) -> bool:
        """Whether this worker has the share of a replica, or can read it without opening another dataset."""
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
        return Share(replica, count, count / self.examples, seed, lambda: self.read(rows), rows.start)

    def whole(self) -> Any:
        """Read all rows."""
        return self.read(slice(0, self.examples))

    def among(self, replicas: int) -> "GlobalBatch":
        """Return the same rows, divided among a number of replicas."""
        if replicas == self.replicas:
            return self
        return GlobalBatch(self.examples, replicas, self.read, self.check)


class LocalBatches(Batch):
    """The batches of an outer step. Each replica takes one step by itself on its share of each batch.

    The examples of a share are a list, with the examples of each step, or None for a step without examples.

    Args:
        batches: the batches of the steps.
        replicas: R.
    """

    __slots__ = ("batches", "replicas")

    def __init__(self, batches: Sequence[Batch], replicas: int) -> None:
        self.batches = batches
        self.replicas = replicas

    @property
    def examples(self) -> int:
        """The number of examples of all steps."""
        return sum(batch.examples for batch in self.batches)

    def share(self, replica: int, seed: int = 0) -> Share:
        """Return the shares of a replica in all steps as one."""
        shares = [batch.share(replica, seed) for batch in self.batches]
        count = sum(share.examples for share in shares)

        def data() -> list[Any]:
            return [share.data() if share.examples else None for share in shares]

        batches = tuple(batch.examples for batch in self.batches)
        return Share(replica, count, count / self.examples, seed, data, batches=batches)

    def check(self) -> bytes:
        """Return the hash of the batches' identities."""
        return digest_arrays((), b"".join(batch.check() for batch in self.batches))

    def is_counted(self, replica: int) -> bool:
        """Whether no replica takes more steps: a counter of steps counts as on such a replica."""
        steps = [sum(batch.share(r).examples > 0 for batch in self.batches) for r in range(self.replicas)]
        return steps[replica] == max(steps)


@dataclass(eq=False, slots=True)
class PendingBatch:
    """The global batch of a step, before it is read.

    Attributes:
        read: reads the batch. The members of a view call this together at the beginning of the step, because
            they may divide the work. A worker that skips the step does not call it. The argument is the
            `catching_up` of `lockstep.worker.job.Job.exchange`.
    """

    read: Callable[[Callable[[], AbstractContextManager[None]]], Batch]


@dataclass(frozen=True)
class LocalGrouping:
    """Makes one batch from the batches of the inner steps of each outer step.

    Attributes:
        steps: H.
        epoch: the number of inner steps of an epoch, whose last outer step may be smaller; None if an epoch
            is a pass.
        replicas: R.
    """

    steps: int
    epoch: int | None
    replicas: int

    def batches(self, elements: Iterator[Batch | PendingBatch]) -> Iterator[PendingBatch]:
        """Yield the batches of the outer steps of a pass, given those of the inner steps."""
        return map(self._pending, self.groups(elements))

    def count(self, batches: int) -> int:
        """Return the number of outer steps of a pass over so many batches."""
        epochs, rest = divmod(batches, self.epoch) if self.epoch else (0, batches)
        return epochs * -(-(self.epoch or 0) // self.steps) + -(-rest // self.steps)

    def groups(self, elements: Iterator[Element]) -> Iterator[list[Element]]:
        """Yield the elements of each outer step of a pass."""
        while True:
            rest = self.steps if self.epoch is None else self.epoch
            while rest > 0:
                group = list(islice(elements, min(self.steps, rest)))
                if not group:
                    return
                yield group
                rest -= self.steps

    def _pending(self, elements: Sequence[Batch | PendingBatch]) -> PendingBatch:
        def read(catching_up: Callable[[], AbstractContextManager[None]]) -> LocalBatches:
            batches = [
                element.read(catching_up) if isinstance(element, PendingBatch) else element
                for element in elements
            ]
            return LocalBatches(batches, self.replicas)

        return PendingBatch(read)


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
