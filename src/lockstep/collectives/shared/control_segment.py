"""The control segment of one view: a memfd, its layout, and the word that aborts the view.

    header     magic, version, number of members; the abort word and its reason; the notice; the time until
               which calls may end; whether the last two arrivals were settled as complete after an abort
    arrivals   for each member, in its own cache lines: how often it has arrived, whether it has left, for
               which hosts it waits; for the first member also two copies of the notice that it read
    slots      two for each member: the description of its call
    mailboxes  two for each member: a part of a blob

A member's slots, mailboxes and notices alternate from one arrival to the next: it cannot arrive a second time
before all members have arrived once, and thus have read the data of the previous arrival.

The memfd has no name, so nothing remains of it however the processes end.
"""

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from lockstep.collectives.call import REASON_LIMIT, CollectiveCall
from lockstep.collectives.shared import futex
from lockstep.collectives.shared.pool import allocate
from lockstep.errors import InternalError
from lockstep.system.memory import available_memory

MAILBOX = 1 << 19
"""Bytes of a blob that one arrival transfers."""
SLOT = 1 << 10

_MAGIC = struct.Struct("<8sII")
_NAME, _VERSION = b"LOCKSTEP", 3
_ABORT, _REASON_LENGTH, _NOTICE, _PERMITTED, _SETTLED, _REASON = 64, 68, 72, 80, 96, 128
_ARRIVALS, _LINE = 4608, 128
_MISSING, _MISSING_SIZE = 64, 64
HOST_LIMIT = 8 * _MISSING_SIZE
"""Maximum number of hosts of a view."""
_PAGE = mmap.PAGESIZE

_aborting = threading.RLock()


