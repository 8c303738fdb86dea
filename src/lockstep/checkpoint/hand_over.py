"""Handing a checkpoint to another host: its files travel in parts. The copy appears once it is complete."""

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from lockstep.checkpoint.checkpoint_files import FILES, Outline, load, read_outline
from lockstep.checkpoint.durable import make_folder, reason, sync
from lockstep.checkpoint.held import HeldCheckpoint, JobFacts
from lockstep.checkpoint.resume import job_facts
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError
from lockstep.system.clock import SystemClock

_ARRIVING = ".arriving-"
_ABANDONED = 3600.0
"""Seconds after which a copy that has not changed is one that a killed process has left."""


def newest_held(folder: Path, report: Callable[[str], None]) -> tuple[Path, HeldCheckpoint] | None:
    """Return the newest complete checkpoint in a folder and its description for other hosts, if any.

    Args:
        folder: the folder, which may not exist.
        report: called with a message for each newer checkpoint that is damaged.

    Raises:
        CheckpointError: the folder cannot be read, or the checkpoint was not written by a job.
    """
    newest = Store(folder).newest(report)
    return (newest[0], held_of(newest[0])) if newest is not None else None


def held_of(path: Path) -> HeldCheckpoint:
    """Return the description of a checkpoint for other hosts, without reading its arrays.

    Raises:
        CheckpointError: it cannot be read, or was not written by a job.
    """
    outline = read_outline(path)
    job = msgspec.convert(job_facts(path, outline.manifest), JobFacts)
    return HeldCheckpoint(outline.step, _digest(outline), job, Store(path.parent).finished() == outline.step)


def _digest(outline: Outline) -> str:
    """Return a hash of the arrays of a checkpoint."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(outline.arrays.items())).encode())


def parts_of_checkpoint(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the files of a checkpoint in parts of at most `size` bytes, each with the number of its file.

    Raises:
        CheckpointError: a file cannot be read.
    """
    for number, name in enumerate(FILES):
        try:
            with (path / name).open("rb") as file:
                while part := file.read(size):
                    yield number, part
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {reason(error)}") from None


class ArrivingCheckpoint:
    """A checkpoint that arrives in parts from another host.

    It is written under a temporary name, which differs on all hosts, and renamed when it is complete.

    Args:
        folder: the folder of checkpoints, which may not exist.
        held: its description by the other host.
        keep: the number of checkpoints to keep.

    Raises:
        CheckpointError: nothing can be written to the folder.
    """

    def __init__(self, folder: Path, held: HeldCheckpoint, keep: int) -> None:
        self._folder, self._held, self._keep = folder, held, keep
        self._temporary = folder / f"{_ARRIVING}{secrets.token_hex(8)}"
        try:
            make_folder(folder)
            self._remove_abandoned()
            self._temporary.mkdir()
        except OSError as error:
            raise self._failed(error) from None

    def add(self, file: int, part: bytes) -> None:
        """Append a part to a file.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            with (self._temporary / FILES[file]).open("ab") as opened:
                opened.write(part)
        except (OSError, IndexError) as error:
            self.discard()
            raise self._failed(error) from None

    def complete(self) -> Path:
        """Verify the copy and give it its name; return its path.

        Raises:
            CheckpointError: it is damaged, or cannot be written.
        """
        try:
            for name in FILES:
                sync(self._temporary / name)
            sync(self._temporary)
            contents = load(self._temporary)
            arrived = contents.step, _digest(read_outline(self._temporary))
            if arrived != (self._held.step, self._held.digest):
                raise CheckpointError("the checkpoint that arrived is not the one that was announced")
            path = Store(self._folder, self._keep).adopt(self._temporary, contents.step)
            if self._held.finished:
                Store(self._folder).finish(contents.step)
            return path
        except OSError as error:
            raise self._failed(error) from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the parts that have arrived."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _failed(self, error: Exception) -> CheckpointError:
        why = reason(error) if isinstance(error, OSError) else str(error)
        return CheckpointError(f"cannot write a checkpoint to {self._folder}: {why}; give another folder")

    def _remove_abandoned(self) -> None:
        for path in self._folder.glob(f"{_ARRIVING}*"):
            with suppress(OSError):
                if SystemClock().wall() - path.stat().st_mtime > _ABANDONED:
                    shutil.rmtree(path)
