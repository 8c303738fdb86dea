"""Keras on TensorFlow: replicas of a step, one after the other, and the update that they make together.

Keras's own `train_step` is traced once for each round, with `optimizer.apply` replaced by a recorder. Its
graph tells which variables the step assigns. A second function around it gives them back the values they had,
so that replicas can be computed one after the other; a third one applies the sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import islice
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import context

from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras import tf_random_ops
from lockstep.keras.backends.contract import Execution, Kind, Partial, Total
from lockstep.keras.backends.eager import Tensors
from lockstep.keras.backends.graphs import (
    AssignedVariables,
    RoundTrace,
    UpdateOperations,
    assigned,
    borrowed,
    exempt_from_autograph,
    know_lookups,
    own,
    refuse_assignments,
    same_bits,
    scaled,
    seeds_of,
    traced,
    with_gradient,
)
from lockstep.keras.backends.logs import LogReport
from lockstep.keras.backends.losses import (
    by_density,
    follows_the_loss,
    observed,
    weighed_gradients,
)
from lockstep.keras.backends.multi_update import Left, Recording, Rounds, Update, hidden, refuse_own_update
from lockstep.keras.backends.steps import build_by_call, has_own_step, refuse_overwriting_gradients, undone
from lockstep.keras.randomness import random_numbers
from lockstep.keras.seeds import seed_of_replica
from lockstep.keras.variables import VariableState, optimizers_of


class TensorFlowBackend:
    """Keras's TensorFlow backend behind the contract `lockstep.keras.backends.contract.Backend`."""

    def __init__(self) -> None:
        exempt_from_autograph("lockstep")
        know_lookups()

    def build(self, model: Any, kind: Kind, batch: Callable[[], Any]) -> None:
        """Make a model's variables by calling it, or by trying a step where it cannot be called."""
        if getattr(model, f"{kind}_function") is not None:
            return
        if has_own_step(model, kind):
            try_step(model, kind, batch())
            return
        try:
            build_by_call(model, kind, batch)
        except Exception as hindrance:
            # What keeps Keras from calling the model, the step itself does not mind, or it shows. It may also
            # fail at what the call has left half done, and then hide the cause.
            try:
                try_step(model, kind, batch())
            except Exception as error:
                raise error from hindrance

    def program(self, model: Any, kind: Kind) -> "TensorFlowProgram":
        """Prepare a step of a built model."""
        refuse_unsupported(model, kind)
        return TensorFlowProgram(model, kind)

    def function(self, model: Any, step: Callable[[Any, Any], tuple[Any, Any]], kind: Kind) -> Any:
        """Return `f(iterator) -> logs` or `f(batches) -> outputs`, as `TensorFlowTrainer` calls them."""

        def function(batches: Any) -> Any:
            results = [step(None, batch)[0] for batch in islice(batches, model.steps_per_execution)]
            if not results:
                raise StopIteration
            if kind != "predict":
                return results[-1]
            return keras.tree.map_structure(lambda *parts: tf.constant(np.concatenate(parts)), *results)

        return function

    def held(self, model: Any) -> VariableState:
        """Return the state of the training steps of `model`."""
        return VariableState(model)

    def watched(
        self, model: Any, function: Any, execute: Callable[[Execution], tuple[Any, Any]]
    ) -> Callable[..., Any]:
        """Return `f(iterator) -> logs`, as `TensorFlowTrainer` calls it."""

        def pass_over(iterator: Any) -> None:
            if model.steps_per_execution == 1:
                iterator.get_next()
            elif not iterator.get_next_as_optional().has_value():
                raise StopIteration
            for _ in range(model.steps_per_execution - 1):
                iterator.get_next_as_optional()

        def watched(iterator: Any) -> Any:
            execution = Execution(None, lambda: (function(iterator), None), lambda: pass_over(iterator))
            return execute(execution)[0]

        return watched

    def settle(self) -> None:
        """Wait for the updates that were started: they read their total in place."""
        context.async_wait()

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """View a tensor in place (on a CPU), or copy it to the host."""
        return np.asarray(array.read_value() if isinstance(array, tf.Variable) else array)


