"""`strategy.run` on TensorFlow, including in `tf.function`.

A replica's computation is a function of the graph. A loop in the graph calls it for the replicas that Python
schedules; between rounds, Python sums. Python does not call functions of TensorFlow meanwhile, because
TensorFlow's only thread for operations waits for Python.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from lockstep.keras.backends.tf_graphs import as_in_autograph, call_python, summed_on_read
from lockstep.keras.per_replica import DistributedValues, Values, ValueStore
from lockstep.keras.replica_run import tf_merged_variables
from lockstep.keras.replica_run.eager_runner import EagerRunner
from lockstep.keras.replica_run.graph_run import GraphRun
from lockstep.keras.replica_run.merges import Op
from lockstep.keras.replica_run.results import (
    Axis,
    ResultCombiner,
    axes_within,
    dtype_of,
    reduced_along,
    reduced_plain,
)
from lockstep.keras.replica_run.run_rounds import RunRounds
from lockstep.keras.replica_run.tf_merged_variables import is_on_read
from lockstep.keras.tf_per_replica import CompositePerReplica, SymbolicPerReplica, per_replica, to_numpy
from lockstep.worker.job import Job

_MAX_GRAPHS = 32


class TensorFlowRunner:
    """A `lockstep.keras.replica_run.runner.Runner` for TensorFlow."""

    def __init__(self, job: Job, next_seed: Callable[[], int]) -> None:
        self._job = job
        self._replicas = job.view.replicas
        self._rounds = RunRounds(job, to_numpy, next_seed)
        self._combiner = ResultCombiner(self._rounds, to_numpy, self._replicas)
        self._graphs: OrderedDict[Any, Any] = OrderedDict()
        self._eager: EagerRunner | None = None
        tf_merged_variables.install()

    def scope(self) -> AbstractContextManager[None]:
        """Return the context in which variables get the values that `tf.distribute` gives them."""
        context: AbstractContextManager[None] = tf.variable_creator_scope(
            tf_merged_variables.created_in_scope(self._replicas)
        )
        return context

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `function` on each replica, in the graph that is being built or in a graph of its own."""
        self._rounds.compare_hosts()
        if not tf.executing_eagerly():
            converted = as_in_autograph(function)
            return GraphRun(self._job, self._rounds, converted, args, kwargs).build()
        if tf.config.functions_run_eagerly():
            self._eager = self._eager or _SymbolicEagerRunner(self._job, self._rounds.next_seed)
            return self._eager.run(function, args, kwargs)
        return self._graph_of(function)(tuple(args), dict(kwargs))

    def reduce(self, op: Op, value: Any, axis: Axis) -> Any:
        """Return the sum or the mean over the replicas of each leaf."""

        def reduce(leaf: Any) -> Any:
            if isinstance(leaf, CompositePerReplica):
                leaf.refuse("strategy.reduce")
            if not isinstance(leaf, SymbolicPerReplica):
                return self._reduced_shared(op, leaf, axis)
            shape = leaf.shape if axis is None else _without(leaf.shape, axis)
            dtype = dtype_of(op, leaf.dtype.name)
            return self._combined(
                leaf, dtype, shape, lambda values: self._combiner.reduce(op, values, leaf.leaf, axis)
            )

        return keras.tree.map_structure(reduce, value)

    def _reduced_shared(self, op: Op, leaf: Any, axis: Axis) -> Any:
        """Reduce a leaf that replicas share; of a variable synchronized on read, each has its own value."""
        if not (isinstance(leaf, tf.Variable) and is_on_read(leaf)):
            return reduced_plain(op, leaf, axis, self._replicas)
        value = leaf.read_value() if axis is None else reduced_along(op, leaf, axis)
        if leaf.aggregation == tf.VariableAggregation.SUM:
            return value if op == "sum" else value / tf.cast(self._replicas, value.dtype)
        return value * tf.cast(self._replicas, value.dtype) if op == "sum" else value

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas of each leaf, joined along an axis."""

        def gather(leaf: Any) -> Any:
            if isinstance(leaf, CompositePerReplica):
                leaf.refuse("strategy.gather")
            if isinstance(leaf, tf.Variable):
                return tf.concat(self._copies(leaf), axis)
            if not isinstance(leaf, SymbolicPerReplica):
                return leaf
            (position,) = axes_within(axis, leaf.shape.as_list(), "strategy.gather")
            sizes = leaf.shape.as_list()
            sizes[position] = None
            return self._combined(
                leaf, leaf.dtype, sizes, lambda values: self._combiner.gather(values, leaf.leaf, axis)
            )

        return keras.tree.map_structure(gather, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this worker's replicas, a nest like `value` for each."""
        if not (keras.tree.is_nested(value) or isinstance(value, DistributedValues | tf.Variable)):
            return (value,)
        leaves = keras.tree.flatten(value)
        columns = [
            leaf.values
            if isinstance(leaf, SymbolicPerReplica | CompositePerReplica)
            else [self._copies(leaf)[replica] for replica in self._rounds.owned]
            for leaf in leaves
        ]
        return tuple(keras.tree.pack_sequence_as(value, list(row)) for row in zip(*columns, strict=True))

    def per_replica(self, values: Values, store: ValueStore) -> list[SymbolicPerReplica]:
        """Return one PerReplica for each leaf of `values`."""
        return per_replica(values, store)

    def _copies(self, leaf: Any) -> list[Any]:
        """Return each replica's copy of a leaf that they share; see `AssignedVariables.as_replica`."""
        if summed_on_read([leaf] if isinstance(leaf, tf.Variable) else []):
            value = leaf.read_value()
            return [value, *[tf.zeros_like(value)] * (self._replicas - 1)]
        return [leaf] * self._replicas

    def _combined(
        self, leaf: SymbolicPerReplica, dtype: Any, shape: Any, combine: Callable[[Values], Any]
    ) -> Any:
        if tf.executing_eagerly():
            return tf.convert_to_tensor(combine(leaf.source))
        store = leaf.store

        def combined(handle: Any) -> Any:
            return combine(ValueStore.numbered(store).find(int(handle)).values)

        tensor = call_python(combined, [leaf.handle], dtype)
        tensor.set_shape(shape)
        return tensor

    def _graph_of(self, function: Callable[..., Any]) -> Any:
        """Return a callable that runs `function` in its own graph, kept for the functions used last."""
        key = function if isinstance(function, type(self._graph_of)) else id(function)
        graph = self._graphs.pop(key, None) or (function, self._new_graph(function))
        self._graphs[key] = graph
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph[1]

    def _new_graph(self, function: Callable[..., Any]) -> Any:
        converted = as_in_autograph(function)

        def run(args: Any, kwargs: Any) -> Any:
            return GraphRun(self._job, self._rounds, converted, args, kwargs).build()

        return tf.function(run, autograph=False)


class _SymbolicEagerRunner(EagerRunner):
    """An `EagerRunner` whose results graphs can take."""

    def per_replica(self, values: Values, store: ValueStore) -> list[SymbolicPerReplica]:
        """Return one PerReplica for each leaf of `values`."""
        return per_replica(values, store)


def _without(shape: Any, axis: int | Sequence[int]) -> list[int | None]:
    sizes = shape.as_list()
    axes = axes_within(axis, sizes, "strategy.reduce")
    return [size for position, size in enumerate(sizes) if position not in axes]
