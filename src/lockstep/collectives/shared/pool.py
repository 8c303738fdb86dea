"""The memory for partials and totals: a growing memfd that all workers of a job on this host share.

It outlives views, because allocating and mapping hundreds of megabytes again would take most of the time of a
change of the view.

In a new view, all members pass a barrier before any of them writes to the pool; after it, no member is in the
old view. By then, an excluded member is dead or has left the exchange with an error: the coordinator has a
stuck worker killed, and waits for its end, before it starts a view without it.
"""

import fcntl
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple, Self

from lockstep.errors import InternalError, SharedMemoryError
from lockstep.system.memory import Available, available_memory

PAGEMAP = Path("/proc/self/pagemap")
"""Has 8 bytes for each page of the process; see the kernel's `admin-guide/mm/pagemap.rst`."""

_OF_PRIVATE = (
    " and on its data (ulimit -d), and whether the system commits memory in advance (vm.overcommit_memory=2)"
)
"""Limits that count a mapping which a process may write to for itself, although it takes no memory yet."""

_IN_MEMORY_OR_SWAPPED, _OF_A_FILE = 3 << 62, 1 << 61

_TAKE_PAGES = 23
"""`MADV_POPULATE_WRITE`, from Linux 5.14 on: gives a private mapping pages of its own, as a write would.

It writes nothing itself, so another thread may write there meanwhile.
"""


class PrivateMapping:
    """A mapping that shows other processes' writes, except in pages to which this process has written.

    Other processes do not see its writes.

    Attributes:
        bytes: the memory.
    """

    def __init__(self, memory: memoryview) -> None:
        # Imported late: the agent does not need it, and starts faster without it.
        import numpy as np

        self.bytes: Any = np.frombuffer(memory, np.uint8)

    def is_written(self) -> bool:
        """Whether this process has written to the memory.

        Raises:
            OSError: the system does not tell.
        """
        import numpy as np

        start = self.bytes.ctypes.data // mmap.PAGESIZE
        pages = -(-len(self.bytes) // mmap.PAGESIZE)
        # A buffered read continues after a signal; a single read may stop early.
        with PAGEMAP.open("rb") as pagemap:
            pagemap.seek(start * 8)
            entries = np.frombuffer(pagemap.read(pages * 8), np.uint64)
        if len(entries) != pages:
            raise OSError(f"{PAGEMAP} has {len(entries)} of {pages} pages")
        # A page of its own is in memory or swapped out, and is not a page of the file.
        used, of_file = np.uint64(_IN_MEMORY_OR_SWAPPED), np.uint64(_OF_A_FILE)
        return bool(np.any((entries & used != 0) & (entries & of_file == 0)))


class _ShownPart(NamedTuple):
    """A part of the memory that an array shows.

    Attributes:
        owner: an object that refers to the mapping as long as anything shows it.
        mapping: a private mapping.
        start: the first byte.
        stop: the end.
    """

    owner: "weakref.ref[Any]"
    mapping: "weakref.ref[mmap.mmap]"
    start: int
    stop: int

    def keep(self) -> None:
        """Give the array pages of its own, if it is in use."""
        owner, mapping = self.owner(), self.mapping()
        if owner is None or mapping is None:
            return
        first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            mapping.madvise(_TAKE_PAGES, first, self.stop - first)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot copy {self.stop - self.start} bytes of a shared state, of which the program has an "
                f"array: {error}; check the limits on memory"
            ) from error


