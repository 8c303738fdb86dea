"""The process of one host in a job whose workers are started by hand on several hosts.

On each host, the first process that a user starts for a task starts this one, which is the agent of the host.
It listens at the address of the host's first task. On the host of the job's first task it also coordinates
the job, and the agents of the other hosts join it there.

The port that the process of the first host has bound is the lock. The others join it as `lockstep agent
--join` joins `lockstep run --listen`. An agent sends `HostOffer`, its workers or the tasks for which a
process waits. It gets `KeepWaiting` or `Rejected`, and once the hosts are complete `Prepare`, as over ssh.
An arrival on a host joins on that host (`WorkerArrived.host`). Notes of the coordinator reach the terminals
of other hosts as `ShowNote`.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType

import msgspec

from lockstep.agent.worker_output import ForwardedOutput, WorkerOutput
from lockstep.hosts.agent_process import AgentProcess, CoordinatorGone
from lockstep.hosts.agent_server import AgentServer, JoiningAgent
from lockstep.hosts.facts import own_facts
from lockstep.hosts.gathering import AwaitedHost, Stopped
from lockstep.hosts.host_listener import HostListener, own_credentials
from lockstep.hosts.job_on_hosts import JobOnHosts, ThisHost, first_message
from lockstep.hosts.joining import CoordinatorAddress
from lockstep.hosts.newcomers import Newcomers
from lockstep.hosts.takeover import LEFT_BEHIND, TakenOverJob, running_jobs, wait_for_hosts
from lockstep.local_job.composition import LocalHost
from lockstep.protocol.channel import Channel
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.host import (
    BeginJob,
    HostFacts,
    HostOffer,
    Prepare,
    Stop,
)
from lockstep.protocol.job_spec import JobHost, JobSpec
from lockstep.protocol.rendezvous import Arrival, Task, refusal
from lockstep.rendezvous.addresses import check_free
from lockstep.rendezvous.processes import ExternalProcesses, Terminals
from lockstep.rendezvous.server import RendezvousServer, RendezvousStarter
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import (
    claim_folder,
    empty_folder,
    fresh_folder,
    leave_folder,
    temporary_folder,
)
from lockstep.transport.local_channel import LocalChannel

TIMEOUT = 600.0
_PAUSE = 1.0


def serve_host(server: RendezvousServer, terminals: Terminals) -> None:
    """Run this host's part of a job until it has ended, or until no process remains that waits.

    Raises:
        ConfigError: the tasks or the hosts do not fit together, or a port is in use.
        NetworkError: this host cannot listen.
        UnfitError: a host was lost before the job began.
        SystemExit: this process was stopped before the job began.
    """
    user, command = LocalChannel.pair()

    def pass_on(number: int, frame: FrameType | None) -> None:
        user.send(Stop(number))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
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
        except Stopped as stopped:
            server.turn_away("the job was stopped before it began")
            sys.exit(128 + stopped.signal)


def missing_tasks(
    first: Arrival, waiting: Sequence[int], agents: Sequence[HostOffer], refused: Mapping[int, str]
) -> str:
    """Name the tasks that no process has been started for; empty if there are none.

    Args:
        first: an arrival on the coordinator's host.
        waiting: the tasks of that host for which a process waits.
        agents: what the agents of other hosts offer.
        refused: for tasks of which a process was refused, by whom and why.
    """
    there = {*waiting, *(slot for offer in agents for slot in offer.slots)}
    connected = {*first.here, *(slot for offer in agents if offer.first for slot in offer.first.here)}
    missing = [slot for slot, _ in enumerate(first.tasks) if slot not in there]
    text = ", ".join(str(first.tasks[slot]) for slot in missing)
    if all(slot in connected for slot in missing):
        return text
    if whys := [refused[slot] for slot in missing if slot in refused]:
        return f"{text}; {whys[0]}"
    address = first.tasks[0].address
    port = address.rpartition(":")[2]
    return (
        f"{text}; no process of its host has connected to {address} yet (a firewall must let TCP "
        f"connections to port {port} through)"
    )


def objection(first: Arrival, offer: HostOffer, peer: str, others: Sequence[tuple[str, HostOffer]]) -> str:
    """Return why the agent of a host cannot take part; empty if it can.

    Args:
        first: an arrival on the coordinator's host.
        offer: of the agent.
        peer: the IP address of its host.
        others: addresses of other hosts, and what their agents offer.
    """
    if offer.first is None:
        return "this job follows TF_CONFIG: set it on this host too, and start the program with python"
    tasks, own = len(offer.first.tasks), offer.first.here
    if not own or offer.first.slot not in own or not {*own, *offer.slots} <= {*range(tasks)}:
        return "its message names tasks that do not exist; use one version of Lockstep on all hosts"
    if reason := refusal(by_address(first), offer.first, None):
        return reason
    claims = [("the host of the coordinator", first), *((name, other.first) for name, other in others)]
    for name, claim in claims:
        if claim is not None and (both := sorted({*claim.here}.intersection(offer.first.here))):
            task = first.tasks[both[0]]
            return (
                f"{task} is on two hosts, {name} and {peer}: both have its address; give each host an "
                "address of its own"
            )
    return ""


def by_address(arrival: Arrival) -> Arrival:
    """Return an arrival whose places are the addresses: hosts may resolve their own names differently."""
    tasks = tuple(Task(task.kind, task.index, task.address, task.address) for task in arrival.tasks)
    return msgspec.structs.replace(arrival, tasks=tasks)


@dataclass
class RendezvousWorkers:
    """Workers that a user starts on this host; a `HostWorkers`.

    Attributes:
        server: where their processes wait.
        paths: of the folder that they share, absolute.
    """

    server: RendezvousServer
    paths: RunPaths

    def facts(self, prepare: Prepare, address: str, port: int) -> HostFacts:
        """Return the facts of this host for the script that its processes run."""
        first = self.server.first
        own = msgspec.structs.replace(prepare, target=first.target, module=first.module)
        arrivals = [process.arrival for process in self.server.waiting.values()]
        cores = min((arrival.cores for arrival in arrivals if arrival is not None), default=first.cores)
        return msgspec.structs.replace(own_facts(own, address, port), cores=cores)

    def begin(self, begin: BeginJob, output: ForwardedOutput) -> LocalHost:
        """Return what admits the processes."""
        return self.admitting(begin.spec, output)

    def need_coordinator(self) -> bool:
        """Return whether a process remains; a user who has ended all of them may start the job anew."""
        return any(handle.is_running for handle in self.server.handles())

    def admitting(self, spec: JobSpec, output: WorkerOutput) -> LocalHost:
        """Return what admits the processes as workers of a job."""
        empty_folder(self.paths.sources)
        starter = RendezvousStarter(spec, self.paths, os.getpid(), self.server)
        return LocalHost(output, starter, ExternalProcesses(self.server.workers), self.server)


@dataclass
class _TasksOfHost:
    """The tasks of this host, and its part of the job."""

    server: RendezvousServer
    terminals: Terminals
    loop: EventLoop
    user: Channel[Stop, Stop]
    command: Channel[Stop, Stop]

    def __post_init__(self) -> None:
        self.clock = SystemClock()
        self.first = self.server.first
        self.own = self.first.tasks[self.first.here[0]]
        self.coordinator = self.first.tasks[0]
        self.failure = ""
        self.refused: dict[int, str] = {}

    @cached_property
    def credentials(self) -> Credentials:
        """Those of this host."""
        return own_credentials(self.own.place, encrypted=True)

    def has_begun(self) -> bool:
        """Wait for the first process; return False if it leaves before it says what it is."""
        while not self.server.waiting:
            self._turn(None)
            if self.server.is_empty:
                return False
        return True

    def _turn(self, seconds: float | None) -> None:
        """Serve the processes of this host while it waits; raise Stopped if this process is stopped."""
        self.loop.watch(self.command.fileno(), lambda: None)
        try:
            self.loop.turn(seconds)
        finally:
            self.loop.unwatch(self.command.fileno())
        match self.command.receive():
            case Stop(number):
                raise Stopped(number)

    def listen(self, agents: AgentServer | None = None) -> HostListener:
        """Listen at the address of this host's first task."""
        check_free(self.own.place, self.own.name)
        return HostListener.open(
            self.own.place,
            self.credentials,
            self.terminals.say,
            loop=self.loop,
            clock=self.clock,
            agents=agents,
        )

    # The host of the coordinator.

    def coordinate(self) -> None:
        """Wait for a process per task on all hosts, and coordinate the job."""

        def judge(agent: JoiningAgent, offer: HostOffer) -> str:
            others = [(one.peer, one.offer) for one in agents.agents if one is not agent and one.offer]
            reason = objection(self.first, offer, agent.peer, others)
            self._note_refusal(offer, agent.peer, reason)
            return reason

        agents = AgentServer(self.credentials, judge, self.terminals.say, loop=self.loop, clock=self.clock)
        with ExitStack() as ends:
            ends.enter_context(closing(agents))
            listener = ends.enter_context(closing(self.listen(agents)))
            if not self._gather(agents):
                return
            wait_for_hosts(agents, listener.place, self.clock, self._turn)
            joined = agents.begin()
            for agent in joined:
                ends.enter_context(closing(agent.channel))
            self._run(listener, agents, joined)

    def _note_refusal(self, offer: HostOffer, peer: str, reason: str) -> None:
        """Keep why the task of an agent was refused, until it is accepted."""
        slot = offer.first.slot if offer.first is not None else -1
        self.refused.pop(slot, None)
        if reason:
            self.refused[slot] = f"{peer} was refused: {reason}"

    def _gather(self, agents: AgentServer) -> bool:
        """Wait for a process per task, or for hosts that run the job already.

        Returns:
            False if all processes of this host leave before.
        """
        told = ("", 0)
        self.server.tell_of_changes(lambda: None)
        while True:
            offers = [agent.offer for agent in agents.agents if agent.offer is not None]
            missing = missing_tasks(self.first, tuple(self.server.waiting), offers, self.refused)
            if not missing or running_jobs(agents.agents):
                return True
            if self.server.is_empty:
                return False
            agents.keep_waiting(missing)
            if told != (told := (missing, len(self.server.waiting))):
                self.server.keep_waiting(missing)
            self._turn(None)

    def _run(self, listener: HostListener, agents: AgentServer, joined: Sequence[JoiningAgent]) -> None:
        spec = self._spec()
        lock = claim_folder(spec.run_dir)
        workers = RendezvousWorkers(self.server, RunPaths(spec.run_dir.absolute()))
        try:
            if running_jobs(joined):
                self._take_over(spec, listener, agents, joined, workers)
            else:
                self._begin(spec, listener, agents, joined, workers)
        finally:
            leave_folder(spec.run_dir)
            os.close(lock)
        if not self.server.assigned:
            self.server.turn_away("the job could not start for the reason above")

    def _spec(self) -> JobSpec:
        first = self.first
        return JobSpec(
            target=first.target,
            module=first.module,
            arguments=(),
            workers=len(first.tasks),
            replicas=len(first.tasks),
            threads=0,
            seed=0,
            timeout=TIMEOUT,
            run_dir=fresh_folder(Path("runs"), Path(first.target).stem, time.time()),
            backend=first.backend,
        )

    def _begin(
        self,
        spec: JobSpec,
        listener: HostListener,
        agents: AgentServer,
        joined: Sequence[JoiningAgent],
        workers: RendezvousWorkers,
    ) -> None:
        """Begin the job, whose hosts are complete."""
        hosts, others = [JobHost(_host(self.own), len(self.first.here))], {}
        offers: dict[str, HostOffer] = {}
        for agent in sorted(joined, key=_first_slot):
            others[len(hosts)] = host = self._awaited(agent, offers)
            hosts.append(JobHost(host.name, len(_tasks(agent))))
        spec = replace(spec, hosts=tuple(hosts))
        prepare = msgspec.structs.replace(first_message(spec, encrypted=True), environment={})
        JobOnHosts(
            spec,
            prepare,
            self.command,
            console=self.terminals,
            loop=self.loop,
            here=ThisHost(0, listener, workers.facts(prepare, *listener.place)),
            others=others,
            by_hand=workers,
            notifies=True,
            accept=lambda newcomers: self._accept_later(agents, newcomers, offers),
        ).run()

    def _take_over(
        self,
        spec: JobSpec,
        listener: HostListener,
        agents: AgentServer,
        joined: Sequence[JoiningAgent],
        workers: RendezvousWorkers,
    ) -> None:
        """Continue the job that other hosts run, whose coordinator was on this host and was lost."""
        running = [agent for agent, _ in running_jobs(joined)]
        new = [agent for agent in joined if agent not in running]
        offers: dict[str, HostOffer] = {}
        for agent in running:
            self._awaited(agent, offers)
        TakenOverJob(
            spec,
            len(self.first.here),
            self.command,
            self.terminals,
            self.loop,
            listener,
            running,
            workers,
        ).run(lambda newcomers: self._accept_later(agents, newcomers, offers, new))

    def _awaited(self, agent: JoiningAgent, offers: dict[str, HostOffer]) -> AwaitedHost:
        assert agent.offer is not None
        name = _host(self.first.tasks[_first_slot(agent)])
        offers[name] = agent.offer
        return AwaitedHost(name, agent.channel, lambda: "its agent has ended")

    def _accept_later(
        self,
        agents: AgentServer,
        newcomers: Newcomers,
        offers: dict[str, HostOffer],
        there: Sequence[JoiningAgent] = (),
    ) -> None:
        """Admit lost hosts whose tasks are started again, or were already, while the job runs."""

        def judge(agent: JoiningAgent, offer: HostOffer) -> str:
            if offer.running is not None:
                return LEFT_BEHIND
            others = [(name, offers[name]) for name in newcomers.names if name in offers]
            return objection(self.first, offer, agent.peer, others)

        def take(agent: JoiningAgent) -> None:
            newcomers.consider(self._awaited(agent, offers), len(_tasks(agent)))

        for agent in there:
            take(agent)
        agents.pass_on(judge, take)

    # The other hosts.

    def join(self) -> None:
        """Join the coordinator, and run the workers of this host; again, if it ends before the job begins."""
        with temporary_folder() as folder:
            while not self.server.is_empty and not self._join(folder):
                self._pause()

    def _join(self, folder: Path) -> bool:
        """Return whether a job has run."""
        with closing(self.listen()) as listener:
            address = CoordinatorAddress(self.coordinator.address, self.credentials, self.loop)
            connection = self._connect(address)
            if connection is None:
                return False
            channel = address.channel(connection)

            def offer() -> None:
                slots = tuple(sorted(self.server.waiting))
                channel.send(HostOffer(len(self.first.here), by_address(self.first), slots))
                if self.server.is_empty:
                    self.user.send(Stop(signal.SIGTERM))

            self.server.tell_of_changes(offer)
            offer()
            process = AgentProcess(
                channel,
                self.command,
                self.loop,
                self.clock,
                lambda prepare: listener,
                RendezvousWorkers(self.server, RunPaths(folder)),
                folder,
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
        """Return a connection to the coordinator; None if all processes of this host leave before."""

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


def _tasks(agent: JoiningAgent) -> tuple[int, ...]:
    assert agent.offer is not None
    assert agent.offer.first is not None
    return agent.offer.first.here


def _first_slot(agent: JoiningAgent) -> int:
    return min(_tasks(agent))


def _host(task: Task) -> str:
    return task.address.rpartition(":")[0].strip("[]")
