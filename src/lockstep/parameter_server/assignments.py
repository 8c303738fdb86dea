"""The pure core of the dispatcher: which worker computes which step, while other steps are in progress.

Steps are numbered over all epochs of a `fit`, or are the functions that a `ClusterCoordinator` schedules.
Every worker visits all steps in order and computes those that it is assigned. A step that a lost worker
leaves incomplete goes to another one.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from lockstep.errors import InternalError


@dataclass
class _StepInWork:
    """A step in progress.

    Attributes:
        worker: the worker that computes it.
        passed: number of steps that were completed since it was assigned.
    """

    worker: int
    passed: int = 0


class StepSet:
    """A set of steps, and of parts of steps. Steps below the first missing one take no memory.

    Attributes:
        below: all steps below this one are in the set, in part 0.
    """

    def __init__(self) -> None:
        self.below = 0
        self._others: set[tuple[int, int]] = set()

    def add(self, step: int, part: int = 0) -> None:
        """Add a step, or a part of it."""
        if (step, part) not in self:
            self._others.add((step, part))
        while (self.below, 0) in self._others:
            self._others.remove((self.below, 0))
            self.below += 1

    def __contains__(self, step_and_part: tuple[int, int]) -> bool:
        """Whether the set has the part of a step, as (step, part)."""
        step, part = step_and_part
        return (part == 0 and step < self.below) or step_and_part in self._others


@dataclass
class Assignments:
    """The steps of a call of `fit`.

    A step reads weights after it was assigned and changes them before it is complete. Its staleness on a
    server, the number of changes between the two, is at most the number of steps that were in progress at
    some time together with it.

    Attributes:
        max_staleness: the bound on that number; None for no bound.
        stop: the first step that the program has not scheduled yet; None in `fit`, where all steps exist.
        completed: number of completed steps.
    """

    max_staleness: int | None = None
    stop: int | None = None
    completed: int = 0
    _next: int = 0
    _returned: set[int] = field(default_factory=set)
    _lost_with: dict[int, set[int]] = field(default_factory=dict)
    _active: dict[int, _StepInWork] = field(default_factory=dict)
    _done: StepSet = field(default_factory=StepSet)

    def assign(self, worker: int, below: int | None = None) -> int | None:
        """Assign the first step that no worker computes; return None if it has to wait for another step.

        A step that was lost with a worker is not assigned to the worker that replaces it. Both have the same
        id in a recorded order, which distinguishes them by their steps.

        Args:
            worker: the worker that gets it.
            below: the step must be below this one; None for any step.
        """
        returned = (step for step in self._returned if worker not in self._lost_with.get(step, ()))
        step = min(returned, default=self._next)
        if (below is not None and step >= below) or not self._may_begin(step):
            return None
        if step == self._next:
            if step == self.stop:
                return None
            self._next += 1
        else:
            self._returned.remove(step)
        self._active[step] = _StepInWork(worker)
        return step

    def follow(self, worker: int, step: int) -> None:
        """Assign a step as in a recorded run, perhaps after another worker was lost with it."""
        self._returned |= set(range(self._next, step))
        self._next = max(self._next, step + 1)
        self._returned.discard(step)
        self._active[step] = _StepInWork(worker)

    def complete(self, worker: int, step: int) -> bool:
        """Complete a step; return False if it was already complete, or was assigned to another worker."""
        active = self._active.get(step)
        if active is None or active.worker != worker:
            return False
        del self._active[step]
        for other in self._active.values():
            other.passed += 1
        self._lost_with.pop(step, None)
        self._done.add(step)
        self.completed += 1
        return True

    def give_back(self, worker: int, first: int = 0) -> list[int]:
        """Take back the steps from this one on that a worker has not begun, and return them."""
        steps_of_worker = (step for step, active in self._active.items() if active.worker == worker)
        steps = [step for step in steps_of_worker if step >= first]
        for step in steps:
            del self._active[step]
            self._returned.add(step)
        return steps

    def lose(self, worker: int) -> list[int]:
        """Take back the steps of a lost worker, and return them."""
        lost = self.give_back(worker)
        for step in lost:
            self._lost_with.setdefault(step, set()).add(worker)
        return lost

    def lost_with_all(self, workers: Collection[int]) -> int | None:
        """Return a step that was lost with each of these workers, or None if there is none."""
        lost = (step for step in self._returned if self._lost_with.get(step, set()).issuperset(workers))
        return min(lost, default=None)

    def cancel(self) -> list[int]:
        """Drop the steps below `stop` that no worker computes, and return them."""
        assert self.stop is not None
        dropped = sorted({*self._returned, *range(self._next, self.stop)})
        self._returned.clear()
        self._next = self.stop
        for step in dropped:
            self._done.add(step)
        return dropped

    def incomplete_below(self, step: int) -> list[int]:
        """Return the steps before a step that are not complete, in order.

        Raises:
            InternalError: the step was never assigned.
        """
        if step >= self._next:
            raise InternalError(f"step {step} was never assigned")
        return sorted(incomplete for incomplete in (*self._active, *self._returned) if incomplete < step)

    def in_work(self) -> dict[int, int]:
        """Return the worker of each step in progress."""
        return {step: active.worker for step, active in self._active.items()}

    @property
    def completed_below(self) -> int:
        """All steps below this one are complete, or dropped."""
        return self._done.below

    def _may_begin(self, step: int) -> bool:
        bound = self.max_staleness
        if bound is None:
            return True
        # While a step is in progress, all other steps in progress may be completed, and so may the new one.
        # The same applies to lost steps, because servers may already have their gradients.
        lost = self._returned.intersection(self._lost_with)
        others = len(self._active) + len(lost - {step})
        return all(active.passed + others <= bound for active in self._active.values()) and others <= bound
