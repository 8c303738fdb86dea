"""A worker in a call of `fit`: runs Keras's loop, and computes the steps that the chief assigns to it.

Each step of the loop only visits a batch: the worker keeps it, and asks the chief for work. Then it computes
the steps that it is assigned, as long as it has visited their batches. If the next assigned step is a later
one, it lets the loop go on. At the end of an epoch it waits, and computes steps that other workers leave
undone when they are lost. So it keeps a batch until its step is complete, on whichever worker.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy.typing as npt

from lockstep.errors import PeerLostError
from lockstep.keras.input.readings import read_batch
from lockstep.keras.parameter_server.process import FitProcess, ServedCall
from lockstep.keras.parameter_server.servers import Gradients
from lockstep.keras.parameter_server.worker_step import ANY_STEP, WorkerStep
from lockstep.protocol.parameter_server import Assigned, AtCall, Passed, WorkDone

Array = npt.NDArray[Any]


_ASK_EVERY = 1.0
"""Seconds between two questions of a worker that skips batches: has the training ended?"""


_BEGINNING = AtCall(0, 0)
"""The beginning of the call, before any step."""


class _TrainingEnded(BaseException):
    """Ends Keras's loop in a worker: the chief has stopped the training within an epoch."""


class WorkerProcess(FitProcess):
    """Computes the steps that the chief assigns."""

    def __init__(self, served: ServedCall) -> None:
        super().__init__(served, "")
        self._step = WorkerStep(self)
        self._began = False
        self._steps, self._measured, self._skipped = 0, 0, 0
        self._asked_at = time.monotonic()
        self._assigned: Assigned | None = None
        self._layers: dict[str, Array] = {}
        self._kept: dict[int, Any] = {}

    def train(self, keras_fit: Callable[[Sequence[Any]], Any], arguments: dict[str, Any]) -> None:
        """Run Keras's loop until the chief ends the training.

        Raises:
            PeerLostError: the chief or a server has ended.
        """
        joins = self.served.joins
        if joins is None:
            self.meet()
        else:
            self.mesh.replace_lost_worker(self.call.number, joins)
        with self.job.apart():
            try:
                self._servers = self.connect_servers(self.served.shards)
                self._chief = self.connect_chief()
                begun, _ = self._chief.ask(_BEGINNING)
            except PeerLostError:
                if joins is None:
                    raise
                # The call has ended meanwhile. The exchange at its end shows whether the chief is lost.
                return
            assert isinstance(begun, Passed)
            if begun.kind == "close":
                return
            arguments.update(initial_epoch=begun.until - 1)
            self._skipped = begun.completed
            self.served.install(self._visit)
            with self._step.rows, contextlib.suppress(_TrainingEnded):
                keras_fit([_EpochEnd(self._end_epoch)])

    def _visit(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Compute the step of a batch, or keep the batch while another worker computes it."""
        step, self._steps = self._steps, self._steps + 1
        self._step.state = state
        if not self._began:
            self._began, data = True, read_batch(batch)
            self._step.look_up(data)
            self._step.make_room(step, data)
        if step < self._skipped:
            self._skip()
            return {}, self._step.state
        self._kept[step] = batch
        if self._assigned is None:
            self._ask(ANY_STEP)
        self._compute_visited()
        return {}, self._step.state

    def _skip(self) -> None:
        """Skip a batch whose step was completed before this worker joined."""
        now = time.monotonic()
        if now - self._asked_at >= _ASK_EVERY:
            self._asked_at = now
            if self._chief.ask(_BEGINNING)[0].kind == "close":
                raise _TrainingEnded

    def _compute_visited(self) -> None:
        """Compute the assigned steps of visited batches, until a later step is assigned."""
        assert self._assigned is not None
        while self._assigned.step < self._steps:
            step = self._assigned.step
            self._ask(*self._computed(step, self._kept[step]))

    def _computed(self, step: int, batch: Any) -> tuple[WorkDone, list[Array]]:
        timer = self.job.timer
        timer.begin(self.call.name)
        data = read_batch(batch)
        rows, traced = self._step.look_up(data), self._step.traced
        timer.lap("input")
        if self._step.make_room(step, data):
            traced = 0
            timer.lap("compute")
        weights, _ = self._servers.pull(step, rows)
        timer.lap("exchange")
        computed = self._step.compute(step, data, weights, self._layers)
        self.job.note_step()
        timer.lap("compute")
        staleness = self._servers.push(step, Gradients(computed.gradients, rows))
        timer.lap("exchange")
        self._measured += 1
        trained = self.served.trained + step + 1
        timer.end(
            self._measured,
            trained=trained,
            examples=data.examples,
            replicas=1,
            compiled=self._step.traced != traced,
            staleness=staleness,
        )
        return computed.returned(step, data, staleness)

    def _ask(self, question: AtCall | WorkDone, arrays: Sequence[Array] = ()) -> None:
        """Ask the chief for the next step."""
        answer, values = self._chief.ask(question, arrays)
        self.job.timer.lap("wait")
        if isinstance(answer, Passed):
            raise _TrainingEnded
        self._accept(answer, values)

    def _accept(self, assigned: Assigned, layers: Sequence[Array]) -> None:
        self._assigned, self._layers = assigned, dict(zip(assigned.names, layers, strict=True))
        complete = [k for k in self._kept if k < assigned.step and k not in assigned.incomplete]
        for step in complete:
            del self._kept[step]

    def _end_epoch(self, epoch: int) -> None:
        """Wait until the next epoch begins, and compute steps that lost workers have left undone."""
        while True:
            answer, values = self._chief.ask(AtCall(epoch + 1, self._steps))
            # Workers wait while the chief evaluates: that time belongs to no step.
            self.job.timer.stop()
            self._assigned = None
            if isinstance(answer, Passed):
                self.model.stop_training = self.model.stop_training or answer.kind == "close"
                return
            self._accept(answer, values)
            self._compute_visited()


class _EpochEnd(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function at the end of each epoch."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__()
        self._act = act

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call it."""
        self._act(epoch)
