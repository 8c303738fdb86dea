"""What a Keras backend must do so that replicas can compute a model's steps."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy.typing as npt

from lockstep.data.batch import Share

Kind = Literal["train", "test", "predict"]
Partial = Mapping[str, Any]
"""A replica's part of a step: arrays of the backend by name, the same names for every replica."""

Total = Mapping[str, npt.NDArray[Any]]
"""The sum of all replicas' parts, by the same names."""


@dataclass(frozen=True)
class Execution:
    """One call that Keras's loop makes of its own train function.

    Attributes:
        state: before it; None where it lives in variables.
        run: makes the call; returns (logs, state).
        pass_over: takes the batches that the call would take, and does nothing with them. Ends as the call
            would where there is none.
    """

    state: Any
    run: Callable[[], tuple[Any, Any]]
    pass_over: Callable[[], object]


class Held(Protocol):
    """The state of the steps of one model: what they read and write."""

    def published(self, state: Any) -> AbstractContextManager[None]:
        """Within the block the model's variables have the values in `state`, as between steps."""

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the arrays of `state`, None for that of the variables, by names that a person recognises."""

    def load(self, state: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Return the state that has the values that `named_state` has returned, perhaps of another process.

        Raises:
            CheckpointError: they do not fit the model.
        """


class Program(Held, Protocol):
    """One step of one model, of one kind, in two halves with the sum over the replicas between them.

    A step takes one round of computing and summing, or one more for each further update that it makes; see
    `keras.backends.multi_update`. `state` is what the backend's Keras threads through its steps, or None
    where it lives in variables.
    """

    def compute(self, state: Any, share: Share, earlier: Sequence[Total]) -> Partial:
        """Compute the part of one replica that has examples, without changing `state`.

        Args:
            state: at the beginning of the step.
            share: the replica's examples.
            earlier: the totals of the rounds of this step before this one.

        Raises:
            ModelError: what the step changes cannot be combined over replicas.
        """

    def complete(self, number: int) -> bool:
        """Whether round `number`, counted from 0, of which a replica was computed, is the step's last."""

    def apply(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the sums of all rounds; return (logs or None, new state).

        Reads the totals until `settle` returns at most.
        """

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs (replica, nest of arrays) of the computes since the last call.

        Only programs that predict have outputs.
        """


class Backend(Protocol):
    """One Keras backend."""

    def build(self, model: Any, kind: Kind, batch: Callable[[], Any]) -> None:
        """Make the variables that a step of `model` needs, as Keras does for its first one.

        Nothing else changes: a step that is tried for it leaves no trace in variables.

        Args:
            model: is compiled.
            kind: of the step.
            batch: reads `(x, y, sample_weight)`, of which the first axis are the examples; called only if
                something is left to make.
        """

    def program(self, model: Any, kind: Kind) -> Program:
        """Prepare a step of `model`, whose variables exist already."""

    def function(self, model: Any, step: Callable[[Any, Any], tuple[Any, Any]], kind: Kind) -> Any:
        """Wrap `step(state, batch) -> (logs or outputs, state)` as what Keras's own loop calls.

        The result runs `model.steps_per_execution` steps a call.
        """

    def held(self, model: Any) -> Held:
        """Return the state of the training steps of `model`."""

    def watched(
        self, model: Any, function: Any, execute: Callable[[Execution], tuple[Any, Any]]
    ) -> Callable[..., Any]:
        """Wrap Keras's own train function of `model`: what the loop calls is `execute`."""

    def settle(self) -> None:
        """Return once no `apply` that was started still reads its total."""

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """Return the array as NumPy sees it, without a copy where the backend's memory allows it."""
