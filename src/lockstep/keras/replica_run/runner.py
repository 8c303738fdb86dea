"""Runs functions of the script on replicas: the contract, its implementation for one replica, and the choice.

On JAX and PyTorch functions run eagerly (`eager_runner`), on TensorFlow in graphs (`tf_runner`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import keras

from lockstep.keras import assignments
from lockstep.keras.per_replica import Values, ValueStore
from lockstep.keras.replica_run import merges
from lockstep.keras.replica_run.merges import Op, Replica, SingleReplicaMerger, computing_as
from lockstep.keras.replica_run.results import Axis, reduced_along
from lockstep.worker.job import Job


class Runner(Protocol):
    """Runs functions on the replicas of a job, and combines their results."""

    def scope(self) -> AbstractContextManager[None]:
        """Return the context of a strategy's scope, in which the script creates variables."""

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `function` on each replica, and return its result, with a PerReplica for each leaf.

        Args:
            function: the function of a replica. It changes variables of Keras only as layers, metrics and
                optimizers do.
            args: its arguments. Each replica gets its own value of each PerReplica in them.
            kwargs: its keyword arguments, likewise.

        Raises:
            ModelError: the changes that the function makes cannot be combined over replicas.
            PeerLostError: a worker was lost in a loop that Lockstep does not drive.
        """

    def reduce(self, op: Op, value: Any, axis: Axis) -> Any:
        """Return the sum or the mean over the replicas of each leaf of a nest.

        Raises:
            ValueError: it is a sum, without an axis, of a leaf that is the same on all replicas.
        """

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas of each leaf of a nest, joined along an axis.

        A leaf that is the same on all replicas is not changed, as in `tf.distribute`.
        """

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this worker's replicas, a nest like `value` for each.

        A tensor or a number that replicas share is the only one, as in `tf.distribute`.
        """

    def per_replica(self, values: Values, store: ValueStore) -> list[Any]:
        """Return one PerReplica for each leaf of `values`, in the form that the backend's programs need.

        Args:
            values: the values of each replica.
            store: keeps values of the same origin.
        """


class SingleReplicaRunner:
    """The `Runner` of a job with one replica, which has nothing to split or combine."""

    def scope(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function, which AutoGraph converts in a graph, as with several replicas."""
        if keras.backend.backend() == "tensorflow":
            from lockstep.keras.backends.tf_graphs import as_in_its_graph

            function = as_in_its_graph(function)
        with computing_as(Replica(0, SingleReplicaMerger())):
            return function(*args, **kwargs)

    def reduce(self, op: Op, value: Any, axis: Axis) -> Any:
        """Return the value, or its sum or mean along an axis."""
        if axis is None:
            return value
        return keras.tree.map_structure(lambda leaf: reduced_along(op, leaf, axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the value."""
        return value

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the value as the only one."""
        return (value,)

    def per_replica(self, values: Values, store: ValueStore) -> list[Any]:
        """Return the leaves themselves."""
        return [keras.ops.convert_to_tensor(leaf) for leaf in values.of(0)]


_runners: list[Runner] = []


def runner_of(job: Job, next_seed: Callable[[], int]) -> Runner:
    """Return the runner of this process, created by the first call.

    Args:
        job: the job of this process.
        next_seed: returns the seed of the next `strategy.run`, which is equal on all workers.
    """
    assignments.install()
    merges.install()
    if not _runners:
        _runners.append(_new_runner(job, next_seed))
    return _runners[0]


def _new_runner(job: Job, next_seed: Callable[[], int]) -> Runner:
    if job.view.replicas == 1:
        return SingleReplicaRunner()
    if keras.backend.backend() == "tensorflow":
        from lockstep.keras.replica_run.tf_runner import TensorFlowRunner

        return TensorFlowRunner(job, next_seed)
    from lockstep.keras.replica_run.eager_runner import EagerRunner

    eager: Runner = EagerRunner(job, next_seed)
    return eager
