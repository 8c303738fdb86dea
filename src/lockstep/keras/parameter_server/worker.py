"""A worker in a call, between the chief and the servers.

It asks the chief for work: steps of `fit`, or scheduled functions. It does each unit of work with the weights
of the servers, and gives them its gradients. Between two units, `worker_process.py` visits the batches of
`fit`, and `function_worker.py` makes the calls of a `ClusterCoordinator`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt

from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.servers import Gradients, Servers
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import Assigned, AtCall, Passed, Slot, WorkDone
from lockstep.transport.array_channel import AskingChannel

Array = npt.NDArray[Any]


class DoneWork(NamedTuple):
    """The results of a unit of work.

    Attributes:
        message: the message to the chief.
        arrays: the arrays of the message.
        gradients: the gradients for the servers; None if there are none.
    """

    message: WorkDone
    arrays: list[Array]
    gradients: Gradients | None


class Worker:
    """Asks the chief, pulls, pushes, and measures.

    Args:
        process: the process in the call.
        trained: number of training steps of the job before the call.

    Attributes:
        servers: the servers, after `connect`.
        kept: the batch of each step, or the function, that this worker may be assigned, by number.
        assigned: the last unit of work that it was assigned; None after a call.
        values: the arrays of the assignment, by name.
    """

    servers: Servers
    _chief: AskingChannel

    def __init__(self, process: TaskProcess, trained: int) -> None:
        self.kept: dict[int, Any] = {}
        self.assigned: Assigned | None = None
        self.values: Mapping[str, Array] = {}
        self._process, self._trained, self._timer = process, trained, process.job.timer
        self._measured = self._staleness = 0

    def connect(self, shards: Sequence[Shard]) -> None:
        """Connect to the servers, which have these shards, and to the chief."""
        self.servers = self._process.connect_servers(shards)
        self._chief = self._process.connect_chief()

    def ask(
        self, question: AtCall | WorkDone, arrays: Sequence[Array] = ()
    ) -> tuple[Passed, list[Array]] | None:
        """Wait for the chief; return the outcome of the call, or None if it assigns work instead.

        The measured time of a unit of work begins with its assignment. Batches and functions that no worker
        needs any more are forgotten.
        """
        answer, answer_arrays = self._chief.ask(question, arrays)
        self._timer.lap("wait")
        if isinstance(answer, Passed):
            self.assigned = None
            return answer, answer_arrays
        assert isinstance(answer, Assigned)
        self.assigned, self.values = answer, dict(zip(answer.names, answer_arrays, strict=True))
        for work in [k for k in self.kept if k < answer.step and k not in answer.incomplete]:
            del self.kept[work]
        self._timer.begin(self._process.call.name)
        self._staleness = 0
        return None

    def pull(
        self, rows: Mapping[int, Array], *, common: bool = False, part: int = 0
    ) -> tuple[list[Array], dict[Slot, Array]]:
        """Pull for the assigned work; see `Servers.pull`."""
        assert self.assigned is not None
        pulled = self.servers.pull(self.assigned.step, rows, common=common, part=part)
        self._timer.lap("exchange")
        return pulled

    def push(self, gradients: Gradients) -> None:
        """Give gradients of the assigned work to the servers."""
        assert self.assigned is not None
        self._timer.lap("compute")
        self._staleness = max(self._staleness, self.servers.push(self.assigned.step, gradients))
        self._timer.lap("exchange")

    def end(self, done: DoneWork, *, compiled: bool, examples: int = 0) -> tuple[WorkDone, Sequence[Array]]:
        """Give a unit's gradients to the servers, and return the message to the chief, with its arrays.

        Args:
            done: the results of the unit.
            compiled: whether functions were compiled for it.
            examples: the number of examples of its batch, if that is known.
        """
        if done.message.failure is not None:
            return done.message, done.arrays
        self._process.job.note_step()
        self._timer.lap("compute")
        if done.gradients is not None:
            self.push(done.gradients)
        self._measured += 1
        self._timer.end(
            self._measured,
            trained=self._trained + done.message.step + 1,
            examples=examples,
            replicas=1,
            compiled=compiled,
            staleness=self._staleness,
        )
        return msgspec.structs.replace(done.message, staleness=self._staleness), done.arrays
