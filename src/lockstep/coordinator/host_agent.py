"""The agent of a host, as seen by the coordinator of the job."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.observability.console import Console, Write
from lockstep.protocol.channel import Channel
from lockstep.protocol.host import HostEnded, HostReport, Instruction
from lockstep.system.output import Log
from lockstep.system.paths import RunPaths


class PeerAddress(NamedTuple):
    """Where an agent accepts connections of workers on other hosts, and its incarnation."""

    address: str
    port: int
    incarnation: int


@dataclass
class HostAgent:
    """One agent of the job.

    Attributes:
        channel: to the agent.
        name: of its host, for messages; empty if the job has one host.
        peer: where workers of other hosts connect; None if the job has one host.
        remote: whether it runs on another host, so that the coordinator writes the logs of its workers.
        ended: its last report, once it has ended.
        heard: when its last report arrived.
        wrote: when output of its workers last arrived.
        paused: its workers that wait with their output, because the terminal shows it and is slow.
        has_reported: whether it has sent all reports that the coordinator has asked for with `ReportAll`.
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


@dataclass
class RemoteOutput:
    """The logs, and the place on the terminal, of workers on other hosts.

    Attributes:
        console: shows their output.
        paths: of the run, absolute.
    """

    console: Console
    paths: RunPaths
    _open: dict[int, tuple[Log, Write, Write]] = field(default_factory=dict)

    def write(self, worker: int, descriptor: int, data: bytes) -> None:
        """Write what a worker has written to its stdout, 1, or stderr, 2."""
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
