"""Thousands of jobs in virtual time: supervision keeps its guarantees with any faults of workers.

A failing seed is named; `CheckedJob(seed).run()` replays it.
"""

import re
from collections import Counter
from dataclasses import replace

import pytest
from simulated_job import Job
from simulated_workers import AS_JOINER, AS_MEMBER, FAULTS, STEPS, Worker, state_given

from lockstep.observability.events import JoinRequested, ScriptFailed, StopRequested, WorkerExited
from lockstep.protocol.admin import ScaleRequest
from lockstep.protocol.host import (
    AskMembers,
    DumpStack,
    HostRetires,
    KillWorker,
    PositionMissed,
    SendPosition,
    SendState,
    SignalWorker,
    StartView,
    StartWorker,
    StateArrived,
    WorkerArrived,
)
from lockstep.protocol.worker import FailureReport, Notice
from lockstep.supervisor import actions, events
from lockstep.supervisor.decide import decide
from lockstep.supervisor.state import Phase, Stage, State
from lockstep.topology import View

SCHEDULES = 10_000
BLOCK = 1_000
ACTIVE = (Stage.RUNNING, Stage.LOOKING)
ENDING = (Stage.ENDING, Stage.TERMINATING, Stage.KILLING)


class CheckedJob(Job):
    """A job that checks each decision and each step.

    Attributes:
        target: the number of workers that the user wants.
        budget: the number of workers that may still start.
        asks: the pending requests of joiners.
        raised: workers whose script has raised.
        lost: workers whose loss the terminal has to show.
        stop: the signal that ended the job.
        happened: the number of events that may change the membership.
        early: whether a host was lost before the job became elastic.
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
        self.early = False
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
            self._check_loss(before, event.worker)
        if self._depth == 0:
            self._check_members()
            self._check_others()
        if before.stage is Stage.SAVING and isinstance(event, events.DeadlinePassed):
            hung = [one for one in self.workers.values() if one.failed and one.fault == "hangs"]
            assert hung, "no checkpoint is saved, though no worker hangs"
        if (
            isinstance(event, StopRequested)
            and before.stage is Stage.RUNNING
            and before.elastic
            and before.staying
        ):
            assert not before.keeps or self.state.stage is Stage.SAVING, "no checkpoint is saved"

    def _note(self, event: events.Event) -> None:
        state = self.state
        self.happened += isinstance(
            event,
            WorkerExited
            | FailureReport
            | WorkerArrived
            | ScaleRequest
            | events.HostGone
            | HostRetires
            | events.HostJoined
            | StopRequested,
        )
        match event:
            case events.DeadlinePassed():
                self._instant = (self.now, self._instant[1] + 1 if self._instant[0] == self.now else 1)
                assert self._instant[1] <= 3, "time does not pass"
            case FailureReport(event=ScriptFailed(worker)) if state.active:
                self.raised.add(worker)
            case JoinRequested(worker, whole):
                self.asks[worker] = Notice.CHANGE if whole else Notice.POSITION
            case PositionMissed(worker):
                self.asks[worker] = Notice.POSITION
            case WorkerArrived():
                self.target, self.budget = len(state.present) + len(state.joiners) + 1, self.budget + 1
            case ScaleRequest(workers):
                self.target, self._long_steps = workers, 0
                more = workers - replace(state, size=replace(state.size, closed=False)).filled
                self.budget = state.size.max_restarts + max(0, more)
            case StopRequested(number) if state.shutdown.outcome is None and self.stop is None:
                self.stop = number
            case HostRetires(host) if state.stage in ACTIVE and host not in state.retiring:
                self.budget += sum(record.host == host for record in state.workers.values())
            case events.HostGone(host) if state.stage in ACTIVE:
                gone = [w for w in state.running - state.leaving if state.workers[w].host == host]
                self.early = self.early or not state.elastic
                self.lost += gone
                self.budget += len(gone)
            case WorkerExited(worker, status) if status and worker not in state.leaving:
                if state.stage in ACTIVE:
                    self.lost.append(worker)

    def _check_loss(self, before: State, worker: int) -> None:
        """A lost worker that was needed is replaced, or the job wants one worker less."""
        was_needed = before.filled <= before.size.wanted and not before.retires(worker)
        if was_needed and self.state.stage in ACTIVE and not self.state.finished and before.size.wanted > 1:
            assert self.state.size != before.size, "a loss is not counted"

    def _check_members(self) -> None:
        state = self.state
        if state.stage is not Stage.RUNNING or not state.elastic:
            return
        assert state.present, "the job continues without members"
        lost = any(state.workers[worker].phase is Phase.LOST for worker in state.members)
        settles = state.shutdown.deadline is not None or state.running.intersection(state.failures)
        assert not lost or settles or state.admission.source, "a lost worker remains a member"
        if state.finished:
            return
        if state.admission.source:
            self._waits_since = self.now if self._waits_since is None else self._waits_since
            assert self.now <= self._waits_since + state.limits.timeout, "all members wait too long"
        else:
            self._waits_since = None
            assert state.admission.deadline is None
            assert self.posted is state.admission.posted, "an unnecessary notice is posted"

    def _check_others(self) -> None:
        state = self.state
        for worker in state.leaving:
            one = self.workers[worker]
            assert one.dismissed or not one.alive, "a worker that leaves has not received its instruction"
        if state.stage is not Stage.RUNNING or not state.elastic or state.finished:
            return
        will_be = sum(not state.retires(worker) for worker in state.staying) + len(state.joiners)
        assert not state.joiners or will_be <= state.size.wanted, "more joiners than the job wants"
        waits = state.admission.backoff_until is not None or (
            state.failures and state.shutdown.deadline is not None
        )
        full = state.roomiest_host() is None
        assert waits or full or state.filled >= state.size.wanted, "workers are missing, and none starts"

    def act(self, action: actions.Action) -> None:
        state = self.state
        if self._was in ENDING:
            assert not isinstance(
                action,
                StartView | StartWorker | AskMembers | SendPosition | SendState,
            ), f"{action} at the end"
            assert not isinstance(action, actions.ShowMessage) or "did not exit" in action.text, action
        match action:
            case StartView(notice=notice):
                assert notice is state.admission.posted, "a view begins without its notice"
                self._check_view(state.view)
            case SendPosition(worker):
                assert self.asks.pop(worker) is Notice.POSITION, "a position without a request"
                assert self.holds is not None, "a position without a report of the chief"
                assert worker in state.joiners
            case SendState(host):
                assert self.holds == (True, self.committed), "no state to send"
                assert host not in self.holders, "a state is sent to a host that has it"
            case StartWorker(worker):
                self.budget -= 1
                self.happened += 1
                assert worker not in self.workers, "two workers with one id"
                assert self.budget >= 0, "more replacements than allowed"
                assert not state.finished
            case KillWorker(worker) if state.stage in ACTIVE:
                one = self.workers[worker]
                assert worker in state.running
                unneeded = worker in state.leaving or state.workers[worker].phase is Phase.JOIN_FAILED
                assert one.failed or (one.view is None and unneeded), "killed without need"
            case SignalWorker(worker, _) | KillWorker(worker) | DumpStack(worker):
                assert worker in state.running
            case actions.FinishJob():
                self._check_end()
        super().act(action)

    def _check_view(self, view: View) -> None:
        state, before = self.state, self.views[-1]
        assert view.number == before.number + 1, "a view number is not the next one"
        assert view.number <= 2 * self.happened + 2, "too many views"
        assert view.replicas == before.replicas
        assert set(view.workers) <= state.present, "a member that is not present"
        assert not self.raised.intersection(view.workers), "a member whose script has raised"
        new = [worker for worker in view.workers if worker not in before.workers]
        if new:
            assert self.holds == (True, self.committed), "a worker joins without the state"
            hosts = {state.workers[worker].host for worker in new}
            assert hosts - self.cut <= self.holders, "a worker joins before the state has reached its host"
            assert len(view.workers) <= state.size.wanted, "too many workers join"
            assert all(self.asks.pop(worker) is Notice.CHANGE for worker in new), (
                "a worker joins without a request"
            )
        for worker in set(view.workers) - set(new):
            assert self.workers[worker].step == self.committed, "a member without the committed state"
            assert not self.workers[worker].dismissed, "a member that has to leave"
        if state.leaving.intersection(before.workers):
            left = state.leaving.intersection(before.workers)
            retired = all(map(state.retires, left))
            assert retired or len(view.workers) >= self.target, "a needed worker leaves"
            assert len(view.workers) >= state.size.min_workers, "too many workers leave"
        self._short_steps = self._long_steps = 0

    def commit(self, view: View, members: list[Worker]) -> None:
        assert view is self.views[-1]
        assert {one.step for one in members} == {self.committed}, "members of one view are at different steps"
        size = self.state.size
        self._short_steps += len(view.workers) < size.min_workers
        assert self._short_steps <= 1, "too few workers continue to train"
        self._long_steps += len(view.workers) > size.wanted
        assert self._long_steps <= 2, "too many workers continue to train"
        super().commit(view, members)

    def _check_end(self) -> None:
        state = self.state
        assert state.stage is Stage.FINISHED
        assert state.due is None
        for event in (
            events.DeadlinePassed(),
            WorkerExited(0, 1),
            JoinRequested(0, True),
            state_given(len(self.views), True),
            StateArrived(0, len(self.views)),
            PositionMissed(0, len(self.views), "lost"),
            StopRequested(15),
        ):
            assert decide(state, event, self.now).actions == (), "a decision after the end"

    def check_result(self) -> None:
        """The outcome of a job follows from the faults of its workers and the user's requests."""
        assert self.outcome is not None
        status, message = self.outcome.status, self.outcome.message
        well = [one for one in self.workers.values() if one.view and not one.failed and not one.dismissed]
        well = [one for one in well if self.state.workers[one.number].host not in self.cut]
        if self.stop is not None:
            assert status == 128 + self.stop
        elif "too few workers" in message:
            self.seen["too few"] += 1
            assert status == 1
            assert self.state.size.min_workers > 1
        else:
            assert not well or status == 0 or self.early, f"the job ends with {status}: {message}"
            assert status != 0 or self.committed == STEPS
            assert status == 0 or message
        if status == 0:
            self._check_told()

    def _check_told(self) -> None:
        notes = "\n".join(self.notices)
        for worker in self.lost:
            named = rf"\bworkers? ([\d, ]|and )*\b{worker}\b"
            assert re.search(named, notes), f"no note names the lost worker {worker}"
        if self.state.size.wanted < self.target and not self.state.admission.unreported and not self.mute:
            what = "start it again" if self.state.size.by_hand else r" replaced \("
            assert re.search(what, notes), f"no note says: {what}"


def check_job(seed: int) -> CheckedJob:
    """Run a job to its end, and check its outcome."""
    job = CheckedJob(seed)
    try:
        job.run()
        job.check_result()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return job


@pytest.mark.ci(1, 2)
@pytest.mark.slow(*range(3, SCHEDULES // BLOCK))
@pytest.mark.parametrize("block", range(SCHEDULES // BLOCK))
def test_with_any_faults_no_step_is_lost_and_every_wait_ends(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        check_job(seed)


def test_the_simulation_covers_every_fault_at_every_moment() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1600):
        job = Job(seed)
        job.run()
        seen += job.seen
    faults = {f"killed {moment}" for moment in (*AS_MEMBER, *AS_JOINER)}
    faults |= {
        f"{fault} {moment}" for fault in FAULTS for moment in ("computing", "state reported", *AS_JOINER)
    }
    others = {
        "started by hand",
        "scaled",
        "stopped",
        "saved a checkpoint",
        "joined",
        "left",
        "reported too late",
        "state arrived",
        "state missed",
        "state is slow",
        "position missed",
        "raises while stuck",
        "not started",
        "lost with its host",
        "a host came back",
        "a host retires",
    }
    assert not (faults | others) - seen.keys()
    assert seen["joined"] > 200
