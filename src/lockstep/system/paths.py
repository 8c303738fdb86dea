"""The paths of a run's files."""

import hashlib
import os
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
    def output(self) -> Path:
        """The output of a detached command, which it would otherwise write to a terminal."""
        return self.root / "output.log"

    def log(self, worker: int) -> Path:
        """The output of `worker` to stdout and stderr."""
        return self.root / f"worker-{worker}.log"

    def stack(self, worker: int) -> Path:
        """The Python stacks that `worker` wrote on request."""
        return self.root / f"worker-{worker}.stack"


def kept_source(sources: Path, file: Path) -> Path:
    """Return the path in the folder `sources` of a run at which the text of a source file is kept."""
    return sources / f"{hashlib.sha256(os.fsencode(file)).hexdigest()}.py"
