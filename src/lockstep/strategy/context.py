"""Where a program is: in the scope of which strategy, and in the function of which replica."""

from typing import Any, NoReturn

from lockstep.errors import ModelError
from lockstep.keras.replica_run.replica import Replica, Single, current
from lockstep.strategy.default import default_strategy
from lockstep.strategy.options import ReduceOp
from lockstep.strategy.strategy import Strategy, entered


class ReplicaContext:
    """One replica's side of a function that `strategy.run` was given."""

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
        """The replica's id, from 0: a number, or a scalar tensor in a graph of TensorFlow."""
        return self._replica.number

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Return the sum or the mean over all replicas of each leaf of `value`.

        All replicas make the same calls in the same order. What stands before such a call is computed again
        after it, apart from what nothing needs any more.
        """
        return self._replica.merges.all_reduce(ReduceOp.of(reduce_op), value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return the leaves of all replicas, joined along `axis` in the replicas' order."""
        return self._replica.merges.all_gather(value, axis)

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Not supported.

        Raises:
            ModelError: always.
        """
        name = getattr(merge_fn, "__name__", "a function")
        raise ModelError(
            f"merge_call({name}) is not supported: replicas have no function in which one acts for all; "
            "within strategy.run use all_reduce or all_gather of the replica's context, or call the function "
            "after strategy.run, with what that has returned"
        )


def get_strategy() -> Strategy:
    """Return the strategy whose scope or run the program is in; one of a single replica outside of all."""
    return entered() or default_strategy()


def has_strategy() -> bool:
    """Whether the program is in the scope or the run of a strategy."""
    return entered() is not None


def in_cross_replica_context() -> bool:
    """Whether the program is in the scope of a strategy, and not in a replica's function."""
    return has_strategy() and current() is None


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica whose function runs; None in a strategy's scope outside of `run`.

    Outside of all strategies it is that of the only replica.
    """
    replica = current()
    if replica is None:
        return None if has_strategy() else ReplicaContext(default_strategy(), Replica(0, Single()))
    return ReplicaContext(get_strategy(), replica)
