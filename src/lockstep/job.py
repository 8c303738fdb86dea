"""What a process knows of the job it computes for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.collectives.contract import Communicator
from lockstep.collectives.loopback import Hub
from lockstep.collectives.plan import ReducePlan
from lockstep.topology import View, place


class Report(Protocol):
    """Tells whoever watches this process what happened (an event of `events.jsonl`)."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Note `event` with fields that JSON can hold; never blocks for long, never raises."""


@dataclass(frozen=True)
class Job:
    """One worker's place in its job.

    Attributes:
        view: who owns which replica.
        worker: this process's worker id.
        seed: everything random in the job follows from it.
        threads: number of threads that compute one replica.
        communicator: this worker's end of the exchange.
        report: hears what this worker does.
        folder: the run's own, where workers may leave notes for each other; None without one.
    """

    view: View
    worker: int
    seed: int
    threads: int
    communicator: Communicator
    report: Report
    folder: Path | None = None

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that writes and prints."""
        return self.worker == self.view.chief


_current: list[Job] = []


def enter(job: Job) -> None:
    """Make `job` this process's job; called once, before the user's script runs."""
    _current[:] = [job]


def current() -> Job:
    """Return this process's job; one of a single worker and replica where nothing was entered."""
    if not _current:
        _current.append(_alone())
    return _current[0]


def is_chief() -> bool:
    """Whether this process is its job's chief: the one worker that should write files and print.

    Ask each time: another worker may have become it. In a program that runs by itself it is
    always true.
    """
    return current().is_chief


def _alone() -> Job:
    view = place(replicas=1, workers=(0,))
    hub = Hub(ReducePlan.of(view))
    return Job(view, worker=0, seed=0, threads=0, communicator=hub.member(0), report=_ignore)


def _ignore(event: str, **fields: Any) -> None:
    """Nobody watches a process that was started by hand."""
