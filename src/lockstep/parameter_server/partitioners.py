"""How variables are divided among parameter servers: named and computed as in
`tf.distribute.experimental.partitioners`.

A partitioner divides the first axis of a variable into shards whose sizes differ by at most one, the larger
ones first. Shards and whole variables are placed on the servers in turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Protocol

import numpy.typing as npt

from lockstep.errors import InputError
from lockstep.topology import split_evenly


class Partitioner(Protocol):
    """Decides on the number of shards into which a variable is divided."""

    def shards(self, shape: Sequence[int], item_bytes: int) -> int:
        """Return the number of shards along the first axis of a variable, at least 1.

        Args:
            shape: the shape of the variable.
            item_bytes: the size of one of its elements.
        """


@dataclass(frozen=True)
class FixedShardsPartitioner:
    """Divides each variable into the same number of shards, at most one per row.

    Example:
        >>> import lockstep
        >>> lockstep.FixedShardsPartitioner(4).shards((10, 8), item_bytes=4)
        4
    """

    num_shards: int

    def __post_init__(self) -> None:
        _refuse_less_than_one("num_shards", self.num_shards)

    def shards(self, shape: Sequence[int], item_bytes: int) -> int:
        """Return the number of shards of a variable."""
        return max(1, min(self.num_shards, shape[0])) if shape else 1


@dataclass(frozen=True)
class MinSizePartitioner:
    """Makes as many shards as possible, each about `min_shard_bytes` or more, at most `max_shards`.

    Example:
        >>> import lockstep
        >>> partitioner = lockstep.MinSizePartitioner(min_shard_bytes=1 << 20, max_shards=8)
        >>> partitioner.shards((1_000_000, 1), item_bytes=4)
        4
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _refuse_less_than_one("min_shard_bytes", self.min_shard_bytes)
        _refuse_less_than_one("max_shards", self.max_shards)

    def shards(self, shape: Sequence[int], item_bytes: int) -> int:
        """Return the number of shards of a variable."""
        if not shape:
            return 1
        return max(1, min(ceil(prod(shape) * item_bytes / self.min_shard_bytes), self.max_shards, shape[0]))


@dataclass(frozen=True)
class MaxSizePartitioner:
    """Makes as few shards as possible, each `max_shard_bytes` or less, at most `max_shards`.

    Example:
        >>> import lockstep
        >>> lockstep.MaxSizePartitioner(max_shard_bytes=1 << 20).shards((1_000_000, 1), item_bytes=4)
        4
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _refuse_less_than_one("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            _refuse_less_than_one("max_shards", self.max_shards)

    def shards(self, shape: Sequence[int], item_bytes: int) -> int:
        """Return the number of shards of a variable."""
        if not shape or not shape[0]:
            return 1
        row = prod(shape[1:]) * item_bytes
        # A shard has whole rows.
        rows = max(1, self.max_shard_bytes // row) if row else shape[0]
        needed = ceil(shape[0] / rows)
        return min(needed, self.max_shards) if self.max_shards is not None else needed


@dataclass(frozen=True)
class Shard:
    """A range of the rows of a variable, on one server.

    Attributes:
        variable: the index of the variable.
        start: its first row.
        stop: the row after its last one.
        whole: whether it is the whole variable.
        server: the index of its server.
    """

    variable: int
    start: int
    stop: int
    whole: bool
    server: int

    def part_of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the shard's rows of an array that has the rows of the variable."""
        return array if self.whole else array[self.start : self.stop]


def place_variables(
    variables: Sequence[tuple[Sequence[int], int]],
    servers: int,
    partitioner: Partitioner | None = None,
    ranges: Mapping[int, Sequence[tuple[int, int]]] | None = None,
) -> tuple[Shard, ...]:
    """Place variables on servers in turn, in their order.

    Args:
        variables: the shape of each, and the size of its elements in bytes.
        servers: the number of servers.
        partitioner: divides variables; None to place each variable as a whole.
        ranges: the rows on each server of variables that are already placed, by their indices.
    """
    placed: list[Shard] = []
    for variable, (shape, item_bytes) in enumerate(variables):
        if ranges and variable in ranges:
            placed += [Shard(variable, *rows, False, server) for server, rows in enumerate(ranges[variable])]
            continue
        count = partitioner.shards(shape, item_bytes) if partitioner is not None else 1
        start = 0
        for size in split_evenly(shape[0], count) if count > 1 else (shape[0] if shape else 0,):
            placed.append(Shard(variable, start, start + size, count == 1, len(placed) % servers))
            start += size
    return tuple(placed)


def _refuse_less_than_one(name: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{name} is {value}; expected 1 or more")
