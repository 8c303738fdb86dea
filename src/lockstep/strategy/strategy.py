"""What all strategies have in common."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.errors import ModelError
from lockstep.keras import patches
from lockstep.keras.input.distribution import distribute, distribute_from_function, values_from_function
from lockstep.keras.replica_run.contract import runs_of
from lockstep.keras.replica_run.replica import current
from lockstep.strategy.options import ReduceOp
from lockstep.worker import job


class _Entered(threading.local):
    strategies: tuple["Strategy", ...] = ()


_entered = _Entered()


class Strategy:
    """Trains models, and runs functions, on all replicas of a job in lockstep.

    Batch sizes are global: each step's batch is split over the replicas.
    """

    def __init__(self) -> None:
        self._job = job.current()
        self._loops = patches.install(self._job)
        self._loops.adopts_all = False
        self._runs = runs_of(self._job)

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas; fixed for the life of the job."""
        return self._job.view.replicas

    @contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Models compiled within the block are trained by the job."""
        self._loops.depth += 1
        try:
            with self._entered():
                yield self
        finally:
            self._loops.depth -= 1

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Let each replica compute `fn`, and return its result with a `PerReplica` for each leaf.

        Within `fn`, an optimizer's `apply_gradients` adds the gradients up over the replicas and updates
        once, metrics count the examples of all replicas, floating-point state of layers becomes the mean of
        what the replicas' would be, and `get_replica_context()` gives what replicas do together. With one
        replica this calls `fn`. On TensorFlow `fn` is traced, as under `tf.function`, unless functions run
        eagerly.

        Args:
            fn: what a replica computes.
            args: its arguments. A replica is given its own value of each `PerReplica` in them.
            kwargs: likewise.
            options: taken as `tf.distribute` takes it, and ignored.

        Raises:
            ModelError: what `fn` changes cannot be combined over replicas.
            PeerLostError: a worker was lost, and Lockstep does not drive the loop.
        """
        _refuse_within_replica("run")
        self._job.distributes()
        with self._entered():
            return self._runs.run(fn, args, kwargs or {})

    def steps(self, count: int, state: Mapping[str, Any], checkpoint: Any = None) -> Iterator[int]:
        """Yield the numbers of `count` steps of a loop that workers may join and leave, as in `fit`.

            for step in strategy.steps(1000, state={"model": model, "optimizer": optimizer, "data": batches}):
                loss = train_step(next(batches))

        The state goes to workers that join, and into checkpoints. So a worker that is lost is replaced, and a
        program that is run again goes on at its step; both take one step more first, whose results are
        overwritten. Whatever the loop changes must be in the state, or follow from it.

        Args:
            count: of steps.
            state: Keras models, layers, optimizers, metrics and variables, TensorFlow's variables, iterators
                of distributed datasets, NumPy arrays, and dicts and lists of plain values, by name.
            checkpoint: a `lockstep.callbacks.Checkpoint`, to keep checkpoints without `--checkpoint`.

        Raises:
            InputError: a part of the state cannot be given to others.
            CheckpointError: the state that was kept is of other parts.
        """
        self._job.distributes()
        return self._loops.driving.steps(count, state, checkpoint)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Return the sum or the mean over all replicas of each leaf of what `run` has returned.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, TensorFlow's own too, or their names.
            value: a nest of `PerReplica`.
            axis: over which each replica's value is reduced too; a mean then counts values, not replicas.

        Raises:
            ModelError: this is called within a function that `run` was given.
        """
        _refuse_within_replica("reduce")
        return self._runs.reduce(ReduceOp.of(reduce_op), value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas of each leaf, joined along `axis` in the replicas' order.

        Raises:
            ModelError: this is called within a function that `run` was given.
        """
        _refuse_within_replica("gather")
        return self._runs.gather(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return what the replicas of this worker have, one value a replica."""
        return self._runs.local_results(value)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Split each batch of `dataset`, a global batch, over the replicas.

        Every worker reads the dataset, and all must read the same. See `lockstep.keras.input.distribution`.
        """
        self._job.distributes()
        return distribute(self._job, self._runs, dataset)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        """Give each replica a dataset of its own: `dataset_fn(context)`, of an `InputContext`.

        There is one pipeline a replica; the worker that computes the replica reads it. What is random in
        them follows from seeds, and begins alike in all of them: so they may shuffle before they shard.
        """
        self._job.distributes()
        return distribute_from_function(self._job, self._runs, dataset_fn, lambda: self._loops.next_seed())

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """Return what `value_fn(context)` returns for each replica, with a `PerReplica` for each leaf.

        The context has `replica_id_in_sync_group` and `num_replicas_in_sync`. Leaves are arrays or numbers of
        equal shapes and dtypes.
        """
        self._job.distributes()
        return values_from_function(self._job, self._runs, value_fn)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before, _entered.strategies = _entered.strategies, (*_entered.strategies, self)
        try:
            yield
        finally:
            _entered.strategies = before


def _refuse_within_replica(name: str) -> None:
    if current() is not None:
        raise ModelError(
            f"strategy.{name} is called within a function that strategy.run was given; what replicas do "
            "together there is all_reduce and all_gather of get_replica_context()"
        )


def entered() -> Strategy | None:
    """Return the strategy whose scope or run this thread is in, None outside of all."""
    return _entered.strategies[-1] if _entered.strategies else None
