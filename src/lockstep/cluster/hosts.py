"""Slurm's own notation for hosts, `node[01-03,7],gpu[1-2]`, and for tasks on them, `2(x3),1`."""

import re
from collections.abc import Iterator
from itertools import islice, product

from lockstep.errors import ConfigError

_MOST = 65536
_NAME = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as `node[01-03,7]`, in its order: node01, node02, node03, node7.

    A range has as many digits at least as its first number. Where a name has several brackets, the last one
    varies first.

    Raises:
        ConfigError: it is not a list of hosts, or one of more than 65,536.
    """
    names = _split(text)
    hosts = list(islice((host for name in names for host in _expand(text, name)), _MOST + 1))
    if len(hosts) > _MOST:
        raise _wrong(text, f"has more than {_MOST} hosts")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a list such as `2(x3),1`: 2, 2, 2, 1.

    Raises:
        ConfigError: it is not such a list, or one of more than 65,536 numbers.
    """
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    runs = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    if len(runs) != len(found) or sum(times for _, times in runs) > _MOST:
        raise ConfigError(f"Slurm's list of tasks is {text!r}, expected the tasks on each host: '2(x3),1'")
    return [number for number, times in runs for _ in range(times)]


def _split(text: str) -> list[str]:
    names = _NAME.findall(text)
    if not names or ",".join(names) != text:
        raise _wrong(text, "is not a list of hosts")
    return names


def _expand(text: str, name: str) -> Iterator[str]:
    pieces, count = [], 1
    for match in _PIECE.finditer(name):
        pieces.append(_numbers(text, match[1]) if match[2] is None else [match[2]])
        count *= len(pieces[-1])
        if count > _MOST:
            raise _wrong(text, f"has more than {_MOST} hosts")
    return map("".join, product(*pieces))


def _numbers(text: str, ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or first > last:
            raise _wrong(text, f"has {part!r} in brackets")
        if len(numbers) + last - first >= _MOST:
            raise _wrong(text, f"has more than {_MOST} hosts")
        numbers.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers


def _wrong(text: str, what: str) -> ConfigError:
    return ConfigError(
        f"Slurm's list of hosts, {text[:120]!r}, {what}: expected such as 'node[01-03,7],gpu1'"
    )
