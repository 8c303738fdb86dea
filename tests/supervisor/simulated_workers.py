"""Workers in virtual time, which follow the protocol until a fault.

They take steps together, wait for each other in the exchange, join and leave, and send the agent the messages
of real workers. Messages take time; the agent receives a worker's messages before it sees the worker's end.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.observability.events import (
    JoinRequested,
    ScriptFailed,
    StrategyInstalled,
    WaitReported,
    WorkerExited,
)
from lockstep.protocol.worker import FailureReport, Notice, StateGiven, StateSource
from lockstep.supervisor.events import Event
from lockstep.topology import View

STEPS = 8
FAULTS = ("killed", "killed", "raises", "hangs")
AS_MEMBER = (
    "computing",
    "after the step",
    "reporting the position",
    "position reported",
    "reporting the state",
    "state reported",
    "waiting for the change",
    "next view received",
)
AS_JOINER = ("starting", "asking for the position", "after the position", "asking to join")

Act = Callable[["Worker"], None]


def failure(
    worker: int, status: int, summary: str, blames: bool, prints: bool = True, recurs: bool = False
) -> FailureReport:
    """Return the report of a worker whose script has raised."""
    return FailureReport(ScriptFailed(worker, summary, ""), status, blames, prints, recurs)


def state_given(view: int, whole: bool, failure: str = "", host: int = 0) -> StateGiven:
    """Return the report that the chief has given the state, or the position."""
    return StateGiven(view, whole, failure, source=None if failure else StateSource(view, 1, 1000, host))


@dataclass
class Worker:
    """One simulated worker.

    Attributes:
        number: its id.
        view: the view that it is a member of; None until it has joined.
        fault: its fault, at `moment`; of a member not before `fault_step`.
        step: the number of steps in its state.
        phase: its current activity.
        turn: counts its activities; a scheduled act of an earlier turn does not happen.
        resume: the act with which it continues after a hang.
        waits: since when it waits for the agent; None if it does not wait.
        inbox: messages of the agent that it has not read.
        outbox: its messages that the agent has not received, each with its step.
        notice: the notice that the chief read when it arrived in the last call.
        saves: whether it saves and exits at the end of its step.
        failed: whether its fault has occurred.
        dismissed: whether it has to leave.
    """

    number: int
    view: View | None
    fault: str
    moment: str
    fault_step: int
    step: int = 0
    phase: str = "starting"
    turn: int = 0
    resume: Act | None = None
    waits: float | None = None
    inbox: list[View | str] = field(default_factory=list)
    outbox: list[tuple[Event, int]] = field(default_factory=list)
    notice: Notice = Notice.NOTHING
    alive: bool = True
    hung: bool = False
    saves: bool = False
    failed: bool = False
    dismissed: bool = False


class Workers:
    """The workers of one job, and its time; subclasses override `receive` and `commit`.

    Attributes:
        workers: all started workers.
        pace: of joiners.
        mute: whether the chief cannot report any state.
        posted: the notice that the chief of the view reads when it arrives.
        committed: the number of completed steps.
        seen: counts occurrences.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.pace = 1.0
        self.mute = False
        self.posted = Notice.NOTHING
        self.committed = 0
        self.seen: Counter[str] = Counter()
        self._arrived: dict[int, set[int]] = {}
        self._passed_on = Notice.NOTHING
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0

    def receive(self, event: Event, step: int) -> None:
        """Receive a message of a worker at a step, or its end."""

    def commit(self, view: View, members: list[Worker]) -> None:
        """Record that all members of a view take a step."""
        self.committed += 1

    def after(self, most: float, happen: Callable[[], None]) -> None:
        """Schedule an act within `most` seconds."""
        self._pushed += 1
        heapq.heappush(self._queue, (self.now + self.dice.uniform(0, most), self._pushed, happen))

    def happen(self, due: float | None) -> bool:
        """Run the next scheduled act if it precedes `due`; return whether there was one."""
        if not self._queue or (due is not None and due <= self._queue[0][0]):
            return False
        self.now, _, happen = heapq.heappop(self._queue)
        happen()
        return True

    def then(self, one: Worker, most: float, act: Act) -> None:
        """Schedule the next act of a worker, within `most` seconds."""
        one.turn, one.waits = one.turn + 1, None
        self._later(one, most, act)

    def _later(self, one: Worker, most: float, act: Act) -> None:
        turn = one.turn

        def happen() -> None:
            if one.alive and not one.hung and one.turn == turn:
                act(one)

        self.after(most, happen)

    def cause_fault(self, one: Worker, moment: str, resume: Act) -> bool:
        """Cause a worker's fault if it is due at this moment; a worker that hangs resumes much later."""
        not_due = one.failed or one.fault == "well" or moment != one.moment
        if not_due or (one.view is not None and one.step < one.fault_step):
            return False
        one.failed = True
        self.seen[f"{one.fault} {moment}"] += 1
        if one.fault == "killed":
            self.end(one, -9)
        elif one.fault == "ends":
            self.end(one, 0)
        elif one.fault == "raises":
            self._raise(one, "E: no", blames=False)
        else:
            one.hung, one.resume = True, resume
            # The longer time exceeds the timeout of the others.
            self.after(self.dice.choice((5.0, 200.0)), lambda: self._wake(one))
        return True

    def _wake(self, one: Worker) -> None:
        if one.alive and one.resume is not None:
            one.hung = False
            self.then(one, 0.0, one.resume)

    def interrupt(self, one: Worker) -> None:
        """Let a worker that hangs raise with some probability while it writes its stack."""
        if one.hung and self.dice.random() < 0.3:
            self.seen["raises while stuck"] += 1
            one.hung = False
            self._raise(one, "E: interrupted", blames=False)

    def _raise(self, one: Worker, summary: str, *, blames: bool) -> None:
        one.turn, one.waits = one.turn + 1, None
        self.send(one, failure(one.number, 1, summary, blames))
        self.after(self.dice.choice((0.3, 0.3, 3.0)), lambda: self.end(one, 1))

    def end(self, one: Worker, status: int) -> None:
        """End a worker's process; the agent sees it a little later."""
        if not one.alive:
            return
        one.alive = False
        if one.view is not None and self.dice.random() < 0.5:
            # Otherwise the others may complete the call with its arrival.
            self._arrived.get(one.view.number, set()).discard(one.number)

        def see() -> None:
            for other in self.workers.values():
                self._deliver(other)
            self.receive(WorkerExited(one.number, status), one.step)

        self.after(0.1, see)

    def vanish(self, one: Worker) -> None:
        """End a worker's process and its connections, without a message to the agent."""
        one.alive = False
        one.outbox.clear()
        if one.view is not None and self.dice.random() < 0.5:
            self._arrived.get(one.view.number, set()).discard(one.number)

    def send(self, one: Worker, event: Event) -> None:
        """Send the agent a message, which it receives a little later."""
        one.outbox.append((event, one.step))
        self.after(0.05, lambda: self._deliver(one))

    def _deliver(self, one: Worker) -> None:
        while one.outbox:
            self.receive(*one.outbox.pop(0))

    def notify(self, worker: int, message: View | str) -> None:
        """Send a worker a view that begins, the "position", to "leave", or that the job is "over"."""
        one = self.workers[worker]
        one.inbox.append(message)
        if one.waits is not None:
            self._later(one, 0.05, self._read)

    def _read(self, one: Worker) -> None:
        """Follow the last message of the agent."""
        if self.cause_fault(one, "next view received", self._read):
            return
        message = one.inbox[-1]
        one.inbox.clear()
        if message == "over":
            self._raise(one, "PeerLostError: over", blames=True)
        elif message == "leave":
            self.end(one, 0)
        elif message == "position":
            self.then(one, self.pace, self._ask_to_join)
        elif isinstance(message, View):
            one.view = message
            if one.phase in ("computing", "arrived"):
                one.phase = "computing"
                self.then(one, 0.3, self._arrive)
            else:
                self._continue(one)

    def begin(self, one: Worker) -> None:
        """Run the script as one of the first workers."""
        self.send(one, StrategyInstalled("jax"))
        self._continue(one)

    def _continue(self, one: Worker) -> None:
        one.phase = "computing"
        if one.saves:
            self.seen["saved a checkpoint"] += 1
            self.end(one, 143)
        else:
            self.then(one, 1.0, self._arrive if one.step < STEPS else lambda one: self.end(one, 0))

    def _arrive(self, one: Worker) -> None:
        if self.cause_fault(one, "computing", self._arrive):
            return
        assert one.view is not None
        if one.inbox:
            self._read(one)
            return
        one.phase = "arrived"
        if one.number == one.view.chief:
            self._passed_on = self.posted
        arrived = self._arrived.setdefault(one.view.number, set())
        arrived.add(one.number)
        self._wait(one)
        if len(arrived) == len(one.view.workers):
            arrived.clear()
            self._take_step(one.view)

    def _take_step(self, view: View) -> None:
        """Complete a step, in which all members of a view have arrived."""
        members = [self.workers[worker] for worker in view.workers]
        self.commit(view, members)
        for one in members:
            one.step, one.phase, one.notice = self.committed, "between", self._passed_on
            self.then(one, 0.2, self._end_step)

    def _end_step(self, one: Worker) -> None:
        if self.cause_fault(one, "after the step", self._end_step):
            return
        assert one.view is not None
        is_chief = one.number == one.view.chief
        if one.notice is Notice.POSITION and is_chief:
            self._report_position(one)
        elif one.notice is Notice.CHANGE:
            one.phase = "changing"
            if is_chief:
                self.then(one, 0.5, self._report_state)
            elif not self.cause_fault(one, "waiting for the change", self._wait):
                self._wait(one)
        else:
            self._continue(one)

    def _report_position(self, one: Worker) -> None:
        if self.cause_fault(one, "reporting the position", self._report_position):
            return
        self._send_state(one, whole=False)
        if not self.cause_fault(one, "position reported", self._continue):
            self._continue(one)

    def _report_state(self, one: Worker) -> None:
        if self.cause_fault(one, "reporting the state", self._report_state):
            return
        self._send_state(one, whole=True)
        if not self.cause_fault(one, "state reported", self._wait):
            self._wait(one)

    def _send_state(self, one: Worker, *, whole: bool) -> None:
        assert one.view is not None
        self.send(one, state_given(one.view.number, whole, "no memory" if self.mute else ""))

    def join(self, one: Worker) -> None:
        """Run the script as a worker that joins."""
        if self.cause_fault(one, "starting", self.join):
            return
        self.send(one, StrategyInstalled("jax"))
        self.send(one, JoinRequested(one.number, whole=False))
        if not self.cause_fault(one, "asking for the position", self._wait):
            self._wait(one)

    def _ask_to_join(self, one: Worker) -> None:
        if self.cause_fault(one, "after the position", self._ask_to_join):
            return
        self.send(one, JoinRequested(one.number, whole=True))
        if not self.cause_fault(one, "asking to join", self._wait):
            self._wait(one)

    def _wait(self, one: Worker) -> None:
        """Wait for the agent, or until all members have arrived; report the wait to the agent."""
        one.turn, one.waits = one.turn + 1, self.now
        if one.inbox:
            self._later(one, 0.05, self._read)
        elif one.view is not None:
            self._later(one, 4.0, self._report_wait)

    def _report_wait(self, one: Worker) -> None:
        assert one.view is not None
        assert one.waits is not None
        others: tuple[int, ...] = (one.view.chief,)
        what = "the change of workers"
        if one.phase == "arrived":
            arrived, what = self._arrived[one.view.number], f"step {one.step}"
            others = tuple(worker for worker in one.view.workers if worker not in arrived)
        if one.number not in others:
            self.send(one, WaitReported(one.number, what, others, self.now - one.waits))
        self._later(one, 4.0, self._report_wait)
