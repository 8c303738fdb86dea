"""The checkpoints of a job: a folder with one folder for each checkpoint."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from lockstep.checkpoint.checkpoint_files import Contents, check_names, load, read_outline, write_folder
from lockstep.checkpoint.durable import is_full, locked, make_folder, reason, sync, write_file
from lockstep.checkpoint.store_lock import FolderLock
from lockstep.errors import CheckpointError, UnknownFormatError
from lockstep.system.clock import SystemClock
from lockstep.system.files import read_regular

_Removed = Callable[[Path, bool], None]
"""Called with each folder that is removed to free space, or late; see `Store.write`."""
_NotRemoved = Callable[[Path, str], None]
"""Called with each folder of an old checkpoint that cannot be removed, and the reason."""
FOLDER_PREFIX = "step-"
"""The beginning of the names of the folders of checkpoints, before the step."""

_NAME = re.compile(rf"{FOLDER_PREFIX}(\d{{12,}})|\.{FOLDER_PREFIX}(\d{{12,}})\.replaced")
_LOCK = ".lock"
_FINISHED = "finished.json"

DEFAULT_KEEP = 3
"""How many checkpoints are kept unless the user sets a number."""


class _FinishedMark(msgspec.Struct):
    """The content of the file that marks the job as finished."""

    step: int
    time: float


@dataclass(frozen=True)
class Entry:
    """One checkpoint in a folder.

    Attributes:
        path: its folder.
        step: training steps before it.
        time: the time at which it was written, in seconds since 1970.
        bytes: total size of its files.
        fault: why it is damaged or incomplete, with the file; None if it is complete.
        verified: the step since which every replica has been verified at least once; None without
            verification.
    """

    path: Path
    step: int
    time: float
    bytes: int
    fault: str | None
    verified: int | None = None


class Store:
    """Writes and finds the checkpoints in one folder.

    A checkpoint appears under its name, `step-<step>`, once it is complete and on the disk. Before that, it
    is written to a folder whose name begins with a dot, under a lock that ends with the process. The next
    writer removes the folder of a killed writer.

    Args:
        folder: the folder, which may not exist yet.
        keep: the number of checkpoints to keep.
        lock: the folder's lock, acquired before the first write; None if another object holds it.
    """

    def __init__(self, folder: Path, keep: int = DEFAULT_KEEP, lock: FolderLock | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._lock = lock

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints, which may not exist."""
        return self._folder

    @property
    def keep(self) -> int:
        """The number of checkpoints to keep."""
        return self._keep

    def write(
        self,
        contents: Contents,
        removed: _Removed = lambda path, late: None,
        not_removed: _NotRemoved = lambda path, why: None,
    ) -> Path:
        """Write a checkpoint; it replaces one of the same step.

        Afterwards, checkpoints that are older than the newest `keep` complete ones are removed, but never the
        one just written, nor the newest verified one. If the disk is full, checkpoints are removed first, one
        by one from the oldest, but never the newest complete one. The others stay complete even if the
        process is killed at any time.

        Args:
            contents: the contents to write.
            removed: called with the folder of each complete checkpoint that is removed to free space although
                it is among the newest `keep`, and False; and with each folder that an earlier removal has
                left, once it is removed, and True.
            not_removed: called with each folder of an old checkpoint that cannot be removed, and the reason.
                The next call tries again.

        Returns:
            The folder of the checkpoint, which is on the disk.

        Raises:
            CheckpointError: the checkpoint cannot be written. Nothing of it remains, and the newest complete
                one is unchanged, as are all others unless the disk is full.
            TypeError, ValueError: the manifest contains values that JSON cannot represent.
        """
        check_names(contents.arrays)
        if self._lock is not None:
            self._lock.acquire()
        path = self.path(contents.step)
        try:
            make_folder(self._folder)
            with locked(self._folder / _LOCK):
                self._clean(removed, not_removed)
                self._write_freeing_space(contents, path, removed, not_removed)
                self._prune(path, contents.manifest, not_removed)
        except (OSError, SafetensorError) as error:
            advice = "free space there, or give" if is_full(error) else "give"
            raise CheckpointError(
                f"cannot write a checkpoint to {self._folder}: {reason(error)}; {advice} another folder"
            ) from None
        return path

    def _write_freeing_space(
        self, contents: Contents, path: Path, removed: _Removed, not_removed: _NotRemoved
    ) -> None:
        needed = sum(array.nbytes for array in contents.arrays.values())
        while True:
            try:
                self._write(contents, path)
                return
            except (OSError, SafetensorError) as error:
                if not is_full(error) or not self._make_room(needed, removed, not_removed):
                    raise

    def _make_room(self, needed: int, removed: _Removed, not_removed: _NotRemoved) -> bool:
        """Remove the oldest checkpoint that can be removed; return whether there was one.

        Only checkpoints older than the newest complete one are removed, and none if that would not free
        `needed` bytes.
        """
        paths = self._paths()
        complete = [path for path in paths if _looks_complete(path)]
        older = paths[: paths.index(complete[-1])] if complete else []
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize + sum(map(_size, older)) < needed:
            return False
        for path in older:
            if _try(self._remove, path, not_removed):
                if path in complete:
                    removed(path, False)
                return True
        return False

    def newest(self, report: Callable[[str], None]) -> tuple[Path, Contents] | None:
        """Return the folder and the contents of the newest complete checkpoint, or None if there is none.

        `report` is called with a message for each newer checkpoint that is damaged or incomplete.

        Raises:
            CheckpointError: the folder exists but cannot be read, or the newest checkpoint that is not
                damaged has the format of another version. A job that skipped it would begin before it, and
                then remove it.
        """
        for path in reversed(self._paths()):
            try:
                return path, load(path)
            except UnknownFormatError:
                raise
            except CheckpointError as error:
                report(f"{error}; skipping this checkpoint")
        return None

    def entries(self) -> list[Entry]:
        """Read and verify all checkpoints; return them, the oldest first.

        Raises:
            CheckpointError: the folder exists but cannot be read.
        """
        return [_entry(path) for path in self._paths()]

    def steps(self) -> dict[int, Path]:
        """Return the folders of all checkpoints by step, the oldest first, without reading them.

        Raises:
            CheckpointError: the folder exists but cannot be read.
        """
        return {_step(path): path for path in self._paths()}

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps than `step`.

        If all checkpoints are of later steps, they are renamed instead, so that no job finds them.

        Raises:
            CheckpointError: one cannot be removed.
        """
        try:
            with locked(self._folder / _LOCK):
                self._clean()
                paths = self._paths()
                later = [path for path in paths if _step(path) > step]
                for path in later:
                    if later == paths:
                        suspect = path.with_name(f"suspect-{path.name}")
                        shutil.rmtree(suspect, ignore_errors=True)
                        path.rename(suspect)
                    else:
                        self._remove(path)
                sync(self._folder)
        except FileNotFoundError:
            # Nothing has been written yet.
            return
        except OSError as error:
            raise CheckpointError(
                f"cannot remove the checkpoints of steps after {step} in {self._folder}: {reason(error)}; "
                "remove them before you resume the job"
            ) from None

    def finish(self, step: int) -> None:
        """Record on the disk that the job finished with its checkpoint of `step`.

        Raises:
            CheckpointError: the record cannot be written.
        """
        path, temporary = self._folder / _FINISHED, self._folder / f".{_FINISHED}"
        try:
            with locked(self._folder / _LOCK):
                temporary.unlink(missing_ok=True)
                write_file(temporary, msgspec.json.encode(_FinishedMark(step, SystemClock().wall())))
                temporary.rename(path)
                sync(self._folder)
        except OSError as error:
            advice = "; free space there" if is_full(error) else ""
            raise CheckpointError(f"cannot write {path}: {reason(error)}{advice}") from None

    def finished(self) -> int | None:
        """Return the step of the checkpoint with which the job finished, or None if it has not finished.

        If there is a checkpoint of a later step, the job has been resumed since then.
        """
        try:
            return msgspec.json.decode(read_regular(self._folder / _FINISHED), type=_FinishedMark).step
        except (OSError, ValueError):
            return None

    def adopt(self, complete: Path, step: int) -> Path:
        """Give a complete checkpoint, in another folder on the same disk, its name; remove old ones.

        Args:
            complete: its folder, which is on the disk.
            step: the step of the checkpoint, which replaces another one of this step.

        Raises:
            CheckpointError: it cannot be renamed.
        """
        path = self.path(step)
        replaced = self._folder / f".{path.name}.replaced"
        try:
            with locked(self._folder / _LOCK):
                self._clean()
                with contextlib.suppress(FileNotFoundError):
                    path.rename(replaced)
                complete.rename(path)
                sync(self._folder)
                shutil.rmtree(replaced, ignore_errors=True)
                self._prune(path, read_outline(path).manifest)
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {path}: {reason(error)}") from None
        return path

    def path(self, step: int) -> Path:
        """Return the folder of a checkpoint, which may not exist."""
        return self._folder / f"{FOLDER_PREFIX}{step:012}"

    def _paths(self) -> list[Path]:
        """Find all checkpoints, the oldest first."""
        try:
            paths = list(self._folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {self._folder} cannot be read: {reason(error)}"
            ) from None
        by_step: dict[int, Path] = {}
        # Names with a dot sort first: they count only if a writer was killed before the last renaming.
        for path in sorted(paths):
            if _NAME.fullmatch(path.name):
                by_step[_step(path)] = path
        return [path for _, path in sorted(by_step.items())]

    def _clean(
        self,
        removed: _Removed = lambda path, late: None,
        not_removed: _NotRemoved = lambda path, why: None,
    ) -> None:
        """Remove the folders of killed writers, and restore checkpoints that they were replacing."""
        for path in self._paths():
            if path.name.startswith("."):
                path.rename(self.path(_step(path)))
        for path in self._folder.glob(".step-*"):
            if _try(_remove_folder, path, not_removed) and path.suffix == ".removed":
                removed(path, True)

    def _write(self, contents: Contents, path: Path) -> None:
        temporary = self._folder / f".{path.name}.writing"
        replaced = self._folder / f".{path.name}.replaced"
        placed = False
        try:
            temporary.mkdir()
            write_folder(temporary, contents, SystemClock().wall())
            with contextlib.suppress(FileNotFoundError):
                path.rename(replaced)
            temporary.rename(path)
            placed = True
            sync(self._folder)
        except BaseException:
            # If this fails, the next writer tries again.
            with contextlib.suppress(OSError):
                if placed:
                    path.rename(temporary)
                if replaced.exists():
                    replaced.rename(path)
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(
        self, written: Path, manifest: Mapping[str, Any], not_removed: _NotRemoved = lambda path, why: None
    ) -> None:
        """Remove the checkpoints that are no longer kept after one with this `manifest` was written."""
        complete = [_step(path) for path in self._paths() if _looks_complete(path)]
        verified = manifest.get("verified", -1)
        for path in self._paths():
            if not is_among_kept(_step(path), complete, _step(written), keep=self._keep, verified=verified):
                _try(self._remove, path, not_removed)

    def _remove(self, path: Path) -> None:
        removed = self._folder / f".{path.name}.removed"
        path.rename(removed)
        _remove_folder(removed)


def is_among_kept(step: int, complete: Sequence[int], written: int, *, keep: int, verified: int) -> bool:
    """Whether a checkpoint is kept after another one was written, in a folder or in an object store.

    Checkpoints that are older than the newest `keep` complete ones, and than the one just written, are not
    kept. Newer damaged ones stay, because they may become readable again, or are replaced.

    Args:
        step: the step of the checkpoint.
        complete: the steps of the complete ones, in ascending order.
        written: the step of the checkpoint just written.
        keep: the number of checkpoints to keep.
        verified: the step up to which the checkpoint just written is verified; -1 without verification. The
            job may have to roll back to the newest checkpoint that is not later.
    """
    if step >= min([written, *complete[-max(keep, 1) :]]):
        return True
    return step in [each for each in complete if each <= verified][-1:]


def _remove_folder(path: Path) -> None:
    """Remove the files of a folder that can be removed; if one cannot, raise the reason."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path)


def _try(remove: Callable[[Path], None], path: Path, not_removed: _NotRemoved) -> bool:
    """Remove a folder, and return whether this succeeded. After a failure, the next writer tries again."""
    try:
        remove(path)
    except OSError as error:
        not_removed(path, reason(error))
        return False
    return True


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1] or match[2])


def _looks_complete(path: Path) -> bool:
    """Whether a checkpoint is complete, without reading its arrays."""
    try:
        read_outline(path)
    except CheckpointError:
        return False
    return True


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _entry(path: Path) -> Entry:
    time, size, fault, verified = 0.0, 0, None, None
    with contextlib.suppress(OSError):
        time = path.stat().st_mtime
        size = _size(path)
    try:
        outline = read_outline(path)
        time, verified = outline.time, outline.manifest.get("verified")
        load(path)
    except CheckpointError as error:
        fault = str(error).removeprefix(f"{path}/")
    return Entry(path, _step(path), time, size, fault, verified if isinstance(verified, int) else None)
