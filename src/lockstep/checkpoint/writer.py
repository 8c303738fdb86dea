"""The writer of checkpoints: a thread that writes them while training continues."""

from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.copy_check import checksum_of
from lockstep.checkpoint.latest import Latest
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError
from lockstep.system.clock import SystemClock


class Writer:
    """Writes one checkpoint at a time on a daemon thread, which runs while there is a checkpoint to write.

    That thread calls `done(path, step, seconds)` for each checkpoint that is on the disk, `failed(message)`
    for each that could not be written, `removed(path, late)` for each older one removed to free space, or
    late, and `not_removed(path, why)` for each older one that could not be removed; and `corrected(name,
    step)` for each array that had changed since it was copied. These functions must not raise. See
    `Store.write`.

    Attributes:
        requested: the step of the checkpoint that was requested last; None before the first.
        written: the step of the checkpoint that was written last; None before the first.
        seconds: the time that it took to write that checkpoint.
    """

    def __init__(
        self,
        store: Store,
        done: Callable[[Path, int, float], None],
        failed: Callable[[str], None],
        removed: Callable[[Path, bool], None],
        not_removed: Callable[[Path, str], None] = lambda path, why: None,
        corrected: Callable[[str, int], None] = lambda name, step: None,
    ) -> None:
        self._store = store
        self._done = done
        self._failed = failed
        self._removed = removed
        self._not_removed = not_removed
        self._corrected = corrected
        self._work = Latest(self._write, "checkpoints")
        self.requested: int | None = None
        self.written: int | None = None
        self.seconds = 0.0

    def write(self, contents: Contents) -> None:
        """Request a checkpoint and return at once.

        While another checkpoint is being written, this one waits; it replaces one that already waits, for
        which no function is called. The arrays must not change until this checkpoint is written, has failed
        or is replaced.
        """
        self.requested = contents.step
        self._work.give(contents)

    def remove_after(self, step: int) -> int:
        """Remove the checkpoints of later steps than `step`; return that of the newest one left, or -1."""
        self._store.remove_after(step)
        return max(self._store.steps(), default=-1)

    def busy(self) -> bool:
        """Whether a checkpoint is being written or waits to be."""
        return self._work.busy()

    def close(self, seconds: float) -> bool:
        """Wait until all requested checkpoints are written or have failed; return False on timeout."""
        return self._work.close(seconds)

    def _write(self, contents: Contents) -> None:
        clock = SystemClock()
        begun = clock.now()
        for name, check in contents.checks.items():
            if checksum_of(contents.arrays[name]) != check.checksum and check.correct(contents.arrays[name]):
                self._corrected(name, contents.step)
        try:
            path = self._store.write(contents, self._removed, self._not_removed)
        except CheckpointError as error:
            self._failed(str(error))
        except Exception as error:
            self._failed(f"cannot write the checkpoint of step {contents.step}: {error!r}")
        else:
            self.written, self.seconds = contents.step, clock.now() - begun
            self._done(path, contents.step, self.seconds)
