"""The events and actions of supervision, and the outcome of a job.

A fact that a run publishes has one class, in `lockstep.observability.events`; supervision takes it as it is.
The classes of events here are only of supervision: either the run publishes nothing of them, or, as with a
failure, something else. A message that causes an event has the noun of its name (`JoinRequest`, then
`JoinRequested`).
"""

from dataclasses import dataclass
from enum import Enum, auto

from lockstep.observability.events import (
    CheckpointNotWritten,
    CheckpointsConfigured,
    CheckpointWritten,
    DistributionBegan,
    JoinRequested,
    LastStepEnded,
    ScriptEnded,
    StopRequested,
    StrategyInstalled,
    TimeoutSet,
    WaitReported,
    WorkerExited,
)
from lockstep.protocol.worker import Notice
from lockstep.topology import View


class Evidence(Enum):
    """What a message about a worker shows as evidence."""

    NONE = auto()
    LOG = auto()
    LOG_NAME = auto()
    STACK = auto()


@dataclass(frozen=True)
class FailureReported:
    """A worker reports that its script raised.

    Published as `ScriptFailed`, with the traceback instead of what only the decision needs.

    Attributes:
        worker: its id.
        status: the exit status that its process will have.
        summary: the error in one line.
        blames: whether it raised only because of another worker.
        prints: whether the worker prints the traceback; otherwise only its log has it.
    """

    worker: int
    status: int
    summary: str
    blames: bool
    prints: bool = True


@dataclass(frozen=True)
class StateGiven:
    """The chief of a view has sent the position, or the whole state, after which the members wait.

    Attributes:
        view: its number.
        whole: whether it is the whole state.
        failure: why nothing could be sent; empty on success.
    """

    view: int
    whole: bool
    failure: str = ""


@dataclass(frozen=True)
class WorkerArrived:
    """A user has started one more worker by hand, which waits until the job uses it."""


@dataclass(frozen=True)
class ScaleRequested:
    """A user requests this number of workers."""

    workers: int


@dataclass(frozen=True)
class ViewFailed:
    """This machine lacks the resources for the next view."""

    reason: str


@dataclass(frozen=True)
class DeadlinePassed:
    """The time `State.due` has come."""


Event = (
    WorkerExited
    | ScriptEnded
    | FailureReported
    | StrategyInstalled
    | DistributionBegan
    | CheckpointsConfigured
    | LastStepEnded
    | CheckpointWritten
    | CheckpointNotWritten
    | TimeoutSet
    | JoinRequested
    | StateGiven
    | WorkerArrived
    | ScaleRequested
    | WaitReported
    | ViewFailed
    | StopRequested
    | DeadlinePassed
)
"""What supervision decides on."""


@dataclass(frozen=True)
class AbortExchange:
    """End the exchange between the workers."""

    reason: str


@dataclass(frozen=True)
class StartView:
    """End the view, for `reason`, and begin `view`.

    New members get the state that the chief sent; running members of the last view that are not in `view`
    must leave.
    """

    view: View
    reason: str


@dataclass(frozen=True)
class StartWorker:
    """Start a worker that will join."""

    worker: int


@dataclass(frozen=True)
class AskMembers:
    """Post a notice to the members of the view; it replaces the one before."""

    notice: Notice


@dataclass(frozen=True)
class SendPosition:
    """Send a joiner the position from the chief."""

    worker: int


@dataclass(frozen=True)
class SignalWorker:
    """Send `signal` to the main process of a worker."""

    worker: int
    signal: int


@dataclass(frozen=True)
class KillWorker:
    """Kill the main process of a worker."""

    worker: int


@dataclass(frozen=True)
class DumpStack:
    """Request a worker's Python stack."""

    worker: int


@dataclass(frozen=True)
class ShowMessage:
    """Show the user a message."""

    text: str


@dataclass(frozen=True)
class JobOutcome:
    """How the job ends.

    Attributes:
        status: the exit status of the job.
        message: why, in one line; empty on success.
        workers: the workers whose evidence the message shows.
        evidence: which evidence.
    """

    status: int
    message: str = ""
    workers: tuple[int, ...] = ()
    evidence: Evidence = Evidence.NONE


@dataclass(frozen=True)
class FinishJob:
    """Kill the remaining processes, show the outcome, and exit with its status."""

    outcome: JobOutcome


Action = (
    AbortExchange
    | StartView
    | StartWorker
    | AskMembers
    | SendPosition
    | SignalWorker
    | KillWorker
    | DumpStack
    | ShowMessage
    | FinishJob
)
