"""Follows a job by its run folder and its coordinator, which may be slow, hang or end."""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.coordinator.admin_client import JobWatch, call_job
from lockstep.coordinator.job_report import last_line
from lockstep.coordinator.run_lookup import job_in, name_or_folder
from lockstep.errors import ConfigError
from lockstep.monitoring.overview import Overview, overview
from lockstep.monitoring.run_catalog import is_active
from lockstep.monitoring.run_folder import RunFolder
from lockstep.observability.run_state import RunState
from lockstep.protocol.admin import AdminRequest, Reply, StackRequest, Status, StatusRequest
from lockstep.system.clock import Clock
from lockstep.system.paths import RunPaths
from lockstep.system.prose import duration_text, printable

_PATIENCE = 2.0
"""Seconds that a coordinator has for a reply."""
_STACK_PATIENCE = 5.0
"""The same if a worker must respond first."""
_SAME = 5.0
"""Seconds by which the start of a job in its folder and in its replies may differ."""

Answer = Callable[[Reply | str], None]
"""Takes a reply, or why there is none; called in another thread."""


class JobContact:
    """Asks the coordinator of a job in a thread, so that its user never waits.

    Args:
        name: the name of the job.
        clock: measures the times below.
        interval: seconds between two requests for its state.
        call: sends a request; see `call_job`.

    Attributes:
        status: the newest reply; None before the first.
        answered: the time of its arrival, or of the creation of this object, in seconds since 1970.
        is_silent: whether the last request had no reply in time.
        gone: whether the job has ended.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        interval: float,
        call: Callable[[str, AdminRequest, float], Reply | None] = call_job,
    ) -> None:
        self.name = name
        self.status: Status | None = None
        self.answered = clock.wall()
        self.is_silent = False
        self.gone = False
        self._clock = clock
        self._interval = interval
        self._call = call
        self._requests: queue.SimpleQueue[tuple[AdminRequest, Answer] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Request the state now, and regularly; the thread ends with the process, or on `close`."""
        threading.Thread(target=self._serve, name="contact", daemon=True).start()

    def ask(self, request: AdminRequest, answer: Answer) -> None:
        """Send a request, after earlier ones. The thread must be running."""
        self._requests.put((request, answer))

    def close(self) -> None:
        """End the thread after its current request."""
        self._requests.put(None)

    def look(self) -> None:
        """Request the state, and wait for the reply for a limited time."""
        self._send(StatusRequest(), lambda reply: None)

    def _serve(self) -> None:
        self.look()
        while True:
            try:
                wanted = self._requests.get(timeout=self._interval)
            except queue.Empty:
                self.look()
                continue
            if wanted is None:
                return
            self._send(*wanted)

    def _send(self, request: AdminRequest, answer: Answer) -> None:
        try:
            patience = _STACK_PATIENCE if isinstance(request, StackRequest) else _PATIENCE
            reply = self._call(self.name, request, patience)
        except TimeoutError:
            self.is_silent = True
            answer(f"{self.name} has not replied within {patience:g} seconds")
            return
        except (OSError, ValueError) as error:
            answer(f"cannot ask {self.name}: {error}")
            return
        self.is_silent, self.gone, self.answered = False, reply is None, self._clock.wall()
        if isinstance(reply, Status):
            self.status = reply
        answer(f"{self.name} has ended" if reply is None else reply)


@dataclass
class FollowedJob:
    """A job, or the folder of a run.

    Attributes:
        name: the name of the job, or of the folder.
        folder: the folder of the run.
        clock: dates overviews.
        contact: the contact to the coordinator; None for a run that has ended.
    """

    name: str
    folder: RunFolder
    clock: Clock
    contact: JobContact | None = None

    def look(self) -> Overview:
        """Read new lines, and return the present overview of the job, or averages if it has ended.

        Raises:
            OSError: there is only the folder, and it cannot be read.
        """
        contact = self.contact
        # This order matters: when the job is gone, its last lines are complete.
        gone = contact is None or contact.gone
        try:
            self.folder.update()
        except OSError:
            if contact is None:
                raise
        run, now = self.folder.state, self.clock.wall()
        status = contact.status if contact is not None else None
        end, elsewhere = "", False
        if run.finished is not None and (gone or status is None or run.began >= status.since - _SAME):
            end = end_of(self.name, run)
        elif contact is None and (elsewhere := is_active(self.folder.paths.root)):
            end = f"{self.name} runs in another container: the figures are averages of the whole run so far"
        elif contact is None:
            end = (
                f"the end of {self.name} is not recorded: its processes were killed, or it runs on another "
                "machine"
            )
        elif gone:
            end = f"the end of {self.name} is not recorded: its processes were killed"
        silent = contact.answered if contact is not None and contact.is_silent and not end else None
        return overview(
            run,
            self.name,
            run.last if contact is None else now,
            status=status,
            silent_since=silent,
            end=end,
            active=not end or elsewhere,
            averages=contact is None,
        )


def end_of(name: str, run: RunState) -> str:
    """Return how a run ended, in one line."""
    fields = dict(run.finished or {})
    status, message, seconds = fields.get("status"), fields.get("message"), fields.get("seconds", 0.0)
    if status == 0:
        line = last_line(run.totals, seconds, len(run.members), compared=run.compared)
        return f"{name} {line}" if line else f"{name} finished in {duration_text(seconds)}"
    return f"{name} ended with status {status}" + (f": {message}" if message else "")


def open_job(job: str, clock: Clock, interval: float) -> FollowedJob:
    """Return a running job of this user, or the folder of a run.

    Args:
        job: the user's name for it; see `find_run`.
        clock: dates overviews.
        interval: seconds between two requests to its coordinator.

    Raises:
        ConfigError: there is no such job and no such folder, or the name is ambiguous, or the folder of the
            job is unknown.
        UnfitError: the system does not list its sockets.
    """
    target = name_or_folder(job)
    name = job_in(target) if isinstance(target, Path) else target
    if isinstance(target, Path) and name is None:
        return FollowedJob(printable(target.resolve().name), RunFolder(target), clock)
    assert name is not None
    contact = JobContact(name, clock, interval)
    contact.look()
    if contact.gone:
        raise ConfigError(f"{name} has just ended")
    folder = Path(contact.status.run_dir) if contact.status is not None else _folder_of_job(name)
    if folder is None and isinstance(target, Path):
        folder = target
    if folder is None:
        raise ConfigError(
            f"{name} has not replied within {_PATIENCE:g} seconds, so its folder is unknown; try again, or "
            "give its run folder"
        )
    return FollowedJob(name, RunFolder(folder), clock, contact)


def _folder_of_job(name: str) -> Path | None:
    """Return the run folder whose event log the process of a job has open, or None if there is none."""
    watch = JobWatch(name)
    watch.is_running()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{watch.owner}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = descriptor.readlink()
                if target == RunPaths(target.parent).events:
                    return target.parent
    return None
