"""Graphs and tensors of TensorFlow: what a step does to variables, and memory that is not TensorFlow's.

Touches private parts of TensorFlow, as `lockstep.keras.backends.tensorflow` and
`lockstep.keras.state.tf_checkpoints` do.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from lockstep.keras.backends.multi_update import refuse_own_update

_ALIGNMENT = 64
"""TensorFlow's kernels insist on tensors that start at a multiple of this many bytes."""

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
