"""What supervision remembers of a job. A job is RUNNING until something decides its end, its `JobOutcome`."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from lockstep.protocol.job_spec import GRACE
from lockstep.protocol.request import Request
from lockstep.supervisor.events import Action, JobOutcome
from lockstep.topology import View


class Stage(Enum):
    """How far the end of the job has come."""

    RUNNING = auto()
    LOOKING = auto()
    SAVING = auto()
    ENDING = auto()
    TERMINATING = auto()
    KILLING = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that supervision gives.

    Attributes:
        timeout: to a worker that others wait for, and to workers that have to come before training goes on.
        blame: to the cause of an error that blames another worker, to show itself.
        look: to a stuck worker, to write its stack.
        abort: to workers that hear of the abort, until SIGTERM.
        leave: to workers whose scripts have all raised, to end their processes, until SIGTERM.
        term: to workers that got SIGTERM or the person's own signal, until SIGKILL.
        kill: to workers that got SIGKILL, until the job ends without them.
        save: to the chief, to end its step and write a checkpoint before the job is stopped (`--grace`).
        notice: between two notices that one worker waits for another.
        idle: to a script that has made a strategy, to distribute something, until a person is told.
        young: since its start, in which the loss of a worker makes the next replacement wait.
        pause: before a replacement of a young worker is started; doubled with each in a row.
        longest_pause: the most of that.
    """

    timeout: float = 600.0
    blame: float = 1.0
    look: float = 0.5
    abort: float = 3.0
    leave: float = 15.0
    term: float = 3.0
    kill: float = 1.0
    save: float = GRACE
    notice: float = 10.0
    idle: float = 45.0
    young: float = 60.0
    pause: float = 1.0
    longest_pause: float = 60.0


@dataclass(frozen=True)
class JobSize:
    """How many workers the job should have.

    Attributes:
        wanted: so many; 0 for as many as there are.
        least: with fewer, training waits.
        restarts: how many lost workers will still be replaced.
        most_restarts: how many from the beginning, or from the last time that a person asked for a number.
        closed: whether nobody is replaced because nobody can join.
        by_hand: whether nobody is replaced because a person starts the workers.
    """

    wanted: int = 0
    least: int = 1
    restarts: int = 0
    most_restarts: int = 0
    closed: bool = False
    by_hand: bool = False

    @classmethod
    def of(cls, wanted: int, least: int, restarts: int) -> "JobSize":
        """Return the size of a job that begins."""
        return cls(wanted, least, restarts, restarts)


@dataclass(frozen=True)
class Joiner:
    """A worker that was started to join, and is in no view yet.

    Attributes:
        worker: its id.
        since: when it was started.
        asks: what it waits for.
        failed: whether its script has raised.
    """

    worker: int
    since: float
    asks: Request = Request.NOTHING
    failed: bool = False


@dataclass(frozen=True)
class Saving:
    """What the chief has done since the job was asked to stop.

    Attributes:
        step: that has ended, so that its checkpoint is being written; None until it has.
        kept: the step of the checkpoint that is on the disk; None until one is.
        failure: why a checkpoint could not be written; empty if none failed.
    """

    step: int | None = None
    kept: int | None = None
    failure: str = ""

    def outcome(self, why: str) -> str:
        """Say what has come of it; `why` nothing has, where the chief has not said so itself."""
        if self.kept is not None:
            return f"checkpoint written at step {self.kept}"
        return f"no checkpoint: {self.failure or why}"


@dataclass(frozen=True)
class State:
    """What supervision remembers.

    Attributes:
        running: ids of the workers whose process lives.
        limits: the seconds it gives.
        stage: how far the end of the job has come.
        outcome: how the job ends, once decided.
        suspect: the verdict if no cause shows itself.
        blaming: workers whose own failure only blames another worker.
        deserted: workers that have said once that they wait for one that ended well.
        deadline: when the stage, or the wait for other failures, is over.
        view: who computes what.
        view_since: when the view began; None for the first.
        elastic: whether the job can go on without a worker.
        distributes: whether the script has given the replicas anything to compute or to read.
        idle_until: when a person is told that it has not; None if that is no question.
        keeps: whether the job keeps checkpoints.
        saving: what has come of the checkpoint that a job keeps before it is stopped.
        failed: what each worker whose script raised ended with, the first one first.
        done: workers whose script has come to its end.
        finished: workers that ended well.
        condemned: stuck workers that were killed, whose end has not been seen yet.
        noticed: when each set of late workers was last told of.
        size: how many workers there should be.
        joiners: workers that join, the longest-waiting first.
        leaving: workers that were told to leave, whose end has not been seen yet.
        joined: members that have joined, and when they were started.
        next_worker: the id of the next worker that is started.
        asked: what the members of the view are asked for.
        given: whether the state was given, so that all members wait for the next view.
        young_losses: how many workers in a row were lost soon after their start.
        untold: what follows from a loss, if the person has not been told of it yet.
        next_start: before when no worker is started.
        patience_ends: when a job that waits for workers gives up.
    """

    running: frozenset[int]
    limits: TimeLimits = field(default_factory=TimeLimits)
    stage: Stage = Stage.RUNNING
    outcome: JobOutcome | None = None
    suspect: JobOutcome | None = None
    blaming: frozenset[int] = frozenset()
    deserted: frozenset[int] = frozenset()
    deadline: float | None = None
    view: View | None = None
    view_since: float | None = None
    elastic: bool = False
    distributes: bool = False
    idle_until: float | None = None
    keeps: bool = False
    saving: Saving = field(default_factory=Saving)
    failed: tuple[tuple[int, JobOutcome], ...] = ()
    done: frozenset[int] = frozenset()
    finished: frozenset[int] = frozenset()
    condemned: frozenset[int] = frozenset()
    noticed: tuple[tuple[tuple[int, ...], float], ...] = ()
    size: JobSize = field(default_factory=JobSize)
    joiners: tuple[Joiner, ...] = ()
    leaving: frozenset[int] = frozenset()
    joined: tuple[tuple[int, float], ...] = ()
    next_worker: int = 0
    asked: Request = Request.NOTHING
    given: bool = False
    young_losses: int = 0
    untold: str = ""
    next_start: float | None = None
    patience_ends: float | None = None

    @property
    def due(self) -> float | None:
        """When `TimePassed` is due."""
        times = (self.deadline, self.next_start, self.patience_ends, self.idle_until)
        return min((at for at in times if at is not None), default=None)

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the view, with those that are gone but not left behind yet."""
        return () if self.view is None else self.view.workers

    @property
    def present(self) -> frozenset[int]:
        """The workers that run, without those that join or leave."""
        return self.running.difference(joiner.worker for joiner in self.joiners) - self.leaving

    @property
    def staying(self) -> tuple[int, ...]:
        """The members of the view that run and have not failed, the longest-serving first."""
        there = self.present.difference(worker for worker, _ in self.failed)
        return tuple(worker for worker in self.members if worker in there)

    @property
    def all_raised(self) -> bool:
        """Whether the script has raised on every worker that runs: their processes end by themselves."""
        return self.running <= self.blaming.union(worker for worker, _ in self.failed)

    def joiner(self, worker: int) -> Joiner | None:
        """Return what is known of a worker that joins; None if it is none."""
        return next((one for one in self.joiners if one.worker == worker), None)

    def without_joiner(self, worker: int) -> "State":
        """Forget a worker that joins."""
        return replace(self, joiners=tuple(one for one in self.joiners if one.worker != worker))


@dataclass(frozen=True)
class Decision:
    """The next state, what to do now, and why."""

    state: State
    actions: tuple[Action, ...] = ()
    reason: str = ""
