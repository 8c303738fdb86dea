"""Variables of TensorFlow whose `aggregation` merges the values that replicas assign.

As under `tf.distribute`, an assignment of a variable with `aggregation=SUM`, `MEAN` or `ONLY_FIRST_REPLICA`
is a merge: it assigns the sum, the mean or replica 0's value. `scatter_add` and its like apply the slices of
all replicas, divided by R for a mean, or those of replica 0. This does not apply to variables that are
synchronized on read.

This is the only file that patches how TensorFlow's variables are assigned.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from lockstep.errors import ModelError
from lockstep.keras.assignments import is_assigning
from lockstep.keras.private.tensorflow import VARIABLE_CLASSES, written_by
from lockstep.keras.replica_run.merges import Op, Replica, current_replica
from lockstep.keras.tf_random_ops import is_own
from lockstep.worker.patch_registry import PATCHES

_SCOPE = "lockstep_merged"
"""The name scope of operations that assign merged values."""

_OPS: dict[Any, Op] = {tf.VariableAggregation.SUM: "sum", tf.VariableAggregation.MEAN: "mean"}
_SAME = frozenset({"AddV2", "Cast", "Const", "Identity", "Mul", "ReadVariableOp", "Sub"})
"""Operations whose results are equal on all replicas if their inputs are."""

_METHODS = {"assign": "value", "assign_add": "delta", "assign_sub": "delta"}
_SCATTERING = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div")
_OVERWRITING = ("scatter_min", "scatter_max", "scatter_update")
"""Of these, `tf.distribute` too has no sum and no mean over replicas."""


def is_merged(variable: tf.Variable) -> bool:
    """Whether replicas merge the values that they assign to a variable."""
    return variable.aggregation in _OPS and not is_on_read(variable)


def install() -> None:
    """Patch the assignments of TensorFlow's variables, once per process."""
    if PATCHES.has(__name__):
        return
    for owner in VARIABLE_CLASSES:
        for method, argument in _METHODS.items():
            if method in vars(owner):
                PATCHES.wrap(__name__, owner, method, functools.partial(_assign, argument))
        for method in (*_SCATTERING, *_OVERWRITING):
            if method in vars(owner):
                PATCHES.wrap(__name__, owner, method, functools.partial(_scatter, method))


def created_in_scope(replicas: int) -> Callable[..., Any]:
    """Return the creator of variables in the scope of a strategy, for `tf.variable_creator_scope`.

    As in `tf.distribute`, each replica begins with the first value of a variable that sums the replicas'
    values on read, so that the sum is R times that value. Keras's metrics are those of one process.
    """

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        first = options.get("initial_value")
        if (
            options.get("synchronization") == tf.VariableSynchronization.ON_READ
            and options.get("aggregation") == tf.VariableAggregation.SUM
            and first is not None
            and not is_assigning()
        ):

            def total() -> Any:
                value = tf.convert_to_tensor(first() if callable(first) else first, options.get("dtype"))
                return value if value.dtype == tf.bool else value * tf.cast(replicas, value.dtype)

            options["initial_value"] = total
        return next_creator(**options)

    return create


def refuse_other_changes(graph: Any, variables: Iterable[tf.Variable]) -> None:
    """Raise ModelError if a graph changes merged `variables` in a way other than patched assignments."""
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


def is_on_read(variable: tf.Variable) -> bool:
    """Whether each replica has its own value of a variable, which are combined where the script reads it."""
    return bool(variable.synchronization == tf.VariableSynchronization.ON_READ)


def _takes_first_value(variable: tf.Variable, *assigned_values: Any) -> bool:
    """Whether replicas merge by taking replica 0's value, because the values given to them may differ.

    If a value is equal on all replicas, such as that of a counter, each replica assigns it without a merge.
    """
    is_first = variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    if not is_first or variable.dtype == tf.string or is_on_read(variable) or is_assigning():
        return False
    return not all(_is_same_for_all(value, variable) for value in assigned_values)


