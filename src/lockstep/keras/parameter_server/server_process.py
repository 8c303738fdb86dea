"""A parameter server: has shards, and updates them as gradients arrive.

It is also the standby of another server: it keeps that server's messages, and takes over its shards if it is
lost. So a process may have the shards of several servers, each with its own order of arrivals. The state of a
server does not depend on the process that has its shards, so a replay does not need a loss.

The threads of connections only put arrivals into a queue, and keep messages of the other server (`_put`). The
main thread does everything else, one message at a time: see `ServerShards.arrive`.
"""

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from lockstep.errors import PeerLostError, PeerStuckError
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.server_shards import (
    KeptServer,
    ServedVariables,
    ServerShards,
    StandbyLink,
)
from lockstep.parameter_server.order import OrderWriter, RecordedOrder
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import (
    EndCall,
    Keep,
    KeepState,
)
from lockstep.system.notes import note
from lockstep.system.prose import count
from lockstep.transport.array_channel import QuestionArrival
from lockstep.worker.job import GRACE_FOR_AGENT, Job

Array = npt.NDArray[Any]

_LOOK_AGAIN = 0.01
"""Seconds between two checks whether a standby is lost whose connection has ended."""

_SOONER = GRACE_FOR_AGENT / 2
"""Seconds by which a server waits less for its standby than others wait for the server. So the first error
names the process that does not answer."""

_LOOK_EVERY = 1.0
"""Seconds between two checks for lost processes."""


