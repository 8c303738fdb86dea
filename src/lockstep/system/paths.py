"""The paths of a run's files, and what happens to each file. Pure."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """Every path of one run.

    Attributes:
        root: the run's own folder.
    """

    root: Path

    @property
    def lock(self) -> Path:
        """The lock file, locked while the run is active; removed at the end."""
        return self.root / "lock"

    @property
    def events(self) -> Path:
        """The event log, one JSON object per line."""
        return self.root / "events.jsonl"

    @property
    def measurements(self) -> Path:
        """Measurements of steps, metrics and load, one JSON object per line."""
        return self.root / "measurements.jsonl"

    @property
    def digests(self) -> Path:
        """The folder of the digest log."""
        return self.root / "digests"

    @property
    def orders(self) -> Path:
        """The folder with the orders of arrival of a job with parameter servers."""
        return self.root / "order"

    @property
    def sources(self) -> Path:
        """The source files of the script and its modules that the workers run."""
        return self.root / "sources"

    @property
    def downloaded(self) -> Path:
        """The downloads of workers, one per line; missing if there are none."""
        return self.root / "downloaded"

    @property
    def saved(self) -> Path:
        """Records of workers that save models together; removed at the end."""
        return self.root / "saved"

    @property
    def tuner_lock(self) -> Path:
        """Locked by a worker that makes a tuner of KerasTuner; removed at the end."""
        return self.saved / "keras_tuner.lock"

    @property
    def comparison(self) -> Path:
        """The result of the comparison with one process, beside the run."""
        return self.root / "comparison.json"

    @property
    def comparing(self) -> "RunPaths":
        """The run of the process that compares, which ends with `temporary`."""
        return RunPaths(self.root / "comparison")

    @property
    def temporary(self) -> Path:
        """Temporary files of a process that compares; removed at its end."""
        return self.root / "temporary"

    @property
    def claim(self) -> Path:
        """The id of the job over hosts that holds the lock of the folder."""
        return self.root / ".lockstep-job"

    @property
    def store_mark(self) -> Path:
        """The tokens of runs in an object store whose files the folder has completely, the latest first."""
        return self.root / ".lockstep-store"

    @property
    def fetched(self) -> Path:
        """Files of an earlier run until all have arrived from an object store."""
        return self.root / ".lockstep-fetched"

    @property
    def output(self) -> Path:
        """The output of a detached command, which it would otherwise write to a terminal."""
        return self.root / "output.log"

    def log(self, worker: int) -> Path:
        """The output of `worker` to stdout and stderr."""
        return self.root / f"worker-{worker}.log"

    def stack(self, worker: int) -> Path:
        """The Python stacks that `worker` wrote on request."""
        return self.root / f"worker-{worker}.stack"


_RUN = RunPaths(Path())
_RECORDED = {
    str(path) for path in (_RUN.events, _RUN.measurements, _RUN.comparison, _RUN.output, _RUN.downloaded)
}
_RECORDED_FOLDERS = {str(path) for path in (_RUN.digests, _RUN.orders, _RUN.sources)}
_OF_WORKER = re.compile(r"worker-(0|[1-9][0-9]*)\.(log|stack)")
_SAVED_RECORD = re.compile("[0-9a-f]{32}")
"""File names of the records of saved models; see `lockstep.keras.shared_saves`."""


def is_recorded(name: str) -> bool:
    """Whether Lockstep has written a file of a run folder. Commands that show a run read only such files."""
    folder, _, file = name.rpartition("/")
    in_folder = folder in _RECORDED_FOLDERS and file != ""
    return name in _RECORDED or in_folder or _OF_WORKER.fullmatch(name) is not None


def is_transient(name: str) -> bool:
    """Whether a file of a run folder is used only while a run, or a transfer to this machine, is active."""
    of_comparing = name.removeprefix(f"{_RUN.comparing.root}/")
    folder, _, file = of_comparing.rpartition("/")
    return (
        of_comparing in (str(_RUN.lock), str(_RUN.tuner_lock))
        or (folder == str(_RUN.saved) and is_saved_record(file))
        or name == str(_RUN.store_mark)
        or name.startswith((f"{_RUN.comparing.temporary}/", f"{_RUN.fetched}/"))
    )


def is_verdict(name: str) -> bool:
    """Whether a file belongs to the comparison with one process, which each run replaces."""
    return name == str(_RUN.comparison) or name.startswith(f"{_RUN.comparing.root}/")


def is_saved_record(file: str) -> bool:
    """Whether a file in `saved` is the record of a model that workers save together."""
    return _SAVED_RECORD.fullmatch(file) is not None


def worker_of_log(file: str) -> int | None:
    """Return the worker to whose log a path in a run folder belongs, or None."""
    match = _OF_WORKER.fullmatch(file)
    return int(match[1]) if match is not None and match[2] == "log" else None


def kept_source(sources: Path, file: Path) -> Path:
    """Return the path in the folder `sources` of a run at which the text of a source file is kept."""
    return sources / f"{hashlib.sha256(os.fsencode(file)).hexdigest()}.py"
