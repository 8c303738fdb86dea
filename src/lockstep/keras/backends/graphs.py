"""Graphs and tensors of TensorFlow: what a step does to variables, and memory that is not TensorFlow's.

Touches private parts of TensorFlow, as `lockstep.keras.backends.tensorflow` and
`lockstep.keras.tf_checkpoints` do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.framework import auto_control_deps_utils

from lockstep.errors import ModelError
from lockstep.keras import tf_random_ops
from lockstep.keras.backends.contract import Kind
from lockstep.keras.backends.multi_update import Update, refuse_own_update
from lockstep.keras.backends.state_changes import KERAS_SEED, StateKind, in_sum, kind_by_itself
from lockstep.keras.backends.steps import refuse_integer_state
from lockstep.keras.seeds import GOLDEN_32
from lockstep.keras.tf_random_ops import is_counter
from lockstep.keras.variables import seed_positions

_ALIGNMENT = 64
"""TensorFlow's kernels insist on tensors that start at a multiple of this many bytes."""

_TENSORFLOW_SEED = "StateVar"
"""How TensorFlow calls the state of a `tf.random.Generator`."""

_WORTH_BORROWING = 1 << 14
"""Bytes below which copying an array is as fast as borrowing it."""


class UpdateOperations:
    """Where in its graph a step makes updates, as numbers of operations; made where the step begins.

    Attributes:
        made: the operations of the updates of earlier rounds.
        noted: the first operation after the round's own update, which is not made.
    """

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self.made: list[range] = []
        self.noted: int | None = None

    def note(self) -> None:
        """Note that the round's own update is here."""
        self.noted = self._here()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Note that the block makes an update."""
        start = self._here()
        yield
        self.made.append(range(start, self._here()))

    def _here(self) -> int:
        self.check()
        return 0 if tf.executing_eagerly() else len(self._graph.get_operations())

    def check(self) -> None:
        """Raise ModelError if the program is in a graph within the step's."""
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph:
            raise ModelError(
                "the step applies its optimizer, or calls all_reduce or all_gather, within a condition, a "
                "loop or a function of TensorFlow's; replicas cannot synchronize there: do it in the step "
                "itself, and call a tf.function as a plain function"
            )


@dataclass
class RoundTrace:
    """What it has shown to trace a step or a function for one of its rounds, or to run it eagerly.

    Attributes:
        places: where its graph makes updates.
        update: the round's own, if it has come to one.
        ended: whether it has come to its end.
    """

    places: UpdateOperations = field(default_factory=UpdateOperations)
    update: Update | None = None
    ended: bool = True

    def resumes(self, graph: Any) -> bool:
        """Whether what follows the round's own update in `graph` wants what the update would have changed."""
        if self.update is None or self.places.noted is None:
            return False
        return not self.ended or uses(graph, natives(self.update.changed), self.places.noted)


def natives(variables: Iterable[Any]) -> list[tf.Variable]:
    """Return variables, which may be Keras's or TensorFlow's, as TensorFlow's."""
    return [one.value if isinstance(one, keras.Variable) else one for one in variables]


