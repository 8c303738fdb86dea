"""One worker in its job: what it knows of the job, and the commands that take it from view to view."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.collectives.contract import Communicator, WaitPolicy
from lockstep.collectives.loopback import Hub
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import DisagreementError, InternalError, PeerLostError
from lockstep.observability.bus import Bus
from lockstep.observability.events import DistributionBegan, Event, FirstStepEnded, TimeoutSet
from lockstep.protocol.worker import Notice
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place
from lockstep.worker.checkpoints import WorkerCheckpoints

Result = TypeVar("Result")

GRACE_FOR_AGENT = 60.0
"""Seconds that a wait goes on after the agent should have ended it, for the agent can show more."""


Place = tuple[View, Communicator]
"""A view, and this worker's end of its exchange."""


class Membership(Protocol):
    """A worker's way from view to view, as the agent decides."""

    def next_place(self, lost: PeerLostError) -> Place:
        """Wait for the view that follows one that is over, and enter it.

        Raises:
            PeerLostError: none follows; `lost`, or with a reason of its own.
        """

    def leave(self, differs: DisagreementError) -> NoReturn:
        """End this worker, which computes something else than the others; nothing of its script goes on.

        Raises:
            DisagreementError: there is no way to do that.
        """

    def hand_over(self, contents: Contents, *, whole: bool) -> None:
        """Give the state of the training, or only the position, to those who join."""

    def prepare(self, contents: Contents) -> None:
        """Make ready for handing over contents like these."""

    def position(self) -> Contents:
        """Wait until the members say where the training is; for a worker that joins.

        Raises:
            PeerLostError: the job is over.
        """

    def join(self) -> tuple[Contents, Place]:
        """Wait for the state and for the view that this worker is let into; for one that joins.

        Raises:
            PeerLostError: the job is over.
        """


class Alone:
    """The `Membership` of a process without an agent."""

    def next_place(self, lost: PeerLostError) -> Place:
        """Raise `lost`: no view follows."""
        raise lost

    def leave(self, differs: DisagreementError) -> NoReturn:
        """Raise `differs`: nobody else goes on."""
        raise differs

    def hand_over(self, contents: Contents, *, whole: bool) -> None:
        """Nobody joins."""

    def prepare(self, contents: Contents) -> None:
        """Nobody joins."""

    def position(self) -> Contents:
        """Nobody is there."""
        raise InternalError("a process on its own has no job to join")

    def join(self) -> tuple[Contents, Place]:
        """Nobody is there."""
        raise InternalError("a process on its own has no job to join")


@dataclass(frozen=True)
class JobContext:
    """What a worker knows of its job, as long as it takes part.

    Attributes:
        worker: this process's worker id.
        seed: everything random in the job follows from it.
        threads: number of threads that compute one replica.
        events: the bus on which this worker publishes.
        folder: the run's own, where workers may leave notes for each other; None without one.
        policy: how this worker waits for others.
        began_with: how many workers the job began with; None where no worker can join.
        task: the type of this process's task in `TF_CONFIG`: "worker" also for a chief, or "evaluator", which
            takes no part in the job of the workers.
    """

    worker: int
    seed: int
    threads: int
    events: Bus
    folder: Path | None = None
    policy: WaitPolicy = field(default_factory=WaitPolicy)
    began_with: int | None = None
    task: str = "worker"


