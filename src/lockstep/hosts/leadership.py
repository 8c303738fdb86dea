"""Which coordinator leads a job that another host may take over: an object in the store of its checkpoints.

A coordinator may do two things only after it has replaced this object: begin to lead, and begin a view. Each
write is conditional, so if two coordinators cannot communicate, one of them fails, and ends. The rule does
not need a clock, and holds at any speed of processes, network and store:

1. Before agents learn of a view, the object names its hosts.
2. A coordinator takes a job over only if the agent of one of these hosts follows it, with the newest record
   that has arrived. Such an agent no longer takes instructions from another coordinator. So it never enters
   the view that the object names, or has left it. Without this agent, no call of that view ends.

So the completed calls belong to one sequence of views, each of which has a host of the previous one. While
nothing changes, training needs neither the object nor the coordinator.
"""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from lockstep.checkpoint.object_store import Conflict
from lockstep.errors import CheckpointError, SupersededError

_NAME = "coordinator.json"


class Leadership(msgspec.Struct, frozen=True):
    """The coordinator that leads a job, and the hosts of its newest view.

    Attributes:
        job: the id of the job.
        writer: the id of the coordinator.
        address: HOST:PORT at which agents connect to it; empty if it has started them over ssh.
        term: its term.
        view: the number of the view; 0 before the first.
        hosts: the indices of the hosts that have members in the view.
    """

    job: str
    writer: str
    address: str
    term: int
    view: int = 0
    hosts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The coordinator, for messages."""
        return f"the coordinator at {self.address}" if self.address else "the command of --hosts"


class LeadershipStore(Protocol):
    """The part of an `ObjectStore` that has the object."""

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return the content of an object and its tag, or None if it is absent."""

    def replace(self, name: str, data: bytes, tag: str | None) -> str:
        """Write an object that has a tag, or none if `tag` is None, or raise Conflict; return its new tag."""


@dataclass
class Leader:
    """A coordinator that leads its job, or tries to.

    Each method raises CheckpointError if the store does not answer. It may then be called again.

    Attributes:
        store: the store that has the object.
        job: the id of the job.
        address: see `Leadership`.
        is_replaced: whether the store names another job, or none, so that no host can continue this one.
    """

    store: LeadershipStore
    job: str
    address: str
    is_replaced: bool = field(default=False, init=False)
    _writer: str = field(default_factory=lambda: secrets.token_hex(8))
    _seen: Leadership | None = None
    _tag: str | None = None

    def look(self, term: int) -> int:
        """Read the object; return a term for this coordinator, which is higher than that in the object.

        Args:
            term: the lowest possible term.
        """
        content = self.store.read(_NAME)
        self._seen, self._tag = (None, None) if content is None else (_decoded(content[0]), content[1])
        seen = self._seen
        return term if seen is None or seen.job != self.job else max(term, seen.term + 1)

    @property
    def other(self) -> str:
        """HOST:PORT of the coordinator that was seen to lead another job; empty for none."""
        return self._seen.address if self._seen is not None and self._seen.job != self.job else ""

    def begin(self, term: int) -> None:
        """Begin to lead a new job, even in place of an earlier one.

        Raises:
            SupersededError: another coordinator has written the object since `look`.
        """
        self._write(Leadership(self.job, self._writer, self.address, term))

    def take_over(self, term: int, following: Collection[int]) -> None:
        """Begin to lead a job in place of the coordinator in the object.

        Args:
            term: the term of this coordinator.
            following: the hosts whose agents follow it, with the newest record of the job.

        Raises:
            SupersededError: the job has continued without these hosts, another one has replaced it, or
                another coordinator has written the object since `look`.
        """
        seen = self._seen
        if seen is None or seen.job != self.job:
            self.is_replaced = True
            raise SupersededError(
                "the store no longer names the coordinator of this job, so this one ends: another job "
                "has begun with the same --checkpoint, or the object coordinator.json was removed"
            )
        if not set(seen.hosts).intersection(following):
            raise SupersededError(
                f"no host of the newest view of this job has connected here, so {seen.name} may continue it, "
                "and this one ends"
            )
        self._write(Leadership(self.job, self._writer, self.address, term, seen.view, seen.hosts))

    def begin_view(self, term: int, view: int, hosts: Collection[int]) -> None:
        """Begin a view. When this returns, its agents may learn of it.

        Args:
            term: the term of this coordinator.
            view: the number of the view.
            hosts: the hosts that have members in it.

        Raises:
            SupersededError: another coordinator has taken over the job.
        """
        self._write(Leadership(self.job, self._writer, self.address, term, view, tuple(sorted(hosts))))

    def _write(self, after: Leadership) -> None:
        try:
            tag = self.store.replace(_NAME, msgspec.json.encode(after), self._tag)
        except Conflict:
            content = self.store.read(_NAME)
            there = None if content is None else _decoded(content[0])
            if content is None or there != after:
                raise self._superseded(there) from None
            # An earlier attempt has succeeded, and its answer was lost.
            tag = content[1]
        self._seen, self._tag = after, tag

    def _superseded(self, by: Leadership | None) -> SupersededError:
        if by is None or by.job != self.job:
            self.is_replaced = True
            at = f", and its coordinator is at {by.address}" if by is not None and by.address else ""
            return SupersededError(f"another job has begun with the same --checkpoint{at}, so this one ends")
        again = (
            f"to take part again, run here: lockstep agent --join {by.address}"
            if by.address
            else "it starts an agent here again"
        )
        return SupersededError(f"{by.name} has continued this job, so this one ends; {again}")


def _decoded(data: bytes) -> Leadership:
    try:
        return msgspec.json.decode(data, type=Leadership)
    except ValueError as error:
        raise CheckpointError(f"{_NAME} in the store is damaged: {error}; remove it") from None
