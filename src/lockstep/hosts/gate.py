"""The gate of a job: where the agents of other hosts join it before it begins, and while it runs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from lockstep.errors import UnfitError
from lockstep.hosts.agent_server import AgentServer, JoiningAgent
from lockstep.hosts.gathering import AwaitedHost, turn
from lockstep.hosts.host_listener import HostListener
from lockstep.hosts.job_on_hosts import (
    JobOnHosts,
    Resumed,
    ThisHost,
    WorkersByHand,
    facts_here,
    first_message,
)
from lockstep.hosts.newcomers import Newcomers
from lockstep.hosts.roster import RefusedOffer, Roster, placed
from lockstep.hosts.takeover import LEFT_BEHIND, TakenOverJob, running_jobs, wait_for_hosts
from lockstep.observability.console import Console
from lockstep.observability.exports import NO_EXPORTS, Exports
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.host import HostOffer
from lockstep.protocol.job_spec import JobSpec
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop


@dataclass
class Gate:
    """Listens for agents, passes each to the roster, and runs the job when the roster is complete.

    Attributes:
        roster: returns the present hosts of the job.
        credentials: the credentials of this process.
        command: the channel over which the job is stopped.
        console: shows notes.
        loop: serves everything.
        listener: accepts connections, after `listen`.
    """

    roster: Callable[[], Roster]
    credentials: Credentials
    command: StopChannel
    console: Console
    loop: EventLoop
    listener: HostListener = field(init=False)

    def __post_init__(self) -> None:
        self.clock = SystemClock()
        self.server = AgentServer(
            self.credentials, self._judge, self.console.say, loop=self.loop, clock=self.clock
        )
        self._ends = ExitStack()
        self._ends.callback(self.server.close)
        self._refused: dict[str, RefusedOffer] = {}
        self._offers: dict[str, HostOffer] = {}

    def listen(self, address: str) -> None:
        """Listen at an address; raise an error as `HostListener.open`."""
        self.listener = HostListener.open(
            address, self.credentials, self.console.say, loop=self.loop, clock=self.clock, agents=self.server
        )
        self._ends.callback(self.listener.close)

    def close(self) -> None:
        """Close all connections, and stop listening."""
        self._ends.close()

    def gather(self, wait: Callable[[str], float | None]) -> None:
        """Return when the job can begin, or if agents already run it.

        Args:
            wait: tells users and agents what the job waits for; returns the seconds until its next text, or
                None.

        Raises:
            Stopped: the user has stopped the job.
        """
        while True:
            while not running_jobs(self.server.agents) and (missing := self._missing()):
                self.turn(wait(missing))
            wait_for_hosts(self.server, self.listener.host_and_port, self.clock, self.turn)
            # The agents that run the job may have left meanwhile.
            if running_jobs(self.server.agents) or not self._missing():
                return

    def turn(self, seconds: float | None) -> None:
        """Serve the agents; raise Stopped if the user has stopped the job."""
        turn(self.loop, self.command, seconds)

    def run(
        self,
        spec: JobSpec,
        *,
        begins: bool = True,
        by_hand: WorkersByHand | None = None,
        resumed: Resumed | None = None,
        exports: Exports = NO_EXPORTS,
    ) -> int:
        """Run the job on the hosts that have gathered, or continue it; return its exit status.

        Args:
            spec: the job, with the number of all workers and without hosts; its threads may be 0.
            begins: whether the job may begin; otherwise, it can only be continued.
            by_hand: the workers of this host, if a user starts all workers; None if agents start them.
            resumed: see `Resumed`.
            exports: the exports of the process of the coordinator.

        Raises:
            ConfigError: the hosts do not fit together, or one cannot run the script.
            UnfitError: a host was lost, or no agent runs the job, and it may not begin.
            Stopped: the user has stopped the job before all hosts have answered.
        """
        roster, agents = self.roster(), self.server.begin()
        for agent in agents:
            self._ends.enter_context(closing(agent.channel))
        if running := [agent for agent, _ in running_jobs(agents)]:
            others = [agent for agent in agents if agent not in running]
            for agent in running:
                self._offers[roster.name(agent.peer, _offer(agent))] = _offer(agent)
            return TakenOverJob(
                spec=spec,
                here=roster.here.workers if roster.here is not None else 0,
                command=self.command,
                console=self.console,
                loop=self.loop,
                listener=self.listener,
                agents=running,
                by_hand=by_hand,
                exports=exports,
            ).run(lambda newcomers: self._accept(newcomers, others))
        if not begins:
            raise UnfitError("no agent that runs the job is connected, so it cannot be continued here")
        hosts, order = placed(roster, [(agent.peer, _offer(agent)) for agent in agents])
        joined = {
            index: self._host_of(agents[at], hosts[index].name)
            for index, at in enumerate(order, len(hosts) - len(order))
        }
        prepare = first_message(spec, encrypted=not spec.plain, by_hand=by_hand is not None)
        here = ThisHost(0, self.listener, facts_here(prepare, self.listener, by_hand))
        return JobOnHosts(
            replace(spec, hosts=hosts, workers=roster.workers),
            prepare,
            self.command,
            console=self.console,
            loop=self.loop,
            here=here if roster.here is not None else None,
            others=joined,
            by_hand=by_hand,
            notifies=True,
            resumed=resumed,
            accept=lambda newcomers: self._accept(newcomers, ()),
            wanted=spec.workers,
            exports=exports,
            address=self.listener.listener.address,
        ).run()

    def _missing(self) -> str:
        offers = [(agent.peer, _offer(agent)) for agent in self.server.agents]
        return self.roster().missing(offers, tuple(self._refused.values()))

    def _judge(self, agent: JoiningAgent, offer: HostOffer) -> str:
        """Return why an agent cannot join before the job begins, or an empty string if it can."""
        roster = self.roster()
        others = [(other.peer, _offer(other)) for other in self.server.agents if other is not agent]
        self._refused.pop(agent.peer, None)
        if offer.running is None and agent not in self.server.agents and roster.is_full(others):
            return "the hosts of the job are complete"
        if why := roster.objection(agent.peer, offer, others):
            self._refused[agent.peer] = RefusedOffer(agent.peer, offer, why)
        return why

    def _accept(self, newcomers: Newcomers, agents: Sequence[JoiningAgent]) -> None:
        """Admit these agents, and those that arrive later, to the running job."""
        roster = self.roster()

        def judge(agent: JoiningAgent, offer: HostOffer) -> str:
            if offer.running is not None:
                return LEFT_BEHIND
            others = [(name, self._offers.get(name)) for name in newcomers.names]
            return roster.objection(agent.peer, offer, others)

        def take(agent: JoiningAgent) -> None:
            name = newcomers.free_name(roster.name(agent.peer, _offer(agent)))
            newcomers.consider(self._host_of(agent, name), _offer(agent).workers)

        for agent in agents:
            take(agent)
        self.server.pass_on(judge, take, lambda: newcomers.job_is_led)

    def _host_of(self, agent: JoiningAgent, name: str) -> AwaitedHost:
        """Return the host of an agent. Later agents must not contradict its offer."""
        self._offers[name] = _offer(agent)
        return AwaitedHost(name, agent.channel, lambda: "its agent has ended")


def _offer(agent: JoiningAgent) -> HostOffer:
    """Return the offer of an accepted agent."""
    assert agent.offer is not None
    return agent.offer
