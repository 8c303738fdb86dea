"""Where a run keeps its files."""

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
        """Held locked as long as the run lives; removed at the end."""
        return self.root / "lock"

    @property
    def events(self) -> Path:
        """What happened, a JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def sources(self) -> Path:
        """The texts of the script and its modules that the workers run."""
        return self.root / "sources"

    @property
    def downloaded(self) -> Path:
        """What workers have downloaded, a line each; not there if nothing."""
        return self.root / "downloaded"

    @property
    def saved(self) -> Path:
        """Notes of workers that save models together; removed at the end."""
        return self.root / "saved"

    def log(self, worker: int) -> Path:
        """Everything that `worker` wrote to stdout and stderr."""
        return self.root / f"worker-{worker}.log"

    def stack(self, worker: int) -> Path:
        """Python stacks that `worker` was asked for."""
        return self.root / f"worker-{worker}.stack"