_WORTH_COMPILING = 1 << 22
"""Bytes of gradients from which on XLA's fused update pays for its compilation."""


class GlobalUpdate:
    """An update that all replicas make together."""

    def __init__(self, update: Update, eager: bool, jit: bool) -> None:
        self._update = update
        self._eager = eager
        self._jit = jit
        self._in_place = False
        self._function: Callable[..., Any] | None = None

    def make(self, scale: Any, total: Mapping[str, Any]) -> None:
        """Make the update from its total times `scale`, which the graph must not know, even if it is 1.

        It is 1 unless the total has a density, as all totals of a program have or none.
        """
        gradients = gradients_in(total, self._update)
        if self._function is None:
            self._in_place = "density" not in total and self._update.kernel is not None
            self._function = self._traced(scale, gradients)
        self._function(scale, gradients)

    def _traced(self, scale: Any, gradients: list[Any]) -> Any:
        """Return what makes the update.

        The optimizer's operations are few and simple, and XLA makes one pass over the memory of them; so
        they are compiled where they are large, also on a CPU, where Keras compiles nothing by itself, unless
        there is a kernel that does the same.
        """
        if self._eager:
            return self._apply
        size = sum(g.shape.num_elements() * g.dtype.size for g in gradients if g is not None)
        small = size < _WORTH_COMPILING or self._update.kernel is not None
        if self._jit or small or tf.config.list_logical_devices("GPU"):
            return traced(self._apply, self._jit, scale, gradients)
        compiled = traced(self._apply, True, scale, gradients)

        def first(scale: Any, gradients: list[Any]) -> None:
            try:
                compiled(scale, gradients)
                self._function = compiled
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
                # XLA knows not all operations, and says so before it runs any.
                self._function = traced(self._apply, False, scale, gradients)
                self._function(scale, gradients)

        return first

    def _apply(self, scale: Any, gradients: list[Any]) -> None:
        self._update.apply(gradients if self._in_place else scaled(gradients, scale))


def gradients_in(total: Mapping[str, Any], update: Update) -> list[Any]:
    """Return the gradients of an update in its total, None where no replica has one."""
    return [total.get(f"gradient/{i}") for i in range(len(update.variables))]


