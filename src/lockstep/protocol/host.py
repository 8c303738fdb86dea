"""The messages between the coordinator of a job and the agents of its hosts, and from the command.

The coordinator sends instructions, which an agent carries out on its host, and the agent reports what happens
there. They work in the same way in one process and on different hosts.
"""

import os
from typing import NamedTuple

import msgspec

from lockstep.checkpoint.held import HeldCheckpoint
from lockstep.observability.events import WorkerExited
from lockstep.observability.measurements import LoadMeasured
from lockstep.protocol.admin import StackReply, StackRequest
from lockstep.protocol.job_spec import JobHost, JobSpec
from lockstep.protocol.rendezvous import Arrival, KeepWaiting, Rejected, Task
from lockstep.protocol.worker import (
    AbortExchange,
    EventReport,
    HostMembers,
    Notice,
    RelayedMessage,
    StateGiven,
    StateSource,
)

ALIVE_EVERY = 1.0
"""Seconds between two messages of an agent and a coordinator on different hosts."""

SILENCE = 5.0
"""Seconds without a message after which the other host counts as lost."""

LEFT_OUT = os.EX_TEMPFAIL
"""The exit status of an agent that has no part in a job, or no more; it may try again."""

MOST_QUEUED = 1 << 30
"""Bytes that coordinator and agent keep for each other. Silence ends the wait."""

CHECKPOINT_PART = 256 * 1024
"""Bytes of a part of a checkpoint."""


class PeerAddress(NamedTuple):
    """The address at which an agent accepts connections of workers on other hosts, and its incarnation."""

    address: str
    port: int
    incarnation: int


# These messages pass between the coordinator and the agent of another host, before the job begins.


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """The first message to an agent: the program of the job. The answer is `HostFacts`.

    Attributes:
        job: the id of the job, random bytes.
        key: the line of the job's key; empty if the agent has it.
        encrypted: whether connections between hosts are encrypted.
        target: path of the script, or name of the module.
        module: whether `target` is a module.
        arguments: the arguments of the script.
        backend: the Keras backend.
        folder: the current folder of the job; empty for the agent's current folder.
        environment: variables that the workers have on all hosts.
        checkpoints: the folder of checkpoints, as the user wrote it; empty if there is none.
    """

    job: bytes
    key: str
    encrypted: bool
    target: str
    module: bool
    arguments: tuple[str, ...]
    backend: str | None
    folder: str
    environment: dict[str, str]
    checkpoints: str = ""

    def __repr__(self) -> str:
        return f"Prepare({self.target!r})"


class KeepRecord(msgspec.Struct, frozen=True, tag="keep record"):
    """Keep the record of the job instead of the previous one; instructions that follow from it come later.

    Attributes:
        term: the term of the coordinator.
        serial: the serial of the record in its term.
        record: the encoded `JobRecord`.
    """

    term: int
    serial: int
    record: bytes

    def __repr__(self) -> str:
        return f"KeepRecord({self.term}, {self.serial})"


class RunningJob(msgspec.Struct, frozen=True):
    """What an agent knows of its job, for a coordinator that is started again.

    Attributes:
        prepare: the first message to the agent.
        host: the index of its host.
        kept: the newest record of the job that it has; None if it has none.
    """

    prepare: Prepare
    host: int
    kept: KeepRecord | None


class HostOffer(msgspec.Struct, frozen=True, tag="offer"):
    """The first message of an agent that joins a coordinator. It is sent again when a part of it changes.

    The coordinator answers with `KeepWaiting`, with `Rejected`, or, once its hosts are complete, with
    `Prepare`.

    Attributes:
        workers: the number of workers that the host can run.
        first: the first process that a user has started on the host by hand; its tasks have their addresses
            as places. None if the agent starts the workers.
        slots: the tasks for which a process waits on the host.
        running: the job that runs on the host, whose coordinator was lost; None before a job.
        tasks: the tasks of the agent's cluster, with their addresses as places; empty if it is not in a
            cluster.
        task: the index of the agent's task in `tasks`: hosts of a new job are placed in this order.
    """

    workers: int
    first: Arrival | None = None
    slots: tuple[int, ...] = ()
    running: RunningJob | None = None
    tasks: tuple[Task, ...] = ()
    task: int = 0


