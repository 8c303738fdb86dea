"""The base class of all strategies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

from lockstep.errors import ConfigError, ModelError
from lockstep.keras import patches
from lockstep.keras.input.distribution import distribute, distribute_from_function, values_from_function
from lockstep.keras.replica_run.merges import current_replica
from lockstep.keras.replica_run.runner import runner_of
from lockstep.protocol.local_steps import LocalSteps
from lockstep.strategy.options import ReduceOp
from lockstep.system.thread_value import ThreadValue
from lockstep.worker import job

_entered: ThreadValue[tuple["Strategy", ...]] = ThreadValue(())

_NOT_NEEDED = "Lockstep configures workers and sessions itself: remove the call"
_REPLACED = {
    "colocate_vars_with": "each worker has its own copy of the variables: remove the call",
    "configure": _NOT_NEEDED,
    "experimental_run": "use strategy.run(fn, args=(next(iterator),))",
    "extended": (
        "it is for custom strategies; use strategy.num_replicas_in_sync for the number of devices, "
        "strategy.reduce for reduce_to, strategy.experimental_local_results for the values of this worker, "
        "lockstep.is_chief() for should_checkpoint and should_save_summary, and assign a variable directly, "
        "or in strategy.run, for update"
    ),
    "group": "use tf.group",
    "make_dataset_iterator": "use iter(strategy.experimental_distribute_dataset(dataset))",
    "make_input_fn_iterator": "use iter(strategy.distribute_datasets_from_function(dataset_fn))",
    "unwrap": "use strategy.experimental_local_results",
    "update_config_proto": _NOT_NEEDED,
}
"""Names of the strategies of `tf.distribute` that Lockstep's do not have, and what to use instead."""


