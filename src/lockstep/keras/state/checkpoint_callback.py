"""The callback with which a script saves checkpoints, and the beginning of saving them."""

import atexit
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import msgspec

from lockstep.checkpoint.checkpoint_files import Contents, load
from lockstep.checkpoint.hand_over import ArrivingCheckpoint, held_of, parts_of_checkpoint
from lockstep.checkpoint.held import HeldCheckpoint, choose_newest
from lockstep.checkpoint.object_store import is_url
from lockstep.checkpoint.resume import (
    note_on_end,
    note_on_versions,
    refuse_different_job,
)
from lockstep.checkpoint.scheduler import (
    DEFAULT_EVERY,
    CheckpointScheduler,
    Every,
    end_at_a_step,
    open_scheduler,
    parse_every,
)
from lockstep.checkpoint.store import DEFAULT_KEEP, Store
from lockstep.checkpoint.store_lock import FolderLock, announce
from lockstep.checkpoint.values import plain
from lockstep.collectives.contract import Communicator
from lockstep.errors import ConfigError, LockstepError, ScopeError
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.worker_exchange import agree
from lockstep.observability.events import CheckpointsConfigured
from lockstep.system.clock import SystemClock
from lockstep.system.disk_work import DiskWork
from lockstep.system.event_loop import EventLoop
from lockstep.system.notes import NOTE_EVERY, note
from lockstep.system.prose import count, interval
from lockstep.topology import View
from lockstep.worker.job import Job
from lockstep.worker.peers import Alone

_PATIENCE = 20.0
_PART = 1 << 20
"""Bytes of a checkpoint that hosts hand over at once."""
_END = b"\xff"
"""The message after the last part."""
_MEET_EVERY = 1.0
"""Seconds between two exchanges while a worker completes its copy."""


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves checkpoints from the first `fit` that has this callback until the process ends.

    The checkpoints are those of `lockstep run --checkpoint`. They hold every model that is compiled in the
    strategy's scope, and are saved at the end of a step of any later call. A restarted program resumes from
    the newest complete one with the same result to the last bit. It may run under `lockstep run` with any
    number of workers, or without it.

    The program repeats everything before that `fit`. That `fit` and all later calls return their earlier
    results if they had finished. The call in progress resumes at its step. So give the callback to the first
    `fit` of the program, and to the same one each time. Later calls of `fit` do not need it.

    Under `lockstep run`, SIGTERM, SIGHUP and Ctrl-C first save a checkpoint. Without it, SIGTERM does the
    same, unless the program handles the signal itself: the process exits at the end of its step, after at
    most 20 seconds, or at a second SIGTERM.

    `fit` raises ConfigError if another job saves checkpoints in the folder, if the replicas, threads, seed or
    backend differ from the checkpoint's, if the command has `--checkpoint`, and if `every` or `keep` is
    invalid; CheckpointError if the newest checkpoint belongs to another model or place in the program;
    ChangedError if settings of the model, optimizer, loss or callbacks differ from those of the newest
    checkpoint; ScopeError if the model was not compiled in the strategy's scope.

    Args:
        folder: the folder of the checkpoints. One job at a time can use it.
        every: the interval: a number of steps, or a time such as "30s", "10m" or "1h".
        keep: the number of checkpoints to keep.
        accept_changes: whether to resume even if settings of the model, optimizer, loss or callbacks differ.

    Example:
        >>> import keras, lockstep
        >>> import numpy as np
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> saving = lockstep.callbacks.Checkpoint("saved", every=1, keep=2)
        >>> history = model.fit(np.ones((8, 3)), np.ones(8), batch_size=2, verbose=0, callbacks=[saving])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | str = DEFAULT_EVERY,
        keep: int = DEFAULT_KEEP,
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


class _HostFinding(msgspec.Struct, frozen=True):
    """The newest checkpoint that one worker of a host has found in the folder.

    Attributes:
        worker: the id of the worker.
        host: the name of its host; empty if the view has one host.
        refusal: why the job cannot save checkpoints there; empty if it can.
        path: the path of the newest complete checkpoint.
        held: the description of this checkpoint; None if there is none.
        notes: notes for the user.
    """

    worker: int
    host: str = ""
    refusal: str = ""
    path: str = ""
    held: HeldCheckpoint | None = None
    notes: tuple[str, ...] = ()


