"""Turns the events of a run into messages to the notifier of `lockstep run --notify`.

The process of the coordinator only sends short packets, and never waits for the notifier: another process,
which the command has started (`cli/notifier.py`), delivers the messages, and detects missing signs of
progress.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from lockstep.coordinator.comparison import read_verdict
from lockstep.coordinator.job_report import last_line, troubles
from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.events import (
    CallEnded,
    CallStarted,
    Event,
    JobFinished,
    JobStarted,
    TrainingResumed,
    ViewStarted,
    WorkerNotReplaced,
    is_within,
)
from lockstep.observability.measurements import MetricsRecorded, StepsMeasured
from lockstep.observability.run_state import RunState
from lockstep.protocol.notification import Notification, NotifierMessage, ProgressMade, What, encode
from lockstep.system.exit_status import STOPPED
from lockstep.system.paths import RunPaths
from lockstep.system.prose import count, duration_text

STALL = 600.0
"""Seconds without a measured step after which a job has stalled, at least."""
_TIMES_LONGEST = 5.0
"""The same as a multiple of the longest time between two measurements so far."""
_FIRST_STEP = 3 * STALL
"""The same before the first step of a call, which may compile."""
_EVERY = 1.0
"""Seconds between two signs of progress."""

_KINDS: tuple[type[Event], ...] = (
    *(CallEnded, CallStarted, JobFinished, JobStarted, MetricsRecorded, StepsMeasured, TrainingResumed),
    *(ViewStarted, WorkerNotReplaced),
)


class Notifications:
    """Turns the events of a job into messages to its notifier.

    Args:
        name: the name of the job, with which each text begins.
        replicas: number of replicas. With one replica, Keras takes the steps, and only the ends of epochs are
            signs of progress.
        members: the first workers of the job, or those with which another coordinator continues.
        compared: returns the verdict of the comparison with one process.
    """

    def __init__(
        self, name: str, replicas: int, members: tuple[int, ...], compared: Callable[[], str] = lambda: ""
    ) -> None:
        self._name = name
        self._steps_are_measured = replicas > 1
        self._compared = compared
        self._run = RunState(keeps_history=False, members=members)
        self._has_nan = False
        self._progressed: float | None = None
        self._longest = 0.0
        self._said = 0.0
        self._patience: float | None = None

    def of(self, published: PublishedEvent) -> list[NotifierMessage]:
        """Return the messages that follow from an event."""
        self._run = self._run.after(published)
        time = published.time
        match published.event:
            case StepsMeasured():
                return self._goes_on(time)
            case MetricsRecorded() as metrics:
                return [*self._goes_on(time), *self._judge(metrics)]
            case CallStarted(name) if self._steps_are_measured and not is_within(name):
                return self._expect(_FIRST_STEP, time) if self._patience is None else []
            case CallEnded(name) if not is_within(name):
                self._progressed = None
                return self._expect(None, time)
            case WorkerNotReplaced(wanted, reason):
                # The view without it follows.
                told = self._notification("not_replaced", reason)
                return [msgspec.structs.replace(told, workers=wanted)]
            case JobFinished() as finished:
                return [self._end(finished)]
        return []

    def _goes_on(self, time: float) -> list[NotifierMessage]:
        if self._progressed is not None:
            self._longest = max(self._longest, time - self._progressed)
        self._progressed = time
        if not (self._steps_are_measured or self._longest):
            return []
        return self._expect(max(STALL, _TIMES_LONGEST * self._longest), time)

    def _expect(self, patience: float | None, time: float) -> list[NotifierMessage]:
        if patience == self._patience and time - self._said < _EVERY:
            return []
        self._patience, self._said = patience, time
        return [ProgressMade(patience, self._run.trained)]

    def _judge(self, metrics: MetricsRecorded) -> list[NotifierMessage]:
        names = [name for name, value in metrics.values.items() if value is None]
        if not names or self._has_nan:
            return []
        self._has_nan = True
        are = "is not a finite number" if len(names) == 1 else "are not finite numbers"
        where = f"after {count(metrics.trained, 'training step')}, in {metrics.call}"
        return [self._notification("nan", f"{', '.join(names)} {are} {where}")]

    def _end(self, finished: JobFinished) -> Notification:
        status, workers = finished.status, len(self._run.members)
        if status == 0:
            line = last_line(finished, finished.seconds, workers, compared=self._compared())
            text = line or f"finished in {duration_text(finished.seconds)}"
        else:
            text = f"ended with status {status}" + (f": {finished.message}" if finished.message else "")
            text = "; ".join([text, *troubles(finished)])
        kind: What = "finished" if status == 0 else "stopped" if status in STOPPED else "failed"
        return msgspec.structs.replace(
            self._notification(kind, text), status=status, steps=finished.known_steps or self._run.trained
        )

    def _notification(self, kind: What, text: str) -> Notification:
        return Notification(
            what=kind,
            text=f"{self._name}: {text}",
            steps=self._run.trained,
            workers=len(self._run.members),
            metrics=self._run.values,
        )


@contextmanager
def notified(
    events: Bus, notifier: int | None, paths: RunPaths, replicas: int, members: tuple[int, ...]
) -> Iterator[None]:
    """Send the notifier of a job messages about its events during the block.

    Args:
        events: the bus of the job.
        notifier: descriptor of the socket to the notifier, closed after the block; None without a notifier.
        paths: the paths of the run, absolute.
        replicas: number of replicas.
        members: the workers at the beginning.
    """
    if notifier is None:
        yield
        return
    told = Notifications(paths.root.name, replicas, members, lambda: read_verdict(paths))
    with socket.socket(fileno=notifier) as connection:

        def tell(published: PublishedEvent) -> None:
            for message in told.of(published):
                # A notifier that is far behind, or was killed, misses it.
                with contextlib.suppress(OSError):
                    connection.send(encode(message), socket.MSG_DONTWAIT)

        end = events.subscribe(tell, *_KINDS)
        try:
            yield
        finally:
            end()
