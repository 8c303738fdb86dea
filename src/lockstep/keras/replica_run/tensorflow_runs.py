"""`strategy.run` on TensorFlow, also within `tf.function`.

What a replica computes is one function of the graph, which a loop of the graph calls for the replicas that
the host names; between rounds the host adds up. The host calls no function of TensorFlow meanwhile: the only
thread for operations is the one that waits for the host.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lockstep.keras.backends.graphs import as_in_autograph
from lockstep.keras.per_replica import Shelf, Values
from lockstep.keras.replica_run import merged_variables
from lockstep.keras.replica_run.eager_runs import EagerRuns
from lockstep.keras.replica_run.graph import GraphRun, on_host
from lockstep.keras.replica_run.replica import Op
from lockstep.keras.replica_run.results import Results, along, dtype_of
from lockstep.keras.replica_run.run_rounds import RunRounds
from lockstep.keras.tf_per_replica import SymbolicPerReplica, concrete, per_replica
from lockstep.worker.job import Job

_KEPT_FUNCTIONS = 32


class TensorFlowRuns:
    """The runs of a process on TensorFlow; see `lockstep.keras.replica_run.contract.Runs`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._replicas = job.view.replicas
        self.exchange = RunRounds(job, concrete)
        self._results = Results(self.exchange, concrete, self._replicas)
        self._functions: OrderedDict[Any, Any] = OrderedDict()
        self._eager: EagerRuns | None = None
        merged_variables.install()

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Let each replica compute `function`, in the graph that is being made or in one for it alone."""
        if not tf.executing_eagerly():
            converted = as_in_autograph(function)
            return GraphRun(self._job, self.exchange, converted, args, kwargs).build()
        if tf.config.functions_run_eagerly():
            self._eager = self._eager or _EagerRuns(self._job)
            return self._eager.run(function, args, kwargs)
        return self._graph_of(function)(tuple(args), dict(kwargs))

    def reduce(self, op: Op, value: Any, axis: int | None) -> Any:
        """Return the sum or the mean over the replicas of each leaf."""

        def reduce(leaf: Any) -> Any:
            if not isinstance(leaf, SymbolicPerReplica):
                tensor = tf.convert_to_tensor(leaf)
                if axis is not None:
                    tensor = along(op, tensor, axis)
                return tensor * tf.cast(self._replicas, tensor.dtype) if op == "sum" else tensor
            shape = leaf.shape if axis is None else _without(leaf.shape, axis)
            dtype = dtype_of(op, leaf.dtype.name)
            return self._combined(
                leaf, dtype, shape, lambda values: self._results.reduce(op, values, leaf.leaf, axis)
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
                leaf, leaf.dtype, sizes, lambda values: self._results.gather(values, leaf.leaf, axis)
            )

        return keras.tree.map_structure(gather, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return what this worker's replicas have, one value a replica."""
        leaves = keras.tree.flatten(value)
        own = len(self._job.view.replicas_of(self._job.worker))
        columns = [leaf.values if isinstance(leaf, SymbolicPerReplica) else (leaf,) * own for leaf in leaves]
        return tuple(keras.tree.pack_sequence_as(value, list(row)) for row in zip(*columns, strict=True))

    def per_replica(self, values: Values, shelf: Shelf) -> list[SymbolicPerReplica]:
        """Return one PerReplica for each leaf of `values`."""
        return per_replica(values, shelf)

    def _combined(
        self, leaf: SymbolicPerReplica, dtype: Any, shape: Any, combine: Callable[[Values], Any]
    ) -> Any:
        if tf.executing_eagerly():
            return tf.convert_to_tensor(combine(leaf.source))
        shelf = leaf.shelf

        def found(ticket: Any) -> Any:
            return combine(Shelf.numbered(shelf).kept(int(ticket)).values)

        tensor = on_host(found, [leaf.ticket], dtype)
        tensor.set_shape(shape)
        return tensor

    def _graph_of(self, function: Callable[..., Any]) -> Any:
        """Return what runs `function` in a graph of its own; made once for the functions used last."""
        key = function if isinstance(function, type(self._graph_of)) else id(function)
        found = self._functions.pop(key, None) or (function, self._made_for(function))
        self._functions[key] = found
        if len(self._functions) > _KEPT_FUNCTIONS:
            self._functions.popitem(last=False)
        return found[1]

    def _made_for(self, function: Callable[..., Any]) -> Any:
        converted = as_in_autograph(function)

        def run(args: Any, kwargs: Any) -> Any:
            return GraphRun(self._job, self.exchange, converted, args, kwargs).build()

        return tf.function(run, autograph=False)


class _EagerRuns(EagerRuns):
    """Functions that run eagerly give what those in graphs give."""

    def per_replica(self, values: Values, shelf: Shelf) -> list[SymbolicPerReplica]:
        """Return one PerReplica for each leaf of `values`."""
        return per_replica(values, shelf)


def _without(shape: Any, axis: int) -> list[int | None]:
    sizes = shape.as_list()
    del sizes[axis]
    return sizes  # type: ignore[no-any-return]