@dataclass(frozen=True)
class AssignedVariables:
    """The variables that a step or function in a graph assigns, each restored after a replica has computed.

    Attributes:
        state: by what is done with them; see `lockstep.keras.backends.state_changes`.
        updated: what the updates of earlier rounds change.
        counters: how often random operations have run; start from zero.
    """

    state: Mapping[StateKind, list[tf.Variable]] = field(
        default_factory=lambda: {"metric": [], "seed": [], "first": [], "layer": []}
    )
    updated: list[tf.Variable] = field(default_factory=list)
    counters: list[tf.Variable] = field(default_factory=list)

    @classmethod
    def of_step(
        cls,
        model: Any,
        kind: Kind,
        variables: Sequence[tf.Variable],
        trained: Sequence[tf.Variable],
        updated: Sequence[tf.Variable],
    ) -> "AssignedVariables":
        """Decide what is done with the `variables` that a step of `model` assigns.

        Args:
            model: built.
            kind: of the step.
            variables: those that it assigns.
            trained: those that only updates may change.
            updated: those that the updates of earlier rounds change.

        Raises:
            ModelError: there is nothing right to do with one.
        """
        known = {id(variable.value): variable for variable in model.variables}
        seeds = {id(variable) for variable in seeds_of(model)}
        metrics = [variable.value for variable in model.metrics_variables]
        if kind == "predict":
            metrics = [metric for metric in metrics if any(metric is variable for variable in variables)]
        fixed = {id(variable) for variable in trained} - {id(variable) for variable in updated}
        found = cls()
        found.state["metric"].extend(metrics)
        for variable in variables:
            if id(variable) in fixed:
                refuse_own_update(variable.name)
            if any(variable is metric for metric in metrics):
                continue
            own = known.get(id(variable))
            drawn = id(variable) in seeds or (own is None and KERAS_SEED in variable.name)
            found._add(variable, updated, "seed" if drawn else None, getattr(own, "path", variable.name))
        return found

    @classmethod
    def of_function(
        cls,
        variables: Sequence[tf.Variable],
        updated: Sequence[tf.Variable],
        is_merged: Callable[[tf.Variable], bool],
    ) -> "AssignedVariables":
        """Decide what is done with the `variables` that a function of the user's own assigns.

        A variable of TensorFlow says by its `aggregation` how replicas' values become one, also where it is
        one of Keras's metrics. Where it says nothing, floating-point variables are layers' states.

        Args:
            variables: those that the function assigns, or of which each replica sees its part.
            updated: those that the updates of earlier rounds change.
            is_merged: whether replicas have merged what they have assigned to one.

        Raises:
            ModelError: there is nothing right to do with one.
        """
        found = cls()
        for variable in {id(variable): variable for variable in variables}.values():
            draws = KERAS_SEED in variable.name or _TENSORFLOW_SEED in variable.name
            said = kind_by_itself(variable.aggregation.name.lower(), draws)
            kind: StateKind | None = "first" if is_merged(variable) else said
            found._add(variable, updated, kind, variable.name, refuses_trainable=True)
        return found

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
        elif any(variable is one for one in updated):
            self.updated.append(variable)
        elif kind is not None:
            self.state[kind].append(variable)
        elif refuses_trainable and variable.trainable:
            refuse_own_update(variable.name)
        elif variable.dtype.is_floating:
            self.state["layer"].append(variable)
        else:
            refuse_integer_state(SimpleNamespace(dtype=variable.dtype.name, path=path))

    @property
    def named(self) -> dict[str, tf.Variable]:
        """The variables whose changes are in a partial, by their names there, which begin with the kind."""
        return {f"{kind}/{i}": one for kind, some in self.state.items() for i, one in enumerate(some)}

    @contextmanager
    def of(self, replica: Any, *, sums_so_far: bool) -> Iterator[Callable[[Any], dict[str, Any]]]:
        """Within the block variables are a replica's; afterwards they have their values from before.

        Args:
            replica: its id.
            sums_so_far: whether replica 0 begins with what metrics have summed before, and not with zero: it
                speaks for that, also for a reset, or where a function uses the sum.

        Yields:
            What returns, given the replica's weight, the changes by their names in a partial.
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
            found = {}
            for kind, variables in self.state.items():
                for i, (variable, start) in enumerate(zip(variables, starts[kind], strict=True)):
                    part = tf.cast(weight, variable.dtype) if kind == "layer" else None
                    found[f"{kind}/{i}"] = in_sum(kind, start, variable.read_value(), replica, part, tf)
            return found

        yield changes
        for variable, value in zip(restored, before, strict=True):
            variable.assign(value)


def summed_on_read(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Return those whose values are sums of parts, of which a replica's function sees its own."""
    on_read, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    return [one for one in variables if one.synchronization == on_read and one.aggregation == total]


def mixed(seed: Any, replica: Any) -> Any:
    """Give each replica random numbers of its own; replica 0 keeps the model's."""
    spread = tf.cast(replica * GOLDEN_32, seed.dtype)
    return tf.concat([tf.bitwise.bitwise_xor(seed[:1], spread[None]), seed[1:]], axis=0)


def seeds_of(model: Any) -> list[tf.Variable]:
    """Return the states of the random generators that a model's layers own."""
    variables = model.non_trainable_variables
    return [variables[i].value for i in sorted(seed_positions(model))]


def with_gradient(
    leaves: Sequence[Any],
    compute: Callable[[Sequence[Any]], Sequence[Any]],
    gradient: Callable[[Sequence[Any]], Sequence[Any]],
) -> Sequence[Any]:
    """Return `compute(leaves)`, for which gradients are computed by `gradient`."""
    if not leaves:
        return compute(leaves)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def computed(*leaves: Any) -> Any:
        # What was looked up with several indices has a gradient that is a list of occurrences.
        return list(compute(leaves)), lambda *upstream: gradient([tf.convert_to_tensor(u) for u in upstream])

    found: Sequence[Any] = computed(*leaves)
    return found