def _is_same_for_all(value: Any, variable: tf.Variable) -> bool:
    if not tf.is_tensor(value) or not tf.is_symbolic_tensor(value):
        return not isinstance(value, tf.Variable) or value is variable
    graph = value.graph
    handles = [inside for outside, inside in graph.captures if outside is variable.handle]
    waiting = [value]
    while waiting:
        tensor = waiting.pop()
        if any(tensor is handle for handle in handles):
            continue
        if tensor.op.type not in _SAME:
            return False
        waiting += tensor.op.inputs
    return True


def _assign(argument: str, original: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
    if (replica := _merging_replica(variable)) is None:
        return original(variable, *args, **kwargs)
    assigned_value = kwargs.get(argument, *args[:1])
    if not (is_merged(variable) or _takes_first_value(variable, assigned_value)):
        return original(variable, *args, **kwargs)
    kwargs.pop(argument, None)
    value = tf.convert_to_tensor(assigned_value, variable.dtype)
    merges = is_merged(variable)
    merged = replica.merger.all_reduce(_op_of(variable), value) if merges else _first(replica, value)
    with tf.name_scope(_SCOPE):
        return original(variable, tf.cast(merged, variable.dtype), *args[1:], **kwargs)


def _scatter(method: str, original: Any, variable: Any, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
    if (replica := _merging_replica(variable)) is None:
        return original(variable, sparse_delta, *args, **kwargs)
    delta = sparse_delta.values, sparse_delta.indices
    if not (is_merged(variable) or _takes_first_value(variable, *delta)):
        return original(variable, sparse_delta, *args, **kwargs)
    values, indices = tf.convert_to_tensor(delta[0], variable.dtype), tf.convert_to_tensor(delta[1])
    if not is_merged(variable):
        merged = tf.IndexedSlices(_first(replica, values), _first(replica, indices))
    elif method in _OVERWRITING:
        raise ModelError(
            f"the function passed to strategy.run calls {method} of {variable.name!r}, whose aggregation is "
            f"{variable.aggregation.name}: as in tf.distribute, only a variable with "
            "aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA has it there"
        )
    else:
        merged = replica.merger.all_reduce(_op_of(variable), tf.IndexedSlices(values, indices))
    with tf.name_scope(_SCOPE):
        return original(variable, merged, *args, **kwargs)


def _merging_replica(variable: tf.Variable) -> Replica | None:
    """Return the replica whose function changes a TensorFlow variable, or None if there is nothing to merge.

    Raises:
        ModelError: the function runs eagerly, and the variable belongs to the script.
    """
    replica = current_replica()
    if replica is None or not tf.executing_eagerly():
        return replica
    if not is_assigning() and not is_own(variable):
        raise ModelError(
            f"the function passed to strategy.run assigns {variable.name!r}, a variable of TensorFlow's "
            "own, where functions run eagerly: use a keras.Variable, or remove "
            "tf.config.run_functions_eagerly(True)"
        )
    return None


def _op_of(variable: tf.Variable) -> Op:
    """Return how replicas merge the values that they assign to a merged variable.

    Raises:
        ModelError: the variable does not have a mean.
    """
    op = _OPS[variable.aggregation]
    if op == "mean" and not (variable.dtype.is_floating or variable.dtype.is_complex):
        raise ModelError(
            f"the function passed to strategy.run assigns {variable.name!r}, whose aggregation is MEAN, and "
            f"whose dtype {variable.dtype.name} has no mean: choose a floating-point dtype, or another "
            "aggregation"
        )
    return op


def _first(replica: Replica, value: Any) -> Any:
    """Return replica 0's value."""
    number = tf.cast(value, tf.int32) if value.dtype == tf.bool else value
    number = tf.where(replica.number == 0, number, tf.zeros_like(number))
    return tf.cast(replica.merger.all_reduce("sum", number), value.dtype)
