"""Members of several hosts as threads of this process, view after view, over connections that can be cut."""

import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from collective_members import DEADLINE, OnHost

from lockstep.collectives.contract import WaitObserver, WaitPolicy
from lockstep.collectives.network.communicator import NetworkCommunicator
from lockstep.collectives.network.lane import Link
from lockstep.collectives.network.last_call import LastCall
from lockstep.collectives.network.memory import NetworkBuffers
from lockstep.collectives.plan import HostPlan
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import LockstepError
from lockstep.topology import View, place_on_hosts


class CutSocket(socket.socket):
    """A stream that breaks after a number of sent bytes.

    Attributes:
        left: the bytes that it still sends; None for any number.
        sent: the bytes that it has sent.
    """

    left: int | None = None
    sent: int = 0

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg([data], (), flags)

    def sendmsg(self, buffers: Any, ancillary: Any = (), flags: int = 0, address: Any = None) -> int:
        if self.left is not None:
            data = b"".join(buffers)[: self.left]
            buffers = [data]
            if not data:
                self.shutdown(socket.SHUT_RDWR)
                raise BrokenPipeError("cut")
        count = super().sendmsg(buffers, ancillary, flags)
        self.sent += count
        if self.left is not None:
            self.left -= count
        return count


def cut_pair() -> tuple[CutSocket, socket.socket]:
    sender, receiver = socket.socketpair()
    return CutSocket(fileno=sender.detach()), receiver


class WorkerOfHost:
    """What a worker keeps over all views."""

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool
        self.buffers = NetworkBuffers(pool)
        self.last = LastCall()

    def close(self) -> None:
        self.pool.close()


@dataclasses.dataclass
class Entrance:
    """How one worker enters a view."""

    at: OnHost
    segment: ControlSegment
    links: dict[int, Link]

    def enter(
        self,
        worker: WorkerOfHost,
        policy: WaitPolicy | None = None,
        observe: WaitObserver = lambda _: None,
    ) -> NetworkCommunicator:
        return self.at.communicator(
            self.segment,
            worker.pool,
            self.links,
            policy or WaitPolicy(timeout=DEADLINE),
            observe,
            None,
            worker.buffers,
            worker.last,
        )


class ConnectedView:
    """A view of hosts with `counts` workers each, connected."""

    def __init__(self, replicas: int, hosts: Sequence[Sequence[int]], number: int = 1) -> None:
        self.view: View = place_on_hosts(replicas, tuple(map(tuple, hosts)), number)
        self.segments = [ControlSegment.create(len(ids)) for ids in hosts]
        self.pairs: dict[tuple[int, int], tuple[CutSocket, socket.socket]] = {}
        self.entrances: dict[int, Entrance] = {}
        for host, ids in enumerate(hosts):
            for local, worker in enumerate(ids):
                at = OnHost(self.view, host, local, "")
                for _, peer in at.peers:
                    self.pairs[worker, peer] = cut_pair()
                self.entrances[worker] = Entrance(at, self.segments[host], {})
        for worker, entrance in self.entrances.items():
            for host, peer in entrance.at.peers:
                link = Link(self.pairs[worker, peer][0], self.pairs[peer, worker][1])
                entrance.links[host] = link

    def plan(self, worker: int) -> HostPlan:
        return self.entrances[worker].at.plan

    def close(self) -> None:
        for pair in self.pairs.values():
            for each in pair:
                each.close()
        for segment in self.segments:
            segment.close()


def run_threads(scripts: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    """Run the script of each worker in a thread; return its results, or the errors of Lockstep."""
    results: dict[int, Any] = {}

    def run(worker: int) -> None:
        try:
            results[worker] = scripts[worker]()
        except LockstepError as error:
            results[worker] = error
        except BaseException as error:
            results[worker] = error
            raise

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in scripts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        if thread.is_alive():
            raise TimeoutError(f"a member does not end; ended have {sorted(results)}")
    return results
