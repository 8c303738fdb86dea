"""One worker in its job: what it knows of the job, and the commands that move it from view to view.

A `Job` has four parts, each with one owner. Its `Membership` gets the next view from the coordinator. Its
`JobContext` is immutable. Its `EnteredView` is the current view and this worker's end of the exchange; only
the commands of `Job` change it (`exchange`, `between_steps`, `join`, `detached`, `apart`). Its
`WorkerCheckpoints` have the scheduler of checkpoints, and the checkpoint from which training resumes. Queries
have no effects.

A joined worker may compute different results: its script skips calls that the others have computed, and may
reach a different position, for example in a generator that two calls share. In that call, all members detect
which members differ from the chief. If all of these have joined later, they report it to the agent and exit,
and the others repeat the call in the next view. If some of the first workers differ, it is unknown which are
right, and the job ends.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.collectives.contract import Communicator, WaitPolicy
from lockstep.collectives.loopback import LoopbackCommunicator
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import DisagreementError, PeerLostError, ScopeError
from lockstep.observability.bus import Bus
from lockstep.observability.events import (
    CheckEnded,
    DistributionBegan,
    Event,
    FirstStepEnded,
    TimeoutSet,
    TrainingPaused,
)
from lockstep.observability.step_timer import StepTimer
from lockstep.parameter_server.tasks import Tasks
from lockstep.protocol.job_spec import JobSettings
from lockstep.protocol.local_steps import LocalSteps
from lockstep.protocol.worker import Notice
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place
from lockstep.worker.checkpoints import WorkerCheckpoints
from lockstep.worker.peers import Alone, EnteredView, Joiners, Membership

Result = TypeVar("Result")

GRACE_FOR_AGENT = 60.0
"""Seconds for which a wait continues after the agent should have ended it: the agent's error says more."""


_ADVICE_ON_JOINING = (
    "a worker that joins skips finished calls: give each call its own input, equal in every process"
)