class _SourceLost(Exception):
    """The worker that gave the others a checkpoint was lost."""


class ScriptCheckpoints:
    """Starts saving the checkpoints that a script requests with a `Checkpoint` callback."""

    def __init__(self, job: Job, calls: NumberedCalls, snapshots: Snapshots) -> None:
        self._job = job
        self._calls = calls
        self._snapshots = snapshots
        self._resumable = snapshots.resumable
        self._folder: Path | None = None
        self._keep_copies = 1

    def begin(self, callback: Checkpoint) -> None:
        """Save checkpoints from the current call on, and resume from the newest one, if there is one.

        All workers call this at the beginning of the same call.

        Raises:
            ConfigError: another job uses the folder, the checkpoint is of a job with other settings, or
                checkpoints are already saved elsewhere. Every worker raises it.
            CheckpointError: the job of the checkpoint requested checkpoints in another call. Every worker
                raises it.
        """
        folder = _folder(callback.folder)
        if folder == self._folder:
            return
        if self._folder is not None or self._job.checkpoints.scheduler is not None:
            earlier = f"in {self._folder}" if self._folder else "where --checkpoint says"
            raise ConfigError(
                f"lockstep.callbacks.Checkpoint names {folder}, but checkpoints are already saved {earlier}; "
                "configure checkpoints in one place"
            )
        if len(self._calls.stack) > 2:
            raise ConfigError(
                f"lockstep.callbacks.Checkpoint is passed to {self._calls.current.name}: pass it to the call "
                "that is not inside another"
            )
        every, keep = _every(callback.every), _keep(callback.keep)
        if callback.accept_changes:
            self._job.checkpoints.accept_changes()
        announce(folder)
        claim = FolderLock(folder)
        self._keep_copies = keep
        self._resumable.request_checkpoints()
        try:
            if not self._resumable.catches_up:
                folder_name = os.fspath(callback.folder)
                settings = {"checkpoints": f"in {folder_name}, every {callback.every}, keep {keep}"}
                agree(self._job, self._calls.current.name, settings)
                self._resume(folder, every, claim)
        except LockstepError:
            self._resumable.withdraw_request()
            claim.release()
            raise
        scheduler = open_scheduler(Store(folder, keep, claim), every, self._job.events.publish)
        self._folder = folder
        self._job.checkpoints.keep(scheduler)
        self._job.events.publish(CheckpointsConfigured(str(folder), keep))
        self._save_at_exit(scheduler)

    def _resume(self, folder: Path, every: Every, claim: FolderLock) -> None:
        """Resume from the newest checkpoint of all hosts. Hosts that lack it get it first."""
        label = f"the beginning of {self._calls.current.name}"
        while True:
            loaded: list[tuple[Path, Contents]] = []
            findings = self._look(label, folder, claim, loaded)
            for finding in findings if self._job.is_chief else ():
                for text in finding.notes:
                    note(f"{finding.host}: {text}" if finding.host else text)
            if refusal := next((finding.refusal for finding in findings if finding.refusal), ""):
                raise ConfigError(refusal)
            hosts = [finding.host for finding in findings]
            chosen = choose_newest(hosts, [finding.held for finding in findings])
            if chosen is None:
                if self._job.is_chief:
                    note(f"new training with checkpoints in {folder}, {interval(every.steps, every.seconds)}")
                return
            best = findings[chosen]
            assert best.held is not None
            saved_facts = msgspec.to_builtins(best.held.job)
            refuse_different_job(Path(best.path), saved_facts, self._snapshots.job_facts())
            lacking = [finding for finding in findings if not best.held.is_same(finding.held)]
            if not lacking:
                break
            self._hand_over(label, folder, best, lacking)
        path = Store(folder).path(best.held.step)
        if self._job.is_chief:
            began = f"resuming from {path}, checkpoints {interval(every.steps, every.seconds)}"
            end = note_on_end(folder, best.held.step) if best.held.finished else ""
            for text in filter(None, [note_on_versions(path, saved_facts), began, end]):
                note(text)
        contents = loaded[0][1] if loaded and loaded[0][0] == path else load(path)
        self._resumable.begin(contents)
        self._job.checkpoints.resume(contents)

    def _look(
        self, label: str, folder: Path, claim: FolderLock, loaded: list[tuple[Path, Contents]]
    ) -> list[_HostFinding]:
        """Return the findings of the first worker of each host. The chief locks the folder for this job.

        Adds the checkpoint that this worker has found to `loaded`.
        """
        findings: list[_HostFinding] = []

        def look(view: View, communicator: Communicator) -> list[bytes]:
            if not findings and any(self._job.worker == host[0] for host in view.hosts):
                findings.append(self._find(folder, loaded))
            if findings and self._job.worker == view.chief:
                with_lock = self._lock(claim)
                findings[0] = msgspec.structs.replace(findings[0], refusal=with_lock or findings[0].refusal)
            return communicator.gather(msgspec.json.encode(findings[0]) if findings else b"", what=label)

        return [msgspec.json.decode(blob, type=_HostFinding) for blob in self._job.exchange(look) if blob]

    def _find(self, folder: Path, loaded: list[tuple[Path, Contents]]) -> _HostFinding:
        job, notes = self._job, list[str]()
        host = (job.context.host or socket.gethostname()) if len(job.view.hosts) > 1 else ""
        try:
            newest = Store(folder).newest(notes.append)
            if newest is None:
                return _HostFinding(job.worker, host, notes=tuple(notes))
            loaded.append(newest)
            return _HostFinding(job.worker, host, "", str(newest[0]), held_of(newest[0]), tuple(notes))
        except LockstepError as error:
            return _HostFinding(job.worker, host, refusal=str(error), notes=tuple(notes))

    def _lock(self, claim: FolderLock) -> str:
        """Lock the folder for this job, and return why this is impossible; empty if it is locked."""
        try:
            claim.acquire()
        except LockstepError as error:
            return str(error)
        return ""

    def _hand_over(
        self, label: str, folder: Path, best: _HostFinding, lacking: Sequence[_HostFinding]
    ) -> None:
        """Copy a checkpoint from the host of the worker that has found it to the hosts that lack it.

        If a worker is lost meanwhile, the copy may be missing.

        Raises:
            ConfigError: it cannot be copied. Every worker raises it.
        """
        assert best.held is not None
        job, failure = self._job, ""
        if job.is_chief:
            hosts = " and ".join(finding.host for finding in lacking)
            step = count(best.held.step, "step")
            note(f"the newest checkpoint, after {step}, is on {best.host}; copying it to {hosts}")
        arriving: ArrivingCheckpoint | None = None
        parts: Iterator[tuple[int, bytes]] = iter(())
        try:
            if job.worker in [finding.worker for finding in lacking]:
                arriving = ArrivingCheckpoint(folder, best.held, self._keep_copies)
            if job.worker == best.worker:
                parts = parts_of_checkpoint(Path(best.path), _PART)
        except LockstepError as error:
            failure = str(error)
        try:
            whole = self._receive_parts(label, parts if job.worker == best.worker else None, arriving)
            failure = failure or whole
            failure = self._complete(label, None if failure else arriving) or failure
        except _SourceLost:
            if job.is_chief:
                note(
                    f"{best.host} has lost the worker that gave the checkpoint; looking for the newest again"
                )
            return
        finally:
            if arriving is not None:
                arriving.discard()
        if failed := self._from_any(label, failure.encode()):
            raise ConfigError(failed.decode())

    def _receive_parts(
        self, label: str, parts: Iterator[tuple[int, bytes]] | None, arriving: ArrivingCheckpoint | None
    ) -> str:
        """Send and receive the parts of a checkpoint; if this worker cannot, return why.

        Args:
            label: names the call.
            parts: the parts, on the worker that has the checkpoint; None on others.
            arriving: the copy, on a worker that writes one; None on others.

        Raises:
            _SourceLost: the worker that has the checkpoint was lost. Every worker raises it.
        """
        failure = ""
        while True:
            blob = b""
            if parts is not None:
                try:
                    blob = next((bytes([file]) + part for file, part in parts), _END)
                except LockstepError as error:
                    blob, failure = _END, str(error)
            part = self._from_any(label, blob)
            if not part:
                raise _SourceLost
            if part == _END:
                return failure
            try:
                if arriving is not None and not failure:
                    arriving.add(part[0], part[1:])
            except LockstepError as error:
                failure = str(error)

    def _complete(self, label: str, arriving: ArrivingCheckpoint | None) -> str:
        """Complete the copies; if this worker cannot complete its own, return why.

        Meanwhile, the workers meet every second, so that a worker with a slow disk does not seem stuck.

        Args:
            label: names the call.
            arriving: the copy, on a worker that writes one; None on others.
        """
        job, clock = self._job, SystemClock()
        said = begun = clock.now()
        failure, blob = "", b""
        with EventLoop() as loop, ExitStack() as ends:
            work: DiskWork[Path] | None = None
            if arriving is not None:
                blob = (job.context.host or f"worker {job.worker}").encode()
                work = DiskWork(arriving.complete, "writing the copy of a checkpoint", loop, clock)
                ends.callback(work.close)
            while True:
                if work is not None and not work.is_over:
                    loop.turn(_MEET_EVERY)
                if work is not None and work.is_over:
                    try:
                        work.result()
                    except LockstepError as error:
                        failure = str(error)
                    work, blob = None, b""
                writer = self._from_any(label, blob)
                if not writer:
                    return failure
                if job.is_chief and (now := clock.now()) - said >= NOTE_EVERY:
                    said = now
                    note(f"{writer.decode()} writes the checkpoint, {now - begun:.0f} s")

    def _from_any(self, label: str, blob: bytes) -> bytes:
        """Return the blob of the first worker that has one, or empty bytes if none has."""

        def receive(_: View, communicator: Communicator) -> bytes:
            return next(filter(None, communicator.gather(blob, what=label)), b"")

        return self._job.exchange(receive)

    def _save_at_exit(self, scheduler: CheckpointScheduler) -> None:
        """Save the last checkpoint when the process ends. Forked processes do not save any."""
        job = self._job
        is_alone = isinstance(job.membership, Alone)
        if is_alone:
            atexit.register(_end, scheduler)
        unhandled = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if unhandled and threading.current_thread() is threading.main_thread():
            end_at_a_step(scheduler, lambda: job.is_chief, _PATIENCE if is_alone else None)

        def forget() -> None:
            job.checkpoints.drop()
            atexit.unregister(_end)

        os.register_at_fork(after_in_child=forget)


