"""The callback with which a script saves checkpoints, and what starts saving them."""

import atexit
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import msgspec

from lockstep.checkpoint.checkpoint_files import Contents, load
from lockstep.checkpoint.resume import (
    job_facts,
    note_if_finished,
    note_on_versions,
    refuse_different_job,
)
from lockstep.checkpoint.scheduler import (
    CheckpointScheduler,
    Every,
    end_at_a_step,
    open_scheduler,
    parse_every,
)
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.store_lock import FolderLock, announce
from lockstep.checkpoint.values import plain
from lockstep.collectives.contract import Communicator
from lockstep.errors import ConfigError, LockstepError, ScopeError
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.worker_exchange import agree
from lockstep.observability.events import CheckpointsConfigured
from lockstep.system.notes import note
from lockstep.topology import View
from lockstep.worker.job import Alone, Job

_PATIENCE = 20.0
_LAST_SECONDS = 60.0


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves checkpoints from the first `fit` that has this callback until the process ends.

    The checkpoints are those of `lockstep run --checkpoint`: they hold every model that is compiled in the
    strategy's scope and are saved at the end of a step of any later call. A restarted program resumes from
    the newest complete one with the same result to the last bit, under `lockstep run` with any number of
    workers as well as on its own.

    The program repeats everything before that `fit`. That `fit` and all later calls return their earlier
    results if they had finished; the call in progress resumes at its step. So give the callback to the first
    `fit` of the program, and to the same one each time; later `fit` calls do not need it.

    Under `lockstep run`, SIGTERM first saves a checkpoint. The same holds in a program that runs on its own
    and does not handle SIGTERM otherwise: the process exits at the end of its step, at the latest after 20
    seconds or at a second SIGTERM.

    `fit` raises ConfigError if another job saves checkpoints in the folder, if the replicas, threads, seed or
    backend differ from the checkpoint's, if the command has `--checkpoint`, and if `every` or `keep` is
    invalid; CheckpointError if the newest checkpoint belongs to another model or place in the program;
    ChangedError if settings of the model, optimizer, loss or callbacks differ from those of the newest
    checkpoint; ScopeError if the model was not compiled in the strategy's scope.

    Args:
        folder: of the checkpoints; one job at a time can use it.
        every: the interval: a number of steps, or a time such as "30s", "10m" or "1h".
        keep: how many checkpoints to keep.
        accept_changes: resume even if settings of the model, optimizer, loss or callbacks differ.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | str = "10m",
        keep: int = 3,
        accept_changes: bool = False,
    ) -> None:
        super().__init__()
        self.accept_changes = accept_changes
        self.folder = folder
        self.every = every
        self.keep = keep

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise an error: the strategy removes this callback from calls that support it."""
        raise ScopeError(
            f"model {self.model.name!r} was not compiled in the scope of a "
            "lockstep.MultiWorkerMirroredStrategy, so lockstep.callbacks.Checkpoint cannot save it; build "
            "and compile it under `with strategy.scope():`"
        )


class _Choice(msgspec.Struct):
    """What the chief found in the folder: why the job cannot resume, or the newest checkpoint, if any."""

    refusal: str = ""
    path: str = ""
    notes: tuple[str, ...] = ()


class ScriptCheckpoints:
    """Starts saving the checkpoints that a script requests with a `Checkpoint` callback."""

    def __init__(self, job: Job, calls: NumberedCalls, snapshots: Snapshots) -> None:
        self._job = job
        self._calls = calls
        self._snapshots = snapshots
        self._resumable = snapshots.resumable
        self._folder: Path | None = None

    def begin(self, asked: Checkpoint) -> None:
        """Save checkpoints from the current call on, and resume from the newest one, if there is one.

        All workers call this at the beginning of the same call.

        Raises:
            ConfigError: another job uses the folder, the checkpoint is of a job with other settings, or
                checkpoints are already saved elsewhere; raised on every worker.
            CheckpointError: the job of the checkpoint requested checkpoints in another call; raised on every
                worker.
        """
        folder = _folder(asked.folder)
        if folder == self._folder:
            return
        if self._folder is not None or self._job.checkpoints.scheduler is not None:
            where = f"in {self._folder}" if self._folder else "where --checkpoint says"
            raise ConfigError(
                f"lockstep.callbacks.Checkpoint names {folder}, but checkpoints are already saved {where}; "
                "configure checkpoints in one place"
            )
        if len(self._calls.stack) > 2:
            raise ConfigError(
                f"lockstep.callbacks.Checkpoint is passed to {self._calls.current.name}: pass it to the call "
                "that is not inside another"
            )
        every, keep = _every(asked.every), _keep(asked.keep)
        if asked.accept_changes:
            self._job.checkpoints.accept_changes()
        announce(folder)
        claim = FolderLock(folder)
        self._resumable.request_checkpoints()
        try:
            if not self._resumable.catches_up:
                facts = {"checkpoints": f"in {folder}, every {asked.every}, keep {keep}"}
                agree(self._job, self._calls.current.name, facts)
                self._resume(folder, claim)
        except LockstepError:
            self._resumable.withdraw_request()
            claim.release()
            raise
        scheduler = open_scheduler(Store(folder, keep, claim), every, self._job.events.publish)
        self._folder = folder
        self._job.checkpoints.keep(scheduler)
        self._job.events.publish(CheckpointsConfigured(str(folder)))
        self._save_at_exit(scheduler)

    def _resume(self, folder: Path, claim: FolderLock) -> None:
        """Resume from the checkpoint that the chief chooses."""

        found: Contents | None = None

        def choose(view: View, communicator: Communicator) -> bytes:
            nonlocal found
            own = None
            if self._job.worker == view.chief:
                choice, found = self._claim(folder, claim)
                own = msgspec.json.encode(choice)
            return communicator.broadcast(own, root=0, what=f"the beginning of {self._calls.current.name}")

        choice = msgspec.json.decode(self._job.exchange(choose), type=_Choice)
        if choice.refusal:
            raise ConfigError(choice.refusal)
        for text in choice.notes if self._job.is_chief else ():
            note(text)
        if choice.path:
            contents = found or load(Path(choice.path))
            self._resumable.begin(contents)
            self._job.checkpoints.resume(contents)

    def _claim(self, folder: Path, claim: FolderLock) -> tuple[_Choice, Contents | None]:
        """Lock the folder for this job; return its newest checkpoint, or why the job cannot resume."""
        notes: list[str] = []
        choice, contents = _Choice(), None
        try:
            claim.acquire()
            if newest := Store(folder).newest(notes.append):
                path, contents = newest
                facts = job_facts(path, contents.manifest)
                refuse_different_job(path, facts, self._snapshots.facts())
                notes += filter(
                    None,
                    [
                        note_on_versions(path, facts),
                        f"resuming from {path}",
                        note_if_finished(folder, contents.step),
                    ],
                )
                choice = _Choice(path=str(path))
        except LockstepError as error:
            choice = _Choice(refusal=str(error))
        choice.notes = tuple(notes)
        return choice, contents

    def _save_at_exit(self, scheduler: CheckpointScheduler) -> None:
        """Save the last checkpoint when the process ends; forked processes save none."""
        job = self._job
        alone = isinstance(job.membership, Alone)
        if alone:
            atexit.register(_end, scheduler)
        unhandled = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if unhandled and threading.current_thread() is threading.main_thread():
            end_at_a_step(scheduler, lambda: job.is_chief, _PATIENCE if alone else None)

        def forget() -> None:
            job.checkpoints.drop()
            atexit.unregister(_end)

        os.register_at_fork(after_in_child=forget)


def _end(scheduler: CheckpointScheduler) -> None:
    """Save the last state of a plain program that has not ended with an error."""
    if hasattr(sys, "last_value"):
        scheduler.close(_LAST_SECONDS)
    else:
        scheduler.finish()


def asked_in(callbacks: Any) -> Checkpoint | None:
    """Return the `Checkpoint` among the callbacks of `fit`.

    Raises:
        ConfigError: there are several.
    """
    found = [one for one in _listed(callbacks) if isinstance(one, Checkpoint)]
    if len(found) > 1:
        raise ConfigError("fit is given several lockstep.callbacks.Checkpoint: give it one")
    return found[0] if found else None


def take_out(asked: Checkpoint | None, callbacks: Any) -> Any:
    """Return the callbacks of `fit` without `asked`; changes a CallbackList in place."""
    if asked is None:
        return callbacks
    rest = [one for one in _listed(callbacks) if one is not asked]
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return rest
    callbacks.callbacks[:] = rest
    return callbacks


def _listed(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks or []))


def _folder(folder: Any) -> Path:
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if isinstance(path, str) and path and "\0" not in path and plain(path):
        return Path(path).absolute()
    raise ConfigError(f"lockstep.callbacks.Checkpoint, folder={folder!r}: give the path of a folder")


def _every(every: Any) -> Every:
    return parse_every(str(every), "lockstep.callbacks.Checkpoint, every=")


def _keep(keep: Any) -> int:
    if isinstance(keep, int) and keep >= 1:
        return keep
    raise ConfigError(f"lockstep.callbacks.Checkpoint, keep={keep}: give a whole number, 1 or more")
