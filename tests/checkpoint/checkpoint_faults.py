"""Disks that fail, and what happens at the n-th call that a write makes of the system."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lockstep.checkpoint.checkpoint_files

CALLS = [(os, name) for name in ("mkdir", "rename", "open", "write", "fsync", "chmod", "unlink", "rmdir")]
CALLS.append((lockstep.checkpoint.checkpoint_files, "save_file"))


class Countdown:
    """Stands before the system's calls; `happens` is called before the one of that number, from 0."""

    def __init__(self, number: int, happens: Callable[[], None]) -> None:
        self.left = number
        self._happens = happens

    def install(self, put: Callable[[Any, str, Any], None]) -> None:
        """Stand there from now on; `put` is setattr, or a monkeypatch's."""
        for module, name in CALLS:
            put(module, name, self._counted(getattr(module, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                self._happens()
            return original(*args, **kwargs)

        return counted


def room_for(checkpoints: int, folder: Path, put: Callable[[Any, str, Any], None]) -> None:
    """Let the disk of `folder` have room for so many checkpoints; `put` is setattr, or a monkeypatch's."""
    original = lockstep.checkpoint.checkpoint_files.save_file

    def save_file(arrays: Any, path: Path) -> None:
        # What is being written takes room from its beginning on, as do those that are half removed.
        original(arrays, path)
        if len(list(folder.glob("*/state.safetensors"))) > checkpoints:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put(lockstep.checkpoint.checkpoint_files, "save_file", save_file)
