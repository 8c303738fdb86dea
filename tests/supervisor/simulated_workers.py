"""Workers in virtual time, which obey the protocol until something strikes them.

They take steps together, wait for each other as the exchange lets them, join and leave, and tell the agent
what real ones tell it. Messages take their time; what a worker sent is heard before its end is seen.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.observability.events import JoinRequested, StrategyInstalled, WaitReported, WorkerExited
from lockstep.protocol.worker import Notice
from lockstep.supervisor.events import Event, FailureReported, StateGiven
from lockstep.topology import View

STEPS = 8
FATES = ("killed", "killed", "raises", "hangs")
AS_MEMBER = (
    "computing",
    "after the step",
    "giving the position",
    "position given",
    "reporting the state",
    "state given",
    "waiting for the change",
    "told of the next view",
)
AS_JOINER = ("starting", "asking for the position", "after the position", "asking to join")

Act = Callable[["Worker"], None]


@dataclass
class Worker:
    """One simulated worker.

    Attributes:
        number: its id.
        view: whose exchange it takes part in; None until it has joined.
        fate: what strikes it, at `moment`, as a member not before `fated_step`.
        step: how many steps its state has had.
        phase: what it is at.
        turn: counts what it has begun to do; what belongs to an earlier turn does not happen any more.
        resume: what it does when it wakes up.
        waits: since when it waits for what the agent says; None if it does not.
        inbox: what the agent said, and it has not read.
        outbox: what it said, and the agent has not heard, with the step at which it was.
        notice: what the chief had found when it arrived in the last call.
        saves: whether it ends at the end of its step.
        struck: whether its fate has struck.
        dismissed: whether it was told to leave.
    """

    number: int
    view: View | None
    fate: str
    moment: str
    fated_step: int
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
    struck: bool = False
    dismissed: bool = False


class Workers:
    """The workers of one job, and its time; `hear` and `commit` are overridden in subclasses.

    Attributes:
        workers: all that were started.
        pace: of those that join.
        mute: whether the chief can give nothing.
        posted: the notice that the chief of the view finds when it arrives.
        committed: how many steps have been taken.
        seen: how often things happened.
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

    def hear(self, event: Event, step: int) -> None:
        """Take what a worker at a step says, or that it has ended."""

    def commit(self, view: View, members: list[Worker]) -> None:
        """Note that all members of a view take a step."""
        self.committed += 1

    def after(self, most: float, happen: Callable[[], None]) -> None:
        """Let something happen after a while."""
        self._pushed += 1
        heapq.heappush(self._queue, (self.now + self.dice.uniform(0, most), self._pushed, happen))

    def happen(self, due: float | None) -> bool:
        """Let the next thing happen, if it comes before `due`."""
        if not self._queue or (due is not None and due <= self._queue[0][0]):
            return False
        self.now, _, happen = heapq.heappop(self._queue)
        happen()
        return True

    def then(self, one: Worker, most: float, act: Act) -> None:
        """Let a worker do something next, after a while."""
        one.turn, one.waits = one.turn + 1, None
        self._later(one, most, act)

    def _later(self, one: Worker, most: float, act: Act) -> None:
        turn = one.turn

        def happen() -> None:
            if one.alive and not one.hung and one.turn == turn:
                act(one)

        self.after(most, happen)

    def strikes(self, one: Worker, moment: str, resume: Act) -> bool:
        """Let a worker's fate strike, if this is the moment; who hangs resumes much later."""
        spared = one.struck or one.fate == "well" or moment != one.moment
        if spared or (one.view is not None and one.step < one.fated_step):
            return False
        one.struck = True
        self.seen[f"{one.fate} {moment}"] += 1
        if one.fate == "killed":
            self.end(one, -9)
        elif one.fate == "ends":
            self.end(one, 0)
        elif one.fate == "raises":
            self._raise(one, "E: no", blames=False)
        else:
            one.hung, one.resume = True, resume
            # Perhaps far longer than others wait, unless it is the only worker.
            self.after(self.dice.choice((5.0, 200.0)), lambda: self._wake(one))
        return True

    def _wake(self, one: Worker) -> None:
        if one.alive and one.resume is not None:
            one.hung = False
            self.then(one, 0.0, one.resume)

    def interrupt(self, one: Worker) -> None:
        """Perhaps let a worker that hangs raise, while it writes its stack."""
        if one.hung and self.dice.random() < 0.3:
            self.seen["raises while stuck"] += 1
            one.hung = False
            self._raise(one, "E: interrupted", blames=False)

    def _raise(self, one: Worker, summary: str, *, blames: bool) -> None:
        one.turn, one.waits = one.turn + 1, None
        self.send(one, FailureReported(one.number, 1, summary, blames))
        self.after(self.dice.choice((0.3, 0.3, 3.0)), lambda: self.end(one, 1))

    def end(self, one: Worker, status: int) -> None:
        """End a worker's process; the agent sees it a little later."""
        if not one.alive:
            return
        one.alive = False
        if one.view is not None and self.dice.random() < 0.5:
            # Else the others may end the call with it.
            self._arrived.get(one.view.number, set()).discard(one.number)

        def see() -> None:
            for other in self.workers.values():
                self._hear(other)
            self.hear(WorkerExited(one.number, status), one.step)

        self.after(0.1, see)

    def send(self, one: Worker, event: Event) -> None:
        """Tell the agent something; it hears it a little later."""
        one.outbox.append((event, one.step))
        self.after(0.05, lambda: self._hear(one))

    def _hear(self, one: Worker) -> None:
        while one.outbox:
            self.hear(*one.outbox.pop(0))

    def tell(self, worker: int, message: View | str) -> None:
        """Tell a worker that a view begins, the "position", to "leave", or that the job is "over"."""
        one = self.workers[worker]
        one.inbox.append(message)
        if one.waits is not None:
            self._later(one, 0.05, self._read)

    def _read(self, one: Worker) -> None:
        """Do what the agent has said last."""
        if self.strikes(one, "told of the next view", self._read):
            return
        message = one.inbox[-1]
        one.inbox.clear()
        if message == "over":
            self._raise(one, "PeerLostError: over", blames=True)
        elif message == "leave":
            self.end(one, 0)
        elif message == "position":
            self.then(one, self.pace, self._ask_to_be_let_in)
        elif isinstance(message, View):
            one.view = message
            if one.phase in ("computing", "arrived"):
                one.phase = "computing"
                self.then(one, 0.3, self._arrive)
            else:
                self._go_on(one)

    def begin(self, one: Worker) -> None:
        """Run the script as one of the first workers."""
        self.send(one, StrategyInstalled("jax"))
        self._go_on(one)

    def _go_on(self, one: Worker) -> None:
        one.phase = "computing"
        if one.saves:
            self.seen["kept a checkpoint"] += 1
            self.end(one, 143)
        else:
            self.then(one, 1.0, self._arrive if one.step < STEPS else lambda one: self.end(one, 0))

    def _arrive(self, one: Worker) -> None:
        if self.strikes(one, "computing", self._arrive):
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
        """Let a view's members continue: all have arrived."""
        members = [self.workers[worker] for worker in view.workers]
        self.commit(view, members)
        for one in members:
            one.step, one.phase, one.notice = self.committed, "between", self._passed_on
            self.then(one, 0.2, self._end_step)

    def _end_step(self, one: Worker) -> None:
        if self.strikes(one, "after the step", self._end_step):
            return
        assert one.view is not None
        is_chief = one.number == one.view.chief
        if one.notice is Notice.POSITION and is_chief:
            self._give_position(one)
        elif one.notice is Notice.CHANGE:
            one.phase = "changing"
            if is_chief:
                self.then(one, 0.5, self._give_state)
            elif not self.strikes(one, "waiting for the change", self._wait):
                self._wait(one)
        else:
            self._go_on(one)

    def _give_position(self, one: Worker) -> None:
        if self.strikes(one, "giving the position", self._give_position):
            return
        self._give(one, whole=False)
        if not self.strikes(one, "position given", self._go_on):
            self._go_on(one)

    def _give_state(self, one: Worker) -> None:
        if self.strikes(one, "reporting the state", self._give_state):
            return
        self._give(one, whole=True)
        if not self.strikes(one, "state given", self._wait):
            self._wait(one)

    def _give(self, one: Worker, *, whole: bool) -> None:
        assert one.view is not None
        self.send(one, StateGiven(one.view.number, whole, "no memory" if self.mute else ""))

    def join(self, one: Worker) -> None:
        """Run the script as a worker that joins."""
        if self.strikes(one, "starting", self.join):
            return
        self.send(one, StrategyInstalled("jax"))
        self.send(one, JoinRequested(one.number, whole=False))
        if not self.strikes(one, "asking for the position", self._wait):
            self._wait(one)

    def _ask_to_be_let_in(self, one: Worker) -> None:
        if self.strikes(one, "after the position", self._ask_to_be_let_in):
            return
        self.send(one, JoinRequested(one.number, whole=True))
        if not self.strikes(one, "asking to join", self._wait):
            self._wait(one)

    def _wait(self, one: Worker) -> None:
        """Wait for what the agent says, or until all have arrived; tell the agent for whom."""
        one.turn, one.waits = one.turn + 1, self.now
        if one.inbox:
            self._later(one, 0.05, self._read)
        elif one.view is not None:
            self._later(one, 4.0, self._report)

    def _report(self, one: Worker) -> None:
        assert one.view is not None
        assert one.waits is not None
        others: tuple[int, ...] = (one.view.chief,)
        what = "the change of workers"
        if one.phase == "arrived":
            arrived, what = self._arrived[one.view.number], f"step {one.step}"
            others = tuple(worker for worker in one.view.workers if worker not in arrived)
        if one.number not in others:
            self.send(one, WaitReported(one.number, what, others, self.now - one.waits))
        self._later(one, 4.0, self._report)
