"""The record of a job, which the agents keep so that another coordinator can take over. Pure.

It contains the state of supervision, and for each host the number of reports on which that state is based,
and the instructions that the agent may not have taken yet. The keeper and the first eight agents get the
newest record before the coordinator sends the instructions that follow from it. So no agent has an
instruction that follows from a newer record than the newest kept one. Every report and every instruction
counts once, whenever a coordinator is lost. If the keeper is lost too, an agent that has such an instruction
is left behind.

A record that does not fit into a message (more than 500 hosts whose views change) is only at the keeper.
Output, load, stacks and `KeepAlive` do not change the record, so they do not cause one. The coordinator sends
one record for all decisions of a turn of its loop, one a second if something has changed, and one at once
when the job begins to survive losses. Reports of the agent of a lost host that arrived after the last record
are lost with the host.

The clock of a coordinator that takes over continues from the record, so limits do not run while the job has
no coordinator.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lockstep.observability.events import JobTotals
from lockstep.protocol.host import Instruction, KeepRecord, PeerAddress, StartView
from lockstep.protocol.job_spec import JobSpec
from lockstep.supervisor.actions import JobOutcome
from lockstep.supervisor.state import State

MOST_SENT = 350 * 1024
"""Bytes of a record that fit into a message to an agent; 1,000 hosts of one worker need about as many."""


class HostRecord(msgspec.Struct, frozen=True):
    """A host in the record of a job.

    Attributes:
        name: the name of the host.
        peer: the address for workers of other hosts.
        lost: whether the host is lost.
        received: the number of numbered reports of its agent that the state contains.
        sent: the number of numbered instructions that were or will be sent to its agent.
        outbox: the last of these instructions, which the agent may not have.
    """

    name: str
    peer: PeerAddress | None
    lost: bool = False
    received: int = 0
    sent: int = 0
    outbox: tuple[Instruction, ...] = ()


class JobRecord(msgspec.Struct, frozen=True):
    """Everything that a coordinator knows of a job.

    Attributes:
        spec: the job.
        state: the state of supervision.
        hosts: the hosts, by their index.
        view: the view that the agents were sent last; its number is 0 before the first.
        tally: the totals of the job.
        doing: the distributed call in which the workers are.
        chief_writes: paths that callbacks of the chief write.
        used_strategy: whether the script has created a strategy.
        stops: the number of times that the user has stopped the job.
        outcome: how the job ends, if that is certain.
        at: the coordinator's clock, in seconds; times in the state are on it.
        begun: the time at which the job began, on that clock.
        since: the same time, in seconds since 1970.
        remaining: the paths or URLs of older checkpoints that could not be removed.
    """

    spec: JobSpec
    state: State
    hosts: tuple[HostRecord, ...]
    view: StartView = StartView(0, ())
    tally: JobTotals = JobTotals()
    doing: str = ""
    chief_writes: tuple[str, ...] = ()
    used_strategy: bool = False
    stops: int = 0
    outcome: JobOutcome | None = None
    at: float = 0.0
    begun: float = 0.0
    since: float = 0.0
    remaining: frozenset[str] = frozenset()


class PackedRecord(msgspec.Struct, frozen=True):
    """A record that contains each instruction once, even if many agents may not have it, such as a view.

    Attributes:
        record: the record without its view and its outboxes.
        instructions: the view, then the instructions in the outboxes.
        outboxes: the outboxes of the hosts, as indices of instructions.
    """

    record: JobRecord
    instructions: tuple[Instruction, ...]
    outboxes: tuple[tuple[int, ...], ...]


def encode_record(record: JobRecord) -> bytes:
    """Return the bytes of a record."""
    instructions: dict[int, Instruction] = {id(record.view): record.view}
    for host in record.hosts:
        instructions.update((id(instruction), instruction) for instruction in host.outbox)
    index = {identity: number for number, identity in enumerate(instructions)}
    outboxes = tuple(tuple(index[id(instruction)] for instruction in host.outbox) for host in record.hosts)
    hosts = tuple(replace(host, outbox=()) for host in record.hosts)
    rest = replace(record, view=StartView(0, ()), hosts=hosts)
    return msgspec.msgpack.encode(
        PackedRecord(rest, tuple(instructions.values()), outboxes), enc_hook=_encode_other
    )


def decode_record(data: bytes) -> JobRecord:
    """Return the record that `encode_record` has encoded.

    Raises:
        ValueError: the data is not such a record.
    """
    if not data:
        raise ValueError("the record of the job was too large for the agents to keep when it was lost")
    try:
        packed = msgspec.msgpack.decode(data, type=PackedRecord, dec_hook=_decode_other)
        hosts = tuple(
            replace(host, outbox=tuple(packed.instructions[number] for number in outbox))
            for host, outbox in zip(packed.record.hosts, packed.outboxes, strict=True)
        )
        view = packed.instructions[0]
    except (msgspec.DecodeError, IndexError, ValueError) as error:
        raise ValueError(f"no record of a job: {error}") from None
    if not isinstance(view, StartView):
        raise ValueError("no record of a job: it has no view")
    return replace(packed.record, view=view, hosts=hosts)


def without_excess(kept: KeepRecord) -> KeepRecord:
    """Return a record for an agent to keep: without its bytes if they do not fit into a message.

    Such an agent drops the previous record, which has become wrong.
    """
    return kept if len(kept.record) <= MOST_SENT else replace(kept, record=b"")


def newest(kept: Iterable[KeepRecord | None]) -> KeepRecord | None:
    """Return the newest of the records that agents have kept, or None if no agent has one."""
    records = [record for record in kept if record is not None]
    return max(records, key=lambda record: (record.term, record.serial), default=None)


def _encode_other(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _decode_other(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind.__name__)
