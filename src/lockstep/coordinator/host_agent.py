"""The agent of a host, as seen by the coordinator of the job."""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from lockstep.observability.console import Console, Write
from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.host import UNNUMBERED, HostEnded, HostReport, Instruction, KeepAlive, PeerAddress
from lockstep.system.output import Log
from lockstep.system.paths import RunPaths


@dataclass(eq=False)
class HostAgent:
    """One agent of the job.

    A remote agent outlives the coordinator. Instructions to it have numbers and wait for `flush`, so that all
    agents keep a record of the job before they carry out the instructions that follow from it.

    Attributes:
        channel: the channel to the agent.
        name: the name of its host, for messages; empty if the job has one host.
        peer: the address for workers of other hosts; None if the job has one host.
        remote: whether it runs in another process, so that the coordinator writes the logs of its workers.
        ended: its last report, if it has ended.
        heard: the time at which its last report arrived.
        wrote: the time at which output of its workers last arrived.
        paused: its workers that wait with their output, because the terminal shows it and is slow.
        has_reported: whether it has sent all reports that the coordinator has asked for with `ReportAll`.
        received: the number of numbered reports of a remote agent that were processed.
        sent: number of numbered instructions to a remote agent.
        outbox: the last of these instructions, which the agent has not acknowledged.
        queue: the agents of the job with instructions that wait for `flush`.
        owed: the bytes of output that were processed and not yet acknowledged.
        acknowledged: the time at which reports were last acknowledged.
        alive: the time, by the agent's clock, at which it sent the newest processed `KeepAlive`.
    """

    channel: Channel[Instruction, HostReport]
    name: str = ""
    peer: PeerAddress | None = None
    remote: bool = False
    ended: HostEnded | None = None
    heard: float = 0.0
    wrote: float = 0.0
    paused: tuple[int, ...] = ()
    has_reported: bool = True
    received: int = 0
    sent: int = 0
    outbox: deque[Instruction] = field(default_factory=deque)
    queue: "dict[HostAgent, None]" = field(default_factory=dict)
    owed: int = 0
    acknowledged: float = 0.0
    alive: float = 0.0
    _waiting: int = 0

    def send(self, instruction: Instruction) -> None:
        """Send an instruction; a numbered one to a remote agent waits for `flush`."""
        if not self.remote or isinstance(instruction, UNNUMBERED):
            self.channel.send(instruction)
            return
        self.outbox.append(instruction)
        self.sent += 1
        self._waiting += 1
        self.queue[self] = None

    def flush(self) -> None:
        """Send the instructions that wait."""
        for instruction in islice(self.outbox, len(self.outbox) - self._waiting, None):
            self.channel.send(instruction)
        self._waiting = 0

    @property
    def is_gone(self) -> bool:
        """Whether the connection is closed at this end: the agent is lost, or cannot follow the record."""
        return self.ended is not None or self.channel.fileno() < 0

    def withdraw(self, instruction: Instruction) -> None:
        """Do not send an instruction, if it still waits."""
        waits = list(islice(self.outbox, len(self.outbox) - self._waiting, None))
        if instruction in waits:
            self.outbox.remove(instruction)
            self.sent -= 1
            self._waiting -= 1

    def acknowledge(self, now: float) -> None:
        """Tell a remote agent which reports it may drop, and that its messages arrive."""
        self.owed, self.acknowledged = 0, now
        self.channel.send(KeepAlive(self.received, self.alive))

    def take_over(self, received: int) -> None:
        """Send the instructions that the agent lacks again; it has the first `received` ones."""
        self._waiting = self.sent - received
        self._forget(received)
        self.flush()

    def receive(self) -> HostReport | Unreadable | PeerGone | None:
        """Return the next report, if any; see `Channel`."""
        report = self.channel.receive()
        if isinstance(report, KeepAlive):
            self.alive = report.sent
            self._forget(report.received)
        elif report is not None and not isinstance(report, (*UNNUMBERED, Unreadable, PeerGone)):
            self.received += 1
        return report

    def _forget(self, received: int) -> None:
        """Forget the instructions that the agent has acknowledged."""
        while self.sent - len(self.outbox) < received and len(self.outbox) > self._waiting:
            self.outbox.popleft()


@dataclass
class RemoteOutput:
    """The logs, and the output on the terminal, of workers on other hosts.

    Attributes:
        console: shows their output.
        paths: the paths of the run, absolute.
    """

    console: Console
    paths: RunPaths
    _open: dict[int, tuple[Log, Write, Write]] = field(default_factory=dict)

    def write(self, worker: int, descriptor: int, data: bytes) -> None:
        """Write output of a worker, from its stdout, 1, or stderr, 2."""
        log, *outlets = self._of(worker)
        log.write(data)
        outlets[descriptor == 2](data)

    def log_only(self, worker: int, text: str) -> None:
        """Append a text to the log of a worker, without showing it on the terminal."""
        self._of(worker)[0].write(text.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the logs."""
        for log, _, _ in self._open.values():
            log.close()

    def _of(self, worker: int) -> tuple[Log, Write, Write]:
        if worker not in self._open:
            log = Log.open(self.paths.log(worker), self.console.say)
            self._open[worker] = (log, *self.console.outlets(worker))
        return self._open[worker]
