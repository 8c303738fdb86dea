"""Strategies of a single replica."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from lockstep.errors import ConfigError
from lockstep.keras.devices import on_device
from lockstep.keras.replica_run.runner import SingleReplicaRunner
from lockstep.strategy.strategy import Strategy
from lockstep.worker import job


class DefaultStrategy(Strategy):
    """The strategy of a program that has not created one: it changes nothing."""

    is_default = True

    def __init__(self) -> None:
        self._job = job.alone()
        self._runner = SingleReplicaRunner()

    def steps(self, count: int, state: Mapping[str, Any], checkpoint: Any = None) -> Iterator[int]:
        """Yield the step numbers; no worker joins and nothing is saved."""
        yield from range(count)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Only make `get_strategy` return this strategy."""
        with self._entered():
            yield self


@cache
def default_strategy() -> DefaultStrategy:
    """Return the only default strategy."""
    return DefaultStrategy()


class OneDeviceStrategy(Strategy):
    """Trains on one device in a single process.

    Args:
        device: a name such as "GPU:0", "/gpu:1" or "CPU:0".

    Raises:
        ConfigError: the job has several replicas.

    Example:
        >>> import keras, lockstep
        >>> with lockstep.OneDeviceStrategy("CPU:0").scope() as strategy:
        ...     layer = keras.layers.Dense(1)
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        if self.num_replicas_in_sync > 1:
            raise ConfigError(
                f"OneDeviceStrategy trains one replica, but this job has {self.num_replicas_in_sync}, and "
                "each would train its own model; use MirroredStrategy, or start the script with "
                "`lockstep run -n 1 --replicas 1`"
            )

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Create models, and train compiled models, on the device."""
        with super().scope(), on_device(self._device):
            yield self
