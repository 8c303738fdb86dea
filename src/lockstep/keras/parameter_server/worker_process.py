"""A worker in a call of `fit`: runs Keras's loop, and computes the steps that the chief assigns to it.

Each step of the loop only visits a batch: the worker keeps it, and asks the chief for work. Then it computes
the steps that it is assigned, as long as it has visited their batches. If the next assigned step is a later
one, it lets the loop continue. At the end of an epoch it waits, and computes steps that lost workers leave
undone. So it keeps a batch until a worker has completed its step.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from lockstep.errors import PeerLostError
from lockstep.keras.input.readings import read_batch
from lockstep.keras.parameter_server.process import FitProcess, ServedCall
from lockstep.keras.parameter_server.worker import Worker
from lockstep.keras.parameter_server.worker_step import ANY_STEP, WorkerStep
from lockstep.protocol.parameter_server import AtCall, WorkDone

_ASK_EVERY = 1.0
"""Seconds between two questions of a worker that skips batches: has the training ended?"""


_BEGINNING = AtCall(0, 0)
"""The beginning of the call, before any step."""


class _TrainingEnded(BaseException):
    """Ends Keras's loop in a worker, because the chief has stopped training within an epoch."""


class WorkerProcess(FitProcess):
    """Computes the steps that the chief assigns."""

    def __init__(self, served: ServedCall) -> None:
        super().__init__(served, "")
        self._step, self._worker = WorkerStep(self), Worker(self, served.trained)
        self._began = False
        self._steps, self._skipped = 0, 0
        self._asked_at = time.monotonic()

    def train(self, keras_fit: Callable[[Sequence[Any]], Any], arguments: dict[str, Any]) -> None:
        """Run Keras's loop until the chief ends training.

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
                self._worker.connect(self.served.shards)
                passed = self._worker.ask(_BEGINNING)
            except PeerLostError:
                if joins is None:
                    raise
                # The call has ended meanwhile. The exchange at its end shows whether the chief is lost.
                return
            assert passed is not None
            begun, _ = passed
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
        self._worker.kept[step] = batch
        if self._worker.assigned is None and self._worker.ask(ANY_STEP) is not None:
            raise _TrainingEnded
        self._compute_visited()
        return {}, self._step.state

    def _skip(self) -> None:
        """Skip a batch whose step was completed before this worker joined."""
        now = time.monotonic()
        if now - self._asked_at >= _ASK_EVERY:
            self._asked_at = now
            passed = self._worker.ask(_BEGINNING)
            assert passed is not None
            if passed[0].kind == "close":
                raise _TrainingEnded

    def _compute_visited(self) -> None:
        """Compute the assigned steps of visited batches, until a later step is assigned."""
        worker = self._worker
        while True:
            assert worker.assigned is not None
            if (step := worker.assigned.step) >= self._steps:
                return
            if worker.ask(*self._computed(step, worker.kept[step])) is not None:
                raise _TrainingEnded

    def _computed(self, step: int, batch: Any) -> tuple[WorkDone, Sequence[Any]]:
        worker, timer = self._worker, self.job.timer
        data = read_batch(batch)
        rows, traced = self._step.look_up(data), self._step.traced
        timer.lap("input")
        if self._step.make_room(step, data):
            traced = 0
            timer.lap("compute")
        weights, _ = worker.pull(rows)
        done = self._step.compute(step, data, rows, weights, worker.values)
        return worker.end(done, compiled=self._step.traced != traced, examples=data.examples)

    def _end_epoch(self, epoch: int) -> None:
        """Wait until the next epoch begins, and compute steps that lost workers have left undone."""
        # Workers wait while the chief evaluates. That time does not belong to a step.
        self.job.timer.stop()
        while (passed := self._worker.ask(AtCall(epoch + 1, self._steps))) is None:
            self._compute_visited()
            self.job.timer.stop()
        self.model.stop_training = self.model.stop_training or passed[0].kind == "close"


class _EpochEnd(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function at the end of each epoch."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__()
        self._act = act

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the function."""
        self._act(epoch)
