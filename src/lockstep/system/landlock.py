"""Landlock: the kernel lets this process write only below some folders, from code in any language.

The kernel's interface: https://docs.kernel.org/userspace-api/landlock.html. Linux has it from version 5.13
on, if it is enabled; containers may forbid it.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from lockstep.system.files import closed_after

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of system calls, the same on all architectures."""
_VERSION = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_WRITE_FILE, _REMOVE_DIR, _REMOVE_FILE = 1 << 1, 1 << 4, 1 << 5
_MAKE = sum(1 << bit for bit in (6, 8, 9, 10, 11, 12))
"""To create anything but folders: an empty folder harms nobody, and scripts create theirs first."""
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_LATER = {2: _REFER, 3: _TRUNCATE}
"""The rights that later versions of the interface can restrict, too."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def can_restrict() -> bool:
    """Whether `write_only_below` works here."""
    try:
        return _version() > 0
    except OSError:
        return False


def write_only_below(folders: Iterable[Path]) -> None:
    """Let this thread, and those that it starts, write only below some folders, for the rest of their life.

    Files that are already open can be written. Other writes fail with "Permission denied". Empty folders can
    be created anywhere.

    Args:
        folders: the folders; missing ones are left out.

    Raises:
        OSError: the kernel cannot restrict it.
    """
    restricted = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE
    version = _version()
    restricted |= sum(access for since, access in _LATER.items() if version >= since)
    ruleset = _Ruleset(restricted)
    rules = _call(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset)), 0)
    with closed_after(rules):
        for folder in folders:
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                closed_after(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor,
            ):
                rule = _PathBeneath(restricted, descriptor)
                _call(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), 0)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _call(_RESTRICT_SELF, rules, 0)


def _version() -> int:
    return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return result
