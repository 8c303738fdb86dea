"""The contract of a Keras backend whose replicas compute the steps of Keras's loops."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy.typing as npt

from lockstep.collectives.shared.divided_state import BlockGroup, DividedState, SlotValue
from lockstep.collectives.shared.pool import SharedPool
from lockstep.data.batch import Share
from lockstep.keras.backends.multi_update import Update

StepKind = Literal["train", "test", "predict"]
WholePart = Literal["loss", "inputs", "metrics", "test_step"]
"""A part of a step that is computed from the whole batch: `compute_loss` (`loss`), which gets labels, outputs
and weights, and with `inputs` also the inputs, or `compute_metrics` (`metrics`). With `test_step`, the loss
of Keras's own `test_step` is computed with the metrics."""

Partial = Mapping[str, Any]
"""A replica's contribution to a step: arrays of the backend, by names that are equal for all replicas."""

Total = Mapping[str, npt.NDArray[Any]]
"""The sum of all replicas' partials, by the same names."""

Trace = Callable[[Callable[[], bool]], AbstractContextManager[None]]
"""Returns the context of a trace; see `lockstep.keras.backends.traces.Traces.trace`."""

GRADIENTS, METRICS, STATES, LOGS = "gradient/", "metric/", "state/", "log/"
"""The prefixes of names of arrays that are summed: gradients, metric variables and changes of other state,
whose positions follow, and logs, whose paths follow."""

FIRST, LAYER = "first/", "layer/"
"""The prefixes of names of two kinds of state that a graph assigns (`StateKind` in
`lockstep.keras.backends.state_changes`); the number of the variable follows."""

STATE_CHANGES = (STATES, LAYER)
"""The prefixes of names of changes of floating-point state, which are combined as weighted means."""

EQUAL = "equal/"
"""The prefix of names of arrays that are equal on all replicas and not summed. A number and a path follow."""

GATHERED = "gather/"
"""The prefix of names of arrays that are joined and not summed. The axis and a number follow."""

SCALED = "scaled/"
"""The prefix of names of floating-point arrays that are summed as small integers; see
`lockstep.keras.scaled_sums`."""

RARE = "rare/"
"""The prefix of names of arrays that are mostly zeros on all replicas, and then not sent."""

DENSITY = "density"
"""The name of the array with the density of the loss, if it has its own denominator; see
`lockstep.keras.backends.losses`."""

PRESENT = "present"
"""The name of the array that says of each gradient whether the step has it, on PyTorch."""

VARIABLE = "variable"
"""The first part of the names of variables that a chief has changed; see `ServedProgram.put`."""


@dataclass(frozen=True)
class TrainFunctionCall:
    """A call that Keras's loop makes of its own train function.

    Attributes:
        state: the state before the call; None if it is in variables.
        run: makes the call; returns (logs, state).
        skip: consumes the batches of the call without training. At the end of the input, it raises the error
            of the call.
    """

    state: Any
    run: Callable[[], tuple[Any, Any]]
    skip: Callable[[], object]


class BlockUpdate(Protocol):
    """The update of one step, by blocks; see `lockstep.collectives.shared.divided_state`."""

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        """The groups of blocks."""

    @property
    def elements(self) -> int:
        """The elements of a block."""

    @property
    def versions(self) -> int:
        """The number of versions of the weights in shared memory; see `DividedLayout`."""

    def prepare(self) -> None:
        """Compile now what the update needs. The state before it does not change."""

    def forget_values(self) -> None:
        """Replace the weights and slots in the state, if it has them, by zeros that take no memory."""

    def has(self, state: DividedState) -> bool:
        """Whether this memory has the values of the slots."""

    def adopt(self, state: DividedState, updates: int, pool: SharedPool) -> bool:
        """Use this memory if `load` has left the weights and the slots there; return whether it has.

        Args:
            state: the shared memory.
            updates: how many its slots have had.
            pool: has the memory.
        """

    def own_values(self) -> None:
        """Copy the weights and the slots before the update, if they are in shared memory."""

    def own_slots(self) -> Iterable[SlotValue]:
        """Yield this worker's values of the slots, from wherever they are."""

    def fill(self, state: DividedState, block: int) -> None:
        """Write this worker's values of the slots of a block."""

    def compute(
        self, group: int, number: int, slots: Sequence[npt.NDArray[Any]]
    ) -> Sequence[npt.NDArray[Any]]:
        """Return the new weights and slots of a block, given its number in its group."""

    def finish(self, state: DividedState, updates: int, pool: SharedPool) -> tuple[Any, Any]:
        """Return (logs or None, new state), once all blocks are updated.

        Args:
            state: the shared memory.
            updates: the number of updates of its slots, including this one.
            pool: the pool that has the memory.
        """

    @property
    def release(self) -> Callable[[], None]:
        """A function that copies the slots' values, so that they no longer depend on the shared memory."""


