"""A table of the examples that each replica reads in each step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lockstep.topology import View, split_evenly

_MAX_SHOWN = 8
"""Maximum number of row numbers to print in full."""


@dataclass(frozen=True)
class Rows:
    """The rows of one step, in the order in which they are split over the replicas.

    Attributes:
        numbers: row numbers, in the arrays or, for a dataset of batches, within the batch.
        batch: the index of the batch in the dataset, from 0; None for arrays.
    """

    numbers: Sequence[int]
    batch: int | None = None


@dataclass(frozen=True)
class ReplicaRows:
    """The rows that one replica reads in one step.

    Attributes:
        step: the number of the step in the epoch, from 1.
        replica: the replica's id.
        worker: the id of the worker that computes the replica.
        rows: the rows that the replica reads.
    """

    step: int
    replica: int
    worker: int
    rows: Rows


@dataclass(frozen=True)
class InputTable:
    """The rows that all replicas read; `str` returns a table with a line for each replica of each step.

    Attributes:
        way: a description of how the workers read the input, and why.
        readings: the rows of each replica in each step.
    """

    way: str
    readings: tuple[ReplicaRows, ...]

    def __iter__(self) -> Iterator[ReplicaRows]:
        return iter(self.readings)

    def __str__(self) -> str:
        heading = ("step", "replica", "worker", "examples")
        lines = [(str(r.step), str(r.replica), str(r.worker), describe(r.rows)) for r in self.readings]
        widths = [max(len(line[column]) for line in (heading, *lines)) for column in range(3)]
        rows = (
            "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[3]])
            for line in (heading, *lines)
        )
        return "\n".join((self.way, *rows))

    __repr__ = __str__


def input_table(steps: Iterable[Rows], view: View, way: str) -> InputTable:
    """Split the rows of each step over the replicas of `view`, as training does; `way` is for the table."""
    readings = []
    for step, rows in enumerate(steps, 1):
        starts = accumulate(split_evenly(len(rows.numbers), view.replicas), initial=0)
        for replica, (start, stop) in enumerate(pairwise(starts)):
            share = Rows(tuple(rows.numbers[start:stop]), rows.batch)
            readings.append(ReplicaRows(step, replica, view.owners[replica], share))
    return InputTable(way, tuple(readings))


def describe(rows: Rows) -> str:
    """Return a short description of rows."""
    numbers = list(rows.numbers)
    if not numbers:
        text = "none"
    elif len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        text = f"{numbers[0]}-{numbers[-1]}"
    elif len(numbers) > _MAX_SHOWN:
        shown = ", ".join(map(str, numbers[: _MAX_SHOWN - 1]))
        text = f"{shown}, ... {numbers[-1]} ({len(numbers)})"
    else:
        text = ", ".join(map(str, numbers))
    return text if rows.batch is None else f"{text} of batch {rows.batch}"
