"""TensorFlow's graphs and tensors: the variables that a step assigns, and tensors over borrowed memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lockstep.errors import LockstepError, ModelError
from lockstep.keras import tf_random_ops
from lockstep.keras.backends.contract import EQUAL, StepKind
from lockstep.keras.backends.multi_update import RoundForm, refuse_own_update
from lockstep.keras.backends.state_changes import StateKind, contribution, declared_kind
from lockstep.keras.nests import declared_writable
from lockstep.keras.private.common import KERAS_SEED
from lockstep.keras.private.tensorflow import (
    TENSORFLOW_SEED,
    autograph_status,
    call_flat,
    converted,
    is_summary_writer,
    python_function_of,
    read_only_inputs,
    written_by,
)
from lockstep.keras.seeds import GOLDEN_32
from lockstep.keras.tf_random_ops import is_counter
from lockstep.keras.variables import seed_positions
from lockstep.worker.script import keep_original

_ALIGNMENT = 64
"""TensorFlow's kernels need tensors that are aligned to this many bytes."""

_WORTH_BORROWING = 1 << 14
"""Bytes below which copying an array is as fast as borrowing it."""


def call_python(act: Callable[..., Any], arguments: Sequence[Any], types: Any) -> Any:
    """Add an operation to the graph that calls `act` in Python whenever it is executed.

    TensorFlow forwards the text of an error, but not the error itself. So the operation stores it.
    """

    def guarded(*tensors: Any) -> Any:
        try:
            return act(*tensors)
        except LockstepError as error:
            keep_original(error)
            # TensorFlow repeats the whole traceback several times in its message.
            raise error.with_traceback(None) from None

    return tf.py_function(guarded, list(arguments), types)


class UpdateOperations:
    """The operations of a step's graph that make updates, as positions; created at the beginning of the step.

    Attributes:
        earlier: the operations that make the updates of earlier rounds.
        own_update: the first operation after the round's own update, which has no operations.
    """

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self.earlier: list[range] = []
        self.own_update: int | None = None

    def mark_own_update(self) -> None:
        """Mark the present position as that of the round's own update."""
        self.own_update = self._position()

    @contextmanager
    def of_earlier_update(self) -> Iterator[None]:
        """Mark the operations that the block adds as those of an earlier update."""
        start = self._position()
        yield
        self.earlier.append(range(start, self._position()))

    def _position(self) -> int:
        self.refuse_inner_graphs()
        return 0 if tf.executing_eagerly() else len(self._graph.get_operations())

    def refuse_inner_graphs(self) -> None:
        """Raise ModelError if the present graph is an inner graph of the step's."""
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph:
            raise ModelError(
                "the step applies its optimizer, or calls all_reduce or all_gather, within a condition, a "
                "loop or a tf.function; replicas cannot synchronize there: do it in the step itself, and "
                "remove the tf.function decorator of functions that do it; to apply an optimizer in some "
                "steps only, give it gradient_accumulation_steps, or compile with run_eagerly=True"
            )


@dataclass
class RoundTrace(RoundForm):
    """The form of a round, as shown by tracing a step or function for it, or by running it eagerly.

    Attributes:
        operations: the operations of the updates in its graph.
    """

    operations: UpdateOperations = field(default_factory=UpdateOperations)

    def uses_update(self, graph: Any) -> bool:
        """Whether `graph` uses variables that the round's own update would have changed, after the update."""
        if self.update is None or self.operations.own_update is None:
            return False
        return not self.ended or uses(graph, natives(self.update.changed), self.operations.own_update)


def natives(variables: Iterable[Any]) -> list[tf.Variable]:
    """Return TensorFlow's variables for variables of Keras or TensorFlow."""
    return [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]


def read(variable: tf.Variable) -> Any:
    """Return the value of a variable with one operation: its methods take several times as long.

    A variable of TensorFlow's own strategies, which consists of one for each device, has no handle.
    """
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable.read_value()
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def as_array(value: Any) -> npt.NDArray[Any]:
    """Return a tensor or an array as NumPy sees it: in place, except for a floating-point scalar.

    NumPy does not take a scalar tensor of bfloat16.
    """
    is_number = isinstance(value, tf.Tensor) and value.shape.rank == 0 and value.dtype.is_floating
    return np.asarray(value.numpy() if is_number else value)


