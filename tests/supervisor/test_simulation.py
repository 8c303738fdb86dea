"""Thousands of jobs in virtual time: whatever happens to workers, supervision keeps its promises.

A failing seed is named; `Watched(seed).run()` replays it.
"""

import re
from collections import Counter

import pytest
from simulated_job import Job
from simulated_workers import AS_JOINER, AS_MEMBER, FATES, STEPS, Worker

from lockstep.observability.events import JoinRequested, StopRequested, WorkerExited
from lockstep.protocol.worker import Notice
from lockstep.supervisor import actions, events
from lockstep.supervisor.decide import decide
from lockstep.supervisor.state import Phase, Stage, State
from lockstep.topology import View

SCHEDULES = 10_000
BLOCK = 1_000
GOING_ON = (Stage.RUNNING, Stage.LOOKING)
ENDING = (Stage.ENDING, Stage.TERMINATING, Stage.KILLING)


class Watched(Job):
    """A job of which every decision and every step is checked.

    Attributes:
        target: how many workers a person wants.
        budget: how many workers may still be started.
        asks: what the workers that join have asked for, and not got.
        raised: workers whose script has raised.
        lost: workers whose loss the person has to be told of.
        stop: the signal that ended the job.
        happened: how many things happened that may change who takes part.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.target = len(self.workers)
        self.budget = self.state.size.restarts_left
        self.asks: dict[int, Notice] = {}
        self.raised: set[int] = set()
        self.lost: list[int] = []
        self.stop: int | None = None
        self.happened = 0
        self._was = self.state.stage
        self._depth = 0
        self._instant = (0.0, 0)
        self._short_steps = self._long_steps = 0
        self._waits_since: float | None = None

    def decide(self, event: events.Event) -> None:
        before, self._was = self.state, self.state.stage
        self._note(event)
        self._depth += 1
        super().decide(event)
        self._depth -= 1
        if isinstance(event, WorkerExited) and event.worker in self.lost and event.worker in before.running:
            self._check_loss(before)
        if self._depth == 0:
            self._check_members()
            self._check_others()
        if before.stage is Stage.SAVING and isinstance(event, events.DeadlinePassed):
            hung = [one for one in self.workers.values() if one.struck and one.fate == "hangs"]
            assert hung, "a checkpoint is not kept, though nobody hangs"
        if event == StopRequested(15) and before.stage is Stage.RUNNING and before.elastic and before.staying:
            assert not before.keeps or self.state.stage is Stage.SAVING, "a checkpoint is not kept"

    def _note(self, event: events.Event) -> None:
        state = self.state
        self.happened += isinstance(
            event,
            WorkerExited
            | events.FailureReported
            | events.WorkerArrived
            | events.ScaleRequested
            | StopRequested,
        )
        match event:
            case events.DeadlinePassed():
                self._instant = (self.now, self._instant[1] + 1 if self._instant[0] == self.now else 1)
                assert self._instant[1] <= 3, "time does not pass"
            case events.FailureReported(worker) if state.active:
                self.raised.add(worker)
            case JoinRequested(worker, whole):
                self.asks[worker] = Notice.CHANGE if whole else Notice.POSITION
            case events.WorkerArrived():
                self.target, self.budget = len(state.present) + len(state.joiners) + 1, self.budget + 1
            case events.ScaleRequested(workers):
                self.target, self._long_steps = workers, 0
                more = workers - len(state.present) - len(state.joiners)
                self.budget = state.size.max_restarts + max(0, more)
            case StopRequested(number) if state.shutdown.outcome is None and self.stop is None:
                self.stop = number
            case WorkerExited(worker, status) if status and worker not in state.leaving:
                if state.stage in GOING_ON:
                    self.lost.append(worker)

    def _check_loss(self, before: State) -> None:
        """A worker is lost: another replaces it, or there is one less from now on, if it was needed."""
        was_needed = len(before.present) + len(before.joiners) <= before.size.wanted
        if was_needed and self.state.stage in GOING_ON and not self.state.finished and before.size.wanted > 1:
            assert self.state.size != before.size, "a loss is not counted"

    def _check_members(self) -> None:
        state = self.state
        if state.stage is not Stage.RUNNING or not state.elastic:
            return
        assert state.present, "nobody is left, and the job goes on"
        lost = any(state.workers[worker].phase is Phase.LOST for worker in state.members)
        settles = state.shutdown.deadline is not None or state.running.intersection(state.failures)
        assert not lost or settles or state.admission.given, "a lost worker is not left behind"
        if state.finished:
            return
        if state.admission.given:
            self._waits_since = self.now if self._waits_since is None else self._waits_since
            assert self.now <= self._waits_since + state.limits.timeout, "all wait for too long"
        else:
            self._waits_since = None
            assert state.admission.deadline is None
            assert self.posted is state.admission.posted, "members are asked for something that nobody wants"

    def _check_others(self) -> None:
        state = self.state
        for worker in state.leaving:
            one = self.workers[worker]
            assert one.dismissed or not one.alive, "nobody says that it leaves"
        if state.stage is not Stage.RUNNING or not state.elastic or state.finished:
            return
        will_be = len(state.staying) + len(state.joiners)
        assert not state.joiners or will_be <= state.size.wanted, "workers join that will not be let in"
        waits = state.admission.backoff_until is not None or (
            state.failures and state.shutdown.deadline is not None
        )
        there = len(state.present) + len(state.joiners)
        assert waits or there >= state.size.wanted, "workers are missing, and nobody is started"

    def act(self, action: actions.Action) -> None:
        state = self.state
        if self._was in ENDING:
            assert not isinstance(
                action,
                actions.StartView
                | actions.StartWorker
                | actions.AskMembers
                | actions.SendPosition
                | actions.ShowMessage,
            ), f"{action} at the end"
        match action:
            case actions.StartView(view, _):
                self._check_view(view)
            case actions.SendPosition(worker):
                assert self.asks.pop(worker) is Notice.POSITION, "told where, and had not asked"
                assert self.holds is not None, "told where, and nothing was given"
                assert worker in state.joiners
            case actions.StartWorker(worker):
                self.budget -= 1
                self.happened += 1
                assert worker not in self.workers, "two workers with one id"
                assert self.budget >= 0, "more replacements than allowed"
                assert not state.finished
            case actions.KillWorker(worker) if state.stage in GOING_ON:
                one = self.workers[worker]
                assert worker in state.running
                assert one.struck or (one.view is None and worker in state.leaving), "killed without need"
            case actions.SignalWorker(worker, _) | actions.KillWorker(worker) | actions.DumpStack(worker):
                assert worker in state.running
            case actions.FinishJob():
                self._check_end()
        super().act(action)

    def _check_view(self, view: View) -> None:
        state, before = self.state, self.views[-1]
        assert view.number == before.number + 1, "two views with one number"
        assert view.number <= 2 * self.happened + 2, "views without end"
        assert view.replicas == before.replicas
        assert set(view.workers) <= state.present, "an excluded worker is heard"
        assert not self.raised.intersection(view.workers), "a worker is heard whose script has raised"
        new = [worker for worker in view.workers if worker not in before.workers]
        if new:
            assert self.holds == (True, self.committed), "let in without the state"
            assert len(view.workers) <= state.size.wanted, "too many are let in"
            assert all(self.asks.pop(worker) is Notice.CHANGE for worker in new), "let in unasked"
        for worker in set(view.workers) - set(new):
            assert self.workers[worker].step == self.committed, "a member without the committed state"
            assert not self.workers[worker].dismissed, "a dismissed worker is heard"
        if state.leaving.intersection(before.workers):
            assert len(view.workers) >= self.target, "a worker leaves that is wanted"
        self._short_steps = self._long_steps = 0

    def commit(self, view: View, members: list[Worker]) -> None:
        assert view is self.views[-1]
        assert {one.step for one in members} == {self.committed}, "members of one view are at different steps"
        size = self.state.size
        self._short_steps += len(view.workers) < size.min_workers
        assert self._short_steps <= 1, "too few workers train on"
        self._long_steps += len(view.workers) > size.wanted
        assert self._long_steps <= 2, "too many workers train on"
        super().commit(view, members)

    def _check_end(self) -> None:
        state = self.state
        assert state.stage is Stage.FINISHED
        assert state.due is None
        for event in (
            events.DeadlinePassed(),
            WorkerExited(0, 1),
            JoinRequested(0, True),
            events.StateGiven(len(self.views), True),
            StopRequested(15),
        ):
            assert decide(state, event, self.now).actions == (), "a decision after the end"

    def check_result(self) -> None:
        """What a job comes to follows from what struck its workers, and from what a person wanted."""
        assert self.outcome is not None
        status, message = self.outcome.status, self.outcome.message
        well = [one for one in self.workers.values() if one.view and not one.struck and not one.dismissed]
        if self.stop is not None:
            assert status == 128 + self.stop
        elif "too few workers" in message:
            self.seen["too few"] += 1
            assert status == 1
            assert self.state.size.min_workers > 1
        else:
            assert not well or status == 0, f"the job ends with {status}: {message}"
            assert status != 0 or self.committed == STEPS
            assert status == 0 or message
        if status == 0:
            self._check_told()

    def _check_told(self) -> None:
        told = "\n".join(self.notices)
        for worker in self.lost:
            named = rf"\bworkers? ([\d, ]|and )*\b{worker}\b"
            assert re.search(named, told), f"nobody is told that worker {worker} is lost"
        if self.state.size.wanted < self.target and not self.state.admission.unreported and not self.mute:
            what = "start it again" if self.state.size.by_hand else " replaced ("
            assert what in told, f"nobody is told: {what}"


def watched(seed: int) -> Watched:
    """Play a job to its end, and check what it comes to."""
    job = Watched(seed)
    try:
        job.run()
        job.check_result()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return job


@pytest.mark.parametrize("block", range(SCHEDULES // BLOCK))
def test_whatever_happens_no_step_is_lost_and_every_wait_ends(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        watched(seed)


def test_the_simulation_meets_every_fate_at_every_moment() -> None:
    seen: Counter[str] = Counter()
    for seed in range(800):
        job = Job(seed)
        job.run()
        seen += job.seen
    fates = {f"killed {moment}" for moment in (*AS_MEMBER, *AS_JOINER)}
    fates |= {f"{fate} {moment}" for fate in FATES for moment in ("computing", "state given", *AS_JOINER)}
    others = {
        "came",
        "scaled",
        "stopped",
        "kept a checkpoint",
        "joined",
        "left",
        "given too late",
        "raises while stuck",
        "not started",
    }
    assert not (fates | others) - seen.keys()
    assert seen["joined"] > 200
