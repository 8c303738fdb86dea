"""The strategy in whose scope a program runs, and the replica whose function runs."""

from typing import Any

from lockstep.errors import ModelError
from lockstep.keras.backends import whole_batch
from lockstep.keras.replica_run.merges import (
    Replica,
    SingleReplicaMerger,
    computing_as,
    current_replica,
)
from lockstep.strategy.default import default_strategy
from lockstep.strategy.options import ReduceOp
from lockstep.strategy.strategy import Strategy, entered_strategy


class ReplicaContext:
    """The replica's view of a function that `strategy.run` executes.

    Example:
        In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

        >>> import lockstep
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> def sum_of_ids():
        ...     context = lockstep.get_replica_context()
        ...     return context.all_reduce("SUM", 1.0 * context.replica_id_in_sync_group)
        >>> [float(total) for total in strategy.experimental_local_results(strategy.run(sum_of_ids))]
        [1.0, 1.0]
    """

    def __init__(self, strategy: Strategy, replica: Replica) -> None:
        self._strategy = strategy
        self._replica = replica

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs the function."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The replica's id, from 0: a number, or a scalar tensor in a TensorFlow graph."""
        return self._replica.number

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Return the sum or the mean over all replicas of each leaf of `value`.

        All replicas must make the same calls in the same order. The code before such a call may run again
        after it.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, TensorFlow's equivalents, or their names.
            value: a nest of tensors and numbers, with equal shapes and dtypes on all replicas.
            options: accepted for compatibility with `tf.distribute` and ignored.

        Raises:
            ModelError: a leaf is boolean.
        """
        return self._replica.merger.all_reduce(ReduceOp.of(reduce_op), value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return the leaves of all replicas, joined along `axis` in the replicas' order.

        Args:
            value: a nest of tensors, with equal dtypes on all replicas, and equal shapes except along `axis`.
            axis: the axis to join along.
            options: accepted for compatibility with `tf.distribute` and ignored.

        Raises:
            ModelError: a leaf is a single number, which has no axis.
        """
        return self._replica.merger.all_gather(value, axis)

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` in a job of one replica.

        Raises:
            ModelError: there are several replicas.
        """
        if isinstance(self._replica.merger, SingleReplicaMerger):
            with computing_as(None):
                return merge_fn(self._strategy, *args, **(kwargs or {}))
        name = getattr(merge_fn, "__name__", "a function")
        raise ModelError(
            f"merge_call({name}) is not supported: no function runs once for all replicas; "
            "within strategy.run use all_reduce or all_gather of the replica's context, or call the function "
            "after strategy.run, with its result"
        )


def gather(values: Any) -> Any:
    """Return the rows of the whole batch; each replica has computed its own rows.

    Use it in your own `train_step` or `test_step` for a loss that compares the examples of a batch. The
    gradient of the loss flows through the rows of the replica, and the update is that of one process. Each
    call costs one more forward pass, so pass several values in one call, as a tuple or a dictionary. Losses
    and metrics that go through `compile` or `compute_loss` do not need it.

    With one replica, outside of a step, and without Lockstep, it returns the values unchanged.

    Args:
        values: a nest of tensors with the examples along their first axis, on all replicas in the same calls.

    Raises:
        ModelError: the call is in `predict_step` or in a function passed to `strategy.run`, or a value has no
            row for each example.

    Example:
        >>> import lockstep
        >>> import numpy as np
        >>> lockstep.gather(np.ones(3))
        array([1., 1., 1.])
    """
    replica = current_replica()
    if replica is not None and not isinstance(replica.merger, SingleReplicaMerger):
        raise ModelError(
            "lockstep.gather is for train_step and test_step; within strategy.run use "
            "get_replica_context().all_gather(values, axis=0)"
        )
    return whole_batch.gather(values)


def get_strategy() -> Strategy:
    """Return the strategy whose scope or `run` is active, or else one with a single replica.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     lockstep.get_strategy() is strategy
        True
        >>> lockstep.get_strategy() is strategy
        False
    """
    return entered_strategy() or default_strategy()


def has_strategy() -> bool:
    """Whether the scope or `run` of a strategy is active.

    Example:
        >>> import lockstep
        >>> lockstep.has_strategy()
        False
        >>> with lockstep.MultiWorkerMirroredStrategy().scope():
        ...     lockstep.has_strategy()
        True
    """
    return entered_strategy() is not None


def in_cross_replica_context() -> bool:
    """Whether the scope of a strategy is active and no replica's function runs.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     lockstep.in_cross_replica_context(), strategy.run(lockstep.in_cross_replica_context)
        (True, False)
    """
    return has_strategy() and current_replica() is None


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica whose function runs, or None in a scope outside of `run`.

    Outside of all strategies, it is the context of the only replica.

    Example:
        >>> import lockstep
        >>> lockstep.get_replica_context().replica_id_in_sync_group
        0
        >>> with lockstep.MultiWorkerMirroredStrategy().scope():
        ...     lockstep.get_replica_context() is None
        True
    """
    replica = current_replica()
    if replica is None:
        return (
            None if has_strategy() else ReplicaContext(default_strategy(), Replica(0, SingleReplicaMerger()))
        )
    return ReplicaContext(get_strategy(), replica)
