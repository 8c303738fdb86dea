"""Which GPUs CUDA shows to a program that has `CUDA_VISIBLE_DEVICES`. Pure."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lockstep.system.prose import count

_NUMBER = re.compile(r"\+?[0-9]+")


class Named(Protocol):
    """What a GPU can be called in the list, besides its number."""

    @property
    def uuid(self) -> str | None:
        """Return its UUID, None if it does not tell."""

    @property
    def instances(self) -> tuple[str, ...] | None:
        """Return the UUIDs of its MIG instances, None if it is not divided."""


class Shown(NamedTuple):
    """What CUDA makes of the list.

    Attributes:
        places: of the GPUs that it shows, in its order.
        problem: what it does not take; empty if it takes all.
        by_number: whether the list has numbers.
    """

    places: tuple[int, ...]
    problem: str
    by_number: bool


def shown(gpus: Sequence[Named], listed: str | None) -> Shown:
    """Return what CUDA shows of these GPUs, which are all that it has.

    It stops at the first name that it does not know, and shows none if one is there twice.
    """
    if listed is None:
        return Shown(tuple(range(len(gpus))), "", False)
    names = [name.strip() for name in listed.split(",")]
    by_number = _kind(names[0]) == "number"
    found: dict[str, int] = {}
    problem = ""
    # "-1" and "" are how people hide GPUs.
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
    """Return what the GPU that a name means is known by, and its place; None if it means none, or several."""
    if digits := _NUMBER.match(name):
        # As CUDA does, which takes the number that a name begins with.
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
