"""Training with one replica and checkpoints: a wrapper of Keras's own train function."""

from collections.abc import Callable
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.keras.backends.contract import Backend, Execution
from lockstep.keras.call_stack import CallStack
from lockstep.keras.state.snapshots import Snapshots


class Watched:
    """A wrapper of Keras's train function that takes the same steps.

    It skips calls that another process has already made. After a call, it saves a checkpoint if one is due. A
    call of the loop has `steps_per_execution` steps, even if the data has fewer left.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        model: Any,
        calls: CallStack,
        snapshots: Snapshots,
    ) -> None:
        self._model = model
        self._calls = calls
        self._snapshots = snapshots
        self._held = backend.held(model)
        self._call = backend.watched(model, function, self._execute)

    def __call__(self, *args: Any) -> Any:
        """Call the wrapped train function."""
        return self._call(*args)

    def _execute(self, execution: Execution) -> tuple[Any, Any]:
        call, model = self._calls.current, self._model
        steps = 1 if call.at_end else model.steps_per_execution
        if call.steps < call.skipped:
            execution.pass_over()
            call.steps += steps
            return self._passed_over(execution.state)
        logs, state = execution.run()
        call.steps += steps
        call.logs = logs
        self._calls.taken += steps
        if not call.at_end:
            self._snapshots.end_step(
                lambda whole: self._snapshots.take(whole, model, logs, self._held, state)
            )
        return logs, state

    def _passed_over(self, state: Any) -> tuple[Any, Any]:
        call = self._calls.current
        if call.steps < call.skipped:
            return {}, state
        if call.steps > call.skipped:
            raise CheckpointError(
                f"the checkpoint is of step {call.skipped} of {call.name}, where a model with "
                f"steps_per_execution={self._model.steps_per_execution} does not stop: compile it with "
                "the steps_per_execution that it had, or start over in another folder"
            )
        return self._snapshots.restore(self._model, self._held, state)
