"""The messages between a worker and its agent, and the notice that reaches all members of a view at once."""

from enum import IntEnum

import msgspec

from lockstep.observability.events import WorkerEvent
from lockstep.protocol.channel import Attachment


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The worker is about to run the script."""


class EventReport(msgspec.Struct, frozen=True, tag="report"):
    """The worker has published an event."""

    event: WorkerEvent


class WaitReport(msgspec.Struct, frozen=True, tag="waiting"):
    """The worker has been waiting for `seconds` in `what` for `workers`."""

    what: str
    workers: tuple[int, ...]
    seconds: float


class FileOpened(msgspec.Struct, frozen=True, tag="writes"):
    """The script opens a file to write to it.

    Attributes:
        path: of the file, absolute.
        line: of the program, as `train.py:41`.
    """

    path: str
    line: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The script raised, and the worker will end with `status`.

    Attributes:
        status: the exit status that follows.
        summary: the error in one line.
        traceback: as Python prints it.
        blames: whether the error only says that another worker is lost or stuck.
        prints: whether the worker prints the traceback; else the agent puts it into the worker's log.
    """

    status: int
    summary: str
    traceback: str
    blames: bool
    prints: bool = True


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The script came to its end, or has left with `status`, which the process will end with."""

    status: int = 0


class JoinRequest(msgspec.Struct, frozen=True, tag="asks"):
    """A worker that joins wants to know where the training is, or, if `whole`, to be let in."""

    whole: bool


class StateReply(msgspec.Struct, frozen=True, tag="given"):
    """What a joining worker asked for.

    Attributes:
        view: the number of the view in which it is given.
        whole: whether it is the whole state, and all members wait for the next view; else the position.
        state: what was published; None if that failed.
        failure: why it could not be given.
    """

    view: int
    whole: bool
    state: Attachment | None = None
    failure: str = ""


class SharedMemory(msgspec.Struct, frozen=True, tag="shared memory"):
    """An exchange in memory, for members that are processes of one host.

    Attributes:
        control: the control segment of the view.
    """

    control: Attachment


Endpoint = SharedMemory
"""How a member reaches the exchange of a view; a union of one until a view has members on several hosts."""


class Notice(IntEnum):
    """What the coordinator asks of the members of a view; all of them see it in the same call.

    It is no message: the exchange of the view carries it as a number.
    """

    NOTHING = 0
    POSITION = 1
    """The chief reports the position of the training, for joiners."""
    CHANGE = 2
    """All members leave the view at the end of the step; the chief sends the whole state, for joiners."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first message to each worker.

    Attributes:
        pool: the memory for partials and totals, which all workers of this host share.
    """

    pool: Attachment


class NewView(msgspec.Struct, frozen=True, tag="view"):
    """The view that follows, or the first one.

    Attributes:
        number: of the view.
        workers: its members, the longest-serving first.
        endpoint: where they meet.
        state: for a worker that joins with this view, the state of the training.
    """

    number: int
    workers: tuple[int, ...]
    endpoint: Endpoint
    state: Attachment | None = None


class Position(msgspec.Struct, frozen=True, tag="position"):
    """Where the training is, published as a state."""

    state: Attachment


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The worker is not needed any more, and ends."""


class JobOver(msgspec.Struct, frozen=True, tag="over"):
    """The job ends, for `reason`: no view follows."""

    reason: str


RelayedMessage = Started | EventReport | WaitReport | FileOpened | Failed | Finished | JoinRequest
"""What an agent passes on to the coordinator as it is."""

WorkerMessage = RelayedMessage | StateReply
AgentMessage = Welcome | NewView | Position | Leave | JobOver
