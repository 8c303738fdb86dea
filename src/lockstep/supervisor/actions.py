"""What supervision decides to do: actions, which the coordinator carries out, and the outcome of a job."""

from dataclasses import dataclass
from enum import Enum, auto

from lockstep.protocol.host import (
    AskMembers,
    DumpStack,
    KillWorker,
    SendPosition,
    SendState,
    SignalWorker,
    StartWorker,
)
from lockstep.protocol.worker import AbortExchange
from lockstep.topology import View


class Evidence(Enum):
    """What a message about a worker shows as evidence."""

    NONE = auto()
    LOG = auto()
    LOG_NAME = auto()
    STACK = auto()


@dataclass(frozen=True)
class StartView:
    """End the view, for `reason`, and begin `view`.

    New members get the state with the number `state`, which the chief has given; running members of the last
    view that are not in `view` must leave.
    """

    view: View
    reason: str
    state: int = 0


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
        message: why, in one line; empty on success.
        workers: the workers whose evidence the message shows.
        evidence: which evidence.
        stopped: whether the user has stopped the job.
    """

    status: int
    message: str = ""
    workers: tuple[int, ...] = ()
    evidence: Evidence = Evidence.NONE
    stopped: bool = False


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
    | FinishJob
)
