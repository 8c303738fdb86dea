"""Writing checkpoints while training goes on."""

import threading
from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.folder import Contents
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError
from lockstep.system.clock import SystemClock


class Writer:
    """Writes one checkpoint at a time on a thread, which lives while there is something to write.

    On that thread, `done(path, step, seconds)` is called for each checkpoint that is on the disk,
    `failed(message)` for each that could not be written, and `removed(path)` for each older one that had to
    make room; they must not raise. The thread does not keep the process from ending.

    Attributes:
        asked: the step of the checkpoint that was asked for last; None before the first.
        written: the step of the one that was written last; None before the first.
        seconds: that its writing took.
    """

    def __init__(
        self,
        store: Store,
        done: Callable[[Path, int, float], None],
        failed: Callable[[str], None],
        removed: Callable[[Path], None],
    ) -> None:
        self._store = store
        self._done = done
        self._failed = failed
        self._removed = removed
        self._changed = threading.Condition()
        self._waiting: Contents | None = None
        self._running = False
        self.asked: int | None = None
        self.written: int | None = None
        self.seconds = 0.0

    def write(self, contents: Contents) -> None:
        """Ask for a checkpoint and return at once.

        If one is being written, this one waits for it, in the place of one that has waited before, which is
        dropped: nothing is called for that. The arrays must stay as they are until this one is done, has
        failed or is dropped.
        """
        self.asked = contents.step
        with self._changed:
            self._waiting = contents
            if not self._running:
                threading.Thread(target=self._run, name="checkpoints", daemon=True).start()
                self._running = True

    def busy(self) -> bool:
        """Tell whether something is being written or waits for it."""
        return self._running

    def close(self, seconds: float) -> bool:
        """Wait until all that was asked for is on the disk or has failed; False if not within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def _run(self) -> None:
        try:
            while (contents := self._next()) is not None:
                self._write(contents)
                del contents
        except BaseException:
            with self._changed:
                self._waiting = None
                self._stop()
            raise

    def _next(self) -> Contents | None:
        with self._changed:
            contents, self._waiting = self._waiting, None
            if contents is None:
                # From here on, whoever asks for a checkpoint starts another thread.
                self._stop()
            return contents

    def _stop(self) -> None:
        self._running = False
        self._changed.notify_all()

    def _write(self, contents: Contents) -> None:
        clock = SystemClock()
        begun = clock.now()
        try:
            path = self._store.write(contents, self._removed)
        except CheckpointError as error:
            self._failed(str(error))
        except Exception as error:
            self._failed(f"cannot write the checkpoint of step {contents.step}: {error!r}")
        else:
            self.written, self.seconds = contents.step, clock.now() - begun
            self._done(path, contents.step, self.seconds)
