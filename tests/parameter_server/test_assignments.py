"""Assignments: decisions one by one, and whole trainings in virtual time against a plain account of them."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest

from lockstep.errors import InternalError
from lockstep.parameter_server.assignments import Assignments, StepSet

BOUNDS = (0, 1, 2, 5, None)
SERVERS = 2

What = Literal["push 0", "push 1", "done", "end of epoch"]
Recorded = tuple[Literal["assign", "done"], int, int]


@dataclass
class Server:
    """A parameter server that applies gradients as they arrive, each step's once.

    Attributes:
        applied: the steps, in order.
        read_at: how many were applied when the worker of a step read the weights.
    """

    applied: list[int] = field(default_factory=list)
    read_at: dict[int, int] = field(default_factory=dict)

    def pull(self, step: int) -> None:
        self.read_at[step] = len(self.applied)

    def push(self, step: int) -> int:
        """Return the staleness of the gradients."""
        if step in self.applied:
            return 0
        self.applied.append(step)
        return len(self.applied) - 1 - self.read_at[step]


@dataclass
class Training:
    """A training in virtual time: workers of random speeds, which are lost and replaced at random.

    Attributes:
        assignments: that are tested.
        steps: in each epoch.
        epochs: their number.
        workers: those alive.
        loss: the probability that a worker is lost instead of doing what is next.
        holders: the worker of each step in work.
        done: the complete steps, in order.
        ended: the epoch at whose end a worker was last.
        done_at_assignment: how many were complete when a step was last assigned.
        recorded: what a chief writes down.
        incomplete: the earlier steps that were not complete, at each assignment.
        staleness: the largest, on a server or at the chief.
        losses: how many workers were lost.
        lost_with: the workers with which each step was lost.
        lives: how often a worker was replaced.
        most_in_work: the largest number of steps that were in work together.
        epoch: the present one.
        servers: that workers pull from and push to.
        asking: the workers that wait for a step, in the order of their questions.
        at_the_end: those that wait at the end of an epoch.
        events: that will happen, by time.
    """

    assignments: Assignments
    steps: int
    epochs: int
    workers: set[int]
    loss: float
    rng: random.Random
    holders: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    done_at_assignment: dict[int, int] = field(default_factory=dict)
    recorded: list[Recorded] = field(default_factory=list)
    incomplete: list[list[int]] = field(default_factory=list)
    staleness: int = 0
    losses: int = 0
    lost_with: dict[int, set[int]] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    most_in_work: int = 0
    epoch: int = 0
    servers: tuple[Server, ...] = field(default_factory=lambda: tuple(Server() for _ in range(SERVERS)))
    asking: list[int] = field(default_factory=list)
    at_the_end: list[int] = field(default_factory=list)
    events: list[tuple[float, int, tuple[int, int], What, int]] = field(default_factory=list)
    made: int = 0
    now: float = 0.0

    def run(self) -> None:
        self.asking = sorted(self.workers)
        speeds = {worker: self.rng.choice((0.1, 1.0, 1.0, 5.0)) for worker in self.workers}
        while len(self.done) < self.steps * self.epochs:
            self.answer(speeds)
            self.check()
            assert self.events, "every worker waits"
            self.now, _, (worker, life), what, step = heapq.heappop(self.events)
            if worker in self.workers and life == self.lives.get(worker, 0):
                self.happen(worker, what, step)
                self.check()

    def answer(self, speeds: dict[int, float]) -> None:
        """Assign as many steps as possible, in the order of the questions."""
        for worker in list(self.at_the_end):
            if self.ended[worker] < self.epoch:
                self.at_the_end.remove(worker)
                self.asking.append(worker)
            else:
                self.assign(worker, speeds[worker], self.at_the_end)
        for worker in list(self.asking):
            self.assign(worker, speeds[worker], self.asking)

    def assign(self, worker: int, speed: float, waiting: list[int]) -> None:
        below = self.stop if waiting is self.at_the_end else None
        step = self.assignments.assign(worker, below)
        fit = [
            one for one in range(self.stop) if self.is_free(one) and worker not in self.lost_with.get(one, ())
        ]
        if step is None:
            if self.assignments.max_staleness is None:
                assert below is not None
                assert not fit
            elif below is None:
                assert self.holders, "nothing is in work, and no step is assigned"
            return
        waiting.remove(worker)
        assert self.is_free(step)
        assert step == fit[0] if fit else step >= self.stop
        self.holders[step] = worker
        self.most_in_work = max(self.most_in_work, len(self.holders))
        self.done_at_assignment[step] = len(self.done)
        self.recorded.append(("assign", worker, step))
        self.incomplete.append([earlier for earlier in range(step) if earlier not in self.done])
        assert self.assignments.incomplete_below(step) == self.incomplete[-1]
        if step >= self.stop:
            self.later(worker, "end of epoch", step, speed)
            return
        for server in self.servers:
            server.pull(step)
        pushes = self.rng.sample(("push 0", "push 1"), SERVERS)
        for index, what in enumerate((*pushes, "done"), 1):
            self.later(worker, what, step, speed * index)  # type: ignore[arg-type]

    def happen(self, worker: int, what: What, step: int) -> None:
        others = self.workers - {worker}
        clean = others.difference(*self.lost_with.values())
        if clean and self.rng.random() < self.loss:
            self.lose(worker)
        elif what == "end of epoch":
            self.return_steps(worker, self.assignments.give_back)
            self.ended[worker] = self.epoch
            self.at_the_end.append(worker)
        elif what == "done":
            self.complete(worker, step)
        else:
            server = self.servers[int(what[-1])]
            self.staleness = max(self.staleness, server.push(step))

    def complete(self, worker: int, step: int) -> None:
        stranger = self.rng.choice([other for other in range(1, 9) if other != worker])
        assert not self.assignments.complete(stranger, step)
        assert self.assignments.complete(worker, step)
        assert not self.assignments.complete(worker, step)
        self.staleness = max(self.staleness, len(self.done) - self.done_at_assignment[step])
        del self.holders[step]
        self.lost_with.pop(step, None)
        self.done.append(step)
        self.recorded.append(("done", worker, step))
        if len(self.done) == self.stop:
            self.epoch += 1
        self.asking.append(worker)

    def lose(self, worker: int) -> None:
        self.losses += 1
        for step in self.return_steps(worker, self.assignments.lose):
            self.lost_with.setdefault(step, set()).add(worker)
            assert not self.assignments.complete(worker, step)
        if self.rng.random() < 0.5:
            self.workers.remove(worker)
        else:
            # Another one takes its place.
            self.lives[worker] = self.lives.get(worker, 0) + 1
            self.asking.append(worker)

    def return_steps(self, worker: int, take_back: Callable[[int], list[int]]) -> list[int]:
        held = [step for step, holder in self.holders.items() if holder == worker]
        assert take_back(worker) == held
        assert take_back(worker) == []
        for step in held:
            del self.holders[step]
        return held

    def check(self) -> None:
        assert self.assignments.in_work() == self.holders
        assert self.assignments.completed == len(self.done)
        below = 0
        while below in self.done:
            below += 1
        assert self.assignments.completed_below == below

    def is_free(self, step: int) -> bool:
        return step not in self.holders and step not in self.done

    def later(self, worker: int, what: What, step: int, duration: float) -> None:
        self.made += 1
        time = self.now + duration * self.rng.uniform(0.9, 1.1)
        heapq.heappush(self.events, (time, self.made, (worker, self.lives.get(worker, 0)), what, step))

    @property
    def stop(self) -> int:
        """The step after the last one of the present epoch."""
        return self.steps * (self.epoch + 1)


def train(bound: int | None, seed: int) -> Training:
    rng = random.Random(seed)
    made = Training(
        Assignments(bound),
        steps=rng.randint(1, 12),
        epochs=rng.randint(1, 3),
        workers=set(range(1, rng.randint(1, 8) + 1)),
        loss=rng.choice((0.0, 0.02, 0.1)),
        rng=rng,
    )
    made.run()
    return made


@pytest.mark.parametrize("bound", BOUNDS)
def test_every_step_is_completed_once_and_never_staler_than_the_bound(bound: int | None) -> None:
    losses = staleness = most = 0
    for seed in range(150):
        training = train(bound, seed)
        assert sorted(training.done) == list(range(training.steps * training.epochs))
        assert bound is None or training.staleness <= bound
        assert bound is None or training.most_in_work <= bound + 1
        losses += training.losses
        staleness, most = max(staleness, training.staleness), max(most, training.most_in_work)
    assert losses > 50
    # Neither the bound nor the simulation is stricter than it has to be.
    assert staleness == bound if bound is not None else staleness > max(filter(None, BOUNDS))
    assert most == (8 if bound is None else bound + 1)


@pytest.mark.parametrize("bound", BOUNDS)
def test_following_repeats_a_recorded_training(bound: int | None) -> None:
    for seed in range(40):
        training = train(bound, seed)
        again, incomplete, done = Assignments(bound), list[list[int]](), list[int]()
        for what, worker, step in training.recorded:
            if what == "assign":
                again.follow(worker, step)
                assert again.in_work()[step] == worker
                incomplete.append(again.incomplete_below(step))
            else:
                assert again.complete(worker, step)
                done.append(step)
        assert (incomplete, done) == (training.incomplete, training.done)
        assert again.completed == training.assignments.completed
        assert again.completed_below == training.assignments.completed_below


def test_a_bound_of_zero_means_one_step_at_a_time() -> None:
    assignments = Assignments(0)
    for step, worker in enumerate((1, 2, 2, 1)):
        assert assignments.assign(worker) == step
        assert assignments.assign(3) is None
        assert assignments.complete(worker, step)


def test_without_a_bound_no_worker_waits() -> None:
    assignments = Assignments()
    assert [assignments.assign(worker) for worker in range(1, 1000)] == list(range(999))


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_a_slow_step_holds_up_others_once_the_bound_of_them_has_passed_it(bound: int) -> None:
    assignments = Assignments(bound)
    assert assignments.assign(1) == 0
    for step in range(1, bound + 1):
        assert assignments.assign(2) == step
        assert assignments.complete(2, step)
    assert assignments.assign(2) is None
    assert assignments.complete(1, 0)
    assert [assignments.assign(worker) for worker in range(1, bound + 3)] == [
        *range(bound + 1, 2 * bound + 2),
        None,
    ]


def test_the_steps_of_a_lost_worker_are_assigned_first_and_in_order() -> None:
    assignments = Assignments()
    assert [assignments.assign(worker) for worker in (1, 1, 2, 1, 2)] == [0, 1, 2, 3, 4]
    assert assignments.complete(1, 1)
    assert assignments.give_back(1) == [0, 3]
    assert assignments.in_work() == {2: 2, 4: 2}
    assert assignments.incomplete_below(4) == [0, 2, 3]
    assert [assignments.assign(3) for _ in range(3)] == [0, 3, 5]
    assert not assignments.complete(1, 0)
    assert assignments.complete(3, 0)
    assert not assignments.complete(3, 0)
    assert (assignments.completed, assignments.completed_below) == (2, 2)


def test_a_step_that_was_given_back_is_assigned_below_later_steps_only() -> None:
    assignments = Assignments()
    assert [assignments.assign(1) for _ in range(2)] == [0, 1]
    assert assignments.assign(2, below=2) is None
    assert assignments.give_back(1) == [0, 1]
    assert [assignments.assign(2, below=stop) for stop in (0, 1, 1, 2)] == [None, 0, None, 1]


def test_a_step_is_not_assigned_again_where_it_was_lost() -> None:
    assignments = Assignments()
    assert [assignments.assign(worker) for worker in (1, 2)] == [0, 1]
    assert assignments.lose(1) == [0]
    assert [assignments.assign(1, below=2), assignments.assign(1)] == [None, 2]
    assert assignments.lost_with_all((1,)) == 0
    assert assignments.lost_with_all((1, 2)) is None
    assert assignments.lose(2) == [1]
    assert [assignments.assign(worker) for worker in (2, 1)] == [0, 1]
    assert assignments.lose(2) == [0]
    assert assignments.lost_with_all((1, 2)) == 0


def test_the_incomplete_steps_before_one_that_was_never_assigned_are_unknown() -> None:
    assignments = Assignments()
    with pytest.raises(InternalError, match="step 0 was never assigned"):
        assignments.incomplete_below(0)
    assert assignments.assign(1) == 0
    assert assignments.incomplete_below(0) == []
    with pytest.raises(InternalError, match="step 1 was never assigned"):
        assignments.incomplete_below(1)


def test_steps_may_be_followed_in_any_order() -> None:
    """A recorded run may assign a later step first: another worker was lost with the earlier one."""
    assignments = Assignments()
    assignments.follow(2, 3)
    assert assignments.incomplete_below(3) == [0, 1, 2]
    assignments.follow(1, 1)
    assert assignments.incomplete_below(3) == [0, 1, 2]
    assert assignments.in_work() == {3: 2, 1: 1}
    assert assignments.complete(1, 1)
    assert assignments.complete(2, 3)
    assert assignments.incomplete_below(3) == [0, 2]
    assert [assignments.assign(1) for _ in range(3)] == [0, 2, 4]


def test_a_followed_step_goes_to_the_worker_that_has_it_last() -> None:
    assignments = Assignments()
    assignments.follow(1, 0)
    assignments.follow(2, 0)
    assert assignments.in_work() == {0: 2}
    assert not assignments.complete(1, 0)
    assert assignments.complete(2, 0)


def test_functions_that_are_not_scheduled_yet_are_not_assigned() -> None:
    assignments = Assignments(stop=1)
    assert [assignments.assign(1), assignments.assign(2)] == [0, None]
    assignments.stop = 3
    assert [assignments.assign(2), assignments.assign(3), assignments.assign(4)] == [1, 2, None]
    assert assignments.give_back(3) == [2]
    assert assignments.assign(4) == 2


def test_dropped_functions_are_never_assigned_and_count_as_over() -> None:
    assignments = Assignments(stop=6)
    assert [assignments.assign(worker) for worker in (1, 2, 3)] == [0, 1, 2]
    assert assignments.give_back(2) == [1]
    assert assignments.cancel() == [1, 3, 4, 5]
    assert assignments.in_work() == {0: 1, 2: 3}
    assert assignments.assign(2) is None
    assert assignments.complete(1, 0)
    assert (assignments.completed, assignments.completed_below) == (1, 2)
    assert assignments.complete(3, 2)
    assert (assignments.completed, assignments.completed_below) == (2, 6)
    assignments.stop = 7
    assert assignments.assign(1) == 6
    assert assignments.incomplete_below(6) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_set_of_steps_is_a_set(seed: int) -> None:
    random_numbers, steps, known = random.Random(seed), StepSet(), set[tuple[int, int]]()
    for _ in range(200):
        step, part = random_numbers.randrange(40), random_numbers.choice((0, 0, 0, 1))
        steps.add(step, part)
        known.add((step, part))
        for one in ((number, which) for number in range(41) for which in range(2)):
            assert (one in steps) == (one in known)
        assert steps.below == next(number for number in range(41) if (number, 0) not in known)


def test_steps_without_gaps_take_no_memory() -> None:
    steps = StepSet()
    for step in (1, 0, 3, 2, *range(4, 1000)):
        steps.add(step)
    assert (steps.below, steps._others) == (1000, set())