def _end(scheduler: CheckpointScheduler) -> None:
    """Save the last state of a plain program that has not ended with an error."""
    if hasattr(sys, "last_value"):
        scheduler.close()
    else:
        scheduler.finish()


def checkpoint_in(callbacks: Any) -> Checkpoint | None:
    """Return the `Checkpoint` among the callbacks of `fit`.

    Raises:
        ConfigError: there are several.
    """
    requested = [callback for callback in _listed(callbacks) if isinstance(callback, Checkpoint)]
    if len(requested) > 1:
        raise ConfigError("fit is given several lockstep.callbacks.Checkpoint: give it one")
    return requested[0] if requested else None


def without_checkpoint(checkpoint: Checkpoint | None, callbacks: Any) -> Any:
    """Return the callbacks of `fit` without `checkpoint`. A CallbackList is changed in place."""
    if checkpoint is None:
        return callbacks
    rest = [callback for callback in _listed(callbacks) if callback is not checkpoint]
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
    if isinstance(folder, str) and is_url(folder):
        raise ConfigError(
            f"lockstep.callbacks.Checkpoint, folder={folder!r}: give the path of a folder; for an object "
            "store, remove the callback and run the script with lockstep run --checkpoint URL"
        )
    if isinstance(path, str) and path and "\0" not in path and plain(path):
        return Path(path).absolute()
    raise ConfigError(f"lockstep.callbacks.Checkpoint, folder={folder!r}: give the path of a folder")


def _every(every: Any) -> Every:
    return parse_every(str(every), "lockstep.callbacks.Checkpoint, every=")


def _keep(keep: Any) -> int:
    if isinstance(keep, int) and keep >= 1:
        return keep
    raise ConfigError(f"lockstep.callbacks.Checkpoint, keep={keep}: give a whole number, 1 or more")
