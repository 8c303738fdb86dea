"""Admits hosts to a running job: new hosts, and lost hosts that return.

They get a new index. Their agents answer `Prepare` with facts, which must equal those of the first host, and
`HostJoined` gives their slots to supervision. Workers start where a host has free slots; `lockstep scale`
adds slots where each gets the most cores. A joiner compares its host's report with that of a member, which
travels with the position (`keras/host_report.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from lockstep.errors import ConfigError, UnfitError
from lockstep.hosts.facts import check_facts, check_standby
from lockstep.hosts.gathering import AwaitedHost
from lockstep.hosts.keeper import ConnectedHost
from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.host import (
    ALIVE_EVERY,
    SILENCE,
    BeginJob,
    HostFacts,
    HostReport,
    Instruction,
    KeepAlive,
    PeerAddress,
    Prepare,
)
from lockstep.protocol.job_spec import JobHost, JobSpec
from lockstep.protocol.rendezvous import KeepWaiting, Rejected
from lockstep.system import disk_work
from lockstep.system.clock import Clock
from lockstep.system.event_loop import EventLoop
from lockstep.system.notes import GATHERING_NOTE_EVERY

_PATIENCE = 120.0
"""Seconds without a message from an agent that describes its host."""
FIRST_PAUSE = SILENCE + 1.0
"""Seconds until a lost host is asked to come back: by then, its old agent has ended all processes there."""
LONGEST_PAUSE = 60.0


@dataclass
class _Candidate:
    """A host whose agent is connected, and has not described it yet."""

    host: AwaitedHost
    workers: int
    begun: float
    until: float
    due: float


@dataclass
class _Absent:
    """A lost host that may return."""

    workers: int
    pause: float
    due: float
    noted: bool = False


@dataclass
class Newcomers:
    """Admits hosts to a running job.

    Attributes:
        spec: the job, as it began.
        prepare: the first message to each agent.
        facts: the facts of the first host of the job; others must have the same.
        say: shows a note.
        loop: serves the agents.
        clock: for deadlines.
        start: starts the agent of a host with this name; None if agents join by themselves.
    """

    spec: JobSpec
    prepare: Prepare
    facts: HostFacts
    say: Callable[[str], None]
    loop: EventLoop
    clock: Clock
    start: Callable[[str], AwaitedHost] | None = None
    _admit: Callable[[ConnectedHost], None] | None = None
    _is_over: Callable[[], bool] = lambda: True
    _leads: Callable[[], bool] = lambda: False
    _hosts: dict[int, tuple[str, range]] = field(default_factory=dict)
    _candidates: list[_Candidate] = field(default_factory=list)
    _absent: dict[str, _Absent] = field(default_factory=dict)
    _alive_due: float = 0.0

    def __post_init__(self) -> None:
        first = 0
        for host, (name, workers) in enumerate(self.spec.hosts):
            self._hosts[host] = name, range(first, first + workers)
            first += workers
        self._count = len(self._hosts)

    def serve(
        self,
        admit: Callable[[ConnectedHost], None],
        is_over: Callable[[], bool],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin to admit hosts.

        Args:
            admit: lets a host take part in the job.
            is_over: returns whether the end of the job is decided.
            leads: returns whether the coordinator of this process leads the job.
        """
        self._admit, self._is_over, self._leads = admit, is_over, leads
        self.loop.before_each_wait(self._tend)

    def close(self) -> None:
        """Close the connections to agents that have not become part of the job."""
        for candidate in list(self._candidates):
            self._drop(candidate)

    @property
    def names(self) -> list[str]:
        """The names of the hosts that take part, or are about to."""
        there = [name for name, _ in self._hosts.values()]
        return there + [candidate.host.name for candidate in self._candidates]

    @property
    def job_is_led(self) -> bool:
        """Whether the coordinator of this process leads the job. Until it knows, another one may."""
        return self._leads()

    def free_name(self, name: str) -> str:
        """Return a name that no host has, because several hosts may be on the loopback device."""
        names = self.names
        numbers = ("", *(f" ({number})" for number in range(2, len(names) + 3)))
        return next(name + number for number in numbers if name + number not in names)

    def consider(self, host: AwaitedHost, workers: int) -> None:
        """Admit a host whose agent is connected, if it fits the job. Workers without a replica are idle."""
        now = self.clock.now()
        candidate = _Candidate(
            host, min(workers, self.spec.replicas), now, until=now + _PATIENCE, due=now + GATHERING_NOTE_EVERY
        )
        self._candidates.append(candidate)
        host.channel.send(self.prepare)
        self.loop.watch(host.channel.fileno(), partial(self._hear, candidate))

    def _hear(self, candidate: _Candidate) -> None:
        host = candidate.host
        while (report := host.channel.receive()) is not None:
            match report:
                case HostFacts():
                    self._judge(candidate, report)
                    return
                case KeepAlive():
                    # It may be reading a large checkpoint.
                    latest = candidate.begun + disk_work.PATIENCE
                    candidate.until = min(self.clock.now(), latest) + _PATIENCE
                case PeerGone():
                    self._refuse(candidate, host.why_lost())
                    return
                case Unreadable(error):
                    self._refuse(candidate, f"it sent an invalid message: {error}")
                    return

    def _judge(self, candidate: _Candidate, facts: HostFacts) -> None:
        host = candidate.host
        newcomer = JobHost(host.name, candidate.workers)
        if self._is_over():
            host.channel.send(Rejected("the job is ending", again=True))
            self._drop(candidate)
            return
        try:
            check_facts((self.spec.hosts[0], newcomer), (self.facts, facts), self.spec.target)
            check_standby(self.spec.standby, (newcomer,), (facts,))
        except ConfigError as error:
            host.channel.send(Rejected(str(error), again=True))
            self._refuse(candidate, str(error))
            return
        self._candidates.remove(candidate)
        self._absent.pop(host.name, None)
        self.loop.unwatch(host.channel.fileno())
        self._begin(host, candidate.workers, facts)

    def _begin(self, host: AwaitedHost, workers: int, facts: HostFacts) -> None:
        index, first = self._count, self._free_slots(workers)
        self._count += 1
        self._hosts[index] = host.name, range(first, first + workers)
        host.channel.send(
            BeginJob(replace(self.spec, inherited=()), index, JobHost(host.name, workers), first)
        )
        # From now on, both ends use only these messages.
        channel = cast("Channel[Instruction, HostReport]", host.channel)
        peer = PeerAddress(facts.address, facts.port, facts.incarnation)
        assert self._admit is not None
        self._admit(ConnectedHost(host.name, peer, workers, facts.cores, channel))

    def _free_slots(self, workers: int) -> int:
        """Return the first slot of a free range of this size."""
        taken = {slot for _, slots in self._hosts.values() for slot in slots}
        starts = (0, *(slot + 1 for slot in sorted(taken)))
        return next(start for start in starts if taken.isdisjoint(range(start, start + workers)))

    def note_loss(self, host: int) -> None:
        """Expect a lost host to return."""
        name, slots = self._hosts.pop(host)
        if self.start is not None:
            self._absent[name] = _Absent(len(slots), FIRST_PAUSE, self.clock.now() + FIRST_PAUSE)

    def _refuse(self, candidate: _Candidate, why: str) -> None:
        name = candidate.host.name
        absent = self._absent.get(name)
        self._drop(candidate)
        if absent is None:
            self.say(f"the agent of {name} cannot join: {why}")
            return
        absent.pause = min(2 * absent.pause, LONGEST_PAUSE)
        absent.due = self.clock.now() + absent.pause
        if not absent.noted:
            absent.noted = True
            self.say(f"host {name} has not come back yet: {why}; the job continues to try")

    def _drop(self, candidate: _Candidate) -> None:
        self._candidates.remove(candidate)
        self.loop.unwatch(candidate.host.channel.fileno())
        candidate.host.channel.close()

    def _tend(self) -> float | None:
        """Start agents that are due, and show preparing agents that this process is alive."""
        now = self.clock.now()
        if self._is_over():
            return None
        for name, absent in self._absent.items():
            if now >= absent.due:
                absent.due = now + 2 * _PATIENCE
                self._call(name, absent.workers)
        if self._candidates and now >= self._alive_due:
            self._alive_due = now + ALIVE_EVERY
            for candidate in list(self._candidates):
                candidate.host.channel.send(KeepAlive())
                if now >= candidate.until:
                    self._refuse(candidate, f"no answer within {now - candidate.begun:.0f} s")
                elif now >= candidate.due:
                    candidate.due = now + GATHERING_NOTE_EVERY
                    self._note_wait(candidate, now)
        dues = [absent.due for absent in self._absent.values()]
        dues += [self._alive_due] if self._candidates else []
        return min(dues) - now if dues else None

    def _note_wait(self, candidate: _Candidate, now: float) -> None:
        """Tell both ends what the job waits for, unless they know that it keeps trying."""
        absent = self._absent.get(candidate.host.name)
        if absent is None or not absent.noted:
            awaited = (
                f"the agent of {candidate.host.name} to describe its host, {now - candidate.begun:.0f} s"
            )
            candidate.host.channel.send(KeepWaiting(awaited))
            self.say(f"waiting for {awaited}")

    def _call(self, name: str, workers: int) -> None:
        assert self.start is not None
        try:
            self.consider(self.start(name), workers)
        except UnfitError as error:
            self.say(f"host {name} cannot come back: {error}")
