"""Loops of the user's own that Lockstep drives: workers join and leave between their steps."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import keras

from lockstep.errors import InputError
from lockstep.keras.backends.contract import Backend
from lockstep.keras.consistency import CHECK_EVERY, Facts, agree, setting_facts, state_facts
from lockstep.keras.model_digest import LastModel
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.replica_run.named_state import NamedState
from lockstep.keras.state.checkpoint_callback import Checkpoint, ScriptCheckpoints
from lockstep.keras.state.settings import settings_of_parts
from lockstep.keras.state.snapshots import Snapshots
from lockstep.observability.events import CallStarted
from lockstep.worker.job import Job


class Driving:
    """Drives the loops of one process."""

    def __init__(
        self,
        job: Job,
        backend: Backend,
        calls: NumberedCalls,
        snapshots: Snapshots,
        checkpoints: ScriptCheckpoints,
        last: LastModel,
    ) -> None:
        self._job = job
        self._backend = backend
        self._calls = calls
        self._snapshots = snapshots
        self._resumable = snapshots.resumable
        self._checkpoints = checkpoints
        self._last = last

    def steps(
        self, count: int, state: Mapping[str, Any], checkpoint: Checkpoint | None = None
    ) -> Iterator[int]:
        """Yield the numbers of the steps that are to be taken, from 0 or from where the training is.

        A process that goes on from a checkpoint, or joins the others, takes one step more, whose results are
        overwritten: its models and optimizers may have no variables before. It does so in a loop that has
        finished, or has no step left, only if they have none.

        Raises:
            InputError: there are no steps, or a part of the state is none that can be given to others.
            CheckpointError: the state that was kept is of other parts.
        """
        if count < 0:
            raise InputError(f"a loop of {count} steps")
        held = NamedState(state)
        for part in state.values():
            if isinstance(part, keras.Model):
                self._last.trains(part)
        with self._resumable.call("steps") as call:
            if checkpoint is not None:
                self._checkpoints.begin(checkpoint)
            if finished := self._resumable.resume():
                if finished.kept is not None:
                    yield from self._pass_over(held, finished.kept)
                finished.raise_error()
                return
            call.leaves = lambda call: {"steps": call.steps, "positions": held.positions}
            try:
                with self._job.driving():
                    if self._resumable.behind:
                        if self._job.joins or call.skipped < count or held.incomplete:
                            # Members that this worker has joined already are further on, and wait for it.
                            with self._job.detached() if self._resumable.catches_up else nullcontext():
                                yield min(call.skipped, count - 1)
                        if self._job.joins and self._resumable.join():
                            finished = self._resumable.replay()
                            held.go_to(finished.kept["positions"])
                            finished.raise_error()
                            return
                        call.steps = call.skipped
                        self._snapshots.restore(None, held)
                    else:
                        self._job.events.publish(CallStarted(call.name))
                        settings = setting_facts(settings_of_parts(held.parts))
                        self._compare(f"the beginning of {call.name}", held, settings)
                    while call.steps < count:
                        yield call.steps
                        self._end_step(call, held, count)
            except GeneratorExit:
                self._resumable.finish(None)
                raise
            self._resumable.finish(None)

    def _pass_over(self, held: NamedState, past: Mapping[str, Any]) -> Iterator[int]:
        """Do what is left of a loop that finished before this process began.

        What it has given variables may be given them in no other; and what is read in one pass over a dataset
        may depend on how much was read in those before.
        """
        try:
            if held.incomplete and past["steps"]:
                with self._job.driving(), self._job.detached():
                    yield 0
        finally:
            # The program may leave the loop in its first step.
            self._resumable.replay()
            held.go_to(past["positions"])

    def _end_step(self, call: NumberedCall, held: NamedState, count: int) -> None:
        call.steps += 1
        self._calls.taken += 1
        if call.steps % CHECK_EVERY == 0:
            self._compare(f"after step {call.steps} of {call.name}", held)
        if len(self._job.view.workers) == 1:
            # A worker that is alone need not make any call in a step; only in one it hears who wants to join.
            self._job.exchange(lambda _, communicator: communicator.barrier(what=self._calls.where()))
        self._snapshots.end_step(lambda whole: self._snapshots.take(whole, None, None, held))
        if call.steps == count:
            self._snapshots.hold(lambda: self._snapshots.take(True, None, None, held))

    def _compare(self, what: str, held: NamedState, settings: Facts | None = None) -> None:
        if len(self._job.view.workers) > 1:
            state = state_facts(self._backend.concrete, held.named_state(None))
            agree(self._job, what, {**(settings or {}), **state})
