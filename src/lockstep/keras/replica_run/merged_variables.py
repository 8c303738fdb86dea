"""Variables of TensorFlow that say how what replicas assign to them becomes one value.

As under `tf.distribute`, an assignment of one with `aggregation=SUM`, `MEAN` or `ONLY_FIRST_REPLICA` is
something that replicas do together: each finds the sum, the mean or replica 0's value afterwards. Not so
where a variable is synchronized when it is read.

The only file that touches how TensorFlow's variables are assigned.
"""

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from lockstep.errors import ModelError
from lockstep.keras.assignments import is_assigning
from lockstep.keras.replica_run.replica import Op, current
from lockstep.worker.patch_registry import PATCHES

_SCOPE = "lockstep_merged"
"""In the names of operations that assign what replicas have merged."""

_OPS: dict[Any, Op] = {tf.VariableAggregation.SUM: "sum", tf.VariableAggregation.MEAN: "mean"}
_SAME = frozenset({"AddV2", "Cast", "Const", "Identity", "Mul", "ReadVariableOp", "Sub"})
"""Operations that give all replicas the same, if they are given the same."""

_METHODS = {"assign": "value", "assign_add": "delta", "assign_sub": "delta"}


def is_merged(variable: tf.Variable) -> bool:
    """Whether replicas merge what they assign to a variable."""
    return variable.aggregation in _OPS and not _is_on_read(variable)


def install() -> None:
    """Let replicas merge what they assign."""
    if PATCHES.has(__name__):
        return
    for owner in (BaseResourceVariable, ResourceVariable):
        for method, argument in _METHODS.items():
            if method in vars(owner):
                PATCHES.replace(__name__, owner, method, functools.partial(_merging, argument))


def refuse_other_changes(graph: Any, variables: Iterable[tf.Variable]) -> None:
    """Raise ModelError if a graph changes merged `variables` by other means than an assignment."""
    names = {id(variable.handle): variable.name for variable in variables if is_merged(variable)}
    inside = {id(inner): names[id(outer)] for outer, inner in graph.captures if id(outer) in names}
    for operation in graph.get_operations():
        _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        for tensor in written:
            if id(tensor) in inside and _SCOPE not in operation.name:
                raise ModelError(
                    f"the function passed to strategy.run changes {inside[id(tensor)]!r}, whose "
                    f"aggregation merges what replicas assign, by {operation.type}; use assign, assign_add "
                    "or assign_sub in the function itself, not in a condition or a loop"
                )


def _is_on_read(variable: tf.Variable) -> bool:
    return bool(variable.synchronization == tf.VariableSynchronization.ON_READ)


def _is_of_first(variable: tf.Variable, given: Any) -> bool:
    """Whether replicas take replica 0's value for what they assign, since each may be given another one.

    What is the same for all, as for a counter, each replica assigns by itself and waits for no other.
    """
    is_first = variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    adds_up = variable.dtype.is_floating or variable.dtype.is_integer
    if not is_first or not adds_up or _is_on_read(variable) or is_assigning():
        return False
    return not _is_same_for_all(given, variable)


def _is_same_for_all(given: Any, variable: tf.Variable) -> bool:
    if not tf.is_tensor(given) or not tf.is_symbolic_tensor(given):
        return not isinstance(given, tf.Variable) or given is variable
    graph = given.graph
    handles = [inside for outside, inside in graph.captures if outside is variable.handle]
    waiting = [given]
    while waiting:
        tensor = waiting.pop()
        if any(tensor is handle for handle in handles):
            continue
        if tensor.op.type not in _SAME:
            return False
        waiting += tensor.op.inputs
    return True


def _merging(argument: str, original: Any) -> Any:
    @functools.wraps(original)
    def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current()
        if replica is None:
            return original(self, *args, **kwargs)
        if tf.executing_eagerly() and not is_assigning():
            raise ModelError(
                f"the function passed to strategy.run assigns {self.name!r}, a variable of TensorFlow's "
                "own, where functions run eagerly: use a keras.Variable, or remove "
                "tf.config.run_functions_eagerly(True)"
            )
        given = kwargs.get(argument, *args[:1])
        if tf.executing_eagerly() or not (is_merged(self) or _is_of_first(self, given)):
            return original(self, *args, **kwargs)
        kwargs.pop(argument, None)
        value = tf.convert_to_tensor(given, self.dtype)
        if not is_merged(self):
            value = tf.where(replica.number == 0, value, tf.zeros_like(value))
        merged = replica.merges.all_reduce(_OPS.get(self.aggregation, "sum"), value)
        with tf.name_scope(_SCOPE):
            return original(self, tf.cast(merged, self.dtype), *args[1:], **kwargs)

    # AutoGraph would call what it says it wraps in its place.
    del vars(assign)["__wrapped__"]
    return assign
