"""A parameter server: has shards, and updates them as gradients arrive."""

import queue
import time
from typing import Any

import numpy.typing as npt

from lockstep.errors import PeerLostError, PeerStuckError
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.served_variables import ServedVariables
from lockstep.parameter_server.order import Kind, OrderedArrivals, Record
from lockstep.protocol.parameter_server import (
    Applied,
    EndCall,
    Pull,
    Push,
    Read,
    ServedValues,
    Write,
)
from lockstep.transport.array_channel import AnsweringEnd, Asked
from lockstep.worker.job import Job

Array = npt.NDArray[Any]

_LOOK_EVERY = 1.0
"""Seconds between two looks whether hosts are lost."""


class ServerProcess(TaskProcess):
    """A parameter server.

    Args:
        job: of the process.
        call: the call of `fit`, or the calls of a `ClusterCoordinator`.
        variables: of the server.

    Attributes:
        end: answers the workers and the chief.
    """

    def __init__(self, job: Job, call: NumberedCall, variables: ServedVariables) -> None:
        assert job.context.tasks is not None
        index = job.context.tasks.of(job.worker)[1]
        super().__init__(job, call, f"ps-{index}")
        self._inbox: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self.end = AnsweringEnd(self._inbox.put, job.membership.accept)
        self._variables = variables
        self._name = f"parameter server {index}"
        self._version = 0
        self._pulled: dict[int, int] = {}
        self._applied: set[tuple[int, int]] = set()
        self._ended = False
        self._arrivals = OrderedArrivals(self.writer, self.recorded)

    def interrupt(self) -> None:
        """Let `serve` return; called in another thread."""
        self._inbox.put(None)

    def serve(self) -> None:
        """Answer until the chief ends the call, or `interrupt` is called.

        Raises:
            PeerLostError: the chief has ended before.
            PeerStuckError: what comes next in the recorded order has not arrived in time.
        """
        while not self._ended:
            if (asked := self._next()) is None:
                return
            match asked.message:
                case None if asked.process == 0:
                    raise PeerLostError(f"the chief has ended within {self.call.name}; its log says why")
                case None:
                    self._pulled.pop(asked.process, None)
                case EndCall():
                    self.writer.end()
                    asked.answer(Applied())
                    # The chief closes the connection when it has the answer.
                    while (last := self._inbox.get()) is None or last.message is not None or last.process:
                        pass
                    self._ended = True
                case message:
                    self._arrive(asked, message)

    def close(self) -> None:
        """Close all connections."""
        self.end.close()
        super().close()

    def _next(self) -> Asked | None:
        begun = time.monotonic()
        while True:
            try:
                return self._inbox.get(timeout=min(_LOOK_EVERY, self.timeout))
            except queue.Empty:
                for process in self.job.membership.lost_workers():
                    self.end.drop(process)
                late = time.monotonic() - begun >= self.timeout
                if late and (turn := self._arrivals.awaited()) is not None:
                    raise PeerStuckError(
                        f"{self._name} follows a recorded order in which step {turn.step + 1} of worker "
                        f"{turn.worker} comes next ({turn.kind.name.lower()}), which has not arrived for "
                        f"{self.timeout:g} s"
                    ) from None

    def _arrive(self, asked: Asked, message: Any) -> None:
        worker, arrivals = asked.process, self._arrivals
        if isinstance(message, Pull):
            record = Record(Kind.PULL, worker, message.step, message.part & 0xFF)
            arrivals.arrive(record, lambda: self._pull(asked, message), lambda: self._pull(asked, message))
        elif isinstance(message, Push):
            if (message.step, message.part) in self._applied:
                # The step of a lost worker, which had pushed its gradients here, was computed again.
                asked.answer(Applied(-1))
                return
            record = Record(Kind.PUSH, worker, message.step, message.part & 0xFF)
            arrivals.arrive(record, lambda: self._push(asked, message), lambda: asked.answer(Applied(-1)))
        elif isinstance(message, Read):
            record = Record(Kind.READ, 0, message.step)
            arrivals.arrive(record, lambda: self._read(asked), lambda: self._read(asked))
        elif isinstance(message, Write):
            record = Record(Kind.WRITE, 0, message.step)
            arrivals.arrive(record, lambda: self._write(asked, message), lambda: self._write(asked, message))

    def _pull(self, asked: Asked, message: Pull) -> None:
        self._pulled[asked.process] = self._version
        slots, common = self._variables.common() if message.common else ((), [])
        rows = dict(zip(message.tables, asked.arrays, strict=True))
        asked.answer(ServedValues(slots), [*self._variables.values(rows), *common])

    def _push(self, asked: Asked, message: Push) -> None:
        count = len(message.shards)
        gradients = dict(zip(message.shards, asked.arrays[:count], strict=True))
        rows = dict(zip(message.tables, asked.arrays[count:], strict=True))
        self._variables.update(gradients, message.updates, rows)
        self._applied.add((message.step, message.part))
        staleness = self._version - self._pulled.pop(asked.process, self._version)
        self._version += 1
        asked.answer(Applied(staleness))

    def _read(self, asked: Asked) -> None:
        arrays, rows = self._variables.changes()
        asked.answer(ServedValues(self._variables.slots, tuple(rows)), [*arrays, *rows.values()])

    def _write(self, asked: Asked, message: Write) -> None:
        count = len(message.shards)
        shards = dict(zip(message.shards, asked.arrays[:count], strict=True))
        self._variables.write(shards, dict(zip(message.slots, asked.arrays[count:], strict=True)))
        asked.answer(Applied())