class ControlSegment:
    """One process's mapping of the memory in which the members of a view synchronize.

    Use `create` in the process that starts the workers, and `attach` in each worker. Any process that has the
    memfd can abort the view, even if it is not a member.
    """

    def __init__(self, fd: int, members: int, control: mmap.mmap) -> None:
        self.fd = fd
        self.members = members
        self.control = control
        self._words = memoryview(control).cast("I")
        # Aligned, so that each is read and written at once.
        self._times = memoryview(control).cast("d")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(control))

    @classmethod
    def create(cls, members: int) -> Self:
        """Create the memory for a new view of `members` workers.

        Pass `fd` to a worker with `subprocess.Popen(..., pass_fds=[segment.fd])`; other programs that this
        process starts do not inherit it.

        Raises:
            SharedMemoryError: there is too little memory.
        """
        futex.require()
        fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            allocate(fd, 0, control_size(members), available_memory)
            # Reading beyond the end of a truncated file kills the process.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            control = mmap.mmap(fd, control_size(members))
        except BaseException:
            os.close(fd)
            raise
        _MAGIC.pack_into(control, 0, _NAME, _VERSION, members)
        segment = cls(fd, members, control)
        segment.permit(math.inf)
        return segment

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map the memory that another process created; takes ownership of `fd`.

        Raises:
            InternalError: `fd` is not a control segment of this version.
        """
        size = os.fstat(fd).st_size
        header = os.pread(fd, _MAGIC.size, 0) if size >= _PAGE else b""
        name, version, members = _MAGIC.unpack(header) if header else (b"", 0, 0)
        if name != _NAME or version != _VERSION or size < control_size(members):
            raise InternalError(f"descriptor {fd} is not a control segment of version {_VERSION}")
        os.set_inheritable(fd, False)
        return cls(fd, members, mmap.mmap(fd, control_size(members)))

    def address(self, rank: int) -> int:
        """Return the address of the word that counts a member's arrivals."""
        return self._address + _ARRIVALS + rank * _LINE

    def arrivals(self, rank: int) -> int:
        """Return how often a member has arrived, modulo 2**32."""
        return self._words[(_ARRIVALS + rank * _LINE) // 4]

    def has_left(self, rank: int) -> bool:
        """Whether a member has announced that it makes no more calls."""
        return self._words[(_ARRIVALS + rank * _LINE) // 4 + 1] != 0

    def leave(self, rank: int) -> None:
        """Announce that a member makes no more calls."""
        self._words[(_ARRIVALS + rank * _LINE) // 4 + 1] = 1
        futex.wake(self.address(rank))

    def post_notice(self, notice: int) -> None:
        """Set the notice; all members see it from the same call on. Does nothing once closed."""
        if not self.control.closed:
            self._words[_NOTICE // 4] = notice

    @property
    def posted(self) -> int:
        """The current notice. Members may begin to see it in different calls."""
        return self._words[_NOTICE // 4]

    def publish_notice(self, arrival: int) -> None:
        """Publish the current notice to all members; the first member calls this before it arrives."""
        self._words[(_ARRIVALS + 8) // 4 + arrival % 2] = self._words[_NOTICE // 4]

    def notice(self, arrival: int) -> int:
        """Return the notice that the first member published before an arrival."""
        return self._words[(_ARRIVALS + 8) // 4 + arrival % 2]

    def permit(self, until: float) -> None:
        """Let calls end until a time of the monotonic clock of this machine. Does nothing once closed."""
        if not self.control.closed:
            self._times[_PERMITTED // 8] = until
            # Members that wait for a permission sleep on this word, because an abort ends their wait.
            futex.wake(self._address + _ABORT)

    @property
    def permitted_until(self) -> float:
        """The time until which calls may end; by default, there is no limit."""
        return self._times[_PERMITTED // 8]

    def wait_for_permit(self, seconds: float) -> None:
        """Block until the next `permit` or `abort`, for at most `seconds`."""
        futex.wait(self._address + _ABORT, 0, seconds)

    def post_missing(self, rank: int, hosts: int) -> None:
        """Announce the other hosts for which a member waits: bit `h` represents host `h`."""
        start = _ARRIVALS + rank * _LINE + _MISSING
        self.control[start : start + _MISSING_SIZE] = hosts.to_bytes(_MISSING_SIZE, "little")

    def missing(self, rank: int) -> int:
        """Return the other hosts for which a member waits, or 0 if it does not wait."""
        start = _ARRIVALS + rank * _LINE + _MISSING
        return int.from_bytes(self.control[start : start + _MISSING_SIZE], "little")

    def slot(self, rank: int, arrival: int) -> int:
        """Return the offset in `control` of a member's slot for an arrival."""
        return _slots(self.members) + (2 * rank + arrival % 2) * SLOT

    def mailbox(self, rank: int, arrival: int) -> int:
        """Return the offset in `control` of a member's mailbox for an arrival."""
        return _mailboxes(self.members) + (2 * rank + arrival % 2) * MAILBOX

    def abort(self, reason: str) -> None:
        """End the view: members that wait, or call later, raise `PeerLostError(reason)`.

        The first reason stays; it is truncated to 4 KB of UTF-8. Does nothing once this mapping is closed.
        """
        if self.control.closed:
            return
        # A stopped process may hold the lock.
        with _aborting, _locked(self.fd, 0.1):
            if not self._words[_ABORT // 4]:
                text = reason.encode("utf-8", "replace")[:REASON_LIMIT]
                self.control[_REASON : _REASON + len(text)] = text
                self._words[_REASON_LENGTH // 4] = len(text)
                futex.adder(self._address + _ABORT)()
        for rank in range(self.members):
            futex.wake(self.address(rank))

    def reason(self) -> str | None:
        """Return why the view was aborted, or None if it was not."""
        ended = self._words[_ABORT // 4]
        if not ended:
            return None
        futex.confirm(self._address + _ABORT, ended)
        length = self._words[_REASON_LENGTH // 4]
        return self.control[_REASON : _REASON + length].decode("utf-8", "ignore")

    @property
    def is_aborted(self) -> bool:
        """Whether the view was aborted."""
        return self._words[_ABORT // 4] != 0

    def settle(self, arrival: int, have_all_arrived: Callable[[], bool], seconds: float) -> bool:
        """Return whether an arrival is complete; equal for all members that call this after an abort.

        The first member that calls this decides. If it finds a member missing, no member has seen all
        arrivals before the abort. If it finds none missing, some members may have seen all arrivals, and
        continue without calling this.

        Args:
            arrival: its number.
            have_all_arrived: returns whether all members have arrived; it reads the arrivals again.
            seconds: the longest wait for another process that is settling an arrival.

        Raises:
            TimeoutError: it has not finished by then.
        """
        word = _SETTLED // 4 + arrival % 2
        with _aborting, _locked(self.fd, seconds) as held:
            if not held:
                raise TimeoutError
            for complete in (False, True):
                if self._words[word] == _settled(arrival, complete):
                    return complete
            is_complete = have_all_arrived()
            self._words[word] = _settled(arrival, is_complete)
            return is_complete

    def close(self) -> None:
        """Unmap the memory and close the descriptor; the view continues for the others."""
        if not self.control.closed:
            self._words.release()
            self._times.release()
            self.control.close()
            os.close(self.fd)


def control_size(members: int) -> int:
    """Return the size of a control segment in bytes, whole pages."""
    return _mailboxes(members) + members * 2 * MAILBOX


def _slots(members: int) -> int:
    return _ARRIVALS + members * _LINE


def _mailboxes(members: int) -> int:
    return -(-(_slots(members) + members * 2 * SLOT) // _PAGE) * _PAGE


def _settled(arrival: int, complete: bool) -> int:
    return (arrival << 2 | complete << 1 | 1) % (1 << 32)


@contextlib.contextmanager
def _locked(fd: int, seconds: float) -> Iterator[bool]:
    """Hold the memfd's lock, which ends with its process; yield whether it was free within `seconds`."""
    end = time.monotonic() + seconds
    held = False
    while not held:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            if time.monotonic() >= end:
                break
            time.sleep(0.001)
    try:
        yield held
    finally:
        if held:
            fcntl.lockf(fd, fcntl.LOCK_UN)


_CALL = struct.Struct("<16sB64s16sH")
_LENGTH = struct.Struct("<Q")
WHAT_LIMIT = 512
"""Maximum bytes of UTF-8 of a call's name in a slot; the rest is dropped."""
_WHAT = _LENGTH.size + _CALL.size
assert _WHAT + WHAT_LIMIT <= SLOT


def encode(call: CollectiveCall, length: int) -> bytes:
    """Encode the slot of a member that makes `call` with a blob of `length` bytes."""
    what = call.what.encode("utf-8", "replace")[:WHAT_LIMIT]
    fields = (call.kind.encode(), len(call.check), call.check, call.layout, len(what))
    return _LENGTH.pack(length) + _CALL.pack(*fields) + what


def decode(slot: bytes) -> tuple[CollectiveCall, int]:
    """Decode the call and the length of the blob from a slot; further bytes are ignored."""
    (length,) = _LENGTH.unpack_from(slot)
    kind, checked, check, layout, named = _CALL.unpack_from(slot, _LENGTH.size)
    what = slot[_WHAT : _WHAT + named].decode("utf-8", "ignore")
    call = CollectiveCall(kind.rstrip(b"\0").decode(), what, check[:checked], layout)
    return call, length
