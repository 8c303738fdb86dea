"""The schedule of checkpoints: it decides when one is due, and which state still has to be written.

The chief copies the state at the end of a step, and a thread writes the copy while training continues. This
needs no agreement, because the state is equal on all workers.

The state after the last step is also saved when the script ends. Which step is the last is known only
afterwards. So the chief copies the state at the end of each epoch, before validation and `on_epoch_end` can
change it, and drops the copy when another step follows. After `train_on_batch`, it makes the copy only when
something else is about to change the state: another call, or an assignment of a variable. So this checkpoint,
like all others, holds the state at the end of a step, and a script that asks for more epochs resumes from it.
"""

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.copy_check import CopyCheck
from lockstep.checkpoint.mirror import Mirror
from lockstep.checkpoint.object_store import StoreLease
from lockstep.checkpoint.store import FOLDER_PREFIX, Store
from lockstep.checkpoint.writer import Writer
from lockstep.errors import CheckpointError, ConfigError, SupersededError
from lockstep.observability.events import (
    CheckpointFailed,
    CheckpointNotRemoved,
    CheckpointRemoved,
    CheckpointWritten,
    WarningShown,
    WorkerEvent,
)
from lockstep.system.clock import Clock, SystemClock, duration
from lockstep.system.notes import NOTE_EVERY, RepeatedNotes, note

_QUIET_SECONDS = 5.0
"""The time after which a wait for the disk is reported."""
_PATIENCE_SECONDS = 60.0
"""The longest time that a step waits for the disk."""
_LAST_SECONDS = 600.0
"""The longest time that the end of the script waits for the disk."""
_CLOSE_SECONDS = 60.0
"""The same for a script that ends early, with an error or on a signal."""
_TOLERATED_SECONDS = 2.0
"""The total waiting time of steps after which the user gets a note."""
_REST_SECONDS = 60.0
"""The shortest time between two checkpoints that are written because a call ended."""


DEFAULT_EVERY = "10m"
"""The interval of checkpoints unless the user sets one; see `parse_every`."""


@dataclass(frozen=True)
class Every:
    """An interval: a number of steps, or of seconds."""

    steps: int | None = None
    seconds: float | None = None


def parse_every(text: str, prefix: str = "--checkpoint-every ") -> Every:
    """Parse an interval: a number of steps, or a time with its unit.

    Args:
        text: the interval as the user wrote it.
        prefix: a text that precedes it in error messages.

    Raises:
        ConfigError: the text is neither.
    """
    if re.fullmatch(r"[1-9][0-9]{0,14}", text):
        return Every(steps=int(text))
    if seconds := duration(text):
        return Every(seconds=seconds)
    raise ConfigError(f"{prefix}{text}: give a number of steps, or a time such as 30s, 10m or 1h")


