"""Keras on PyTorch: adapts the steps of its trainer.

`train_step` runs once for each replica, on the model's own variables, with `optimizer.apply` replaced by a
recorder. Afterwards the variables are restored. The total is applied to the same variables.

PyTorch runs the program's Python in each step and has no graph that shows which variables the step writes.
Three things follow from that:

* The layers' state: copying all of it in each step would cost as much memory as the state has. So the first
  step copies everything, and later steps copy only the random seeds and the tensors that a step has changed
  before. Keras's `assign` is observed, so that a tensor is copied before its first assignment. A write in
  place is detected too late for a copy: the tensor's version counter shows it after the step. The step is
  then refused, unless an earlier step made such a write. A write to `tensor.data` does not change the
  counter. The first step compares values, so a tensor that it writes in this way counts as changed from then
  on. A tensor that only a later step writes in this way is neither restored nor reported.
* Gradients: PyTorch adds to `tensor.grad`. A replica starts without gradients, because it must not add to
  those of the previous replica. A `train_step` that leaves gradients may intend to add to them in the next
  step, which replicas cannot do. The gradients therefore stay until the next step, and a backward pass that
  adds to them is an error. A step that sets them to zero first is fine.
* Rounds: a step of several rounds repeats everything up to the point where the previous round ended. If that
  point is the loss of Keras's own step, the forward pass can be kept instead (`ForwardPass`): outputs with
  their graph, and every value that the pass has changed. PyTorch refuses the backward pass of a graph whose
  tensors have been written to since. Then the round is computed from its beginning, in this step and in all
  later steps.
"""

import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import torch

from lockstep.collectives.shared.pool import SharedPool
from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras import assignments, randomness
from lockstep.keras.backends.common import (
    build_by_call,
    has_own,
    refuse_overwriting_gradients,
    shapes_of,
)
from lockstep.keras.backends.contract import (
    EQUAL,
    GRADIENTS,
    METRICS,
    PRESENT,
    STATES,
    VARIABLE,
    BlockUpdate,
    Partial,
    StepKind,
    Total,
    Trace,
    TrainFunctionCall,
)
from lockstep.keras.backends.growth import combinable, growths_of
from lockstep.keras.backends.logs import LogTemplate, MetricResults, mapped
from lockstep.keras.backends.losses import (
    MEANS,
    by_density,
    divided,
    replica_step,
    weighted_gradients,
    weighted_means,
)
from lockstep.keras.backends.multi_update import (
    EndOfRound,
    StepForm,
    Update,
    UpdateRecorder,
    hidden,
    refuse_own_update,
)
from lockstep.keras.backends.torch_blocks import TorchBlocks, TorchBlockUpdate
from lockstep.keras.backends.torch_tensors import (
    borrowed,
    copied,
    device_random_states,
    enable_determinism,
    int32,
    log_value,
    seeded,
    set_device_random_states,
    to_numpy,
    weighted,
)
from lockstep.keras.backends.whole_batch import (
    MetricArguments,
    StepGathers,
    refusing_to_gather,
    updating,
    with_figures,
)
from lockstep.keras.private.common import (
    REDUCE_WEIGHTED_VALUES,
    added_losses,
    layers_of,
    set_added_losses,
    stored_value,
)
from lockstep.keras.private.torch import versions
from lockstep.keras.seeds import GOLDEN
from lockstep.keras.variables import VariableState, assign, optimizers_of, seed_positions
from lockstep.worker import job
from lockstep.worker.patch_registry import replaced


