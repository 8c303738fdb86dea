"""The exchange between the agent that opens it and the members that enter it by a message."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.collectives.contract import Communicator, WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.buffers import Buffers
from lockstep.collectives.shared.communicator import SharedCommunicator
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import PeerLostError
from lockstep.protocol.channel import Attachment
from lockstep.protocol.worker import EnterView, SharedMemoryEndpoint
from lockstep.topology import View, place
from lockstep.transport.packet_channel import PacketDecoder, encode


def enter(exchange: ControlSegment, view: View, position: int) -> Communicator:
    """Enter as a worker does, with an endpoint from a message."""
    attachments: list[Attachment] = []
    packet = encode(
        EnterView(1, view.hosts, SharedMemoryEndpoint(Attachment.copy_of(exchange.fd))), attachments
    )
    own = [Attachment.copy_of(attachment.descriptor) for attachment in attachments]
    decoder: PacketDecoder[EnterView] = PacketDecoder(EnterView)
    segment = ControlSegment.attach(decoder.decode(packet, own).endpoint.control.take())
    buffers = Buffers(SharedPool.attach(SharedPool.create().fd))
    return SharedCommunicator(segment, buffers, position, ReducePlan.of(view), WaitPolicy(timeout=60.0))


def opened() -> tuple[ControlSegment, list[Communicator]]:
    view = place(2, (0, 1))
    exchange = ControlSegment.create(2)
    return exchange, [enter(exchange, view, position) for position in (0, 1)]


def test_an_endpoint_connects_the_members() -> None:
    exchange, members = opened()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda at: members[at].gather(b"%d" % at), (0, 1)))
    assert results == [[b"0", b"1"], [b"0", b"1"]]
    exchange.close()


def test_a_notice_reaches_all_members_in_the_same_call() -> None:
    exchange, members = opened()
    exchange.post_notice(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda member: member.barrier(), members))
    assert [member.notice for member in members] == [2, 2]


def test_an_abort_ends_the_current_and_all_later_calls() -> None:
    exchange, members = opened()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(members[0].barrier)
        exchange.abort("worker 1 is lost")
        with pytest.raises(PeerLostError, match="worker 1 is lost"):
            waiting.result(60)
    with pytest.raises(PeerLostError, match="worker 1 is lost"):
        members[1].barrier()


def test_members_exchange_after_the_agent_has_closed_its_end() -> None:
    exchange, members = opened()
    exchange.close()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda member: member.gather(b"x"), members)) == [[b"x", b"x"]] * 2
