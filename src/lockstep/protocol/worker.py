"""The messages between a worker and its agent, and the notice that reaches all members of a view at once."""

from enum import IntEnum

import msgspec

from lockstep.observability.digest_records import WorkerDigest
from lockstep.observability.events import HostFact, OrderRecorded, ScriptFailed, WorkerEvent, WorkerFact
from lockstep.observability.measurements import WorkerMeasurement
from lockstep.protocol.channel import Attachment
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.job_spec import JobSettings


class EventReport(msgspec.Struct, frozen=True, tag="report"):
    """An event, a measurement, or digests, which the coordinator publishes."""

    event: HostFact | WorkerFact | WorkerEvent | WorkerMeasurement | WorkerDigest | OrderRecorded


class ViewBroken(msgspec.Struct, frozen=True, tag="view broken"):
    """The worker has left a view's exchange for `reason`, or cannot enter it; no view has followed.

    A connection between hosts has broken, although the workers of both hosts are alive. If this is fatal, the
    next view would break too.
    """

    worker: int
    view: int
    reason: str
    fatal: bool = False


class LastLineAwaited(msgspec.Struct, frozen=True, tag="awaits last line"):
    """A worker that a user started has completed its last work, and waits for the last line of the job."""

    worker: int


class FileOpened(msgspec.Struct, frozen=True, tag="writes"):
    """The script opens a file for writing.

    Attributes:
        path: the path of the file, absolute.
        line: the line of the program, such as `train.py:41`.
        shared: whether it is in a file system that other hosts may share.
        appends: whether it appends to the file.
        library: the library that opens it for this line; empty if none does.
    """

    path: str
    line: str
    shared: bool = False
    appends: bool = False
    library: str = ""


class FailureReport(msgspec.Struct, frozen=True, tag="failure"):
    """The script raised, and the worker will exit.

    Attributes:
        event: the event that the coordinator publishes. The rest is only for decisions.
        status: the exit status.
        blames: whether the error only says that another worker is lost or stuck.
        prints: whether the worker prints the traceback; otherwise the agent writes it to the worker's log.
        recurs: whether the other workers would raise the error too, perhaps later, because they take over the
            work of this worker, or because they differ from it.
    """

    event: ScriptFailed
    status: int
    blames: bool
    prints: bool = True
    recurs: bool = False

    @property
    def worker(self) -> int:
        """The id of the worker."""
        return self.event.worker


class StateSource(msgspec.Struct, frozen=True):
    """The location of a state, or of a position, that the chief of a view has given.

    Attributes:
        view: the number of the view in which the chief has given it.
        number: the number of the state; those that are given in one view are numbered from 1.
        size: its size in bytes.
        host: the index of the host of the chief.
        address: the IP address at which the agent there accepts connections; empty if the job has one host.
        port: its port.
    """

    view: int
    number: int
    size: int
    host: int
    address: str = ""
    port: int = 0


class StateGiven(msgspec.Struct, frozen=True, tag="given"):
    """The chief gives the state or the position that joiners have requested.

    Its agent keeps the memory until the next view, and reports the location.

    Attributes:
        view: the number of the view in which the chief gives it.
        whole: whether it is the whole state, after which all members wait for the next view; otherwise, it is
            the position.
        failure: why there is none; empty on success.
        state: the published state, on the way from the chief to its agent.
        source: the location of the state; set by the agent.
    """

    view: int
    whole: bool
    failure: str = ""
    state: Attachment | None = None
    source: StateSource | None = None


class AnswersAt(msgspec.Struct, frozen=True, tag="answers"):
    """This worker answers questions of workers of other hosts.

    Attributes:
        entrance: the address of a Unix socket at which it takes their connections.
    """

    entrance: bytes


class SharedMemoryEndpoint(msgspec.Struct, frozen=True, tag="shared memory"):
    """An exchange in memory, for members that are processes of one host.

    Attributes:
        control: the control segment of the view.
    """

    control: Attachment


class HostMembers(msgspec.Struct, frozen=True):
    """The members of a view on one host.

    Attributes:
        host: the index of the host in the job.
        workers: their ids, the longest-serving first.
        name: the name of the host, for messages; empty if the job has one host.
        address: the IP address at which the host's agent accepts connections for them; empty if the job has
            one host.
        port: its port.
        incarnation: the random number that the agent drew at its start.
    """

    host: int
    workers: tuple[int, ...]
    name: str = ""
    address: str = ""
    port: int = 0
    incarnation: int = 0


class NetworkEndpoint(msgspec.Struct, frozen=True, tag="network"):
    """An exchange of members on several hosts: in memory within a host, over connections between them.

    Attributes:
        control: the control segment of the members on this host.
        term: the term of the coordinator that began the view.
        hosts: the members of all hosts, in the order of the view.
        here: the index of this host in `hosts`.
    """

    control: Attachment
    term: int
    hosts: tuple[HostMembers, ...]
    here: int


Endpoint = SharedMemoryEndpoint | NetworkEndpoint
"""How a member reaches the exchange of a view."""


class Notice(IntEnum):
    """A request of the coordinator to the members of a view; all of them see it in the same call.

    It is not a message: the exchange of the view carries it as a number.
    """

    NOTHING = 0
    POSITION = 1
    """The chief reports the position of the training, for joiners."""
    CHANGE = 2
    """All members leave the view at the end of the step; the chief sends the whole state, for joiners."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first message to each worker.

    Attributes:
        pool: the memory for partials and totals, which all workers on the host share.
        settings: the settings of the job.
        job: the id of the job, random bytes; empty if it has one host.
        credentials: the credentials with which the worker connects to other hosts; None if the job has one
            host.
        state_pool: the memory for the state that workers divide, which they also share; None if they do not
            divide it.
    """

    pool: Attachment
    settings: JobSettings
    job: bytes = b""
    credentials: Credentials | None = None
    state_pool: Attachment | None = None


class EnterView(msgspec.Struct, frozen=True, tag="enter view"):
    """Enter the view that `StartView` begins: the first one, or the next one.

    Attributes:
        number: the number of the view.
        hosts: its members, host by host.
        endpoint: how they reach the exchange of the view.
        state: the state of the job, for a worker that joins with this view; None for others.
    """

    number: int
    hosts: tuple[tuple[int, ...], ...]
    endpoint: Endpoint
    state: Attachment | None = None


class PeerConnected(msgspec.Struct, frozen=True, tag="connected"):
    """A member on another host has connected, to send to this worker in a view.

    Attributes:
        view: the number of the view.
        host: the index of the other host in the job.
        connection: the socket, after the greeting.
    """

    view: int
    host: int
    connection: Attachment


class Position(msgspec.Struct, frozen=True, tag="position"):
    """The position of the members, published as a state."""

    state: Attachment


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The worker is no longer needed and must exit."""


class AbortExchange(msgspec.Struct, frozen=True, tag="abort exchange"):
    """The view's exchange is aborted because the job ends, for `reason`; no other view follows."""

    reason: str


RelayedMessage = EventReport | ViewBroken | LastLineAwaited | FileOpened | FailureReport
"""The messages that an agent forwards to the coordinator unchanged."""

WorkerMessage = RelayedMessage | StateGiven | AnswersAt
AgentMessage = Welcome | EnterView | PeerConnected | Position | Leave | AbortExchange