def exempt_from_autograph(package: str) -> None:
    """Keep AutoGraph from rewriting the code of a package when functions of TensorFlow call it."""
    rule = autograph_config.DoNotConvert(package)
    if all(str(rule) != str(known) for known in autograph_config.CONVERSION_RULES):
        autograph_config.CONVERSION_RULES = (rule, *autograph_config.CONVERSION_RULES)


def know_lookups() -> None:
    """Let TensorFlow know that looking something up in a table does not change the table."""
    for operation in ("LookupTableFindV2", "LookupTableSizeV2"):
        auto_control_deps_utils.register_read_only_resource_op(operation)


def as_in_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what AutoGraph makes of a function, unless it is switched off where the program is.

    A function of TensorFlow's is taken apart: within a graph of its own replicas could not meet. Whether it
    is for AutoGraph it says itself.
    """
    context = ag_ctx.control_status_ctx()
    if isinstance(function, tf.types.experimental.PolymorphicFunction):
        if not function._autograph:
            return function.python_function  # type: ignore[no-any-return]
        function = function.python_function
        context = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.UNSPECIFIED)
    converted: Callable[..., Any] = autograph.tf_convert(function, context)
    return converted


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
            raise ModelError(f"the step changes {handle}, which is not a variable and cannot be combined")
        found.append(known[id(handle)])
    return found


def uses(graph: Any, variables: Iterable[tf.Variable], start: int) -> bool:
    """Whether operations of a graph, from number `start` on, read or assign `variables`."""
    inside = _captures(graph, variables)
    return any(id(tensor) in inside for op in graph.get_operations()[start:] for tensor in op.inputs)


def refuse_assignments(graph: Any, variables: Iterable[tf.Variable], updates: Sequence[range]) -> None:
    """Raise ModelError if a graph assigns `variables` outside of its updates."""
    inside = _captures(graph, variables)
    for number, operation in enumerate(graph.get_operations()):
        _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        for tensor in written:
            if id(tensor) in inside and not any(number in update for update in updates):
                refuse_own_update(inside[id(tensor)])


def _captures(graph: Any, variables: Iterable[tf.Variable]) -> dict[int, str]:
    """Return the names of those `variables` that a graph captures, by the ids of their tensors in it."""
    names = {id(variable.handle): variable.name for variable in variables}
    return {id(inside): names[id(handle)] for handle, inside in graph.captures if id(handle) in names}


def traced(function: Callable[..., Any], jit: bool, *like: Any) -> Any:
    """Return `function`, traced for arguments like those given; its `graph` is what came of it."""
    specs = keras.tree.map_structure(
        lambda one: tf.TensorSpec(one.shape, one.dtype) if isinstance(one, tf.Tensor) else one, like
    )
    return tf.function(function, jit_compile=jit, autograph=False).get_concrete_function(*specs)


def same_bits(variable: tf.Variable, before: Any) -> bool:
    """Whether a variable still has the value it had before."""
    now, then = (np.asarray(value).reshape(-1).view(np.uint8) for value in (variable.read_value(), before))
    return np.array_equal(now, then)


class _WritableVariable:
    """The same memory, as NumPy's array interface shows it, but not read-only."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def borrowed(array: npt.NDArray[Any]) -> Any:
    """Return a tensor that reads an array's memory in place where that is worthwhile and possible.

    TensorFlow never writes to a tensor whose memory it does not own; but a variable that the tensor itself is
    assigned to may go on reading that memory.
    """
    if (
        array.nbytes < _WORTH_BORROWING
        or array.ctypes.data % _ALIGNMENT
        or not array.flags.c_contiguous
        or array.dtype.kind != "f"
    ):
        return tf.constant(array)
    # NumPy gives no read-only array away, though its receiver only reads.
    return tf.experimental.dlpack.from_dlpack(np.asarray(_WritableVariable(array)).__dlpack__())


def own(tensor: Any, one: Any) -> Any:
    """Return a copy of a tensor of a total.

    TensorFlow may let a variable share the memory of a tensor that is assigned to it, but a total's memory
    is used again. A product with a number that is not known to be 1 is a new tensor.
    """
    return tensor * tf.cast(one, tensor.dtype)


def scaled(gradients: Sequence[Any], scale: Any) -> list[Any]:
    """Return copies of gradients, times `scale`."""
    return [None if gradient is None else own(gradient, scale) for gradient in gradients]
