"""Strategies that keep equal copies of a model, named as in `tf.distribute`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.cluster.resolver import ClusterResolver
from lockstep.cluster.tf_config_resolver import TFConfigClusterResolver
from lockstep.launcher.restart_per_device import restart_per_device
from lockstep.protocol.local_steps import LocalSteps
from lockstep.rendezvous.take_part import take_part
from lockstep.strategy.options import CommunicationImplementation
from lockstep.strategy.strategy import Strategy
from lockstep.system.notes import note


class MultiWorkerMirroredStrategy(Strategy):
    """Trains every model that is compiled in its scope on all replicas of the job, in lockstep.

    Under `lockstep run`, the command defines the job. In a script that is started by hand, `TF_CONFIG` lists
    its workers. Without it, the job has one worker and one replica.

    Args:
        cluster_resolver: the value of the property of this name. It does not select the workers.
        communication_options: how workers exchange data. It does not affect the result.
        exact_batch: whether losses and metrics that compare the examples of a batch are those of one process
            however many outputs replicas have to exchange for them.
        local_steps: how many steps of `fit` each replica takes by itself before the replicas are averaged; by
            default, all replicas take each step together.

    Raises:
        ConfigError: `TF_CONFIG` is wrong, was set too late, or contradicts that of another task.
        PeerStuckError: tasks in `TF_CONFIG` did not connect in time.
        BackendError: Keras runs on a backend that is not supported.

    Example:
        >>> import keras, lockstep
        >>> import numpy as np
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 3)), np.ones(8), batch_size=4, epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: Any = None,
        *,
        exact_batch: bool = False,
        local_steps: LocalSteps | None = None,
    ) -> None:
        take_part()
        super().__init__(exact_batch=exact_batch, local_steps=local_steps)
        self._resolver = cluster_resolver or TFConfigClusterResolver()
        timeout = getattr(communication_options, "timeout_seconds", None)
        if timeout is not None:
            self._job.set_timeout(timeout)
        if self._job.is_chief:
            _note_on(communication_options)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Let the job train the models that are compiled within the block.

        Raises:
            ConfigError: `TF_CONFIG` was set after the strategy was created.
        """
        take_part()
        with super().scope():
            yield self

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster's tasks and of this process's task."""
        return self._resolver


class MirroredStrategy(Strategy):
    """Trains every model that is compiled in its scope on several devices of this machine.

    Under `python train.py`, `lockstep run` restarts the script once per device. In a job, the command defines
    the workers.

    Args:
        devices: names such as "GPU:0" or "CPU:1"; None for all visible GPUs.
        cross_device_ops: ignored, because sums use a fixed tree; accepted as in `tf.distribute`.
        exact_batch: whether losses and metrics that compare the examples of a batch are those of one process
            however many outputs replicas have to exchange for them.
        local_steps: how many steps of `fit` each replica takes by itself before the replicas are averaged; by
            default, all replicas take each step together.

    Raises:
        ConfigError: the devices are invalid, or there is no script to restart.
        BackendError: Keras runs on a backend that is not supported.

    Example:
        >>> import keras, lockstep
        >>> strategy = lockstep.MirroredStrategy(["CPU:0"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: Any = None,
        *,
        exact_batch: bool = False,
        local_steps: LocalSteps | None = None,
    ) -> None:
        restart_per_device(devices)
        super().__init__(exact_batch=exact_batch, local_steps=local_steps)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        """Give the replicas one dataset, `dataset_fn(context)`, whose batches they take in turn.

        In each step, replica r gets the r-th of the next R batches. `context` is an `InputContext` of the
        only pipeline.

        Args:
            dataset_fn: a function that returns a dataset of any kind that `experimental_distribute_dataset`
                accepts. Its elements are batches of one replica.
            options: a `tf.distribute.InputOptions`. With the replication mode `PER_REPLICA`, each replica has
                its own dataset, as under `MultiWorkerMirroredStrategy`; the rest is ignored.

        Example:
            In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

            >>> import lockstep
            >>> import numpy as np
            >>> strategy = lockstep.MirroredStrategy()
            >>> dataset = strategy.distribute_datasets_from_function(
            ...     lambda context: np.arange(8).reshape(-1, context.get_per_replica_batch_size(4))
            ... )
            >>> next(iter(dataset))
            PerReplica:{
              0: array([0, 1]),
              1: array([2, 3])
            }
        """
        mode = getattr(options, "experimental_replication_mode", None)
        per_replica = getattr(mode, "name", "") == "PER_REPLICA"
        return self._distribute_from_function(dataset_fn, in_turn=not per_replica)


def _note_on(options: Any) -> None:
    """Print a note if the requested communication implementation is not in use."""
    implementation = getattr(options, "implementation", CommunicationImplementation.AUTO)
    if getattr(implementation, "value", implementation) == "NCCL":
        note("NCCL is not used yet: workers exchange data through shared memory, with the same result")
