"""The names of variables in a checkpoint: their owners, and the numbers that Keras assigns. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence

_COUNTER = re.compile(r"([^/]+)/iterations?")
_NUMBERED = re.compile(r"(.+)_([1-9]\d*)")


def parts(names: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Separate the names of one model in a checkpoint: its own variables, those of optimizers, and the rest.

    The names have this order. The rest are the variables of metrics and the buffers of PyTorch modules. Every
    optimizer's first variable is its counter of steps.
    """
    start = next((index for index, name in enumerate(names) if _COUNTER.fullmatch(name)), len(names))
    behind = names[start:]
    prefixes = {match[1] for name in behind if (match := _COUNTER.fullmatch(name))}
    # Some optimizers have variables without a prefix.
    optimizers = [name for name in behind if "/" not in name or _prefix(name) in prefixes]
    return names[:start], optimizers, [name for name in behind if name not in optimizers]


def renumbered(names: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Replace the numbers that Keras puts into paths with those in `wanted`.

    Keras numbers unnamed objects throughout the process: `dense`, `dense_1`. If other models were created
    earlier, the layers of a model have other numbers, in the same order. Names whose number of occurrences
    differs in `wanted` stay unchanged.

    Returns:
        The new path of each of `names`.
    """
    names = list(names)
    ours, theirs = _numbers(names), _numbers(wanted)
    renamed: dict[str, str] = {}
    for base, numbers in ours.items():
        wanted_numbers = theirs.get(base, {})
        if len(numbers) == len(wanted_numbers):
            pairs = zip(sorted(numbers), sorted(wanted_numbers), strict=True)
            renamed |= {numbers[old]: wanted_numbers[new] for old, new in pairs}
    return {name: "/".join(renamed.get(part, part) for part in name.split("/")) for name in names}


def renamed_slots(names: Iterable[str], wanted: Iterable[str], paths: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of each optimizer variable for weights with new paths.

    Args:
        names: the names of the optimizers' variables.
        wanted: the names of the variables that the optimizers should have.
        paths: the new path of each weight.
    """
    names, wanted = list(names), list(wanted)
    prefixes = renumbered({_prefix(name) for name in names}, {_prefix(name) for name in wanted})
    slots = {slot(old): slot(new) for old, new in paths.items()}
    return {name: _renamed_slot(name, prefixes, slots) for name in names}


def slot(path: str) -> str:
    """Return the prefix of the names of an optimizer's variables for the weight at `path`."""
    return path.replace("/", "_") + "_"


def _prefix(name: str) -> str:
    return name.split("/")[0]


def _renamed_slot(name: str, prefixes: Mapping[str, str], slots: Mapping[str, str]) -> str:
    rest = name.partition("/")[2]
    if not rest:
        return prefixes[name]
    old = max((prefix for prefix in slots if rest.startswith(prefix)), key=len, default="")
    return f"{prefixes[_prefix(name)]}/{slots.get(old, '')}{rest.removeprefix(old)}"


def _numbers(paths: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return the parts of paths by their name without the number, and by their number."""
    parts_by_base: dict[str, dict[int, str]] = {}
    for part in {part for path in paths for part in path.split("/")}:
        match = _NUMBERED.fullmatch(part)
        base, number = (match[1], int(match[2])) if match else (part, 0)
        parts_by_base.setdefault(base, {})[number] = part
    return parts_by_base
