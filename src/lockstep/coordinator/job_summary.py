"""What a job has done: for its last line, and its last event."""

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.system.prose import count


@dataclass
class JobSummary:
    """Counts what a job does.

    Attributes:
        lost: workers that were left behind.
        joined: workers that were let in.
        checkpoints: that were written.
        before: steps of training that the checkpoint had from which the job has gone on.
        steps: of training, those included; None as long as nobody has told.
        model: the name of the model that was trained last; empty where there is none.
        digest: `lockstep.digest` of it at the end of the script.
    """

    lost: int = 0
    joined: int = 0
    checkpoints: int = 0
    before: int = 0
    steps: int | None = None
    model: str = ""
    digest: str = ""

    def trained(self, steps: int, model: str, digest: str) -> None:
        """Take what the chief says at the end of its script."""
        self.steps, self.model, self.digest = steps, model, digest

    def fields(self, seconds: float) -> dict[str, Any]:
        """Return all of it as an event's fields; the job has taken `seconds`."""
        return {"seconds": round(seconds, 3), **asdict(self)}

    def line(self, seconds: float, workers: int) -> str:
        """Return the last line of a job that ended well, with so many workers; empty if nobody has told."""
        if self.steps is None:
            return ""
        before = f", {self.before} of them before," if self.before else ""
        numbers = {"lost": self.lost, "joined": self.joined}
        changes = [f"{number} {what}" for what, number in numbers.items() if number]
        steps, on = count(self.steps, "step"), count(workers, "worker")
        changed = f" ({', '.join(changes)})" if changes else ""
        parts = [f"finished in {_spoken(seconds)}: {steps}{before} on {on}{changed}"]
        if self.checkpoints:
            parts.append(count(self.checkpoints, "checkpoint"))
        if self.digest:
            parts.append(f"digest {self.digest} of model {self.model!r}")
        return "; ".join(parts)


def _spoken(seconds: float) -> str:
    """Return "4.2 s", "42 s", "3 min 12 s", "2 h 5 min"."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"
