"""The messages between the process that keeps the connections of a job over hosts, and its coordinator.

The coordinator is a separate process, so that it can be lost and started again while the connections stay
open.
"""

import msgspec

from lockstep.protocol.admin import StopRequest
from lockstep.protocol.channel import Attachment
from lockstep.protocol.host import KeepAlive, KeepRecord, PeerAddress, ShowNote


class Coordinate(msgspec.Struct, frozen=True, tag="coordinate"):
    """The first message to a coordinator. As many `HostChannel` messages as `hosts` follow.

    Attributes:
        kept: the newest record of the job that the keeper has, without its bytes.
        record: its bytes.
        term: the term of the coordinator: 1 for the first one, and higher for each one that takes over.
        hosts: number of hosts that are, or were, in the job.
        run_dir: the run folder, as the user wrote it.
        notifies: whether the agents show the notes of the coordinator.
        address: HOST:PORT to which agents connect; empty if they do not.
        requests: a socket with the name of the job, to which other terminals connect; None if there is none.
        tensorboard: see `Exports`.
        metrics: the socket of `Exports`, or None.
        notifier: the socket to the notifier, or None.
    """

    kept: KeepRecord
    record: Attachment
    term: int
    hosts: int
    run_dir: str
    notifies: bool
    address: str
    requests: Attachment | None
    tensorboard: str | None
    metrics: Attachment | None
    notifier: Attachment | None


class HostChannel(msgspec.Struct, frozen=True, tag="host"):
    """A channel of the coordinator to the agent of a host, which may have joined later.

    Attributes:
        host: the index of the host.
        name: the name of the host.
        peer: the address for workers of other hosts.
        workers: the number of workers that it should have.
        cores: number of its cores.
        channel: a connected socket for a `StreamChannel`; None if the host is lost.
    """

    host: int
    name: str
    peer: PeerAddress | None
    workers: int
    cores: int
    channel: Attachment | None


CoordinatorCommand = Coordinate | HostChannel | ShowNote | StopRequest


class RecordMade(msgspec.Struct, frozen=True, tag="record"):
    """Keep the record of the job instead of the previous one, before agents get the instructions that follow.

    Attributes:
        kept: the record, without its bytes.
        record: its bytes.
    """

    kept: KeepRecord
    record: Attachment


class HostDropped(msgspec.Struct, frozen=True, tag="dropped"):
    """A host is lost: its connection can be closed."""

    host: int


class JobEnds(msgspec.Struct, frozen=True, tag="ends"):
    """The end of the job is decided: no host can join any more."""


class JobEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The last message; without it, the coordinator was lost.

    Attributes:
        status: the exit status of the job.
        error: why the coordinator cannot continue, in the form for its own terminal; empty at the end of a
            job.
    """

    status: int
    error: str = ""


CoordinatorReport = RecordMade | HostDropped | KeepAlive | JobEnds | JobEnded
