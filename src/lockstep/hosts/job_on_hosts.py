"""Runs a job on several hosts in the process of its coordinator: compares the hosts, then coordinates."""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, closing
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

from lockstep.agent.agent import Agent
from lockstep.agent.starter import LocalStarter
from lockstep.agent.worker_output import ForwardedOutput, WorkerOutput
from lockstep.checkpoint.held import HeldCheckpoint
from lockstep.checkpoint.mirror import take_lease
from lockstep.coordinator.job_record import HostRecord, JobRecord, encode_record
from lockstep.errors import ConfigError, LockstepError, NetworkError
from lockstep.hosts.coordinator_session import MOST_KEPT, CoordinatorSession
from lockstep.hosts.facts import check_facts, check_standby, own_facts, threads_for_all
from lockstep.hosts.gathering import AwaitedHost, Stopped, gather_facts
from lockstep.hosts.host_listener import HostListener
from lockstep.hosts.keeper import ConnectedHost, Keeper
from lockstep.hosts.newcomers import Newcomers
from lockstep.hosts.shared_checkpoints import SharedCheckpoints
from lockstep.hosts.ssh import SshAgent
from lockstep.launcher.fork_server import ForkServerPlan
from lockstep.launcher.gpu_assignment import spread
from lockstep.launcher.launcher import LocalLauncher
from lockstep.local_job.composition import LocalHost, start_agent
from lockstep.observability.console import Console
from lockstep.observability.exports import NO_EXPORTS, Exports
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.channel import Channel, PeerGone
from lockstep.protocol.greeting import JOB
from lockstep.protocol.host import (
    LEFT_OUT,
    MOST_QUEUED,
    SILENCE,
    BeginJob,
    EndHost,
    HostEnded,
    HostFacts,
    HostReport,
    Instruction,
    KeepRecord,
    PeerAddress,
    Prepare,
    RemoteInstruction,
    RemoteReport,
    ShowNote,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.rendezvous import Rejected
from lockstep.supervisor.state import State
from lockstep.system.clock import SystemClock
from lockstep.system.descendants import LinuxDescendants
from lockstep.system.environment import key_file, require_variables, shared_variables, visible_gpus
from lockstep.system.event_loop import EventLoop, wait_for
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import sign_claim
from lockstep.transport.addresses import is_here, is_loopback, join_address, resolve_host, split_address
from lockstep.transport.keys import JobKey

_PATIENCE = 120.0
"""Seconds for the agents of all hosts to start."""
_DAYS = 3650.0

Resumed = Callable[[JobSpec, HeldCheckpoint], JobSpec]
"""Returns the job as it resumes from a checkpoint of any of its hosts; raises ConfigError if it cannot."""


@dataclass(frozen=True)
class ThisHost:
    """The host of the coordinator, if the job has workers there.

    Attributes:
        host: its index in the job.
        listener: accepts connections of workers of other hosts.
        facts: the facts of the host.
    """

    host: int
    listener: HostListener
    facts: HostFacts


def first_message(
    spec: JobSpec, *, key: str = "", encrypted: bool, folder: str = "", by_hand: bool = False
) -> Prepare:
    """Return the first message to the agents of a new job. If a user starts workers, it has no variables.

    Raises:
        Return the first message to a new job's agents, without variables if a user starts the workers.
    """
    require_variables(spec.env)
    return Prepare(
        job=secrets.token_bytes(JOB),
        key=key,
        encrypted=encrypted,
        target=spec.target,
        module=spec.module,
        arguments=spec.arguments,
        backend=spec.backend,
        folder=folder,
        environment={} if by_hand else shared_variables(spec.env),
        checkpoints=spec.checkpoints.given if spec.checkpoints is not None else "",
    )


class WorkersByHand(Protocol):
    """The workers of this host, which a user starts by hand."""

    def facts(self, prepare: Prepare, address: str, port: int) -> HostFacts:
        """Return the facts of this host, which accepts connections at an address and a port."""

    def admitting(self, spec: JobSpec, output: WorkerOutput) -> LocalHost:
        """Return a `LocalHost` that admits them as workers of a job."""


def facts_here(prepare: Prepare, listener: HostListener, by_hand: WorkersByHand | None) -> HostFacts:
    """Return the facts of this host."""
    collect = own_facts if by_hand is None else by_hand.facts
    return collect(prepare, *listener.host_and_port)


@dataclass(frozen=True)
class JobOnHosts:
    """A job whose agents are connected.

    Attributes:
        spec: the job; its threads may be 0.
        prepare: the first message to the agents.
        command: the channel over which the job is stopped.
        console: shows notes, and the output of workers.
        loop: serves everything.
        here: the host of this process; None if the job has no workers there.
        others: the agents of the other hosts, by the index of the host.
        by_hand: the workers of this host, if a user starts all workers; None if agents start them.
        children: process ids of the children of this process that are not workers.
        notifies: whether the agents of other hosts show the notes of this process.
        resumed: see `Resumed`; needed by a job with checkpoints.
        start: starts the agent of a lost host again, given its name; None if agents join by themselves.
        accept: called, before the job begins, with the `Newcomers` that admits later agents.
        wanted: the number of workers to which the job grows when hosts join; 0 for that of `spec`.
        exports: the exports of the process of the coordinator.
        address: HOST:PORT at which agents join; empty if this starts them.
    """

    spec: JobSpec
    prepare: Prepare
    command: StopChannel
    _: KW_ONLY
    console: Console
    loop: EventLoop
    here: ThisHost | None
    others: Mapping[int, AwaitedHost]
    by_hand: WorkersByHand | None = None
    children: set[int] = field(default_factory=set)
    notifies: bool = False
    resumed: Resumed | None = None
    start: Callable[[str], AwaitedHost] | None = None
    accept: Callable[[Newcomers], None] = lambda newcomers: None
    wanted: int = 0
    exports: Exports = NO_EXPORTS
    address: str = ""

    def run(self) -> int:
        """Run the job; return its exit status.

        Raises:
            ConfigError: the hosts do not fit together, or one cannot run the script.
            UnfitError: a host was lost.
            Stopped: the user has stopped the job before all hosts have answered.
        """
        try:
            facts = self._compare_hosts()
            spec = self._share_checkpoint(facts)
            saved = spec.checkpoints
            if self.here is not None and saved is not None and saved.store is not None:
                take_lease(saved.folder, saved.store, saved.resume)
        except LockstepError as error:
            for agent in self.others.values() if self.notifies else ():
                agent.channel.send(Rejected(str(error)))
            raise
        threads = spec.threads or threads_for_all(spec.hosts, _in_order(spec, facts), spec.replicas)
        spec = replace(spec, threads=threads)
        remote = self._begin_on_others(spec, facts)
        with ExitStack() as unless_led:
            unless_led.callback(self._end_others)
            return self._lead(spec, facts, remote, unless_led)

    def _lead(
        self,
        spec: JobSpec,
        facts: Mapping[int, HostFacts],
        remote: Mapping[int, ConnectedHost],
        unless_led: ExitStack,
    ) -> int:
        """Run the job that has begun on the other hosts; `unless_led` ends it there if it fails before."""
        for line in self._describe(spec):
            self.console.say(line)
        if spec.standby and not self._has_standby(spec.standby, facts):
            self.console.say(
                f"no host of the job has the address of --standby {spec.standby}: until one joins, no "
                "host can take the job over if this host is lost"
            )
        newcomers = Newcomers(
            spec=spec,
            prepare=self.prepare,
            facts=facts[0],
            say=self.console.say,
            loop=self.loop,
            clock=SystemClock(),
            start=self.start,
        )
        self.accept(newcomers)
        state = self._first_state(spec, facts)
        with closing(newcomers):
            return self._coordinate(spec, state, remote, newcomers, unless_led)

    def _coordinate(
        self,
        spec: JobSpec,
        state: State,
        remote: Mapping[int, ConnectedHost],
        newcomers: Newcomers,
        unless_led: ExitStack,
    ) -> int:
        """Run the coordinator in its own process, which can be lost."""
        hosts = dict(remote)
        with ExitStack() as ends:
            if self.here is not None:
                hosts[self.here.host], agent = start_here(
                    spec,
                    self.here,
                    self.prepare.job,
                    loop=self.loop,
                    console=self.console,
                    children=self.children,
                    by_hand=self.by_hand,
                )
                ends.enter_context(closing(agent))
            in_order = [hosts[host] for host in sorted(hosts)]
            records = tuple(HostRecord(host.name, host.peer) for host in in_order)
            keeper = Keeper(
                kept=KeepRecord(0, 0, encode_record(JobRecord(replace(spec, inherited=()), state, records))),
                hosts=in_order,
                command=self.command,
                loop=self.loop,
                clock=SystemClock(),
                console=self.console,
                run_dir=str(spec.run_dir),
                children=self.children,
                notifies=self.notifies,
                when_lost=newcomers.note_loss,
                exports=self.exports,
                address=self.address,
                shows_life=bool(spec.standby),
            )
            newcomers.serve(keeper.add_host, lambda: keeper.is_over)
            # From now on, the keeper decides when the job ends on other hosts.
            unless_led.pop_all()
            return keeper.run()

    def _end_others(self) -> None:
        """End the job on the other hosts, whose agents would otherwise wait for another coordinator."""
        until, channels = time.monotonic() + SILENCE, [agent.channel for agent in self.others.values()]
        for channel in channels:
            channel.send(EndHost(0.0, status=LEFT_OUT))
        # Messages that have not arrived when this process ends may be lost.
        while (channels := [channel for channel in channels if not _has_ended(channel)]) and (
            left := until - time.monotonic()
        ) > 0:
            wait_for([channel.fileno() for channel in channels], left)

    def _compare_hosts(self) -> dict[int, HostFacts]:
        """Return the facts of all hosts, after checking that they fit together."""
        spec = self.spec
        if spec.checkpoints is not None:
            sign_claim(spec.checkpoints.folder, self.prepare.job.hex())
        facts = gather_facts(
            self.others,
            self.prepare,
            self.command,
            loop=self.loop,
            clock=SystemClock(),
            patience=_PATIENCE,
            say=self.console.say,
        )
        if self.here is not None:
            facts[self.here.host] = self.here.facts
        check_facts(spec.hosts, _in_order(spec, facts), spec.target)
        check_standby(spec.standby, spec.hosts, _in_order(spec, facts))
        return facts

    def _share_checkpoint(self, facts: Mapping[int, HostFacts]) -> JobSpec:
        """Give the newest checkpoint to all hosts; return the job that resumes from it."""
        checkpoints = self.spec.checkpoints
        if checkpoints is None:
            return self.spec
        shared = SharedCheckpoints(
            checkpoints=checkpoints,
            has_workers=self.here is not None,
            hosts=self.others,
            facts=facts,
            command=self.command,
            loop=self.loop,
            clock=SystemClock(),
            say=self.console.say,
        )
        newest = shared.choose()
        if newest is None:
            return self.spec
        assert self.resumed is not None
        spec = self.resumed(self.spec, newest)
        shared.hand_over(newest)
        return spec

    def _begin_on_others(self, spec: JobSpec, facts: Mapping[int, HostFacts]) -> dict[int, ConnectedHost]:
        """Let the agents of other hosts begin the job; return their hosts."""
        remote = {}
        for host, agent in self.others.items():
            first = sum(earlier.workers for earlier in spec.hosts[:host])
            agent.channel.send(BeginJob(replace(spec, inherited=()), host, spec.hosts[host], first))
            # From now on, both ends use only these messages.
            channel = cast("Channel[Instruction, HostReport]", agent.channel)
            for line in self._describe(spec, f" on {spec.hosts[0].name}") if self.by_hand else ():
                channel.send(ShowNote(line))
            workers, cores = spec.hosts[host].workers, facts[host].cores
            remote[host] = ConnectedHost(agent.name, _peer_of(facts[host]), workers, cores, channel)
        return remote

    def _describe(self, spec: JobSpec, where: str = "") -> tuple[str, str]:
        """Return the first two lines of the job; `where` names the host of its folder on other hosts."""
        first, second = spec.describe("events" if self.by_hand else "logs")
        return f"{first}{where}", second

    def _has_standby(self, standby: str, facts: Mapping[int, HostFacts]) -> bool:
        try:
            _, address = resolve_host(*split_address(standby))
        except NetworkError:
            return False
        return any(facts[host].address == address[0] for host in self.others)

    def _first_state(self, spec: JobSpec, facts: Mapping[int, HostFacts]) -> State:
        cores = tuple(host_facts.cores for host_facts in _in_order(spec, facts))
        state = State.begin(spec, cores, by_hand=self.by_hand is not None)
        return replace(state, size=replace(state.size, wanted=self.wanted or spec.workers))


def _has_ended(agent: Channel[RemoteInstruction, RemoteReport]) -> bool:
    """Return whether the last message of an agent has arrived, or its channel has ended."""
    while (message := agent.receive()) is not None:
        if isinstance(message, HostEnded | PeerGone):
            return True
    return False


def _in_order(spec: JobSpec, facts: Mapping[int, HostFacts]) -> list[HostFacts]:
    return [facts[host] for host in range(len(spec.hosts))]


def run_over_ssh(spec: JobSpec, resumed: Resumed, command: StopChannel, exports: Exports) -> int:
    """Run a job on the hosts of `spec`; return its exit status.

    Args:
        spec: the job; its threads may be 0.
        resumed: see `Resumed`.
        command: the channel over which the job is stopped.
        exports: the exports of the process of the coordinator.

    Raises:
        ConfigError: the hosts do not fit together, or one cannot run the script.
        UnfitError: a host cannot be reached.
    """
    path = key_file() if spec.standby else None
    # Hosts can join later with the user's key.
    key = JobKey.generate(_DAYS) if path is None else JobKey.read(path)
    console = terminal_of(spec)
    prepare = first_message(spec, key=key.text, encrypted=not spec.plain, folder=str(Path.cwd()))
    with ExitStack() as ends:
        loop = ends.enter_context(EventLoop())
        here = _this_host(spec, key, prepare, console, loop)
        if here is not None:
            ends.enter_context(closing(here.listener))

        children: set[int] = set()

        def start(name: str) -> SshAgent:
            agent = SshAgent.start(name, MOST_QUEUED)
            children.add(agent.process.pid)
            ends.enter_context(closing(agent.channel))
            agent.watch(loop, console.say, children)
            return agent

        agents = {
            host: start(name)
            for host, (name, _) in enumerate(spec.hosts)
            if here is None or here.host != host
        }
        others = {
            host: AwaitedHost(agent.name, agent.channel, agent.why_lost) for host, agent in agents.items()
        }
        try:
            return JobOnHosts(
                spec,
                prepare,
                command,
                console=console,
                loop=loop,
                here=here,
                others=others,
                children=children,
                resumed=resumed,
                start=lambda name: AwaitedHost(
                    name, start(name).channel, lambda: "ssh or its agent has ended"
                ),
                exports=exports,
            ).run()
        except Stopped as stopped:
            return 128 + stopped.signal


def terminal_of(spec: JobSpec) -> Console:
    """Return the terminal of the command that begins the job."""
    return Console(Sink(1), Sink(2), spec.tee, spec.view.chief)


def start_here(
    spec: JobSpec,
    here: ThisHost,
    job: bytes,
    *,
    loop: EventLoop,
    console: Console,
    children: Set[int],
    by_hand: WorkersByHand | None,
    late: bool = False,
) -> tuple[ConnectedHost, Agent]:
    """Start the agent of this host; return it, and the host as the coordinator reaches it.

    Args:
        spec: the job.
        here: this host.
        job: the id of the job.
        loop: serves the agent.
        console: shows notes.
        children: process ids of the children of this process that are not workers.
        by_hand: the workers of this host, if a user starts all workers; None if the agent starts them.
        late: whether the host joins a running job.
    """
    session = CoordinatorSession()
    output = ForwardedOutput(session, lambda: session.output > MOST_KEPT)
    if by_hand is None:
        local, say = _started_here(spec, here.host, output, children), _unsaid
    else:
        local, say = by_hand.admitting(spec, output), console.say
    name, workers = spec.hosts[here.host]
    network = here.listener.network(job)
    local = replace(local, host=here.host, name=name, peer=_peer_of(here.facts), network=network)
    agent = start_agent(local, spec, session, loop, late=late, say=say)
    return ConnectedHost(name, local.peer, workers, here.facts.cores, session), agent


def _started_here(spec: JobSpec, host: int, output: WorkerOutput, children: Set[int]) -> LocalHost:
    """Return the `LocalHost` that starts workers on this host, which has this index."""
    first = sum(other.workers for other in spec.hosts[:host])
    name, workers = spec.hosts[host]
    spec = replace(spec, devices=spread(visible_gpus(), workers))
    launcher = LocalLauncher(ForkServerPlan.of(spec))
    launcher.prepare()
    paths = RunPaths(spec.run_dir.absolute())
    starter = LocalStarter(
        spec=spec, paths=paths, pid=os.getpid(), launcher=launcher, output=output, first_slot=first, host=name
    )
    return LocalHost(output, starter, LinuxDescendants(children))


def _this_host(
    spec: JobSpec, key: JobKey, prepare: Prepare, console: Console, loop: EventLoop
) -> ThisHost | None:
    """Listen for workers of other hosts, if this host is one of the job."""
    index = next((host for host, (name, _) in enumerate(spec.hosts) if _is_here(name)), None)
    if index is None:
        return None
    name = spec.hosts[index].name
    _, address = resolve_host(name, 0)
    if len(spec.hosts) > 1 and is_loopback(address[0]):
        raise ConfigError(
            f"{name} is {address[0]} here, which other hosts cannot reach; name this host by an address that "
            "they reach"
        )
    credentials = key.mint(encrypted=prepare.encrypted)
    listener = HostListener.open(
        join_address(address), credentials, console.say, loop=loop, clock=SystemClock()
    )
    return ThisHost(index, listener, facts_here(prepare, listener, None))


def _is_here(name: str) -> bool:
    """Whether a name is one of this host; a name with a user, or unknown here, is for `ssh`."""
    if "@" in name:
        return False
    try:
        return is_here(*resolve_host(name, 0))
    except (NetworkError, OSError):
        # It may be a name in the user's configuration of `ssh`.
        return False


def _unsaid(text: str) -> None:
    """Take a note for the users of the coordinator's host. The process there shows it."""


def _peer_of(facts: HostFacts) -> PeerAddress:
    """Return the address at which workers of other hosts connect to a host."""
    return PeerAddress(facts.address, facts.port, facts.incarnation)
