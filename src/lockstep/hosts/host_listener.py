"""The listener by which a process of a job accepts connections of other hosts."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.agent.lane_connections import HostNetwork, LaneConnections
from lockstep.hosts.agent_server import AgentServer
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.greeting import ConnectionKind, Greeting
from lockstep.system.clock import Clock
from lockstep.system.environment import key_file
from lockstep.system.event_loop import EventLoop
from lockstep.transport.addresses import is_loopback, resolve_host, split_address
from lockstep.transport.keys import JobKey, key_needed
from lockstep.transport.listener import PATIENCE, Admit, Listener

WITHOUT_KEY = Credentials(b"", expires=2**62)
"""The credentials of a job on the loopback device that has no key."""


@dataclass(frozen=True)
class HostListener:
    """A listener for the workers of other hosts, and for their agents if this process coordinates the job.

    Attributes:
        listener: accepts the connections.
        connections: the connections of workers.
        credentials: the credentials of this process and its workers.
    """

    listener: Listener
    connections: LaneConnections
    credentials: Credentials

    @classmethod
    def open(
        cls,
        address: str,
        credentials: Credentials,
        report: Callable[[str], None],
        *,
        loop: EventLoop,
        clock: Clock,
        agents: AgentServer | None = None,
    ) -> "HostListener":
        """Listen at an address.

        Args:
            address: the address of this host; other hosts must reach it. Port 0 means any free one.
            credentials: the credentials of the job.
            report: called with lines about refused connections.
            loop: serves the listener.
            clock: for deadlines.
            agents: receives the connections of agents; None to refuse them.

        Raises:
            ConfigError: the address is malformed, not of this host, in use, or needs a key.
            NetworkError: no socket can be opened, or the name cannot be resolved.
        """
        connections = LaneConnections()
        admit: Admit = connections.admit
        if agents is not None:

            def admit(greeting: Greeting, connection: socket.socket, peer: str) -> str | None:
                takes = agents if greeting.kind is ConnectionKind.CONTROL else connections
                return takes.admit(greeting, connection, peer)

        checks = credentials if credentials is not WITHOUT_KEY else None
        listener = Listener.open(address, checks, admit, report, loop=loop, clock=clock)
        return cls(listener, connections, credentials)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The IP address and the port."""
        return split_address(self.listener.address)

    def network(self, job: bytes) -> HostNetwork:
        """Return how the workers of this host reach those of other hosts."""
        return HostNetwork(job, self.credentials, self.connections, self.listener.enter)

    def close(self) -> None:
        """Stop listening; safe to call more than once."""
        self.listener.close()


def own_credentials(address: str, *, encrypted: bool) -> Credentials:
    """Return credentials from the key file in the environment; on the loopback device, `WITHOUT_KEY`.

    Args:
        address: HOST:PORT at which the job can be reached.
        encrypted: whether connections are encrypted.

    Raises:
        ConfigError: other hosts can reach the address and no key file is set, or the key file cannot be used.
        NetworkError: the name cannot be resolved.
        UnfitError: the package for encryption is not installed.
    """
    path = key_file()
    if path is not None:
        return JobKey.read(path).mint(encrypted=encrypted)
    _, address_here = resolve_host(*split_address(address), PATIENCE)
    if is_loopback(address_here[0]):
        return WITHOUT_KEY
    raise key_needed(f"{address} can be reached from other hosts")
