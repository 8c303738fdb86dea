"""Keras on TensorFlow: replicas of a step, one after the other, and the update that they make together.

Keras's own `train_step` is traced once, with `optimizer.apply` replaced by a recorder. Its graph tells which
variables the step assigns. A second function around it gives them back the values they had, so that
replicas can be computed one after the other; a third one applies the sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import context

from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras.contract import Kind, Partial, Total
from lockstep.keras.graphs import (
    Application,
    assigned,
    borrowed,
    own,
    recorded_apply,
    refuse_late_uses,
    refuse_random_operations,
    same_bits,
    traced,
)
from lockstep.keras.steps import (
    model_state,
    only_application,
    refuse_integer_state,
    refuse_overwriting_gradients,
    replaced,
    seed_positions,
    whole_sums,
)

_GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: spreads consecutive replica ids over the seeds."""

_WORTH_COMPILING = 1 << 22
"""Bytes of gradients from which on XLA's fused update pays for its compilation."""

_SEED = "seed_generator_state"
"""How Keras calls the state of a generator, also of the one that serves layers without one of their own."""

_REMEDY = (
    "on the TensorFlow backend it has to call self.optimizer.apply (or apply_gradients) exactly once, with "
    "the gradients of all trainable variables"
)


class TensorFlowBackend:
    """Keras's TensorFlow backend behind the contract `lockstep.keras.contract.Backend`."""

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

    def settle(self) -> None:
        """Wait for the updates that were started: they read their total in place."""
        context.async_wait()

    def concrete(self, array: Any) -> npt.NDArray[Any]:
        """View a tensor in place (on a CPU), or copy it to the host."""
        return np.asarray(array.read_value() if isinstance(array, tf.Variable) else array)


@dataclass(frozen=True)
class Touched:
    """The variables that a step assigns, each restored after a replica's computation.

    Attributes:
        metrics: start from zero; what they come to is part of the partial.
        seeds: states of random generators.
        layers: floating-point state of the layers.
    """

    metrics: list[tf.Variable]
    seeds: list[tf.Variable]
    layers: list[tf.Variable]

    @property
    def state(self) -> list[tf.Variable]:
        """The variables behind `state/0`, `state/1`, ... of a partial."""
        return [*self.seeds, *self.layers]


