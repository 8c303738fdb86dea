"""Thousands of jobs in virtual time: whatever happens to workers, supervision keeps its promises.

A job is a seed: a failing one is replayed with it. Workers take steps together, wait for each other as the
exchange lets them, and tell the agent what real ones tell it.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from lockstep.control.decisions import (
    Abort,
    DumpStack,
    Event,
    Exited,
    Failed,
    Finish,
    Kill,
    Ready,
    Renew,
    Signal,
    TimePassed,
    Waits,
)
from lockstep.control.state import Limits, Stage, State
from lockstep.control.supervision import decide
from lockstep.topology import View, place

LIMITS = Limits(timeout=20.0)
STEPS = 4
SCHEDULES = 10_000
BLOCK = 1_000


@dataclass
class Worker:
    """One simulated worker: computes, arrives, and is let go on when all of its view have arrived."""

    view: View
    fate: str
    fated_step: int
    step: int = 0
    arrived: bool = False
    alive: bool = True
    hung: bool = False
    waiting_since: float = 0.0


@dataclass
class World:
    """A job: its workers, what is going to happen, and what supervision has decided."""

    seed: int
    dice: random.Random = field(init=False)
    workers: dict[int, Worker] = field(init=False)
    state: State = field(init=False)
    queue: list[tuple[float, int, str, int]] = field(default_factory=list)
    counter: "itertools.count[int]" = field(default_factory=itertools.count)
    now: float = 0.0
    views: list[View] = field(default_factory=list)
    committed: int = 0
    status: int | None = None

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        count = self.dice.randint(1, 5)
        view = place(self.dice.randint(count, 8), tuple(range(count)))
        broken = self.dice.random() < 0.1
        self.workers = {}
        for worker in range(count):
            fates = ["well"] * 4 + ["killed", "killed", "raises", "hangs"]
            fate = "raises" if broken else self.dice.choice(fates)
            fated_step = 2 if broken else self.dice.randrange(STEPS)
            self.workers[worker] = Worker(view, fate, fated_step)
            self.later("begins", worker)
        self.views = [view]
        self.state = State(frozenset(range(count)), LIMITS, view=view)

    def later(self, what: str, worker: int, most: float = 1.0) -> None:
        heapq.heappush(self.queue, (self.now + self.dice.uniform(0, most), next(self.counter), what, worker))

    def run(self) -> None:
        """Play the job to its end."""
        for _ in range(2_000):
            if self.status is not None:
                return
            due = self.state.due
            if due is not None and (not self.queue or due <= self.queue[0][0]):
                self.now = max(self.now, due)
                self.decide(TimePassed())
                continue
            assert self.queue, "a wait without an end"
            self.now, _, what, worker = heapq.heappop(self.queue)
            getattr(self, what)(worker, self.workers[worker])
        raise AssertionError("the job does not end")

    def begins(self, worker: int, one: Worker) -> None:
        if one.alive:
            self.decide(Ready(worker))
            self.later("computed", worker)

    def computed(self, worker: int, one: Worker) -> None:
        if not one.alive or one.hung:
            return
        if one.step == one.fated_step and one.fate != "well":
            self.suffer(worker, one)
            return
        if one.step == STEPS:
            self.ends(worker, 0)
            return
        one.arrived, one.waiting_since = True, self.now
        self.later("reports", worker, 0.5)
        self.meet(one.view)

    def suffer(self, worker: int, one: Worker) -> None:
        if one.fate == "hangs":
            # Far longer than others wait; but when it is alone, nobody does.
            one.hung = True
            self.later("wakes", worker, 200.0)
        elif one.fate == "killed":
            self.ends(worker, -9)
        else:
            self.decide(Failed(worker, 1, "E: no", False))
            self.ends(worker, 1)

    def wakes(self, worker: int, one: Worker) -> None:
        if one.alive:
            one.hung, one.fate = False, "well"
            self.computed(worker, one)

    def ends(self, worker: int, status: int) -> None:
        one = self.workers[worker]
        if one.alive:
            one.alive = one.arrived = False
            self.later("noticed_killed" if status == -9 else f"noticed_{status}", worker, 0.1)

    def noticed_killed(self, worker: int, one: Worker) -> None:
        self.decide(Exited(worker, -9))

    def noticed_0(self, worker: int, one: Worker) -> None:
        self.decide(Exited(worker, 0))

    def noticed_1(self, worker: int, one: Worker) -> None:
        self.decide(Exited(worker, 1))

    def reports(self, worker: int, one: Worker) -> None:
        if one.alive and one.arrived:
            missing = tuple(
                other
                for other in one.view.workers
                if not (self.workers[other].arrived and self.workers[other].step == one.step)
            )
            if missing:
                self.decide(Waits(worker, f"step {one.step}", missing, self.now - one.waiting_since))
            self.later("reports", worker, 2.0)

    def meet(self, view: View) -> None:
        """Let a view's members go on when all have arrived in it: for all of them, or for none."""
        members = [self.workers[worker] for worker in view.workers]
        if all(one.arrived and one.view == view for one in members):
            assert len({one.step for one in members}) == 1, "members of one view are at different steps"
            assert members[0].step >= self.committed, "a committed step is taken again"
            self.committed = members[0].step + 1
            for worker, one in zip(view.workers, members, strict=True):
                one.step, one.arrived = self.committed, False
                self.later("computed", worker)

    def decide(self, event: Event) -> None:
        decision = decide(self.state, event, self.now)
        self.state = decision.state
        assert decision.reason
        for action in decision.actions:
            self.act(action)

    def act(self, action: object) -> None:
        match action:
            case Renew(view, _):
                assert view.number == self.views[-1].number + 1, "two views with one number"
                assert set(view.workers) <= self.state.running, "an excluded worker is heard"
                assert set(view.workers) <= set(self.views[-1].workers)
                self.views.append(view)
                for worker in view.workers:
                    self.workers[worker].view = view
                self.meet(view)
            case Abort():
                for worker, one in self.workers.items():
                    if one.arrived:
                        self.ends(worker, 1)
            case Signal(worker, _) | Kill(worker):
                assert worker in self.state.running
                self.workers[worker].fate = "killed"
                self.ends(worker, -9)
            case DumpStack(worker):
                assert worker in self.state.running
            case Finish(verdict):
                self.status = verdict.status


def check(world: World) -> None:
    """What a job comes to follows from its fates alone."""
    ended_well = [one for one in world.workers.values() if one.fate == "well"]
    assert world.state.stage is Stage.FINISHED
    if ended_well:
        assert world.status == 0
        assert world.committed == STEPS
    else:
        assert world.status != 0 or world.committed == STEPS


@pytest.mark.parametrize("block", range(SCHEDULES // BLOCK))
def test_no_committed_step_is_lost_and_every_wait_ends(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        world = World(seed)
        try:
            world.run()
            check(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_simulation_meets_every_fate_and_many_views() -> None:
    seen, views = set[str](), 0
    for seed in range(300):
        world = World(seed)
        seen |= {one.fate for one in world.workers.values()}
        world.run()
        views = max(views, len(world.views))
    assert seen == {"well", "killed", "raises", "hangs"}
    assert views >= 4
