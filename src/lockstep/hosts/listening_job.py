"""A job that agents of other hosts join: waits until its hosts are complete, then coordinates."""

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TypeVar

from lockstep.errors import ConfigError, NetworkError, UnfitError
from lockstep.hosts.agent_server import AgentServer, JoiningAgent
from lockstep.hosts.facts import own_facts
from lockstep.hosts.gathering import SAY_EVERY, AwaitedHost, Stopped
from lockstep.hosts.host_listener import HostListener, own_credentials
from lockstep.hosts.job_on_hosts import (
    JobOnHosts,
    Resumed,
    ThisHost,
    first_message,
    terminal_of,
)
from lockstep.hosts.newcomers import Newcomers
from lockstep.hosts.takeover import LEFT_BEHIND, TakenOverJob, running_jobs, wait_for_hosts
from lockstep.hosts.where import Listen
from lockstep.observability.console import Console
from lockstep.observability.exports import Exports
from lockstep.protocol.channel import Channel, PeerGone
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.engine import HOLD, StartCoordinator
from lockstep.protocol.host import HostOffer, Stop
from lockstep.protocol.job_spec import JobHost, JobSpec
from lockstep.system.clock import SystemClock
from lockstep.system.environment import KEY_FILE
from lockstep.system.event_loop import EventLoop
from lockstep.system.prose import count
from lockstep.transport.addresses import is_loopback

_FIRST_NOTE = 1.0
_LOOK_EVERY = 1.0
_RETURN = 10.0
"""Seconds in which the agents that run a job connect to the coordinator that an engine has started again."""
_RETRY = 60.0
"""Seconds in which the name of this host may become known."""

Result = TypeVar("Result")


def run_listening(
    spec: JobSpec, listening: Listen, resumed: Resumed, command: Channel[Stop, Stop], exports: Exports
) -> int:
    """Run a job on this host and on those whose agents join it; return its exit status.

    Args:
        spec: the job, with the number of all workers and without hosts; its threads may be 0.
        listening: where it waits.
        resumed: see `Resumed`.
        command: the channel over which the job is stopped.
        exports: what the process of the coordinator shows of the job.

    Raises:
        ConfigError: there is no key, the address cannot be used, the hosts do not fit together, or one cannot
            run the script.
        NetworkError: the address cannot be used.
        UnfitError: too few hosts have joined in time, or one was lost.
    """
    try:
        with ExitStack() as ends:
            loop = ends.enter_context(EventLoop())
            gate = _Gate(spec, listening, command, terminal_of(spec), loop)
            server, listener = gate.open(gate.credentials())
            ends.enter_context(closing(server))
            ends.enter_context(closing(listener))
            if listening.engine is not None:
                listening.engine.watch(loop)
                listening.engine.tell_address(listener.listener.address)
            if listening.task:
                gate.console.say(f"{listening.task} coordinates the job at {listening.address}")
            gate.wait(server, listener)
            agents = server.begin()
            for agent in agents:
                ends.enter_context(closing(agent.channel))
            if running := [agent for agent, _ in running_jobs(agents)]:
                new = [agent for agent in agents if agent not in running]
                return TakenOverJob(
                    spec,
                    listening.here,
                    command,
                    gate.console,
                    loop,
                    listener,
                    running,
                    exports=exports,
                ).run(lambda newcomers: gate.accept_later(server, newcomers, new))
            hosts, others = placed(gate.begins_with, listening.here, listener.place[0], agents)
            prepare = first_message(spec, encrypted=not spec.plain)
            here = ThisHost(0, listener, own_facts(prepare, *listener.place)) if listening.here else None
            return JobOnHosts(
                replace(spec, hosts=hosts, workers=gate.begins_with, hold=gate.hold),
                prepare,
                command,
                console=gate.console,
                loop=loop,
                here=here,
                wanted=spec.workers,
                others=others,
                notifies=True,
                resumed=resumed,
                accept=lambda newcomers: gate.accept_later(server, newcomers, ()),
                exports=exports,
            ).run()
    except Stopped as stopped:
        return 128 + stopped.signal


