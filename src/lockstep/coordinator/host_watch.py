"""The heartbeats that the coordinator of a job and the agents of other hosts send each other."""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.coordinator.host_agent import HostAgent
from lockstep.protocol.host import ALIVE_EVERY
from lockstep.system.clock import Clock


@dataclass
class HostWatch:
    """Tells the agents of other hosts that this process is alive, and notes when messages arrive from them.

    Supervision decides when a silent host is lost.

    Attributes:
        agents: the agents of the job, including those of lost hosts. The coordinator adds agents.
        clock: for deadlines.
        silence: seconds without a message after which a host is lost.
        due: the time of the next call of `serve`; None if there is no other host.
    """

    agents: list[HostAgent]
    clock: Clock
    silence: float
    due: float | None = None
    _send_due: float = 0.0

    @property
    def live(self) -> list[HostAgent]:
        """The agents of other hosts that are not lost."""
        return [agent for agent in self.agents if agent.remote and agent.ended is None]

    def heard(self) -> dict[int, float]:
        """Return when a message last arrived from each of these agents, by the index of its host."""
        agents = enumerate(self.agents)
        return {host: agent.heard for host, agent in agents if agent.remote and agent.ended is None}

    def begin(self, agent: HostAgent) -> None:
        """Watch a host from now on."""
        agent.heard = self.clock.now()
        if agent.remote and self.due is None:
            self.due = agent.heard

    def hasten(self) -> None:
        """Let the next heartbeat be due now."""
        if self.due is not None:
            self.due = self._send_due = self.clock.now()

    def serve(self, keep_record: Callable[[], None]) -> None:
        """Send heartbeats, if it is time.

        Args:
            keep_record: called first. Agents forget acknowledged reports, so the record must contain their
                consequences.
        """
        now, live = self.clock.now(), self.live
        if self.due is not None and now - self.due > self.silence / 2:
            # This process was stopped, and has not read the messages that have arrived since then.
            for agent in live:
                agent.heard = now
        if now >= self._send_due:
            self._send_due = now + ALIVE_EVERY
            keep_record()
            for agent in live:
                agent.acknowledge(now)
        lost_at = [due for agent in live if (due := agent.heard + self.silence) > now]
        self.due = min((self._send_due, *lost_at))
