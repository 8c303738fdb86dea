"""`strategy.run` and what goes with it: one contract, and who keeps it on which backend."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras

from lockstep.keras.per_replica import Shelf, Values
from lockstep.keras.replica_run import replica
from lockstep.keras.replica_run.replica import Op, Replica, Single, entered
from lockstep.keras.replica_run.results import along
from lockstep.worker.job import Job


class Runs(Protocol):
    """The runs of one process."""

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Let each replica compute `function`; return its result, with a PerReplica for each leaf.

        Args:
            function: what a replica computes; changes variables of Keras only as layers, metrics and
                optimizers do.
            args: its arguments. A replica is given its own value of each PerReplica in them.
            kwargs: likewise.

        Raises:
            ModelError: what the function changes cannot be combined over replicas.
            PeerLostError: a worker was lost, and Lockstep does not drive the loop.
        """

    def reduce(self, op: Op, value: Any, axis: int | None) -> Any:
        """Return the sum or the mean over the replicas of each leaf of a nest."""

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas of each leaf of a nest, joined along an axis."""

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return what this worker's replicas have, one value a replica, each a nest like `value`."""

    def per_replica(self, values: Values, shelf: Shelf) -> list[Any]:
        """Return one PerReplica for each leaf of `values`, for this backend's programs.

        Args:
            values: what each replica has.
            shelf: where values of the same origin lie.
        """


class SingleRuns:
    """The runs of a job of one replica: there is nothing to split, and nothing to add up."""

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function."""
        with entered(Replica(0, Single())):
            return function(*args, **kwargs)

    def reduce(self, op: Op, value: Any, axis: int | None) -> Any:
        """Return the value, or its sum or mean along an axis."""
        if axis is None:
            return value
        return keras.tree.map_structure(lambda leaf: along(op, leaf, axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the value."""
        return value

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the value as the only one."""
        return (value,)

    def per_replica(self, values: Values, shelf: Shelf) -> list[Any]:
        """Return the leaves themselves."""
        return [keras.ops.convert_to_tensor(leaf) for leaf in values.of(0)]


_made: list[Runs] = []


def runs_of(job: Job) -> Runs:
    """Return what runs functions in this process; made when it is first asked for."""
    replica.install()
    if not _made:
        _made.append(_runs(job))
    return _made[0]


def _runs(job: Job) -> Runs:
    if job.view.replicas == 1:
        return SingleRuns()
    if keras.backend.backend() == "tensorflow":
        from lockstep.keras.replica_run.tensorflow_runs import TensorFlowRuns

        return TensorFlowRuns(job)
    from lockstep.keras.replica_run.eager_runs import EagerRuns

    eager: Runs = EagerRuns(job)
    return eager
