"""Keras on TensorFlow: adapts the steps of its trainer, and eager functions of `strategy.run`.

`train_step` is traced once for each round, with `optimizer.apply` replaced by a recorder. Its graph shows the
variables that the step assigns. A second function around it restores them, so that replicas can be computed
one after the other; a third one applies the sum.

Plain Keras creates variables in the first step, so a model needs no `call` and a batch can be anything. A
custom step is therefore traced once, or run eagerly and undone, before the first step. This creates the
variables and changes nothing else.

`tf.summary` in a step writes in the computation of replica 0, which is the chief's: in the step's last
round, or with `run_eagerly` in the first one, because an eager step does not show in advance which round is
its last.

Four points complicate graphs:

* A graph of a round may use the new weights after its update, for example to log their norm. The graph of the
  round itself has no new weights, because the update needs the total. So such a step gets one more round: its
  trace is thrown away and made again (`RoundCount`, `RoundTrace.uses_update`).
* Totals are borrowed memory that the next call of the exchange reuses, and TensorFlow lets a variable share
  the memory of a tensor that is assigned to it. Each value of a total that a variable gets is therefore
  multiplied by `unit`, a tensor whose value is 1. A graph that knew the value would leave the product out.
* XLA compiles slices of a packed total more slowly than an update. Where XLA compiles an update, the update
  is a graph of its own with unpacked tensors. Everything else is one graph, because each call of a graph
  costs tens of microseconds.
* A step that runs eagerly does not show in advance which variables it assigns. All variables that Keras or
  the program's attributes name are copied first. Floating-point state and seeds always count as assigned. If
  an integer has changed, it is added to them, and the replica is computed again.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import islice
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras import tf_random_ops
from lockstep.keras.backends.common import (
    build_by_call,
    has_own,
    refuse_overwriting_gradients,
    shapes_of,
    without_effects,
)
from lockstep.keras.backends.contract import (
    DENSITY,
    EQUAL,
    GATHERED,
    GRADIENTS,
    LOGS,
    METRICS,
    VARIABLE,
    BlockUpdate,
    Partial,
    StepKind,
    Total,
    Trace,
    TrainFunctionCall,
)
from lockstep.keras.backends.eager_contract import Tensors
from lockstep.keras.backends.growth import combinable
from lockstep.keras.backends.logs import LogTemplate
from lockstep.keras.backends.losses import (
    by_density,
    is_proportional_to_loss,
    replica_step,
    weighted_gradients,
)
from lockstep.keras.backends.multi_update import (
    EndOfRound,
    RoundCount,
    StepForm,
    Update,
    UpdateRecorder,
    hidden,
    refuse_own_update,
)
from lockstep.keras.backends.packing import Packings, is_packable
from lockstep.keras.backends.tf_graphs import (
    AssignedVariables,
    RoundTrace,
    UpdateOperations,
    as_array,
    assign,
    assigned,
    borrowed,
    copied,
    executable,
    functions_run_eagerly,
    read,
    refuse_assignments,
    same_bits,
    scaled,
    seeds_of,
    traced,
    traces,
    with_custom_gradient,
)
from lockstep.keras.backends.traces import Traces
from lockstep.keras.backends.whole_batch import (
    MetricArguments,
    StepGathers,
    refuse_other_rows,
    refusing_to_gather,
    updating,
    with_figures,
)
from lockstep.keras.nests import structure_of
from lockstep.keras.private.common import layers_of, stored_value
from lockstep.keras.private.tensorflow import (
    exempt_from_autograph,
    register_lookups,
    summaries_recorded_if,
    wait_for_operations,
)
from lockstep.keras.randomness import random_numbers
from lockstep.keras.reached_objects import graph_of, unchanged
from lockstep.keras.seeds import seed_of_replica
from lockstep.keras.variables import VariableState, optimizers_of
from lockstep.worker.script import program_line


class TensorFlowBackend:
    """The `lockstep.keras.backends.contract.Backend` of TensorFlow."""

    def __init__(self) -> None:
        exempt_from_autograph("lockstep")
        register_lookups()

    def build(self, model: Any, kind: StepKind, batch: Callable[[], Any]) -> None:
        """Create a model's variables by calling it, or by trying a step if it cannot be called."""
        if getattr(model, f"{kind}_function") is not None:
            return
        if has_own(model, f"{kind}_step"):
            try_step(model, kind, batch())
            return
        before = _built_parts(model)
        try:
            build_by_call(model, kind, batch)
        except Exception as hindrance:
            # The step may succeed although Keras cannot call the model.
            changed = _built_parts(model) != before
            try:
                try_step(model, kind, batch())
            except Exception as error:
                if not changed:
                    raise
                # The failed call has built some layers, and the step fails because they are incomplete.
                raise _error_of_program(hindrance) from error

    def program(self, model: Any, kind: StepKind, trace: Trace | None = None) -> "TensorFlowProgram":
        """Prepare a step of a built model."""
        refuse_unsupported(model, kind)
        return TensorFlowProgram(model, kind, trace)

    def function(self, model: Any, step: Callable[[Any, Any], tuple[Any, Any]], kind: StepKind) -> Any:
        """Return `f(iterator) -> logs` or `f(batches) -> outputs`, as `TensorFlowTrainer` calls them."""

        def function(batches: Any) -> Any:
            results = [step(None, batch)[0] for batch in islice(batches, model.steps_per_execution)]
            if not results:
                raise StopIteration
            if kind != "predict":
                return results[-1]
            return keras.tree.map_structure(_joined_steps, *results)

        return function

    def plain_step(self, model: Any, kind: StepKind, function: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step with Keras's own function; see `Backend`."""
        # TensorFlow makes one tensor from a list. Keras passes tuples for the same reason.
        batch = keras.tree.lists_to_tuples(batch)
        tensors = keras.tree.map_structure(lambda a: None if a is None else tf.convert_to_tensor(a), batch)
        if kind == "predict":
            return function([tensors]), None

        def relaxed(*parts: Any) -> Any:
            # Keras's own batches of arrays have an open number of rows, because the last one is smaller. With
            # a known number, Keras's graph would have a constant in its place.
            nest = parts if isinstance(batch, tuple) else parts[0]
            return keras.tree.map_structure(_with_open_length, nest)

        return function(iter(tf.data.Dataset.from_tensors(tensors).map(relaxed))), None

    def training_state(self, model: Any) -> VariableState:
        """Return the state of the training steps of `model`."""
        return VariableState(model)

    def intercepted(
        self, model: Any, function: Any, execute: Callable[[TrainFunctionCall], tuple[Any, Any]]
    ) -> Callable[..., Any]:
        """Return `f(iterator) -> logs`, as `TensorFlowTrainer` calls it."""

        def skip(iterator: Any) -> None:
            if model.steps_per_execution == 1:
                iterator.get_next()
            elif not iterator.get_next_as_optional().has_value():
                raise StopIteration
            for _ in range(model.steps_per_execution - 1):
                iterator.get_next_as_optional()

        def intercepted(iterator: Any) -> Any:
            execution = TrainFunctionCall(None, lambda: (function(iterator), None), lambda: skip(iterator))
            return execute(execution)[0]

        return intercepted

    def updater(self, update: Update) -> Callable[[Sequence[npt.NDArray[Any] | None]], None]:
        """Return a function that makes an update in one graph; see `Backend`."""
        functions: dict[tuple[int, ...], Callable[..., Any]] = {}

        def apply(gradients: Sequence[npt.NDArray[Any] | None]) -> None:
            present = tuple(i for i, gradient in enumerate(gradients) if gradient is not None)
            tensors = [tf.constant(gradients[i]) for i in present]
            if present not in functions:

                def applied(*tensors: Any) -> None:
                    by_position = dict(zip(present, tensors, strict=True))
                    update.apply([by_position.get(i) for i in range(len(update.variables))])

                functions[present] = executable(applied, False, *tensors)
            functions[present](*tensors)

        return apply

    def compilations(self) -> int:
        """Return how many functions of replicas have been traced."""
        return traces()

    def settle(self) -> None:
        """Wait for started updates, which read their totals in place."""
        wait_for_operations()

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Return the array as NumPy sees it: in place on a CPU, otherwise a copy."""
        return as_array(read(array) if isinstance(array, tf.Variable) else array)

    def on_host(
        self,
        function: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
        array: Any,
        row: tuple[int, ...],
        dtype: npt.DTypeLike,
    ) -> Any:
        """Call a function of NumPy; see `Backend`."""
        result = tf.numpy_function(function, [array], tf.as_dtype(dtype))
        result.set_shape([*array.shape, *row])
        return result


def _joined_steps(*parts: npt.NDArray[Any]) -> tf.Tensor:
    """Return an output of several steps, joined as Keras does."""
    if len(parts) > 1:
        return tf.constant(np.concatenate(parts) if parts[0].ndim else np.stack(parts))
    return tf.constant(parts[0])


def _built_parts(model: Any) -> list[tuple[int, bool, int]]:
    """Return the layers of a model, and which of them are built."""
    return [(id(layer), layer.built, len(layer.variables)) for layer in layers_of(model)]


def _error_of_program(error: Exception) -> BaseException:
    """Return the error that the program's code has raised; Keras may have replaced it with another one."""
    first = error.__context__
    return first if program_line(error) is None and first is not None else error


_WORTH_COMPILING = 1 << 22
"""Minimum bytes of gradients for which an update fused by XLA is worth its compilation."""


class GlobalUpdate:
    """An update from the total of all replicas."""

    def __init__(self, update: Update, jit: bool) -> None:
        self._update = update
        self._jit = jit
        self._function: Callable[..., Any] | None = None

    def uses_xla(self, total: Total) -> bool:
        """Whether XLA compiles the update from such a total.

        XLA fuses the optimizer's operations into one pass over the memory. So large updates are compiled even
        on a CPU, where Keras does not compile by default, unless there is a fused kernel.
        """
        size = sum(g.nbytes for g in gradients_in(total, self._update) if g is not None)
        small = size < _WORTH_COMPILING or self._update.kernel is not None
        return self._jit or not (small or tf.config.list_logical_devices("GPU"))

    def apply(self, scale: Any, total: Mapping[str, Any]) -> None:
        """Make the update from its total, multiplied by `scale`, whose value a graph must not know.

        The scale is 1 if the total has no density. Either all totals of a program have a density, or none
        has.
        """
        gradients = gradients_in(total, self._update)
        in_place = DENSITY not in total and self._update.kernel is not None
        self._update.apply(gradients if in_place else scaled(gradients, scale))

    def apply_separately(self, scale: Any, total: Mapping[str, Any], *, xla: bool) -> None:
        """Make the same update in a separate graph, which XLA compiles if `xla` is true."""
        used = {name: t for name, t in total.items() if name.startswith(GRADIENTS) or name == DENSITY}
        if self._function is not None:
            self._function(scale, used)
            return
        self._function = executable(self.apply, xla, scale, used)
        try:
            self._function(scale, used)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
            if self._jit or not xla:
                raise
            # XLA does not support all operations, and reports that before it runs any.
            self._function = executable(self.apply, False, scale, used)
            self._function(scale, used)


def gradients_in(total: Mapping[str, Any], update: Update) -> list[Any]:
    """Return the gradients of an update from its total, with None where no replica has a gradient."""
    return [total.get(f"{GRADIENTS}{i}") for i in range(len(update.variables))]


# Making a tensor takes about 20 us. Nothing writes to a tensor that has another reference.
_shared_constant = lru_cache(tf.constant)


def _joined(parts: Iterable[tuple[Any, int]]) -> Any:
    """Join tensors, flattened, each followed by a number of zeros."""
    flat = [
        part for tensor, zeros in parts for part in (tf.reshape(tensor, [-1]), tf.zeros(zeros, tensor.dtype))
    ]
    return tf.concat(flat, 0)


class TensorFlowProgram(VariableState):
    """The `lockstep.keras.backends.contract.Program` of one kind of step of one model.

    The state lives in the model's variables: `state` is None.
    """

    def __init__(self, model: Any, kind: StepKind, trace: Trace | None = None) -> None:
        super().__init__(model)
        self._kind = kind
        self._eager = model.run_eagerly
        self._jit = bool(model.jit_compile)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._packings = Packings()
        self._applies: dict[frozenset[str], Callable[..., Any]] = {}
        self._finish: dict[int, Callable[..., Any]] = {}
        self._assigned = AssignedVariables()
        self.varies = self._eager
        # These are for graphs, which are traced again if they turn out to use the new weights.
        self._rounds = RoundCount()
        self._form = StepForm()
        self._tracing = trace or Traces(model, kind).trace
        self._global_updates: dict[int, GlobalUpdate] = {}
        self._trace = RoundTrace()
        self._summarizes = tf.Variable(False, trainable=False)
        self._writes_summaries = False
        self._log_template: LogTemplate | None = None
        self._metric_arguments: MetricArguments | None = None
        self._outputs: list[tuple[int, Any]] = []
        self.traced = 0

    def compute(self, state: Any, share: Share, earlier: Sequence[Total]) -> Partial:
        """Return one replica's partial; afterwards, all variables have their values from before."""
        data = share.data()
        leaves = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(data)]
        totals = self._tensors([self.parts(number, total) for number, total in enumerate(earlier)])
        function = self._function(data, leaves, totals)
        replica = _shared_constant(share.replica, tf.int64)
        portion = _shared_constant(share.weight, tf.float64), _shared_constant(share.start, tf.int32)
        examples = [leaf for leaf in leaves if leaf is not None]
        partial: Partial
        if self._eager or self._writes_summaries:
            # Replica 0 writes the summaries, once in a step.
            last = not earlier if self._eager else self.is_last(len(earlier))
            self._summarizes.assign(share.replica == 0 and last)
        if self._eager:
            with _computing_eagerly(seed_of_replica(share.seed, share.replica)):
                partial, outputs = function(replica, portion, totals, *examples)
        else:
            tf_random_ops.set_seed(share.seed)
            partial, outputs = function(replica, portion, totals, *examples)
        if self._kind == "predict":
            self._outputs.append((share.replica, outputs))
        refuse_other_rows(partial, share.examples)
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
        """Return the error of the same step run eagerly, because the error of a graph names an operation."""
        if self._eager or earlier:
            return error
        eager = TensorFlowProgram(self._model, self._kind)
        eager._eager = True
        try:
            eager.compute(state, share, ())
        except Exception as located:
            return located
        return error

    def parts(self, number: int, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a partial or a total of round `number` by their own names."""
        return self._packings.unpacked(number, arrays)

    def apply(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the totals to the model's variables."""
        unit = _shared_constant(1.0, tf.float32)
        gathered = frozenset(name for name in totals[-1] if name.startswith(GATHERED))
        if gathered not in self._applies:
            self._applies[gathered] = self._apply_function(unit, totals)
        return self._applies[gathered](unit, totals), None

    def block_update(self, state: Any, totals: Sequence[Total], replicas: int) -> BlockUpdate | str:
        """Return the reason why workers cannot divide an update."""
        return "only the JAX and PyTorch backends divide it"

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
        return {name: variable.read_value() for name, variable in self._layers().items()}

    def layer_of(self, position: int) -> str | None:
        """Return the name of a variable that the step changes, or None."""
        wanted = self._model.non_trainable_variables[position].value
        return next((name for name, variable in self._layers().items() if variable is wanted), None)

    def put(
        self,
        state: Any,
        weights: Sequence[npt.NDArray[Any]],
        layers: Mapping[str, npt.NDArray[Any]],
        slots: Sequence[npt.NDArray[Any]] | None = None,
    ) -> Any:
        """Assign the arrays to the variables."""
        for variable, array in zip(self.trained(), weights, strict=True):
            assign(variable.value, array, in_place=True)
        if slots is not None:
            for variable, array in zip(self._model.optimizer.variables, slots, strict=True):
                assign(variable.value, array, in_place=True)
        variables = self._layers()
        for name, array in layers.items():
            kind, _, position = name.partition("/")
            if kind == VARIABLE:
                self._model.non_trainable_variables[int(position)].assign(array)
            else:
                variables[name].assign(array)

    def finish(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Add the metrics of totals."""
        # Each tensor costs a conversion.
        arrays = {name: np.stack([total[name] for total in totals]) for name in self._metrics()}
        arrays |= {name: array for name, array in totals[-1].items() if name.startswith(LOGS)}
        (tensors,) = self._tensors([arrays])
        if self._eager:
            return self._metrics_added(tensors), None
        if len(totals) not in self._finish:
            self._finish[len(totals)] = executable(self._metrics_added, False, tensors)
        return self._finish[len(totals)](tensors), None

    def _metrics_added(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Add the metrics of several totals, and return the logs, whose other values are of the last one."""
        for name, variable in self._metrics().items():
            for value in tf.unstack(totals[name]):
                variable.assign_add(value)
        if self._log_template is None:
            return {}
        logged = {name: value for name, value in totals.items() if name.startswith(LOGS)}
        return self._log_template.assembled(logged)

    def _metrics(self) -> dict[str, tf.Variable]:
        return {n: v for n, v in self._assigned.named.items() if n.startswith(METRICS)}

    def _layers(self) -> dict[str, tf.Variable]:
        return {n: v for n, v in self._assigned.named.items() if not n.startswith(METRICS)}

    def _apply_function(self, unit: Any, totals: Sequence[Total]) -> Callable[..., Any]:
        """Return the function that applies totals like these: one graph, or several if XLA compiles some.

        Args:
            unit: a tensor whose value is 1; see `copied`.
            totals: the totals of the rounds, perhaps packed.
        """
        named = updating([self.parts(number, total) for number, total in enumerate(totals)])
        updates = self._updates(len(totals))
        xla = [update.uses_xla(total) for update, total in zip(updates, named, strict=False)]
        if self._eager or not (self._jit or any(xla)):
            whole: Any = self._applied
            if not self._eager:
                whole = executable(self._applied, False, unit, [_specs(t) for t in self._tensors(totals)])
            return lambda unit, totals: whole(unit, self._tensors(totals))
        finish: list[Any] = []

        def apply(unit: Any, totals: Sequence[Total]) -> dict[str, Any] | None:
            # XLA takes longer to compile the slices of a packed array than to compile an update.
            tensors = self._tensors([self.parts(number, total) for number, total in enumerate(totals)])
            scale = self._scale(unit, tensors[-1])
            for update, total, uses_xla in zip(
                self._updates(len(totals)), updating(tensors), xla, strict=False
            ):
                update.apply_separately(scale, total, xla=uses_xla)
            rest = {name: tensor for name, tensor in tensors[-1].items() if not name.startswith(GRADIENTS)}
            if not finish:
                finish.append(executable(self._finished, self._jit, unit, _specs(rest)))
            logs: dict[str, Any] | None = finish[0](unit, rest)
            return logs

        return apply

    def _applied(self, unit: Any, totals: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Apply totals, which may be packed; return the logs."""
        totals = [self._packings.unpacked(number, total, tf.reshape) for number, total in enumerate(totals)]
        scale = self._scale(unit, totals[-1])
        for update, total in zip(self._updates(len(totals)), updating(totals), strict=False):
            update.apply(scale, total)
        return self._finished(unit, totals[-1])

    def _updates(self, rounds: int) -> list[GlobalUpdate]:
        """Return the updates of the first `rounds` rounds, each with its compiled functions."""
        updates = self._form.updates(rounds)
        if self._eager:
            return [GlobalUpdate(update, self._jit) for update in updates]
        return [
            self._global_updates.setdefault(id(update), GlobalUpdate(update, self._jit)) for update in updates
        ]

    def _scale(self, unit: Any, total: Mapping[str, Any]) -> Any:
        """Return the factor for values proportional to the loss: `unit` divided by the loss's denominator."""
        return tf.math.divide_no_nan(unit, total[DENSITY]) if DENSITY in total else unit

    def _tensors(self, totals: Sequence[Total]) -> list[dict[str, Any]]:
        to_tensor = tf.constant if self._eager else borrowed
        return [{name: to_tensor(array) for name, array in total.items()} for total in totals]

    def _function(self, data: Any, leaves: list[Any], earlier: list[dict[str, Any]]) -> Callable[..., Any]:
        """Return the function that computes a replica with examples like `leaves`, some of which may be None.

        The number of examples is open, as in Keras's graphs for arrays: one graph serves all replicas.
        """
        shapes = tuple(None if leaf is None else (leaf.dtype, *leaf.shape[1:]) for leaf in leaves)
        key = (len(earlier), shapes, structure_of(data))
        if key not in self._functions:

            def step(portion: tuple[Any, Any], earlier: Any, *examples: Any) -> Any:
                following = iter(examples)
                packed = [None if leaf is None else next(following) for leaf in leaves]
                return self._step(portion, earlier, keras.tree.pack_sequence_as(data, packed))

            self._functions[key] = (
                self._eagerly(step, len(earlier))
                if self._eager
                else self._traced(step, earlier, open_specs(leaves))
            )
        return self._functions[key]

    def _traced(
        self, step: Callable[..., Any], earlier: list[dict[str, Any]], specs: list[Any]
    ) -> Callable[..., Any]:
        self.traced += 1
        number = len(earlier)
        portion = tf.TensorSpec((), tf.float64), tf.TensorSpec((), tf.int32)
        total_specs = [_specs(total) for total in earlier]
        stateless = tf_random_ops.stateless(step)

        def trace() -> Any:
            with self._tracing(lambda: self.is_last(number)):
                return traced(stateless, self._jit, portion, total_specs, *specs)

        inner = trace()
        if not self._rounds.ends_early(number) and self._trace.uses_update(inner.graph):
            self._rounds.add_after(number)
            inner = trace()
        tf_random_ops.refuse_random_operations(inner.graph)
        refuse_assignments(inner.graph, self._updated(number), self._trace.operations.earlier)
        variables = self._classified(number, assigned(inner.graph, may_summarize=True))
        if self.is_last(number):
            self._assigned = variables

        def compute(replica: Any, portion: Any, earlier: Any, *examples: Any) -> Any:
            partial, outputs = self._computed(inner, variables, replica, portion, earlier, *examples)
            return self._packed(number, partial), outputs

        return executable(compute, self._jit, tf.TensorSpec((), tf.int64), portion, total_specs, *specs)

    def _packed(self, number: int, partial: dict[str, Any]) -> dict[str, Any]:
        """Return the partial of round `number` with its small tensors packed."""
        packing = self._packings.learn(
            number,
            {
                name: (tuple(tensor.shape), np.dtype(tensor.dtype.as_numpy_dtype))
                for name, tensor in partial.items()
                if tensor.shape.is_fully_defined() and is_packable(name, tensor)
            },
        )
        return packing.packed(partial, _joined)

    def _eagerly(self, step: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Return the function for an eager step: it restores all variables that a step may assign."""
        model = self._model
        seeds = {id(variable) for variable in seeds_of(model)}
        others = [variable.value for variable in model.non_trainable_variables]
        # These are the TensorFlow variables that the program keeps in attributes; a graph shows them itself.
        others += graph_of(model).variables.values()
        assigned_ids = {id(v) for v in others if v.dtype.is_floating or id(v) in seeds}
        # Any weight may change, whatever weights earlier steps and rounds have trained.
        trained = [*(variable.value for variable in model.trainable_variables), *self._trained()]
        trained = list({id(variable): variable for variable in trained}.values())
        trained_ids = {id(variable) for variable in trained}
        assumed = [variable for variable in others if id(variable) in assigned_ids]
        watched = [variable for variable in others if id(variable) not in assigned_ids] + trained

        def function(*arguments: Any) -> Any:
            variables = self._classified(number, [*assumed, *self._updated(number)])
            before = [variable.read_value() for variable in watched]
            computed = self._computed(step, variables, *arguments)
            changed = [(v, old) for v, old in zip(watched, before, strict=True) if not same_bits(v, old)]
            # The step has shown which weights its updates change.
            fixed_ids = {id(variable) for variable in self._trained()}
            missed = [
                v
                for v, _ in changed
                if (id(v) not in fixed_ids if id(v) in trained_ids else not v.dtype.is_floating)
            ]
            if missed:
                for variable, old in changed:
                    variable.assign(old)
                assumed.extend(missed)
                watched[:] = [v for v in watched if all(v is not other for other in missed)]
                return function(*arguments)
            self._classified(number, [variable for variable, _ in changed])
            self._assigned = variables
            return computed

        return function

    def _trained(self) -> list[tf.Variable]:
        """Return the weights and the optimizers' variables, which only updates may change.

        Weights that no update changes, such as a slow copy of other weights, are layer state. A graph shows
        them in advance. A step that runs eagerly shows them after it has been computed.
        """
        optimizers = optimizers_of(self._model) if self._kind == "train" else [self._model.optimizer]
        variables = [v for optimizer in optimizers if optimizer is not None for v in optimizer.variables]
        weights = self._form.trained
        if self._kind != "train" or not weights:
            weights = self._model.trainable_variables
        return [variable.value for variable in [*weights, *variables]]

    def _updated(self, number: int) -> list[tf.Variable]:
        """Return the variables that the updates before round `number` change."""
        return [variable.value for update in self._form.updates(number) for variable in update.changed]

    def _classified(self, number: int, variables: Sequence[tf.Variable]) -> AssignedVariables:
        """Classify the variables that a step assigns in round `number`."""
        return AssignedVariables.of_step(
            self._model, self._kind, variables, self._trained(), self._updated(number)
        )

    def _step(
        self, portion: tuple[Any, Any], earlier: list[dict[str, Any]], data: Any
    ) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Run the model's step.

        Returns (gradients and gathered arrays, logged values beyond the metrics, outputs or the densities of
        the losses).
        """
        model, number = self._model, len(earlier)
        weight, start = portion
        if self._kind != "train":
            self._form.show(number)
        if self._kind == "predict":
            with refusing_to_gather():
                return {}, {}, model.predict_step(data)
        gradients: list[Any] = []
        weighed, logs = False, None
        rows = next(leaf.shape[0] for leaf in keras.tree.flatten(data) if leaf is not None)
        gathers = StepGathers(earlier, start, weight, rows)
        with (
            summaries_recorded_if(self._records_summaries),
            replica_step(model, self._kind, weight, gathers) as (densities, results),
        ):
            if self._kind == "test":
                with suppress(EndOfRound):
                    logs = model.test_step(data)
            else:
                with weighted_gradients(model, weight) as weighed:
                    gradients, logs = self._train(earlier, data)
        if gathers.ended:
            self._form.show(number, ended=False)
            self._trace = RoundTrace(ended=False)
            return gathers.arrays, {}, None
        dense = {f"{GRADIENTS}{i}": tf.convert_to_tensor(g) for i, g in enumerate(gradients) if g is not None}
        if not weighed:
            dense = {name: g * tf.cast(weight, g.dtype) for name, g in dense.items()}
        if logs is None:
            return dense, {}, None
        self._metric_arguments = gathers.metrics
        dense |= gathers.arrays
        self._log_template = LogTemplate(model, logs, results)
        values = {name: tf.cast(value, tf.float32) for name, value in self._log_template.values.items()}
        self._log_template.values.clear()
        return dense, values, None if earlier else [in_this_graph(d) for d in densities]

    def _records_summaries(self) -> Any:
        """Return whether `tf.summary`, which the step calls, writes in the computation of this replica."""
        if not self._writes_summaries:
            self._writes_summaries = True
            warnings.warn(
                f"the {self._kind} step of model {self._model.name!r} writes summaries (tf.summary): only "
                "replica 0 writes them, so they describe its examples alone; a metric describes all examples",
                stacklevel=2,
            )
        return self._summarizes.read_value()

    def _train(self, earlier: list[dict[str, Any]], data: Any) -> tuple[list[Any], dict[str, Any] | None]:
        """Run the model's `train_step` in the round that follows the totals `earlier`.

        Returns (the gradients of the round's own update, logs or None if the round ended early).
        """
        number, operations = len(earlier), UpdateOperations()
        updates, totals = self._form.updates(number), updating(earlier)
        after: dict[int, tuple[tf.Variable, Any]] = {}

        def repeat(index: int) -> None:
            update = updates[index]
            with operations.of_earlier_update(), tf_random_ops.drawn_from(None):
                update.apply(gradients_in(totals[index], update))
            if self._eager:
                after.update({id(v.value): (v.value, v.value.read_value()) for v in update.changed})

        def on_update(update: Update) -> None:
            operations.mark_own_update()
            if not update.optimizer.built:
                with tf.init_scope():
                    update.optimizer.build(update.variables)
            if self._eager:
                stack.enter_context(hidden(update))

        ends_early = self._rounds.ends_early(number)
        recorder = UpdateRecorder(len(totals), ends_early, updates, repeat, on_update)
        logs = None
        with suppress(EndOfRound), ExitStack() as stack:
            stack.enter_context(
                recorder.replacing_apply(self._model, optimizers_of(self._model), varies=self._eager)
            )
            logs = self._model.train_step(data) or {}
        for variable, value in after.values():
            if not same_bits(variable, value):
                refuse_own_update(variable.name)
        self._form.show(number, recorder.update, ended=logs is not None)
        self._trace = RoundTrace(recorder.update, logs is not None, operations)
        return recorder.gradients, logs

    def _computed(
        self,
        step: Callable[..., Any],
        variables: AssignedVariables,
        replica: Any,
        portion: tuple[Any, Any],
        earlier: Any,
        *examples: Any,
    ) -> tuple[dict[str, Any], Any]:
        """Return a replica's partial and outputs; restore the variables that the step assigns."""
        with variables.as_replica(replica, sums_so_far=False) as changes:
            gradients, values, rest = step(portion, earlier, *examples)
            weight, _ = portion
            partial = gradients | {name: v * tf.cast(weight, v.dtype) for name, v in values.items()}
            if self.is_last(len(earlier)):
                partial |= changes(weight)
        if self._kind == "predict":
            return partial, rest
        partial = by_density(self._model, self._kind, partial, rest or [], weight)
        return combinable(self._model, self._kind, len(updating(earlier)), partial, weight), None

    def _finished(self, unit: Any, total: Mapping[str, Any]) -> dict[str, Any] | None:
        """Apply the parts of a total other than gradients; return the logs."""
        scale = self._scale(unit, total)
        for name, variable in self._assigned.named.items():
            if name.startswith(EQUAL):
                # If a step runs eagerly, it may have kept the value.
                variable.assign(copied(total.get(name, variable), unit))
                continue
            factor = scale if is_proportional_to_loss(self._model, self._kind, name) else unit
            variable.assign_add(copied(total[name], factor))
        figures: Mapping[str, Any] = {}
        if self._metric_arguments is not None:
            figures = self._metric_arguments.computed(self._model, total, tf.identity)
        if self._log_template is None:
            return None
        logs = self._log_template.assembled(
            {
                name: copied(value, scale if is_proportional_to_loss(self._model, self._kind, name) else unit)
                for name, value in total.items()
                if name.startswith(LOGS)
            }
        )
        return with_figures(logs, figures)


def try_step(model: Any, kind: StepKind, data: Any) -> None:
    """Create the variables of a step, without other effects: trace it, or run it if it runs eagerly.

    Args:
        model: the compiled model.
        kind: the kind of the step.
        data: the argument of the step.
    """
    step = getattr(model, f"{kind}_step")
    tensors = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(data)]
    if model.run_eagerly:
        with unchanged(model), without_effects(model):
            step(keras.tree.pack_sequence_as(data, tensors))
        return

    def traced_step(*examples: Any) -> None:
        following = iter(examples)
        packed = [None if tensor is None else next(following) for tensor in tensors]
        step(keras.tree.pack_sequence_as(data, packed))

    with unchanged(model):
        traced(traced_step, False, *open_specs(tensors))


def open_specs(tensors: Sequence[Any]) -> list[Any]:
    """Return the specs of tensors, without those that are None, with an open number of examples."""
    return [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in tensors if t is not None]


def _specs(total: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specs of the tensors of a total, with an open number of rows for those that are joined."""
    return {
        name: tf.TensorSpec(
            [None, *tensor.shape[1:]] if name.startswith(GATHERED) else tensor.shape, tensor.dtype
        )
        for name, tensor in total.items()
    }


def _with_open_length(tensor: Any) -> Any:
    """Return a tensor of a graph whose static shape does not show the number of rows."""
    if tensor is None or not tensor.shape.rank:
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def in_this_graph(density: Any) -> Any:
    """Return a loss's density, or None if it belongs to an inner graph."""
    if density is None or tf.executing_eagerly() or density.graph is tf.compat.v1.get_default_graph():
        return density
    return None


def refuse_unsupported(model: Any, kind: StepKind) -> None:
    """Raise ModelError if this backend cannot combine the step over replicas."""
    if tf.distribute.has_strategy():
        raise ModelError(
            "a strategy of tf.distribute is in use: Lockstep distributes the step itself; remove it"
        )
    if kind == "train":
        refuse_overwriting_gradients(model)


class TensorFlowEagerBackend:
    """The `lockstep.keras.backends.eager_contract.EagerBackend` of TensorFlow; its tensors are immutable."""

    def isolated(
        self, seed: int, assigned: Callable[[], Iterable[Any]] = tuple
    ) -> AbstractContextManager[None]:
        """Within the block a replica computes, with random numbers derived from `seed`."""
        return _computing_eagerly(seed)

    def saved_value(self, variable: Any) -> Any:
        """Return the value of a variable."""
        return stored_value(variable).read_value()

    def to_tensor(self, leaf: Any) -> Any:
        """Return a leaf as a tensor."""
        return leaf.read_value() if isinstance(leaf, tf.Variable) else tf.convert_to_tensor(leaf)

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Return the array as NumPy sees it; gradients of embeddings become dense."""
        return as_array(tf.convert_to_tensor(array))

    def custom_gradient(
        self, leaves: Tensors, merge: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `merge(leaves)`, for which `gradient` computes the gradients."""
        return with_custom_gradient(leaves, merge, gradient)

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update from copies."""
        update.apply([None if g is None else tf.constant(g) for g in gradients])


@contextmanager
def _computing_eagerly(seed: int) -> Iterator[None]:
    """Within the block a replica computes eagerly, with random numbers derived from `seed`.

    Functions of TensorFlow also run eagerly, because their graphs may be older than the block.
    """
    with functions_run_eagerly(), random_numbers(seed):
        yield
