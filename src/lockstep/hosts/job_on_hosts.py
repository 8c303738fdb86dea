"""A job on several hosts, as the process of its coordinator runs it: gathers the hosts, then coordinates."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import cast

from lockstep.agent.lane_connections import HostNetwork, LaneConnections
from lockstep.agent.starter import LocalStarter
from lockstep.agent.worker_output import LocalOutput
from lockstep.coordinator.host_agent import HostAgent, PeerAddress
from lockstep.errors import ConfigError, NetworkError
from lockstep.hosts.agent_process import MOST_QUEUED
from lockstep.hosts.facts import check_facts, own_facts, threads_for_all
from lockstep.hosts.gathering import AwaitedHost, Stopped, gather_facts
from lockstep.hosts.ssh import SshAgent
from lockstep.launcher.fork_server import ForkServerPlan
from lockstep.launcher.gpu_assignment import spread
from lockstep.launcher.launcher import LocalLauncher
from lockstep.local_job.composition import LocalHost, run_job
from lockstep.observability.console import Console
from lockstep.protocol.channel import Channel
from lockstep.protocol.greeting import JOB
from lockstep.protocol.host import BeginJob, HostFacts, HostReport, Instruction, Prepare, Stop
from lockstep.protocol.job_spec import JobSpec
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.system.clock import SystemClock
from lockstep.system.descendants import LinuxDescendants
from lockstep.system.environment import shared_variables, visible_gpus
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.transport.addresses import resolve_host, split_address
from lockstep.transport.keys import JobKey
from lockstep.transport.listener import Listener

_PATIENCE = 120.0
"""Seconds for the agents of all hosts to start."""
_RESOLVE = 5.0
_DAYS = 3650.0


@dataclass(frozen=True)
class _Here:
    """The host of this process in the job."""

    host: int
    network: HostNetwork
    facts: HostFacts

    @property
    def peer(self) -> PeerAddress:
        return _peer(self.facts)


def run_over_ssh(spec: JobSpec, command: Channel[Stop, Stop]) -> int:
    """Run a job on the hosts of `spec`; return its exit status.

    Args:
        spec: the job; its threads may be 0.
        command: the channel over which the job is stopped.

    Raises:
        ConfigError: the hosts do not fit together, or one cannot run the script.
        UnfitError: a host cannot be reached.
    """
    clock, key, paths = SystemClock(), JobKey.generate(_DAYS), RunPaths(spec.run_dir.absolute())
    console = Console(Sink(1), Sink(2), spec.tee, spec.view.chief)
    prepare = Prepare(
        job=secrets.token_bytes(JOB),
        key=key.text,
        encrypted=not spec.plain,
        target=spec.target,
        module=spec.module,
        arguments=spec.arguments,
        backend=spec.backend,
        folder=str(Path.cwd()),
        environment=shared_variables(),
    )
    with ExitStack() as ends:
        loop = ends.enter_context(EventLoop())
        here = ends.enter_context(_this_host(spec, key, prepare, console, loop))
        others = {}
        for host, (name, _) in enumerate(spec.hosts):
            if here is None or here.host != host:
                others[host] = agent = SshAgent.start(name, MOST_QUEUED)
                ends.enter_context(closing(agent.channel))
                agent.watch(loop, console.say)
        awaited = {
            host: AwaitedHost(agent.name, agent.channel, agent.why_lost) for host, agent in others.items()
        }
        try:
            facts = gather_facts(
                awaited, prepare, command, loop=loop, clock=clock, patience=_PATIENCE, say=console.say
            )
        except Stopped as stopped:
            return 128 + stopped.signal
        if here is not None:
            facts[here.host] = here.facts
        all_facts = [facts[host] for host in range(len(spec.hosts))]
        check_facts(spec.hosts, all_facts, spec.target)
        spec = replace(spec, threads=spec.threads or threads_for_all(spec.hosts, all_facts, spec.replicas))
        console.say(spec.describe())
        remote = {}
        for host, agent in others.items():
            agent.channel.send(BeginJob(replace(spec, inherited=()), host))
            # From now on, both ends use only these messages.
            channel = cast("Channel[Instruction, HostReport]", agent.channel)
            remote[host] = HostAgent(channel, agent.name, _peer(facts[host]), remote=True)
        ssh = frozenset(agent.process.pid for agent in others.values())
        local = _local_host(spec, paths, console, here, ssh) if here is not None else None
        state = State.of(
            spec.view,
            TimeLimits(timeout=spec.timeout, save=spec.grace),
            JobSize.of(spec.workers, spec.min_workers, spec.max_restarts),
            keeps=spec.checkpoints is not None,
        )
        return run_job(spec, state, paths, command, console=console, loop=loop, local=local, remote=remote)


def _local_host(
    spec: JobSpec, paths: RunPaths, console: Console, here: _Here, ssh: frozenset[int]
) -> LocalHost:
    first = sum(host.workers for host in spec.hosts[: here.host])
    own = replace(spec, devices=spread(visible_gpus(), spec.hosts[here.host].workers))
    launcher = LocalLauncher(ForkServerPlan.of(own))
    launcher.prepare()
    output = LocalOutput(console, paths)
    return LocalHost(
        output=output,
        starter=LocalStarter(own, paths, os.getpid(), launcher, output, first),
        descendants=LinuxDescendants(ssh),
        host=here.host,
        name=spec.hosts[here.host].name,
        peer=here.peer,
        network=here.network,
    )


@contextmanager
def _this_host(
    spec: JobSpec, key: JobKey, prepare: Prepare, console: Console, loop: EventLoop
) -> Iterator[_Here | None]:
    """Listen for workers of other hosts, if this host is one of the job."""
    found = next((host for host, (name, _) in enumerate(spec.hosts) if _is_here(name)), None)
    if found is None:
        yield None
        return
    name = spec.hosts[found].name
    _, place = resolve_host(name, 0, _RESOLVE)
    if len(spec.hosts) > 1 and ip_address(place[0].partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{name} is {place[0]} here, which other hosts cannot reach; name this host by an address that "
            "they reach"
        )
    credentials, connections = key.mint(encrypted=prepare.encrypted), LaneConnections()
    address = f"[{place[0]}]:0" if ":" in place[0] else f"{place[0]}:0"
    listener = Listener.open(
        address, credentials, connections.admit, console.say, loop=loop, clock=SystemClock()
    )
    with closing(listener):
        network = HostNetwork(prepare.job, credentials, connections, listener.enter)
        yield _Here(found, network, own_facts(prepare, *split_address(listener.address)))


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
