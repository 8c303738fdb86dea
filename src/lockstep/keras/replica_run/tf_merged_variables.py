"""Variables of TensorFlow whose `aggregation` merges the values that replicas assign.

As under `tf.distribute`, an assignment of a variable with `aggregation=SUM`, `MEAN` or `ONLY_FIRST_REPLICA`
is a merge: it assigns the sum, the mean or replica 0's value. This does not apply to variables that are
synchronized on read.

The only file that patches how TensorFlow's variables are assigned.
"""

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from lockstep.errors import ModelError
from lockstep.keras.assignments import is_assigning
from lockstep.keras.private.tensorflow import VARIABLE_CLASSES, written_by
from lockstep.keras.replica_run.merges import Op, current_replica
from lockstep.keras.tf_random_ops import is_own
from lockstep.worker.patch_registry import PATCHES

_SCOPE = "lockstep_merged"
"""The name scope of operations that assign merged values."""

_OPS: dict[Any, Op] = {tf.VariableAggregation.SUM: "sum", tf.VariableAggregation.MEAN: "mean"}
_SAME = frozenset({"AddV2", "Cast", "Const", "Identity", "Mul", "ReadVariableOp", "Sub"})
"""Operations whose results are equal on all replicas if their inputs are."""

_METHODS = {"assign": "value", "assign_add": "delta", "assign_sub": "delta"}


def is_merged(variable: tf.Variable) -> bool:
    """Whether replicas merge the values that they assign to a variable."""
    return variable.aggregation in _OPS and not _is_on_read(variable)


def install() -> None:
    """Patch the assignments of TensorFlow's variables, once per process."""
    if PATCHES.has(__name__):
        return
    for owner in VARIABLE_CLASSES:
        for method, argument in _METHODS.items():
            if method in vars(owner):
                PATCHES.replace(__name__, owner, method, functools.partial(_merging, argument))


def refuse_other_changes(graph: Any, variables: Iterable[tf.Variable]) -> None:
    """Raise ModelError if a graph changes merged `variables` other than by the patched assignments."""
    names = {id(variable.handle): variable.name for variable in variables if is_merged(variable)}
    inside = {id(inner): names[id(outer)] for outer, inner in graph.captures if id(outer) in names}
    for operation in graph.get_operations():
        for tensor in written_by(operation):
            if id(tensor) in inside and _SCOPE not in operation.name:
                raise ModelError(
                    f"the function passed to strategy.run changes {inside[id(tensor)]!r}, whose "
                    f"aggregation merges what replicas assign, by {operation.type}; use assign, assign_add "
                    "or assign_sub in the function itself, not in a condition or a loop"
                )


def _is_on_read(variable: tf.Variable) -> bool:
    return bool(variable.synchronization == tf.VariableSynchronization.ON_READ)


def _takes_first_value(variable: tf.Variable, given: Any) -> bool:
    """Whether replicas merge by taking replica 0's value, because the values given to them may differ.

    A value that is equal on all replicas, such as that of a counter, each replica assigns without a merge.
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
        replica = current_replica()
        if replica is None:
            return original(self, *args, **kwargs)
        if tf.executing_eagerly() and not is_assigning() and not is_own(self):
            raise ModelError(
                f"the function passed to strategy.run assigns {self.name!r}, a variable of TensorFlow's "
                "own, where functions run eagerly: use a keras.Variable, or remove "
                "tf.config.run_functions_eagerly(True)"
            )
        given = kwargs.get(argument, *args[:1])
        if tf.executing_eagerly() or not (is_merged(self) or _takes_first_value(self, given)):
            return original(self, *args, **kwargs)
        kwargs.pop(argument, None)
        value = tf.convert_to_tensor(given, self.dtype)
        if not is_merged(self):
            value = tf.where(replica.number == 0, value, tf.zeros_like(value))
        merged = replica.merger.all_reduce(_OPS.get(self.aggregation, "sum"), value)
        with tf.name_scope(_SCOPE):
            return original(self, tf.cast(merged, self.dtype), *args[1:], **kwargs)

    # AutoGraph would call the wrapped function instead.
    del vars(assign)["__wrapped__"]
    return assign