def assign(variable: tf.Variable, array: npt.NDArray[Any], *, in_place: bool = False) -> None:
    """Assign an array of the same shape to a variable; see `read`.

    Args:
        variable: the variable.
        array: its value.
        in_place: whether the variable may have the memory of the array until it gets another value. Then
            the caller must not change the array. TensorFlow does not change it; see `borrowed`.
    """
    if isinstance(variable, tf.distribute.DistributedValues):
        variable.assign(array)
        return
    in_place = in_place and array.dtype == variable.dtype.as_numpy_dtype
    value = borrowed(array) if in_place else tf.constant(array, variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


@dataclass(frozen=True)
class AssignedVariables:
    """The variables that a step or function in a graph assigns, restored after each replica's computation.

    Attributes:
        state: the layers' state, by kind; see `lockstep.keras.backends.state_changes`.
        updated: the variables that the updates of earlier rounds change.
        counters: the counters of the runs of random operations; they start from zero.
        paths: the paths of the variables of kind `equal`.
    """

    state: Mapping[StateKind, list[tf.Variable]] = field(
        default_factory=lambda: {"metric": [], "seed": [], "first": [], "equal": [], "layer": []}
    )
    updated: list[tf.Variable] = field(default_factory=list)
    counters: list[tf.Variable] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @classmethod
    def of_step(
        cls,
        model: Any,
        kind: StepKind,
        variables: Sequence[tf.Variable],
        trained: Sequence[tf.Variable],
        updated: Sequence[tf.Variable],
    ) -> "AssignedVariables":
        """Classify the `variables` that a step of `model` assigns.

        Args:
            model: the built model.
            kind: the kind of the step.
            variables: the variables that the step assigns.
            trained: the variables that only updates may change.
            updated: the variables that the updates of earlier rounds change.

        Raises:
            ModelError: the replicas' values of a variable cannot be combined.
        """
        model_variables = {id(variable.value): variable for variable in model.variables}
        seeds = {id(variable) for variable in seeds_of(model)}
        metrics = [variable.value for variable in model.metrics_variables]
        if kind == "predict":
            metrics = [metric for metric in metrics if any(metric is variable for variable in variables)]
        fixed = {id(variable) for variable in trained} - {id(variable) for variable in updated}
        classified = cls()
        classified.state["metric"].extend(metrics)
        for variable in variables:
            if id(variable) in fixed:
                refuse_own_update(variable.name)
            if any(variable is metric for metric in metrics):
                continue
            keras_variable = model_variables.get(id(variable))
            is_seed = id(variable) in seeds or (keras_variable is None and KERAS_SEED in variable.name)
            classified._add(
                variable, updated, "seed" if is_seed else None, getattr(keras_variable, "path", variable.name)
            )
        return classified

    @classmethod
    def of_function(
        cls,
        variables: Sequence[tf.Variable],
        updated: Sequence[tf.Variable],
        is_merged: Callable[[tf.Variable], bool],
    ) -> "AssignedVariables":
        """Classify the `variables` that a function of `strategy.run` assigns.

        The `aggregation` of a TensorFlow variable decides, including those of Keras's metrics. Floating-point
        variables without an `aggregation` are layer state.

        Args:
            variables: the variables that the function assigns, or from which each replica reads its own part.
            updated: the variables that the updates of earlier rounds change.
            is_merged: returns whether the replicas have merged their values of a variable.

        Raises:
            ModelError: the replicas' values of a variable cannot be combined.
        """
        classified = cls()
        for variable in {id(variable): variable for variable in variables}.values():
            is_seed = KERAS_SEED in variable.name or TENSORFLOW_SEED in variable.name
            declared = declared_kind(variable.aggregation.name.lower(), is_seed)
            kind: StateKind | None = "first" if is_merged(variable) else declared
            classified._add(variable, updated, kind, variable.name, refuses_trainable=True)
        return classified

    def _add(
        self,
        variable: tf.Variable,
        updated: Sequence[tf.Variable],
        kind: StateKind | None,
        path: str,
        refuses_trainable: bool = False,
    ) -> None:
        if is_counter(variable):
            self.counters.append(variable)
        elif any(variable is other for other in updated):
            self.updated.append(variable)
        elif variable.dtype == tf.string:
            raise ModelError(
                f"the step changes {path!r}, a variable of strings, which replicas cannot combine: assign it "
                "outside of the step"
            )
        elif kind is not None and (kind == "first" or variable.dtype != tf.bool):
            self.state[kind].append(variable)
        elif refuses_trainable and variable.trainable:
            refuse_own_update(variable.name)
        elif variable.dtype.is_floating:
            self.state["layer"].append(variable)
        else:
            self.state["equal"].append(variable)
            self.paths.append(path)

    @property
    def named(self) -> dict[str, tf.Variable]:
        """The variables whose changes are in a partial, by their names in it, which begin with the kind.

        A program may list a metric twice; it has one name here, so that a total is added to it only once.
        """
        names = {
            id(variable): (self._name(kind, i), variable)
            for kind, variables in self.state.items()
            for i, variable in enumerate(variables)
        }
        return dict(names.values())

    def _name(self, kind: StateKind, position: int) -> str:
        return f"{EQUAL}{position}/{self.paths[position]}" if kind == "equal" else f"{kind}/{position}"

    @contextmanager
    def as_replica(self, replica: Any, *, sums_so_far: bool) -> Iterator[Callable[[Any], dict[str, Any]]]:
        """Within the block, variables have a replica's values. Afterwards, they have their old values.

        Args:
            replica: the replica's number.
            sums_so_far: whether metrics begin with their earlier sums on replica 0, and not with zero. Then a
                function may use or reset the sums.

        Yields:
            A function that takes the replica's weight, and returns the changes by their names in a partial.
        """
        restored = [*self.named.values(), *self.updated]
        before = [variable.read_value() for variable in restored]
        for metric in self.state["metric"]:
            zeros = tf.zeros_like(metric)
            metric.assign(tf.where(replica == 0, metric.read_value(), zeros) if sums_so_far else zeros)
        for seed in self.state["seed"]:
            seed.assign(mixed(seed.read_value(), replica))
        tf_random_ops.begin(self.counters, replica)
        starts = {
            kind: [None if kind == "metric" else variable.read_value() for variable in variables]
            for kind, variables in self.state.items()
        }

        def changes(weight: Any) -> dict[str, Any]:
            contributions = {}
            # The only replica of a step contributes the values that replica 0 contributes otherwise.
            counted_as = tf.where(weight == 1, tf.zeros_like(replica), replica)
            for kind, variables in self.state.items():
                for i, (variable, start) in enumerate(zip(variables, starts[kind], strict=True)):
                    if kind == "equal" and tf.executing_eagerly() and same_bits(variable, start):
                        continue
                    part = tf.cast(weight, variable.dtype) if kind == "layer" else None
                    end = variable.read_value()
                    if kind == "first" and variable.dtype == tf.bool:
                        start, end = (tf.cast(value, tf.uint8) for value in (start, end))
                    contributions[self._name(kind, i)] = contribution(kind, start, end, counted_as, part, tf)
            return contributions

        yield changes
        for variable, value in zip(restored, before, strict=True):
            variable.assign(value)


def summed_on_read(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Return the variables that sum the replicas' parts on read; a function reads its replica's part."""
    on_read, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    return [
        variable
        for variable in variables
        if variable.synchronization == on_read and variable.aggregation == total
    ]


def mixed(seed: Any, replica: Any) -> Any:
    """Return a replica's state of a random generator; replica 0 keeps the model's."""
    spread = tf.cast(replica * GOLDEN_32, seed.dtype)
    return tf.concat([tf.bitwise.bitwise_xor(seed[:1], spread[None]), seed[1:]], axis=0)


def seeds_of(model: Any) -> list[tf.Variable]:
    """Return the states of the random generators of a model's layers."""
    variables = model.non_trainable_variables
    return [variables[i].value for i in sorted(seed_positions(model))]


def with_custom_gradient(
    leaves: Sequence[Any],
    merge: Callable[[Sequence[Any]], Sequence[Any]],
    gradient: Callable[[Sequence[Any]], Sequence[Any]],
) -> Sequence[Any]:
    """Return `merge(leaves)`, for which `gradient` computes the gradients."""
    if not leaves:
        return merge(leaves)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def computed(*leaves: Any) -> Any:
        # The gradient of a lookup with several indices is a list of occurrences, not a tensor.
        return list(merge(leaves)), lambda *upstream: gradient([tf.convert_to_tensor(u) for u in upstream])

    results: Sequence[Any] = computed(*leaves)
    return results


def as_in_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as AutoGraph converts it, unless AutoGraph is disabled in the caller's context.

    A `tf.function` is replaced by its Python function, because replicas cannot merge in a graph of its own.
    Its `autograph` option decides whether the Python function is converted.
    """
    if not isinstance(function, tf.types.experimental.PolymorphicFunction):
        return converted(function, autograph_status())
    function, status = python_function_of(function)
    return function if status is None else converted(function, status)


def as_in_its_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as AutoGraph converts it where a graph is being traced, or a `tf.function` itself."""
    if not tf.inside_function() or isinstance(function, tf.types.experimental.PolymorphicFunction):
        return function
    return converted(function, autograph_status())


def assigned(graph: Any, *, may_summarize: bool = False) -> list[tf.Variable]:
    """Return the variables that a function's graph assigns, even if only a branch of a condition does.

    Args:
        graph: the graph of the function.
        may_summarize: whether the function may write summaries, which `summaries_recorded_if` limits to one
            replica.

    Raises:
        ModelError: the graph changes a resource other than a variable, such as a table.
    """
    reads = read_only_inputs(graph)
    variables = {id(variable.handle): variable for variable in graph.variables}
    captured = {id(inside): outside for outside, inside in graph.captures}
    assigned_variables = []
    for i, inside in enumerate(graph.inputs):
        if inside.dtype != tf.resource or i in reads or id(inside) not in captured:
            continue
        handle = captured[id(inside)]
        if is_summary_writer(handle):
            if may_summarize:
                continue
            raise ModelError(
                "the function passed to strategy.run writes summaries (tf.summary), which each replica would "
                "write: return the values from it, and write the results of strategy.reduce after it"
            )
        if id(handle) not in variables:
            raise ModelError(
                f"the step changes {handle}, which is not a variable; its changes cannot be combined"
            )
        assigned_variables.append(variables[id(handle)])
    return assigned_variables


def uses(graph: Any, variables: Iterable[tf.Variable], start: int) -> bool:
    """Whether operations of a graph, from position `start` on, read or assign `variables`."""
    inside = _captures(graph, variables)
    return any(id(tensor) in inside for op in graph.get_operations()[start:] for tensor in op.inputs)


def refuse_assignments(graph: Any, variables: Iterable[tf.Variable], updates: Sequence[range]) -> None:
    """Raise ModelError if a graph assigns `variables` outside of `updates`."""
    inside = _captures(graph, variables)
    for number, operation in enumerate(graph.get_operations()):
        for tensor in written_by(operation):
            if id(tensor) in inside and not any(number in update for update in updates):
                refuse_own_update(inside[id(tensor)])


def _captures(graph: Any, variables: Iterable[tf.Variable]) -> dict[int, str]:
    """Return the names of the `variables` that a graph captures, by the ids of their tensors in it."""
    names = {id(variable.handle): variable.name for variable in variables}
    return {id(inside): names[id(handle)] for handle, inside in graph.captures if id(handle) in names}


_traces = [0]


def traces() -> int:
    """Return how often `traced` was called."""
    return _traces[0]


def traced(function: Callable[..., Any], jit: bool, *like: Any) -> Any:
    """Return `function`, traced for arguments like these; the result has a `graph`."""
    _traces[0] += 1
    specs = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, tf.Tensor) else leaf, like
    )
    return tf.function(function, jit_compile=jit, autograph=False).get_concrete_function(*specs)


