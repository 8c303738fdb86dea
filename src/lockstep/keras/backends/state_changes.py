"""The rules by which the values that replicas assign to a variable are combined into one.

They apply to steps that assign variables: in TensorFlow's graphs, and in functions that run eagerly.

Two pairs look like duplicates but are not:

* JAX threads state through a compiled function, and PyTorch changes tensors in place. The rules are the same,
  but common expressions would change the bits on JAX, and copy on PyTorch.
* JAX's `stateless_apply` is a pure function of weights, so its recorder (`StatelessRecorder`) returns values,
  whereas the recorder for variables (`UpdateRecorder`) changes them.
"""

from typing import Any, Literal

from lockstep.keras.backends.contract import EQUAL, FIRST, METRICS

StateKind = Literal["metric", "seed", "first", "equal", "layer"]
"""How the values of a variable that replicas assign, other than by an update, are combined:

* metric: replicas begin with zero, and their values are summed;
* seed: the state of a random generator. Every replica advances it equally, so replica 0's change counts;
* first: replica 0's value counts;
* equal: all replicas set the same value of state that is not floating-point, see `EQUAL`;
* layer: the weighted mean of the changes of floating-point state counts.
"""


def declared_kind(aggregation: str, is_seed: bool) -> StateKind | None:
    """Return the kind that a variable's properties determine, or None if they do not determine it.

    Args:
        aggregation: the aggregation of the variable, in Keras's spelling.
        is_seed: whether it is the state of a random generator.
    """
    if aggregation == "sum":
        return "metric"
    if is_seed:
        return "seed"
    return "first" if aggregation == "only_first_replica" else None


def contribution(kind: StateKind, start: Any, end: Any, replica: Any, weight: Any, arrays: Any) -> Any:
    """Return a replica's summand of the combined value of a variable.

    The sum over the replicas is the new value of a metric or of kind `first`, otherwise the change. Values of
    kind `equal` are not summed.

    Args:
        kind: the kind of the variable.
        start: its value before the step.
        end: its value after the step.
        replica: the replica that has assigned it.
        weight: the replica's share in a mean, in the variable's dtype; 0 if it had no examples.
        arrays: the module with the array functions: NumPy or TensorFlow.
    """
    if kind in ("metric", "equal"):
        return end
    zeros = arrays.zeros_like(start)
    if kind != "layer":
        return arrays.where(replica == 0, end if kind == "first" else end - start, zeros)
    # The difference of two infinite values is not a number.
    change = arrays.where(end == start, zeros, end - start)
    # A mean over no examples is not a number.
    return arrays.where(weight > 0, change * weight, zeros)


def holds_new_value(name: str) -> bool:
    """Whether the total with a name, which begins with the kind, is a new value and not a change."""
    return name.startswith((METRICS, FIRST, EQUAL))
