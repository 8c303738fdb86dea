"""The checkpoint from which a job over hosts resumes: the newest of all hosts, which the others get."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lockstep.checkpoint.hand_over import ArrivingCheckpoint, held_of, newest_held, parts_of_checkpoint
from lockstep.checkpoint.held import HeldCheckpoint, choose_newest
from lockstep.errors import CheckpointError, LockstepError, UnfitError
from lockstep.hosts.gathering import AwaitedHost, Stopped
from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.host import (
    ALIVE_EVERY,
    STATE_PART,
    BeginJob,
    CheckpointPart,
    CheckpointTaken,
    HostFacts,
    KeepAlive,
    Prepare,
    RemoteInstruction,
    RemoteReport,
    SendCheckpoint,
    Stop,
    TakeCheckpoint,
)
from lockstep.system.clock import Clock
from lockstep.system.environment import Checkpoints
from lockstep.system.event_loop import EventLoop
from lockstep.system.prose import count
from lockstep.system.run_folder import claim_for_job
from lockstep.transport.stream_channel import StreamChannel

_PATIENCE = 60.0
"""Seconds without progress after which a host counts as lost."""

Resume = Callable[[HeldCheckpoint], Checkpoints]


@dataclass
class AgentCheckpoints:
    """The folder of checkpoints on the host of an agent, before the job begins.

    Attributes:
        folder: absolute; None if the job saves no checkpoints.
    """

    folder: Path | None
    _path: Path | None = None
    _arriving: ArrivingCheckpoint | None = None

    @classmethod
    def of(cls, prepare: Prepare) -> "AgentCheckpoints":
        """Return the folder of a job; the current folder must be that of the job."""
        return cls(Path(prepare.checkpoints).absolute() if prepare.checkpoints else None)

    def describe(self, facts: HostFacts, job: bytes) -> HostFacts:
        """Lock the folder for the job, until this process ends; return the facts with its checkpoint."""
        if self.folder is None or facts.problem:
            return facts
        damaged: list[str] = []
        try:
            claim_for_job(self.folder, job.hex(), "the folder of checkpoints", "--checkpoint")
            found = newest_held(self.folder, damaged.append)
        except LockstepError as error:
            return msgspec.structs.replace(facts, problem=str(error))
        self._path, held = found or (None, None)
        return msgspec.structs.replace(facts, checkpoint=held, damaged=tuple(damaged))

    def serve(
        self,
        message: SendCheckpoint | TakeCheckpoint | CheckpointPart,
        channel: StreamChannel[RemoteReport, RemoteInstruction],
    ) -> None:
        """Send the newest checkpoint, or write another one."""
        try:
            match message:
                case SendCheckpoint():
                    assert self._path is not None
                    for file, part in parts_of_checkpoint(self._path, STATE_PART):
                        # The rest waits on the disk, not in memory.
                        if not (channel.send(CheckpointPart(file, part)) and channel.flush(_PATIENCE)):
                            return
                    channel.send(CheckpointPart(0, b""))
                case TakeCheckpoint(held, keep):
                    assert self.folder is not None
                    self._arriving = ArrivingCheckpoint(self.folder, held, keep)
                case CheckpointPart(file, part) if self._arriving is not None:
                    if part:
                        self._arriving.add(file, part)
                    else:
                        self._arriving.complete()
                        channel.send(CheckpointTaken())
        except CheckpointError as error:
            self.close()
            channel.send(CheckpointTaken(str(error)))

    def close(self) -> None:
        """Remove a checkpoint of which only parts have arrived."""
        if self._arriving is not None:
            self._arriving.discard()
            self._arriving = None

    def placed(self, begin: BeginJob) -> BeginJob:
        """Return the job with the paths of this host."""
        past = begin.spec.checkpoints
        if past is None or self.folder is None:
            return begin
        resume = self.folder / past.resume.name if past.resume is not None else None
        own = replace(past, folder=self.folder, resume=resume)
        return msgspec.structs.replace(begin, spec=replace(begin.spec, checkpoints=own))


@dataclass
class SharedCheckpoints:
    """Finds the newest checkpoint of all hosts, and gives it to those that lack it.

    Attributes:
        checkpoints: of the job; it resumes from the newest one on this host, if there is one.
        has_workers: whether this host has workers.
        hosts: the other hosts, by their index in the job.
        facts: of the hosts, by their index.
        command: the channel over which the job is stopped.
        loop: serves the channels.
        clock: for signs of life and deadlines.
        say: shows a note.
    """

    checkpoints: Checkpoints
    has_workers: bool
    hosts: Mapping[int, AwaitedHost]
    facts: Mapping[int, HostFacts]
    command: Channel[Stop, Stop]
    loop: EventLoop
    clock: Clock
    say: Callable[[str], None]
    _due: float = field(default=0.0, init=False)

    def choose(self) -> HeldCheckpoint | None:
        """Return the newest checkpoint of all hosts; None if there is none.

        Raises:
            ConfigError: hosts have checkpoints of different trainings, of the same step.
        """
        for host, agent in self.hosts.items():
            for text in self.facts[host].damaged:
                self.say(f"{agent.name}: {text}")
        held = [self._own(), *(self.facts[host].checkpoint for host in self.hosts)]
        chosen = choose_newest(["this host", *(agent.name for agent in self.hosts.values())], held)
        return held[chosen] if chosen is not None else None

    def hand_over(self, chosen: HeldCheckpoint) -> None:
        """Give a checkpoint, the newest one, to all hosts with workers that lack it.

        Raises:
            CheckpointError: it cannot be written on this host, or cannot be read.
            UnfitError: a host is lost, or cannot write it.
            Stopped: the user has stopped the job.
        """
        lacking = [host for host in self.hosts if not chosen.is_same(self.facts[host].checkpoint)]
        own = chosen.is_same(self._own())
        arriving = None
        if not lacking and (own or not self.has_workers):
            return
        holder = next((host for host in self.hosts if host not in lacking), None)
        source = "this host" if own or holder is None else self.hosts[holder].name
        names = [self.hosts[host].name for host in lacking]
        if not own and self.has_workers:
            names.insert(0, "this host")
            arriving = ArrivingCheckpoint(self.checkpoints.folder, chosen, self.checkpoints.keep)
        self.say(
            f"the newest checkpoint, after {count(chosen.step, 'step')}, is on {source}; copying it to "
            f"{' and '.join(names)}"
        )
        watched = [self.command.fileno(), *(agent.channel.fileno() for agent in self.hosts.values())]
        for descriptor in watched:
            self.loop.watch(descriptor, lambda: None)
        try:
            for host in lacking:
                self.hosts[host].channel.send(TakeCheckpoint(chosen, self.checkpoints.keep))
            if own or holder is None:
                assert self.checkpoints.resume is not None
                for file, part in parts_of_checkpoint(self.checkpoints.resume, STATE_PART):
                    self._give(lacking, arriving, CheckpointPart(file, part))
            else:
                self.hosts[holder].channel.send(SendCheckpoint())
                while (part_of := self._part(holder)).part:
                    self._give(lacking, arriving, part_of)
            self._give(lacking, None, CheckpointPart(0, b""))
            if arriving is not None:
                self._complete(arriving)
            for host in lacking:
                self._await_taken(host)
        finally:
            if arriving is not None:
                arriving.discard()
            for descriptor in watched:
                self.loop.unwatch(descriptor)

    def _own(self) -> HeldCheckpoint | None:
        return held_of(self.checkpoints.resume) if self.checkpoints.resume is not None else None

    def _give(
        self, lacking: Sequence[int], arriving: ArrivingCheckpoint | None, part: CheckpointPart
    ) -> None:
        for host in lacking:
            channel, begun = self.hosts[host].channel, self.clock.now()
            assert isinstance(channel, StreamChannel)
            sent = channel.send(part)
            while sent and not channel.flush(ALIVE_EVERY):
                self._live()
                sent = self.clock.now() - begun < _PATIENCE
            if not sent:
                raise UnfitError(f"host {self.hosts[host].name} takes no checkpoint: its agent is lost")
        if arriving is not None:
            arriving.add(part.file, part.part)
        self._live()

    def _complete(self, arriving: ArrivingCheckpoint) -> None:
        """Complete a copy on this host; the agents of others expect signs of life while the disk writes."""
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(arriving.complete)
            while not wait([done], ALIVE_EVERY).done:
                self._live()
            done.result()

    def _part(self, host: int) -> CheckpointPart:
        match self._receive(host):
            case CheckpointPart() as part:
                return part
            case CheckpointTaken(failure):
                raise UnfitError(f"host {self.hosts[host].name}: {failure}")
            case other:
                raise UnfitError(
                    f"host {self.hosts[host].name} sent {type(other).__name__}, not a checkpoint"
                )

    def _await_taken(self, host: int) -> None:
        match self._receive(host):
            case CheckpointTaken(failure) if failure:
                raise UnfitError(f"host {self.hosts[host].name}: {failure}")
            case CheckpointTaken():
                return
            case other:
                raise UnfitError(
                    f"host {self.hosts[host].name} sent {type(other).__name__}, not a checkpoint"
                )

    def _receive(self, host: int) -> RemoteReport:
        agent, begun = self.hosts[host], self.clock.now()
        while True:
            match agent.channel.receive():
                case None:
                    pass
                case PeerGone():
                    raise UnfitError(f"host {agent.name} was lost: {agent.why_lost()}")
                case Unreadable(error):
                    raise UnfitError(f"host {agent.name} sent an invalid message ({error})")
                case KeepAlive():
                    begun = self.clock.now()
                    continue
                case report:
                    return report
            self._live()
            if self.clock.now() - begun > _PATIENCE:
                raise UnfitError(f"host {agent.name} has sent nothing for {_PATIENCE:g} s")
            self.loop.turn(max(0.0, self._due - self.clock.now()))

    def _live(self) -> None:
        """Show the agents that this process lives, and obey the command."""
        now = self.clock.now()
        if now < self._due:
            return
        self._due = now + ALIVE_EVERY
        for agent in self.hosts.values():
            agent.channel.send(KeepAlive())
        match self.command.receive():
            case Stop(signal):
                raise Stopped(signal)
            case PeerGone():
                raise Stopped(0)
