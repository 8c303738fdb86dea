"""A job in virtual time: its agent, its faults, and the user's requests. A seed determines all of them."""

from dataclasses import replace
from itertools import pairwise

import msgspec
from simulated_workers import AS_JOINER, AS_MEMBER, FAULTS, STEPS, Worker, Workers, state_given

from lockstep.observability.events import StopRequested, WorkerExited
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
from lockstep.protocol.worker import AbortExchange, Notice, StateGiven
from lockstep.supervisor.actions import (
    Action,
    FinishJob,
    JobOutcome,
    ShowMessage,
)
from lockstep.supervisor.decide import decide, refusal
from lockstep.supervisor.events import (
    DeadlinePassed,
    Event,
    HostGone,
    HostJoined,
)
from lockstep.supervisor.state import JobSize, Stage, State, TimeLimits
from lockstep.topology import View, place_on_hosts

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
        holders: the hosts that have the state of that report.
        waiting: the number of workers started by hand that have not been admitted yet.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        count = self.dice.randint(1, 5)
        view = place_on_hosts(self.dice.randint(count, 8), self._drawn_hosts(count), 1)
        size = JobSize.of(count, self.dice.randint(1, count), self.dice.choice((0, 0, 1, 2, 5)))
        if self.dice.random() < 0.2:
            size = JobSize(count, by_hand=True)
        keeps = self.dice.random() < 0.5
        cores = tuple(self.dice.randint(1, 4) for _ in view.hosts)
        self.state = replace(State.of(view, LIMITS, size, keeps=keeps, cores=cores), distributes=True)
        self.cut: set[int] = set()
        self.views = [view]
        self.holds: tuple[bool, int] | None = None
        self.holders: set[int] = set()
        self.notices: list[str] = []
        self.outcome: JobOutcome | None = None
        self.slots, self.waiting = count, 0
        self.pace = self.dice.choice((0.1, 0.5, 2.0))
        self.mute = self.dice.random() < 0.03
        self._draw_faults(view)
        self._draw_requests(view)

    def _drawn_hosts(self, count: int) -> tuple[tuple[int, ...], ...]:
        cuts = sorted(self.dice.sample(range(1, count), self.dice.randint(0, min(2, count - 1))))
        bounds = (0, *cuts, count)
        return tuple(tuple(range(*pair)) for pair in pairwise(bounds))

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

        if len(view.hosts) > 1 and self.dice.random() < 0.4:
            for _ in range(self.dice.randint(1, 2)):
                self.after(8.0, self._lose_host)
        if len(view.hosts) > 1 and self.dice.random() < 0.4:
            for _ in range(self.dice.randint(1, 2)):
                self.after(8.0, self._retire_host)

    def _retire_host(self) -> None:
        """Announce the loss of a host, which may come early, late or never."""
        host = self.dice.randrange(len(self.state.slots))
        self.seen["a host retires"] += 1
        self.decide(HostRetires(host, f"host {host} retires"))
        if self.dice.random() < 0.5:
            self.after(self.dice.choice((2.0, 20.0)), lambda: self._lose_host(host))
        if self.dice.random() < 0.6:
            self.after(12.0, lambda: self._return_host(self.state.slots[host]))

    def _lose_host(self, host: int | None = None) -> None:
        """End all processes of a host at once; supervision learns of it by its silence, or at once."""
        there = sorted(set(range(len(self.state.slots))) - self.state.lost_hosts - self.cut)
        if not there or (host is not None and host not in there):
            return
        host = self.dice.choice(there) if host is None else host
        self.cut.add(host)
        for worker, record in self.state.workers.items():
            one = self.workers.get(worker)
            if record.host == host and one is not None and one.alive:
                self.seen["lost with its host"] += 1
                self.vanish(one)
        self.after(self.dice.choice((0.1, 5.0)), lambda: self.decide(HostGone(host, "was lost")))
        if self.dice.random() < 0.6:
            self.after(12.0, lambda: self._return_host(self.state.slots[host]))

    def _return_host(self, workers: int) -> None:
        self.seen["a host came back"] += 1
        self.decide(HostJoined("again", workers, self.dice.randint(1, 4)))

    def _scale(self, workers: int) -> None:
        if not refusal(self.state, workers):
            self.seen["scaled"] += 1
            self.decide(ScaleRequest(workers))

    def _stop(self, number: int) -> None:
        self.seen["stopped"] += 1
        self.decide(StopRequested(number))

    def _start_by_hand(self) -> None:
        """Start another worker by hand in place of one that has ended."""
        if sum(one.alive for one in self.workers.values()) + self.waiting < self.slots:
            self.seen["started by hand"] += 1
            if hosts := sorted(set(self.state.hosts) - self.cut):
                self.waiting += 1
                self.decide(WorkerArrived(self.dice.choice(hosts)))

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
        lost = (
            isinstance(event, WorkerExited) and self.state.workers[event.worker].host in self.state.lost_hosts
        )
        if lost:
            # The connection to the agent of its host is closed.
            return
        if isinstance(event, StateGiven):
            if event.view != self.views[-1].number:
                self.seen["reported too late"] += 1
            host = self.state.workers[self.views[-1].chief].host
            event = state_given(event.view, event.whole, event.failure, host)
            if event.view == self.views[-1].number and not event.failure:
                self.holds, self.holders = (event.whole, step), {host}
        self.decide(event)
        if isinstance(event, WorkerExited) and self.state.size.by_hand and self.dice.random() < 0.7:
            self.after(8.0, self._start_by_hand)

    def decide(self, event: Event) -> None:
        """Let supervision decide on an event, and perform its actions."""
        if self.outcome is not None:
            return
        decision = decide(self.state, event, self.now)
        self.state = decision.state
        if self.dice.random() < 0.02:
            # Another coordinator takes over with the record that agents have kept.
            self.seen["another coordinator"] += 1
            self.state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=State)
        assert decision.reason
        for action in decision.actions:
            self.act(action)

    def act(self, action: Action) -> None:
        """Perform an action."""
        match action:
            case StartView(notice=notice):
                self._renew(self.state.view, notice)
            case AskMembers(notice):
                self.posted = notice
            case SendPosition(worker):
                self._send_position(worker)
            case SendState(host):
                self._send_state_to(host)
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

    def _send_position(self, worker: int) -> None:
        if self.state.workers[worker].host in self.holders or self.dice.random() < 0.8:
            self.notify(worker, "position")
            return
        view = self.views[-1].number
        self.seen["position missed"] += 1
        self.after(2.0, lambda: self.decide(PositionMissed(worker, view, "no connection")))

    def _send_state_to(self, host: int) -> None:
        view, failure = self.views[-1].number, "no connection" if self.dice.random() < 0.1 else ""
        if self.dice.random() < 0.05:
            self.seen["state is slow"] += 1
            return

        def arrive() -> None:
            self.seen["state missed" if failure else "state arrived"] += 1
            if view == self.views[-1].number and not failure:
                self.holders.add(host)
            self.decide(StateArrived(host, view, failure))

        self.after(self.dice.choice((1.0, 8.0)), arrive)

    def _renew(self, view: View, notice: Notice) -> None:
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
        self.posted, self.holds, self.holders = notice, None, set()

    def _start(self, worker: int) -> None:
        one = self._drawn(worker, None, 0.5)
        if self.state.workers[worker].host in self.cut:
            # Nothing starts there, and supervision does not know it yet.
            one.alive = False
            return
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
