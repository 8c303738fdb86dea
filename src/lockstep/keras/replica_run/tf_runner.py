"""`strategy.run` on TensorFlow, also in `tf.function`.

A replica's computation is a function of the graph. A loop in the graph calls it for the replicas that Python
schedules; between rounds, Python sums. Python calls no function of TensorFlow meanwhile, because TensorFlow's
only thread for operations waits for Python.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lockstep.keras.backends.tf_graphs import as_in_autograph, call_python
from lockstep.keras.per_replica import Values, ValueStore
from lockstep.keras.replica_run import tf_merged_variables
from lockstep.keras.replica_run.eager_runner import EagerRunner
from lockstep.keras.replica_run.graph_run import GraphRun
from lockstep.keras.replica_run.merges import Op
from lockstep.keras.replica_run.results import ResultCombiner, dtype_of, reduced_along
from lockstep.keras.replica_run.run_rounds import RunRounds
from lockstep.keras.tf_per_replica import SymbolicPerReplica, per_replica, to_numpy
from lockstep.worker.job import Job

_MAX_GRAPHS = 32


class TensorFlowRunner:
    """A `lockstep.keras.replica_run.runner.Runner` for TensorFlow."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._replicas = job.view.replicas
        self._rounds = RunRounds(job, to_numpy)
        self._combiner = ResultCombiner(self._rounds, to_numpy, self._replicas)
        self._graphs: OrderedDict[Any, Any] = OrderedDict()
        self._eager: EagerRunner | None = None
        tf_merged_variables.install()

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `function` on each replica, in the graph that is being built or in a graph of its own."""
        self._rounds.compare_hosts()
        if not tf.executing_eagerly():
            converted = as_in_autograph(function)
            return GraphRun(self._job, self._rounds, converted, args, kwargs).build()
        if tf.config.functions_run_eagerly():
            self._eager = self._eager or _SymbolicEagerRunner(self._job)
            return self._eager.run(function, args, kwargs)
        return self._graph_of(function)(tuple(args), dict(kwargs))

    def reduce(self, op: Op, value: Any, axis: int | None) -> Any:
        """Return the sum or the mean over the replicas of each leaf."""

        def reduce(leaf: Any) -> Any:
            if not isinstance(leaf, SymbolicPerReplica):
                tensor = tf.convert_to_tensor(leaf)
                if axis is not None:
                    tensor = reduced_along(op, tensor, axis)
                return tensor * tf.cast(self._replicas, tensor.dtype) if op == "sum" else tensor
            shape = leaf.shape if axis is None else _without(leaf.shape, axis)
            dtype = dtype_of(op, leaf.dtype.name)
            return self._combined(
                leaf, dtype, shape, lambda values: self._combiner.reduce(op, values, leaf.leaf, axis)
            )

        return keras.tree.map_structure(reduce, value)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas of each leaf, joined along an axis."""

        def gather(leaf: Any) -> Any:
            if not isinstance(leaf, SymbolicPerReplica):
                return tf.concat([leaf] * self._replicas, axis)
            sizes = leaf.shape.as_list()
            sizes[axis] = None
            return self._combined(
                leaf, leaf.dtype, sizes, lambda values: self._combiner.gather(values, leaf.leaf, axis)
            )

        return keras.tree.map_structure(gather, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this worker's replicas, a nest like `value` for each."""
        leaves = keras.tree.flatten(value)
        count = len(self._rounds.owned)
        columns = [
            leaf.values if isinstance(leaf, SymbolicPerReplica) else (leaf,) * count for leaf in leaves
        ]
        return tuple(keras.tree.pack_sequence_as(value, list(row)) for row in zip(*columns, strict=True))

    def per_replica(self, values: Values, store: ValueStore) -> list[SymbolicPerReplica]:
        """Return one PerReplica for each leaf of `values`."""
        return per_replica(values, store)

    def _combined(
        self, leaf: SymbolicPerReplica, dtype: Any, shape: Any, combine: Callable[[Values], Any]
    ) -> Any:
        if tf.executing_eagerly():
            return tf.convert_to_tensor(combine(leaf.source))
        store = leaf.store

        def found(handle: Any) -> Any:
            return combine(ValueStore.numbered(store).find(int(handle)).values)

        tensor = call_python(found, [leaf.handle], dtype)
        tensor.set_shape(shape)
        return tensor

    def _graph_of(self, function: Callable[..., Any]) -> Any:
        """Return what runs `function` in a graph of its own; built once for the functions used last."""
        key = function if isinstance(function, type(self._graph_of)) else id(function)
        found = self._graphs.pop(key, None) or (function, self._new_graph(function))
        self._graphs[key] = found
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return found[1]

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


def _without(shape: Any, axis: int) -> list[int | None]:
    sizes = shape.as_list()
    del sizes[axis]
    return sizes  # type: ignore[no-any-return]
