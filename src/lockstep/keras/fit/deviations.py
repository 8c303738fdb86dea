"""Whether two computations of a value differ by more than rounding, and how.

Rounding is measured, not guessed: `others` are computations of the same value from inputs that differ in the
last bits. They also differ in a value that is zero except for rounding, or that jumps when an input crosses a
threshold.

A difference counts if it is 32 times as large as the changes due to those inputs, and more than about 1e-4 of
the largest element.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_TIMES_ROUNDING = 32
"""A difference is more than rounding if it is this many times larger than the measured one."""

_EPSILONS, _MOST = 1024, 0.03
"""A difference of this many units in the last place of the largest element is always rounding, up to the part
`_MOST` of it, because the units are large in half precision."""

_ALIKE = 0.02
"""A value is a multiple of another one if the remainder is at most this part of it."""

_NOTHING = 1e-5
"""A value is zero if its elements are at most this part of those that were expected."""

_FACTORS = {0.5: "half", 2.0: "double", -1.0: "the negative of"}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Deviation:
    """A difference that is more than rounding.

    Attributes:
        size: the largest difference of two elements, divided by the largest element; infinite if shapes
            differ, or only one of two elements is a number.
        direction: the direction of the difference, such as "half", for a message; empty if it has none.
        unexplained: why the name of a part of the program does not explain it; empty if it may.
    """

    size: float
    direction: str = ""
    unexplained: str = ""

    def __str__(self) -> str:
        also = f", {self.unexplained}" if self.unexplained else ""
        if not np.isfinite(self.size):
            return f"{self.direction or 'not a number on one side'}{also}"
        percent = 100 * self.size
        size = f"{percent:.2g} %" if percent < 10 else f"{percent:,.0f} %"
        text = f"{self.direction} (differs by {size})" if self.direction else f"differs by {size}"
        return f"{text}{also}"


def deviation(
    reference: Array,
    value: Array,
    others: Sequence[Array],
    epsilon: float,
    scale: float = 0.0,
    *,
    base: Array | None = None,
) -> Deviation | None:
    """Return how a value deviates from a reference, or None for rounding.

    Args:
        reference: the value that one process computes.
        value: the value that replicas compute.
        others: the reference, computed from inputs that differ in the last bits.
        epsilon: the distance from 1 to the next number in the precision of the computation.
        scale: the largest element of all values that are computed together. It is the scale for a value that
            consists only of rounding errors.
        base: the value whose roundings are `others`, if it is not the reference.
    """
    if reference.shape != value.shape:
        return Deviation(np.inf, f"of shape {list(value.shape)} instead of {list(reference.shape)}")
    if not reference.size:
        return None
    if reference.dtype.kind not in "fcV":
        others = [other for other in others if other.shape == reference.shape]
        varies = any(np.any(other != (reference if base is None else base)) for other in others)
        return None if varies or np.array_equal(reference, value) else _described(reference, value)
    numbers = np.isfinite(reference)
    if not np.array_equal(numbers, np.isfinite(value)):
        return Deviation(np.inf)
    base = reference if base is None or base.shape != reference.shape else base
    reference, value, base = (
        np.where(numbers, part, 0).astype("float64") for part in (reference, value, base)
    )
    rounding = max(
        (
            float(np.max(np.abs(np.where(numbers, other, 0) - base)))
            for other in others
            if other.shape == reference.shape
        ),
        default=0.0,
    )
    largest = float(np.max(np.abs(reference)))
    limit = max(_TIMES_ROUNDING * rounding, min(_EPSILONS * epsilon, _MOST) * largest, epsilon * scale)
    return _described(reference, value) if float(np.max(np.abs(value - reference))) > limit else None


def _described(reference: Array, value: Array) -> Deviation:
    reference, value = reference.astype("float64"), value.astype("float64")
    largest = float(np.max(np.abs(reference)))
    difference = float(np.max(np.abs(value - reference)))
    if not largest:
        return Deviation(np.inf, "not zero")
    if float(np.max(np.abs(value))) <= _NOTHING * largest:
        return Deviation(1.0, "zero")
    factor = float(np.vdot(reference, value) / np.vdot(reference, reference))
    direction = ""
    if np.max(np.abs(value - factor * reference)) <= _ALIKE * np.max(np.abs(value)):
        name_of_factor = next(
            (name for size, name in _FACTORS.items() if abs(factor / size - 1) < _ALIKE), None
        )
        direction = name_of_factor or (f"{factor:.3g} times" if abs(factor - 1) > _ALIKE else "")
    return Deviation(difference / largest, direction)
