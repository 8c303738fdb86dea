"""The server for processes that a user starts by hand for the tasks of a job."""

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lockstep.agent.worker_handle import WorkerHandle
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.rendezvous import (
    MAX_PACKET,
    Admitted,
    Answer,
    Arrival,
    KeepWaiting,
    Rejected,
    decode_arrival,
    encode,
    refusal,
)
from lockstep.rendezvous.processes import ExternalHandle
from lockstep.system.event_loop import ARRIVES, arrived
from lockstep.system.passed_descriptors import receive_descriptors
from lockstep.system.paths import RunPaths
from lockstep.system.socket_owners import is_of_this_user, peer

_MOST_AT_ONCE = 64


@dataclass
class StartedProcess:
    """A connected process.

    Attributes:
        handle: the process.
        arrival: its message; None until it arrives.
    """

    handle: ExternalHandle
    arrival: Arrival | None = None

    def tell(self, answer: Answer) -> None:
        """Send an answer, unless the process has ended."""
        with contextlib.suppress(OSError):
            self.handle.control.send(encode(answer))


class RendezvousServer:
    """Accepts processes, and rejects those that cannot take part; an `Arrivals`.

    Processes that can take part wait until `admit` is called, one per task.

    Args:
        first: the first arrival of the job.
        listeners: the sockets to which processes connect.
    """

    def __init__(self, first: Arrival, listeners: list[socket.socket]) -> None:
        self.first = first
        self.waiting: dict[int, StartedProcess] = {}
        self.assigned: dict[int, StartedProcess] = {}
        self._listeners = listeners
        self._silent: list[StartedProcess] = []
        self._events = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}
        self._came: Callable[[], object] = self._name_missing_tasks
        self._left: Callable[[], None] = self._name_missing_tasks
        for listener in listeners:
            listener.setblocking(False)
            self._watch(listener.fileno(), partial(self._accept, listener), ARRIVES)

    @property
    def is_complete(self) -> bool:
        """Whether a process waits for each task of this host."""
        return len(self.waiting) == len(self.first.local)

    @property
    def is_empty(self) -> bool:
        """Whether no process is connected that is not a worker."""
        return not (self.waiting or self._silent)

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""
        return self._events.fileno()

    def serve(self) -> None:
        """Serve new connections, messages and disconnections; never blocks."""
        for descriptor, _ in self._events.poll(0):
            # An earlier event may have closed this connection.
            if (call := self._calls.get(descriptor)) is not None:
                call()

    def begin(self, job: str, came: Callable[[], object], *, late: bool) -> None:
        """From now on, let each process wait until the job admits it.

        Args:
            job: the name of the job.
            came: called for each process that arrives and can take part.
            late: whether waiting processes arrive now, because the job already runs.
        """

        def wait() -> None:
            self.keep_waiting(f"{job} to admit it")

        def arrive() -> None:
            wait()
            came()

        self._came, self._left = arrive, wait
        for _ in self.waiting if late else ():
            came()

    def tell_of_changes(self, changed: Callable[[], None]) -> None:
        """From now on, call `changed` when a waiting process has arrived or left."""
        self._came = self._left = changed

    def keep_waiting(self, awaited: str) -> None:
        """Tell all processes what they wait for."""
        for process in self.waiting.values():
            process.tell(KeepWaiting(awaited))

    def admit(self, worker: int, admitted: Callable[[int], Admitted]) -> tuple[int, StartedProcess]:
        """Admit the process that waits for the first task; return its slot and the process.

        Args:
            worker: its id as a worker.
            admitted: returns the message to it, given the number of processes that use one of its GPUs.

        Raises:
            OSError: no process waits.
        """
        if not self.waiting:
            raise OSError("no process has been started for it")
        slot = min(self.waiting)
        process = self.waiting.pop(slot)
        self._forget(process.handle.control.fileno())
        others = [*self.waiting.values(), *(other for at, other in self.assigned.items() if at != slot)]
        process.tell(admitted(1 + sum(_shares(process, other) for other in others)))
        self.assigned[slot] = process
        return slot, process

    def handles(self) -> Iterator[ExternalHandle]:
        """Yield the processes that are workers or wait."""
        for process in (*self.assigned.values(), *self.waiting.values()):
            yield process.handle

    def workers(self) -> Iterator[ExternalHandle]:
        """Yield the processes that are workers."""
        for process in self.assigned.values():
            yield process.handle

    def turn_away(self, reason: str) -> None:
        """Reject all waiting processes."""
        for process in self.waiting.values():
            process.tell(Rejected(reason))

    def close(self) -> None:
        """Disconnect all waiting processes, and release the names."""
        for listener in self._listeners:
            listener.close()
        for process in (*self.waiting.values(), *self._silent):
            process.handle.close()
        self._events.close()

    def _accept(self, listener: socket.socket) -> None:
        # Another user who connects repeatedly must not block this.
        for connection in arrived(listener, self._events, _MOST_AT_ONCE):
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        pid = peer(connection)[0]
        try:
            # A process in another PID namespace has no id here.
            exited = os.pidfd_open(pid) if pid and is_of_this_user(connection) else None
        except OSError:
            # It has ended, or this process has too many descriptors.
            exited = None
        if exited is None:
            connection.close()
            return
        connection.setblocking(False)
        process = StartedProcess(ExternalHandle(pid, exited, connection))
        self._silent.append(process)
        self._watch(connection.fileno(), partial(self._hear, process))

    def _hear(self, process: StartedProcess) -> None:
        try:
            packet, descriptors = receive_descriptors(process.handle.control, MAX_PACKET, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        if not packet or process.arrival is not None:
            for descriptor in descriptors:
                os.close(descriptor)
            self._leave(process)
            return
        self._silent.remove(process)
        process.handle.take_terminal(descriptors)
        self._judge(process, packet)

    def _judge(self, process: StartedProcess, packet: bytes) -> None:
        try:
            arrival = decode_arrival(packet)
        except ValueError as error:
            reason = (
                f"the job cannot read this process's message ({error}); use one version of Lockstep for all"
            )
        else:
            reason = refusal(self.first, arrival, self._pid_at(arrival.slot))
        if reason:
            process.tell(Rejected(reason))
            self._forget(process.handle.control.fileno())
            process.handle.close()
            return
        if (gone := self.waiting.get(arrival.slot)) is not None:
            self._leave(gone)
        process.arrival = arrival
        self.waiting[arrival.slot] = process
        self._came()

    def _pid_at(self, slot: int) -> int | None:
        for process in (self.waiting.get(slot), self.assigned.get(slot)):
            if process is not None and process.handle.is_running:
                return process.handle.pid
        return None

    def _leave(self, process: StartedProcess) -> None:
        self._forget(process.handle.control.fileno())
        process.handle.close()
        if process.arrival is None:
            self._silent.remove(process)
        else:
            del self.waiting[process.arrival.slot]
            self._left()

    def _name_missing_tasks(self) -> None:
        missing = [str(task) for slot, task in enumerate(self.first.tasks) if slot not in self.waiting]
        for process in self.waiting.values() if missing else ():
            process.tell(KeepWaiting(", ".join(missing)))

    def _watch(self, descriptor: int, call: Callable[[], None], how: int = select.EPOLLIN) -> None:
        self._events.register(descriptor, how)
        self._calls[descriptor] = call

    def _forget(self, descriptor: int) -> None:
        self._events.unregister(descriptor)
        del self._calls[descriptor]


@dataclass
class RendezvousStarter:
    """Admits processes that a user has started as the workers of one job; a `Starter`.

    Attributes:
        spec: the job.
        paths: the paths of the run, absolute.
        pid: process id of the coordinator.
        server: the server at which processes wait.
    """

    spec: JobSpec
    paths: RunPaths
    pid: int
    server: RendezvousServer

    def prepare(self) -> None:
        """Do nothing: a process that waits is ready."""

    def close(self) -> None:
        """Do nothing, because starting workers does not need resources that must be released."""

    def faults(self) -> dict[str, str]:
        """Return nothing: the user chooses the GPUs."""
        return {}

    def start(
        self,
        worker: int,
        others: Sequence[WorkerHandle],
        *,
        joins: bool,
        yielding: Sequence[WorkerHandle] = (),
    ) -> WorkerHandle:
        """Admit a waiting process. Its slot is that of its task, regardless of the others' slots.

        Raises:
            OSError: no process waits.
        """
        spec = self.spec

        def admitted(device_users: int) -> Admitted:
            return Admitted(
                worker=worker,
                joins=joins,
                seed=spec.seed,
                threads=spec.threads,
                run_dir=str(self.paths.root),
                coordinator=self.pid,
                device_users=device_users,
            )

        slot, process = self.server.admit(worker, admitted)
        return WorkerHandle(worker, slot, process.handle, None, (), self.paths.stack(worker))


def _shares(process: StartedProcess, other: StartedProcess) -> bool:
    mine, theirs = process.arrival, other.arrival
    return mine is not None and theirs is not None and bool(set(mine.gpus) & set(theirs.gpus))
