"""The events that supervision decides on.

A fact that a run publishes has one class, in `lockstep.observability.events`; supervision takes it as it is.
The classes of events here are only of supervision: either the run publishes nothing of them, or, as with a
failure, something else. A message that causes an event has the noun of its name (`JoinRequest`, then
`JoinRequested`).
"""

from dataclasses import dataclass

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
    """A user has started one more worker by hand on a host; it waits until the job uses it."""

    host: int = 0


@dataclass(frozen=True)
class ScaleRequested:
    """A user requests this number of workers."""

    workers: int


@dataclass(frozen=True)
class ViewFailed:
    """This machine lacks the resources for the next view."""

    reason: str


@dataclass(frozen=True)
class HostLost:
    """The agent of a host, the one at index `host`, has ended or is silent, for `reason`."""

    host: int
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
    | HostLost
    | ViewFailed
    | StopRequested
    | DeadlinePassed
)
"""What supervision decides on."""
