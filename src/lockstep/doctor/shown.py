"""Which GPUs CUDA shows to a program for a value of `CUDA_VISIBLE_DEVICES`. Pure."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lockstep.system.prose import count

_NUMBER = re.compile(r"\+?[0-9]+")


class Named(Protocol):
    """The names by which the list can refer to a GPU, besides its number."""

    @property
    def uuid(self) -> str | None:
        """Return its UUID; None if it does not report one."""

    @property
    def instances(self) -> tuple[str, ...] | None:
        """Return the UUIDs of its MIG instances; None if it is not partitioned."""


class Shown(NamedTuple):
    """CUDA's interpretation of the list.

    Attributes:
        places: indices of the GPUs that it shows, in its order.
        problem: the entry that it does not accept; empty if it accepts all.
        by_number: whether the list contains numbers.
    """

    places: tuple[int, ...]
    problem: str
    by_number: bool


def shown(gpus: Sequence[Named], listed: str | None) -> Shown:
    """Return which of `gpus`, all GPUs of the machine, CUDA shows.

    CUDA stops at the first unknown name, and shows none if a GPU is listed twice.
    """
    if listed is None:
        return Shown(tuple(range(len(gpus))), "", False)
    names = [name.strip() for name in listed.split(",")]
    by_number = _kind(names[0]) == "number"
    found: dict[str, int] = {}
    problem = ""
    # "-1" and "" are common ways to hide GPUs.
    hidden = next((at for at, name in enumerate(names) if name.startswith("-")), len(names))
    for name in names[:hidden] if any(names) else ():
        if _kind(name) != _kind(names[0]):
            problem = f"{name!r} is of another kind than {names[0]!r}, and CUDA stops there"
            break
        meant = _find(name, gpus)
        if meant is None:
            problem = f"{name!r} is none of the {count(len(gpus), 'GPU')} here, and CUDA stops there"
            break
        identity, place = meant
        if identity in found:
            return Shown((), f"{name!r} is listed twice, which CUDA treats as an error", by_number)
        found[identity] = place
    return Shown(tuple(found.values()), problem, by_number)


def _find(name: str, gpus: Sequence[Named]) -> tuple[str, int] | None:
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
