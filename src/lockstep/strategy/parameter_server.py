"""The strategy with parameter servers, named as in `tf.distribute`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.cluster.resolver import ClusterResolver
from lockstep.cluster.tf_config_resolver import TFConfigClusterResolver
from lockstep.errors import ConfigError, InputError, ModelError
from lockstep.keras.parameter_server.process import ServerOptions
from lockstep.parameter_server.partitioners import Partitioner
from lockstep.strategy.strategy import Strategy


class ParameterServerStrategy(Strategy):
    """Trains models asynchronously: weights live on parameter servers, and workers do not wait for one
    another.

    `lockstep run --ps 2 -n 3 train.py` starts a chief, three workers and two parameter servers; all run the
    script. A step of `fit` is one batch on one worker: it reads the weights, computes gradients, and the
    servers update the weights with Keras's optimizer as gradients arrive. Outside of `fit`, all processes
    have the same state, and share the work of `evaluate` and `predict`. Without `--ps`, in one process, `fit`
    is Keras's own.

    Args:
        cluster_resolver: returned by the property of this name; does not select the workers.
        variable_partitioner: divides variables among the servers; None places each on one server.
        max_staleness: the largest number of updates of the weights between reading them for a step and
            updating them by it; 0 lets one worker compute at a time. None for any number.

    Raises:
        ConfigError: the job has several workers and no parameter servers.
        InputError: `max_staleness` is negative.
        BackendError: Keras runs on a backend that is not supported.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        max_staleness: int | None = None,
    ) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise InputError(f"max_staleness is {max_staleness}; expected 0 or more, or None for any")
        super().__init__()
        if self._job.context.tasks is None and self._job.view.replicas > 1:
            raise ConfigError(
                f"this job has {self._job.view.replicas} replicas and no parameter servers: start it with "
                "`lockstep run --ps P -n N`"
            )
        self._resolver = cluster_resolver or TFConfigClusterResolver()
        self._options = ServerOptions(variable_partitioner, max_staleness)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Let the job train the models that are compiled within the block."""
        with self._methods.scope(self._options), self._entered():
            yield self

    @property
    def num_replicas_in_sync(self) -> int:
        """1: a step is one batch on one worker."""
        return 1

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster's tasks and of this process's task."""
        return self._resolver

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` in a process on its own; in a job, custom loops with parameter servers are not supported.

        Raises:
            ModelError: the job has parameter servers.
        """
        self._refuse_loop()
        return super().run(fn, args, kwargs, options)

    def steps(self, count: int, state: Mapping[str, Any], checkpoint: Any = None) -> Iterator[int]:
        """Yield the numbers of steps in a process on its own; see `run`."""
        self._refuse_loop()
        return super().steps(count, state, checkpoint)

    def _refuse_loop(self) -> None:
        if self._job.context.tasks is not None:
            raise ModelError(
                "custom loops with parameter servers are not supported; use fit, or "
                "MultiWorkerMirroredStrategy in a job without --ps"
            )
