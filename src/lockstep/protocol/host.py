"""What the coordinator of a job, the agents of its hosts and the command tell each other.

The coordinator decides, and an agent does so on its host; an agent tells what happens there. Both work alike
whether they are parts of one process or on different hosts.
"""

import msgspec

from lockstep.protocol.request import Request
from lockstep.protocol.worker import RelayedMessage

# From the command to the coordinator.


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The command was asked to end the job by `signal`."""

    signal: int


# From the coordinator to an agent.


class BeginView(msgspec.Struct, frozen=True, tag="begin view"):
    """End the present view, if there is one, and begin another.

    Members learn how to reach the new exchange, at their start if that is still to come. Members that were
    not in the present view also get the state that was given in it.

    Attributes:
        number: of the view.
        workers: its members, the longest-serving first.
        reason: why the present view ends.
        leaving: workers that are told to leave, if they were in the present view.
    """

    number: int
    workers: tuple[int, ...]
    reason: str = ""
    leaving: tuple[int, ...] = ()


class StartProcess(msgspec.Struct, frozen=True, tag="start"):
    """Start a worker.

    Attributes:
        worker: its id.
        joins: whether it joins a job that runs already.
        yielding: workers whose slots are free already, though their processes have not ended.
    """

    worker: int
    joins: bool = False
    yielding: tuple[int, ...] = ()


class LeaveNotice(msgspec.Struct, frozen=True, tag="notice"):
    """Ask the members of the view for something, or for nothing any more."""

    request: Request


class DeliverPosition(msgspec.Struct, frozen=True, tag="deliver position"):
    """Tell a worker that joins what the chief has given last."""

    worker: int


class SignalProcess(msgspec.Struct, frozen=True, tag="signal"):
    """Send a signal to the main process of a worker; one that is not started yet is never started."""

    worker: int
    signal: int


class TakeStack(msgspec.Struct, frozen=True, tag="take stack"):
    """Ask a worker for its Python stack, which is evidence at the end."""

    worker: int


class EndExchange(msgspec.Struct, frozen=True, tag="end exchange"):
    """End the view, for `reason`: no other follows."""

    reason: str


class ReportAll(msgspec.Struct, frozen=True, tag="report all"):
    """Tell everything that workers have said by now, and then `AllReported`."""


class EndHost(msgspec.Struct, frozen=True, tag="end"):
    """End everything that runs on the host for the job.

    Attributes:
        grace: seconds that processes have to end by themselves.
        evidence: workers whose log and stack are wanted.
    """

    grace: float
    evidence: tuple[int, ...] = ()


# From an agent to the coordinator.


class ProcessStarted(msgspec.Struct, frozen=True, tag="started"):
    """A worker was started."""

    worker: int
    pid: int


class StartFailed(msgspec.Struct, frozen=True, tag="start failed"):
    """A worker cannot be started.

    Attributes:
        worker: its id.
        joins: whether it was to join.
        reason: why not.
    """

    worker: int
    joins: bool
    reason: str


class StartCancelled(msgspec.Struct, frozen=True, tag="start cancelled"):
    """A worker will not be started, because of a signal that came before."""

    worker: int
    signal: int


class ProcessArrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A person has started a process that waits to become a worker."""


class WorkerSaid(msgspec.Struct, frozen=True, tag="said"):
    """A worker has sent a message."""

    worker: int
    message: RelayedMessage


class NotUnderstood(msgspec.Struct, frozen=True, tag="not understood"):
    """A worker has sent something that is no message."""

    worker: int
    error: str


class StateHeld(msgspec.Struct, frozen=True, tag="state"):
    """The chief of a view has given the state, which this agent holds; see `StateReply`."""

    view: int
    whole: bool
    failure: str = ""


class ProcessExited(msgspec.Struct, frozen=True, tag="exited"):
    """The process of a worker has ended; what it said and wrote before was told before.

    Attributes:
        worker: its id.
        status: its exit status, negative for a signal, or `UNKNOWN_STATUS`.
        memory_kills: how many processes the kernel has killed for want of memory since the last worker was
            killed; 0 where this one was not.
    """

    worker: int
    status: int
    memory_kills: int = 0


class ViewRefused(msgspec.Struct, frozen=True, tag="view refused"):
    """A view cannot begin on this host; the present one goes on."""

    number: int
    reason: str


class TerminalLost(msgspec.Struct, frozen=True, tag="terminal lost"):
    """The terminal does not take output any more, for `reason`."""

    reason: str


class AllReported(msgspec.Struct, frozen=True, tag="reported"):
    """Everything that workers had said when `ReportAll` came was told."""


class WorkerEvidence(msgspec.Struct, frozen=True):
    """What a worker has left behind.

    Attributes:
        worker: its id.
        has_log: whether there is a log of it.
        log: the last lines of its log.
        stack: the stack that it was asked for, the innermost frame first; empty if there is none.
    """

    worker: int
    has_log: bool
    log: tuple[str, ...]
    stack: tuple[str, ...]


class HostEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Nothing runs on the host any more; the last message.

    Attributes:
        left: process ids that even SIGKILL did not end.
        evidence: what was asked for, as far as it is there.
    """

    left: tuple[int, ...] = ()
    evidence: tuple[WorkerEvidence, ...] = ()


Instruction = (
    BeginView
    | StartProcess
    | LeaveNotice
    | DeliverPosition
    | SignalProcess
    | TakeStack
    | EndExchange
    | ReportAll
    | EndHost
)
HostReport = (
    ProcessStarted
    | StartFailed
    | StartCancelled
    | ProcessArrived
    | WorkerSaid
    | NotUnderstood
    | StateHeld
    | ProcessExited
    | ViewRefused
    | TerminalLost
    | AllReported
    | HostEnded
)
