"""A compilation cache for JAX: other workers, replacements and later runs reuse compiled programs.

It replaces JAX's own cache. It writes entries atomically, however a process ends. It never returns programs
compiled for another processor or number of threads, which JAX does not distinguish. If several processes need
the same program at once, one compiles it and the others wait.

The cache is in the user's cache folder, unless others may write there. A program from the cache computes the
same bits as one that is compiled again.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from lockstep.errors import UnfitError
from lockstep.system.files import closed_after, open_in
from lockstep.system.notes import note
from lockstep.worker.import_hooks import when_imported
from lockstep.worker.patch_registry import PATCHES
from lockstep.worker.private_modules import JAX_CACHE

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event after it has compiled a function, or has read one from its cache."""
_LONGEST_WAIT = 60.0
_LOOK_EVERY = 0.005
_MOST_BYTES = 2**30
_DIGEST_BYTES = 8
_OFFSETS = 2**62
_TURNS = "turns"


def keep_compiled(base: Path, threads: int) -> None:
    """Enable the cache when JAX is imported, unless the user has configured or disabled JAX's cache.

    Args:
        base: the parent folder of the cache.
        threads: number of threads that compute one replica; compiled programs depend on it.
    """
    when_imported({"jax": partial(_keep, base / f"jax-{processor()}-{threads}")})


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """Return a name for the kind of this machine's processor."""
    first = file.read_text().partition("\n\n")[0].splitlines()
    lines = [
        line for line in first if line.startswith(("vendor_id", "model name", "flags", "Features", "CPU "))
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _keep(folder: Path, jax: ModuleType) -> None:
    module = sys.modules.get(JAX_CACHE)
    theirs: Callable[[str], Any] | None = getattr(module, "get_file_cache", None)
    config = jax.config
    if theirs is None or config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        cache = CompilationCache.open(folder)
    except UnfitError as error:
        note(f"JAX compiles without its cache: {error}")
        return
    except OSError:
        # Without the cache, everything works, but more slowly.
        return
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    config.update("jax_persistent_cache_enable_xla_caches", "none")

    def get_file_cache(path: str) -> Any:
        # The script may use another folder.
        return (cache, path) if path == str(folder) else theirs(path)

    def leave_when_compiled(event: str, seconds: float, **details: Any) -> None:
        if event == COMPILED:
            cache.leave()

    PATCHES.put(__name__, module, "get_file_cache", get_file_cache)
    jax.monitoring.register_event_duration_secs_listener(leave_when_compiled)


class CompilationCache:
    """A folder with a file for each entry; implements JAX's interface of a cache.

    A process that does not find an entry makes it. Other processes that request it meanwhile wait until it
    exists, its maker gives up or ends, or a minute has passed. If it is still missing, they make it too.

    Args:
        folder: descriptor of the folder, so that later changes of its path have no effect.
        turns: descriptor of a file in which locks of single bytes represent entries in the making.
    """

    def __init__(self, folder: int, turns: int) -> None:
        self._folder = folder
        self._turns = turns
        self._making = threading.local()
        self._trimmed = False

    @classmethod
    def open(cls, path: Path) -> "CompilationCache":
        """Open the folder; create it if it is missing.

        Raises:
            OSError: it cannot be used.
            UnfitError: other users could write to it, and so inject code.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closed_after(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
            _check_own(parent, path.parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=parent)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            folder = os.open(path.name, flags, dir_fd=parent)
        try:
            _check_own(folder, path)
            return cls(folder, open_in(folder, _TURNS, os.O_RDWR | os.O_CREAT))
        except BaseException:
            os.close(folder)
            raise

    def get(self, key: str) -> bytes | None:
        """Return an entry, or None if this process must make it."""
        self.leave()
        value = self._read(key)
        if value is None and self._take_turn(key):
            value = self._read(key)
            if value is not None:
                self.leave()
        return value

    def put(self, key: str, value: bytes) -> None:
        """Save an entry; ignore errors of the file system."""
        # Hosts may share the folder, and have processes with equal ids.
        new = f"{key}.{secrets.token_hex(8)}.new"
        try:
            self._trim()
            with os.fdopen(open_in(self._folder, new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(_digest(value) + value)
            os.replace(new, key, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            self._remove(new)
        self.leave()

    def leave(self) -> None:
        """Let others make the entry that this thread was to make."""
        offset, self._making.offset = getattr(self._making, "offset", None), None
        if offset is not None:
            fcntl.lockf(self._turns, fcntl.LOCK_UN, 1, offset)

    def _read(self, key: str) -> bytes | None:
        try:
            with os.fdopen(open_in(self._folder, key, os.O_RDONLY), "rb") as file:
                data = file.read()
                os.utime(file.fileno())
        except OSError:
            return None
        value = data[_DIGEST_BYTES:]
        return value if _digest(value) == data[:_DIGEST_BYTES] else None

    def _take_turn(self, key: str) -> bool:
        """Acquire the right to make an entry; return False if that takes too long."""
        offset = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % _OFFSETS
        give_up = time.monotonic() + _LONGEST_WAIT
        while time.monotonic() < give_up:
            try:
                fcntl.lockf(self._turns, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
            except (BlockingIOError, PermissionError):
                time.sleep(_LOOK_EVERY)
                continue
            except OSError:
                # This file system does not support locks.
                return False
            self._making.offset = offset
            return True
        return False

    def _trim(self) -> None:
        """Remove the least recently used entries if the cache is too large; once per process."""
        if self._trimmed:
            return
        self._trimmed = True
        with os.scandir(self._folder) as files:
            entries = [(entry.stat(follow_symlinks=False), entry.name) for entry in files]
        entries.sort(key=lambda entry: entry[0].st_mtime)
        left = sum(status.st_size for status, _ in entries)
        for status, name in entries:
            if left <= _MOST_BYTES:
                return
            if name != _TURNS:
                self._remove(name)
                left -= status.st_size

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)


def _check_own(folder: int, path: Path) -> None:
    """Raise UnfitError if other users may write to a folder; `path` is for the message."""
    status = os.fstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UnfitError(
            f"other users may write to {path}; run chmod go-w on it, or set XDG_CACHE_HOME to another folder"
        )


def _digest(value: bytes) -> bytes:
    return bytes(xxhash.xxh3_64_digest(value))