class Job:
    """One worker in its job: what it knows of the job, and its place in the present view.

    Only the commands of this class change the place: `exchange` and `between_steps` enter the next view,
    `join` enters a worker's first one, and `aside` leaves it for a block.

    Args:
        context: what does not change.
        place: the first view, and this worker's end of its exchange.
        membership: the way to the next view.
        checkpoints: those of this worker.
        joins: whether this worker is in no view of the job yet.
    """

    def __init__(
        self,
        context: JobContext,
        place: Place,
        membership: Membership | None = None,
        checkpoints: WorkerCheckpoints | None = None,
        *,
        joins: bool = False,
    ) -> None:
        self.membership: Membership = membership or Alone()
        self.checkpoints = checkpoints or WorkerCheckpoints()
        self._context = context
        self._place = place
        self._joins = joins
        self._drives = False
        self._undone: list[Callable[[], object]] = []
        self._published: set[Event] = set()
        self._at_end: list[Callable[[], object]] = []

    @property
    def context(self) -> JobContext:
        """What does not change while this worker takes part."""
        return self._context

    @property
    def worker(self) -> int:
        """This process's worker id."""
        return self._context.worker

    @property
    def events(self) -> Bus:
        """The bus on which this worker publishes."""
        return self._context.events

    @property
    def view(self) -> View:
        """Who owns which replica, now."""
        return self._place[0]

    @property
    def communicator(self) -> Communicator:
        """This worker's end of the view's exchange."""
        return self._place[1]

    @property
    def joins(self) -> bool:
        """Whether this worker is in no view of the job yet.

        It computes alone what the others have computed, until it is admitted.
        """
        return self._joins

    @property
    def driven(self) -> bool:
        """Whether the program is in a loop of its own that workers may join and leave."""
        return self._drives

    @property
    def evaluates(self) -> bool:
        """Whether this process only evaluates what others train; in its own job, it is alone."""
        return self._context.task == "evaluator"

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that writes and prints, in the present view."""
        return self.worker == self.view.chief and not self.joins

    def take_task(self, task: str) -> None:
        """Take the task of this type from now on, as `TF_CONFIG` says."""
        self._context = replace(self._context, task=task)

    def be_patient(self, timeout: float) -> None:
        """From now on a worker that others wait for is stuck after `timeout` seconds; all workers say so."""
        self._context.policy.timeout = timeout + GRACE_FOR_AGENT
        self.events.publish(TimeoutSet(timeout))

    def stepped(self) -> None:
        """Note that a step has been computed and summed; the first is reported."""
        self._publish_once(FirstStepEnded())

    def distributes(self) -> None:
        """Report, once, that the script has given the replicas something to compute, or to read."""
        self._publish_once(DistributionBegan())

    def at_end(self, act: Callable[[], object]) -> None:
        """Have `act` done when the script has come to its end, if this worker is the chief then."""
        self._at_end.append(act)

    def end(self) -> None:
        """Do what the chief does when the script has come to its end: keep its last state, and report."""
        if self.is_chief:
            self.checkpoints.finish()
            for act in self._at_end:
                act()

    def as_chief(self, act: Callable[[], object]) -> None:
        """Have `act` done by the chief: writing a file, for example.

        All workers call this at the same place. If the chief is lost before it has taken part in the next
        exchange, nobody knows how far it came: then the next chief does it, perhaps again.
        """
        if self.is_chief:
            act()
        else:
            self._undone.append(act)

    def exchange(
        self,
        act: Callable[[View, Communicator], Result],
        catching_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Result:
        """Make one call of the exchange: again in each view that follows before the call is done.

        All workers of a view make the same calls, and a call is done for all of them or for none. So
        whoever is in the next view makes the same call there.

        A call in which only workers that have joined differ from the chief is made again without them: they
        came by passing over what the others have computed, and end here.

        Args:
            act: makes the call for the view it is given, and nothing that must not be done twice.
            catching_up: surrounds what this worker does when it has become the chief and the one before it
                may have left things undone.

        Raises:
            PeerLostError: the view is over, and the job with it.
            DisagreementError: workers that were there from the beginning differ; on every worker.
        """
        while True:
            try:
                result = act(*self._place)
            except DisagreementError as differs:
                if not self._have_joined(differs.workers):
                    raise
                if self.worker in differs.workers:
                    self.membership.leave(differs)
                self._go_on(PeerLostError(str(differs)), catching_up)
            except PeerLostError as lost:
                self._go_on(lost, catching_up)
            else:
                self._undone.clear()
                return result

    def between_steps(self, take: Callable[[bool], Contents]) -> None:
        """Let workers in and out, if the agent has asked for it.

        All workers call this at the same places, at the end of a step of training, in the same state, and
        come from the same last call of the exchange, with which the agent's notice reached all of them.

        Args:
            take: returns the state of the training; with False, only where it is.

        Raises:
            PeerLostError: the job is over.
        """
        notice = Notice(self.communicator.notice)
        if notice is Notice.POSITION and self.is_chief:
            self.membership.hand_over(take(False), whole=False)
            self.membership.prepare(take(True))
        elif notice is Notice.CHANGE:
            lost = PeerLostError("the workers change")
            try:
                if self.is_chief:
                    self.membership.hand_over(take(True), whole=True)
                else:
                    # The chief does not come: the agent ends this view when it has the state.
                    self.communicator.barrier(what="the change of workers")
            except PeerLostError as over:
                lost = over
            self._enter(self.membership.next_place(lost))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within the block this worker computes all replicas alone, without the others' knowledge."""
        before = self._place, self._joins
        view = place(self.view.replicas, (self.worker,))
        self._place, self._joins = (view, by_itself(view)), True
        try:
            yield
        finally:
            self.communicator.close()
            self._place, self._joins = before

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Within the block the program is in a loop of its own that workers may join and leave."""
        self._drives = True
        try:
            yield
        finally:
            self._drives = False

    def join(self) -> Contents:
        """Become a member; return the state at the end of the step after which the view begins.

        Raises:
            PeerLostError: the job is over.
        """
        contents, place = self.membership.join()
        self._enter(place)
        self._joins = False
        self._undone.clear()
        return contents

    def _publish_once(self, event: FirstStepEnded | DistributionBegan) -> None:
        if event not in self._published:
            self._published.add(event)
            self.events.publish(event)

    def _have_joined(self, workers: tuple[int, ...]) -> bool:
        began_with = self._context.began_with
        return began_with is not None and bool(workers) and min(workers) >= began_with

    def _go_on(self, lost: PeerLostError, catching_up: Callable[[], AbstractContextManager[None]]) -> None:
        self._enter(self.membership.next_place(lost))
        if self.is_chief and self._undone:
            with catching_up():
                self._catch_up()

    def _enter(self, place: Place) -> None:
        self.communicator.close()
        self._place = place

    def _catch_up(self) -> None:
        undone, self._undone = self._undone, []
        for act in undone:
            act()


_current: list[Job] = []


def enter(job: Job) -> None:
    """Make `job` this process's job; called once, before the user's script runs."""
    _current[:] = [job]


def current() -> Job:
    """Return this process's job; one of a single worker and replica where nothing was entered."""
    if not _current:
        _current.append(alone())
    return _current[0]


def is_worker() -> bool:
    """Whether this process is a worker of a job that an agent watches, not a program by itself."""
    return not isinstance(current().membership, Alone)


def is_chief() -> bool:
    """Whether this process is the chief of its job: the one worker that should write files and print.

    Call it each time: the chief can change. It is always true in a program that runs on its own, and false
    in an evaluator once it has created its first strategy.
    """
    return current().is_chief and not current().evaluates


def by_itself(view: View) -> Communicator:
    """Return the exchange of a view of one worker."""
    return Hub(ReducePlan.of(view)).member(0)


def alone() -> Job:
    """Return the job of a process without an agent: one worker, one replica."""
    view = place(replicas=1, workers=(0,))
    return Job(JobContext(worker=0, seed=0, threads=0, events=Bus(SystemClock(), 0)), (view, by_itself(view)))


def leave() -> None:
    """Make this process, a child that a script has forked, a program by itself: it is no worker."""
    context, view = current().context, place(1, (0,))
    enter(Job(JobContext(0, context.seed, context.threads, Bus(SystemClock(), 0)), (view, by_itself(view))))
