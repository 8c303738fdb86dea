"""The other processes of a job, as the agent of a worker reports them."""

import os
import socket
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.protocol.worker import EnterView, Notice
from lockstep.topology import View
from lockstep.worker.agent_client import AgentClient

if TYPE_CHECKING:
    from lockstep.worker.network_entrance import NetworkEntrance


class AgentPeers:
    """The `Peers` of a worker with an agent.

    Args:
        client: the connection to the agent.
        view: the view of the worker by itself.

    Attributes:
        view: the view that the worker entered last.
        segment: the control segment of that view; None before the first one.
        entrance: the way to other hosts; None in a job on one host.
    """

    def __init__(self, client: AgentClient, view: View) -> None:
        self._client = client
        self._peeked_segment: tuple[int, ControlSegment] | None = None
        self.view = view
        self.segment: ControlSegment | None = None
        self.entrance: NetworkEntrance | None = None

    def announced(self) -> tuple[int, tuple[int, ...]]:
        """Return the newest announced view; see `Peers`."""
        newest = self._client.newest_view()
        if newest is None:
            return self.view.number, self.view.workers
        return newest.number, tuple(worker for host in newest.hosts for worker in host)

    def lost_workers(self, workers: Collection[int]) -> frozenset[int]:
        """Return the workers that are not in the newest view; see `Peers`."""
        newest = self._client.newest_view()
        return frozenset(workers).difference(*([self.view.workers] if newest is None else newest.hosts))

    def posted(self) -> tuple[int, Notice]:
        """Return the newest announced view, and its notice; see `Peers`."""
        newest = self._client.newest_view()
        if newest is None:
            assert self.segment is not None
            return self.view.number, Notice(self.segment.posted)
        return newest.number, Notice(self._peeked(newest).posted)

    def answers_at(self, entrance: bytes) -> None:
        """Tell the agent the address; see `Peers`."""
        self._client.answers_at(entrance)

    def dial(self, worker: int) -> Callable[[], socket.socket] | None:
        """Return a function that connects to a worker on another host; see `Peers`."""
        return None if self.entrance is None else self.entrance.dial(worker)

    @property
    def accept(self) -> Callable[[socket.socket], socket.socket] | None:
        """The function that completes a connection from another host; see `Peers`."""
        return None if self.entrance is None else self.entrance.accept

    def _peeked(self, announced: EnterView) -> ControlSegment:
        """Return the control segment of a view that this worker has not entered."""
        number, segment = self._peeked_segment or (0, None)
        if segment is None or number != announced.number:
            if segment is not None:
                segment.close()
            segment = ControlSegment.attach(os.dup(announced.endpoint.control.descriptor))
            self._peeked_segment = announced.number, segment
        return segment
