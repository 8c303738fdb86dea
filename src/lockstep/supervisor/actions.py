"""The decisions of supervision: actions, and the outcome of a job.

Most actions are instructions of `lockstep.protocol.host`, which the coordinator sends to the agents that they
concern. The coordinator itself carries out the actions defined here.
"""

from dataclasses import dataclass
from enum import Enum, auto

from lockstep.protocol.host import (
    AskMembers,
    DumpStack,
    KillWorker,
    SendPosition,
    SendState,
    SignalWorker,
    StartView,
    StartWorker,
)
from lockstep.protocol.worker import AbortExchange


class Evidence(Enum):
    """The evidence that a message about a worker shows."""

    NONE = auto()
    LOG = auto()
    LOG_NAME = auto()
    STACK = auto()


@dataclass(frozen=True)
class ShowMessage:
    """Show the user a message.

    Attributes:
        text: the message.
        logs: the workers whose logs the message names.
    """

    text: str
    logs: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobOutcome:
    """How the job ends.

    Attributes:
        status: the exit status of the job.
        message: the reason, in one line; empty on success.
        workers: the workers whose evidence the message shows.
        evidence: the kind of evidence.
        stopped: whether the user has stopped the job.
        out_of_reach: whether the hosts of all workers were lost. The workers may continue there.
    """

    status: int
    message: str = ""
    workers: tuple[int, ...] = ()
    evidence: Evidence = Evidence.NONE
    stopped: bool = False
    out_of_reach: bool = False


@dataclass(frozen=True)
class TellSuccess:
    """Show the job's last line, for which workers that were started by hand wait, and let them exit."""


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
    | SendState
    | SignalWorker
    | KillWorker
    | DumpStack
    | ShowMessage
    | TellSuccess
    | FinishJob
)
