"""The hosts of a job: the agents that it admits, the hosts that it waits for, and their order. Pure.

Hosts that a user names do not need a roster: the job itself starts their agents, and no others can join.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from lockstep.protocol.host import HostOffer
from lockstep.protocol.job_spec import JobHost
from lockstep.protocol.rendezvous import Arrival, Task, cluster_difference, refusal
from lockstep.system.prose import count

Offers = Sequence[tuple[str, HostOffer]]
"""What agents offer, with the IP addresses of their hosts; the first one first."""


_NAMED = 4
"""The most missing tasks in a message."""
_NO_SUCH_TASK = "its message names tasks that do not exist; use one version of Lockstep on all hosts"


class RefusedOffer(NamedTuple):
    """A refused offer, by the IP address of its host, and the reason."""

    peer: str
    offer: HostOffer
    why: str


class Roster(Protocol):
    """The hosts of a job, as far as they are known.

    Attributes:
        workers: the number of workers with which the job begins.
        here: this host; None if the job has no workers here.
    """

    @property
    def workers(self) -> int: ...  # noqa: D102

    @property
    def here(self) -> JobHost | None: ...  # noqa: D102

    def objection(self, peer: str, offer: HostOffer, others: Sequence[tuple[str, HostOffer | None]]) -> str:
        """Return why an agent cannot join, or an empty string if it can.

        Args:
            peer: the IP address of its host.
            offer: its offer.
            others: the names of the other hosts that have joined, and the offers of their agents, if known.
        """

    def is_full(self, offers: Offers) -> bool:
        """Return whether the job does not need another agent."""

    def missing(self, offers: Offers, refused: Sequence[RefusedOffer]) -> str:
        """Return a text on what the job waits for, or an empty string if it can begin."""

    def name(self, peer: str, offer: HostOffer) -> str:
        """Return the name of the host of an agent."""

    def rank(self, offer: HostOffer) -> int:
        """Return the sort key of a host among the others; hosts with equal ranks keep their order."""


@dataclass(frozen=True)
class OpenRoster:
    """The hosts that arrive, until they have enough workers.

    Attributes:
        workers: see `Roster`.
        here: see `Roster`.
        address: the IP address of this host; empty if several agents may run on one host.
        tasks: the tasks of the cluster, the first of which is this process; empty without a cluster.
        waits: whether the job waits even if there are enough workers.
        limited: whether the job refuses agents that it does not need.
    """

    workers: int
    here: JobHost | None = None
    address: str = ""
    tasks: tuple[Task, ...] = ()
    waits: bool = False
    limited: bool = True

    def objection(self, peer: str, offer: HostOffer, others: Sequence[tuple[str, HostOffer | None]]) -> str:
        """See `Roster`."""
        if offer.running is not None:
            return ""
        if offer.workers < 1:
            return "it offers no worker"
        if offer.first is not None:
            return "this job does not follow TF_CONFIG: start its workers with lockstep agent --join"
        if self.tasks and offer.tasks and (why := self._objection_to_task(offer, others)):
            return why
        if self.address and peer in (self.address, *(name for name, _ in others)):
            option = "--workers-here" if offer.tasks else "-n"
            return (
                f"the job already has an agent on host {peer}: start one agent on each host, and tell it "
                f"with {option} how many workers to run"
            )
        return ""

    def _objection_to_task(self, offer: HostOffer, others: Sequence[tuple[str, HostOffer | None]]) -> str:
        if not 0 <= offer.task < len(offer.tasks):
            return _NO_SUCH_TASK
        task = offer.tasks[offer.task]
        if difference := cluster_difference(offer.tasks, self.tasks):
            return f"{task.name} and {self.tasks[0].name} have {difference}"
        # A user may add hosts that do not belong to a cluster.
        started = {self.tasks[0]: "the coordinator"}
        started |= {other.tasks[other.task]: name for name, other in others if other and other.tasks}
        return _twice(task, started[task]) if task in started else ""

    def is_full(self, offers: Offers) -> bool:
        """See `Roster`."""
        return self.limited and not self._vacancies(offers)

    def missing(self, offers: Offers, refused: Sequence[RefusedOffer]) -> str:
        """See `Roster`."""
        vacancies = self._vacancies(offers)
        if not vacancies and not self.waits:
            return ""
        started = {self.tasks[:1], *(offer.tasks[offer.task : offer.task + 1] for _, offer in offers)}
        absent = [task for task in self.tasks if (task,) not in started]
        names = ", ".join(map(str, absent[:_NAMED])) + (", ..." if len(absent) > _NAMED else "")
        text = ": ".join(filter(None, (count(vacancies, "more worker"), names)))
        # A task of another cluster may have the same name as the missing one.
        missing = {task.name for task in absent}
        whys = [
            f"{peer} was refused: {why}"
            for peer, offer, why in refused
            if 0 <= offer.task < len(offer.tasks) and offer.tasks[offer.task].name in missing
        ]
        return "; ".join((text, *whys[:1]))

    def name(self, peer: str, offer: HostOffer) -> str:
        """See `Roster`."""
        return peer

    def rank(self, offer: HostOffer) -> int:
        """See `Roster`."""
        return offer.task if offer.tasks else sys.maxsize

    def _vacancies(self, offers: Offers) -> int:
        """Return the number of workers that do not have a host yet."""
        here = self.here.workers if self.here is not None else 0
        return max(0, self.workers - here - sum(offer.workers for _, offer in offers))


@dataclass(frozen=True)
class TaskRoster:
    """The hosts of the tasks of a `TF_CONFIG`, whose processes a user starts by hand.

    Attributes:
        first: an arrival on this host.
        waiting: the tasks of this host for which a process waits.
    """

    first: Arrival
    waiting: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """The number of tasks."""
        return len(self.first.tasks)

    @property
    def here(self) -> JobHost:
        """This host."""
        return JobHost(_host_of(self.first.tasks[self.first.here[0]]), len(self.first.here))

    def objection(self, peer: str, offer: HostOffer, others: Sequence[tuple[str, HostOffer | None]]) -> str:
        """See `Roster`."""
        if offer.first is None:
            return "this job follows TF_CONFIG: set it on this host too, and start the program with python"
        tasks, here = len(offer.first.tasks), offer.first.here
        if not here or offer.first.slot not in here or not {*here, *offer.slots} <= {*range(tasks)}:
            return _NO_SUCH_TASK
        if reason := refusal(by_address(self.first), offer.first, None):
            return reason
        claims = [("the host of the coordinator", self.first)]
        claims += [(name, other.first) for name, other in others if other is not None and other.first]
        for name, claim in claims:
            if both := sorted({*claim.here}.intersection(here)):
                return _twice(self.first.tasks[both[0]], name)
        return ""

    def is_full(self, offers: Offers) -> bool:
        """See `Roster`."""
        return False

    def missing(self, offers: Offers, refused: Sequence[RefusedOffer]) -> str:
        """Return the names of the tasks without a process."""
        firsts = [offer.first for _, offer in offers if offer.first is not None]
        started = {*self.waiting, *(slot for _, offer in offers for slot in offer.slots)}
        connected = {*self.first.here, *(slot for first in firsts for slot in first.here)}
        missing = [slot for slot in range(self.workers) if slot not in started]
        text = ", ".join(str(self.first.tasks[slot]) for slot in missing)
        if connected.issuperset(missing):
            return text
        whys = {offer.first.slot: f"{peer} was refused: {why}" for peer, offer, why in refused if offer.first}
        if tasks := [slot for slot in missing if slot in whys]:
            return f"{text}; {whys[tasks[0]]}"
        address = self.first.tasks[0].address
        port = address.rpartition(":")[2]
        return (
            f"{text}; no process of its host has connected to {address} yet (a firewall must let TCP "
            f"connections to port {port} through)"
        )

    def name(self, peer: str, offer: HostOffer) -> str:
        """See `Roster`."""
        return _host_of(self.first.tasks[self.rank(offer)])

    def rank(self, offer: HostOffer) -> int:
        """See `Roster`."""
        assert offer.first is not None
        return min(offer.first.here)


def _twice(task: Task, where: str) -> str:
    return (
        f"{task} already runs on {where}: start each task once, on the host with its address, and give each "
        "host its own address"
    )


def by_address(arrival: Arrival) -> Arrival:
    """Return an arrival whose places are the addresses: hosts may resolve their own names differently."""
    tasks = tuple(Task(task.kind, task.index, task.address, task.address) for task in arrival.tasks)
    return msgspec.structs.replace(arrival, tasks=tasks)


def _host_of(task: Task) -> str:
    return task.address.rpartition(":")[0].strip("[]")


def placed(roster: Roster, offers: Offers) -> tuple[tuple[JobHost, ...], tuple[int, ...]]:
    """Return the hosts of a job that can begin, this one first, and the indices of the offers of the others.

    The last host may get fewer workers than it has offered.
    """
    hosts = [roster.here] if roster.here is not None else []
    order = sorted(range(len(offers)), key=lambda at: roster.rank(offers[at][1]))
    for at in order:
        name = roster.name(*offers[at])
        if any(host.name == name for host in hosts):
            name = f"{name} ({len(hosts) + 1})"
        vacancies = roster.workers - sum(host.workers for host in hosts)
        hosts.append(JobHost(name, min(vacancies, offers[at][1].workers)))
    return tuple(hosts), tuple(order)
