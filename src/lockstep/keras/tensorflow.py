"""Keras on TensorFlow: the only file that touches the private parts of TensorFlow and of its trainer.

Keras's own `train_step` is traced once, with `optimizer.apply` replaced by a recorder. Its graph tells which
variables the step assigns. A second function around it gives them back the values they had, so that
replicas can be computed one after the other; a third one applies the sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps_utils

from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras.contract import Kind, Partial, Total
from lockstep.keras.digest import named_arrays
from lockstep.keras.steps import (
    only_application,
    refuse_integer_state,
    refuse_metrics_that_do_not_add,
    replaced,
    seed_positions,
)

_GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: spreads consecutive replica ids over the seeds."""

_ALIGNMENT = 64
"""TensorFlow's kernels insist on tensors that start at a multiple of this many bytes."""

_WORTH_BORROWING = 1 << 14
"""Bytes below which copying an array is as fast as borrowing it."""

_REMEDY = (
    "on the TensorFlow backend it has to call self.optimizer.apply (or apply_gradients) exactly once, with "
    "the gradients of all trainable variables"
)


class TensorFlowBackend:
    """Keras's TensorFlow backend behind the contract `lockstep.keras.contract.Backend`."""

    def program(self, model: Any, kind: Kind) -> "TensorFlowProgram":
        """Prepare a step of a built model."""
        refuse_unsupported(model, kind)
        refuse_metrics_that_do_not_add(model)
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

    metrics: Sequence[tf.Variable]
    seeds: Sequence[tf.Variable]
    layers: Sequence[tf.Variable]

    @property
    def state(self) -> list[tf.Variable]:
        """The variables behind `state/0`, `state/1`, ... of a partial."""
        return [*self.seeds, *self.layers]