def placed(
    workers: int, here: int, own: str, agents: Sequence[JoiningAgent]
) -> tuple[tuple[JobHost, ...], dict[int, AwaitedHost]]:
    """Return the hosts of a job, this one first, and the agents of the others by the index of their host.

    Args:
        workers: of the job.
        here: those of this host.
        own: the name of this host.
        agents: that have offered enough workers, in their order of arrival, which that of their tasks
            replaces; the last one may get fewer than it has offered.
    """
    hosts, others, missing = [JobHost(own, here)] if here else [], {}, workers - here
    for agent in sorted(agents, key=_task_of):
        assert agent.offer is not None
        names = [host.name for host in hosts]
        name = agent.peer if agent.peer not in names else f"{agent.peer} ({len(hosts) + 1})"
        others[len(hosts)] = AwaitedHost(name, agent.channel, _agent_ended)
        hosts.append(JobHost(name, min(missing, agent.offer.workers)))
        missing -= hosts[-1].workers
    return tuple(hosts), others


def _task_of(agent: JoiningAgent) -> int:
    """Return the number of an agent's task; agents without tasks keep their order."""
    assert agent.offer is not None
    return sys.maxsize if agent.offer.task is None else agent.offer.task


def _agent_ended() -> str:
    return "its agent has ended"


def vacancies(wanted: int, agents: Sequence[JoiningAgent]) -> int:
    """Return how many of the workers that other hosts must run have no host yet."""
    return max(0, wanted - sum(agent.offer.workers for agent in agents if agent.offer is not None))


def objection(agent: JoiningAgent, offer: HostOffer, others: Collection[str], own: str) -> str:
    """Return why an agent cannot join; empty if it can.

    Args:
        agent: the agent.
        offer: what it offers.
        others: the addresses of the hosts whose agents have joined.
        own: the address of the coordinator's host; empty if several agents may run on one host.
    """
    if offer.workers < 1:
        return "it offers no worker"
    if offer.running is not None:
        return LEFT_BEHIND
    if offer.first is not None:
        return "this job does not follow TF_CONFIG: start its workers with lockstep agent --join"
    if own and agent.peer in (own, *others):
        return (
            f"the job already has an agent on host {agent.peer}: start one agent on each host, and tell it "
            "with -n how many workers to run"
        )
    return ""