@dataclass(frozen=True)
class JobContext:
    """The constant facts that a worker knows about its job.

    Attributes:
        worker: this process's worker id.
        events: the bus on which this worker publishes.
        settings: the settings of the job.
        folder: the folder of the run, where workers share files; None without one.
        host: the name of its host, as the user wrote it; empty if it is unknown.
        over_hosts: whether the job has several hosts. Then some members may enter a view one call later than
            others.
        state_pool: the memory for the state that the workers of the host divide; None if they do not.
    """

    worker: int
    events: Bus
    settings: JobSettings = field(default_factory=JobSettings)
    folder: Path | None = None
    host: str = ""
    over_hosts: bool = False
    state_pool: SharedPool | None = None

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers have the weights."""
        return self.settings.parameter_servers > 0

    @property
    def tasks(self) -> Tasks:
        """The tasks of the processes of a job with parameter servers."""
        assert self.has_servers
        return Tasks(self.settings.replicas, self.settings.parameter_servers)


class Job:
    """One worker in its job: what it knows of the job, and the view that it has entered.

    Only the commands of this class change the view: `exchange` and `between_steps` enter the next view,
    `join` enters a joining worker's first one, and `detached` leaves the view for a block.

    Args:
        context: the constant knowledge about the job.
        entered: the first view, and this worker's end of its exchange.
        membership: gets the next view.
        checkpoints: the checkpoints of this worker.
        policy: how this worker waits for others.
        joins: whether this worker is not yet in a view of the job.

    Attributes:
        task: the type of this process's task in `TF_CONFIG`: "worker", even for a chief, or "evaluator",
            which does not belong to the workers' job.
        process: the worker id whose task this process has: its own, or that of the lost worker that it
            replaces.
        replacement: the worker id under which this process runs scheduled functions, if it replaces a lost
            worker, or repeats such a process in a replay; otherwise -1.
        replacements: the worker ids of the processes that have replaced others; only on the chief.
        peers: the other processes, while this one does not wait for them.
        joiners: how workers join meanwhile; only on the chief.
        left: whether this is a child of the worker, which must not take part in the worker's exchange.
        policy: how this worker waits for others.
        exact_batch: whether replicas also exchange large rows, as set in `JobSettings` or by a strategy.
        local_steps: the local steps of replicas in `fit`, likewise; None if replicas take each step together.
        timer: measures the steps of the main thread.
        exchanges: number of calls of the exchange that are complete.
    """

    def __init__(
        self,
        context: JobContext,
        entered: EnteredView,
        membership: Membership | None = None,
        checkpoints: WorkerCheckpoints | None = None,
        policy: WaitPolicy | None = None,
        *,
        joins: bool = False,
    ) -> None:
        self.membership: Membership = membership or Alone()
        self.peers = self.membership.peers
        self.joiners = Joiners(self.peers, self.membership, self._enter_after)
        self.checkpoints = checkpoints or WorkerCheckpoints()
        self.policy = policy or WaitPolicy(context.settings.limits.timeout + GRACE_FOR_AGENT)
        self.exact_batch = context.settings.exact_batch
        text = context.settings.local_steps
        self.local_steps = LocalSteps.parse(text) if text else None
        self.task = "worker"
        self.left = False
        self.process = context.worker
        self.replacement = -1
        self.replacements: dict[int, int] = {}
        self.timer = StepTimer(context.events, lambda: self.waited)
        self.exchanges = 0
        self._context = context
        self._entered = entered
        self._joins = joins
        self._waited_before = 0.0
        self._drives = False
        self._is_apart = False
        self._pending: View | None = None
        self._next_after: int | None = None
        self._tried_replicas = 0
        self._undone: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self._published: set[Event] = set()
        self._at_end: list[Callable[[], object]] = []
        self._at_exit: list[Callable[[], object]] = []
        self._at_completion: list[Callable[[], object]] = []

    @property
    def context(self) -> JobContext:
        """The constant knowledge about the job."""
        return self._context

    @property
    def settings(self) -> JobSettings:
        """The settings of the job."""
        return self._context.settings

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
        """The current view: the workers, and the replicas that each owns.

        After `join_apart`, it has the workers of the view that this worker enters next.
        """
        return self._entered[0] if self._pending is None or self._is_apart else self._pending

    @property
    def replicas_in_sync(self) -> int:
        """R, as the script gets it."""
        return self._tried_replicas or self.view.replicas

    @contextmanager
    def trying(self, replicas: int) -> Iterator[None]:
        """Show the script this number of replicas within the block, which tries a part of the program."""
        self._tried_replicas = replicas
        try:
            yield
        finally:
            self._tried_replicas = 0

    @property
    def communicator(self) -> Communicator:
        """This worker's end of the view's exchange."""
        return self._entered[1]

    @property
    def waited(self) -> float:
        """Seconds for which this worker has waited for others so far, in all views and between them."""
        return self._waited_before + self.communicator.waited

    @property
    def joins(self) -> bool:
        """Whether this worker is not yet in a view of the job.

        Until it is admitted, it computes all replicas by itself.
        """
        return self._joins

    @property
    def driven(self) -> bool:
        """Whether the program is in a `strategy.steps` loop, which workers can join and leave."""
        return self._drives

    @property
    def evaluates(self) -> bool:
        """Whether this process is an evaluator, which has a job of its own."""
        return self.task == "evaluator"

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes and prints in the current view."""
        view = self._pending or self.view
        return self.worker == view.chief and not self.joins

    @property
    def joined_with(self) -> tuple[int, ...]:
        """The workers of the view that this worker has joined with `join_apart`, but not entered."""
        return () if self._pending is None else self._pending.workers

    def set_timeout(self, timeout: float) -> None:
        """Set the seconds after which a worker that others wait for is stuck; all workers call this."""
        self.policy.timeout = timeout + GRACE_FOR_AGENT
        self.events.publish(TimeoutSet(timeout))

    def note_step(self) -> None:
        """Note that a step has been computed and summed; publish the first one."""
        self._publish_once(FirstStepEnded())

    def note_distribution(self) -> None:
        """Publish, once, that the script has given the replicas a computation or an input."""
        self._publish_once(DistributionBegan())

    def at_end(self, act: Callable[[], object]) -> None:
        """Call `act` when the script has ended, if this worker is the chief at that time."""
        self._at_end.append(act)

    def at_exit(self, act: Callable[[], object]) -> None:
        """Call `act` when the script has ended on this worker, even if it has raised."""
        self._at_exit.append(act)

    def at_completion(self, act: Callable[[], object]) -> None:
        """Call `act` when the script has ended without an error, to complete work that it has begun."""
        self._at_completion.append(act)

    def complete(self) -> None:
        """Call the functions that `at_completion` has registered; before `exit`."""
        for act in self._at_completion:
            act()

    def exit(self) -> None:
        """Call the functions of `at_exit`; before `end`, and before the script's error is reported."""
        for act in self._at_exit:
            act()

    def end_check(self, reason: str) -> NoReturn:
        """End a script if the job checks only the first steps of each call."""
        self.events.publish(CheckEnded(reason))
        raise SystemExit(0)

    def end(self) -> None:
        """Save the last state, on the chief and after the script, and call the functions of `at_end`."""
        if self.is_chief:
            self.checkpoints.finish()
            for act in self._at_end:
                act()

    def as_chief(self, act: Callable[[], object]) -> None:
        """Call `act` on the chief, for example to write a file.

        All workers call this at the same place. If the chief is lost before the next exchange is complete,
        its progress is unknown; the next chief then calls `act`, perhaps again.
        """
        self._act_if(lambda: self.is_chief, act)

    def on_each_host(self, act: Callable[[], object]) -> None:
        """Call `act` on the longest-serving worker of each host, as `as_chief` does on the chief."""
        self._act_if(lambda: self._leads_host() and not self.joins, act)

    def _act_if(self, applies: Callable[[], bool], act: Callable[[], object]) -> None:
        if applies():
            act()
        else:
            self._undone.append((applies, act))

    def exchange(
        self,
        act: Callable[[View, Communicator], Result],
        catching_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Result:
        """Make one call of the exchange; repeat it in each next view until it is complete.

        All workers of a view make the same calls, and a call completes for all of them or for none. So all
        workers of the next view repeat the same call.

        If only joined workers differ from the chief, they end, and the others repeat the call without them: a
        joined worker has skipped computations of the others, so its state may be wrong.

        Args:
            act: makes the call in the view that it receives; it may be called several times. If it makes
                several calls, it must not repeat complete ones: with members on several hosts, others may
                have completed all of them.
            catching_up: surrounds the work of `as_chief` and `on_each_host` that this worker repeats.

        Raises:
            ScopeError: this process is a child of the worker.
            PeerLostError: the view is over, and so is the job.
            DisagreementError: some of the first workers differ; raised on every worker.
        """
        if self.left:
            raise ScopeError(
                "this process, which the script has forked, uses a strategy of its worker: create one in the "
                "process, which trains by itself; processes of the script are not distributed"
            )
        begun: float | None = None
        if not self._is_apart:
            while self._next_after is not None and self._entered[0].number <= self._next_after:
                self._enter_next_view(PeerLostError("the workers change"), expected=True)
            self._next_after = None
        while True:
            waited = self.waited
            try:
                result = act(*self._entered)
            except DisagreementError as differs:
                if not self._have_joined(differs.workers):
                    raise
                if self.worker in differs.workers:
                    self.membership.end_differing(differs, _ADVICE_ON_JOINING)
                if not set(differs.workers).isdisjoint(self.view.workers):
                    self._enter_next(PeerLostError(str(differs)), catching_up)
                # Otherwise the call ended in an earlier view, and the view without these workers has begun.
            except PeerLostError as lost:
                if begun is None:
                    # A silent worker is lost only after a while, and waiting for it does not count as
                    # training.
                    begun = time.monotonic() - (self.waited - waited)
                self._enter_next(lost, catching_up)
            else:
                if begun is not None:
                    self._tell_of_pause(begun)
                self._undone.clear()
                self.exchanges += 1
                return result

    def between_steps(self, take: Callable[[bool], Contents]) -> None:
        """Let workers join and leave, if the coordinator has requested it.

        All workers call this at the same places: at the end of a training step, in the same state, and after
        the same last call of the exchange, which gave all of them the same notice.

        Args:
            take: returns the state; with False, only the position.

        Raises:
            PeerLostError: the job is over.
        """
        notice = Notice(self.communicator.notice)
        if notice is Notice.POSITION and self.is_chief:
            self.membership.hand_over(take(False), whole=False)
            self.membership.prepare(take(True))
        elif notice is Notice.CHANGE:
            self.change_workers(take)

    def change_workers(self, take: Callable[[bool], Contents]) -> None:
        """Give the state to workers that join, and enter the next view; see `between_steps`."""
        begun = time.monotonic()
        lost, expected = PeerLostError("the workers change"), True
        try:
            if self.is_chief:
                self.membership.hand_over(take(True), whole=True)
            else:
                # The chief never arrives: the coordinator ends this view when it has the state.
                self.communicator.barrier(what="the change of workers")
        except PeerLostError as over:
            lost, expected = over, False
        self._enter_next_view(lost, expected=expected)
        self._tell_of_pause(begun)

    def _tell_of_pause(self, begun: float) -> None:
        seconds = time.monotonic() - begun
        self.timer.note_pause(seconds)
        if self.is_chief:
            self.events.publish(TrainingPaused(self.view.number, round(seconds, 6)))

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Let this worker compute all replicas by itself within the block, without the other workers."""
        before = self._entered, self._joins, self._waited_before
        self._waited_before = self.waited
        view = place(self.view.replicas, (self.worker,))
        self._entered, self._joins = (view, by_itself(view)), True
        try:
            yield
        finally:
            self.communicator.close()
            self._entered, self._joins, self._waited_before = before

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let this process be the only worker of a job with one replica within the block.

        All processes of the job are in such a block, and communicate in other ways. With the next exchange,
        they enter the next view if workers have joined.
        """
        before = self._entered, self._waited_before
        view = place(1, (self.worker,), self.view.number)
        self._waited_before, self._entered = self.waited, (view, by_itself(view))
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False
            self.communicator.close()
            self._entered, self._waited_before = before

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Mark the block as a `strategy.steps` loop, which workers can join and leave."""
        self._drives = True
        try:
            yield
        finally:
            self._drives = False

    def join(self) -> Contents:
        """Become a member; return the state after the last step before the view begins.

        Raises:
            PeerLostError: the job is over.
        """
        contents, admitted = self.membership.join()
        self._enter(admitted)
        self._joins = False
        self._undone.clear()
        return contents

    def join_apart(self) -> Contents:
        """Become a member without a view; all enter a view with the next exchange.

        The others are in a block of `apart`, or run functions.

        Returns:
            The state that the chief has given.

        Raises:
            PeerLostError: the job is over.
        """
        contents, workers = self.membership.join_later()
        self._joins = False
        self._undone.clear()
        own_view, _ = self._entered
        self._enter_after(own_view.number)
        self._pending = place(own_view.replicas, workers, own_view.number)
        return contents

    def _enter_after(self, number: int) -> None:
        """With the next exchange, enter a view after the view with this number."""
        self._next_after = number

    def _publish_once(self, event: FirstStepEnded | DistributionBegan) -> None:
        if event not in self._published:
            self._published.add(event)
            self.events.publish(event)

    def _have_joined(self, workers: tuple[int, ...]) -> bool:
        return bool(workers) and min(workers) >= self.settings.workers

    def _enter_next(
        self, lost: PeerLostError, catching_up: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._enter_next_view(lost)
        due = [act for applies, act in self._undone if applies()]
        self._undone = [(applies, act) for applies, act in self._undone if not applies()]
        if due:
            with catching_up():
                for act in due:
                    act()

    def _enter_next_view(self, lost: PeerLostError, *, expected: bool = False) -> None:
        begun = time.monotonic()
        self._enter(self.membership.next_view(lost, expected=expected))
        self._waited_before += time.monotonic() - begun

    def _enter(self, entered: EnteredView) -> None:
        self._waited_before = self.waited
        self.communicator.close()
        self._entered, self._pending = entered, None

    def _leads_host(self) -> bool:
        return any(host[0] == self.worker for host in self.view.hosts)


_current: list[Job] = []


def enter(job: Job) -> None:
    """Make `job` this process's job; called once, before the user's script runs."""
    _current[:] = [job]


def current() -> Job:
    """Return this process's job; if none was entered, one with a single worker and replica."""
    if not _current:
        _current.append(alone())
    return _current[0]


def is_worker() -> bool:
    """Whether this process is a worker of a job that an agent watches."""
    return not isinstance(current().membership, Alone)


def is_chief() -> bool:
    """Whether this process is the chief of its job, the worker that should write files and print.

    Call this function each time, because the chief can change. It returns True in a program that runs without
    a job, and False in an evaluator that has created its first strategy.

    Example:
        >>> import lockstep
        >>> if lockstep.is_chief():
        ...     print("written once")
        written once
    """
    return current().is_chief and not current().evaluates


def by_itself(view: View) -> Communicator:
    """Return the exchange of a view with one worker."""
    return LoopbackCommunicator(ReducePlan.of(view))


def alone() -> Job:
    """Return the job of a process without an agent: one worker, one replica."""
    view = place(replicas=1, workers=(0,))
    return Job(JobContext(0, Bus(SystemClock(), 0)), (view, by_itself(view)))


def become_alone() -> None:
    """Give this process, a child that a script has forked, its own job, because it is not a worker."""
    current().left = True
    settings, view = current().settings, place(1, (0,))
    fresh = JobSettings(seed=settings.seed, threads=settings.threads)
    enter(Job(JobContext(0, Bus(SystemClock(), 0), fresh), (view, by_itself(view))))