@dataclass
class Application:
    """One application of an optimizer in a step: its gradients, None where there are none."""

    gradients: list[Any]
    variables: list[Any] | None


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
        self._touched = Touched((), (), ())
        self._application = Application([], None)
        self._log_names: tuple[str, ...] = ()
        self._outputs: list[tuple[int, Any]] = []

    def compute(self, state: Any, share: Share) -> Partial:
        """Compute one replica's part; afterwards all variables have the values they had before."""
        data = share.data()
        leaves = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(data)]
        given = [leaf for leaf in leaves if leaf is not None]
        function = self._function(data, leaves)
        partial: Partial
        partial, outputs = function(tf.constant(share.replica, tf.int64), tf.constant(share.weight), *given)
        if self._kind == "predict":
            self._outputs.append((share.replica, outputs))
        return partial

    def apply(self, state: Any, total: Total) -> tuple[Any, Any]:
        """Apply the sum to the model's variables."""
        if self._eager:
            return self._applied({name: tf.constant(array) for name, array in total.items()}), None
        tensors = {name: borrowed(array) for name, array in total.items()}
        if self._update is None:
            specs = {name: tf.TensorSpec(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
            update = tf.function(self._traced_apply, jit_compile=self._jit, autograph=False)
            self._update = update.get_concrete_function(tf.TensorSpec((), tf.float32), specs)
        logs = self._update(tf.constant(1.0), tensors)
        return {name: logs[name] for name in self._log_names} if logs else None, None

    def outputs(self) -> list[tuple[int, Any]]:
        """Return and forget the outputs computed since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the tensors of the model's and the optimizer's variables by their paths."""
        model = self._model
        variables = [*model.variables, *(model.optimizer.variables if self._kind == "train" else [])]
        return named_arrays(variables, [variable.value for variable in variables])

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
        weight_spec = tf.TensorSpec((), tf.float32)
        inner = tf.function(step, autograph=False).get_concrete_function(weight_spec, *specs)
        self._touched = self._classified(assigned(inner.graph))
        touched = self._touched

        def replica(replica: Any, weight: Any, *given: Any) -> Any:
            return self._computed(inner, touched, replica, weight, *given)

        outer = tf.function(replica, jit_compile=self._jit, autograph=False)
        traced: Callable[..., Any] = outer.get_concrete_function(
            tf.TensorSpec((), tf.int64), weight_spec, *specs
        )
        return traced

    def _eagerly(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Without a graph there is no telling what a step assigns: all that it may assign is restored."""
        model = self._model
        others = [variable.value for variable in model.non_trainable_variables]
        fixed = [variable for variable in others if not variable.dtype.is_floating]
        seeds = {id(variable) for variable in self._seeds()}
        watched = [variable for variable in fixed if id(variable) not in seeds]
        watched += [variable.value for variable in model.trainable_variables]
        if self._kind == "train":
            watched += [variable.value for variable in model.optimizer.variables]
        self._touched = self._classified(
            [variable for variable in others if variable.dtype.is_floating or id(variable) in seeds]
        )
        touched = self._touched

        def function(*given: Any) -> Any:
            before = [variable.read_value() for variable in watched]
            computed = self._computed(step, touched, *given)
            changed = [v for v, old in zip(watched, before, strict=True) if not same_bits(v, old)]
            self._classified(changed)
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
        keras_variables = {id(v.value): v for v in model.variables}
        seeds = {id(variable) for variable in self._seeds()}
        metrics = [variable.value for variable in model.metrics_variables]
        if self._kind == "predict":
            metrics = [variable for variable in metrics if id(variable) in set(map(id, variables))]
        fixed = {id(variable.value) for variable in model.trainable_variables}
        if model.optimizer is not None:
            fixed |= {id(variable.value) for variable in model.optimizer.variables}
        layers = []
        for variable in variables:
            if id(variable) in fixed:
                raise ModelError(
                    f"the step assigns the variable {variable.name!r} itself; trainable variables and those "
                    "of the optimizer change through self.optimizer.apply only, once a step"
                )
            if id(variable) in seeds or any(variable is metric for metric in metrics):
                continue
            if not variable.dtype.is_floating:
                refuse_integer_state(keras_variables.get(id(variable), variable))
            layers.append(variable)
        return Touched(metrics, [v for v in variables if id(v) in seeds], layers)

    def _step(self, weight: Any, data: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Run the user's own step; return its gradients, the figures beyond its metrics, its outputs."""
        model = self._model
        if self._kind == "predict":
            return {}, {}, model.predict_step(data)
        if self._kind == "test":
            with weighed_losses(model, weight):
                return {}, self._own_logs(model.test_step(data)), None
        with recorded_apply(model.optimizer) as record, weighed_losses(model, weight):
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

    def _traced_apply(self, one: Any, total: dict[str, Any]) -> Any:
        # TensorFlow may let a variable share the memory of a tensor that is assigned to it, but the
        # total's memory is used again. A product with a number that it does not know is a new tensor.
        return self._applied({name: tensor * tf.cast(one, tensor.dtype) for name, tensor in total.items()})

    def _applied(self, total: dict[str, Any]) -> dict[str, Any] | None:
        for i, variable in enumerate(self._touched.state):
            variable.assign_add(total[f"state/{i}"])
        for i, metric in enumerate(self._touched.metrics):
            metric.assign_add(total[f"metric/{i}"])
        applied = self._application
        if applied.gradients:
            gradients = [total.get(f"gradient/{i}") for i in range(len(applied.gradients))]
            self._model.optimizer.apply(gradients, applied.variables)
        if self._kind == "predict":
            return None
        own = {name: total[f"log/{name}"] for name in self._log_names if f"log/{name}" in total}
        logs = self._model.get_metrics_result() | own
        return {name: logs[name] for name in self._log_names}


@contextmanager
def recorded_apply(optimizer: Any) -> Iterator[list[Application]]:
    """Within the block `optimizer.apply` notes its gradients and changes nothing."""
    record: list[Application] = []
    graph = tf.compat.v1.get_default_graph()

    def note(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if tf.compat.v1.get_default_graph() is not graph:
            raise ModelError(
                "train_step applies its optimizer within a condition, a loop or a function of TensorFlow's; "
                "its replicas cannot meet there: apply it in train_step itself"
            )
        variables = None if trainable_variables is None else list(trainable_variables)
        record.append(Application(list(grads), variables))

    with replaced(optimizer, "apply", note):
        yield record


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


def assigned(graph: Any) -> list[tf.Variable]:
    """Return the variables that a function's graph assigns, perhaps only in a branch of a condition.

    Raises:
        ModelError: the graph changes something that is no variable, such as a table.
    """
    reads = auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph)
    known = {id(variable.handle): variable for variable in graph.variables}
    captured = {id(inside): outside for outside, inside in graph.captures}
    found = []
    for i, inside in enumerate(graph.inputs):
        if inside.dtype != tf.resource or i in reads or id(inside) not in captured:
            continue
        handle = captured[id(inside)]
        if id(handle) not in known:
            raise ModelError(f"the step changes {handle}, which is no variable: it cannot be summed")
        found.append(known[id(handle)])
    return found


def mixed(seed: Any, replica: Any) -> Any:
    """Give each replica random numbers of its own; replica 0 keeps the model's."""
    spread = tf.cast(replica * _GOLDEN, seed.dtype)
    return tf.concat([tf.bitwise.bitwise_xor(seed[:1], spread[None]), seed[1:]], axis=0)


def same_bits(variable: tf.Variable, before: Any) -> bool:
    """Whether a variable still has the value it had before."""
    pair = (np.asarray(variable.read_value()), np.asarray(before))
    return bool(np.array_equal(*(array.reshape(-1).view(np.uint8) for array in pair)))


class _Writable:
    """The same memory, as NumPy's array interface shows it, but not read-only."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def borrowed(array: npt.NDArray[Any]) -> Any:
    """Return a tensor that reads an array's memory in place where that is worthwhile and possible.

    TensorFlow does not write to a tensor whose memory it does not own.
    """
    if (
        array.nbytes < _WORTH_BORROWING
        or array.ctypes.data % _ALIGNMENT
        or not array.flags.c_contiguous
        or array.dtype.kind != "f"
    ):
        return tf.constant(array)
    # NumPy gives no read-only array away, though its receiver only reads.
    return tf.experimental.dlpack.from_dlpack(np.asarray(_Writable(array)).__dlpack__())


def refuse_unsupported(model: Any, kind: Kind) -> None:
    """Raise ModelError for what this backend cannot combine over replicas."""
    if tf.distribute.has_strategy():
        raise ModelError(
            "a strategy of tf.distribute is in use: Lockstep distributes the step itself; remove it"
        )
    if kind != "train":
        return
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"variable {variable.path!r} is overwritten by its gradient (float8 training), "
                "which cannot be averaged over replicas"
            )
