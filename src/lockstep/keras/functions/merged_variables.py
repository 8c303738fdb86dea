"""Variables of TensorFlow that say how what replicas assign to them becomes one value.

As under `tf.distribute`, an assignment of one with `aggregation=SUM` or `MEAN` is something that replicas do
together: each finds the sum or the mean afterwards. Not so where a variable is synchronized when it is read.

The only file that touches how TensorFlow's variables are assigned.
"""

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from lockstep.errors import ModelError
from lockstep.keras.functions.assignments import is_assigning
from lockstep.keras.functions.replica import Op, current

_SCOPE = "lockstep_merged"
"""In the names of operations that assign what replicas have merged."""

_OPS: dict[Any, Op] = {tf.VariableAggregation.SUM: "sum", tf.VariableAggregation.MEAN: "mean"}
_METHODS = {"assign": "value", "assign_add": "delta", "assign_sub": "delta"}


def is_merged(variable: tf.Variable) -> bool:
    """Whether replicas merge what they assign to a variable."""
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    return variable.aggregation in _OPS and not on_read


@functools.cache
def install() -> None:
    """Let replicas merge what they assign; once a process."""
    for owner in (BaseResourceVariable, ResourceVariable):
        for method, argument in _METHODS.items():
            if method in vars(owner):
                setattr(owner, method, _merging(vars(owner)[method], argument))


def refuse_other_changes(graph: Any, variables: Iterable[tf.Variable]) -> None:
    """Raise ModelError if a graph changes merged `variables` by other means than an assignment."""
    names = {id(variable.handle): variable.name for variable in variables if is_merged(variable)}
    inside = {id(inner): names[id(outer)] for outer, inner in graph.captures if id(outer) in names}
    for operation in graph.get_operations():
        _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        for tensor in written:
            if id(tensor) in inside and _SCOPE not in operation.name:
                raise ModelError(
                    f"the function that strategy.run was given changes {inside[id(tensor)]!r}, whose "
                    f"aggregation merges what replicas assign, by {operation.type}; use assign, assign_add "
                    "or assign_sub in the function itself, not in a condition or a loop"
                )


def _merging(original: Any, argument: str) -> Any:
    @functools.wraps(original)
    def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current()
        if replica is None:
            return original(self, *args, **kwargs)
        if tf.executing_eagerly() and not is_assigning():
            raise ModelError(
                f"the function that strategy.run was given assigns {self.name!r}, a variable of TensorFlow's "
                "own, where functions run eagerly: use a keras.Variable, or remove "
                "tf.config.run_functions_eagerly(True)"
            )
        if tf.executing_eagerly() or not is_merged(self):
            return original(self, *args, **kwargs)
        given = kwargs.pop(argument) if argument in kwargs else args[0]
        merged = replica.merges.all_reduce(_OPS[self.aggregation], tf.convert_to_tensor(given, self.dtype))
        with tf.name_scope(_SCOPE):
            return original(self, tf.cast(merged, self.dtype), *args[1:], **kwargs)

    # AutoGraph would call what it says it wraps in its place.
    del vars(assign)["__wrapped__"]
    return assign