@contextmanager
def functions_run_eagerly() -> Iterator[None]:
    """Within the block, functions of TensorFlow run eagerly."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def executable(function: Callable[..., Any], jit: bool, *like: Any) -> Callable[..., Any]:
    """Return `function`, traced, for many calls outside of all graphs with arguments like these.

    Each call must have tensors of the same dtypes, and of the same shapes if these are known.
    """
    whole = traced(function, jit, *like)
    structure = tf.nest.map_structure(lambda leaf: None, like)

    def call(*arguments: Any) -> Any:
        try:
            tf.nest.assert_same_structure(structure, arguments)
        except (TypeError, ValueError):
            # TensorFlow's error names the difference.
            return whole(*arguments)
        return call_flat(whole, tf.nest.flatten(arguments))

    return call


def same_bits(variable: tf.Variable, before: Any) -> bool:
    """Whether the value of a variable has the same bits as before."""
    now, then = (np.asarray(value).reshape(-1).view(np.uint8) for value in (variable.read_value(), before))
    return np.array_equal(now, then)


def borrowed(array: npt.NDArray[Any]) -> Any:
    """Return a tensor that reads an array's memory in place, if that is possible and faster than a copy.

    TensorFlow does not write to memory that it does not own. But a variable to which the tensor itself is
    assigned may share the memory.
    """
    if (
        array.nbytes < _WORTH_BORROWING
        or array.ctypes.data % _ALIGNMENT
        or not array.flags.c_contiguous
        or array.dtype.kind != "f"
    ):
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(declared_writable(array).__dlpack__())


def copied(tensor: Any, factor: Any) -> Any:
    """Return a copy of a tensor of a total, times `factor`, a tensor whose value the graph must not contain.

    The memory of totals is reused, and a variable may share the memory of a tensor that is assigned to it. A
    product with a factor that may differ from 1 is always a new tensor. Booleans and integers are not
    borrowed.
    """
    if not tensor.dtype.is_floating:
        return tf.identity(tensor)
    return tensor * tf.cast(factor, tensor.dtype)


def scaled(gradients: Sequence[Any], scale: Any) -> list[Any]:
    """Return copies of gradients, multiplied by `scale`."""
    return [None if gradient is None else copied(gradient, scale) for gradient in gradients]
