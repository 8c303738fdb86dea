"""The program that this process was started with."""

import builtins
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FORKED = 0x40
_FLAGS = 6


@dataclass(frozen=True)
class Invocation:
    """A script or module that Python runs.

    Attributes:
        options: the options of the interpreter.
        command: the rest, `[-m] target arguments...`.
    """

    options: tuple[str, ...]
    command: tuple[str, ...]


def parse(original: Sequence[str]) -> Invocation | None:
    """Return the script or the module that an interpreter was started with, or None if it is neither.

    Args:
        original: the whole command, like `sys.orig_argv`.
    """
    rest, options = list(original[1:]), list[str]()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        flag = next((at for at, sign in enumerate(word) if sign in "cmWX"), None)
        if word.startswith("--") or flag is None:
            options.append(word)
            if word == "--check-hash-based-pycs":
                options += rest[:1]
                del rest[:1]
            continue
        value = [word[flag + 1 :]] if word[flag + 1 :] else rest[:1]
        if not word[flag + 1 :]:
            del rest[:1]
        before = [word[:flag]] if flag > 1 else []
        if word[flag] == "c":
            return None
        if word[flag] == "m":
            return Invocation((*options, *before), ("-m", *value, *rest)) if value else None
        options += [word[: flag + 1], *value]
    return Invocation(tuple(options), tuple(rest)) if rest and rest[0] != "-" else None


def current_program() -> Invocation | None:
    """Return the program of this process, or None if it cannot be run again.

    It is None in an interactive session, in a notebook, with `python -c`, and in a forked process.
    """
    interactive = hasattr(sys, "ps1") or hasattr(builtins, "get_ipython")
    path = getattr(sys.modules["__main__"], "__file__", None)
    if interactive or path is None or _is_forked():
        return None
    program = parse(sys.orig_argv)
    if program is None or program.command[0] == "-m" or Path(program.command[0]).is_absolute():
        return program
    # Python made this path absolute at its start; the program may have changed the folder since then.
    return Invocation(program.options, (path, *program.command[1:]))


def _is_forked() -> bool:
    status = Path("/proc/self/stat").read_text()
    return bool(int(status.rpartition(")")[2].split()[_FLAGS]) & _FORKED)