class TensorFlowProgram:
    """One kind of step of one model; see `lockstep.keras.contract.Program`.

    The state lives in the model's variables: `state` is None.
    """

    def __init__(self, model: Any, kind: Kind) -> None:
        self._model = model
        self._kind = kind
        self._eager = model.run_eagerly
        self._jit = bool(model.jit_compile)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._update: Callable[..., Any] | None = None
        self._finish: Callable[..., Any] | None = None
        self._touched = Touched([], [], [])
        self._application = Application([], None, 0)
        self._log_names: tuple[str, ...] = ()
        self._outputs: list[tuple[int, Any]] = []

    def compute(self, state: Any, share: Share) -> Partial:
        """Compute one replica's part; afterwards all variables have the values they had before."""
        data = share.data()
        leaves = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(data)]
        function = self._function(data, leaves)
        replica, weight = tf.constant(share.replica, tf.int64), tf.constant(share.weight, tf.float64)
        partial: Partial
        partial, outputs = function(replica, weight, *(leaf for leaf in leaves if leaf is not None))
        if self._kind == "predict":
            self._outputs.append((share.replica, outputs))
        return partial

    def apply(self, state: Any, total: Total) -> tuple[Any, Any]:
        """Apply the sum to the model's variables."""
        take = tf.constant if self._eager else borrowed
        tensors = {name: take(array) for name, array in total.items()}
        gradients = [tensors.pop(f"gradient/{i}", None) for i in range(len(self._application.gradients))]
        one = tf.constant(1.0)
        if self._update is None or self._finish is None:
            self._update = self._made_update(one, gradients)
            self._finish = self._finished if self._eager else traced(self._finished, self._jit, one, tensors)
        if gradients:
            self._update(one, gradients)
        logs = self._finish(one, tensors)
        return {name: logs[name] for name in self._log_names} if logs else None, None

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs computed since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the model's and the optimizer's variables by their paths."""
        return model_state(self._model)

    def _function(self, data: Any, leaves: list[Any]) -> Callable[..., Any]:
        """Return what computes a replica whose examples look like `leaves`, None where there are none.

        The number of examples is left open, as Keras leaves it for arrays: one graph serves all replicas.
        """
        key = tuple(None if leaf is None else (leaf.dtype, *leaf.shape[1:]) for leaf in leaves)
        if key not in self._functions:

            def step(weight: Any, *given: Any) -> Any:
                rest = iter(given)
                packed = [None if leaf is None else next(rest) for leaf in leaves]
                return self._step(weight, keras.tree.pack_sequence_as(data, packed))

            specs = [
                tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves if leaf is not None
            ]
            self._functions[key] = self._eagerly(step) if self._eager else self._traced(step, specs)
        return self._functions[key]

    def _traced(self, step: Callable[..., Any], specs: list[Any]) -> Callable[..., Any]:
        weight = tf.TensorSpec((), tf.float64)
        inner = tf.function(step, autograph=False).get_concrete_function(weight, *specs)
        refuse_random_operations(inner.graph)
        if self._kind == "train" and self._application.gradients:
            weights = [variable.value for variable in self._model.trainable_variables]
            refuse_late_uses(inner.graph, weights, self._application.operations)
        touched = self._touched = self._classified(assigned(inner.graph))

        def replica(replica: Any, weight: Any, *given: Any) -> Any:
            return self._computed(inner, touched, replica, weight, *given)

        return traced(replica, self._jit, tf.TensorSpec((), tf.int64), weight, *specs)

    def _eagerly(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Without a graph there is no telling what a step assigns: all that it may assign is restored."""
        model = self._model
        seeds = {id(variable) for variable in self._seeds()}
        others = [variable.value for variable in model.non_trainable_variables]
        taken = [variable for variable in others if variable.dtype.is_floating or id(variable) in seeds]
        watched = [variable for variable in others if all(variable is not one for one in taken)]
        watched += [variable.value for variable in model.trainable_variables]
        if self._kind == "train":
            watched += [variable.value for variable in model.optimizer.variables]
        touched = self._touched = self._classified(taken)

        def function(*given: Any) -> Any:
            before = [variable.read_value() for variable in watched]
            computed = self._computed(step, touched, *given)
            self._classified([v for v, old in zip(watched, before, strict=True) if not same_bits(v, old)])
            return computed

        return function

    def _seeds(self) -> list[tf.Variable]:
        variables = self._model.non_trainable_variables
        return [variables[i].value for i in sorted(seed_positions(self._model))]

    def _classified(self, variables: Sequence[tf.Variable]) -> Touched:
        """Decide what is done with the variables that a step assigns.

        Raises:
            ModelError: there is nothing right to do with one.
        """
        model = self._model
        known = {id(variable.value): variable for variable in model.variables}
        seeds = {id(variable) for variable in self._seeds()}
        metrics = [variable.value for variable in model.metrics_variables]
        if self._kind == "predict":
            metrics = [metric for metric in metrics if any(metric is variable for variable in variables)]
        fixed = {id(variable.value) for variable in model.trainable_variables}
        if model.optimizer is not None:
            fixed |= {id(variable.value) for variable in model.optimizer.variables}
        touched = Touched(metrics, [], [])
        for variable in variables:
            if id(variable) in fixed:
                raise ModelError(
                    f"the step assigns the variable {variable.name!r} itself; trainable variables and those "
                    "of the optimizer change through self.optimizer.apply only, once a step"
                )
            if any(variable is metric for metric in metrics):
                continue
            if id(variable) in seeds or (id(variable) not in known and _SEED in variable.name):
                touched.seeds.append(variable)
            elif variable.dtype.is_floating:
                touched.layers.append(variable)
            else:
                path = getattr(known.get(id(variable)), "path", variable.name)
                refuse_integer_state(SimpleNamespace(dtype=variable.dtype.name, path=path))
        return touched

    def _step(self, weight: Any, data: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Run the user's own step; return its gradients, the figures beyond its metrics, its outputs."""
        model = self._model
        if self._kind == "predict":
            return {}, {}, model.predict_step(data)
        with whole_sums(model, weight), weighed_losses(model, weight):
            if self._kind == "test":
                return {}, self._own_logs(model.test_step(data)), None
            with recorded_apply(model.optimizer) as record:
                logs = model.train_step(data)
        if model.trainable_variables or record:
            self._application = only_application(record, _REMEDY)
        gradients = enumerate(self._application.gradients)
        dense = {f"gradient/{i}": tf.convert_to_tensor(g) for i, g in gradients if g is not None}
        return dense, self._own_logs(logs), None

    def _own_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the logs that the user's own step made, beyond the metrics' results."""
        self._log_names = tuple(logs)
        own = logs.keys() - self._model.get_metrics_result().keys()
        return {f"log/{name}": tf.cast(logs[name], tf.float32) for name in sorted(own)}

    def _computed(
        self, step: Callable[..., Any], touched: Touched, replica: Any, weight: Any, *given: Any
    ) -> tuple[dict[str, Any], Any]:
        """Return a replica's partial and outputs; restore what the step assigns."""
        variables = [*touched.metrics, *touched.state]
        before = [variable.read_value() for variable in variables]
        for metric in touched.metrics:
            metric.assign(tf.zeros_like(metric))
        for seed in touched.seeds:
            seed.assign(mixed(seed.read_value(), replica))
        starts = [variable.read_value() for variable in touched.state]
        gradients, own, outputs = step(weight, *given)
        partial = {name: g * tf.cast(weight, g.dtype) for name, g in (gradients | own).items()}
        partial |= {f"metric/{i}": metric.read_value() for i, metric in enumerate(touched.metrics)}
        for i, (variable, start) in enumerate(zip(touched.state, starts, strict=True)):
            end = variable.read_value()
            zero = tf.zeros_like(start)
            if i < len(touched.seeds):
                # Every replica advances its seed by the same amount: replica 0 speaks for all.
                partial[f"state/{i}"] = tf.where(replica == 0, end - start, zero)
            else:
                # What has not changed stays, even if it is infinite.
                change = tf.where(end == start, zero, end - start)
                partial[f"state/{i}"] = change * tf.cast(weight, start.dtype)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return partial, outputs

    def _made_update(self, one: Any, gradients: list[Any]) -> Callable[..., Any]:
        """Return `f(one, gradients)`, which applies the optimizer.

        The optimizer's operations are few and simple, and XLA makes one pass over the memory of them; so
        they are compiled where they are large, also on a CPU, where Keras compiles nothing by itself.
        """
        if self._eager:
            return self._updated
        size = sum(
            gradient.shape.num_elements() * gradient.dtype.size
            for gradient in gradients
            if gradient is not None
        )
        if self._jit or size < _WORTH_COMPILING or tf.config.list_logical_devices("GPU"):
            return traced(self._updated, self._jit, one, gradients)
        compiled = traced(self._updated, True, one, gradients)

        def first(one: Any, gradients: list[Any]) -> None:
            try:
                compiled(one, gradients)
                self._update = compiled
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
                # XLA knows not all operations, and says so before it runs any.
                self._update = traced(self._updated, False, one, gradients)
                self._update(one, gradients)

        return first

    def _updated(self, one: Any, gradients: list[Any]) -> None:
        owned = [None if gradient is None else own(gradient, one) for gradient in gradients]
        self._model.optimizer.apply(owned, self._application.variables)

    def _finished(self, one: Any, total: dict[str, Any]) -> dict[str, Any] | None:
        """Take over the rest of a total; return the logs."""
        for i, variable in enumerate(self._touched.state):
            variable.assign_add(own(total[f"state/{i}"], one))
        for i, metric in enumerate(self._touched.metrics):
            metric.assign_add(own(total[f"metric/{i}"], one))
        if self._kind == "predict":
            return None
        logs = self._model.get_metrics_result()
        logs |= {name: own(total[f"log/{name}"], one) for name in self._log_names if f"log/{name}" in total}
        return {name: logs[name] for name in self._log_names}


@contextmanager
def weighed_losses(model: Any, weight: Any) -> Iterator[None]:
    """Within the block the losses of single outputs count by the replica's weight, if not by its examples.

    In a graph, which is for any number of examples, Keras counts each batch once.
    """
    with ExitStack() as stack:
        for metric in getattr(model._compile_loss, "metrics", ()):

            def update(
                value: Any, sample_weight: Any = None, original: Callable[..., Any] = metric.update_state
            ) -> Any:
                return original(value, sample_weight=weight if sample_weight is None else sample_weight)

            stack.enter_context(replaced(metric, "update_state", update))
        yield


def mixed(seed: Any, replica: Any) -> Any:
    """Give each replica random numbers of its own; replica 0 keeps the model's."""
    spread = tf.cast(replica * _GOLDEN, seed.dtype)
    return tf.concat([tf.bitwise.bitwise_xor(seed[:1], spread[None]), seed[1:]], axis=0)


def refuse_unsupported(model: Any, kind: Kind) -> None:
    """Raise ModelError for what this backend cannot combine over replicas."""
    if tf.distribute.has_strategy():
        raise ModelError(
            "a strategy of tf.distribute is in use: Lockstep distributes the step itself; remove it"
        )
    if kind == "train":
        refuse_overwriting_gradients(model)
