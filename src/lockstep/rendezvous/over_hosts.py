"""The process of one host in a job whose workers are started by hand on several hosts.

On each host, the first process that a user starts for a task starts this one, which is the agent of the host.
It listens at the address of the host's first task. On the host of the job's first task it also coordinates
the job, and the agents of the other hosts join it there.

The port that the process of the first host has bound is the lock. The others join it as `lockstep agent
--join` joins `lockstep run --listen`. An agent sends `HostOffer`, its workers or the tasks for which a
process waits. It gets `KeepWaiting` or `Rejected`, and when the hosts are complete `Prepare`, as over ssh. An
arrival on a host joins on that host (`WorkerArrived.host`). Notes of the coordinator reach the terminals of
other hosts as `ShowNote`.
"""

import os
import signal
import socket
import sys
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from lockstep.agent.worker_output import ForwardedOutput, WorkerOutput
from lockstep.hosts.agent_process import AgentProcess, CoordinatorGone
from lockstep.hosts.facts import own_facts
from lockstep.hosts.gate import Gate
from lockstep.hosts.gathering import Stopped, turn
from lockstep.hosts.host_listener import HostListener, own_credentials
from lockstep.hosts.joining import CoordinatorAddress
from lockstep.hosts.roster import TaskRoster, by_address
from lockstep.local_job.composition import LocalHost
from lockstep.protocol.admin import StopChannel, StopRequest
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.host import BeginJob, HostFacts, HostOffer, Prepare
from lockstep.protocol.job_spec import JobSpec
from lockstep.rendezvous.addresses import check_free
from lockstep.rendezvous.job_by_hand import job_of, stopped_by_signals
from lockstep.rendezvous.processes import ExternalProcesses, Terminals
from lockstep.rendezvous.server import RendezvousServer, RendezvousStarter
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import empty_folder, temporary_folder

_PAUSE = 1.0


class _Deserted(Exception):
    """No process of this host is waiting any more."""


def serve_host(server: RendezvousServer, terminals: Terminals) -> None:
    """Run this host's part of a job until it has ended, or until no process is waiting any more.

    Raises:
        ConfigError: the tasks or the hosts do not fit together, or a port is in use.
        NetworkError: this host cannot listen.
        UnfitError: a host was lost before the job began.
        SystemExit: this process was stopped before the job began.
    """
    user, command = stopped_by_signals()
    with EventLoop() as loop:
        loop.watch(server.fileno(), server.serve)
        host = _TasksOfHost(server, terminals, loop, user, command)
        try:
            if not host.has_begun():
                return
            if 0 in server.first.here:
                host.coordinate()
            else:
                host.join()
        except _Deserted:
            return
        except Stopped as stopped:
            server.turn_away("the job was stopped before it began")
            sys.exit(128 + stopped.signal)


@dataclass
class RendezvousWorkers:
    """Workers that a user starts on this host; a `HostWorkers`.

    Attributes:
        server: the server at which their processes wait.
        paths: the paths of the folder that they share, absolute.
    """

    server: RendezvousServer
    paths: RunPaths

    def facts(self, prepare: Prepare, address: str, port: int) -> HostFacts:
        """Return the facts of this host for the script that its processes run."""
        first = self.server.first
        for_script = msgspec.structs.replace(prepare, target=first.target, module=first.module)
        arrivals = [process.arrival for process in self.server.waiting.values()]
        cores = min((arrival.cores for arrival in arrivals if arrival is not None), default=first.cores)
        return msgspec.structs.replace(own_facts(for_script, address, port), cores=cores)

    def begin(self, begin: BeginJob, output: ForwardedOutput) -> LocalHost:
        """Return a `LocalHost` that admits the processes."""
        return self.admitting(begin.spec, output)

    def need_coordinator(self) -> bool:
        """Return whether a process remains. A user who has ended all of them may start the job again."""
        return any(handle.is_running for handle in self.server.handles())

    def admitting(self, spec: JobSpec, output: WorkerOutput) -> LocalHost:
        """Return a `LocalHost` that admits the processes as workers of a job."""
        empty_folder(self.paths.sources)
        starter = RendezvousStarter(spec, self.paths, os.getpid(), self.server)
        return LocalHost(output, starter, ExternalProcesses(self.server.workers), self.server)