class HostFacts(msgspec.Struct, frozen=True, tag="facts"):
    """The facts about a host that the coordinator needs before the job begins.

    Attributes:
        name: the name that the host gives itself.
        python: the version of Python.
        machine: the kind of processor, such as x86_64.
        libraries: the versions of installed libraries, by distribution.
        cores: number of cores that the job may use.
        script: the hash of the script's file; empty if it has none.
        address: the IP address at which the agent accepts connections.
        port: its port.
        incarnation: a random number of this agent.
        problem: why the host cannot run the job; empty if it can.
        open_files: the limit on open files of its processes; None without a limit.
        processes_left: the number of processes and threads that the user may still start there; None without
            a limit.
        checkpoint: the newest complete checkpoint there; None if there is none.
        damaged: a message for each newer checkpoint that is damaged.
    """

    name: str
    python: str
    machine: str
    libraries: dict[str, str]
    cores: int
    script: str
    address: str
    port: int
    incarnation: int
    problem: str = ""
    open_files: int | None = None
    processes_left: int | None = None
    checkpoint: HeldCheckpoint | None = None
    damaged: tuple[str, ...] = ()


class SendCheckpoint(msgspec.Struct, frozen=True, tag="send checkpoint"):
    """Send the checkpoint in `HostFacts`, which other hosts lack, in messages `CheckpointPart`."""


class TakeCheckpoint(msgspec.Struct, frozen=True, tag="take checkpoint"):
    """Write a checkpoint, whose parts follow. The answer is `CheckpointTaken`.

    Attributes:
        held: its description by its host.
        keep: the number of checkpoints to keep.
    """

    held: HeldCheckpoint
    keep: int


class CheckpointPart(msgspec.Struct, frozen=True, tag="checkpoint part"):
    """A part of a checkpoint, in both directions.

    Attributes:
        file: the number of the file.
        part: the bytes that follow those of the previous part; empty after the last one.
    """

    file: int
    part: bytes


class CheckpointTaken(msgspec.Struct, frozen=True, tag="checkpoint taken"):
    """A checkpoint has been written; or it cannot be read or written, for the reason `failure`."""

    failure: str = ""


class BeginJob(msgspec.Struct, frozen=True, tag="begin job"):
    """The job begins: from now on, the agent takes instructions.

    Attributes:
        spec: the job.
        host: the index of the agent's host.
        here: the host, with the number of workers that it should have.
        first_slot: the slot of the first of these workers.
    """

    spec: JobSpec
    host: int
    here: JobHost
    first_slot: int


# These messages go from the coordinator to an agent.


class StartView(msgspec.Struct, frozen=True, tag="start view"):
    """End the current view, if there is one, and begin another.

    Supervision decides it. The coordinator adds its term, and the names and addresses of the hosts. The agent
    tells the members how to reach the new exchange (`EnterView`); it tells members that have not started yet
    when they start. Members that are not in the current view also get a state that was given in it.

    Attributes:
        number: the number of the view.
        hosts: its members, host by host.
        reason: why the current view ends.
        leaving: the members of the current view that must leave.
        state: the number of the state; 0 if no member needs one.
        term: the term of the coordinator.
        notice: the first notice to its members, which none of them can miss.
    """

    number: int
    hosts: tuple[HostMembers, ...]
    reason: str = ""
    leaving: tuple[int, ...] = ()
    state: int = 0
    term: int = 1
    notice: Notice = Notice.NOTHING

    @property
    def workers(self) -> tuple[int, ...]:
        """Ids of its members, host by host."""
        return tuple(worker for host in self.hosts for worker in host.workers)

    @property
    def networked(self) -> bool:
        """Whether its members reach the exchange over connections, because the job has several hosts."""
        return any(host.address for host in self.hosts)


class StartWorker(msgspec.Struct, frozen=True, tag="start"):
    """Start a worker.

    Attributes:
        worker: its id.
        joins: whether it joins a running job.
        yielding: workers whose slots it may take, although their processes have not ended.
    """

    worker: int
    joins: bool = False
    yielding: tuple[int, ...] = ()


class AskMembers(msgspec.Struct, frozen=True, tag="notice"):
    """Post a notice to the members of the view; it replaces the previous notice."""

    notice: Notice


class SendPosition(msgspec.Struct, frozen=True, tag="send position"):
    """Send a joiner the position; without one, the agent reports `PositionMissed`."""

    worker: int
    source: StateSource


