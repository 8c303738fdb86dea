"""Strategies under the names that `tf.distribute` gave them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep import job
from lockstep.config import tf_config_given, tf_config_now
from lockstep.keras import hook


class MultiWorkerMirroredStrategy:
    """Trains every model that is compiled in its scope on all replicas of the job, in lockstep.

    Under `lockstep run` the job is the command's; in a script that was started by hand it has one worker
    and one replica. Batch sizes are global: each step's batch is split over the replicas.

    Raises:
        BackendError: Keras runs on a backend that is not supported.
    """

    def __init__(self) -> None:
        self._job = job.current()
        self._loops = hook.install(self._job)
        if self._job.is_chief and tf_config_now() != tf_config_given():
            print(
                "lockstep: the TF_CONFIG that this script has set is ignored; workers and replicas are those "
                "of `lockstep run`, or one of each without it",
                file=sys.stderr,
            )

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas; fixed for the life of the job."""
        return self._job.view.replicas

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Models compiled within the block are trained by the job."""
        self._loops.depth += 1
        try:
            yield
        finally:
            self._loops.depth -= 1
