"""Which GPUs CUDA shows to a program, by the value of `CUDA_VISIBLE_DEVICES`. Pure."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lockstep.system.prose import count

_NUMBER = re.compile(r"\+?[0-9]+")


class GpuNames(Protocol):
    """The names by which the value can refer to a GPU, apart from its number."""

    @property
    def uuid(self) -> str | None:
        """Return its UUID; None if it does not report one."""

    @property
    def instances(self) -> tuple[str, ...] | None:
        """Return the UUIDs of its MIG instances; None if it is not partitioned."""


class Visibility(NamedTuple):
    """CUDA's interpretation of the value.

    Attributes:
        indices: of the GPUs that CUDA shows, in its order.
        problem: the entry that CUDA does not accept; empty if it accepts all.
        by_number: whether the value contains numbers.
    """

    indices: tuple[int, ...]
    problem: str
    by_number: bool


def visibility(gpus: Sequence[GpuNames], listed: str | None) -> Visibility:
    """Return which of `gpus`, all GPUs of the machine, CUDA shows for the value `listed`.

    CUDA stops at the first unknown name, and shows no GPU if one is listed twice.
    """
    if listed is None:
        return Visibility(tuple(range(len(gpus))), "", False)
    names = [name.strip() for name in listed.split(",")]
    by_number = _kind(names[0]) == "number"
    found: dict[str, int] = {}
    problem = ""
    # "-1" and "" are common ways to hide GPUs.
    hidden = next((at for at, name in enumerate(names) if name.startswith("-")), len(names))
    for name in names[:hidden] if any(names) else ():
        if _kind(name) != _kind(names[0]):
            problem = f"{name!r} and {names[0]!r} are names of different kinds, and CUDA stops there"
            break
        meant = _find(name, gpus)
        if meant is None:
            problem = f"{name!r} identifies none of the {count(len(gpus), 'GPU')} here, and CUDA stops there"
            break
        identity, place = meant
        if identity in found:
            return Visibility((), f"{name!r} is listed twice, which CUDA treats as an error", by_number)
        found[identity] = place
    return Visibility(tuple(found.values()), problem, by_number)


def _find(name: str, gpus: Sequence[GpuNames]) -> tuple[str, int] | None:
    """Return the full name and the index of the GPU that `name` refers to; None if none or several match."""
    if digits := _NUMBER.match(name):
        # Like CUDA, which uses the number at the beginning of a name.
        place = int(digits[0])
        return (str(place), place) if place < len(gpus) else None
    known = [
        (identity, place)
        for place, gpu in enumerate(gpus)
        for identity in ((gpu.uuid or "",) if _kind(name) == "GPU" else gpu.instances or ())
    ]
    meant = [each for each in known if name and each[0].startswith(name)]
    return meant[0] if len(meant) == 1 else None


def _kind(name: str) -> str:
    if _NUMBER.match(name):
        return "number"
    return "MIG" if name.startswith("MIG-") else "GPU"
