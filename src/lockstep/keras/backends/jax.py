"""Keras on JAX: adapts the steps of its trainer, and eager functions of `strategy.run`.

This is the only file that uses the private parts of Keras's JAX trainer. `train_step` is traced with
`optimizer.stateless_apply` replaced by a recorder; a second compiled function applies the sum. Between the
two, the gradients are in Python.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any, NoReturn

import jax
import jax.monitoring
import jax.numpy as jnp
import keras
import numpy as np
import numpy.typing as npt

from lockstep.collectives.shared.pool import SharedPool
from lockstep.data.batch import GlobalBatch, PendingBatch, Share
from lockstep.errors import ModelError
from lockstep.keras.backends.common import (
    build_by_call,
    refuse_overwriting_gradients,
    shapes_of,
)
from lockstep.keras.backends.contract import (
    DENSITY,
    EQUAL,
    GRADIENTS,
    LOGS,
    METRICS,
    STATES,
    BlockUpdate,
    Partial,
    StepKind,
    Total,
    Trace,
    TrainFunctionCall,
)
from lockstep.keras.backends.eager_contract import Tensors
from lockstep.keras.backends.growth import combinable
from lockstep.keras.backends.jax_blocks import (
    JaxBlocks,
    JaxBlockUpdate,
    SharedValue,
    WholeGradients,
    owned,
    present,
)
from lockstep.keras.backends.logs import LogTemplate, MetricResults
from lockstep.keras.backends.losses import by_density, divided, replica_step, weighted_gradients
from lockstep.keras.backends.multi_update import EndOfRound, StepForm, UnknownValue, Update
from lockstep.keras.backends.optimizer_blocks import updating_part
from lockstep.keras.backends.packing import Packings, is_packable
from lockstep.keras.backends.traces import Traces
from lockstep.keras.backends.whole_batch import (
    MetricArguments,
    StepGathers,
    refusing_to_gather,
    updating,
    with_figures,
)
from lockstep.keras.private.common import forget_loss_ids, layers_of, stored_value, trained_by, with_clipped
from lockstep.keras.private.jax import set_synced
from lockstep.keras.randomness import random_numbers
from lockstep.keras.seeds import GOLDEN_32, seed_of_replica
from lockstep.keras.variables import momentum_of, named_arrays, refuse_misfits, seed_positions
from lockstep.system.notes import note
from lockstep.worker import job
from lockstep.worker.jax_cache import COMPILED
from lockstep.worker.patch_registry import replaced

_SHAPE = (
    "on the JAX backend a step updates weights through self.optimizer.stateless_apply, with the gradients of "
    "all trainable variables; to train with several optimizers, compile a model for each of them, as in "
    "Lockstep's examples/gan.py"
)

# Keras may pass a batch to `jax.device_put` before the train function gets it. A global batch, which is not
# an array, passes through unchanged as a node without children.
for _kind in (GlobalBatch, PendingBatch):
    jax.tree_util.register_pytree_node(_kind, lambda batch: ((), batch), lambda batch, _: batch)

_WEIGHTS, _SLOTS = 0, 2
"""The positions, in the state of a step that trains, of what divided updates have in shared memory."""

_CHECK_INDICES = "jax_check_static_indices"
"""The option with which JAX refuses an index outside of an array; older versions lack it."""


class JaxBackend:
    """The `lockstep.keras.backends.contract.Backend` of JAX."""

    def __init__(self) -> None:
        self._pending: list[jax.Array] = []

    def build(self, model: Any, kind: StepKind, batch: Callable[[], Any]) -> None:
        """Create a model's variables by calling it with symbolic inputs of JAX's dtypes."""
        build_by_call(model, kind, lambda: keras.tree.map_structure(_in_jax, batch()))

    def program(self, model: Any, kind: StepKind, trace: Trace | None = None) -> "JaxProgram":
        """Prepare a step of a built model."""
        refuse_unsupported(model, kind)
        if hasattr(jax.config, _CHECK_INDICES):
            # Otherwise JAX would replace an index outside of a replica's rows with the nearest one.
            jax.config.update(_CHECK_INDICES, True)
        return JaxProgram(model, kind, self._pending, trace)

    def function(self, model: Any, step: Callable[[Any, Any], tuple[Any, Any]], kind: StepKind) -> Any:
        """Return `f(state, iterator) -> (logs or outputs, state)`, as `JAXTrainer` calls it."""

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            results = []
            for batch in islice(iterator, model.steps_per_execution):
                result, state = step(state, batch)
                results.append(result)
            if not results:
                raise StopIteration
            if kind != "predict" or len(results) == 1:
                return results[-1], state
            return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *results), state

        return function

    def plain_step(self, model: Any, kind: StepKind, function: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step with Keras's own function; see `Backend`."""
        # The function reuses the memory of its state.
        state = jax.tree_util.tree_map(jnp.copy, JaxState(model, kind).present())
        result: tuple[Any, Any] = function(state, iter([batch]))
        return result

    def training_state(self, model: Any) -> "JaxState":
        """Return the state of the training steps of `model`."""
        return JaxState(model, "train")

    def intercepted(
        self, model: Any, function: Any, execute: Callable[[TrainFunctionCall], tuple[Any, Any]]
    ) -> Callable[..., Any]:
        """Return `f(state, iterator) -> (logs, state)`, as `JAXTrainer` calls it."""

        def skip(iterator: Iterator[Any]) -> None:
            if not list(islice(iterator, model.steps_per_execution)):
                raise StopIteration

        def intercepted(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            return execute(
                TrainFunctionCall(state, lambda: function(state, iterator), lambda: skip(iterator))
            )

        return intercepted

    def updater(self, update: Update) -> Callable[[Sequence[npt.NDArray[Any] | None]], None]:
        """Return a function that makes an update, compiled as a whole; the variables keep no old value."""
        optimizer, variables = update.optimizer, update.variables

        def applied(slots: Any, gradients: Any, weights: Any) -> Any:
            return optimizer.stateless_apply(slots, gradients, weights)

        compiled = jax.jit(applied, donate_argnums=(0, 2))

        def apply(gradients: Sequence[npt.NDArray[Any] | None]) -> None:
            slots = [variable.value for variable in optimizer.variables]
            arrays = [None if gradient is None else jnp.asarray(gradient) for gradient in gradients]
            weights, slots = compiled(slots, arrays, [variable.value for variable in variables])
            for variable, value in zip([*variables, *optimizer.variables], [*weights, *slots], strict=True):
                variable.assign(value)

        return apply

    def compilations(self) -> int:
        """Return the number of functions that JAX has compiled, or has read from its cache."""
        return _compilations()[0]

    def settle(self) -> None:
        """Wait for started updates, which read their totals in place."""
        jax.block_until_ready(self._pending)
        self._pending.clear()

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Wait for the array; return it as NumPy sees it: in place on a CPU, otherwise a copy."""
        return np.asarray(array)

    def on_host(
        self,
        function: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
        array: Any,
        row: tuple[int, ...],
        dtype: npt.DTypeLike,
    ) -> Any:
        """Call a function of NumPy; see `Backend`."""
        if not isinstance(array, jax.core.Tracer):
            return jnp.asarray(function(np.asarray(array)))
        result = jax.ShapeDtypeStruct((*array.shape, *row), dtype)
        return jax.pure_callback(lambda value: function(np.asarray(value)), result, array)


def _in_jax(leaf: Any) -> Any:
    """Return numbers as an array of JAX, in which for example int64 becomes int32; others unchanged."""
    return jnp.asarray(leaf) if getattr(leaf, "dtype", np.dtype(object)).kind in "biuf" else leaf


class JaxState:
    """The `lockstep.keras.backends.contract.TrainingState` of the steps of one kind of one model.

    `state` is Keras's own tuple for the kind: (trainable, non-trainable, optimizer, metrics variables)
    for train, without the optimizer's for test, and without the metrics' for predict.
    """

    def __init__(self, model: Any, kind: StepKind) -> None:
        self._model = model
        self._kind = kind

    @contextmanager
    def published(self, state: Any) -> Iterator[None]:
        """Within the block, the variables have the values of `state`, whose memory the next update reuses."""
        for variable, value in zip(self._variables(), (v for group in state for v in group), strict=True):
            variable.assign(value)
        # Keras must neither overwrite the variables now, nor read the state of the next step from them.
        set_synced(self._model, True)
        yield
        set_synced(self._model, False)

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the arrays that Keras threads through its steps, by the paths of their variables."""
        momentum = momentum_of(self._model)
        variables = [*self._variables(), *momentum]
        if state is None:
            return named_arrays(variables, [variable.value for variable in variables])
        values = [value for group in state for value in group]
        return named_arrays(variables, [*values, *(variable.value for variable in momentum)])

    def load(
        self,
        state: Any,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        in_place: bool = False,
        shared: SharedPool | None = None,
    ) -> Any:
        """Return a state with the values of `arrays`; assign them to the variables if there is no state."""
        momentum = momentum_of(self._model)
        variables = [*self._variables(), *momentum]
        named = named_arrays(variables, variables)
        refuse_misfits(named, arrays)
        for name, variable in named.items():
            if state is None or any(variable is other for other in momentum):
                # A variable may take over the memory of the value that it is assigned.
                variable.assign(np.array(arrays[name]))
        if state is None:
            return None
        # These are in the order of `named`, without the momentum.
        values = iter([arrays[name] for name in named])
        groups = [(list(group), [next(values) for _ in group]) for group in state]
        if in_place and self._reuses():
            return tuple(self._taken_over(i, old, new, shared) for i, (old, new) in enumerate(groups))
        loaded = tuple(_copies(new) for _, new in groups)
        if not _has_distribution():
            return loaded
        return jax.tree_util.tree_map(
            lambda new, old: jax.device_put(new, old.sharding), loaded, tuple(state)
        )

    def _taken_over(
        self, group: int, old: Sequence[Any], new: Sequence[npt.NDArray[Any]], shared: SharedPool | None
    ) -> list[Any]:
        """Return the values of a group of the state; its `old` values are no longer needed."""
        if shared is None or self._kind != "train" or group not in (_WEIGHTS, _SLOTS):
            return _written(old, new)
        values = [SharedValue.of(shared, array) for array in new]
        if not any(values):
            return _written(old, new)
        others = iter(_copies([array for array, value in zip(new, values, strict=True) if value is None]))
        return [next(others) if value is None else value for value in values]

    def prepare_load(self, state: Any) -> None:
        """Compile the functions that `load` calls to use the memory of this state."""
        if self._reuses():
            for group in state:
                _copier(_kinds([group[i] for i in _reusable(group)]))

    def _reuses(self) -> bool:
        """Whether a state's memory is used again: without compiled steps, other objects may refer to it."""
        return is_compiled(self._model) and not _has_distribution() and jax.default_backend() == "cpu"

    def present(self) -> Any:
        """Return Keras's tuple with the values of the variables."""
        values = iter([variable.value for variable in self._variables()])
        return tuple([next(values) for _ in group] for group in self._groups())

    def lasting_variables(self) -> Mapping[str, Any]:
        """Return the variables of the model and of the optimizer that it trains with, by path."""
        model = self._model
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        if self._kind == "train":
            variables += [*model.optimizer.variables, *momentum_of(model)]
        return named_arrays(variables, variables)

    def lasting_values(self, state: Any, variables: Mapping[str, Any]) -> Sequence[Any]:
        """Return the arrays in `state`, or of the variables if it is None."""
        if state is None:
            return [variable.value for variable in variables.values()]
        metrics = 0 if self._kind == "predict" else 1
        values = [value for group in state[: len(state) - metrics] for value in group]
        momentum = momentum_of(self._model) if self._kind == "train" else []
        return values + [variable.value for variable in momentum]

    def _groups(self) -> list[list[Any]]:
        model = self._model
        groups = [model.trainable_variables, model.non_trainable_variables]
        if self._kind == "train":
            groups.append(model.optimizer.variables)
        if self._kind != "predict":
            groups.append(model.metrics_variables)
        return groups

    def _variables(self) -> list[Any]:
        return [variable for group in self._groups() for variable in group]


Form = tuple[int, frozenset[str]]
"""The number of the optimizer's variables, and the names in a total."""


class JaxProgram(JaxState):
    """The `lockstep.keras.backends.contract.Program` of one kind of step of one model."""

    def __init__(
        self, model: Any, kind: StepKind, pending: list[jax.Array], trace: Trace | None = None
    ) -> None:
        super().__init__(model, kind)
        self._compiled = compiled = is_compiled(model)
        self._seeds = seed_positions(model)
        self._compute = jax.jit(self._packed_compute) if compiled else self._traced_compute
        self._apply = jax.jit(self._traced_apply, donate_argnums=0) if compiled else self._traced_apply
        self._finish = jax.jit(self._metrics_added) if compiled else self._metrics_added
        self._apply_rest = jax.jit(self._traced_rest, donate_argnums=(0, 1))
        # For another form, JAX traces the whole update again, with the optimizer's settings at that time.
        self._blocks: dict[Form, JaxBlocks | str] = {}
        self._whole_gradients: dict[Form, WholeGradients | None] = {}
        self._form = StepForm()
        self._trace = trace or Traces(model, kind).trace
        self.varies = not compiled
        self._packings = Packings()
        self._log_template: LogTemplate | None = None
        self._metric_arguments: MetricArguments | None = None
        self._changing: list[str] = []
        self._outputs: list[tuple[int, Any]] = []
        self._pending = pending
        self.traced = 0

    def compute(self, state: Any, share: Share, earlier: Sequence[Total]) -> Partial:
        """Return one replica's partial, before its arrays are ready."""
        portion = _portion(share)
        state = self._with_shared(state, present)
        earlier = [self.parts(number, total) for number, total in enumerate(earlier)]
        partial: Partial
        drawn = (
            nullcontext() if self._compiled else random_numbers(seed_of_replica(share.seed, share.replica))
        )
        with drawn:
            partial, outputs = self._compute(state, share.data(), portion, earlier)
        if self._kind == "predict":
            self._outputs.append((share.replica, outputs))
        return partial

    def keep_passes(self, keeps: bool) -> None:
        """Do nothing: each round computes everything again."""

    def is_last(self, number: int) -> bool:
        """Whether a round is the step's last."""
        return self._form.is_last(number)

    def form(self, number: int) -> str:
        """Return the form of the round that was computed last."""
        logs = self._log_template.text if self._log_template and self._form.is_last(number) else ""
        return f"{self._form.text(number)} {logs}"

    def located(self, error: Exception, state: Any, share: Share, earlier: Sequence[Total]) -> Exception:
        """Return the error, which the program's own line has raised."""
        return error

    def parts(self, number: int, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a partial or a total of round `number` by their own names."""
        return self._packings.unpacked(number, arrays)

    def apply(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the totals to the state, whose memory is donated; returns before the arrays are ready."""
        totals = [self.parts(number, total) for number, total in enumerate(totals)]
        if not self._compiled:
            # The memory of totals is reused, and uncompiled operations may keep the array itself.
            totals = [dict(zip(total, _copies(total.values()), strict=True)) for total in totals]
        state = self._with_shared(state, owned)
        logs, state, done = self._apply(state, totals, self._clipped(state, totals))
        self._pending.append(done)
        return logs, state

    def _clipped(self, state: Any, totals: Sequence[Mapping[str, Any]]) -> Any:
        """Return the gradients clipped by norms, as for blocks; None if no clipping is needed here."""
        if self._kind != "train" or self._undivided(totals):
            return None
        (total,) = totals
        if (form := _form(state, total)) not in self._whole_gradients:
            is_whole = len(_gradients(total)) == len(state[0])
            self._whole_gradients[form] = WholeGradients.of(self._model.optimizer) if is_whole else None
        whole = self._whole_gradients[form]
        if whole is None or not whole.clips:
            return None
        return whole.compute(state[2], total.get(DENSITY), _gradients(total))[1]

    def _undivided(self, totals: Sequence[Total]) -> str:
        """Return why workers cannot divide an update, whatever the optimizer is, or an empty string."""
        if not self._compiled:
            return "the step is not compiled"
        if jax.default_backend() != "cpu":
            return "the weights are on a GPU"
        if len(totals) != 1 or self._metric_arguments is not None:
            return "losses or metrics compare the examples of a batch"
        return ""

    def block_update(self, state: Any, totals: Sequence[Total], replicas: int) -> BlockUpdate | str:
        """Return the update by blocks of a compiled step with one update of an elementwise optimizer."""
        if why := self._undivided(totals):
            return why
        total = self.parts(0, totals[0])
        if (form := _form(state, total)) not in self._blocks:
            self._blocks[form] = JaxBlocks.of(self._model.optimizer, replicas)
        blocks = self._blocks[form]
        if isinstance(blocks, str):
            return blocks
        gradients = _gradients(total)
        if len(gradients) != len(state[0]):
            return "it does not have one gradient for each weight"
        if any(gradient.dtype != weight.dtype for gradient, weight in zip(gradients, state[0], strict=True)):
            return "a gradient's dtype differs from that of its weight"
        rest = {name: array for name, array in total.items() if not name.startswith(GRADIENTS)}
        blocks.take_back(state[0], state[2])
        return JaxBlockUpdate(
            blocks,
            state,
            gradients,
            total.get(DENSITY),
            lambda layers, metrics: self._apply_rest(layers, metrics, rest),
            self._pending,
        )

    def _with_shared(self, state: Any, values: Callable[[Sequence[Any]], list[Any]]) -> Any:
        """Return a state in which `values` replaces the values that divided updates may hold in memory."""
        if self._kind != "train":
            return state
        weights, layers, slots, *rest = state
        return (values(weights), layers, values(slots), *rest)

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs computed since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def shapes(self, state: Any, share: Share) -> list[tuple[int, ...]]:
        """Return the shapes of the replica's outputs; a compiled program only traces them."""
        if not self._compiled:
            self.compute(state, share, ())
            return shapes_of(self._outputs.pop()[1])
        return shapes_of(jax.eval_shape(self._compute, state, share.data(), _portion(share), [])[1])

    def trained(self) -> Sequence[Any]:
        """Return the trainable variables."""
        variables: Sequence[Any] = self._model.trainable_variables
        return variables

    def layers(self, state: Any) -> Mapping[str, Any]:
        """Return the values, in the state, of the layers' state that the step changes."""
        return {name: state[1][int(name.removeprefix(STATES))] for name in self._changing}

    def layer_of(self, position: int) -> str | None:
        """Return the name of a variable that the step changes, or None."""
        name = f"{STATES}{position}"
        return name if name in self._changing else None

    def put(
        self,
        state: Any,
        weights: Sequence[npt.NDArray[Any]],
        layers: Mapping[str, npt.NDArray[Any]],
        slots: Sequence[npt.NDArray[Any]] | None = None,
    ) -> Any:
        """Return a state with copies of these arrays."""
        others = list(state[1])
        for name, array in zip(layers, _copies(layers.values()), strict=True):
            others[int(name.partition("/")[2])] = array
        return _copies(weights), others, state[2] if slots is None else _copies(slots), *state[3:]

    def finish(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Add the metrics of totals."""
        logs, metrics = self._finish(state[3], list(map(dict, totals)))
        return logs, (*state[:3], metrics)

    def _metrics_added(
        self, metrics: list[Any], totals: Sequence[Mapping[str, Any]]
    ) -> tuple[Any, list[Any]]:
        for total in totals:
            metrics = self._metrics_after(metrics, total)
        return self._logs(metrics, {name: jnp.asarray(array) for name, array in totals[-1].items()}), metrics

    def _metrics_after(self, metrics: list[Any], total: Mapping[str, Any]) -> list[Any]:
        """Return the metrics' values with those of a total.

        A program may list a metric twice. The last value of a variable counts, as in Keras's own step. JAX
        refuses to reuse the memory of an array that a function gets twice and reads twice.
        """
        variables = self._model.metrics_variables
        positions = {id(variable): i for i, variable in enumerate(variables)}
        after = {each: metrics[i] + total[f"{METRICS}{i}"] for each, i in positions.items()}
        return [after[id(variable)] for variable in variables]

    def _packed_compute(
        self, state: Any, data: Any, portion: tuple[Any, Any, Any], earlier: Sequence[Any]
    ) -> tuple[Any, Any]:
        self.traced += 1
        with self._trace(lambda: self._form.is_last(len(earlier))):
            partial, outputs = self._traced_compute(state, data, portion, earlier)
        fixed = {n: (a.shape, a.dtype) for n, a in partial.items() if is_packable(n, a)}
        packing = self._packings.learn(len(earlier), fixed)
        # Without the barrier, XLA joins the packing with the operations before it, which takes longer.
        return packing.packed(jax.lax.optimization_barrier(partial), _joined), outputs

    def _traced_compute(
        self, state: Any, data: Any, portion: tuple[Any, Any, Any], earlier: Sequence[Any]
    ) -> tuple[Any, Any]:
        replica, weight, start = portion
        trainable, before, *rest = state
        mixed = self._mix_seeds(before, replica)
        # If the step trains, `_train` replaces this form.
        self._form.show(len(earlier))
        if self._kind == "predict":
            with refusing_to_gather():
                outputs, after = self._model.predict_step((trainable, mixed), data)
            return self._changes(mixed, after, replica, weight), outputs
        gradients: list[Any] = []
        rows = next(leaf.shape[0] for leaf in keras.tree.flatten(data) if leaf is not None)
        gathers = StepGathers(earlier, start, weight, rows)
        forget_loss_ids(layers_of(self._model))
        with replica_step(self._model, self._kind, weight, gathers) as (densities, results):
            if self._kind == "train":
                replica_state = [trainable, mixed, rest[0], _zeros(rest[1])]
                with weighted_gradients(self._model, weight) as weighed:
                    gradients, result = self._train(replica_state, data, earlier)
                if not weighed:
                    gradients = [g * weight.astype(g.dtype) for g in gradients]
            else:
                result = self._test((trainable, mixed, _zeros(rest[0])), data, len(earlier))
        if gathers.ended:
            return gathers.arrays, None
        partial = {f"{GRADIENTS}{i}": g for i, g in enumerate(gradients)}
        number = len(updating(earlier))
        if result is None:
            return combinable(self._model, self._kind, number, partial, weight), None
        logs, (after, metrics) = result
        self._metric_arguments = gathers.metrics
        partial |= gathers.arrays
        partial |= {f"{METRICS}{i}": m for i, m in enumerate(metrics)}
        partial |= self._changes(mixed, after, replica, weight)
        partial |= self._logged_values(logs, results, weight)
        if not earlier:
            partial = by_density(self._model, self._kind, partial, densities, weight)
        return combinable(self._model, self._kind, number, partial, weight), None

    def _test(self, state: Any, data: Any, number: int) -> Any:
        """Run the model's `test_step`; return (logs, (other layer state, metrics)), or None if it gathers."""
        try:
            logs, (_, *rest) = self._model.test_step(state, data)
        except EndOfRound:
            self._form.show(number, ended=False)
            return None
        return logs, rest

    def _train(self, state: Any, data: Any, earlier: Sequence[Any]) -> tuple[list[Any], Any]:
        """Run the model's `train_step` in the round that follows the totals `earlier`.

        Returns (the gradients of the round's own update, (logs, (other layer state, metrics)) or None if the
        step uses the new weights).
        """
        recorder = StatelessRecorder(self._model.optimizer, updating(earlier), [*state[0], *state[2]])
        try:
            with replaced(self._model.optimizer, "stateless_apply", recorder.stateless_apply):
                logs, (trainable, rest, optimizer, metrics) = self._model.train_step(tuple(state), data)
        except EndOfRound:
            pass
        except (TypeError, ValueError) as error:
            if not any(name in str(error) for name in (UnknownValue.__name__, "__jax_array__")):
                raise
        else:
            returned = [*trainable, *optimizer]
            if all(new is expected for new, expected in zip(returned, recorder.updated, strict=True)):
                return recorder.gradients or [], (logs, (rest, metrics))
            if recorder.gradients is None:
                raise ModelError(f"train_step returns weights that its optimizer did not update; {_SHAPE}")
        self._form.show(len(earlier), ended=False)
        return recorder.gradients or [], None

    def _traced_apply(
        self, state: Any, totals: Sequence[Mapping[str, Any]], clipped: Sequence[Any] | None
    ) -> tuple[Any, Any, Any]:
        with ExitStack() as stack:
            if clipped is not None:
                stack.enter_context(with_clipped(updating_part(self._model.optimizer), clipped))
            logs, state = self._applied(state, totals)
        # This array is ready when the whole computation is. Unlike the state's memory, its memory is not
        # donated to another array.
        return logs, state, jnp.zeros(())

    def _traced_rest(
        self, before: list[Any], metrics: list[Any], total: Mapping[str, Any]
    ) -> tuple[Any, Any, Any, Any]:
        total = divided(self._model, self._kind, total)
        logs, layers, metrics = self._logs_after([], self._layers_after(before, total), metrics, total)
        return logs, layers, metrics, jnp.zeros(())

    def _applied(self, state: Any, totals: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
        trainable, before, *rest = state
        totals = [divided(self._model, self._kind, total) for total in totals]
        after = self._layers_after(before, totals[-1])
        if self._kind == "predict":
            return None, (trainable, after)
        logs, after, metrics = self._logs_after(trainable, after, rest[-1], totals[-1])
        if self._kind == "test":
            return logs, (trainable, after, metrics)
        optimizer = rest[0]
        for total in totals:
            if gradients := _gradients(total):
                trainable, optimizer = self._model.optimizer.stateless_apply(optimizer, gradients, trainable)
        return logs, (trainable, after, optimizer, metrics)

    def _layers_after(self, before: list[Any], last: Mapping[str, Any]) -> list[Any]:
        after = [
            value + last[f"{STATES}{i}"] if f"{STATES}{i}" in last else value
            for i, value in enumerate(before)
        ]
        for name in last:
            if name.startswith(EQUAL):
                after[int(name.split("/")[1])] = jnp.copy(last[name])
        return after

    def _logs_after(
        self, trainable: list[Any], layers: list[Any], metrics: list[Any], last: Mapping[str, Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Update the metrics; return (the logs, the layers' state, the metrics' values)."""
        metrics = self._metrics_after(metrics, last)
        figures: Mapping[str, Any] = {}
        if self._metric_arguments is not None:
            model, values = self._model, (trainable, layers, metrics)
            groups = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
            pairs = [zip(group, held, strict=True) for group, held in zip(groups, values, strict=True)]
            with keras.StatelessScope(state_mapping=[pair for group in pairs for pair in group]) as scope:
                figures = self._metric_arguments.computed(model, last, jnp.asarray)
                # A loss may change the state of layers.
                layers, metrics = ([scope.get_current_value(v) for v in group] for group in groups[1:])
        return with_figures(self._logs(metrics, last), figures), layers, metrics

    def _mix_seeds(self, variables: list[Any], replica: Any) -> list[Any]:
        """Return the replica's random keys; replica 0 keeps the model's."""
        mixed = list(variables)
        for i in self._seeds:
            mixed[i] = variables[i].at[0].set(variables[i][0] ^ (jnp.uint32(replica) * jnp.uint32(GOLDEN_32)))
        return mixed

    def _changes(self, before: list[Any], after: list[Any], replica: Any, weight: Any) -> dict[str, Any]:
        """Return the changes of the layers' state, in a form that can be summed.

        Keras returns a variable that the step does not change as the same object.
        """
        changes = {}
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            if new is old:
                continue
            if i in self._seeds:
                # Every replica advances its key by the same amount: the change of replica 0 counts, or that
                # of the only replica.
                counts = (replica == 0) | (weight == 1)
                changes[f"{STATES}{i}"] = jnp.where(counts, new - old, jnp.zeros_like(old))
            elif jnp.issubdtype(old.dtype, jnp.floating):
                changes[f"{STATES}{i}"] = (new - old) * weight.astype(old.dtype)
            else:
                # `new` may be the memory of another array.
                path = self._model.non_trainable_variables[i].path
                changes[f"{EQUAL}{i}/{path}"] = jnp.copy(new)
        self._changing = list(changes)
        return changes

    def _logged_values(self, logs: dict[str, Any], results: MetricResults, weight: Any) -> dict[str, Any]:
        """Return the values, weighted, that the step logs beyond the metrics' results."""
        self._log_template = LogTemplate(self._model, logs, results)
        values = {name: jnp.asarray(v, jnp.float32) * weight for name, v in self._log_template.values.items()}
        self._log_template.values.clear()
        return values

    def _logs(self, metrics: list[Any], total: Mapping[str, Any]) -> dict[str, Any]:
        if self._log_template is None:
            return {}
        # These are copies, because an output that is an input would share the total's memory.
        logged = {name: jnp.copy(value) for name, value in total.items() if name.startswith(LOGS)}
        mapping = list(zip(self._model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self._log_template.assembled(logged)


class StatelessRecorder:
    """Replaces `optimizer.stateless_apply` in one round of a step.

    Attributes:
        gradients: the gradients of the round's own update, after the step has reached it.
        updated: the values of the weights and of the optimizer's variables after the last update.
    """

    def __init__(self, optimizer: Any, earlier: Sequence[Any], initial: list[Any]) -> None:
        self._optimizer = optimizer
        self._apply = optimizer.stateless_apply
        self._earlier = iter(earlier)
        self.gradients: list[Any] | None = None
        self.updated = initial

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[Any, Any]:
        """Make an earlier round's update, or record this round's.

        Raises:
            EndOfRound: the round ends here.
            ModelError: the gradients are not those of all trainable variables.
        """
        if len(grads) != (trained := len(trained_by(self._optimizer))):
            raise ModelError(
                f"train_step applied {len(grads)} gradients to an optimizer of {trained} variables; {_SHAPE}"
            )
        if (total := next(self._earlier, None)) is not None:
            weights, others = self._apply(optimizer_variables, _gradients(total), trainable_variables)
        elif self.gradients is not None:
            raise EndOfRound
        else:
            self.gradients = list(grads)
            weights, others = (
                [UnknownValue() for _ in trainable_variables],
                [UnknownValue() for _ in optimizer_variables],
            )
        self.updated = [*weights, *others]
        return weights, others


def _portion(share: Share) -> tuple[Any, Any, Any]:
    """Return the numbers that differ between replicas: the id, the weight, and the index of the first row."""
    return np.uint32(share.replica), np.float64(share.weight), np.int32(share.start)


def refuse_unsupported(model: Any, kind: StepKind) -> None:
    """Raise ModelError if this backend cannot combine the step over replicas."""
    _replace_distribution()
    if kind == "train":
        refuse_overwriting_gradients(model)


def _has_distribution() -> bool:
    """Whether Keras places the arrays of models on devices."""
    return keras.distribution.distribution() is not None


def _replace_distribution() -> None:
    """Unset a `DataParallel` over one device, because replicas train as it would.

    Raises:
        ModelError: another distribution is set.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    kind, devices = type(distribution).__name__, distribution.device_mesh.devices.size
    if not isinstance(distribution, keras.distribution.DataParallel):
        raise ModelError(
            f"keras.distribution is set to a {kind}, which can divide the weights of a model over devices; "
            "each replica of Lockstep has the whole model: remove keras.distribution.set_distribution"
        )
    if devices > 1:
        raise ModelError(
            f"keras.distribution is set to a {kind} over {devices} devices of this process; a replica of "
            f"Lockstep computes on one: remove keras.distribution.set_distribution, and start more workers"
        )
    keras.distribution.set_distribution(None)
    if job.current().is_chief:
        note("replicas replace keras.distribution.DataParallel over one device, with the same result")


def _joined(parts: Iterable[tuple[Any, int]]) -> Any:
    """Join arrays, flattened, each followed by a number of zeros."""
    flat = [(array.reshape(-1), jnp.zeros(zeros, array.dtype)) for array, zeros in parts]
    return jnp.concatenate([part for pair in flat for part in pair if part.size])


def is_compiled(model: Any) -> bool:
    """Whether JAX compiles the steps of a model."""
    return bool(model.jit_compile and not model.run_eagerly)


def _copies(arrays: Iterable[npt.NDArray[Any]]) -> list[jax.Array]:
    """Return copies of memory that may change afterwards.

    `jnp.array` may return before it has read its argument, if other computations run.
    """
    copies: list[jax.Array] = jax.block_until_ready([jnp.array(array) for array in arrays])
    return copies


def _written(old: Sequence[Any], new: Sequence[npt.NDArray[Any]]) -> list[Any]:
    """Return copies of `new`, in the memory of `old` where JAX can use it."""
    places = _reusable(old)
    copier = _copier(_kinds([old[i] for i in places]))
    # The arrays may change afterwards.
    copied = jax.block_until_ready(copier([old[i] for i in places], [new[i] for i in places]))
    written = dict(zip(places, copied, strict=True))
    others = iter(_copies([array for i, array in enumerate(new) if i not in written]))
    return [written[i] if i in written else next(others) for i in range(len(new))]


def _reusable(values: Sequence[Any]) -> list[int]:
    """Return the positions of the arrays whose memory can be used again."""
    arrays = [(i, array) for i, array in enumerate(values) if isinstance(array, jax.Array)]
    # A function cannot get the same memory twice.
    return sorted(
        {array.unsafe_buffer_pointer(): i for i, array in arrays if not array.is_deleted()}.values()
    )


_Kinds = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


def _kinds(arrays: Sequence[Any]) -> _Kinds:
    return tuple((array.shape, np.dtype(array.dtype)) for array in arrays)


@functools.lru_cache(maxsize=8)
def _copier(kinds: _Kinds) -> Any:
    """Return a compiled function that copies its second list into the memory of its first one."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    copied = jax.jit(lambda old, new: [jnp.copy(array) for array in new], donate_argnums=0, keep_unused=True)
    return copied.lower(structs, structs).compile()


def _form(state: Any, total: Mapping[str, Any]) -> Form:
    return len(state[2]), frozenset(total)


def _zeros(variables: list[Any]) -> list[Any]:
    return [jnp.zeros_like(variable) for variable in variables]


def _gradients(total: Mapping[str, Any]) -> list[Any]:
    count = sum(name.startswith(GRADIENTS) for name in total)
    return [total[f"{GRADIENTS}{i}"] for i in range(count)]


@functools.cache
def _compilations() -> list[int]:
    """Return a growing count of the functions that JAX compiles from now on."""
    counted = [0]

    def add(event: str, _: float, **details: Any) -> None:
        counted[0] += event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(add)
    return counted


class JaxEagerBackend:
    """The `lockstep.keras.backends.eager_contract.EagerBackend` of JAX, whose arrays are immutable."""

    def isolated(
        self, seed: int, assigned: Callable[[], Iterable[Any]] = tuple
    ) -> AbstractContextManager[None]:
        """Within the block a replica computes, with random numbers derived from `seed`."""
        return random_numbers(seed)

    def saved_value(self, variable: Any) -> Any:
        """Return the value of a variable."""
        return stored_value(variable)

    def to_tensor(self, leaf: Any) -> Any:
        """Return a leaf as an array of JAX, copied if it is another array."""
        if isinstance(leaf, jax.Array):
            return leaf
        array = np.asarray(leaf)
        return leaf if array.dtype.kind in "OSUM" else _copies([array])[0]

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Wait for the array; return it as NumPy sees it: in place on a CPU, otherwise a copy."""
        if isinstance(array, jax.core.Tracer):
            _refuse_tracing()
        return np.asarray(array)

    def custom_gradient(
        self, leaves: Tensors, merge: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `merge(leaves)`, for which `gradient` computes the gradients.

        `jax.grad` calls both with values, because it does not trace the function for later calls.
        """
        # A new array is a tracer within `jax.jit`, but not within `jax.grad` and `jax.vmap`.
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            _refuse_tracing()

        def merged(leaves: list[Any]) -> list[Any]:
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                _refuse_tracing()
            return list(merge(leaves))

        differentiable = jax.custom_vjp(merged)
        differentiable.defvjp(
            lambda leaves: (differentiable(leaves), None), lambda _, upstream: (list(gradient(upstream)),)
        )
        results: Tensors = differentiable(list(leaves))
        return results

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update from copies, because operations may still read the gradients when it returns."""
        copies = iter(_copies([gradient for gradient in gradients if gradient is not None]))
        update.apply([None if gradient is None else next(copies) for gradient in gradients])


def _refuse_tracing() -> NoReturn:
    """Raise ModelError: a value that replicas merge is symbolic."""
    raise ModelError(
        "replicas cannot synchronize in a function that JAX traces (jit, vmap, checkpoint): let the "
        "compiled function return gradients or values, and call optimizer.apply, all_reduce or all_gather "
        "with them in the function passed to strategy.run, or strategy.reduce after it; jax.grad and "
        "jax.value_and_grad support all_reduce and all_gather outside of compiled functions"
    )