class TrainingState(Protocol):
    """The state that the steps of one model read and write."""

    def published(self, state: Any) -> AbstractContextManager[None]:
        """Within the block, the model's variables have the values in `state`, as between steps."""

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the arrays in `state`, or in the variables if it is None, by names for messages."""

    def load(
        self,
        state: Any,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        in_place: bool = False,
        shared: SharedPool | None = None,
    ) -> Any:
        """Return the state with the values that `named_state` has returned, perhaps in another process.

        Args:
            state: any state of the model.
            arrays: the values.
            in_place: whether `state` is no longer needed, so that its memory may be used.
            shared: memory in which values may stay that are there; it changes only in divided updates.

        Raises:
            CheckpointError: the values do not fit the model.
        """

    def prepare_load(self, state: Any) -> None:
        """Compile now the functions with which `load` uses the memory of `state`, whose values stay."""

    def lasting_variables(self) -> Mapping[str, Any]:
        """Return the variables on which later steps depend, by name: those of metrics are not included."""

    def lasting_values(self, state: Any, variables: Mapping[str, Any]) -> Sequence[Any]:
        """Return the values of `lasting_variables` in `state`; faster than `named_state`."""


class Program(TrainingState, Protocol):
    """One step of one model, of one kind, in two halves with the sum over the replicas between them.

    A step takes one round of computing and summing, and one more for each further update; see
    `lockstep.keras.backends.multi_update`. `state` is the state that Keras threads through the steps of this
    backend, or None if it is in variables.

    Attributes:
        traced: the number of times that the backend has traced `compute` to compile it: once for each form of
            examples.
        varies: whether a step may take a different path from the one before, because its Python runs each
            time.
    """

    traced: int
    varies: bool

    def present(self) -> Any:
        """Return the state with the values of the variables, or None if the state is in the variables."""

    def compute(self, state: Any, share: Share, earlier: Sequence[Total]) -> Partial:
        """Return the partial of one replica that has examples, without changing `state`.

        Args:
            state: the state at the beginning of the step.
            share: the replica's examples.
            earlier: the totals of the earlier rounds of this step.

        Raises:
            ModelError: the changes that the step makes cannot be combined over replicas.
        """

    def keep_passes(self, keeps: bool) -> None:
        """Set whether a compute keeps the forward pass of a replica, from which the next one may go on.

        Computes do not keep it until this is set. If this is set to False, kept passes are forgotten.
        """

    def located(self, error: Exception, state: Any, share: Share, earlier: Sequence[Total]) -> Exception:
        """Return the error of a `compute`, raised by the line of the program that is at fault if possible."""

    def parts(self, number: int, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a partial or a total by names such as `gradient/0` and `metric/1`.

        A program may compute several of them as one array. Then the results are views of it.

        Args:
            number: the number of the round, from 0, in which this process has computed a replica.
            arrays: all arrays, or some of them.
        """

    def is_last(self, number: int) -> bool:
        """Whether round `number`, from 0, is the step's last, as shown by the last `compute` of it."""

    def form(self, number: int) -> str:
        """Return the form of round `number`, from 0, as a text; the last `compute` of it has shown it.

        It is equal for all replicas and on all workers.
        """

    def apply(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the totals of all rounds; return (logs or None, new state).

        It may read the totals until `settle` returns.
        """

    def block_update(self, state: Any, totals: Sequence[Total], replicas: int) -> BlockUpdate | str:
        """Return the update of a step as one that workers can divide, or why there is none.

        The blocks depend on the number of replicas. The update includes everything else that `apply` does. It
        may read the totals until `settle` returns. In the lists of `state`, values in shared memory replace
        arrays that show them.
        """

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs (replica, nest of arrays) of all computes since the last call.

        Only programs that predict have outputs.
        """

    def shapes(self, state: Any, share: Share) -> list[tuple[int, ...]]:
        """Return the shapes of a replica's outputs, by leaf, if possible without computing them.

        Only programs that predict have outputs.
        """


class ServedProgram(Program, Protocol):
    """A program that trains, for workers that keep neither the weights nor the layers' state.

    The rounds, the variables and the names of the layers' state are known after a `compute`.
    """

    def trained(self) -> Sequence[Any]:
        """Return the variables that the step updates, in the order of the gradients in a partial."""

    def layers(self, state: Any) -> Mapping[str, Any]:
        """Return the present values of the layers' state that the step changes, by the names in a partial."""

    def layer_of(self, position: int) -> str | None:
        """Return the name in `layers` of a non-trainable variable of the model, or None if the step keeps it.

        Args:
            position: the variable's index in `model.non_trainable_variables`.
        """

    def put(
        self,
        state: Any,
        weights: Sequence[npt.NDArray[Any]],
        layers: Mapping[str, npt.NDArray[Any]],
        slots: Sequence[npt.NDArray[Any]] | None = None,
    ) -> Any:
        """Return the state with other values.

        Arrays may be used in place: neither the caller nor their users change them while anything refers to
        them.

        Args:
            state: the state.
            weights: the values of the weights, in the order of `trained`.
            layers: the values of the layers' state.
            slots: the values of the optimizer's variables; None to keep them.
        """

    def finish(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the metrics of the totals of steps, in their order, and return (logs, new state).

        Args:
            state: the state.
            totals: the totals, at least one. They have no density.

        Returns:
            The logs of the last step, and the new state.
        """


class Backend(Protocol):
    """One Keras backend, for the steps of Keras's loops."""

    def build(self, model: Any, kind: StepKind, batch: Callable[[], Any]) -> None:
        """Create the variables that a step of `model` needs, as Keras does for its first step.

        If this runs a step, the step changes nothing else.

        Args:
            model: the compiled model.
            kind: the kind of the step.
            batch: returns `(x, y, sample_weight)` with the examples along the first axis. It is called only
                if variables are missing.
        """

    def program(self, model: Any, kind: StepKind, trace: Trace | None = None) -> Program:
        """Prepare a step of `model`, whose variables exist.

        Args:
            model: the model.
            kind: the kind of the step.
            trace: the trace of all programs of the step, if there are several.
        """

    def function(self, model: Any, step: Callable[[Any, Any], tuple[Any, Any]], kind: StepKind) -> Any:
        """Return a function that Keras's loop can call instead of its own.

        Each call runs `step(state, batch) -> (logs or outputs, state)` `model.steps_per_execution` times.
        """

    def plain_step(self, model: Any, kind: StepKind, function: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step with Keras's own function of the kind, from the values of the variables.

        Returns:
            The logs or outputs, and the state afterwards, as `Program.named_state` takes it.
        """

    def training_state(self, model: Any) -> TrainingState:
        """Return the state of the training steps of `model`."""

    def intercepted(
        self, model: Any, function: Any, execute: Callable[[TrainFunctionCall], tuple[Any, Any]]
    ) -> Callable[..., Any]:
        """Return a function that passes each call of Keras's own train function of `model` to `execute`."""

    def updater(self, update: Update) -> Callable[[Sequence[npt.NDArray[Any] | None]], None]:
        """Return a function that makes an update. It takes the gradients in the order of the variables.

        A variable without a gradient gets None. The variables are up to date after the call.
        """

    def compilations(self) -> int:
        """Return how many functions the backend has compiled since the first call; 0 if it does not compile.

        On TensorFlow, these are the traced functions of replicas.
        """

    def settle(self) -> None:
        """Wait until no started `apply` reads its totals."""

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Return the array as NumPy sees it, without a copy if the backend's memory allows it."""

    def on_host(
        self,
        function: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
        array: Any,
        row: tuple[int, ...],
        dtype: npt.DTypeLike,
    ) -> Any:
        """Call a function of NumPy with an array; this also works in a compiled function.

        Args:
            function: returns an array with the axes of its argument, and then those of `row`.
            array: the argument.
            row: the last part of the shape of the result.
            dtype: the dtype of the result.
        """