@dataclass
class _TasksOfHost:
    """The tasks of this host, and its part of the job."""

    server: RendezvousServer
    terminals: Terminals
    loop: EventLoop
    user: StopChannel
    command: StopChannel

    def __post_init__(self) -> None:
        self.clock = SystemClock()
        self.first = self.server.first
        self.task = self.first.tasks[self.first.here[0]]
        self.coordinator = self.first.tasks[0]
        self.failure = ""

    @cached_property
    def credentials(self) -> Credentials:
        """The credentials of this host."""
        return own_credentials(self.task.place, encrypted=True)

    def has_begun(self) -> bool:
        """Wait for the first process; return False if it leaves before its first message."""
        while not self.server.waiting:
            self._turn(None)
            if self.server.is_empty:
                return False
        return True

    def _turn(self, seconds: float | None) -> None:
        """Serve the processes of this host while it waits; raise Stopped if this process is stopped."""
        turn(self.loop, self.command, seconds)

    # The host of the coordinator.

    def coordinate(self) -> None:
        """Wait for a process per task on all hosts, or for hosts that already run the job; then run it."""
        gate = Gate(
            lambda: TaskRoster(self.first, tuple(self.server.waiting)),
            self.credentials,
            self.command,
            self.terminals,
            self.loop,
        )
        told = ("", 0)

        def wait(missing: str) -> None:
            nonlocal told
            if self.server.is_empty:
                raise _Deserted
            gate.server.keep_waiting(missing)
            if told != (told := (missing, len(self.server.waiting))):
                self.server.keep_waiting(missing)

        with closing(gate):
            check_free(self.task.place, self.task.name)
            gate.listen(self.task.place)
            self.server.tell_of_changes(lambda: None)
            gate.gather(wait)
            with job_of(self.server) as spec:
                gate.run(spec, by_hand=RendezvousWorkers(self.server, RunPaths(spec.run_dir.absolute())))

    # The other hosts.

    def join(self) -> None:
        """Join the coordinator, and run the workers of this host; repeat this if no job has begun."""
        with temporary_folder() as folder:
            while not self.server.is_empty and not self._join(folder):
                self._pause()

    def _join(self, folder: Path) -> bool:
        """Return whether a job has run."""
        check_free(self.task.place, self.task.name)
        listener = HostListener.open(
            self.task.place, self.credentials, self.terminals.say, loop=self.loop, clock=self.clock
        )
        with closing(listener):
            address = CoordinatorAddress(self.coordinator.address, self.credentials, self.loop)
            connection = self._connect(address)
            if connection is None:
                return False
            channel = address.channel(connection)

            def offer() -> None:
                slots = tuple(sorted(self.server.waiting))
                channel.send(HostOffer(len(self.first.here), by_address(self.first), slots))
                if self.server.is_empty:
                    self.user.send(StopRequest(signal.SIGTERM))

            self.server.tell_of_changes(offer)
            offer()
            process = AgentProcess(
                channel=channel,
                command=self.command,
                loop=self.loop,
                clock=self.clock,
                listen=lambda prepare: listener,
                workers=RendezvousWorkers(self.server, RunPaths(folder)),
                folder=folder,
                joined=True,
                waits=self.server.keep_waiting,
                say=self.terminals.say,
                address=address,
                first=by_address(self.first),
            )
            try:
                process.run()
            except CoordinatorGone as gone:
                if not process.begun:
                    self.failure = str(gone)
                    return False
                self.terminals.say(f"{gone}, so the job ends on this host")
            except Stopped:
                if not self.server.is_empty:
                    raise
                return False
            return True

    def _connect(self, address: CoordinatorAddress) -> socket.socket | None:
        """Return a connection to the coordinator, or None if all processes of this host leave first."""

        def tell() -> None:
            why = dialer.failure or self.failure
            self.server.keep_waiting(f"{self.coordinator}: {why}" if why else str(self.coordinator))

        dialer = address.dial(lambda: tell())
        self.server.tell_of_changes(tell)
        with closing(dialer):
            tell()
            while (connection := dialer.take()) is None:
                if self.server.is_empty:
                    return None
                self._turn(None)
            return connection

    def _pause(self) -> None:
        until = self.clock.now() + _PAUSE
        while not self.server.is_empty and (left := until - self.clock.now()) > 0:
            self._turn(left)
