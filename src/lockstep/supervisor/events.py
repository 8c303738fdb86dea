"""The events that supervision decides on.

Each fact has one class. If the run publishes a fact, it is an event of `lockstep.observability.events`. Other
reports of workers and agents are messages of `lockstep.protocol`, which supervision receives as they arrive.
Only facts that the coordinator itself notices have their classes here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.observability.events import (
    CheckpointFailed,
    CheckpointsConfigured,
    CheckpointWritten,
    DistributionBegan,
    HostJoined,
    JoinRequested,
    LastStepEnded,
    ScriptEnded,
    StopRequested,
    StrategyInstalled,
    TimeoutSet,
    VerificationFailed,
    WaitReported,
    WorkerExited,
)
from lockstep.protocol.admin import ScaleRequest
from lockstep.protocol.host import (
    HostRetires,
    HostStopped,
    PositionMissed,
    StartCancelled,
    StartFailed,
    StateArrived,
    StateMoving,
    ViewRefused,
    WorkerArrived,
)
from lockstep.protocol.worker import FailureReport, LastLineAwaited, StateGiven, ViewBroken


@dataclass(frozen=True)
class HostGone:
    """The agent of a host has ended, or sends unreadable messages; `how` completes the text "host node2 "."""

    host: int
    how: str


@dataclass(frozen=True)
class HostsHeard:
    """When a message last arrived from the agents of other hosts, by the index of the host.

    It contains all hosts that are not lost.
    """

    at: Mapping[int, float]


@dataclass(frozen=True)
class DeadlinePassed:
    """The time `State.due` has passed."""


Event = (
    WorkerExited
    | ScriptEnded
    | LastLineAwaited
    | StartFailed
    | StartCancelled
    | FailureReport
    | StrategyInstalled
    | DistributionBegan
    | CheckpointsConfigured
    | VerificationFailed
    | LastStepEnded
    | CheckpointWritten
    | CheckpointFailed
    | TimeoutSet
    | JoinRequested
    | StateGiven
    | StateArrived
    | StateMoving
    | PositionMissed
    | WorkerArrived
    | ScaleRequest
    | WaitReported
    | ViewBroken
    | HostRetires
    | HostStopped
    | HostGone
    | HostsHeard
    | HostJoined
    | ViewRefused
    | StopRequested
    | DeadlinePassed
)
"""The events on which supervision decides."""
