"""Why a job has no result, from the events of its run."""

from pathlib import Path

from lockstep.errors import JobError
from lockstep.observability.run_lines import happenings
from lockstep.observability.run_state import RunState
from lockstep.system.paths import RunPaths


class RunHistory:
    """The events of a run: those added to its file after the creation of this object.

    Args:
        folder: the folder of the run.
        on: text that follows each path in messages, such as " on <host>".
        whole: whether the earlier events also belong to this run.
    """

    def __init__(self, folder: Path, on: str = "", *, whole: bool = False) -> None:
        self._paths = RunPaths(folder)
        self._on = on
        events = self._paths.events
        self._start = events.stat().st_size if events.exists() and not whole else 0

    def error(self, status: int) -> JobError:
        """Return the error for a job that has ended with an exit status but without a result."""
        run = self._read()
        end = run.finished
        if end is None:
            return JobError(f"the job's command exited with status {status}; see its output above")
        logs = f"logs in {self._paths.root}{self._on}"
        if end["status"] == 0:
            return JobError(f"no worker returned a result: the function called sys.exit; {logs}")
        worker = end["workers"][0] if end["workers"] else None
        where = f"log: {self._paths.log(worker)}{self._on}" if worker is not None else logs
        tracebacks = [
            event.fields["traceback"]
            for event in run.events
            if event.event == "failed" and event.worker == worker
        ]
        return JobError(f"{end['message']}; {where}", worker, tracebacks[0] if tracebacks else "")

    def _read(self) -> RunState:
        state, events = RunState(), self._paths.events
        for event in happenings(events.read_bytes()[self._start :] if events.exists() else b""):
            state = state.after(event)
        return state
