"""Adds arrays along a planned sum, in blocks that stay in the cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Leaves, Span
from lockstep.collectives.layout import Layout, allocate
from lockstep.collectives.plan import ReducePlan, Sum

BLOCK = 1 << 17
"""Bytes a register holds: a handful of registers fit into a core's own cache."""

Array = npt.NDArray[Any]


class Adder:
    """Runs planned sums; owns the scratch registers, so each thread needs its own."""

    def __init__(self) -> None:
        self._scratch: list[npt.NDArray[np.uint8]] = []

    def add(self, plan: Sum, operands: Sequence[Array], out: Array) -> None:
        """Write the sum of `operands` to `out`, all flat and of one dtype and length.

        `out` may be one of the operands, but may not overlap one otherwise: only the last addition
        writes to it. Integers wrap; infinities and NaNs are results like others. Callers silence
        NumPy's floating-point warnings (`np.errstate`), once for many sums.
        """
        if not plan.steps:
            if out is not operands[0]:
                np.copyto(out, operands[0])
        elif len(plan.steps) == 1:
            np.add(operands[0], operands[1], out=out)
        else:
            self._add_blocks(plan, operands, out)

    def _add_blocks(self, plan: Sum, operands: Sequence[Array], out: Array) -> None:
        while len(self._scratch) < plan.scratch:
            self._scratch.append(allocate(BLOCK))
        length = BLOCK // out.dtype.itemsize
        scratch = [register.view(out.dtype) for register in self._scratch[: plan.scratch]]
        for start in range(0, out.size, length):
            stop = min(start + length, out.size)
            registers = [operand[start:stop] for operand in operands]
            registers += [register[: stop - start] for register in scratch]
            registers.append(out[start:stop])
            for left, right, target in plan.steps:
                np.add(registers[left], registers[right], out=registers[target])


def flat(leaves: Leaves) -> list[Array]:
    """Return the leaves as flat arrays: views where they are contiguous, copies where not."""
    return [np.asarray(leaf).reshape(-1) for leaf in leaves]


def merge(plan: ReducePlan, position: int, partials: Mapping[Span, Leaves]) -> dict[Span, Leaves]:
    """Add up one member's partials, in tree order, to the spans it publishes.

    A span that is given already is passed on as it is.

    Raises:
        InternalError: `partials` do not make up what the member owns.
    """
    adder, merged = Adder(), dict[Span, Leaves]()
    with np.errstate(all="ignore"):
        for span, each in zip(plan.published[position], plan.merges(position, partials), strict=True):
            if not each.steps:
                merged[span] = partials[span]
                continue
            layout = Layout.of(partials[each.operands[0]])
            out = layout.views(allocate(layout.size))
            operands = [flat(partials[part]) for part in each.operands]
            for leaf, target in enumerate(out):
                adder.add(each, [operand[leaf] for operand in operands], target)
            merged[span] = layout.shaped(out)
    return merged