class TensorFlowProgram(VariableState):
    """One kind of step of one model; see `lockstep.keras.backends.contract.Program`.

    The state lives in the model's variables: `state` is None.
    """

    def __init__(self, model: Any, kind: Kind) -> None:
        super().__init__(model)
        self._kind = kind
        self._eager = model.run_eagerly
        self._jit = bool(model.jit_compile)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._finish: Callable[..., Any] | None = None
        self._assigned = AssignedVariables()
        self._rounds = Rounds()
        self._updates: list[Update] = []
        self._global_updates: list[GlobalUpdate] = []
        self._trace = RoundTrace()
        self._report: LogReport | None = None
        self._outputs: list[tuple[int, Any]] = []

    def compute(self, state: Any, share: Share, earlier: Sequence[Total]) -> Partial:
        """Compute one replica's part; afterwards all variables have the values they had before."""
        data = share.data()
        leaves = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(data)]
        totals = self._tensors(earlier)
        function = self._function(data, leaves, totals)
        replica, weight = tf.constant(share.replica, tf.int64), tf.constant(share.weight, tf.float64)
        given = [leaf for leaf in leaves if leaf is not None]
        partial: Partial
        if self._eager:
            with _computing_eagerly(seed_of_replica(share.seed, share.replica)):
                partial, outputs = function(replica, weight, totals, *given)
        else:
            tf_random_ops.set_seed(share.seed)
            partial, outputs = function(replica, weight, totals, *given)
        if self._kind == "predict":
            self._outputs.append((share.replica, outputs))
        return partial

    def complete(self, number: int) -> bool:
        """Whether a round is the step's last."""
        return self._rounds.complete(number)

    def apply(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the sums to the model's variables."""
        one = tf.constant(1.0)
        tensors = self._tensors(totals)
        scale = self._scale(one, tensors[-1])
        for update, total in zip(self._global_updates, tensors, strict=False):
            update.make(scale, total)
        rest = {name: tensor for name, tensor in tensors[-1].items() if not name.startswith("gradient/")}
        if self._finish is None:
            self._finish = self._finished if self._eager else traced(self._finished, self._jit, one, rest)
        return self._finish(one, rest), None

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs computed since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _scale(self, one: Any, total: dict[str, Any]) -> Any:
        """Return what to multiply with what follows the loss: `one`, or by its denominator."""
        return tf.math.divide_no_nan(one, total["density"]) if "density" in total else one

    def _tensors(self, totals: Sequence[Total]) -> list[dict[str, Any]]:
        take = tf.constant if self._eager else borrowed
        return [{name: take(array) for name, array in total.items()} for total in totals]

    def _function(self, data: Any, leaves: list[Any], earlier: list[dict[str, Any]]) -> Callable[..., Any]:
        """Return what computes a replica whose examples look like `leaves`, None where there are none.

        The number of examples is left open, as Keras leaves it for arrays: one graph serves all replicas.
        """
        shapes = tuple(None if leaf is None else (leaf.dtype, *leaf.shape[1:]) for leaf in leaves)
        key = (len(earlier), shapes)
        if key not in self._functions:

            def step(weight: Any, earlier: Any, *given: Any) -> Any:
                rest = iter(given)
                packed = [None if leaf is None else next(rest) for leaf in leaves]
                return self._step(weight, earlier, keras.tree.pack_sequence_as(data, packed))

            self._functions[key] = (
                self._eagerly(step, len(earlier))
                if self._eager
                else self._traced(step, earlier, open_specs(leaves))
            )
        return self._functions[key]

    def _traced(
        self, step: Callable[..., Any], earlier: list[dict[str, Any]], specs: list[Any]
    ) -> Callable[..., Any]:
        number = len(earlier)
        weight = tf.TensorSpec((), tf.float64)
        stateless = tf_random_ops.stateless(step)
        inner = traced(stateless, self._jit, weight, earlier, *specs)
        if not self._rounds.leaves(number) and self._trace.resumes(inner.graph):
            self._rounds.leave(number)
            inner = traced(stateless, self._jit, weight, earlier, *specs)
        tf_random_ops.refuse_random_operations(inner.graph)
        refuse_assignments(inner.graph, self._updated(number), self._trace.places.made)
        variables = self._classified(number, assigned(inner.graph))
        if self._rounds.complete(number):
            self._assigned = variables

        def replica(replica: Any, weight: Any, earlier: Any, *given: Any) -> Any:
            return self._computed(inner, variables, replica, weight, earlier, *given)

        function: Callable[..., Any] = traced(
            replica, self._jit, tf.TensorSpec((), tf.int64), weight, earlier, *specs
        )
        return function

    def _eagerly(self, step: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Without a graph there is no telling what a step assigns: all that it may assign is restored."""
        model = self._model
        seeds = {id(variable) for variable in seeds_of(model)}
        others = [variable.value for variable in model.non_trainable_variables]
        taken = [variable for variable in others if variable.dtype.is_floating or id(variable) in seeds]
        watched = [variable for variable in others if all(variable is not one for one in taken)]
        watched += self._trained()
        variables = self._classified(number, [*taken, *self._updated(number)])

        def function(*given: Any) -> Any:
            before = [variable.read_value() for variable in watched]
            computed = self._computed(step, variables, *given)
            changed = [v for v, old in zip(watched, before, strict=True) if not same_bits(v, old)]
            self._classified(number, changed)
            if not self._trace.ended and not self._rounds.leaves(number):
                self._rounds.leave(number)
                return function(*given)
            self._assigned = variables
            return computed

        return function

    def _trained(self) -> list[tf.Variable]:
        """Return the weights and the optimizers' variables, which only updates may change.

        Weights that no update changes, such as a copy that follows others slowly, are layers' state. A graph
        shows which they are; for a step that runs eagerly, that is not known in advance.
        """
        optimizers = optimizers_of(self._model) if self._kind == "train" else [self._model.optimizer]
        variables = [v for optimizer in optimizers if optimizer is not None for v in optimizer.variables]
        if self._kind == "train" and not self._eager:
            weights = [variable for update in self._updates for variable in update.variables]
        else:
            weights = self._model.trainable_variables
        return [variable.value for variable in [*weights, *variables]]

    def _updated(self, number: int) -> list[tf.Variable]:
        """Return what the updates of the rounds before round `number` change."""
        return [variable.value for update in self._updates[:number] for variable in update.changed]

    def _classified(self, number: int, variables: Sequence[tf.Variable]) -> AssignedVariables:
        """Decide what is done with the variables that a step assigns in round `number`."""
        return AssignedVariables.of_step(
            self._model, self._kind, variables, self._trained(), self._updated(number)
        )

    def _step(
        self, weight: Any, earlier: list[dict[str, Any]], data: Any
    ) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Run the user's own step.

        Returns (gradients, figures beyond the metrics, outputs or the densities of the losses).
        """
        model = self._model
        if self._kind == "predict":
            return {}, {}, model.predict_step(data)
        gradients: list[Any] = []
        weighed = False
        with observed(model, weight) as (densities, results):
            if self._kind == "test":
                logs = model.test_step(data)
            else:
                with weighed_gradients(model, weight) as weighed:
                    gradients, logs = self._train(earlier, data)
        dense = {f"gradient/{i}": tf.convert_to_tensor(g) for i, g in enumerate(gradients) if g is not None}
        if not weighed:
            dense = {name: g * tf.cast(weight, g.dtype) for name, g in dense.items()}
        if logs is None:
            return dense, {}, None
        self._report = LogReport(model, logs, results)
        figures = {name: tf.cast(value, tf.float32) for name, value in self._report.figures.items()}
        self._report.figures.clear()
        return dense, figures, None if earlier else [known_here(d) for d in densities]

    def _train(self, earlier: list[dict[str, Any]], data: Any) -> tuple[list[Any], dict[str, Any] | None]:
        """Run the user's `train_step` in the round that follows the totals `earlier`.

        Returns (the gradients of the round's own update, logs), without logs where the step was left.
        """
        number, places = len(earlier), UpdateOperations()
        after: dict[int, tuple[tf.Variable, Any]] = {}

        def repeat(index: int) -> None:
            update = self._updates[index]
            with places.making(), tf_random_ops.drawn_from(None):
                update.apply(gradients_in(earlier[index], update))
            if self._eager:
                after.update({id(v.value): (v.value, v.value.read_value()) for v in update.changed})

        def noted(update: Update) -> None:
            places.note()
            if not update.optimizer.built:
                with tf.init_scope():
                    update.optimizer.build(update.variables)
            if self._eager:
                stack.enter_context(hidden(update))

        leaves = self._rounds.leaves(number)
        recording = Recording(number, leaves, self._updates, repeat, noted)
        logs = None
        with ExitStack() as stack:
            stack.enter_context(recording.of(self._model, optimizers_of(self._model)))
            with suppress(Left):
                logs = self._model.train_step(data)
        for variable, value in after.values():
            if not same_bits(variable, value):
                refuse_own_update(variable.name)
        update = recording.update
        if update is not None and number == len(self._updates):
            self._updates.append(update)
            self._global_updates.append(GlobalUpdate(update, self._eager, self._jit))
        self._trace = RoundTrace(places, update, ended=logs is not None)
        return recording.gradients, logs

    def _computed(
        self,
        step: Callable[..., Any],
        variables: AssignedVariables,
        replica: Any,
        weight: Any,
        earlier: Any,
        *given: Any,
    ) -> tuple[dict[str, Any], Any]:
        """Return a replica's partial and outputs; restore what the step assigns."""
        with variables.of(replica, sums_so_far=False) as changes:
            gradients, own, rest = step(weight, earlier, *given)
            figures = {name: figure * tf.cast(weight, figure.dtype) for name, figure in own.items()}
            partial = gradients | figures
            if self._rounds.complete(len(earlier)):
                partial |= changes(weight)
        if self._kind == "predict":
            return partial, rest
        return by_density(self._model, partial, rest or [], weight), None

    def _finished(self, one: Any, total: dict[str, Any]) -> dict[str, Any] | None:
        """Take over the rest of a total; return the logs."""
        scale = self._scale(one, total)
        for name, variable in self._assigned.named.items():
            variable.assign_add(own(total[name], scale if follows_the_loss(self._model, name) else one))
        if self._report is None:
            return None
        return self._report.assembled(
            {name: own(value, one) for name, value in total.items() if name.startswith("log/")}
        )


def try_step(model: Any, kind: Kind, data: Any) -> None:
    """Let a step make the variables that it needs, and change nothing else: trace it, if it is for graphs.

    Args:
        model: is compiled.
        kind: of the step.
        data: what the step is given.
    """
    step = getattr(model, f"{kind}_step")
    tensors = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(data)]
    if model.run_eagerly:
        with undone(model):
            step(keras.tree.pack_sequence_as(data, tensors))
        return

    def traced_step(*given: Any) -> None:
        rest = iter(given)
        packed = [None if tensor is None else next(rest) for tensor in tensors]
        step(keras.tree.pack_sequence_as(data, packed))

    traced(traced_step, False, *open_specs(tensors))


def open_specs(tensors: Sequence[Any]) -> list[Any]:
    """Return what a graph knows of tensors that are not None: not how many examples they have."""
    return [tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in tensors if one is not None]


def known_here(density: Any) -> Any:
    """Return a loss's density, or None where it stands in a graph within this one."""
    if density is None or tf.executing_eagerly() or density.graph is tf.compat.v1.get_default_graph():
        return density
    return None


def refuse_unsupported(model: Any, kind: Kind) -> None:
    """Raise ModelError for what this backend cannot combine over replicas."""
    if tf.distribute.has_strategy():
        raise ModelError(
            "a strategy of tf.distribute is in use: Lockstep distributes the step itself; remove it"
        )
    if kind == "train":
        refuse_overwriting_gradients(model)


class EagerTensorFlow:
    """Tensors of TensorFlow: nobody writes to them, only to variables."""

    def apart(self, seed: int) -> AbstractContextManager[None]:
        """Within the block a replica computes."""
        return _computing_eagerly(seed)

    def kept(self, variable: Any) -> Any:
        """Return the value of a variable."""
        return variable._value.read_value()

    def own(self, leaf: Any) -> Any:
        """Return a leaf as a tensor."""
        return leaf.read_value() if isinstance(leaf, tf.Variable) else tf.convert_to_tensor(leaf)

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """View a tensor in place (on a CPU), or copy it to the host; gradients of embeddings become dense."""
        return np.asarray(tf.convert_to_tensor(array))

    def through(
        self, leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
    ) -> Tensors:
        """Return `meet(leaves)`, for which gradients are computed by `gradient`."""
        return with_gradient(leaves, meet, gradient)

    def apply(self, update: Update, gradients: Sequence[npt.NDArray[Any] | None]) -> None:
        """Make an update from copies."""
        update.apply([None if g is None else tf.constant(g) for g in gradients])


@contextmanager
def _computing_eagerly(seed: int) -> Iterator[None]:
    """Within the block a replica computes eagerly: all of its random numbers follow from `seed`.

    Functions run eagerly, too, since their graphs may be older than the block.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with random_numbers(seed):
            yield
    finally:
        tf.config.run_functions_eagerly(before)
