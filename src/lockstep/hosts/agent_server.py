"""The agents of other hosts that join a coordinator over the network."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lockstep.protocol.channel import PeerGone, Unreadable
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.greeting import Greeting
from lockstep.protocol.host import (
    ALIVE_EVERY,
    MOST_QUEUED,
    SILENCE,
    HostOffer,
    KeepAlive,
    RemoteInstruction,
    RemoteReport,
)
from lockstep.protocol.rendezvous import KeepWaiting, Rejected
from lockstep.system.clock import Clock
from lockstep.system.event_loop import EventLoop
from lockstep.transport.stream_channel import StreamChannel

Judge = Callable[["JoiningAgent", HostOffer], str]
"""Returns why an agent with this offer cannot take part; empty if it can."""

_FAREWELL = 5.0
"""Seconds that a rejected agent has to read why."""


@dataclass
class JoiningAgent:
    """A connected agent.

    Attributes:
        channel: the channel to it.
        peer: the IP address of its host.
        heard: the time at which its last message arrived.
        offer: its offer; None until that has arrived and is accepted.
        received: number of bytes that had arrived when `heard` was set.
        told: the last text on the wait that was sent to it.
    """

    channel: StreamChannel[RemoteInstruction, RemoteReport]
    peer: str
    heard: float
    offer: HostOffer | None = None
    received: int = 0
    told: str = ""


class AgentServer:
    """Accepts agents, and rejects those that cannot take part.

    Args:
        credentials: the credentials of the job.
        judge: judges agents until the job begins.
        say: shows a note.
        loop: serves the agents.
        clock: for deadlines.

    Attributes:
        agents: the agents whose offers are accepted, in the order of their arrival.
    """

    def __init__(
        self,
        credentials: Credentials,
        judge: Judge,
        say: Callable[[str], None],
        *,
        loop: EventLoop,
        clock: Clock,
    ) -> None:
        self.agents: list[JoiningAgent] = []
        self._credentials = credentials
        self._judge = judge
        self._say = say
        self._loop = loop
        self._clock = clock
        self._silent: list[JoiningAgent] = []
        self._rejected: dict[int, tuple[JoiningAgent, float]] = {}
        self._due = clock.now()
        self._take: Callable[[JoiningAgent], None] | None = None
        self._leads: Callable[[], bool] = lambda: False
        loop.before_each_wait(self._tend)

    def admit(self, greeting: Greeting, connection: socket.socket, peer: str) -> None:
        """Take the connection of an agent; see `lockstep.transport.listener.Admit`."""
        channel: StreamChannel[RemoteInstruction, RemoteReport] = StreamChannel.over(
            connection, RemoteReport, self._credentials, accepted=True, most_queued=MOST_QUEUED
        )
        agent = JoiningAgent(channel, peer.rpartition(":")[0].strip("[]"), self._clock.now())
        self._silent.append(agent)
        self._loop.watch(channel.fileno(), partial(self._hear, agent))

    def keep_waiting(self, awaited: str) -> None:
        """Tell agents what they wait for, unless they already know it."""
        for agent in self.agents:
            if agent.told != awaited:
                agent.told = awaited
                agent.channel.send(KeepWaiting(awaited))

    def begin(self) -> list[JoiningAgent]:
        """Return the agents, whose channels this no longer serves. Later agents wait for `pass_on`."""
        agents, self.agents = self.agents, []
        for agent in agents:
            self._loop.unwatch(agent.channel.fileno())
        return agents

    def pass_on(
        self,
        judge: Judge,
        take: Callable[[JoiningAgent], None],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """From now on, give agents that pass another `judge` to `take`, which serves their channels.

        Args:
            judge: from now on, judges agents.
            take: receives an agent that has passed.
            leads: returns whether the coordinator of this process leads the job. Only then, connections
                without an offer learn that this process is alive (`standby.is_led_at`).
        """
        self._judge, self._take, self._leads = judge, take, leads
        for agent in list(self.agents):
            assert agent.offer is not None
            self._accept(agent, agent.offer)

    def turn_away(self, reason: str, *, again: bool = False) -> None:
        """Reject all agents, which may try `again` later, and wait a moment until they have the reason."""
        for agent in (*self.agents, *self._silent):
            agent.channel.send(Rejected(reason, again))
            agent.channel.flush(1.0)
        self.close()

    def close(self) -> None:
        """Close the connections of agents that have not become part of a job."""
        rejected = [agent for agent, _ in self._rejected.values()]
        for agent in (*self.agents, *self._silent, *rejected):
            self._loop.unwatch(agent.channel.fileno())
            agent.channel.close()
        self.agents, self._silent, self._rejected = [], [], {}

    def _hear(self, agent: JoiningAgent) -> None:
        descriptor = agent.channel.fileno()
        while (message := agent.channel.receive()) is not None:
            match message:
                case PeerGone():
                    self._drop(agent, descriptor)
                    return
                case _ if descriptor in self._rejected:
                    pass
                case HostOffer():
                    self._accept(agent, message)
                    # Later messages are for the next reader of the channel, which the loop calls at once.
                    return
                case Unreadable(error):
                    why = f"its message cannot be read ({error}); use one version of Lockstep on all hosts"
                    self._reject(
                        agent,
                        f"{why}, and --plain for `lockstep run` and `lockstep agent`, or for neither",
                    )

    def _accept(self, agent: JoiningAgent, offer: HostOffer) -> None:
        if reason := self._judge(agent, offer):
            self._reject(agent, reason)
            return
        if agent in self._silent:
            self._silent.remove(agent)
            self.agents.append(agent)
        agent.offer = offer
        if self._take is not None:
            self.agents.remove(agent)
            self._loop.unwatch(agent.channel.fileno())
            self._take(agent)

    def _reject(self, agent: JoiningAgent, reason: str) -> None:
        self._say(f"the agent of {agent.peer} cannot join: {reason}")
        agent.channel.send(Rejected(reason, again=self._take is not None))
        self._rejected[agent.channel.fileno()] = agent, self._clock.now() + _FAREWELL
        if agent in self.agents:
            self.agents.remove(agent)
        else:
            self._silent.remove(agent)

    def _drop(self, agent: JoiningAgent, descriptor: int) -> None:
        self._loop.unwatch(descriptor)
        agent.channel.close()
        if self._rejected.pop(descriptor, None) is not None:
            return
        if agent in self._silent:
            self._silent.remove(agent)
            return
        self.agents.remove(agent)
        self._say(f"the agent of {agent.peer} has left")

    def _tend(self) -> float | None:
        """Tell the agents that this process is alive, and drop silent ones."""
        if not (self.agents or self._silent or self._rejected):
            return None
        if (now := self._clock.now()) >= self._due:
            self._due = now + ALIVE_EVERY
            for agent in [*self.agents, *self._silent]:
                # If this process was stopped, messages may have arrived that it has not read.
                self._hear(agent)
                if agent not in self.agents and agent not in self._silent:
                    continue
                if agent in self.agents or self._leads():
                    agent.channel.send(KeepAlive())
                if agent.channel.received != agent.received:
                    agent.received, agent.heard = agent.channel.received, now
                if now - agent.heard > SILENCE:
                    self._drop(agent, agent.channel.fileno())
            for descriptor, (agent, until) in list(self._rejected.items()):
                if now >= until:
                    self._drop(agent, descriptor)
        return self._due - now
