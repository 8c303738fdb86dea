"""A parameter server in the calls of a `ClusterCoordinator`: serves while it waits for the chief."""

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from lockstep.errors import PeerError
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.function_calls import CallKind, FunctionCalls, ScheduleContext, Scheduled
from lockstep.keras.parameter_server.server_process import ServerProcess
from lockstep.keras.parameter_server.server_shards import ServedVariables
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import AtCall, Passed
from lockstep.transport.array_channel import AskingChannel

Array = npt.NDArray[Any]


class ServerCalls(FunctionCalls):
    """The calls of a parameter server, which serves while it waits for the chief."""

    _process: ServerProcess

    def __init__(self, program: ScheduleContext) -> None:
        super().__init__(program)
        self._process = ServerProcess(
            self._job, self._call, lambda: ServedVariables(self._backend, copies=True), self._trained
        )
        self._chief: AskingChannel | None = None
        self._until = 0

    def _end(self) -> None:
        """End the calls, when none of their functions is running."""
        if self._opened:
            self._process.serve()
        self._process.close()

    def _open(self) -> None:
        self._process.open()
        self._chief = self._process.connect_chief()

    def _add(self, update: Update, number: int, shards: Sequence[Shard]) -> None:
        self._process.add(update, shards, self._runner.numbers_of_tables(number))

    def _remember(self, step: int, scheduled: Scheduled) -> None:
        """Do nothing, because servers do not run functions."""

    def _make(
        self, kind: CallKind, steps: Sequence[int] = (), name: str = ""
    ) -> tuple[Passed, Sequence[Array]]:
        number, self._calls = self._calls, self._calls + 1
        if number < self._until:
            return self._compared(kind, Passed(self._until)), []
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._wait, args=(number, answer), name="lockstep-wait", daemon=True).start()
        self._process.serve()
        passed, arrays = answer.get()
        if isinstance(passed, Exception):
            raise passed
        assert isinstance(passed, Passed)
        self._until = self._compared(kind, passed).until
        return passed, arrays

    def _wait(self, number: int, answer: "queue.SimpleQueue[Any]") -> None:
        assert self._chief is not None
        try:
            answer.put(self._chief.ask(AtCall(number, self._scheduled)))
        except PeerError as error:
            answer.put((error, ()))
        self._process.interrupt()
