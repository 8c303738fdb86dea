"""The processes of one host in an all-reduce that `hosts_reduce.py` measures.

    hosts_member.py PROGRAM TURNS HOSTS LANES HOST [LANE SEGMENT POOL]

Without a lane, it starts a process for each lane of the host.
"""

import concurrent.futures
import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence

from allreduce_member import GLOO, LOCKSTEP, Array, Exchange, Gloo, Member
from lockstep.collectives.contract import Span, WaitPolicy
from lockstep.collectives.network.communicator import NetworkCommunicator, ViewOfJob
from lockstep.collectives.network.lane import Link
from lockstep.collectives.network.last_call import LastCall
from lockstep.collectives.network.memory import NetworkBuffers
from lockstep.collectives.plan import HostPlan
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.topology import place_on_hosts
from turns import PORTS, Turns, pin

TLS = "TLS 1.3"
CERTIFICATE = "BENCH_CERTIFICATE"
CONNECT_SECONDS = 60.0


def address(host: int) -> str:
    return f"10.219.0.{host + 1}"


class Hosts:
    """A member on a host, connected to its counterparts on the others."""

    def __init__(self, hosts: int, lanes: int, at: tuple[int, int], shared: tuple[int, int], encrypt: bool):
        host, lane = at
        members = tuple(tuple(range(each * lanes, (each + 1) * lanes)) for each in range(hosts))
        plan = HostPlan.of(place_on_hosts(hosts * lanes, members), host)
        self._span = Span(members[host][lane], members[host][lane] + 1)
        links = connect(hosts, host, int(os.environ[PORTS].split()[0]) + lane, encrypt)
        self._communicator = NetworkCommunicator(
            ControlSegment.attach(shared[0]),
            NetworkBuffers(SharedPool.attach(shared[1])),
            LastCall(),
            lane,
            plan,
            ViewOfJob(bytes(16), 1, 1, tuple(range(hosts)), tuple(map(address, range(hosts)))),
            links,
            WaitPolicy(600.0),
        )

    def barrier(self) -> None:
        self._communicator.barrier()

    def sum(self, arrays: list[Array]) -> Sequence[Array]:
        return self._communicator.reduce({self._span: arrays})


def connect(hosts: int, host: int, port: int, encrypt: bool) -> dict[int, Link]:
    """Connect to the same lane of each other host: one connection for each direction."""
    listener = socket.create_server((address(host), port))
    others = [other for other in range(hosts) if other != host]
    outgoing = {other: dial(other, host, port) for other in others}
    incoming = {}
    for _ in others:
        stream, _ = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incoming[stream.recv(1)[0]] = stream
    if encrypt:
        with concurrent.futures.ThreadPoolExecutor(2 * hosts) as pool:
            sending = {other: pool.submit(wrap, stream, True) for other, stream in outgoing.items()}
            receiving = {other: pool.submit(wrap, stream, False) for other, stream in incoming.items()}
            return {other: Link(sending[other].result(), receiving[other].result()) for other in others}
    return {other: Link(outgoing[other], incoming[other]) for other in others}


def dial(other: int, host: int, port: int) -> socket.socket:
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            stream = socket.create_connection((address(other), port))
            break
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.send(bytes([host]))
    return stream


def wrap(stream: socket.socket, is_client: bool) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(os.environ[CERTIFICATE])
    context.load_verify_locations(os.environ[CERTIFICATE])
    if not is_client:
        context.num_tickets = 0
    return context.wrap_socket(stream, server_side=not is_client)


def start(arguments: list[str], lanes: int) -> None:
    """Start the processes of a host, which inherit its shared memory, and wait for them."""
    segment, pool = ControlSegment.create(lanes), SharedPool.create()
    children = []
    for lane in range(lanes):
        command = [sys.executable, __file__, *arguments, *map(str, (lane, segment.fd, pool.fd))]
        children.append(subprocess.Popen(command, pass_fds=[segment.fd, pool.fd]))
    sys.exit(max(abs(child.wait()) for child in children))


def main(program: str, turns: int, hosts: int, lanes: int, host: int, lane: int = -1, *shared: int) -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    if lane < 0:
        start(sys.argv[1:], lanes)
    position = host * lanes + lane
    pin(position)
    exchange: Exchange
    if program == GLOO:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        exchange = Gloo(position, hosts * lanes, address(0))
    else:
        assert program in (LOCKSTEP, TLS)
        exchange = Hosts(hosts, lanes, (host, lane), (shared[0], shared[1]), program == TLS)
    member = Member(exchange, position, hosts * lanes)
    driver = Turns(program, position)
    for _ in range(turns):
        driver.wait()
        driver.send(member.turn())
    # Without the clean-up of gloo, whose threads sometimes abort the process.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
