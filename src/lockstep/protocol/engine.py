"""The messages between an engine and the processes of a job that it starts.

An engine finds hosts, starts an agent on each, and keeps one coordinator alive. A process that it starts has
a socket to the part of the engine on its host. The key of the job travels only over this socket.
"""

import msgspec

HOLD = 6.0
"""Seconds for which hosts train without an answer from the coordinator: an engine may start another."""


class StartCoordinator(msgspec.Struct, frozen=True, tag="start_coordinator"):
    """Coordinate the job; the first message to its coordinator.

    Attributes:
        key: the key of the job.
        address: HOST:PORT to listen at; port 0 means any free one.
        again: whether the engine has already started a coordinator of this job, so that agents may be running
            it.
        lease: see `LeaseRenewed`; None for a coordinator that is the only one while it runs.
    """

    key: str
    address: str
    again: bool
    lease: float | None = None


class LeaseRenewed(msgspec.Struct, frozen=True, tag="lease_renewed"):
    """For now, the engine does not start another coordinator.

    Attributes:
        until: the time at which this coordinator must have stopped coordinating, by the monotonic clock of
            the machine.
    """

    until: float


class WorkersFound(msgspec.Struct, frozen=True, tag="workers_found"):
    """This many workers fit on the engine's present hosts: a job can begin with them.

    Attributes:
        workers: the number of workers; 0 if there are none yet.
    """

    workers: int


class StartAgent(msgspec.Struct, frozen=True, tag="start_agent"):
    """Run workers of the job on this host; the first message to an agent.

    Attributes:
        key: the key of the job.
        coordinator: HOST:PORT of the coordinator.
        workers: the number of workers that this host offers.
        address: the address of this host, to which the workers of other hosts connect.
        inherited: descriptors of the agent that its workers inherit; their last arguments are the numbers.
    """

    key: str
    coordinator: str
    workers: int
    address: str
    inherited: tuple[int, ...] = ()


class CoordinatorMoved(msgspec.Struct, frozen=True, tag="moved"):
    """Another coordinator, which the engine has started, is at this address: HOST:PORT."""

    address: str


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """The host of this agent is about to leave, so its workers leave at the end of a step.

    Attributes:
        reason: the reason, for the user.
    """

    reason: str


class CoordinatorListens(msgspec.Struct, frozen=True, tag="listens"):
    """The coordinator listens for agents at this address: HOST:PORT."""

    address: str


class LeaseOver(msgspec.Struct, frozen=True, tag="lease_over"):
    """The coordinator ends because its lease is over; the job does not end."""


class EndKnown(msgspec.Struct, frozen=True, tag="end_known"):
    """The coordinator has told an agent that the job ends, with this exit status."""

    status: int


EngineCommand = StartCoordinator | LeaseRenewed | WorkersFound | StartAgent | CoordinatorMoved | Retire
EngineReport = CoordinatorListens | LeaseOver | EndKnown
