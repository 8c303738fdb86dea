"""The state of an update that the workers of a host divide: blocks in shared memory that can be restored.

This module only computes in memory that callers pass. An elementwise update is cut into blocks of a fixed
number of elements, and the blocks into one range for each replica: the shards. The workers of a host update
equal shares of them. The memory has, in this order:

    counters   for each shard, in its own cache line: how many of its blocks were updated so far, in all
               updates together; and what this number will be after the update of the block that is kept
    kept       for each shard: the old slots of the block that is updated now
    groups     for each group of blocks: its slots (the state before and after an update), its new weights;
               with two versions of the weights, each update writes the older one

A block is updated in four steps: its old slots are kept, a note says so, its new weights and slots are
written, and it is counted. A worker can die at any point. The next worker of the shard reads two numbers. It
skips the blocks that are counted. If the following block is kept, it first restores its old slots. Then it
updates this block again, from the same bytes. The old weights do not change before all blocks are counted:
each worker has its own, or they are the other version.

Two workers never update one shard: all members of a view arrive in a call before any of them writes, and an
excluded worker is dead by then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Bytes
from lockstep.topology import split_evenly

Array = npt.NDArray[Any]

ComputeBlock = Callable[[int, Sequence[Array]], Sequence[Array]]
"""Returns the new weights and the new slots of a block, given its number and its old slots."""

_LINE = 64


class BlockGroup(NamedTuple):
    """Blocks of one dtype that one function updates, with so many slots for each weight."""

    blocks: int
    dtype: np.dtype[Any]
    slots: int


class BlockPlace(NamedTuple):
    """A block: its group, and its elements there."""

    group: int
    start: int
    stop: int


class SlotValue(NamedTuple):
    """A worker's value of one slot of a variable.

    Attributes:
        name: the name of the optimizer's variable that holds it.
        group: the group of its blocks.
        slot: the number of the slot there.
        start: its first element there.
        array: its elements, flat.
    """

    name: str
    group: int
    slot: int
    start: int
    array: Array

    def is_in(self, state: "DividedState") -> bool:
        """Whether a state has the same bytes."""
        there = state.slots[self.group][self.slot][self.start : self.start + len(self.array)]
        return np.array_equal(self.array.view(np.uint8), there.view(np.uint8))


@dataclass(frozen=True)
class DividedLayout:
    """The division of an update, which depends only on the model and on the number of replicas.

    Attributes:
        groups: all blocks.
        elements: the number of elements of each block, whose bytes are whole cache lines.
        replicas: the number of shards.
        versions: the number of versions of the weights: 1, or 2 if an update keeps the old weights.
    """

    groups: tuple[BlockGroup, ...]
    elements: int
    replicas: int
    versions: int = 1

    @cached_property
    def places(self) -> tuple[BlockPlace, ...]:
        """The blocks, by number."""
        size = self.elements
        return tuple(
            BlockPlace(index, number * size, (number + 1) * size)
            for index, group in enumerate(self.groups)
            for number in range(group.blocks)
        )

    @cached_property
    def shards(self) -> tuple[range, ...]:
        """The numbers of the blocks of each shard."""
        shards, stop = [], 0
        for count in split_evenly(len(self.places), self.replicas):
            shards.append(range(stop, stop + count))
            stop += count
        return tuple(shards)

    @cached_property
    def kept(self) -> int:
        """Bytes of the slots of the largest block."""
        return max((g.slots * self.elements * g.dtype.itemsize for g in self.groups), default=0)

    @cached_property
    def size(self) -> int:
        """Bytes of the memory."""
        of_group = (g.blocks * self.elements * g.dtype.itemsize for g in self.groups)
        arrays = (size * (g.slots + self.versions) for g, size in zip(self.groups, of_group, strict=True))
        return self.replicas * (_LINE + self.kept) + sum(arrays)

    @cached_property
    def text(self) -> str:
        """A description of the layout, equal on workers that divide in the same way."""
        groups = ", ".join(f"{g.blocks} blocks of {g.dtype.name} with {g.slots} slots" for g in self.groups)
        return f"{groups}, {self.elements} elements each"


class DividedState:
    """The state of one update in the memory that the workers of a host share.

    Attributes:
        layout: the division of the update.
        slots: for each group, its slots: all elements of each.
    """

    def __init__(self, layout: DividedLayout, memory: Bytes) -> None:
        self.layout = layout
        start = layout.replicas * _LINE
        self._counters = memory[:start].view(np.uint64).reshape(layout.replicas, -1)
        self._kept = memory[start : start + layout.replicas * layout.kept].reshape(
            layout.replicas, layout.kept
        )
        start += layout.replicas * layout.kept
        self.slots: list[list[Array]] = []
        self._versions: list[list[Array]] = [[] for _ in range(layout.versions)]
        for group in layout.groups:
            size = group.blocks * layout.elements * group.dtype.itemsize
            arrays = [
                memory[start + i * size : start + (i + 1) * size].view(group.dtype)
                for i in range(group.slots + layout.versions)
            ]
            self.slots.append(arrays[: group.slots])
            for version, array in zip(self._versions, arrays[group.slots :], strict=True):
                version.append(array)
            start += len(arrays) * size

    def weights_after(self, updates: int) -> list[Array]:
        """Return each group's weights after a number of updates, which is the last or the present one."""
        return self._versions[updates % self.layout.versions]

    @property
    def updates(self) -> int:
        """How many updates all blocks have had since their slots were set, read between two updates."""
        counts = zip(self._counters[:, 0], map(len, self.layout.shards), strict=True)
        return next((int(count) // blocks for count, blocks in counts if blocks), 0)

    def reset(self, shard: int) -> None:
        """Forget the updates of a shard's blocks: their slots were set."""
        self._counters[shard] = 0

    def update(self, number: int, shard: int, compute: ComputeBlock) -> None:
        """Update those blocks of a shard that are not yet updated.

        Args:
            number: the number of updates before this one.
            shard: the number of the shard, which this worker updates.
            compute: computes a block; it may change the old slots in place.
        """
        blocks, counters = self.layout.shards[shard], self._counters[shard]
        before = number * len(blocks)
        for block in blocks[int(counters[0]) - before :]:
            group, start, stop = self.layout.places[block]
            slots = [slot[start:stop] for slot in self.slots[group]]
            kept = _parts_like(slots, self._kept[shard])
            after = int(counters[0]) + 1
            if counters[1] == after:
                copy_all(slots, kept)
            else:
                copy_all(kept, slots)
                counters[1] = after
            weights = self.weights_after(number + 1)[group][start:stop]
            copy_all([weights, *slots], compute(block, slots))
            counters[0] = after


def _parts_like(arrays: Sequence[Array], memory: Bytes) -> list[Array]:
    """Return consecutive parts of the memory that have room for the arrays."""
    parts, start = [], 0
    for array in arrays:
        parts.append(memory[start : start + array.nbytes].view(array.dtype))
        start += array.nbytes
    return parts


def copy_all(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    """Copy arrays; results of an update in place are already there."""
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            np.copyto(target, source)
