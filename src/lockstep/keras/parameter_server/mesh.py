"""The connections between the processes of a job with parameter servers, which last as long as the job.

The chief and the servers answer questions, at one address each. Every process has at most one connection to
each of them, which it opens when it first asks. In a call of `fit`, or in the functions of a
`ClusterCoordinator`, questions go to the object that has the role of the process in the call. Questions about
rows of tables may also be asked at other times.
"""

import contextlib
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lockstep.errors import PeerLostError
from lockstep.keras.parameter_server.servers import ServerChannel
from lockstep.parameter_server.tasks import ServerPlace
from lockstep.protocol.parameter_server import CopyRows, ReadRows
from lockstep.transport.array_channel import AnsweringEnd, AskingChannel, QuestionArrival
from lockstep.worker.job import Job

_ADDRESS = struct.Struct(">IH")
"""The header of a process's message to the others: its id, and the length of the address that follows. After
the address comes other data."""


class Mesh:
    """The connections of one process.

    Args:
        job: the job of the process.

    Attributes:
        workers: the worker ids of the processes of the call, or outside of a call those of the last meeting.
            The worker id of a process changes when a lost worker is replaced.
        addresses: the addresses of the chief and the servers, by process.
        places: the processes that have the shards of each server in the call.
        call: the number of the call in which this process is; 0 outside of calls.
        answer_rows: answers questions about rows at any time.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._tasks = job, job.context.tasks
        self.workers: dict[int, int] = {}
        self.addresses: dict[int, bytes] = {}
        self.places: tuple[ServerPlace, ...] = ()
        self.call = 0
        self._begins = False
        self.answer_rows: Callable[[QuestionArrival], object] = QuestionArrival.abandon
        self._receive: Callable[[QuestionArrival], object] = QuestionArrival.abandon
        self._channels: dict[tuple[int, int], AskingChannel] = {}
        self._end: AnsweringEnd | None = None
        # A worker that joins does not have a task before it replaces a lost worker.
        if not (job.settings.in_one_process or job.joins or job.process in self._tasks.workers):
            self._end = AnsweringEnd(self._put, job.peers.accept)
            if self._end.entrance:
                job.peers.answers_at(self._end.entrance)
        job.at_exit(self.close)

    def meet(self, label: str, data: bytes = b"") -> tuple[list[list[int]], dict[int, bytes]]:
        """Exchange addresses with the other processes, which all call this.

        Args:
            label: names the exchange.
            data: the data of this process for the others, besides its address.

        Returns:
            The ids of the processes of each host, and the data of each process.

        Raises:
            PeerLostError: the job is over.
        """
        address = b"" if self._end is None else self._end.address
        blob = _ADDRESS.pack(self._job.process, len(address)) + address + data
        hosts, gathered = self._job.exchange(
            lambda view, communicator: (
                view.hosts,
                dict(zip(view.workers, communicator.gather(blob, what=label), strict=True)),
            )
        )
        data_of, process_of = {}, {}
        for worker, gathered_blob in gathered.items():
            process, length = _ADDRESS.unpack_from(gathered_blob)
            process_of[worker] = process
            self.addresses[process] = gathered_blob[_ADDRESS.size : _ADDRESS.size + length]
            data_of[process] = gathered_blob[_ADDRESS.size + length :]
        if self._begins or not self.call:
            # Within a call, the chief's dispatcher keeps these up to date.
            self.workers.clear()
            self.workers.update({process: worker for worker, process in process_of.items()})
            self._begins = False
        return [[process_of[worker] for worker in host] for host in hosts], data_of

    def begin(
        self, call: int, receive: Callable[[QuestionArrival], object] = QuestionArrival.abandon
    ) -> None:
        """Begin a call, before the processes meet for it.

        Args:
            call: the number of the call.
            receive: receives the questions that other processes ask this one in the call, and the ends of
                their questions. It is called in threads.
        """
        self.workers.clear()
        self._receive, self.call, self._begins = receive, call, True

    def leave(self, call: int) -> None:
        """Leave a call, if this process is in it.

        The connections remain, except those on which a question waits for an answer.
        """
        if self.call != call:
            return
        self.call, self._receive = 0, QuestionArrival.abandon
        for channel in self._channels.values():
            channel.leave()
        if self._end is not None:
            self._end.end_call(call)

    def servers(
        self, places: Sequence[Sequence[int | None]], timeout: float | None = None
    ) -> list[ServerChannel]:
        """Return a channel to each server, which asks the first of its processes that is left.

        Args:
            places: the processes of each server, or None.
            timeout: see `channel`.
        """
        return [
            ServerChannel(
                [
                    partial(self.channel, process, server, timeout)
                    for process in processes
                    if process is not None
                ]
            )
            for server, processes in enumerate(places)
        ]

    def channel(self, process: int, server: int = -1, timeout: float | None = None) -> AskingChannel:
        """Return the connection to a process, for this process's questions in its call, if it is in one.

        Args:
            process: the id of the process.
            server: the server about whose shards it asks; -1 for the chief.
            timeout: seconds after which an answer counts as missing; None for the job's limit.

        Raises:
            PeerLostError: the process has ended.
        """
        timeout = self._job.policy.timeout if timeout is None else timeout
        channel = self._channels.get((process, server))
        if channel is not None and channel.is_open and channel.call != self.call:
            # The network may have closed it since the last call. That does not mean that the process is lost.
            with contextlib.suppress(PeerLostError):
                channel.enter(self.call, timeout)
        if channel is None or not channel.is_open:
            if channel is not None:
                channel.close()
            channel = self._channels[process, server] = self._opened(process, server, timeout)
        return channel

    def lost(self) -> frozenset[int]:
        """Return the processes of `workers` that the coordinator has announced as lost.

        Only the main thread may call this.
        """
        lost = self._job.peers.lost_workers(tuple(self.workers.values()))
        return frozenset(process for process, worker in self.workers.items() if worker in lost)

    def drop(self, worker: int) -> None:
        """End the connections of a worker id that is lost."""
        if self._end is not None:
            self._end.drop(worker)

    def peers(self) -> dict[str, Any]:
        """Return the facts about the processes of a call that a joiner needs. Called on the chief."""
        lost = self.lost()
        return {
            "addresses": dict(self.addresses),
            "workers": dict(self.workers),
            "places": [tuple(server_place) for server_place in self.places],
            "lost": sorted(
                process for process in self._tasks.workers if process not in self.workers or process in lost
            ),
        }

    def replace_lost_worker(self, call: int, peers: Mapping[str, Any]) -> None:
        """Replace a lost worker in a call, in a worker that has joined.

        Workers that have joined together replace the lost ones in the order of their ids.

        Args:
            call: the number of the call.
            peers: the result of `peers` on the chief.
        """
        self.begin(call)
        self._begins = False
        self.workers.update(peers["workers"])
        self.addresses.update(peers["addresses"])
        self.places = tuple(ServerPlace(*server_place) for server_place in peers["places"])
        old_workers = frozenset(self.workers.values())
        joined = sorted(worker for worker in self._job.joined_with if worker not in old_workers)
        self._job.process = peers["lost"][joined.index(self._job.worker)]

    def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            channel.close()
        if self._end is not None:
            self._end.close()

    def _put(self, arrival: QuestionArrival) -> None:
        """Pass a question on. The thread of its connection calls this."""
        message = arrival.message
        if isinstance(message, CopyRows) or (isinstance(message, ReadRows) and not message.in_turn):
            self.answer_rows(arrival)
        elif arrival.call and arrival.call == self.call:
            self._receive(arrival)
        else:
            arrival.abandon()

    def _opened(self, process: int, server: int, timeout: float) -> AskingChannel:
        peers, worker, name = self._job.peers, self.workers.get(process), self._tasks.name(process)
        # The chief's host is lost only with the job.
        watched = self._job.context.over_hosts and server >= 0
        if worker is None or (watched and self._is_lost(worker)):
            raise PeerLostError(f"{name} has ended; its log says why")
        return AskingChannel(
            address=self.addresses[process],
            process=self._job.process,
            peer=name,
            timeout=timeout,
            dial=peers.dial(worker),
            server=server,
            lost=partial(self._is_lost, worker) if watched else None,
            worker=self._job.worker,
            call=self.call,
        )

    def _is_lost(self, worker: int) -> bool:
        return bool(self._job.peers.lost_workers((worker,)))


_of_jobs: weakref.WeakKeyDictionary[Job, Mesh] = weakref.WeakKeyDictionary()


def mesh_of_job(job: Job) -> Mesh:
    """Return the connections of this process in a job with parameter servers."""
    if job not in _of_jobs:
        _of_jobs[job] = Mesh(job)
    return _of_jobs[job]
