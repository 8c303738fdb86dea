"""Strategies that keep equal copies of a model, under the names that `tf.distribute` gave them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.cluster.resolver import ClusterResolver
from lockstep.cluster.tf_config_resolver import TFConfigClusterResolver
from lockstep.launcher.local_devices import restart_once_a_device
from lockstep.rendezvous import join
from lockstep.strategy.options import CommunicationImplementation
from lockstep.strategy.strategy import Strategy
from lockstep.system.notes import note


class MultiWorkerMirroredStrategy(Strategy):
    """Trains every model that is compiled in its scope on all replicas of the job, in lockstep.

    Under `lockstep run` the job is the command's. In a script that was started by hand `TF_CONFIG` says which
    workers it has: see `lockstep.rendezvous.join`; without, it has one worker and one replica.

    Args:
        cluster_resolver: answers as `cluster_resolver` of this strategy; never decides who takes part.
        communication_options: how workers exchange data; never changes the result.

    Raises:
        ConfigError: `TF_CONFIG` is wrong, or came too late; or the tasks of several processes do not fit.
        PeerStuckError: others that `TF_CONFIG` names have not come in time.
        BackendError: Keras runs on a backend that is not supported.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: Any = None,
    ) -> None:
        join.take_part()
        super().__init__()
        self._resolver = cluster_resolver or TFConfigClusterResolver()
        timeout = getattr(communication_options, "timeout_seconds", None)
        if timeout is not None:
            self._job.be_patient(timeout)
        if self._job.is_chief:
            _note_on(communication_options)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Models compiled within the block are trained by the job.

        Raises:
            ConfigError: `TF_CONFIG` was set after the strategy had been made.
        """
        join.take_part()
        with super().scope():
            yield self

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Says which tasks there are, and which one this process is."""
        return self._resolver


class MirroredStrategy(Strategy):
    """Trains every model that is compiled in its scope on several devices of this machine.

    In a plain `python train.py` the script is started again, once a device, by `lockstep run`; in a job its
    workers are those of the command.

    Args:
        devices: names such as "GPU:0" or "CPU:1"; None for all visible GPUs.
        cross_device_ops: taken as `tf.distribute` takes it, and ignored: sums go along one fixed tree.

    Raises:
        ConfigError: the devices cannot be meant, or there is no script to start again.
        BackendError: Keras runs on a backend that is not supported.
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:
        restart_once_a_device(devices)
        super().__init__()


def _note_on(options: Any) -> None:
    """Say it where what was asked to move the bytes is not what moves them."""
    asked = getattr(options, "implementation", CommunicationImplementation.AUTO)
    if getattr(asked, "value", asked) == "NCCL":
        note(
            "NCCL moves bytes between GPUs only, and is not used yet: shared memory moves them, "
            "with the same result"
        )