class Strategy:
    """Trains models and runs functions on all replicas of a job in lockstep.

    Batch sizes are global: the batch of each step is split over the replicas.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.get_strategy()
        >>> isinstance(strategy, lockstep.Strategy), strategy.num_replicas_in_sync
        (True, 1)
    """

    is_default = False
    """Whether this is the strategy of a program that has created none."""

    def __init__(self, *, exact_batch: bool = False, local_steps: LocalSteps | None = None) -> None:
        self._job = job.current()
        self._job.exact_batch |= exact_batch
        self._job.local_steps = local_steps or self._job.local_steps
        if self._job.local_steps is not None and self._job.context.has_servers:
            raise ConfigError(
                "local steps are for mirrored replicas: a job with parameter servers does not support them"
            )
        self._methods = patches.install(self._job)
        self._methods.adopt_in_scopes()
        self._runner = runner_of(self._job, self._methods.next_run_seed)

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas, which is fixed for the job."""
        return self._job.replicas_in_sync

    @property
    def cluster_resolver(self) -> Any:
        """None: this strategy does not have a resolver."""
        return None

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError, which names the replacement if `tf.distribute` has the attribute."""
        remedy = f": {_REPLACED[name]}" if name in _REPLACED else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{remedy}")

    @contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Let the job train the models that are compiled within the block.

        Raises:
            RuntimeError: the scope of another strategy is active.

        Example:
            >>> import keras, lockstep
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.layers.Dense(1)])
            ...     model.compile("sgd", "mse")
        """
        with self._methods.scope(self._entered), self._entered(), self._runner.scope():
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Run `fn` on each replica and return its result with a `PerReplica` for each leaf.

        Within `fn`, an optimizer's `apply_gradients` sums the gradients over the replicas and updates once.
        Metrics count the examples of all replicas. Floating-point state of layers is averaged over the
        replicas. `get_replica_context()` provides all-reduce and all-gather. With one replica, `run` calls
        `fn`. TensorFlow traces `fn`, as `tf.function` does, unless functions run eagerly.

        Args:
            fn: the function of a replica.
            args: its arguments. Each replica gets its own value of each `PerReplica` in them.
            kwargs: its keyword arguments, likewise.
            options: accepted for compatibility with `tf.distribute` and ignored.

        Raises:
            ModelError: the changes that `fn` makes cannot be combined over replicas.
            PeerLostError: a worker was lost, and Lockstep does not drive the loop.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import lockstep
            >>> import numpy as np
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> batches = strategy.experimental_distribute_dataset([np.arange(4.0)])
            >>> totals = strategy.run(np.sum, args=(next(iter(batches)),))
            >>> [float(total) for total in strategy.experimental_local_results(totals)]
            [1.0, 5.0]
            >>> float(strategy.reduce("SUM", totals))
            6.0
        """
        _refuse_within_replica("run")
        self._refuse_local_steps("run")
        self._job.note_distribution()
        with self._part("run"), self._entered():
            self._job.timer.lap("other")
            result = self._runner.run(fn, args, kwargs or {})
            self._job.timer.lap("update")
            return result

    def steps(self, count: int, state: Mapping[str, Any], checkpoint: Any = None) -> Iterator[int]:
        """Yield the numbers of `count` steps of a loop that workers can join and leave, as in `fit`.

        The numbers begin at 0. Joining workers and checkpoints receive the state. So a lost worker is
        replaced, and a restarted program resumes at its step. Both first take one extra step whose results
        are overwritten. Everything that the loop changes must be in the state or follow from it.

        Args:
            count: the number of steps.
            state: Keras models, layers, optimizers, metrics and variables, TensorFlow's variables, iterators
                of distributed datasets, NumPy arrays, and dicts and lists of plain values, by name.
            checkpoint: a `lockstep.callbacks.Checkpoint`, to save checkpoints without `--checkpoint`.

        Raises:
            InputError: a part of the state cannot be transferred.
            CheckpointError: the saved state has different parts.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import keras, lockstep
            >>> import numpy as np
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> batches = iter(strategy.experimental_distribute_dataset([np.ones((4, 3))] * 2))
            >>> seen = keras.Variable(0.0, trainable=False)
            >>> for step in strategy.steps(2, state={"data": batches, "seen": seen}):
            ...     batch = strategy.run(np.sum, args=(next(batches),))
            ...     _ = seen.assign_add(strategy.reduce("SUM", batch))
            >>> float(seen), step
            (24.0, 1)
        """
        self._refuse_local_steps("steps")
        self._job.note_distribution()
        return self._methods.step_loops.steps(count, state, checkpoint)

    def _refuse_local_steps(self, method: str) -> None:
        """Raise ModelError if replicas take local steps, which only `fit` does."""
        if self._job.local_steps is not None and self._job.view.replicas > 1:
            raise ModelError(
                f"strategy.{method} sums over the replicas in each call: train with model.fit, or without "
                "local steps"
            )

    def reduce(self, reduce_op: Any, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Return the sum or the mean over all replicas of each leaf of a result of `run`.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, TensorFlow's equivalents, or their names.
            value: a nest of `PerReplica`, with equal shapes and dtypes on all replicas. With `axis`, shapes
                may differ along it.
            axis: one axis or several to reduce in each replica's value as well. A mean then counts values,
                not replicas.

        Returns:
            A tensor of the backend for each leaf. It has a replica's shape, without the axes of `axis`.

        Raises:
            DataError: a leaf does not have the axis.
            ValueError: a leaf is not a `PerReplica`, and its sum without an axis is ambiguous.
            ModelError: the caller is a function that `run` executes.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import lockstep
            >>> import numpy as np
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> batches = strategy.experimental_distribute_dataset([np.arange(4.0).reshape(4, 1)])
            >>> batch = next(iter(batches))
            >>> float(strategy.reduce("MEAN", strategy.run(np.sum, args=(batch,))))
            3.0
            >>> np.asarray(strategy.reduce("MEAN", batch, axis=0)).tolist()
            [1.5]
        """
        _refuse_within_replica("reduce")
        with self._part("reduce"):
            return self._runner.reduce(ReduceOp.of(reduce_op), value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas of each leaf, joined along `axis` in the replicas' order.

        Args:
            value: a nest of `PerReplica`, with equal dtypes on all replicas, and equal shapes except
                along `axis`. Other leaves stay as they are.
            axis: the axis to join along.

        Raises:
            DataError: a leaf is a single number, which has no axis.
            ModelError: the caller is a function that `run` executes.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import lockstep
            >>> import numpy as np
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> batches = strategy.experimental_distribute_dataset([np.arange(4.0)])
            >>> np.asarray(strategy.gather(next(iter(batches)), axis=0)).tolist()
            [0.0, 1.0, 2.0, 3.0]
        """
        _refuse_within_replica("gather")
        with self._part("gather"):
            return self._runner.gather(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple with the values of this worker's replicas, or with `value` if it is a tensor.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import lockstep
            >>> import numpy as np
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> batches = strategy.experimental_distribute_dataset([np.arange(4.0)])
            >>> [part.tolist() for part in strategy.experimental_local_results(next(iter(batches)))]
            [[0.0, 1.0], [2.0, 3.0]]
        """
        return self._runner.local_results(value)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Split each batch of `dataset`, a global batch, over the replicas.

        All workers must read the same dataset. With the auto-shard policy FILE or DATA of `tf.data`, each
        replica reads its own shard.

        Args:
            dataset: a `tf.data.Dataset`, a PyTorch `DataLoader`, a `keras.utils.PyDataset`, or any iterable
                of nests of arrays, all with the examples along their first axis.
            options: accepted for compatibility with `tf.distribute` and ignored.

        Returns:
            A `DistributedDataset`, or `dataset` itself with one replica. The numbers of rows that replicas
            get of a batch differ by at most one.

        Raises:
            DataError: the elements cannot be split.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import lockstep
            >>> import numpy as np
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> batches = strategy.experimental_distribute_dataset([np.arange(4), np.arange(4, 8)])
            >>> for batch in batches:
            ...     print([part.tolist() for part in strategy.experimental_local_results(batch)])
            [[0, 1], [2, 3]]
            [[4, 5], [6, 7]]
        """
        self._job.note_distribution()
        return distribute(
            self._job,
            self._runner,
            dataset,
            lambda: self._methods.next_seed(),
            lambda: self._methods.call_number(),
        )

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        """Give each replica its own dataset, `dataset_fn(context)`, where `context` is an `InputContext`.

        There is one pipeline per replica. The worker that computes the replica reads the pipeline. Random
        operations in the pipelines start from equal seeds, so a pipeline can shuffle before it shards.

        Args:
            dataset_fn: a function that returns a dataset of any kind that `experimental_distribute_dataset`
                accepts. Its elements are batches of one replica.
            options: accepted for compatibility with `tf.distribute` and ignored.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import lockstep
            >>> import numpy as np
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> def rows_of(context):
            ...     size = context.get_per_replica_batch_size(4)
            ...     return [np.arange(size) + size * context.input_pipeline_id]
            >>> next(iter(strategy.distribute_datasets_from_function(rows_of)))
            PerReplica:{
              0: array([0, 1]),
              1: array([2, 3])
            }
        """
        return self._distribute_from_function(dataset_fn, in_turn=False)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Call `distribute_datasets_from_function`, which had this name in `tf.distribute`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def _distribute_from_function(self, dataset_fn: Callable[[Any], Any], *, in_turn: bool) -> Any:
        """Distribute one pipeline, whose batches the replicas take in turn, or one per replica."""
        self._job.note_distribution()
        return distribute_from_function(
            self._job, self._runner, dataset_fn, lambda: self._methods.next_seed(), in_turn=in_turn
        )

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """Return the results of `value_fn(context)` for all replicas, with a `PerReplica` for each leaf.

        The context has `replica_id_in_sync_group` and `num_replicas_in_sync`. Leaves are arrays or numbers of
        equal shapes and dtypes.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import lockstep
            >>> strategy = lockstep.MultiWorkerMirroredStrategy()
            >>> rates = strategy.experimental_distribute_values_from_function(
            ...     lambda context: 0.1 * (context.replica_id_in_sync_group + 1)
            ... )
            >>> float(strategy.reduce("SUM", rates)) > 0.29
            True
        """
        self._job.note_distribution()
        return values_from_function(self._job, self._runner, value_fn)

    def _part(self, name: str) -> AbstractContextManager[None]:
        """Let one thread at a time compute with the replicas."""
        if self._job.view.replicas == 1:
            return nullcontext()
        several = len(self._job.view.workers) > 1
        return self._methods.turns.part(f"strategy.{name}", several=several)

    @contextmanager
    def _entered(self) -> Iterator["Strategy"]:
        active = entered_strategy()
        if active is not None and active is not self and not active.is_default:
            raise RuntimeError(
                f"the scope of another strategy is active, of the type {type(active).__name__}: create one "
                "strategy and use it throughout, or leave the scope before you use the next one"
            )
        with _entered.within((*_entered.value, self)):
            yield self


def _refuse_within_replica(name: str) -> None:
    if current_replica() is not None:
        raise ModelError(
            f"strategy.{name} is called in a function that strategy.run runs; replicas "
            "communicate there with all_reduce and all_gather of get_replica_context()"
        )


def entered_strategy() -> Strategy | None:
    """Return the strategy whose scope or `run` this thread is in, if any."""
    return _entered.value[-1] if _entered.value else None
