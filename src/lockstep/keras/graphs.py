"""Graphs and tensors of TensorFlow: what a step does to variables, and memory that is not TensorFlow's.

The other file, besides `lockstep.keras.tensorflow`, that touches private parts of TensorFlow.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from lockstep.errors import ModelError
from lockstep.keras.steps import replaced

_ALIGNMENT = 64
"""TensorFlow's kernels insist on tensors that start at a multiple of this many bytes."""

_WORTH_BORROWING = 1 << 14
"""Bytes below which copying an array is as fast as borrowing it."""

_RANDOM = ("Random", "Multinomial", "TruncatedNormal")
"""How the names of TensorFlow's operations begin whose numbers depend on how often they have run."""


@dataclass
class Application:
    """One application of an optimizer in a step.

    Attributes:
        gradients: None where there are none.
        variables: what they are gradients of; None for all that the optimizer was built with.
        operations: how many operations the step's graph had by then.
    """

    gradients: list[Any]
    variables: list[Any] | None
    operations: int


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
        operations = 0 if tf.executing_eagerly() else len(graph.get_operations())
        record.append(Application(list(grads), variables, operations))

    with replaced(optimizer, "apply", note):
        yield record


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
            raise ModelError(f"the step changes {handle}, which is no variable: that cannot be combined")
        found.append(known[id(handle)])
    return found


def refuse_random_operations(graph: Any) -> None:
    """Raise ModelError for random numbers that depend on how often an operation has run in this process."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    for node in (node for part in nodes for node in part):
        if node.op.startswith(_RANDOM) and not node.op.startswith("RandomDataset"):
            raise ModelError(
                f"the step draws random numbers with the operation {node.op} ({node.name}), whose numbers "
                "depend on what else this process computes; use keras.random with a generator that the "
                "model owns: self.seed = keras.random.SeedGenerator(1), "
                "keras.random.normal(shape, seed=self.seed)"
            )


def refuse_late_uses(graph: Any, variables: Iterable[tf.Variable], start: int) -> None:
    """Raise ModelError if operations of a graph, from number `start` on, read or assign `variables`."""
    names = {id(variable.handle): variable.name for variable in variables}
    inside = {id(inside): names[id(handle)] for handle, inside in graph.captures if id(handle) in names}
    for operation in graph.get_operations()[start:]:
        for tensor in operation.inputs:
            if id(tensor) in inside:
                raise ModelError(
                    f"train_step uses the trainable variable {inside[id(tensor)]!r} after it has applied the "
                    "optimizer; replicas apply their gradients together, when all of them have been "
                    "computed, so everything that depends on new weights belongs into a callback"
                )


def traced(function: Callable[..., Any], jit: bool, *like: Any) -> Callable[..., Any]:
    """Trace `function` for arguments like those given."""
    specs = keras.tree.map_structure(
        lambda one: tf.TensorSpec(one.shape, one.dtype) if isinstance(one, tf.Tensor) else one, like
    )
    graph: Callable[..., Any] = tf.function(function, jit_compile=jit, autograph=False).get_concrete_function(
        *specs
    )
    return graph


def same_bits(variable: tf.Variable, before: Any) -> bool:
    """Whether a variable still has the value it had before."""
    now, then = (np.asarray(value).reshape(-1).view(np.uint8) for value in (variable.read_value(), before))
    return np.array_equal(now, then)


class _Writable:
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
    return tf.experimental.dlpack.from_dlpack(np.asarray(_Writable(array)).__dlpack__())


def own(tensor: Any, one: Any) -> Any:
    """Return a copy of a tensor of a total.

    TensorFlow may let a variable share the memory of a tensor that is assigned to it, but a total's memory
    is used again. A product with a number that is not known to be 1 is a new tensor.
    """
    return tensor * tf.cast(one, tensor.dtype)
