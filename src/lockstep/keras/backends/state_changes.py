"""What a step on TensorFlow does to variables, apart from updates: how replicas take turns, and add up."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from lockstep.keras.backends.contract import Kind
from lockstep.keras.backends.drawing import is_counter
from lockstep.keras.backends.multi_update import refuse_own_update
from lockstep.keras.backends.steps import refuse_integer_state
from lockstep.keras.state.randomness import GOLDEN_32
from lockstep.keras.state.variables import seed_positions

_SEED = "seed_generator_state"
"""How Keras calls the state of a generator, also of the one that serves layers without one of their own."""

_TENSORFLOW_SEED = "StateVar"
"""How TensorFlow calls that of a `tf.random.Generator`."""


@dataclass(frozen=True)
class Touched:
    """The variables that a step assigns, each restored after a replica's computation.

    Attributes:
        metrics: start from zero; what they come to is part of the partial.
        seeds: states of random generators.
        firsts: what replica 0 speaks for, since only it counts, or all replicas have merged what they assign.
        layers: floating-point state of the layers.
        updated: what the updates of earlier rounds change.
        counters: how often random operations have run; start from zero.
    """

    metrics: list[tf.Variable] = field(default_factory=list)
    seeds: list[tf.Variable] = field(default_factory=list)
    firsts: list[tf.Variable] = field(default_factory=list)
    layers: list[tf.Variable] = field(default_factory=list)
    updated: list[tf.Variable] = field(default_factory=list)
    counters: list[tf.Variable] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: Any,
        kind: Kind,
        variables: Sequence[tf.Variable],
        trained: Sequence[tf.Variable],
        updated: Sequence[tf.Variable],
    ) -> "Touched":
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
        free = {id(variable) for variable in updated}
        fixed = {id(variable) for variable in trained} - free
        touched = cls(metrics)
        for variable in variables:
            if id(variable) in fixed:
                refuse_own_update(variable.name)
            if any(variable is metric for metric in metrics):
                continue
            if is_counter(variable):
                touched.counters.append(variable)
            elif id(variable) in free:
                touched.updated.append(variable)
            elif id(variable) in seeds or (id(variable) not in known and _SEED in variable.name):
                touched.seeds.append(variable)
            elif variable.dtype.is_floating:
                touched.layers.append(variable)
            else:
                path = getattr(known.get(id(variable)), "path", variable.name)
                refuse_integer_state(SimpleNamespace(dtype=variable.dtype.name, path=path))
        return touched

    @classmethod
    def of_function(
        cls,
        variables: Sequence[tf.Variable],
        updated: Sequence[tf.Variable],
        is_merged: Callable[[tf.Variable], bool],
    ) -> "Touched":
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
        touched, free = cls(), {id(variable) for variable in updated}
        for variable in {id(variable): variable for variable in variables}.values():
            if is_counter(variable):
                touched.counters.append(variable)
            elif id(variable) in free:
                touched.updated.append(variable)
            elif is_merged(variable):
                touched.firsts.append(variable)
            elif variable.aggregation == tf.VariableAggregation.SUM:
                touched.metrics.append(variable)
            elif variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
                touched.firsts.append(variable)
            elif _SEED in variable.name or _TENSORFLOW_SEED in variable.name:
                touched.seeds.append(variable)
            elif variable.trainable:
                refuse_own_update(variable.name)
            elif variable.dtype.is_floating:
                touched.layers.append(variable)
            else:
                refuse_integer_state(SimpleNamespace(dtype=variable.dtype.name, path=variable.name))
        return touched

    @property
    def state(self) -> list[tf.Variable]:
        """The variables behind `state/0`, `state/1`, ... of a partial."""
        return [*self.seeds, *self.firsts, *self.layers]

    def is_first(self, position: int) -> bool:
        """Whether the variable at a position of `state` gets the value that replica 0 has given it."""
        return 0 <= position - len(self.seeds) < len(self.firsts)

    def changes(self, starts: list[Any], replica: Any, weight: Any) -> dict[str, Any]:
        """Return what a step did to `state` since `starts`, in the form in which it adds up.

        It is the change of a variable, or the new value where `is_first`.
        """
        changes = {}
        for i, (variable, start) in enumerate(zip(self.state, starts, strict=True)):
            end = variable.read_value()
            zero = tf.zeros_like(start)
            if i < len(self.seeds):
                # Every replica advances its seed by the same amount: replica 0 speaks for all.
                changes[f"state/{i}"] = tf.where(replica == 0, end - start, zero)
            elif self.is_first(i):
                changes[f"state/{i}"] = tf.where(replica == 0, end, zero)
            else:
                change = changed(variable, start) * tf.cast(weight, start.dtype)
                # A mean over no examples is not a number.
                changes[f"state/{i}"] = tf.where(weight > 0, change, zero)
        return changes


def changed(variable: tf.Variable, start: Any) -> Any:
    """Return what a variable's value has changed by; what has not changed stays, even if it is infinite."""
    end = variable.read_value()
    return tf.where(end == start, tf.zeros_like(start), end - start)


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