class ServerProcess(TaskProcess):
    """A process of a parameter server.

    Args:
        job: the job of the process.
        call: the call of `fit`, or the calls of a `ClusterCoordinator`.
        make: returns variables for the shards of one server.
        trained: number of training steps of the job before the call.
    """

    def __init__(
        self, job: Job, call: NumberedCall, make: Callable[[], ServedVariables], trained: int
    ) -> None:
        super().__init__(job, call, "")
        self._make, self._trained = make, trained
        self._updates = 0
        self._inbox: queue.SimpleQueue[QuestionArrival | None] = queue.SimpleQueue()
        self._variables: dict[int, ServedVariables] = {}
        self._served: dict[int, ServerShards] = {}
        self._repeating: dict[int, ServerShards] = {}
        self._kept: dict[int, KeptServer] = {}

    def open(self) -> None:
        """Begin the call, together with the other processes, and connect to standbys.

        Raises:
            PeerLostError: the chief has ended.
        """
        self.meet(self._put)
        for server, (process, standby) in enumerate(self.mesh.places):
            if self.job.process not in (process, standby):
                continue
            self._variables[server] = self._make()
            if self.job.process == process:
                writer, recorded = self.order(f"ps-{server}")
                link = None if standby is None else self._link(standby, server)
                self._served[server] = self._new_shards(server, writer, recorded, link)
            elif self.tables is not None:
                self._repeating[server] = self._new_shards(server, OrderWriter(None))

    def add(self, update: Update, shards: Sequence[Shard], tables: frozenset[int] = frozenset()) -> None:
        """Add the variables of another optimizer; see `TaskProcess.add_variables`."""
        self.add_variables(self._variables, update, shards, tables)

    def interrupt(self) -> None:
        """Let `serve` return. Another thread calls this."""
        self._inbox.put(None)

    def serve(self) -> None:
        """Answer until the chief ends the call, or `interrupt` is called.

        Raises:
            PeerLostError: the chief has ended before, or another server has taken over the shards.
            PeerStuckError: the next message of the recorded order has not arrived in time, or the standby has
                not answered in time.
        """
        timer = self.job.timer
        timer.lap("other")
        timer.begin(f"updates within {self.call.name}")
        # A standby serves until the chief has ended the call on all servers, because one may be lost
        # meanwhile.
        while not all(shards.closed for shards in self._served.values()):
            arrival = self._next()
            timer.lap("wait")
            if arrival is None:
                break
            match arrival.message:
                case None:
                    self._closed(arrival)
                case EndCall():
                    self._shards(arrival).end_call(arrival)
                case Keep():
                    # It repeats one message for each that arrives, so questions to this server do not wait
                    # long.
                    self._repeat(arrival.server)
                case _:
                    self._answer(self._shards(arrival), arrival)
        # Other processes may read the rows of this standby before it serves again.
        for server, kept in list(self._kept.items()):
            while kept.messages and server in self._repeating:
                self._repeat(server)

    def close(self) -> None:
        """Leave the call."""
        # The orders are written first: when this process no longer answers, standbys continue them in the
        # same files.
        for shards in self._served.values():
            shards.close()
        super().close()

    def _link(self, standby: int, server: int) -> StandbyLink | None:
        """Connect to the standby of a server; return None if it is lost."""
        name = self.tasks.name(standby)

        def confirm(error: PeerLostError) -> None:
            # A standby that is not lost could take over with old weights: those of its last message.
            begun = time.monotonic()
            while standby not in self.mesh.lost():
                if time.monotonic() - begun > self.timeout:
                    raise error
                time.sleep(_LOOK_AGAIN)
            note(f"{error}; it was the standby of this server, which has none until the next call")

        try:
            channel = self.mesh.channel(standby, server, self.timeout - _SOONER)
        except PeerLostError as error:
            confirm(error)
            return None
        return StandbyLink(channel, name, confirm, repeats=self.tables is not None)

    def _new_shards(
        self,
        server: int,
        writer: OrderWriter,
        recorded: RecordedOrder | None = None,
        link: StandbyLink | None = None,
    ) -> ServerShards:
        answer_rows = None if self.tables is None else self.tables.answers_of(server)
        return ServerShards(self._variables[server], writer, recorded, link, answer_rows)

    def _answer(self, shards: ServerShards, arrival: QuestionArrival) -> None:
        shards.arrive(arrival)
        self.job.timer.lap("update" if shards.pushed else "exchange")
        for step in shards.pushed:
            self._updates += 1
            self.job.timer.end(self._updates, trained=self._trained + step + 1)
        shards.pushed.clear()

    def _put(self, arrival: QuestionArrival) -> None:
        if isinstance(arrival.message, Keep | KeepState):
            self._kept.setdefault(arrival.server, KeptServer()).receive(arrival)
            if self.tables is None:
                return
        self._inbox.put(arrival)

    def _repeat(self, server: int) -> None:
        """Repeat a message of the server whose standby this is, unless it has been taken over."""
        if server in self._repeating:
            self._repeating[server].repeat(self._kept[server])

    def _closed(self, arrival: QuestionArrival) -> None:
        """Note that a process has closed its connection."""
        shards = self._served.get(arrival.server)
        if shards is None:
            return
        shards.forget(arrival.process)
        if arrival.process == 0:
            if not shards.ended:
                raise PeerLostError(f"the chief has ended within {self.call.name}; its log says why")
            shards.closed = True

    def _shards(self, arrival: QuestionArrival) -> ServerShards:
        """Return the shards that a question is about. Take them over if their server is lost."""
        if arrival.server not in self._served:
            kept = self._kept.setdefault(arrival.server, KeptServer())
            kept.take_over()
            writer, _ = self.order(f"ps-{arrival.server}")
            shards = self._new_shards(arrival.server, writer)
            shards.resume(kept)
            self._repeating.pop(arrival.server, None)
            self._served[arrival.server] = shards
            note(
                f"parameter server {arrival.server} is lost; this process continues with its weights after "
                f"{count(kept.updates, 'update')}"
            )
        return self._served[arrival.server]

    def _next(self) -> QuestionArrival | None:
        begun = time.monotonic()
        while True:
            try:
                return self._inbox.get(timeout=min(_LOOK_EVERY, self.timeout))
            except queue.Empty:
                for process in self.mesh.lost():
                    self.mesh.drop(self.mesh.workers[process])
                late = time.monotonic() - begun >= self.timeout
                for server, shards in self._served.items() if late else ():
                    if (turn := shards.awaited()) is not None:
                        raise PeerStuckError(
                            f"parameter server {server} follows a recorded order in which step "
                            f"{turn.step + 1} of worker {turn.worker} comes next ({turn.kind.name.lower()}), "
                            f"which has not arrived for {self.timeout:g} s"
                        ) from None
