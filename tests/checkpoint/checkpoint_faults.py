"""Faults of the disk: at the n-th system call of a write, or when the space is used up."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lockstep.checkpoint.checkpoint_files

CALLS = [(os, name) for name in ("mkdir", "rename", "open", "write", "fsync", "chmod", "unlink", "rmdir")]
CALLS.append((lockstep.checkpoint.checkpoint_files, "save_file"))


class Countdown:
    """Calls `fault` before the system call of a number, counted from 0."""

    def __init__(self, number: int, fault: Callable[[], None]) -> None:
        self.left = number
        self._fault = fault

    def install(self, put: Callable[[Any, str, Any], None]) -> None:
        """Wrap the system calls; `put` is `setattr`, or that of a monkeypatch."""
        for module, name in CALLS:
            put(module, name, self._counted(getattr(module, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                self._fault()
            return original(*args, **kwargs)

        return counted


def limit_space(checkpoints: int, folder: Path, put: Callable[[Any, str, Any], None]) -> None:
    """Limit the disk of `folder` to some checkpoints; `put` is `setattr`, or that of a monkeypatch."""
    original = lockstep.checkpoint.checkpoint_files.save_file

    def save_file(arrays: Any, path: Path) -> None:
        # Incomplete checkpoints take space, too.
        original(arrays, path)
        if len(list(folder.glob("*/state.safetensors"))) > checkpoints:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put(lockstep.checkpoint.checkpoint_files, "save_file", save_file)
