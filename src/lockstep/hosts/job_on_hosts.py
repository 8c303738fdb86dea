"""A job on several hosts, as the process of its coordinator runs it: compares the hosts, then coordinates."""

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import cast

from lockstep.agent.starter import LocalStarter
from lockstep.agent.worker_output import LocalOutput
from lockstep.checkpoint.held import HeldCheckpoint
from lockstep.coordinator.host_agent import HostAgent, PeerAddress
from lockstep.errors import ConfigError, LockstepError, NetworkError
from lockstep.hosts.facts import check_facts, own_facts, threads_for_all
from lockstep.hosts.gathering import AwaitedHost, Stopped, gather_facts
from lockstep.hosts.host_listener import HostListener
from lockstep.hosts.shared_checkpoints import SharedCheckpoints
from lockstep.hosts.ssh import SshAgent
from lockstep.launcher.fork_server import ForkServerPlan
from lockstep.launcher.gpu_assignment import spread
from lockstep.launcher.launcher import LocalLauncher
from lockstep.local_job.composition import LocalHost, run_job
from lockstep.observability.console import Console
from lockstep.protocol.channel import Channel
from lockstep.protocol.greeting import JOB
from lockstep.protocol.host import (
    MOST_QUEUED,
    BeginJob,
    HostFacts,
    HostReport,
    Instruction,
    Prepare,
    ShowNote,
    Stop,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.rendezvous import Rejected
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.system.clock import SystemClock
from lockstep.system.descendants import LinuxDescendants
from lockstep.system.environment import shared_variables, visible_gpus
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import sign_claim
from lockstep.transport.addresses import join_address, resolve_host
from lockstep.transport.keys import JobKey

_PATIENCE = 120.0
"""Seconds for the agents of all hosts to start."""
_RESOLVE = 5.0
_DAYS = 3650.0

Resumed = Callable[[JobSpec, HeldCheckpoint], JobSpec]
"""Returns the job as it resumes from a checkpoint of any of its hosts; raises ConfigError if it cannot."""


@dataclass(frozen=True)
class ThisHost:
    """The host of the coordinator, if the job has workers there.

    Attributes:
        host: its index in the job.
        listener: accepts connections of workers of other hosts.
        facts: of the host.
    """

    host: int
    listener: HostListener
    facts: HostFacts


def first_message(spec: JobSpec, *, key: str = "", encrypted: bool, folder: str = "") -> Prepare:
    """Return the first message to the agents of a new job."""
    return Prepare(
        job=secrets.token_bytes(JOB),
        key=key,
        encrypted=encrypted,
        target=spec.target,
        module=spec.module,
        arguments=spec.arguments,
        backend=spec.backend,
        folder=folder,
        environment=shared_variables(),
        checkpoints=spec.checkpoints.given if spec.checkpoints is not None else "",
    )


def run_over_ssh(spec: JobSpec, resumed: Resumed, command: Channel[Stop, Stop]) -> int:
    """Run a job on the hosts of `spec`; return its exit status.

    Args:
        spec: the job; its threads may be 0.
        resumed: see `Resumed`.
        command: the channel over which the job is stopped.

    Raises:
        ConfigError: the hosts do not fit together, or one cannot run the script.
        UnfitError: a host cannot be reached.
    """
    key = JobKey.generate(_DAYS)
    console = terminal_of(spec)
    prepare = first_message(spec, key=key.text, encrypted=not spec.plain, folder=str(Path.cwd()))
    with ExitStack() as ends:
        loop = ends.enter_context(EventLoop())
        here = _this_host(spec, key, prepare, console, loop)
        if here is not None:
            ends.enter_context(closing(here.listener))
        agents = {}
        for host, (name, _) in enumerate(spec.hosts):
            if here is None or here.host != host:
                agents[host] = agent = SshAgent.start(name, MOST_QUEUED)
                ends.enter_context(closing(agent.channel))
                agent.watch(loop, console.say)
        others = {
            host: AwaitedHost(agent.name, agent.channel, agent.why_lost) for host, agent in agents.items()
        }
        spare = frozenset(agent.process.pid for agent in agents.values())

        def workers(job: JobSpec, host: int) -> LocalHost:
            return started_here(job, host, console, spare)

        try:
            return run_on_hosts(
                spec,
                prepare,
                command,
                console=console,
                loop=loop,
                here=here,
                others=others,
                workers=workers,
                resumed=resumed,
            )
        except Stopped as stopped:
            return 128 + stopped.signal


def run_on_hosts(
    spec: JobSpec,
    prepare: Prepare,
    command: Channel[Stop, Stop],
    *,
    console: Console,
    loop: EventLoop,
    here: ThisHost | None,
    others: Mapping[int, AwaitedHost],
    workers: Callable[[JobSpec, int], LocalHost],
    notifies: bool = False,
    by_hand: bool = False,
    resumed: Resumed | None = None,
) -> int:
    """Run a job whose agents are connected; return its exit status.

    Args:
        spec: the job; its threads may be 0.
        prepare: the first message to the agents.
        command: the channel over which the job is stopped.
        console: shows notes, and the output of workers.
        loop: serves everything.
        here: the host of this process; None if the job has no workers there.
        others: the agents of the other hosts, by the index of the host.
        workers: returns what the agent of this host needs to get workers, given the job and the index of the
            host.
        notifies: whether the agents of other hosts show the notes of this process.
        by_hand: whether a user starts the workers.
        resumed: see `Resumed`; needed by a job with checkpoints.

    Raises:
        ConfigError: the hosts do not fit together, or one cannot run the script.
        UnfitError: a host was lost.
        Stopped: the user has stopped the job before all hosts have answered.
    """
    if spec.checkpoints is not None:
        sign_claim(spec.checkpoints.folder, prepare.job.hex())
    try:
        facts = gather_facts(
            others, prepare, command, loop=loop, clock=SystemClock(), patience=_PATIENCE, say=console.say
        )
        if here is not None:
            facts[here.host] = here.facts
        all_facts = [facts[host] for host in range(len(spec.hosts))]
        check_facts(spec.hosts, all_facts, spec.target)
        if spec.checkpoints is not None:
            assert resumed is not None
            shared = SharedCheckpoints(
                spec.checkpoints, here is not None, others, facts, command, loop, SystemClock(), console.say
            )
            if (newest := shared.choose()) is not None:
                spec = resumed(spec, newest)
                shared.hand_over(newest)
    except LockstepError as error:
        for agent in others.values() if notifies else ():
            agent.channel.send(Rejected(str(error)))
        raise
    spec = replace(spec, threads=spec.threads or threads_for_all(spec.hosts, all_facts, spec.replicas))
    paths = RunPaths(spec.run_dir.absolute())
    remote = {}
    for host, agent in others.items():
        agent.channel.send(BeginJob(replace(spec, inherited=()), host))
        # From now on, both ends use only these messages.
        channel = cast("Channel[Instruction, HostReport]", agent.channel)
        remote[host] = HostAgent(channel, agent.name, _peer(facts[host]), remote=True)
        if notifies:
            console.readers.append(lambda text, channel=channel: channel.send(ShowNote(text)))  # type: ignore[misc]
    console.say(f"{spec.shape}; events in {spec.run_dir}" if by_hand else spec.describe())
    local = None
    if here is not None:
        local = replace(
            workers(spec, here.host),
            host=here.host,
            name=spec.hosts[here.host].name,
            peer=_peer(here.facts),
            network=here.listener.network(prepare.job),
        )
    size = JobSize.of(spec.workers, spec.min_workers, spec.max_restarts)
    state = State.of(
        spec.view,
        TimeLimits(timeout=spec.timeout, save=spec.grace),
        JobSize(spec.workers, by_hand=True) if by_hand else size,
        keeps=spec.checkpoints is not None,
    )
    return run_job(spec, state, paths, command, console=console, loop=loop, local=local, remote=remote)


def terminal_of(spec: JobSpec) -> Console:
    """Return the terminal of the command that begins the job."""
    return Console(Sink(1), Sink(2), spec.tee, spec.view.chief)


def started_here(
    spec: JobSpec, host: int, console: Console, spare: frozenset[int] = frozenset()
) -> LocalHost:
    """Return what starts workers on this host, at index `host`; `spare` are children that are none."""
    paths = RunPaths(spec.run_dir.absolute())
    first = sum(one.workers for one in spec.hosts[:host])
    own = replace(spec, devices=spread(visible_gpus(), spec.hosts[host].workers))
    launcher = LocalLauncher(ForkServerPlan.of(own))
    launcher.prepare()
    output = LocalOutput(console, paths)
    name = spec.hosts[host].name
    starter = LocalStarter(own, paths, os.getpid(), launcher, output, first, name)
    return LocalHost(output, starter, LinuxDescendants(spare))


def _this_host(
    spec: JobSpec, key: JobKey, prepare: Prepare, console: Console, loop: EventLoop
) -> ThisHost | None:
    """Listen for workers of other hosts, if this host is one of the job."""
    found = next((host for host, (name, _) in enumerate(spec.hosts) if _is_here(name)), None)
    if found is None:
        return None
    name = spec.hosts[found].name
    _, place = resolve_host(name, 0, _RESOLVE)
    if len(spec.hosts) > 1 and ip_address(place[0].partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{name} is {place[0]} here, which other hosts cannot reach; name this host by an address that "
            "they reach"
        )
    credentials = key.mint(encrypted=prepare.encrypted)
    listener = HostListener.open(
        join_address(place), credentials, console.say, loop=loop, clock=SystemClock()
    )
    return ThisHost(found, listener, own_facts(prepare, *listener.place))


def _is_here(name: str) -> bool:
    """Whether a name is one of this host; a name with a user, or unknown here, is for `ssh`."""
    if "@" in name:
        return False
    try:
        family, place = resolve_host(name, 0, _RESOLVE)
    except NetworkError:
        # It may be a name in the user's configuration of `ssh`.
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True


def _peer(facts: HostFacts) -> PeerAddress:
    return PeerAddress(facts.address, facts.port, facts.incarnation)