class SendState(msgspec.Struct, frozen=True, tag="send state"):
    """Send a host the state that the chief has given, for joiners there; the agent reports `StateArrived`.

    The agent of that host fetches the state, unless it is held there.
    """

    host: int
    source: StateSource


class SignalWorker(msgspec.Struct, frozen=True, tag="signal"):
    """Send a signal to a worker's main process. If the worker has not started yet, it never starts."""

    worker: int
    signal: int


class KillWorker(msgspec.Struct, frozen=True, tag="kill"):
    """Kill a worker's main process. If the worker has not started yet, it never starts.

    It is not a `SignalWorker`, because a job whose members are killed does not end normally.
    """

    worker: int


class DumpStack(msgspec.Struct, frozen=True, tag="dump stack"):
    """Ask a worker for its Python stack, as evidence for `HostEnded`."""

    worker: int


class KeepAlive(msgspec.Struct, frozen=True, tag="alive"):
    """The sender is alive. Both ends of a connection between hosts send this every `ALIVE_EVERY` seconds.

    Attributes:
        received: the number of numbered messages of the other end that the sender has processed, and will not
            need again.
        sent: the time at which the agent sent this, by its own clock. The coordinator answers with the time
            of the newest `KeepAlive` that it has processed; 0 before the first.
    """

    received: int = 0
    sent: float = 0.0


class TakeOver(msgspec.Struct, frozen=True, tag="take over"):
    """A coordinator takes over, in a new term. The agent answers `AgentStanding`, and reports nothing until
    `RepeatReports`."""

    term: int


class RepeatReports(msgspec.Struct, frozen=True, tag="repeat reports"):
    """Send the numbered reports after the first `after` ones again; new ones follow."""

    after: int


class PauseOutput(msgspec.Struct, frozen=True, tag="pause output"):
    """Let these workers on a host without the console, and no others, wait with their output."""

    workers: tuple[int, ...]


class ShowNote(msgspec.Struct, frozen=True, tag="note"):
    """Show a note to the users of the host."""

    text: str


class ReportAll(msgspec.Struct, frozen=True, tag="report all"):
    """Report every message that workers have sent so far, then `AllReported`."""


class EndHost(msgspec.Struct, frozen=True, tag="end"):
    """End all processes of the job on the host.

    Attributes:
        grace: seconds that they have to exit by themselves.
        evidence: workers whose log and stack the agent reports.
        status: the exit status of the job.
    """

    grace: float
    evidence: tuple[int, ...] = ()
    status: int = 0


# These messages go from an agent to the coordinator.


class AgentStanding(msgspec.Struct, frozen=True, tag="standing"):
    """The state of an agent that a coordinator needs when it takes over.

    Attributes:
        term: the term that `TakeOver` began.
        received: the number of numbered instructions that the agent has processed.
        acknowledged: the number of numbered reports that were acknowledged, so that the agent no longer has
            them.
        kept: the newest record of the job that it has; None if it has none.
    """

    term: int
    received: int
    acknowledged: int
    kept: KeepRecord | None = None


class StartFailed(msgspec.Struct, frozen=True, tag="start failed"):
    """A worker cannot be started.

    Attributes:
        worker: its id.
        joins: whether it was to join a running job.
        reason: why it cannot be started.
        recurs: whether its host cannot start another worker either.
    """

    worker: int
    joins: bool
    reason: str
    recurs: bool = False

    @property
    def message(self) -> str:
        """Why the worker cannot be started, in one line."""
        return f"cannot start worker {self.worker}: {self.reason}"


class StartCancelled(msgspec.Struct, frozen=True, tag="start cancelled"):
    """A worker will not start, because a signal for it came first."""

    worker: int
    signal: int


class WorkerArrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A user has started one more worker by hand on a host; it waits until the job uses it."""

    host: int = 0


class HostRetires(msgspec.Struct, frozen=True, tag="host retires"):
    """A host is about to leave, for `reason`. This may arrive twice, or for a lost host."""

    host: int
    reason: str


class HostStopped(msgspec.Struct, frozen=True, tag="host stopped"):
    """A user has stopped the agent of a host with a signal, and it ends."""

    host: int
    signal: int


class WorkerSaid(msgspec.Struct, frozen=True, tag="said"):
    """A worker sent a message."""

    worker: int
    message: RelayedMessage


class StateArrived(msgspec.Struct, frozen=True, tag="state arrived"):
    """The state given in a view has reached another host, or has not, because of `failure`."""

    host: int
    view: int
    failure: str = ""


class StateMoving(msgspec.Struct, frozen=True, tag="state moving"):
    """In `seconds`, a host has received `received` of the `size` bytes of a view's state."""

    host: int
    view: int
    received: int
    size: int
    seconds: float


class PositionMissed(msgspec.Struct, frozen=True, tag="position missed"):
    """The position that was given in a view has not reached a joiner, because of `failure`."""

    worker: int
    view: int
    failure: str


class ExitReport(msgspec.Struct, frozen=True, tag="exited"):
    """The process of a worker has ended; all its messages and output were reported before.

    Attributes:
        event: the event that the coordinator publishes. Its status may be `UNKNOWN_STATUS`.
        memory_kills: the number of processes that the kernel has recently killed for lack of memory; 0 if
            this process was not killed.
        stack: lines for its log with its stack, if that was requested; otherwise empty.
    """

    event: WorkerExited
    memory_kills: int = 0
    stack: str = ""


class OutputWritten(msgspec.Struct, frozen=True, tag="output"):
    """A worker on a host without the console has written output.

    Attributes:
        worker: its id.
        descriptor: 1 for stdout, 2 for stderr.
        data: the output.
    """

    worker: int
    descriptor: int
    data: bytes


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """The host and its workers have this load."""

    load: LoadMeasured


class ViewRefused(msgspec.Struct, frozen=True, tag="view refused"):
    """A view cannot begin on a host. There, the current view continues."""

    view: int
    reason: str


class AllReported(msgspec.Struct, frozen=True, tag="reported"):
    """Every message that workers had sent when `ReportAll` arrived is reported."""


class WorkerEvidence(msgspec.Struct, frozen=True):
    """The remains of a worker for the message about a failed job.

    Attributes:
        worker: its id.
        has_log: whether it has a log.
        log: the last lines of its log.
        stack: the stack that it wrote on request, the innermost frame first; empty if there is none.
    """

    worker: int
    has_log: bool
    log: tuple[str, ...]
    stack: tuple[str, ...]


class HostEnded(msgspec.Struct, frozen=True, tag="ended"):
    """No process of the job runs on the host. This is the last message.

    Attributes:
        left: ids of processes that even SIGKILL did not end.
        evidence: the available evidence of the requested workers.
    """

    left: tuple[int, ...] = ()
    evidence: tuple[WorkerEvidence, ...] = ()


Instruction = (
    StartView
    | StartWorker
    | AskMembers
    | SendPosition
    | SendState
    | SignalWorker
    | KillWorker
    | DumpStack
    | StackRequest
    | AbortExchange
    | KeepAlive
    | PauseOutput
    | ShowNote
    | ReportAll
    | EndHost
    | KeepRecord
    | TakeOver
    | RepeatReports
)
HostReport = (
    EventReport
    | StartFailed
    | StartCancelled
    | WorkerArrived
    | HostRetires
    | HostStopped
    | WorkerSaid
    | StateGiven
    | StateArrived
    | StateMoving
    | PositionMissed
    | ExitReport
    | ViewRefused
    | KeepAlive
    | OutputWritten
    | LoadReport
    | StackReply
    | AllReported
    | HostEnded
    | AgentStanding
)

UNNUMBERED = (
    KeepAlive,
    PauseOutput,
    ShowNote,
    StackRequest,
    ReportAll,
    EndHost,
    KeepRecord,
    TakeOver,
    RepeatReports,
    LoadReport,
    StackReply,
    AllReported,
    AgentStanding,
)
"""Messages that are not sent again to, or by, a coordinator that takes over. All others have numbers from 1,
in the order in which they are sent."""

RemoteInstruction = (
    KeepWaiting
    | Rejected
    | Prepare
    | SendCheckpoint
    | TakeCheckpoint
    | CheckpointPart
    | BeginJob
    | Instruction
)
"""The messages that an agent on another host receives."""

RemoteReport = HostOffer | HostFacts | CheckpointPart | CheckpointTaken | HostReport
"""The messages that an agent on another host sends."""
