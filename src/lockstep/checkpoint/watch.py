"""How an evaluator polls a folder of checkpoints. Pure."""

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
class Look:
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
    """Chooses the checkpoints to evaluate, and determines when there will be no more.

    Attributes:
        folder: for messages.
        since: the time of the last activity; at first, the start of the watch.
        newest: the step of the newest evaluated checkpoint; None before the first.
    """

    folder: Path
    since: float
    newest: int | None = None
    _begun: bool = False
    _reported: float | None = None
    _failed: Counter[int] = field(default_factory=Counter)

    def choose(self, look: Look) -> int | None:
        """Return the step of the checkpoint to load now, the newest not yet evaluated; None if there is none.

        Raises:
            PeerLostError: training has ended without a checkpoint that could be evaluated.
            PeerStuckError: no job has started for `PATIENCE` seconds.
        """
        if look.trains:
            self.since = look.now
        self._begun = self._begun or look.trains or look.begun
        after = -1 if self.newest is None else self.newest
        new = [step for step in look.steps if step > after and self._failed[step] < _TRIES]
        if new:
            return max(new)
        if self.is_over(look) and self.newest is None:
            raise PeerLostError(
                f"the job that saves checkpoints in {self.folder} has ended without a complete one, so "
                "nothing was evaluated; save them more often: "
                "lockstep.callbacks.Checkpoint(folder, every=...)"
            )
        if not self._begun and look.now - self.since >= PATIENCE:
            raise PeerStuckError(
                f"the evaluator has waited {PATIENCE:g} s for a job that saves checkpoints in {self.folder} "
                "and gives up; start the other tasks within that time, with the same folder"
            )
        return None

    def is_over(self, look: Look) -> bool:
        """Whether training has ended; `look` then shows all of its checkpoints."""
        return self._begun and not look.trains

    def evaluated(self, step: int, now: float) -> None:
        """Note that a checkpoint was evaluated."""
        self.newest, self.since, self._reported = step, now, now

    def could_not_read(self, step: int) -> bool:
        """Note that a checkpoint could not be read; return whether it is damaged.

        The first time, it may just have been replaced, so it is tried again.
        """
        self._failed[step] += 1
        return self._failed[step] >= _TRIES

    def line(self, look: Look) -> str:
        """Return the line that says what the evaluator waits for; empty if none is due."""
        every = _EVERY_WHILE_TRAINING if look.trains else _EVERY
        if self._reported is not None and look.now - self._reported < every:
            return ""
        self._reported = look.now
        if look.trains:
            what = "a checkpoint" if self.newest is None else f"one after step {self.newest}"
            return f"the evaluator waits for {what} in {self.folder}"
        waited = look.now - self.since
        for_how_long = f", {waited:.0f} of {PATIENCE:g} s" if waited >= 1 else ""
        return f"the evaluator waits for a job that saves checkpoints in {self.folder}{for_how_long}"
