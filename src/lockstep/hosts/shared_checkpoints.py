"""The checkpoint from which a job over hosts resumes: the newest one of all hosts, which every host gets.

For a script's callback in `fit`, `keras/state/checkpoint_callback.py` does the same. Both use
`checkpoint/held.py`, which chooses, and `checkpoint/hand_over.py`, which copies. Work that may take long on a
slow disk runs in a thread (`system/disk_work.py`), while agents send heartbeats, and workers meet every
second.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from lockstep.checkpoint.hand_over import ArrivingCheckpoint, held_of, newest_held, parts_of_checkpoint
from lockstep.checkpoint.held import HeldCheckpoint, choose_newest
from lockstep.checkpoint.mirror import take_lease
from lockstep.checkpoint.object_store import folder_of
from lockstep.errors import CheckpointError, LockstepError, UnfitError
from lockstep.hosts.gathering import AwaitedHost, heed_stop
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.channel import PeerGone, Unreadable
from lockstep.protocol.host import (
    ALIVE_EVERY,
    CHECKPOINT_PART,
    BeginJob,
    CheckpointPart,
    CheckpointTaken,
    HostFacts,
    KeepAlive,
    Prepare,
    RemoteInstruction,
    RemoteReport,
    SendCheckpoint,
    TakeCheckpoint,
)
from lockstep.protocol.job_spec import Checkpoints
from lockstep.system.clock import Clock
from lockstep.system.disk_work import DiskWork
from lockstep.system.event_loop import EventLoop
from lockstep.system.notes import GATHERING_NOTE_EVERY
from lockstep.system.prose import count
from lockstep.system.run_folder import claim_for_job
from lockstep.transport.stream_channel import StreamChannel

_PATIENCE = 60.0
"""Seconds without progress after which a host counts as lost."""

_AHEAD = 4 * CHECKPOINT_PART
"""Bytes that wait in memory to be sent; the rest of a checkpoint waits on the disk."""


@dataclass
class AgentCheckpoints:
    """The folder of checkpoints on the host of an agent, before the job begins.

    Attributes:
        folder: the absolute path of the folder; None if the job does not save checkpoints.
        channel: the channel to the coordinator.
        loop: the loop of the agent; turns when there is something to `advance`.
        clock: for time limits.
    """

    folder: Path | None
    channel: StreamChannel[RemoteReport, RemoteInstruction]
    loop: EventLoop
    clock: Clock
    _path: Path | None = None
    _arriving: ArrivingCheckpoint | None = None
    _leaving: Iterator[tuple[int, bytes]] | None = None
    _work: DiskWork[RemoteReport] | None = None
    _failed: Callable[[str], RemoteReport] = CheckpointTaken

    @classmethod
    def of(
        cls,
        prepare: Prepare,
        channel: StreamChannel[RemoteReport, RemoteInstruction],
        loop: EventLoop,
        clock: Clock,
    ) -> "AgentCheckpoints":
        """Return the checkpoints of a job on this host, whose current folder must be that of the job."""
        folder = folder_of(prepare.checkpoints) if prepare.checkpoints else None
        return cls(folder, channel, loop, clock)

    def describe(self, facts: HostFacts, job: bytes) -> None:
        """Lock the folder for the job, until this process ends; then send the facts with its checkpoint."""
        folder = self.folder
        if folder is None or facts.problem:
            self.channel.send(facts)
            return

        def look() -> HostFacts:
            damaged: list[str] = []
            claim_for_job(folder, job.hex(), "the folder of checkpoints", "--checkpoint")
            self._path, held = newest_held(folder, damaged.append) or (None, None)
            return msgspec.structs.replace(facts, checkpoint=held, damaged=tuple(damaged))

        self._failed = lambda why: msgspec.structs.replace(facts, problem=why)
        self._work = DiskWork(look, f"reading the checkpoints in {folder}", self.loop, self.clock)

    def serve(self, message: SendCheckpoint | TakeCheckpoint | CheckpointPart) -> None:
        """Begin to send the newest checkpoint, or write another one."""
        self._failed = CheckpointTaken
        try:
            match message:
                case SendCheckpoint():
                    assert self._path is not None
                    self._leaving = parts_of_checkpoint(self._path, CHECKPOINT_PART)
                case TakeCheckpoint(held, keep):
                    assert self.folder is not None
                    self._arriving = ArrivingCheckpoint(self.folder, held, keep)
                case CheckpointPart(file, part) if self._arriving is not None and part:
                    self._arriving.add(file, part)
                case CheckpointPart() if self._arriving is not None:
                    self._work = DiskWork(
                        partial(_completed, self._arriving), _writing(self.folder), self.loop, self.clock
                    )
        except CheckpointError as error:
            self.close()
            self.channel.send(CheckpointTaken(str(error)))

    def advance(self) -> bool:
        """Do a bounded part of the current work; return whether more can be done now."""
        try:
            if self._work is not None and self._work.is_over:
                work, self._work = self._work, None
                self.channel.send(work.result())
            if self._leaving is not None and self.channel.queued < _AHEAD:
                file, part = next(self._leaving, (0, b""))
                self.channel.send(CheckpointPart(file, part))
                self._leaving = self._leaving if part else None
        except LockstepError as error:
            self.close()
            self.channel.send(self._failed(str(error)))
        return self._leaving is not None and self.channel.queued < _AHEAD

    def close(self) -> None:
        """Remove a checkpoint that has arrived only in part."""
        self._leaving = None
        if self._work is not None:
            self._work.close()
            self._work = None
        if self._arriving is not None:
            self._arriving.discard()
            self._arriving = None

    def placed(self, begin: BeginJob) -> BeginJob:
        """Return the job with the paths of this host.

        Raises:
            CheckpointError: the folder cannot be written to.
        """
        past = begin.spec.checkpoints
        if past is None or self.folder is None:
            return begin
        resume = self.folder / past.resume.name if past.resume is not None else None
        here = replace(past, folder=self.folder, resume=resume)
        if past.store is not None:
            take_lease(self.folder, past.store, resume)
        return msgspec.structs.replace(begin, spec=replace(begin.spec, checkpoints=here))


def _completed(arriving: ArrivingCheckpoint) -> CheckpointTaken:
    arriving.complete()
    return CheckpointTaken()


def _writing(folder: Path | None) -> str:
    return f"writing a checkpoint to {folder}"


@dataclass
class SharedCheckpoints:
    """Finds the newest checkpoint of all hosts, and gives it to those that lack it.

    Attributes:
        checkpoints: the checkpoints of the job; it resumes from the newest one on this host, if there is one.
        has_workers: whether this host has workers.
        hosts: the other hosts, by their index in the job.
        facts: the facts of the hosts, by their index.
        command: the channel over which the job is stopped.
        loop: serves the channels.
        clock: for heartbeats and deadlines.
        say: shows a note.
    """

    checkpoints: Checkpoints
    has_workers: bool
    hosts: Mapping[int, AwaitedHost]
    facts: Mapping[int, HostFacts]
    command: StopChannel
    loop: EventLoop
    clock: Clock
    say: Callable[[str], None]
    _due: float = field(default=0.0, init=False)
    _said: float = field(default=0.0, init=False)

    def choose(self) -> HeldCheckpoint | None:
        """Return the newest checkpoint of all hosts, or of the store, or None if there is none.

        Raises:
            ConfigError: hosts have checkpoints of the same step of different jobs.
        """
        for host, agent in self.hosts.items():
            for text in self.facts[host].damaged:
                self.say(f"{agent.name}: {text}")
        if self.checkpoints.store is not None:
            # This host has fetched it. Other hosts may have newer ones of another job.
            return self._held_here()
        held = [self._held_here(), *(self.facts[host].checkpoint for host in self.hosts)]
        chosen = choose_newest(["this host", *(agent.name for agent in self.hosts.values())], held)
        return held[chosen] if chosen is not None else None

    def hand_over(self, chosen: HeldCheckpoint) -> None:
        """Give the newest checkpoint to all hosts with workers that lack it.

        Raises:
            CheckpointError: it cannot be written on this host, or cannot be read.
            UnfitError: a host is lost, or cannot write it.
            Stopped: the user has stopped the job.
        """
        lacking = [host for host in self.hosts if not chosen.is_same(self.facts[host].checkpoint)]
        is_here = chosen.is_same(self._held_here())
        arriving = None
        if not lacking and (is_here or not self.has_workers):
            return
        holder = next((host for host in self.hosts if host not in lacking), None)
        source = "this host" if is_here or holder is None else self.hosts[holder].name
        names = [self.hosts[host].name for host in lacking]
        if not is_here and self.has_workers:
            names.insert(0, "this host")
            arriving = ArrivingCheckpoint(self.checkpoints.folder, chosen, self.checkpoints.keep)
        self.say(
            f"the newest checkpoint, after {count(chosen.step, 'step')}, is on {source}; copying it to "
            f"{' and '.join(names)}"
        )
        self.loop.watch(self.command.fileno(), lambda: None)
        try:
            for host in lacking:
                self.hosts[host].channel.send(TakeCheckpoint(chosen, self.checkpoints.keep))
            if is_here or holder is None:
                assert self.checkpoints.resume is not None
                for file, part in parts_of_checkpoint(self.checkpoints.resume, CHECKPOINT_PART):
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
            self.loop.unwatch(self.command.fileno())

    def _held_here(self) -> HeldCheckpoint | None:
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
                raise UnfitError(
                    f"host {self.hosts[host].name} cannot receive the checkpoint: its agent is lost"
                )
        if arriving is not None:
            arriving.add(part.file, part.part)
        self._live()

    def _complete(self, arriving: ArrivingCheckpoint) -> None:
        """Complete the copy on this host; meanwhile, send heartbeats to the agents of other hosts."""
        work = DiskWork(arriving.complete, _writing(self.checkpoints.folder), self.loop, self.clock)
        with closing(work):
            begun = self.clock.now()
            while not work.is_over:
                self._wait("this host writes the checkpoint", begun)
            work.result()

    def _part(self, host: int) -> CheckpointPart:
        match self._receive(host, "reads"):
            case CheckpointPart() as part:
                return part
            case CheckpointTaken(failure):
                raise UnfitError(f"host {self.hosts[host].name}: {failure}")
            case other:
                raise UnfitError(
                    f"host {self.hosts[host].name} sent {type(other).__name__}, not a checkpoint"
                )

    def _await_taken(self, host: int) -> None:
        match self._receive(host, "writes"):
            case CheckpointTaken(failure) if failure:
                raise UnfitError(f"host {self.hosts[host].name}: {failure}")
            case CheckpointTaken():
                return
            case other:
                raise UnfitError(
                    f"host {self.hosts[host].name} sent {type(other).__name__}, not a checkpoint"
                )

    def _receive(self, host: int, action: str) -> RemoteReport:
        agent, begun = self.hosts[host], self.clock.now()
        heard, descriptor = begun, agent.channel.fileno()
        self.loop.watch(descriptor, lambda: None)
        try:
            while True:
                match agent.channel.receive():
                    case None:
                        pass
                    case PeerGone():
                        raise UnfitError(f"host {agent.name} was lost: {agent.why_lost()}")
                    case Unreadable(error):
                        raise UnfitError(f"host {agent.name} sent an invalid message ({error})")
                    case KeepAlive():
                        heard = self.clock.now()
                        continue
                    case report:
                        return report
                if self.clock.now() - heard > _PATIENCE:
                    raise UnfitError(f"host {agent.name} has sent nothing for {_PATIENCE:g} s")
                self._wait(f"{agent.name} {action} the checkpoint", begun)
        finally:
            self.loop.unwatch(descriptor)

    def _wait(self, text: str, begun: float) -> None:
        """Turn the loop once; regularly report what this waits for, and since when."""
        self._live()
        now = self.clock.now()
        if now - max(begun, self._said) >= GATHERING_NOTE_EVERY:
            self._said = now
            self.say(f"{text}, {now - begun:.0f} s")
        self.loop.turn(max(0.0, self._due - now))

    def _live(self) -> None:
        """Show the agents that this process is alive, and obey the command."""
        now = self.clock.now()
        if now < self._due:
            return
        self._due = now + ALIVE_EVERY
        for agent in self.hosts.values():
            agent.channel.send(KeepAlive())
        heed_stop(self.command)