@dataclass
class _Gate:
    """The wait for the hosts of a job; `own` is this host's address unless it is on the loopback device."""

    spec: JobSpec
    listening: Listen
    command: Channel[Stop, Stop]
    console: Console
    loop: EventLoop
    own: str = ""

    def __post_init__(self) -> None:
        self.clock = SystemClock()
        engine = self.listening.engine
        # Agents that run the job already come first.
        returns = engine is not None and isinstance(engine.start, StartCoordinator) and engine.start.again
        self.not_before = self.clock.now() + (_RETURN if returns else 0.0)
        self.loop.watch(self.command.fileno(), lambda: None)

    @property
    def begins_with(self) -> int:
        """The number of workers with which the job begins: all, or those that an engine has found.

        Parameter servers, which are the last workers, do not join later.
        """
        engine = self.listening.engine
        if engine is None or self.spec.parameter_servers:
            return self.spec.workers
        return min(self.spec.workers, engine.found)

    @property
    def hold(self) -> float | None:
        """See `JobSpec`: an engine can start a coordinator on another host while this one lives, cut off."""
        return HOLD if self.listening.engine is not None else None

    def credentials(self) -> Credentials:
        """Return the credentials of this process; the name of this host may not be known yet."""
        address, engine = self.listening.address, self.listening.engine
        if engine is not None:
            return engine.key.mint(encrypted=not self.spec.plain)
        return self.retried(lambda: own_credentials(address, encrypted=not self.spec.plain))

    def is_complete(self, agents: Sequence[JoiningAgent]) -> bool:
        """Whether the job can begin with these agents, or continue because they run it already."""
        if running_jobs(agents):
            return True
        waits = self.listening.engine is not None and self.clock.now() < self.not_before
        wanted = self.begins_with
        return not waits and wanted > 0 and not vacancies(wanted - self.listening.here, agents)

    def retried(self, act: Callable[[], Result]) -> Result:
        """Return what `act` returns; try again for a while, if the name of this host may not be known yet."""
        begun = self.clock.now()
        said = begun - SAY_EVERY + _FIRST_NOTE
        while True:
            try:
                return act()
            except NetworkError as error:
                now = self.clock.now()
                if not self.listening.retries or now - begun >= _RETRY:
                    raise
                if now - said >= SAY_EVERY:
                    said = now
                    self.console.say(f"waiting for the name of this host, {now - begun:.0f} s: {error}")
            self._turn(1.0)

    def open(self, credentials: Credentials) -> tuple[AgentServer, HostListener]:
        """Listen."""

        def judge(agent: JoiningAgent, offer: HostOffer) -> str:
            if offer.running is not None:
                return ""
            if self.listening.engine is not None:
                return objection(agent, offer, (), "")
            wanted = self.spec.workers - self.listening.here
            if agent not in server.agents and not vacancies(wanted, server.agents):
                return "the hosts of the job are complete"
            others = [other.peer for other in server.agents if other is not agent]
            return objection(agent, offer, others, self.own)

        server = AgentServer(credentials, judge, self.console.say, loop=self.loop, clock=self.clock)
        listener = self.retried(
            lambda: HostListener.open(
                self.listening.address,
                credentials,
                self.console.say,
                loop=self.loop,
                clock=self.clock,
                agents=server,
            )
        )
        place = ip_address(listener.place[0].partition("%")[0])
        if place.is_unspecified:
            listener.close()
            raise ConfigError(
                f"--listen {self.listening.address} is no address that other hosts can connect to; give the "
                "one at which they reach this host"
            )
        self.own = "" if place.is_loopback or self.listening.engine is not None else str(place)
        return server, listener

    def accept_later(self, server: AgentServer, newcomers: Newcomers, there: Sequence[JoiningAgent]) -> None:
        """Admit the agents that are there, and those that come while the job runs."""

        def judge(agent: JoiningAgent, offer: HostOffer) -> str:
            return objection(agent, offer, newcomers.names, self.own)

        def take(agent: JoiningAgent) -> None:
            assert agent.offer is not None
            name = newcomers.free_name(agent.peer)
            newcomers.consider(AwaitedHost(name, agent.channel, _agent_ended), agent.offer.workers)

        for agent in there:
            take(agent)
        server.pass_on(judge, take)

    def wait(self, server: AgentServer, listener: HostListener) -> None:
        """Wait until the agents of other hosts have offered enough workers, or run a job already.

        Raises:
            Stopped: the user has stopped the job.
            UnfitError: they have not within the limit.
        """
        begun, told = self.clock.now(), 0
        due = begun + _FIRST_NOTE
        key = f"{KEY_FILE}=... " if listener.credentials.greeting_key else ""
        plain = " --plain" if self.spec.plain else ""
        address = listener.listener.address
        join = f"{key}lockstep agent --join {address}{plain} [-n WORKERS]"
        host, port = listener.place
        passes = f"a firewall must let TCP connections to port {port} through"
        if is_loopback(host):
            passes = (
                f"only processes of this host reach {host}; for other hosts, give --listen another address"
            )
        while not self.is_complete(server.agents):
            missing = vacancies((self.begins_with or self.spec.workers) - self.listening.here, server.agents)
            workers = count(missing, "more worker")
            waited = (now := self.clock.now()) - begun
            if missing != told or now >= due:
                told = missing
                server.keep_waiting(f"other hosts to join with {workers}, {waited:.0f} s")
            if waited >= self.listening.patience:
                server.turn_away(f"too few hosts have joined within {self.listening.patience:g} s")
                advice = f"; run on each: {join}" if self.listening.engine is None else ""
                raise UnfitError(
                    f"no host has joined with {workers} within {self.listening.patience:g} s{advice}"
                )
            if now >= due:
                due = now + SAY_EVERY
                advice = f"; run there: {join} ({passes})" if self.listening.engine is None else ""
                self.console.say(
                    f"waiting at {address} for other hosts to join with {workers}, {waited:.0f} s{advice}"
                )
            until = min(due, begun + self.listening.patience, max(now, self.not_before) + _LOOK_EVERY)
            self._turn(max(0.0, until - now))
        wait_for_hosts(server, listener.place, self.clock, self._turn)
        self.loop.unwatch(self.command.fileno())

    def _turn(self, seconds: float) -> None:
        self.loop.turn(seconds)
        match self.command.receive():
            case Stop(number):
                raise Stopped(number)
            case PeerGone():
                raise Stopped(0)
