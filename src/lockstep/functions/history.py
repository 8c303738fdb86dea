"""Why a job has no result, from the events of its run."""

import json
from pathlib import Path
from typing import Any

from lockstep.errors import JobError
from lockstep.system.paths import RunPaths


class RunHistory:
    """The events of a run: those added to its file after the creation of this object.

    Args:
        folder: of the run.
        on: text that follows each path in messages, such as " on <host>".
        whole: whether the events before are of this run too.
    """

    def __init__(self, folder: Path, on: str = "", *, whole: bool = False) -> None:
        self._paths = RunPaths(folder)
        self._on = on
        events = self._paths.events
        self._start = events.stat().st_size if events.exists() and not whole else 0

    def error(self, status: int) -> JobError:
        """Return the error for a job that has ended with an exit status, and without a result."""
        events = self._read()
        end = next((event for event in reversed(events) if event["event"] == "finished"), None)
        if end is None:
            return JobError(f"the job's command exited with status {status}; see its output above")
        logs = f"logs in {self._paths.root}{self._on}"
        if end["status"] == 0:
            return JobError(f"no worker returned a result: the function called sys.exit; {logs}")
        worker = end["workers"][0] if end["workers"] else None
        where = f"log: {self._paths.log(worker)}{self._on}" if worker is not None else logs
        tracebacks = [
            event["traceback"] for event in events if event["event"] == "failed" and event["worker"] == worker
        ]
        return JobError(f"{end['message']}; {where}", worker, tracebacks[0] if tracebacks else "")

    def _read(self) -> list[dict[str, Any]]:
        if not self._paths.events.exists():
            return []
        lines = self._paths.events.read_bytes()[self._start :].splitlines()
        return [json.loads(line) for line in lines]
