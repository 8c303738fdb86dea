"""How a worker connects to those of other hosts."""

import os
import select
import socket
import threading
from typing import Any

import pytest

from lockstep.protocol.channel import Attachment
from lockstep.protocol.worker import HostMembers, NetworkEndpoint, PeerConnected
from lockstep.worker import network_entrance
from lockstep.worker.network_entrance import LaneConnector


def test_the_worker_continues_as_soon_as_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the end of the last thread ends its wait."""
    pairs = [socket.socketpair() for _ in range(2)]
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    monkeypatch.setattr(network_entrance, "dial", lambda *_: pairs[0][0])
    monkeypatch.setattr(network_entrance, "accept", lambda connection, *_: connection)

    def receive(seconds: float, woken_by: int) -> Any:
        assert select.select([woken_by], [], [], 60.0)[0], "nothing wakes it"

    hosts = (HostMembers(0, (0,), "a", "10.0.0.1", 1), HostMembers(1, (1,), "b", "10.0.0.2", 1))
    control = Attachment(os.eventfd(0))
    endpoint = NetworkEndpoint(control, 1, hosts, 0)
    arrived = [PeerConnected(1, 1, Attachment(pairs[1][0].detach()))]
    connector = LaneConnector(
        bytes(16),
        None,
        endpoint,
        1,
        0,
        arrived,
        receive,
        wake,
        lambda *_: None,
        patience=60.0,  # type: ignore[arg-type]
    )
    try:
        links = connector.connect()
        assert isinstance(links, dict)
        assert links[1].outgoing is pairs[0][0]
        links[1].incoming.close()
    finally:
        for thread in threading.enumerate():
            if thread.name == "connect":
                thread.join(60.0)
        os.close(wake)
        for one in (*pairs[0], pairs[1][1]):
            one.close()
