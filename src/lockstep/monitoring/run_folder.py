"""Follows the folder of a run while its files grow, and returns the state of the run.

A folder may contain several runs, one after the other. The last one counts, except for metrics and steps,
which continue.
"""

import heapq
from collections.abc import Iterator
from pathlib import Path

from lockstep.coordinator.comparison import read_verdict
from lockstep.errors import ConfigError
from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import FORMAT
from lockstep.observability.run_lines import GrowingFile, Happening, happening, measurement
from lockstep.observability.run_state import RunState
from lockstep.parameter_server.tasks import Tasks
from lockstep.system.paths import RunPaths


def task_of(state: RunState, worker: int) -> str:
    """Return `chief`, `worker` or `ps` in a job with parameter servers, otherwise an empty string."""
    processes, servers = int(state.job.get("workers", 0)), int(state.job.get("parameter_servers", 0))
    if not servers:
        return ""
    if processes == 1:
        # One process with all tasks repeats a run.
        return "chief"
    # Other processes replace only workers.
    return Tasks(processes, servers).of(worker)[0] if 0 <= worker < processes else "worker"


def steps_trained(state: RunState) -> int:
    """Return the number of training steps so far, as measured by the chief or another worker."""
    taking = [info for info in state.workers.values() if task_of(state, info.worker) in ("", "chief")]
    measured = max((int(info.steps.last().get("trained", 0)) for info in taking), default=0)
    # The steps of one replica are not measured, but its metrics are.
    return measured or state.trained or 0


class RunFolder:
    """Follows the files of a run.

    Args:
        folder: the run folder; its files may appear later.

    Attributes:
        paths: the paths of the files in the folder.
        state: the state of the run, according to the lines read so far.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder)
        self._begin()

    def _begin(self) -> None:
        self.state = RunState()
        self._events = GrowingFile(self.paths.events)
        self._measurements = GrowingFile(self.paths.measurements)

    def update(self) -> bool:
        """Read new lines of the files; return whether there are any.

        A line without its end is read when it is complete. Unreadable lines are skipped and counted.

        Raises:
            OSError: a file exists and cannot be read.
            ConfigError: the last run in the folder was recorded in a format of a later version.
        """
        if self._events.shrank() or self._measurements.shrank():
            self._begin()
        before = self.state
        # The order is that of time, because the phase of a worker follows from both files.
        for entry in heapq.merge(self._happenings(), self._measured(), key=lambda happening: happening.time):
            self.state = self.state.after(entry)
        self.state = self.state.with_verdict(read_verdict(self.paths, ended=self.state.finished is not None))
        written = self.state.job.get("format")
        if isinstance(written, int) and written > FORMAT:
            raise ConfigError(
                f"{self.paths.events} has format {written}, and this version reads format {FORMAT}: install "
                "the version of Lockstep that has written it"
            )
        return self.state is not before

    def _happenings(self) -> Iterator[Happening | PublishedEvent]:
        for line in self._events.lines():
            if (event := happening(line)) is not None:
                yield event
            else:
                self.state = self.state.without_line()

    def _measured(self) -> Iterator[Happening | PublishedEvent]:
        for line in self._measurements.lines():
            if (event := measurement(line)) is not None:
                yield event
            else:
                self.state = self.state.without_line()
