"""The connections that other hosts open to this one: to its workers, and to its agent for a state."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.protocol.credentials import Credentials
from lockstep.protocol.greeting import ConnectionKind, Greeting

Deliver = Callable[[Greeting, socket.socket], str | None]
"""Takes a connection of the current view, and returns None; or returns why it refuses the connection."""


def _refuse(greeting: Greeting, connection: socket.socket) -> str:
    return "no view has begun on this host"


@dataclass
class LaneConnections:
    """Keeps connections of views that have not begun on this host.

    A listener admits only connections of this job, one for each lane of a view, so their number is bounded.

    Attributes:
        give_state: receives the connections that ask for a state.
        pass_questions: receives the connections for the questions of a worker.
    """

    give_state: Deliver = _refuse
    pass_questions: Deliver = _refuse

    _view: int = 0
    _deliver: Deliver = _refuse
    _early: list[tuple[Greeting, socket.socket]] = field(default_factory=list)

    def admit(self, greeting: Greeting, connection: socket.socket, peer: str) -> str | None:
        """Take a connection, or return why it is refused; see `lockstep.transport.listener.Admit`."""
        if greeting.kind is ConnectionKind.STATE:
            return self.give_state(greeting, connection)
        if greeting.kind is ConnectionKind.QUESTIONS:
            return self.pass_questions(greeting, connection)
        if greeting.kind is not ConnectionKind.LANE:
            return "this process does not coordinate a job"
        if greeting.view > self._view:
            self._early.append((greeting, connection))
            return None
        return self._deliver(greeting, connection)

    def begin(self, view: int, deliver: Deliver) -> None:
        """Begin a view: give its connections to `deliver` from now on."""
        self._view, self._deliver = view, deliver
        early, self._early = self._early, []
        for greeting, connection in early:
            if greeting.view < view or self.admit(greeting, connection, "") is not None:
                connection.close()


@dataclass(frozen=True)
class HostNetwork:
    """How a host reaches the other hosts of the job.

    Attributes:
        job: the id of the job.
        credentials: the credentials of the agent and the workers.
        connections: the connections that other hosts have opened.
        enter: tells the listener that a view of a job and a term begins. The listener refuses connections of
            earlier views, and reports them to the last argument.
    """

    job: bytes
    credentials: Credentials
    connections: LaneConnections
    enter: Callable[[bytes, int, int, Callable[[str, int], None]], None]