class SharedPool:
    """One process's handle of the memory, with its mapping.

    Use `create` in the process that starts the workers, and `attach` in each worker.

    Attributes:
        changes: the number of calls of `keep_shown`.
    """

    def __init__(self, fd: int, available: Available = available_memory) -> None:
        self.fd = fd
        self._available = available
        self._mapping = memoryview(b"")
        self._showing = memoryview(b"")
        self._starts: set[int] = set()
        self._shown: list[_ShownPart] = []
        self.changes = 0

    @classmethod
    def create(cls) -> Self:
        """Create the memory, initially empty."""
        fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Reading beyond the end of a truncated file kills the process.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(fd)

    @classmethod
    def attach(cls, fd: int, available: Available = available_memory) -> Self:
        """Use the memory that another process created; takes ownership of `fd`.

        Raises:
            InternalError: `fd` is not a pool.
        """
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise InternalError(f"descriptor {fd} is not a memory pool")
        os.set_inheritable(fd, False)
        return cls(fd, available)

    @property
    def size(self) -> int:
        """Bytes allocated so far."""
        return os.fstat(self.fd).st_size

    def grow(self, size: int) -> None:
        """Grow the memory to at least `size` bytes; one worker calls this for all.

        Raises:
            SharedMemoryError: they cannot be allocated; the memory is unchanged.
        """
        end = self.size
        if size > end:
            allocate(self.fd, end, size - end, self._available)

    def map(self, size: int) -> memoryview:
        """Return a mapping of the first `size` bytes or more; the last mapping if that is large enough.

        An earlier mapping stays valid while anything refers to it.

        Raises:
            SharedMemoryError: this process cannot map that much.
        """
        if size > len(self._mapping):
            # With MAP_POPULATE, all page faults happen now instead of in the first reduction.
            self._mapping = self._mapped(size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return self._mapping

    def _mapped(self, size: int, flags: int) -> memoryview:
        try:
            return memoryview(mmap.mmap(self.fd, size, flags=flags))
        except OSError as error:
            raise SharedMemoryError(
                f"cannot map {size} bytes of shared memory: {error}; check the limit on the size of "
                f"a process (ulimit -v){_OF_PRIVATE if flags & mmap.MAP_PRIVATE else ''}"
            ) from error

    def offset_of(self, array: Any) -> int | None:
        """Return where a contiguous array of NumPy is in the last mapping, or None if it is not there."""
        import numpy as np

        if not len(self._mapping) or not array.nbytes or not array.flags.c_contiguous:
            return None
        mapped = np.frombuffer(self._mapping, np.uint8)
        offset: int = array.ctypes.data - mapped.ctypes.data
        return offset if 0 <= offset <= len(mapped) - array.nbytes else None

    def map_privately(self, size: int) -> "PrivateMapping":
        """Return another mapping of the first `size` bytes, which are allocated.

        Raises:
            SharedMemoryError: this process cannot map that much.
        """
        return PrivateMapping(self._mapped(size, mmap.MAP_PRIVATE))

    def show(self, array: Any) -> Any:
        """Return another array with the memory of one in the last mapping; None if impossible.

        Later writes to one of the two do not change the other one, if `keep_shown` is called before the
        memory changes.

        Raises:
            SharedMemoryError: this process cannot map the memory again.
        """
        import numpy as np

        start = self.offset_of(array)
        if start is None or self.fd < 0:
            return None
        stop = start + array.nbytes
        if start in self._starts or stop > len(self._showing):
            # This process may have written to memory that it has shown.
            self._showing = self._mapped(len(self._mapping), mmap.MAP_PRIVATE)
            self._starts.clear()
        mapping: Any = self._showing.obj
        try:
            mapping.madvise(_TAKE_PAGES, 0, 0)
        except OSError:
            return None
        owner = np.frombuffer(self._showing[start:stop], np.uint8)
        self._starts.add(start)
        self._shown.append(_ShownPart(weakref.ref(owner), weakref.ref(mapping), start, stop))
        _with_shown.add(self)
        return owner.view(array.dtype).reshape(array.shape)

    def keep_shown(self) -> None:
        """Copy memory that arrays in use show, because it changes from now on.

        Raises:
            SharedMemoryError: there is too little memory.
        """
        self.changes += 1
        shown, self._shown, self._showing = self._shown, [], memoryview(b"")
        failure: SharedMemoryError | None = None
        for each in shown:
            try:
                each.keep()
            except SharedMemoryError as error:
                # The process may have been forked here. The next change of the memory tries again.
                self._shown.append(each)
                failure = failure or error
        if failure is not None:
            raise failure

    def map_allocated(self) -> None:
        """Map the memory that others have already allocated, before any of them waits for this process.

        Raises:
            SharedMemoryError: this process cannot map it.
        """
        self.map(self.size)

    def close(self) -> None:
        """Close the descriptor; mappings stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_with_shown: weakref.WeakSet[SharedPool] = weakref.WeakSet()
"""Those whose memory arrays may show."""


def _keep_all_shown() -> None:
    """Copy memory that arrays show; otherwise they would change with it in a forked process."""
    for pool in list(_with_shown):
        pool.keep_shown()


os.register_at_fork(before=_keep_all_shown)


def allocate(fd: int, start: int, size: int, available: Available) -> None:
    """Allocate memory for `size` bytes of a memfd from `start` on.

    Raises:
        SharedMemoryError: there is too little memory.
    """
    room = available()
    try:
        if size > room:
            raise MemoryError("not enough memory")
        # Without this, pages are allocated on the first write, and the process is killed if none is left.
        os.posix_fallocate(fd, start, size)
    except (OSError, MemoryError) as error:
        raise SharedMemoryError(
            f"the exchange between workers needs {size} bytes more of shared memory ({room} bytes are "
            f"available): {error}. Use fewer workers on this host, a smaller model, or raise the "
            "memory limit of the container or the file size limit (ulimit -f)"
        ) from error
