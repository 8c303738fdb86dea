"""A job in virtual time: its agent, its faults, and the user's requests. A seed determines all of them."""

from dataclasses import replace

from simulated_workers import AS_JOINER, AS_MEMBER, FAULTS, STEPS, Worker, Workers

from lockstep.observability.events import StopRequested, WorkerExited
from lockstep.protocol.worker import Notice
from lockstep.supervisor.actions import (
    AbortExchange,
    Action,
    AskMembers,
    DumpStack,
    FinishJob,
    JobOutcome,
    KillWorker,
    SendPosition,
    ShowMessage,
    SignalWorker,
    StartView,
    StartWorker,
)
from lockstep.supervisor.decide import decide, refusal
from lockstep.supervisor.events import DeadlinePassed, Event, ScaleRequested, StateGiven, WorkerArrived
from lockstep.supervisor.state import JobSize, Stage, State, TimeLimits
from lockstep.topology import View, place

LIMITS = TimeLimits(timeout=20.0, look=1.5, young=3.0, pause=0.5)


class Job(Workers):
    """A job: its workers, their faults, and the decisions of supervision.

    Attributes:
        state: the state of supervision.
        views: all views so far.
        holds: the last report of the current chief: whether it is the whole state, and of which step.
        notices: the notes on the terminal.
        outcome: of the job; None until it has ended.
        slots: the largest number of workers that are started by hand.
        waiting: the number of workers started by hand that have not been admitted yet.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        count = self.dice.randint(1, 5)
        view = place(self.dice.randint(count, 8), tuple(range(count)))
        size = JobSize.of(count, self.dice.randint(1, count), self.dice.choice((0, 0, 1, 2, 5)))
        if self.dice.random() < 0.2:
            size = JobSize(count, by_hand=True)
        keeps = self.dice.random() < 0.5
        self.state = replace(State.of(view, LIMITS, size, keeps=keeps), distributes=True)
        self.views = [view]
        self.holds: tuple[bool, int] | None = None
        self.notices: list[str] = []
        self.outcome: JobOutcome | None = None
        self.slots, self.waiting = count, 0
        self.pace = self.dice.choice((0.1, 0.5, 2.0))
        self.mute = self.dice.random() < 0.03
        self._draw_faults(view)
        self._draw_requests(view)

    def _draw_faults(self, view: View) -> None:
        broken = self.dice.random() < 0.1
        for number in view.workers:
            one = self._drawn(number, view, 0.5)
            if broken:
                one.fault, one.moment, one.fault_step = "raises", "computing", 2
            self.then(one, 1.0, self.begin)

    def _drawn(self, number: int, view: View | None, harm: float) -> Worker:
        fault = self.dice.choice(FAULTS) if self.dice.random() < harm else "well"
        moment = "computing" if self.dice.random() < 0.2 else self.dice.choice(AS_MEMBER)
        if view is None and self.dice.random() < 0.5:
            moment = self.dice.choice(AS_JOINER)
            if moment in ("starting", "after the position") and self.dice.random() < 0.1:
                fault = "ends"
        one = Worker(number, view, fault, moment, self.dice.randrange(STEPS))
        self.workers[number] = one
        return one

    def _draw_requests(self, view: View) -> None:
        if self.dice.random() < 0.4:
            for _ in range(self.dice.randint(1, 3)):
                self.after(8.0, lambda: self._scale(self.dice.randint(1, view.replicas)))
        if self.dice.random() < 0.1:
            for _ in range(self.dice.choice((1, 1, 1, 2))):
                self.after(8.0, lambda: self._stop(self.dice.choice((15, 15, 2))))

    def _scale(self, workers: int) -> None:
        if not refusal(self.state, workers):
            self.seen["scaled"] += 1
            self.decide(ScaleRequested(workers))

    def _stop(self, number: int) -> None:
        self.seen["stopped"] += 1
        self.decide(StopRequested(number))

    def _start_by_hand(self) -> None:
        """Start another worker by hand in place of one that has ended."""
        if sum(one.alive for one in self.workers.values()) + self.waiting < self.slots:
            self.seen["started by hand"] += 1
            self.waiting += 1
            self.decide(WorkerArrived())

    def run(self) -> None:
        """Play the job to its end."""
        for _ in range(2_000):
            if self.outcome is not None:
                return
            due = self.state.due
            if not self.happen(due):
                assert due is not None, "the job waits forever"
                self.now = max(self.now, due)
                self.decide(DeadlinePassed())
        raise AssertionError("the job does not end")

    def receive(self, event: Event, step: int) -> None:
        if isinstance(event, StateGiven):
            if event.view != self.views[-1].number:
                self.seen["reported too late"] += 1
            elif not event.failure:
                self.holds = event.whole, step
        self.decide(event)
        if isinstance(event, WorkerExited) and self.state.size.by_hand and self.dice.random() < 0.7:
            self.after(8.0, self._start_by_hand)

    def decide(self, event: Event) -> None:
        """Let supervision decide on an event, and perform its actions."""
        if self.outcome is not None:
            return
        decision = decide(self.state, event, self.now)
        self.state = decision.state
        assert decision.reason
        for action in decision.actions:
            self.act(action)

    def act(self, action: Action) -> None:
        """Perform an action."""
        match action:
            case StartView(view, _):
                self._renew(view)
            case AskMembers(notice):
                self.posted = notice
            case SendPosition(worker):
                self.notify(worker, "position")
            case StartWorker(worker):
                self._start(worker)
            case AbortExchange():
                for worker, one in self.workers.items():
                    if one.alive:
                        self.notify(worker, "over")
            case SignalWorker(worker, number):
                self._signal(self.workers[worker], number)
            case KillWorker(worker):
                self.end(self.workers[worker], -9)
            case DumpStack(worker):
                self.interrupt(self.workers[worker])
            case ShowMessage(text):
                self.notices.append(text)
            case FinishJob(outcome):
                self.outcome = outcome

    def _renew(self, view: View) -> None:
        before = self.views[-1]
        self.views.append(view)
        for worker in view.workers:
            if worker not in before.workers and self.holds is not None:
                self.workers[worker].step = self.holds[1]
                self.seen["joined"] += 1
            self.notify(worker, view)
        for worker in self.state.leaving.intersection(before.workers):
            self.workers[worker].dismissed = True
            self.seen["left"] += 1
            self.notify(worker, "leave")
        self.posted, self.holds = Notice.NOTHING, None

    def _start(self, worker: int) -> None:
        one = self._drawn(worker, None, 0.5)
        self.seen["started"] += 1
        self.waiting -= self.state.size.by_hand
        assert self.waiting >= 0, "a worker is admitted that was not started by hand"
        if self.dice.random() < 0.02:
            self.seen["not started"] += 1
            one.alive = False
            self.decide(WorkerExited(worker, 1))
        else:
            self.then(one, self.pace, self.join)

    def _signal(self, one: Worker, number: int) -> None:
        if self.state.stage is Stage.SAVING:
            one.saves = True
        elif not one.hung or self.dice.random() < 0.5:
            self.end(one, -number)