class CheckpointScheduler:
    """Writes a checkpoint after each interval and one of the last step, in the background.

    A checkpoint that is due after a number of steps is always written: if the previous one is still being
    written, training waits for it.

    Args:
        writer: writes the checkpoints.
        every: the interval.
        clock: measures the interval.
        finished: records on the disk that the job finished with a checkpoint of this step.
        failed: called with the reason if the last checkpoint takes too long.
        mirror: uploads the checkpoints to an object store; None if they stay on the disk.

    Attributes:
        leaving: whether a signal has told the process to end. The next step is its last.
    """

    def __init__(
        self,
        writer: Writer,
        every: Every,
        clock: Clock,
        finished: Callable[[int], None],
        failed: Callable[[str], None],
        mirror: Mirror | None = None,
    ) -> None:
        self._writer = writer
        self._mirror = mirror
        self._finished = finished
        self._failed = failed
        self._every = every
        self._clock = clock
        self._last = clock.now()
        self._taken: int | None = None
        self._safe: int | None = None
        self._ready = False
        self._held: Contents | None = None
        self._late: Callable[[], Contents] | None = None
        self._ended = -_REST_SECONDS
        self._waited = 0.0
        self._waits = 0
        self._copies = Copies()
        self.leaving = False

    def resumed(self, taken: int) -> None:
        """Record that training resumes from a checkpoint of step `taken`, which is on the disk."""
        self._taken = self._safe = taken

    def follow(self, taken: int) -> None:
        """Record a step; another process writes its checkpoint."""
        self._taken = taken

    def after_step(self, taken: int, take: Callable[[], Contents]) -> None:
        """Write the state that `take` returns if a checkpoint is due.

        Args:
            taken: the number of training steps so far, which may have grown by more than one since the last
                call.
            take: returns the state, which is copied before this returns; called at most once, on this thread.

        Raises:
            SupersededError: another job saves its checkpoints in the same place of an object store.
        """
        if self._mirror is not None and self._mirror.taken_over:
            raise SupersededError(self._mirror.taken_over)
        if not self._ready:
            self._ready = True
            self._copies.make_ready(take())
            if self._mirror is not None:
                self._mirror.begin()
        self.drop()
        due, self._taken = self._due(taken), taken
        if due and self._every.steps is not None and not self.leaving:
            self._wait_for_previous(taken)
        if self.leaving or (due and not self._writer.busy()):
            self._last = self._clock.now()
            self._writer.write(self._copied(take()))

    def hold(self, taken: int, take: Callable[[], Contents]) -> None:
        """Hold the state that `take` returns, at the end of step `taken`, which may be the last one.

        Args:
            taken: as for `after_step`, which was called for this step.
            take: returns the state, which is copied before this returns; not called if a checkpoint of this
                step was already requested.
        """
        if self._held is None and self._requested != taken:
            self._held = self._copied(take())

    def hold_late(self, taken: int, take: Callable[[], Contents]) -> None:
        """Hold the state that `take` returns at the next `settle`; `drop` and `after_step` cancel this."""
        if self._requested != taken:
            self._late = take

    def settle(self) -> None:
        """Copy the state of `hold_late` before it changes."""
        if self._late is not None:
            late, self._late = self._late, None
            self._held = self._copied(late())

    def drop(self) -> None:
        """Discard the held state: another step begins."""
        self._held = self._late = None

    def end_call(self) -> None:
        """Write the held state, at most once a minute: the program may end after this call."""
        now = self._clock.now()
        if self._held is not None and not self._writer.busy() and now - self._ended >= _REST_SECONDS:
            self._ended = now
            self._writer.write(self._held)

    def finish(self) -> None:
        """Write the held state and mark the job as finished: the program has ended.

        Returns when both are on the disk, have failed, or take too long.
        """
        self.settle()
        if self._held is not None and self._requested != self._taken:
            self._writer.write(self._held)
        if not self._wait_for_disk(_LAST_SECONDS, "the script has ended and waits"):
            self._failed(f"not written within {_LAST_SECONDS:.0f} s after the end of the script")
        elif self._taken is not None and self._taken in (self._safe, self._writer.written):
            self._finished(self._taken)
            self._finish_in_store(self._taken)

    def _finish_in_store(self, step: int) -> None:
        if self._mirror is None:
            return
        self._mirror.finish(step)
        who = "the script has ended and waits"
        if not _wait_for(self._mirror.close, _LAST_SECONDS, f"{who} for the upload of", self._clock):
            self._failed(f"not uploaded within {_LAST_SECONDS:.0f} s after the end of the script")

    def roll_back(self, step: int, *, is_chief: bool) -> int:
        """Remove the checkpoints of later steps than `step`; return that of the newest one left, or -1.

        No checkpoints are saved from now on. The chief also removes those in an object store.
        """
        self.drop()
        if not self._wait_for_disk(_PATIENCE_SECONDS, "training, which was wrong,"):
            note(
                "a checkpoint is still being written: remove it if its step is later than those that are kept"
            )
        left = self._writer.remove_after(step)
        return self._mirror.remove_after(step) if self._mirror is not None and is_chief else left

    def close(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Wait until all requested checkpoints are at their destinations; return False on timeout."""
        until = self._clock.now() + seconds
        written = self._writer.close(seconds)
        if self._mirror is None or not written:
            return written
        return self._mirror.close(max(0.0, until - self._clock.now()))

    @property
    def _requested(self) -> int | None:
        """The step of the checkpoint that was requested last."""
        return self._safe if self._writer.requested is None else self._writer.requested

    def _copied(self, contents: Contents) -> Contents:
        if "verified" in contents.manifest:
            checks = {name: CopyCheck.of(array) for name, array in contents.arrays.items()}
            contents = replace(contents, checks=checks)
        # The memory of the last copy is free once that copy is written.
        copies = Copies() if self._writer.busy() else self._copies
        return copies.of(contents)

    def _wait_for_previous(self, taken: int) -> None:
        begun = self._clock.now()
        if not self._writer.busy():
            return
        if not self._wait_for_disk(_PATIENCE_SECONDS, "training waits"):
            note(f"skipping the checkpoint of step {taken}: the previous one is still being written")
        before, self._waited = self._waited, self._waited + self._clock.now() - begun
        self._waits += 1
        if before < _TOLERATED_SECONDS <= self._waited:
            note(
                f"the disk is slower than the steps: it writes a checkpoint in {self._writer.seconds:.2g} s, "
                f"and training has waited {self._waited:.1f} s in total for {self._waits} of them; save them "
                "less often to train faster"
            )

    def _wait_for_disk(self, seconds: float, who: str) -> bool:
        """Wait until all requested checkpoints are written, with regular notes; return False on timeout."""
        return _wait_for(self._writer.close, seconds, f"{who} for the disk to write", self._clock)

    def _due(self, taken: int) -> bool:
        if self._every.steps is not None:
            before = taken - 1 if self._taken is None else self._taken
            return taken // self._every.steps > before // self._every.steps
        return self._every.seconds is not None and self._clock.now() - self._last >= self._every.seconds


def _wait_for(close: Callable[[float], bool], seconds: float, who: str, clock: Clock) -> bool:
    """Wait until `close` succeeds, and regularly note who waits for what; return False on timeout."""
    begun, pause = clock.now(), _QUIET_SECONDS
    while not close(max(0.0, min(pause, begun + seconds - clock.now()))):
        waited, pause = clock.now() - begun, NOTE_EVERY
        if waited >= seconds:
            return False
        note(f"{who} a checkpoint: {waited:.0f} of {seconds:.0f} s")
    return True


def open_scheduler(
    store: Store,
    every: Every,
    publish: Callable[[WorkerEvent], None],
    lease: StoreLease | None = None,
) -> CheckpointScheduler:
    """Return the scheduler that writes checkpoints to `store` while its process is the chief.

    Args:
        store: the store of the checkpoints.
        every: the interval.
        publish: called on another thread with an event for each checkpoint that is written or fails, and for
            each older one that is removed to free space or cannot be removed. A checkpoint for an object
            store counts as written when it is there.
        lease: the lease of the object store to which the checkpoints are uploaded; None if they stay on the
            disk.
    """

    say = RepeatedNotes()

    def done(path: Path | str, step: int, seconds: float) -> None:
        publish(CheckpointWritten(str(path), step, seconds))

    def failed(reason: str) -> None:
        publish(CheckpointFailed(reason))
        say(f"a checkpoint failed: {reason}; the job continues without it")

    # These are the names that they had as checkpoints, under which other processes also know them.
    left: set[str] = set()
    tried: set[str] = set()

    def removed_late(path: str) -> None:
        left.discard(path)
        publish(CheckpointRemoved(path, "it could not be removed before", late=True))

    def removed(path: Path, late: bool) -> None:
        if late:
            removed_late(_former(path))
            return
        publish(CheckpointRemoved(str(path), "the disk is full"))
        say(
            f"the disk has no space for another checkpoint in {path.parent}; removing the oldest; free "
            "space, or keep fewer checkpoints"
        )

    def publish_not_removed(path: Path | str, why: str) -> None:
        publish(CheckpointNotRemoved(path if isinstance(path, str) else _former(path), why))
        say(f"an old checkpoint could not be removed: {path}: {why}; training continues")

    def finished(step: int) -> None:
        try:
            store.finish(step)
        except CheckpointError as error:
            text = (
                f"{error}; the checkpoint of step {step} is complete, but the job does not count as finished"
            )
            publish(WarningShown(text))
            note(text)

    def not_removed(path: Path, why: str) -> None:
        former = _former(path)
        tried.add(former)
        if former not in left:
            left.add(former)
            publish_not_removed(path, why)

    mirror = None
    if lease is not None:
        mirror = Mirror(
            lease, store, done, failed, removed_late=removed_late, not_removed=publish_not_removed
        )

    def on_disk(path: Path, step: int, seconds: float) -> None:
        for gone in sorted(left - tried):
            removed_late(gone)
        tried.clear()
        if mirror is None:
            done(path, step, seconds)
        else:
            mirror.upload(step, seconds)

    def corrected(name: str, step: int) -> None:
        text = (
            f"one word of the array {name!r} changed in the copy for the checkpoint of step {step}, and was "
            "corrected: the processor or the memory of this host is at fault"
        )
        publish(WarningShown(text))
        note(text)

    writer = Writer(store, on_disk, failed, removed, not_removed, corrected)
    return CheckpointScheduler(writer, every, SystemClock(), finished, failed, mirror)


def _former(path: Path) -> str:
    """Return the path that a checkpoint had before its folder was renamed to be removed."""
    return str(path.with_name(FOLDER_PREFIX + re.sub(r"\D", "", path.name)))


def end_at_a_step(
    scheduler: CheckpointScheduler, is_chief: Callable[[], bool], patience: float | None = None
) -> None:
    """Let SIGTERM end this process at the end of a training step, after a checkpoint.

    A process that is not the chief ends at once, and so do processes that this one forks. Call this on the
    main thread.

    Args:
        scheduler: the scheduler whose `leaving` the signal sets.
        is_chief: whether this process currently writes checkpoints.
        patience: the seconds after which the process ends without a checkpoint, as it does after a second
            signal. None: the sender of the signal enforces a limit.
    """

    def leave(number: int, frame: object) -> None:
        again, scheduler.leaving = scheduler.leaving, True
        if not is_chief() or (again and patience is not None):
            sys.exit(128 + number)
        if patience is not None:
            timer = threading.Timer(patience, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is leave:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, leave)
    os.register_at_fork(after_in_child=forget)


Array = npt.NDArray[Any]


class Copies:
    """Copies contents; a copy reuses the memory of the previous one."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        self._thread: threading.Thread | None = None

    def make_ready(self, contents: Contents) -> None:
        """Allocate memory for contents of these shapes on a thread; only the first call does so."""
        if self._thread is None:
            kinds = {name: (array.shape, array.dtype) for name, array in contents.arrays.items()}
            self._thread = threading.Thread(target=self._take, args=(kinds,), name="copies", daemon=True)
            self._thread.start()

    def of(self, contents: Contents) -> Contents:
        """Return a copy of `contents`; it overwrites the previous copy."""
        ready = self._thread is None or not self._thread.is_alive()
        memory = self._memory if ready else {}
        copies = {name: _copied(array, memory.get(name)) for name, array in contents.arrays.items()}
        if ready:
            self._memory = copies
        return replace(contents, arrays=copies)

    def _take(self, kinds: Mapping[str, Any]) -> None:
        for name, (shape, dtype) in kinds.items():
            memory = np.empty(shape, dtype)
            # This maps each page while other threads run.
            memory.reshape(-1).view(np.uint8).fill(0)
            self._memory[name] = memory


def _copied(array: Array, memory: Array | None) -> Array:
    if memory is None or memory.shape != array.shape or memory.dtype != array.dtype:
        return np.array(array)
    np.copyto(memory, array)
    return memory
