"""Executes planned sums of arrays, in blocks that fit into the cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Bytes, Leaves, Span
from lockstep.collectives.layout import ALIGNMENT, Layout, allocate
from lockstep.collectives.plan import ReducePlan, Sum
from lockstep.errors import InternalError

BLOCK = 1 << 17
"""Bytes per register: several registers fit into a core's own cache."""

Array = npt.NDArray[Any]


class Adder:
    """Executes planned sums. An adder owns scratch registers, so each thread needs its own."""

    def __init__(self) -> None:
        self._blocks: list[Bytes] = []
        self._lines: list[Bytes] = []

    def add(self, plan: Sum, operands: Sequence[Array], out: Array) -> None:
        """Write the sum of `operands` to `out`, all flat and of one dtype and length.

        `out` may be one of the operands, but must not overlap one partially: only the last addition
        writes to it. Integers wrap; infinities and NaNs are ordinary results. The caller silences NumPy's
        floating-point warnings (`np.errstate`), once for many sums.

        If arrays are divided at multiples of `ALIGNMENT` bytes, the bits of an element do not depend on its
        position. They would without padding: the sum of two different NaNs is one of them, and NumPy chooses
        differently in the last elements, which do not fill a vector. So the last elements are padded to a
        whole cache line.
        """
        if not plan.steps:
            if out is not operands[0]:
                np.copyto(out, operands[0])
            return
        rest = out.size % (ALIGNMENT // out.dtype.itemsize) if out.dtype.kind not in "iu" else 0
        if rest:
            self._add_line(plan, [operand[-rest:] for operand in operands], out[-rest:])
            operands, out = [operand[:-rest] for operand in operands], out[:-rest]
        if len(plan.steps) == 1:
            np.add(operands[0], operands[1], out=out)
        else:
            self._add_blocks(plan, operands, out)

    def _add_line(self, plan: Sum, operands: Sequence[Array], out: Array) -> None:
        count = len(operands) + plan.scratch + 1
        registers = [line.view(out.dtype) for line in _at_least(self._lines, count, ALIGNMENT)]
        for register, operand in zip(registers, operands, strict=False):
            register[: out.size] = operand
        for left, right, target in plan.steps:
            np.add(registers[left], registers[right], out=registers[target])
        out[:] = registers[count - 1][: out.size]

    def _add_blocks(self, plan: Sum, operands: Sequence[Array], out: Array) -> None:
        scratch = [block.view(out.dtype) for block in _at_least(self._blocks, plan.scratch, BLOCK)]
        length = BLOCK // out.dtype.itemsize
        for start in range(0, out.size, length):
            stop = min(start + length, out.size)
            registers = [operand[start:stop] for operand in operands]
            registers += [register[: stop - start] for register in scratch]
            registers.append(out[start:stop])
            for left, right, target in plan.steps:
                np.add(registers[left], registers[right], out=registers[target])


def _at_least(memory: list[Bytes], count: int, size: int) -> list[Bytes]:
    while len(memory) < count:
        memory.append(allocate(size))
        memory[-1].fill(0)
    return memory[:count]


def flat(leaves: Leaves) -> list[Array]:
    """Return the leaves as flat arrays: views where they are contiguous, copies elsewhere."""
    return [np.asarray(leaf).reshape(-1) for leaf in leaves]


def common_layout(plan: ReducePlan, rank: int, partials: Mapping[Span, Leaves]) -> Layout:
    """Return the layout that all partials of one member share.

    Raises:
        InternalError: the layouts differ, or the partials do not cover the span that the member owns.
        ModelError: the leaves cannot be summed.
    """
    plan.local_sums(rank, partials)
    layout, *others = map(Layout.of, partials.values())
    if any(other is not layout for other in others):
        raise InternalError("the partials of a member differ in the shapes or dtypes of their leaves")
    layout.check()
    return layout
