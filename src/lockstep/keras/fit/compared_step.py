"""One step that plain Keras and replicas compute from the same state, batch and random draws."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.keras.backends.contract import DENSITY, GRADIENTS, Backend, StepKind, Total
from lockstep.keras.backends.losses import divided
from lockstep.keras.backends.whole_batch import is_gather
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.fit.kept_steps import LayerRows, StepOutcome
from lockstep.keras.fit.layer_calls import LayerCalls, neutral
from lockstep.keras.fit.plain_function import (
    GRADIENT,
    FunctionWithGradients,
    moved_bits,
    single_precision,
)
from lockstep.keras.input.readings import whole_batch
from lockstep.keras.private.common import layers_of
from lockstep.keras.randomness import random_numbers
from lockstep.keras.reached_objects import unchanged
from lockstep.keras.variables import assign, flat_metrics, optimizers_of, step_state
from lockstep.worker.job import Job
from lockstep.worker.patch_registry import replaced

Array = npt.NDArray[Any]

EPSILONS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
"""The distances from 1 to the next number, by precision."""

_OF_OUTPUTS = 1 / 8
"""The weight of a change due to rounded outputs of layers, compared with one due to rounded inputs."""

_SCALE = 256.0
"""The largest loss scale in a comparison."""

_ROWS = 4
"""Rows of the inputs and outputs of layers that are compared between backends."""


class ComparedStep:
    """One step of a model, which is computed several times and leaves no trace.

    The constructor makes the first computation, that of plain Keras.

    Args:
        job: the job of one worker.
        backend: the backend of the model.
        model: the model, built and compiled.
        kind: the kind of the step.
        batch: the whole batch, in the form in which the program's step gets it.
        function: Keras's function for the step.
        plainly: returns a context in which Keras's own function is in use.

    Attributes:
        before: the values of the variables before the step.
        reference: what plain Keras computes.
        epsilon: the distance from 1 to the next number in the lowest precision of the comparison.
        exchanges: whether the replicas exchange rows, or densities of losses.
    """

    def __init__(
        self,
        job: Job,
        backend: Backend,
        model: Any,
        kind: StepKind,
        batch: Any,
        function: FunctionWithGradients,
        plainly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._backend = backend
        self._job = job
        self._plainly = plainly
        self.model = model
        self.kind: StepKind = kind
        self.batch = keras.tree.map_structure(self._host, batch)
        self.whole = whole_batch(self.batch, job.view.replicas)
        self.function = function
        self.program = backend.program(model, kind)
        self._computed: object = None
        try:
            self._begin()
        except Exception:
            if not self._computed:
                raise
            # Compiled functions, including those of replicas, keep this precision in later calls.
            self.function.only_half, self.function.made = True, None
            self._begin()
        self.exchanges = False

    def _single(self) -> AbstractContextManager[object]:
        """Return a context in which the model computes in single precision, if it can."""
        return nullcontext() if self.function.only_half else single_precision(self.model)

    def _begin(self) -> None:
        """Take the step of plain Keras."""
        self.epsilon = self._precision()
        with self.neutral(), self.first_values():
            self.before = self.state(None)
            self.reference = self.plain()

    @property
    def updates(self) -> int:
        """The number of updates that plain Keras makes in the step."""
        return len(self.function.updated)

    def updated(self) -> set[str]:
        """Return the paths of the variables that optimizers change."""
        optimizers = optimizers_of(self.model)
        changed = [*self.model.trainable_variables, *(v for each in optimizers for v in each.variables)]
        ids = {id(variable) for variable in changed}
        return {name for name, variable in self.variables().items() if id(variable) in ids}

    # Layers.

    @contextmanager
    def neutral(self) -> Iterator[None]:
        """Within the block, draws are constants, and rounding is minimal."""
        with neutral(self.model, lambda name: None, constant=True), self._single() as self._computed:
            yield

    @contextmanager
    def constant(self) -> Iterator[None]:
        """Within the block, layers draw constants, and change no lasting state."""
        with self.neutral(), random_numbers(0), unchanged(self.model):
            yield

    def layer_calls(self, data: Any) -> dict[Any, list[tuple[list[Array], list[Array]]]]:
        """Call the model; return the inputs and outputs of its layers, in the order of their first calls."""
        model = self.model
        layers = [layer for layer in layers_of(model) if layer is not model]
        order: list[Any] = []
        records = {id(layer): LayerCalls() for layer in layers}
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(records[id(layer)].recording(layer, order.append))
            with keras.StatelessScope(collect_losses=True):
                x = keras.tree.map_structure(
                    keras.ops.convert_to_tensor, keras.utils.unpack_x_y_sample_weight(data)[0]
                )
                model(x, training=self.kind == "train")
        return {layer: records[id(layer)].calls for layer in dict.fromkeys(order)}

    def layer_rows(self) -> list[LayerRows]:
        """Call the model; return the first rows of the inputs and outputs of its layers."""
        rows = []
        for layer, calls in self.layer_calls(self.batch).items():
            inputs, outputs = (
                [array[:_ROWS] if array.ndim else array for array in each] for each in calls[0]
            )
            rows.append(LayerRows(layer.name, inputs, outputs))
        return rows

    # The computations.

    def plain(
        self,
        change: Callable[[Any], Any] = lambda array: array,
        *,
        anew: bool = False,
        batch: Any = None,
    ) -> StepOutcome:
        """Return what plain Keras computes.

        Args:
            change: changes the weights and the inputs.
            anew: whether to make a new function, only for this computation.
            batch: the batch, by default the whole one.
        """
        model, kind, batch = self.model, self.kind, self.batch if batch is None else batch
        function = None if anew else self.function.made
        with (
            self._undone(),
            self._job.trying(1),
            self._plainly(),
            self.function.adding_gradients(),
            ExitStack() as stack,
        ):
            weights = {variable.path for variable in model.trainable_variables} & self.before.keys()
            assign(model, {name: change(self.before[name]) for name in sorted(weights)})
            if isinstance(batch, tuple | list):
                x = keras.tree.map_structure(
                    lambda array: None if array is None else _but_whole(array, change(array)), batch[0]
                )
                batch = type(batch)([x, *batch[1:]])
            if anew:
                # JAX keeps what it has compiled for a method.
                step = getattr(model, f"{kind}_step")
                stack.enter_context(replaced(model, f"{kind}_step", lambda *args: step(*args)))
            if function is None:
                getattr(model, f"make_{kind}_function")(force=True)
                function = getattr(model, f"{kind}_function")
            if not anew:
                self.function.made = function
            return self._outcome(*self._backend.plain_step(model, kind, function, batch))

    def rounded(self, number: int) -> StepOutcome:
        """Return what plain Keras computes from weights and inputs that differ in the last bits."""
        return self.plain(moved_bits(number, self.epsilon))

    def nearer(self, outcome: StepOutcome) -> StepOutcome:
        """Return a fraction of the distance of an outcome from the reference.

        The outputs of all layers were rounded up and down, so a small multiple of the resulting change is a
        bound.
        """

        def nearer(values: Mapping[Any, Array], reference: Mapping[Any, Array]) -> dict[Any, Array]:
            return {
                key: reference[key] + _OF_OUTPUTS * (value - reference[key])
                if key in reference and value.dtype.kind == "f" and value.shape == reference[key].shape
                else value
                for key, value in values.items()
            }

        reference = self.reference
        return StepOutcome(
            nearer(outcome.figures, reference.figures),
            nearer(outcome.gradients, reference.gradients),
            nearer(outcome.state, reference.state),
        )

    def of_replicas(self, step: GlobalStep) -> StepOutcome:
        """Return what the replicas compute."""
        with self._undone():
            result, state, totals = step.compute_once(self.whole)
            outcome = self._outcome(result, state)
            rounds = [(number, total) for number, total in enumerate(totals) if not is_gather(total)]
            self.exchanges = len(rounds) < len(totals) or any(
                DENSITY in step.program.parts(number, total) for number, total in rounds
            )
            for update, (number, total) in enumerate(rounds):
                named: Total = divided(self.model, self.kind, step.program.parts(number, total))
                outcome.gradients |= {
                    (update, int(name.partition("/")[2])): np.array(array)
                    for name, array in named.items()
                    if name.startswith(GRADIENTS)
                }
            return outcome

    def _outcome(self, result: Any, state: Any) -> StepOutcome:
        gradients, figures = {}, {}
        for path, leaf in keras.tree.flatten_with_path(result if result is not None else {}):
            if path and str(path[0]).startswith(GRADIENT):
                _, _, number, position = str(path[0]).split()
                gradients[int(number), int(position)] = self._host(leaf)
            else:
                name = "/".join(map(str, path))
                figures[f"outputs {name}".strip() if self.kind == "predict" else name] = self._host(leaf)
        return StepOutcome(figures, gradients, self.state(state))

    def expected_update(self, replicas: StepOutcome) -> dict[str, Array]:
        """Return the variables after Keras's own update from the replicas' gradients, if it is known."""
        if self.kind != "train" or len(self.function.updated) != 1:
            return {}
        if self.function.has_occurrences:
            # Plain Keras may not make the update from the sum of the occurrences.
            return {}
        (update,) = self.function.updated
        optimizer, positions = update.optimizer, range(len(update.variables))
        if hasattr(optimizer, "inner_optimizer") or not type(optimizer).__module__.startswith("keras."):
            return {}
        if replicas.gradients.keys() != {(0, position) for position in positions}:
            return {}
        with self._undone():
            self._backend.updater(update)([replicas.gradients[0, position] for position in positions])
            changed = {id(variable) for variable in update.changed}
            after = self.state(None)
        return {name: after[name] for name, variable in self.variables().items() if id(variable) in changed}

    def change(self, name: str, value: Array) -> Array:
        """Return the change of a variable by the step, or the new value if it is not floating-point."""
        return value - self.before[name] if value.dtype.kind == "f" else value

    def metrics(self) -> dict[str, str]:
        """Return the names of the metrics by the paths of their variables."""
        owners = {
            id(variable): metric.name
            for metric in flat_metrics(self.model.metrics)
            for variable in metric.variables
        }
        return {
            name: owners[id(variable)]
            for name, variable in self.variables().items()
            if id(variable) in owners
        }

    # The state.

    def variables(self) -> Mapping[str, Any]:
        """Return the variables that the step may change, by path."""
        return step_state(self.model)

    def _precision(self) -> float:
        """Return the distance from 1 to the next number in the lowest precision of the comparison."""
        model = self.model
        with self._single() as computed:
            dtypes = {layer.compute_dtype for layer in layers_of(model)}
        dtypes |= {keras.backend.standardize_dtype(variable.dtype) for variable in model.variables}
        if computed:
            # The program may cast numbers to half precision itself, or may not be able to call its model.
            with contextlib.suppress(Exception), self.constant():
                for layer_calls in self.layer_calls(self.batch).values():
                    arrays = [array for _, outputs in layer_calls for array in outputs]
                    dtypes |= {keras.backend.standardize_dtype(array.dtype) for array in arrays}
        return max(EPSILONS.get(dtype, 0.0) for dtype in (*dtypes, "float32"))

    def state(self, state: Any) -> dict[str, Array]:
        """Return copies of the values in a state of the program, or in the variables for None, by path."""
        return {name: self._host(array) for name, array in self.program.named_state(state).items()}

    def _host(self, array: Any) -> Any:
        # A copy: the figure of a metric may be its variable, which will be restored.
        return array if array is None else np.array(self._backend.to_numpy(array))

    @contextmanager
    def first_values(self) -> Iterator[None]:
        """Within the block, metrics have not seen any batch, so that they show what one step adds to them.

        Loss scales are small. At a large one, the gradients of the whole batch may overflow, but not those of
        replicas.
        """
        scaling = [each for each in optimizers_of(self.model) if hasattr(each, "initial_scale")]
        scales = [optimizer.dynamic_scale for optimizer in scaling if optimizer.built]
        variables = [*self.model.metrics_variables, *scales]
        before = [(variable, self._host(variable.value)) for variable in variables]
        self.model.reset_metrics()
        for variable in scales:
            variable.assign(min(_SCALE, float(self._host(variable.value))))
        with ExitStack() as stack:
            for optimizer in scaling:
                small = min(_SCALE, float(optimizer.initial_scale))
                stack.enter_context(replaced(optimizer, "initial_scale", small))
            try:
                yield
            finally:
                for variable, value in before:
                    variable.assign(value)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Within the block, a step may be taken; afterwards, the variables have their values from before.

        Variables that an optimizer creates in its first update get their first values.
        """
        with random_numbers(0), unchanged(self.model), ExitStack() as stack:
            for optimizer in optimizers_of(self.model):
                if not optimizer.built:
                    stack.enter_context(replaced(optimizer, "build", self._noting(optimizer.build)))
            try:
                yield
            finally:
                self._backend.settle()
                self.program.load(None, self.before)

    def _noting(self, build: Callable[[Any], None]) -> Callable[[Any], None]:
        def built(variables: Any) -> None:
            build(variables)
            self.before = {**self.state(None), **self.before}

        return built


def _but_whole(array: Array, changed: Array) -> Array:
    """Return changed numbers, but leave whole numbers, which may be indices, unchanged."""
    return np.where(array == np.round(array), array, changed) if array.dtype.kind == "f" else changed
