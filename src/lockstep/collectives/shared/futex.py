"""Waiting for words in shared memory: futex(2), for which Python has no function.

All functions take the address of an aligned 32-bit word in a shared mapping.
"""

import ctypes
import errno
import functools
import os
import platform
from collections.abc import Callable

from lockstep.errors import UnfitError

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ADD_ONE = (1 << 28) | (1 << 12)
"""`FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0)`: add 1 to the word."""
_ALL_WAITERS = 2**31 - 1

LOADS_IN_ORDER = platform.machine() == "x86_64"
"""Whether the processor never reorders a read of data before an earlier read of a word."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_number = ctypes.c_long(_NUMBERS.get(platform.machine(), -1))


def require() -> None:
    """Check that the number of the futex system call is known for this machine.

    Raises:
        UnfitError: the number is unknown.
    """
    if _number.value < 0:
        raise UnfitError(
            f"workers exchange data only on Linux on {' and '.join(_NUMBERS)}; "
            f"this machine is {platform.machine()}"
        )


def wait(address: int, expected: int, seconds: float) -> None:
    """Block while the word is `expected`, until a wake or a signal, for at most `seconds`.

    Python handles signals as soon as this returns, so an interrupt is not delayed.
    """
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _call(address, _WAIT, expected, ctypes.byref(limit), None, 0)


def adder(address: int) -> Callable[[], None]:
    """Return a function that adds 1 to the word and wakes all waiters.

    The addition is atomic and ordered: a process that sees the new word also sees all earlier writes.
    """
    word, zero = ctypes.c_void_p(address), ctypes.c_long(0)
    numbers = ctypes.c_int(_WAKE_OP), ctypes.c_uint32(_ALL_WAITERS), zero, word, ctypes.c_uint32(_ADD_ONE)
    # Creating these objects for each call would take longer than the call.
    return functools.partial(_checked, _number, word, *numbers)


def wake(address: int) -> None:
    """Wake all waiters of the word."""
    _call(address, _WAKE, _ALL_WAITERS, None, None, 0)


def confirm(address: int, seen: int) -> None:
    """Order this thread's later reads after its read of `seen` from the word.

    While it spins, a processor with weak memory ordering may read other data before it reads the word.
    Waiting for a value that the word no longer has returns at once, but is a full memory barrier.
    """
    if not LOADS_IN_ORDER:
        wait(address, (seen - 1) & 0xFFFFFFFF, 0.0)


_EXPECTED = frozenset([0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT])


def _call(address: int, operation: int, value: int, *rest: object) -> None:
    _checked(_number, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), *rest)


def _checked(*arguments: object) -> None:
    if _syscall(*arguments) < 0 and ctypes.get_errno() not in _EXPECTED:
        raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")
