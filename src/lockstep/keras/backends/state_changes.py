"""How what replicas do to a variable becomes one value: the rules, where steps assign variables."""

from typing import Any, Literal

StateKind = Literal["metric", "seed", "first", "layer"]
"""What is done with a variable that a replica assigns, apart from an update:

* metric: replicas begin with zero, and what they come to is summed;
* seed: the state of a random generator. Every replica advances it alike: replica 0 speaks for all;
* first: its value is that of replica 0;
* layer: floating-point state, of whose changes the weighted mean is taken.
"""

KERAS_SEED = "seed_generator_state"
"""How Keras calls the state of a generator, also of the one that serves layers without one of their own."""


def kind_by_itself(aggregation: str, draws: bool) -> StateKind | None:
    """Return what is done with a variable as far as it says so itself; None if it says nothing.

    Args:
        aggregation: how replicas' values become one, as Keras writes it.
        draws: whether it is the state of a random generator.
    """
    if aggregation == "sum":
        return "metric"
    if draws:
        return "seed"
    return "first" if aggregation == "only_first_replica" else None


def in_sum(kind: StateKind, start: Any, end: Any, replica: Any, weight: Any, arrays: Any) -> Any:
    """Return what a replica has done to a variable, in the form in which the sum over the replicas is right.

    That is its new value for a metric and for `first`, and otherwise its change.

    Args:
        kind: of the variable.
        start: its value before.
        end: its value afterwards.
        replica: which has done it.
        weight: the replica's part in a mean, in the variable's dtype; 0 if it had no examples.
        arrays: the functions of NumPy or of TensorFlow.
    """
    if kind == "metric":
        return end
    zeros = arrays.zeros_like(start)
    if kind != "layer":
        return arrays.where(replica == 0, end if kind == "first" else end - start, zeros)
    # What has not changed stays, even if it is infinite.
    change = arrays.where(end == start, zeros, end - start)
    # A mean over no examples is not a number.
    return arrays.where(weight > 0, change * weight, zeros)


def is_new(name: str) -> bool:
    """Whether what adds up under a name, which begins with the kind, is a new value, and not a change."""
    return name.startswith(("metric/", "first/"))