class TorchBackend:
    """The `lockstep.keras.backends.contract.Backend` of PyTorch."""

    def __init__(self) -> None:
        # A single replica takes Keras's own step, which must also compute equal bits each time.
        self._prepared = job.is_worker()
        if self._prepared:
            enable_determinism(job.current().settings.threads)

    def build(self, model: Any, kind: StepKind, batch: Callable[[], Any]) -> None:
        """Create a model's variables by calling it with symbolic inputs."""
        build_by_call(model, kind, batch)

    def program(self, model: Any, kind: StepKind, trace: Trace | None = None) -> "TorchProgram":
        """Prepare a step of a built model."""
        self._prepare()
        refuse_unsupported(model, kind)
        if model.jit_compile:
            # The result of torch.compile depends on the shapes that the process has used before.
            warnings.warn(
                "jit_compile=True is ignored: on the PyTorch backend several replicas run their steps "
                "uncompiled, so that the results do not depend on the number of workers",
                stacklevel=2,
            )
        return TorchProgram(model, kind)

    def function(self, model: Any, step: Callable[[Any, Any], tuple[Any, Any]], kind: StepKind) -> Any:
        """Return `f(batches) -> logs or outputs`, as `TorchTrainer` calls it with a list of one batch."""
        return lambda batches: step(None, batches[0])[0]

    def plain_step(self, model: Any, kind: StepKind, function: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step with Keras's own function; see `Backend`."""
        tensors = [variable.value for variable in model.trainable_variables]
        before = [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors]
        try:
            return function([keras.tree.map_structure(copied, batch)]), None
        finally:
            # A later step that does not clear the gradients would add to those of this step.
            for tensor, gradient in zip(tensors, before, strict=True):
                tensor.grad = gradient

    def training_state(self, model: Any) -> "TorchState":
        """Return the state of the training steps of `model`."""
        return TorchState(model)

    def intercepted(
        self, model: Any, function: Any, execute: Callable[[TrainFunctionCall], tuple[Any, Any]]
    ) -> Callable[..., Any]:
        """Return `f(batches) -> logs`, as `TorchTrainer` calls it with a list of one batch."""
        return lambda batches: execute(
            TrainFunctionCall(None, lambda: (function(batches), None), lambda: None)
        )[0]

    def updater(self, update: Update) -> Callable[[Sequence[npt.NDArray[Any] | None]], None]:
        """Return a function that makes an update in place; see `Backend`."""

        def apply(gradients: Sequence[npt.NDArray[Any] | None]) -> None:
            tensors = [None if gradient is None else borrowed(gradient) for gradient in gradients]
            with torch.no_grad():
                update.apply(
                    [
                        None if t is None else t.to(v.value.device)
                        for t, v in zip(tensors, update.variables, strict=True)
                    ]
                )

        return apply

    def compilations(self) -> int:
        """Return 0, because PyTorch does not compile functions."""
        return 0

    def settle(self) -> None:
        """Do nothing, because `apply` has read its totals when it returns."""

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Return the array as NumPy sees it: in place on a CPU, otherwise a copy."""
        return to_numpy(array) if isinstance(array, torch.Tensor) else np.asarray(array)

    def on_host(
        self,
        function: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
        array: Any,
        row: tuple[int, ...],
        dtype: npt.DTypeLike,
    ) -> Any:
        """Call a function of NumPy; see `Backend`."""
        if isinstance(array, torch.Tensor) and array.is_meta:
            # Keras asks only for shapes.
            return keras.ops.zeros((*array.shape, *row), keras.backend.standardize_dtype(dtype))
        return keras.ops.convert_to_tensor(function(self.to_numpy(array)))

    def _prepare(self) -> None:
        """Enable determinism in the first call; later, warn if the script has disabled it."""
        if self._prepared:
            if not torch.are_deterministic_algorithms_enabled():
                warnings.warn(
                    "the script has disabled torch.use_deterministic_algorithms: equal bits are no "
                    "longer guaranteed",
                    stacklevel=3,
                )
            return
        self._prepared = True
        enable_determinism(job.current().settings.threads)


@dataclass(frozen=True)
class StateTensor:
    """A tensor of layer state, with its path for messages."""

    path: str
    tensor: torch.Tensor
    is_seed: bool = False

    @property
    def changes_equally(self) -> bool:
        """Whether each replica makes the same change: to seeds and to step counters of PyTorch modules."""
        return self.is_seed or self.path.endswith("num_batches_tracked")

    def name(self, position: int) -> str:
        """Return the name of its change, or of its new value, in a partial."""
        sums = self.changes_equally or self.tensor.is_floating_point()
        return f"{STATES}{position}" if sums else f"{EQUAL}{position}/{self.path}"


@dataclass(frozen=True)
class VariablesBefore:
    """The variables at the beginning of a replica's step.

    Attributes:
        copies: copies of the layer state that the step may change or has assigned, by position.
        state_versions: the version counters of the layer state.
        trainable_versions: the version counters of the trainable variables; writes of updates do not count.
        updated: the variables that updates of earlier rounds have changed, with copies, by their ids.
    """

    copies: dict[int, torch.Tensor]
    state_versions: Sequence[int]
    trainable_versions: list[int]
    updated: dict[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Copier:
    """A `VariableObserver` that copies the layer state that a step assigns, before its first assignment.

    Attributes:
        positions: the positions of the tensors, by the ids of the tensors.
        copies: the copies, by position.
    """

    positions: Mapping[int, int]
    copies: dict[int, torch.Tensor]

    def on_create(self, variable: Any) -> None:
        """Do nothing: the variable belongs to the step."""

    def on_assign(self, variable: Any) -> None:
        """Copy the value of a variable of the layers' state."""
        tensor = stored_value(variable)
        i = self.positions.get(id(tensor))
        if i is not None and i not in self.copies:
            self.copies[i] = tensor.detach().clone()


def _is_nonzero(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided:
        return True
    # In most cases, a few elements are enough.
    return bool(tensor.reshape(-1)[:16].any()) or bool(tensor.any())


@contextmanager
def _refused_additions(model: Any) -> Iterator[None]:
    """Within the block, raise ModelError if a backward pass adds to gradients from before it."""
    paths: list[str] = []
    handles = []
    for variable in model.trainable_variables:
        tensor = variable.value
        if tensor.grad is None:
            continue
        before, version = weakref.ref(tensor.grad), versions([tensor.grad])[0]

        def note(
            tensor: torch.Tensor, before: Any = before, version: int = version, path: str = variable.path
        ) -> None:
            # Setting them to zero counts as a write, too.
            if tensor.grad is before() and versions([tensor.grad]) == [version + 1]:
                paths.append(path)

        handles.append(tensor.register_post_accumulate_grad_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if paths:
        raise ModelError(
            f"the step adds to the gradient of {min(paths)!r} that the step before has left, as PyTorch does "
            "until zero_grad: replicas keep such gradients only within a step; call self.zero_grad() at the "
            "beginning of the step, or add gradients of several steps up in variables with trainable=False, "
            "or give the optimizer gradient_accumulation_steps"
        )


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass of a replica in a round that ended at its loss. The next round may continue it.

    Attributes:
        replica: the replica's id.
        outputs: the model's outputs, with PyTorch's graph for the backward pass.
        state: the values of the layers' state that the pass has changed, by position.
        metrics: the values of the metrics.
        losses: the losses that layers have added; see `added_losses`.
        random: the global random states, and those of devices.
    """

    replica: int
    outputs: Any
    state: Mapping[int, torch.Tensor]
    metrics: Sequence[torch.Tensor]
    losses: Any
    random: tuple[Any, Any]


class TorchState(VariableState):
    """The state of a model's steps: variables, and the buffers of PyTorch modules."""

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the variables and buffers that steps read and write, by path."""
        return {**super().named_state(state), **module_buffers(self._model)}

    def lasting_variables(self) -> Mapping[str, Any]:
        """Return the variables of the model and its optimizers, and the buffers of modules, by path."""
        return {**super().lasting_variables(), **module_buffers(self._model)}

    def load(
        self,
        state: Any,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        in_place: bool = False,
        shared: SharedPool | None = None,
    ) -> Any:
        """Assign the values of `arrays` to the variables and buffers."""
        buffers = module_buffers(self._model)
        values = {name: array for name, array in arrays.items() if name not in buffers}
        assign(self._model, values, whole=True)
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(borrowed(arrays[name]))


def module_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of PyTorch modules, which Keras wraps but does not track, by path."""
    # A layer also lists the buffers of its inner layers.
    paths_and_tensors = {
        id(tensor): (f"{layer.path}/{name}", tensor)
        for layer in layers_of(model)
        for name, tensor in layer.named_buffers()
    }
    return dict(paths_and_tensors.values())


class TorchProgram(TorchState):
    """The `lockstep.keras.backends.contract.Program` of one kind of step of one model. `state` is None."""

    traced = 0
    varies = True

    def __init__(self, model: Any, kind: StepKind) -> None:
        super().__init__(model)
        assignments.install()
        self._kind = kind
        self._state = _state_of(model)
        self._tensors = [entry.tensor for entry in self._state]
        self._seeds = {i for i, entry in enumerate(self._state) if entry.is_seed}
        self._trainable = [variable.value for variable in model.trainable_variables]
        self._metrics = [variable.value for variable in model.metrics_variables]
        layer_metrics = {
            id(variable.value)
            for layer in layers_of(model)
            if layer is not model
            for variable in layer.metrics_variables
        }
        # A program may list a metric twice; a total is added to it once.
        self._distinct_metrics = list({id(metric): i for i, metric in enumerate(self._metrics)}.values())
        # A prediction updates only the metrics of layers.
        self._metrics_of_layers = [i for i in self._distinct_metrics if id(self._metrics[i]) in layer_metrics]
        self._positions = {id(tensor): i for i, tensor in enumerate(self._tensors)}
        # Positions of the layers' state: those that steps have changed so far, with the seeds, or None before
        # the first step; those whose changes version counters do not show; those that the last step changed.
        self._changed_so_far: set[int] | None = None
        self._uncounted: set[int] = set()
        self._changing: list[int] = []
        self._gradients_left: list[torch.Tensor | None] = []
        self._leaves_gradients = False
        # Listing the optimizers takes longer than computing a small layer.
        self._optimizers = optimizers_of(model)
        self._form = StepForm()
        self._log_template: LogTemplate | None = None
        self._metric_arguments: MetricArguments | None = None
        self._outputs: list[tuple[int, Any]] = []
        self._blocks: tuple[list[Any], TorchBlocks | str] = [], ""
        self._pass: ForwardPass | None = None
        self._keeps_passes, self._can_go_on = False, True

    def compute(self, state: Any, share: Share, earlier: Sequence[Total]) -> Partial:
        """Return one replica's partial; afterwards, the model's variables have their values from before."""
        # The kept pass is forgotten first, so that a worker never holds the passes of two replicas.
        kept, self._pass = self._pass, None
        if len(earlier) == 1 and kept is not None and kept.replica == share.replica:
            # PyTorch raises RuntimeError if the graph needs layer state that has been written to since.
            with suppress(RuntimeError):
                return self._computed(share, earlier, kept)
            self._can_go_on = False
        kept = None
        return self._computed(share, earlier)

    def keep_passes(self, keeps: bool) -> None:
        """Set whether computes keep the forward pass of a replica; see `Program`."""
        self._keeps_passes = keeps
        if not keeps:
            self._pass = None

    def _computed(self, share: Share, earlier: Sequence[Total], kept: ForwardPass | None = None) -> Partial:
        data = keras.tree.map_structure(copied, share.data())
        with self._as_replica(share) as before, random_numbers(share.seed ^ share.replica * GOLDEN):
            partial = self._run(data, share, earlier, before, kept)
            self._refuse_own_updates(before)
            if self._form.is_last(len(earlier)):
                with torch.no_grad():
                    partial |= self._changes(before, share)
        with torch.no_grad():
            return combinable(self._model, self._kind, len(updating(earlier)), partial, share.weight)

    def located(self, error: Exception, state: Any, share: Share, earlier: Sequence[Total]) -> Exception:
        """Return the error, which the program's own line has raised."""
        return error

    def parts(self, number: int, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays, which are not packed."""
        return arrays

    def is_last(self, number: int) -> bool:
        """Whether a round is the step's last."""
        return self._form.is_last(number)

    def form(self, number: int) -> str:
        """Return the form of the round that was computed last."""
        logs = self._log_template.text if self._log_template and self._form.is_last(number) else ""
        return f"{self._form.text(number)} {logs}"

    def apply(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the totals to the model's variables."""
        with torch.no_grad():
            totals = [divided(self._model, self._kind, total) for total in totals]
            last = totals[-1]
            self._note_gradients()
            for update, total in zip(self._form.updates(len(totals)), updating(totals), strict=False):
                self._update(update, total)
            return self._apply_rest(last), None

    def _apply_rest(self, last: Total) -> Any:
        """Apply everything but updates from the total of the last round; return the logs or None."""
        with torch.no_grad():
            for i in self._changing:
                tensor, name = self._tensors[i], self._state[i].name(i)
                change = borrowed(last[name], tensor.device)
                tensor.copy_(change) if name.startswith(EQUAL) else tensor.add_(change)
            if self._kind == "predict":
                for i in self._metrics_of_layers:
                    self._metrics[i].add_(borrowed(last[f"{METRICS}{i}"], self._metrics[i].device))
            if self._log_template is None:
                return None
            for i in self._distinct_metrics:
                self._metrics[i].add_(borrowed(last[f"{METRICS}{i}"], self._metrics[i].device))
            figures: Mapping[str, Any] = {}
            if self._metric_arguments is not None:
                device = keras.ops.convert_to_tensor(0).device
                figures = self._metric_arguments.computed(
                    self._model, last, lambda array: borrowed(array, device)
                )
            return mapped(log_value, with_figures(self._log_template.assembled(last), figures))

    def block_update(self, state: Any, totals: Sequence[Total], replicas: int) -> BlockUpdate | str:
        """Return the update by blocks of a step with one update of an elementwise optimizer."""
        updates = self._form.updates(len(totals))
        if len(totals) != 1 or len(updates) != 1 or self._metric_arguments is not None:
            return "a step has several updates, or losses or metrics that compare the examples of a batch"
        (update,), (before, blocks) = updates, self._blocks
        if not update.optimizer.built:
            return "the optimizer is not built"
        decisive = TorchBlocks.decisive(update)
        if len(decisive) != len(before) or not all(map(operator.is_, decisive, before)):
            if not isinstance(blocks, str):
                blocks.release()
            blocks = TorchBlocks.of(update, replicas)
            self._blocks = decisive, blocks
        if isinstance(blocks, str):
            return blocks
        total = divided(self._model, self._kind, totals[0])
        positions = {id(variable): i for i, variable in enumerate(blocks.trained)}
        gradients = {
            positions[id(variable)]: total[f"{GRADIENTS}{i}"]
            for i, (variable, present) in enumerate(zip(update.variables, total[PRESENT], strict=True))
            if present
        }
        if not any(gradient.size for gradient in gradients.values()):
            return "no weight has a gradient"
        if blocks.needs_all_gradients and len(gradients) < len(positions):
            return "a weight has no gradient"

        def rest() -> Any:
            self._note_gradients()
            return self._apply_rest(total)

        return TorchBlockUpdate(blocks, gradients, rest)

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs computed since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def shapes(self, state: Any, share: Share) -> list[tuple[int, ...]]:
        """Compute the replica, and return the shapes of its outputs."""
        self.compute(state, share, ())
        return shapes_of(self._outputs.pop()[1])

    def trained(self) -> Sequence[Any]:
        """Return the variables of the step's only update."""
        return [variable for update in self._form.updates(1) for variable in update.variables]

    def layers(self, state: Any) -> Mapping[str, Any]:
        """Return the values of the layers' state that the step changes."""
        return {f"{STATES}{i}": self._tensors[i] for i in self._changing}

    def layer_of(self, position: int) -> str | None:
        """Return the name of a variable that the step changes, or None."""
        wanted = self._model.non_trainable_variables[position].value
        return next((f"{STATES}{i}" for i in self._changing if self._tensors[i] is wanted), None)

    def put(
        self,
        state: Any,
        weights: Sequence[npt.NDArray[Any]],
        layers: Mapping[str, npt.NDArray[Any]],
        slots: Sequence[npt.NDArray[Any]] | None = None,
    ) -> Any:
        """Copy the arrays into the variables."""
        with torch.no_grad():
            for variable, array in zip(self.trained(), weights, strict=True):
                variable.value.copy_(borrowed(array))
            if slots is not None:
                for variable, array in zip(self._model.optimizer.variables, slots, strict=True):
                    variable.value.copy_(borrowed(array))
            for name, array in layers.items():
                kind, _, position = name.partition("/")
                tensor = (
                    self._model.non_trainable_variables[int(position)].value
                    if kind == VARIABLE
                    else self._tensors[int(position)]
                )
                tensor.copy_(borrowed(array))

    def finish(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Add the metrics of totals."""
        with torch.no_grad():
            if self._log_template is None:
                return {}, None
            for total in totals:
                for i in self._distinct_metrics:
                    self._metrics[i].add_(borrowed(total[f"{METRICS}{i}"], self._metrics[i].device))
            return mapped(log_value, self._log_template.assembled(totals[-1])), None

    def _run(
        self,
        data: Any,
        share: Share,
        earlier: Sequence[Total],
        before: VariablesBefore,
        kept: ForwardPass | None,
    ) -> dict[str, Any]:
        """Run the model's step. Return its partial, without the changes of variables."""
        model, weight, number = self._model, share.weight, len(earlier)
        if self._kind != "train":
            self._form.show(number)
        if self._kind == "predict":
            with torch.no_grad(), weighted_means(weight), refusing_to_gather():
                self._outputs.append((share.replica, model.predict_step(data)))
                return {f"{METRICS}{i}": self._metrics[i].detach().clone() for i in self._metrics_of_layers}
        gathers = StepGathers(earlier, share.start, weight, share.examples)
        with (
            replica_step(model, self._kind, weight, gathers) as (densities, results),
            _scaled_weights() as scaled,
        ):
            if self._kind == "test":
                partial = self._test(data, weight, results)
            else:
                partial = self._train(data, share, earlier, before, results, kept)
        if gathers.ended:
            self._form.show(number, ended=False)
            if gathers.metrics is not None:
                # A layer has updated a metric that needs the whole batch; its rows are in the last round.
                self._pass = None
            return gathers.arrays
        self._pass = None
        if not self._form.is_last(number):
            return partial
        self._metric_arguments = gathers.metrics
        partial |= gathers.arrays
        partial |= {f"{METRICS}{i}": metric.detach().clone() for i, metric in enumerate(self._metrics)}
        with torch.no_grad():
            if earlier:
                return partial
            return by_density(model, self._kind, partial, densities, weight, scaled=any(scaled))

    def _test(self, data: Any, weight: float, results: MetricResults) -> dict[str, Any]:
        with torch.no_grad(), suppress(EndOfRound):
            logs = self._model.test_step(data)
            return self._logged_values(logs, results, weight)
        return {}

    def _train(
        self,
        data: Any,
        share: Share,
        earlier: Sequence[Total],
        before: VariablesBefore,
        results: MetricResults,
        kept: ForwardPass | None,
    ) -> dict[str, Any]:
        number, weight, logs = len(earlier), share.weight, None
        # Keras's own step makes no backward pass before its loss. A round that gathers also has a graph: the
        # model may compute gradients itself, and without a graph PyTorch may compute different bits.
        keeps = self._keeps_passes and self._can_go_on and not earlier
        keeps = keeps and not has_own(self._model, "train_step") and "loss" in growths_of(self._model).whole
        updates, totals = self._form.updates(number), updating(earlier)
        with ExitStack() as stack:
            recorder = UpdateRecorder(
                len(totals),
                False,
                updates,
                lambda index: self._repeat(updates[index], totals[index], before),
                lambda update: stack.enter_context(hidden(update)),
                # Keras's own step changes nothing after its update.
                copies=has_own(self._model, "train_step"),
            )
            stack.enter_context(recorder.replacing_apply(self._model, self._optimizers, varies=True))
            weighed = stack.enter_context(weighted_gradients(self._model, weight))
            if keeps:
                stack.enter_context(self._keeping_pass(share.replica, before))
            if kept is not None:
                stack.enter_context(self._going_on_from(kept, before))
            with suppress(EndOfRound):
                logs = self._model.train_step(data) or {}
        self._form.show(number, recorder.update, ended=logs is not None)
        partial = self._gradients(recorder, 1.0 if weighed else weight)
        return partial if logs is None else partial | self._logged_values(logs, results, weight)

    @contextmanager
    def _keeping_pass(self, replica: int, before: VariablesBefore) -> Iterator[None]:
        """Within the block, keep the forward pass of Keras's own step when it reaches the loss."""
        model = self._model
        compute_loss = model.compute_loss

        def at_loss(x: Any, y: Any, y_pred: Any, *args: Any, **options: Any) -> Any:
            self._pass = ForwardPass(
                replica,
                y_pred,
                {i: self._tensors[i].detach().clone() for i in self._changed(before) | self._uncounted},
                [metric.detach().clone() for metric in self._metrics],
                added_losses(layers_of(model)),
                (randomness.current_states(), device_random_states()),
            )
            return compute_loss(x, y, y_pred, *args, **options)

        with replaced(model, "compute_loss", at_loss):
            yield

    @contextmanager
    def _going_on_from(self, kept: ForwardPass, before: VariablesBefore) -> Iterator[None]:
        """Within the block, Keras's own step uses the forward pass `kept`, and continues at the loss."""
        model = self._model
        compute_loss = model.compute_loss

        def at_loss(*args: Any, **options: Any) -> Any:
            # The loss may call the model, which then has to compute.
            call.close()
            with torch.no_grad():
                for i, value in kept.state.items():
                    if i not in before.copies:
                        before.copies[i] = self._tensors[i].detach().clone()
                    self._tensors[i].copy_(value)
                for metric, value in zip(self._metrics, kept.metrics, strict=True):
                    metric.copy_(value)
            set_added_losses(layers_of(model), kept.losses)
            states, devices = kept.random
            randomness.restore_states(states)
            set_device_random_states(devices)
            return compute_loss(*args, **options)

        with ExitStack() as call, replaced(model, "compute_loss", at_loss):
            call.enter_context(replaced(model, "call", lambda *args, **options: kept.outputs))
            yield

    def _gradients(self, recorder: UpdateRecorder, weight: float) -> dict[str, Any]:
        """Return the weighted gradients of a round's update, and the variables for which there are gradients.

        A replica whose loss does not depend on a variable contributes zeros for it.
        """
        if recorder.update is None:
            return {}
        present = [float(gradient is not None) for gradient in recorder.gradients]
        gradients = weighted(recorder.gradients, [v.value for v in recorder.update.variables], weight)
        return {PRESENT: torch.tensor(present)} | {f"{GRADIENTS}{i}": g for i, g in enumerate(gradients)}

    def _repeat(self, update: Update, total: Total, before: VariablesBefore) -> None:
        """Make the update of an earlier round, which lasts until the end of the step."""
        now = versions(self._trainable)
        with torch.no_grad():
            if not update.optimizer.built:
                update.optimizer.build(update.variables)
            for variable in update.changed:
                tensor = variable.value
                before.updated.setdefault(id(tensor), (tensor, tensor.detach().clone()))
            self._update(update, total)
        for i, (old, new) in enumerate(zip(now, versions(self._trainable), strict=True)):
            before.trainable_versions[i] += new - old

    def _update(self, update: Update, total: Total) -> None:
        gradients = [
            borrowed(total[f"{GRADIENTS}{i}"], variable.value.device) if present else None
            for i, (variable, present) in enumerate(zip(update.variables, total[PRESENT], strict=True))
        ]
        if not only_reads_gradients(update.optimizer):
            gradients = [None if g is None else g.clone() for g in gradients]
        update.apply(gradients)

    @contextmanager
    def _as_replica(self, share: Share) -> Iterator[VariablesBefore]:
        """Within the block, variables have a replica's values: its seeds, metrics at zero, no gradients."""
        everything = range(len(self._state))
        positions = everything if self._changed_so_far is None else self._changed_so_far
        copies = {i: self._tensors[i].detach().clone() for i in positions}
        metrics = [metric.detach().clone() for metric in self._metrics]
        with torch.no_grad():
            for i in self._seeds:
                self._tensors[i][0] ^= int32(share.replica * GOLDEN)
            for metric in self._metrics:
                metric.zero_()
        has_gradients, self._leaves_gradients = self._leaves_gradients, False
        if not has_gradients:
            self._forget_gradients()
        try:
            before = VariablesBefore(copies, versions(self._tensors), versions(self._trainable), {})
            with (
                assignments.observed_by(_Copier(self._positions, copies)),
                _refused_additions(self._model) if has_gradients else nullcontext(),
            ):
                yield before
        finally:
            with torch.no_grad():
                for tensor, value in before.updated.values():
                    tensor.copy_(value)
                for i, value in copies.items():
                    self._tensors[i].copy_(value)
                for metric, value in zip(self._metrics, metrics, strict=True):
                    metric.copy_(value)
            self._gradients_left = [tensor.grad for tensor in self._trainable]
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        for tensor in self._trainable:
            tensor.grad = None

    def _note_gradients(self) -> None:
        """Keep the gradients that a program's own step leaves, so that adding to them can be refused."""
        self._leaves_gradients = False
        if self._kind == "train" and has_own(self._model, "train_step"):
            for tensor, gradient in zip(self._trainable, self._gradients_left, strict=False):
                if gradient is not None and _is_nonzero(gradient):
                    tensor.grad = gradient
                    self._leaves_gradients = True
        self._gradients_left = []

    def _refuse_own_updates(self, before: VariablesBefore) -> None:
        for i, version in enumerate(versions(self._trainable)):
            if version != before.trainable_versions[i]:
                refuse_own_update(self._model.trainable_variables[i].path)

    def _changed(self, before: VariablesBefore) -> set[int]:
        """Return the positions of the changed layers' state, if version counters show the change."""
        return {i for i, version in enumerate(versions(self._tensors)) if version != before.state_versions[i]}

    def _changes(self, before: VariablesBefore, share: Share) -> dict[str, Any]:
        """Return the changes of the layers' state, in a form that can be summed."""
        changed = self._changed(before)
        if self._changed_so_far is None:
            # A write to `tensor.data` does not change the version counter.
            uncounted = before.copies.keys() - changed - self._seeds
            self._uncounted = {i for i in uncounted if not torch.equal(before.copies[i], self._tensors[i])}
            self._changed_so_far = set(self._seeds)
        changed |= self._uncounted
        self._changed_so_far |= changed
        self._changing = sorted(changed)
        for i in changed - before.copies.keys():
            raise ModelError(
                f"the step changes {self._state[i].path!r} in place, but its first step did not: assign it "
                "with the `assign` of a Keras variable, or change it in every step"
            )
        return {self._state[i].name(i): self._change(i, before.copies[i], share) for i in self._changing}

    def _change(self, i: int, old: torch.Tensor, share: Share) -> torch.Tensor:
        entry = self._state[i]
        new = self._tensors[i].detach()
        if entry.is_seed:
            new = new.clone()
            new[0] ^= int32(share.replica * GOLDEN)
        if entry.changes_equally:
            # Only one replica's change counts: that of replica 0, whose seeds are the model's own, or that of
            # the only replica with examples.
            return new - old if share.replica == 0 or share.weight == 1 else torch.zeros_like(old)
        if not old.is_floating_point():
            return new.clone()
        # The difference of two infinite values is not a number.
        return torch.where(new == old, torch.zeros_like(old), new - old).mul_(share.weight)

    def _logged_values(self, logs: Any, results: MetricResults, weight: float) -> dict[str, Any]:
        """Return the values, weighted, that the step logs beyond the metrics' results."""
        self._log_template = LogTemplate(self._model, logs, results)
        values = {
            name: keras.ops.convert_to_tensor(v, "float32") for name, v in self._log_template.values.items()
        }
        self._log_template.values.clear()
        return {name: value.detach() * weight for name, value in values.items()}


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Within the block, global random states are derived from `seed`; afterwards, they are restored."""
    with randomness.random_numbers(seed), seeded(seed):
        yield


def refuse_unsupported(model: Any, kind: StepKind) -> None:
    """Raise ModelError if this backend does not support the step, or cannot combine it over replicas."""
    if model.steps_per_execution > 1:
        raise ModelError(
            f"steps_per_execution is {model.steps_per_execution}: with the PyTorch backend, Keras runs one "
            "step at a time; compile the model with steps_per_execution=1"
        )
    if kind == "train":
        refuse_overwriting_gradients(model)


def _state_of(model: Any) -> list[StateTensor]:
    """Return the layers' state: Keras's variables, then the buffers of PyTorch modules."""
    seeds, metrics = seed_positions(model), {id(variable) for variable in model.metrics_variables}
    tensors = [
        StateTensor(variable.path, variable.value, i in seeds)
        for i, variable in enumerate(model.non_trainable_variables)
        if id(variable) not in metrics
    ]
    return tensors + [StateTensor(path, tensor) for path, tensor in module_buffers(model).items()]


def only_reads_gradients(optimizer: Any) -> bool:
    """Whether `optimizer` is one of Keras's, none of which changes or stores its gradients."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return all(type(part).__module__.startswith("keras.") for part in (optimizer, inner))


@contextmanager
def _scaled_weights() -> Iterator[list[bool]]:
    """Within the block, note whether each loss of Keras divides the batch's weights by its density.

    A loss with a mask changes them in place, before metrics get them.
    """
    scaled: list[bool] = []
    reduce = getattr(*REDUCE_WEIGHTED_VALUES)

    def observed(
        values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size", **options: Any
    ) -> Any:
        weights = [sample_weight] if isinstance(sample_weight, torch.Tensor) else []
        before = versions(weights)
        loss = reduce(values, sample_weight=sample_weight, reduction=reduction, **options)
        scaled.append(reduction in MEANS and versions(weights) != before)
        return loss

    with replaced(*REDUCE_WEIGHTED_VALUES, observed):
        yield scaled
