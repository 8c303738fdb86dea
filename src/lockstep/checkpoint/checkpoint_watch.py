"""How an evaluator watches a folder of checkpoints. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import PeerLostError, PeerStuckError

PATIENCE = 600.0
"""Seconds without a job and without a new checkpoint after which the evaluator gives up."""

_EVERY = 5.0
_EVERY_WHILE_TRAINING = 60.0
_TRIES = 2


@dataclass(frozen=True)
class FolderState:
    """The state of a folder at one time.

    Attributes:
        now: seconds on a monotonic clock.
        trains: whether a running job saves checkpoints there; read before `steps`.
        begun: whether a job has started or saved a checkpoint since the evaluator's process started.
        steps: the steps of the checkpoints in the folder.
    """

    now: float
    trains: bool
    begun: bool
    steps: Iterable[int]


@dataclass
class CheckpointWatch:
    """Chooses the checkpoints to evaluate, and detects when there will be no more.

    Attributes:
        folder: for messages.
        since: the time of the last activity; initially the start of the watch.
        newest: the step of the newest evaluated checkpoint; None before the first.
        unit: the unit of the numbers of checkpoints.
    """

    folder: Path
    since: float
    newest: int | None = None
    unit: str = "step"
    _begun: bool = False
    _reported: float | None = None
    _failed: Counter[int] = field(default_factory=Counter)

    def choose(self, state: FolderState) -> int | None:
        """Return the step of the checkpoint to load: the newest one not yet evaluated, or None.

        Raises:
            PeerLostError: training has ended without a checkpoint that could be evaluated.
            PeerStuckError: no job has started for `PATIENCE` seconds.
        """
        if state.trains:
            self.since = state.now
        self._begun = self._begun or state.trains or state.begun
        after = -1 if self.newest is None else self.newest
        new = [step for step in state.steps if step > after and self._failed[step] < _TRIES]
        if new:
            return max(new)
        if self.is_over(state) and self.newest is None:
            raise PeerLostError(
                f"the job that saves checkpoints in {self.folder} has ended without a complete one, so "
                "nothing was evaluated; save checkpoints more often: "
                "lockstep.callbacks.Checkpoint(folder, every=...)"
            )
        if not self._begun and state.now - self.since >= PATIENCE:
            raise PeerStuckError(
                f"the evaluator has waited {PATIENCE:g} s for a job that saves checkpoints in {self.folder} "
                "and gives up; start the other tasks within that time, with the same folder"
            )
        return None

    def is_over(self, state: FolderState) -> bool:
        """Whether training has ended; `state` then shows all of its checkpoints."""
        return self._begun and not state.trains

    def evaluated(self, step: int, now: float) -> None:
        """Record that a checkpoint was evaluated."""
        self.newest, self.since, self._reported = step, now, now

    def read_failed(self, step: int) -> bool:
        """Record that a checkpoint could not be read; return whether it is damaged.

        After the first failure, the checkpoint is tried again, since it may just have been replaced.
        """
        self._failed[step] += 1
        return self._failed[step] >= _TRIES

    def status_line(self, state: FolderState) -> str:
        """Return a line on what the evaluator waits for, or an empty string if none is due."""
        every = _EVERY_WHILE_TRAINING if state.trains else _EVERY
        if self._reported is not None and state.now - self._reported < every:
            return ""
        self._reported = state.now
        if state.trains:
            awaited = "a checkpoint" if self.newest is None else f"one after {self.unit} {self.newest}"
            return f"the evaluator waits for {awaited} in {self.folder}"
        waited = state.now - self.since
        for_how_long = f", {waited:.0f} of {PATIENCE:g} s" if waited >= 1 else ""
        return f"the evaluator waits for a job that saves checkpoints in {self.folder}{for_how_long}"
