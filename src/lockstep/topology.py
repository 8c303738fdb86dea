"""The assignment of replicas to workers: a view. Pure arithmetic.

A job has R replicas for its whole life. W workers (1 <= W <= R) compute them; a `View` defines which
worker owns which replica. Ownership is contiguous and balanced, and never affects a result: it only
determines where a replica is computed.
"""

from dataclasses import dataclass

from lockstep.errors import ConfigError


@dataclass(frozen=True)
class View:
    """A numbered membership.

    Attributes:
        number: of the view in its job, from 1.
        workers: ids of the live workers, the longest-serving first.
        owners: `owners[r]` is the id of the worker that computes replica `r`; never decreasing in
            the position of the worker, so that each worker owns one contiguous range.
    """

    number: int
    workers: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """R, the number of replicas."""
        return len(self.owners)

    @property
    def chief(self) -> int:
        """The longest-serving live worker: the one that writes."""
        return self.workers[0]

    def replicas_of(self, worker: int) -> range:
        """The contiguous range of replicas that `worker` owns (may be empty)."""
        owned = [replica for replica, owner in enumerate(self.owners) if owner == worker]
        return range(owned[0], owned[-1] + 1) if owned else range(0)


def place(replicas: int, workers: tuple[int, ...], number: int = 1) -> View:
    """Give `workers` contiguous ranges of `replicas` whose lengths differ by at most one.

    Raises:
        ConfigError: there is no worker, no replica, or more workers than replicas.
    """
    if not workers or replicas < 1:
        raise ConfigError(
            f"a job needs at least one worker and one replica, not {len(workers)} and {replicas}"
        )
    if len(workers) > replicas:
        raise ConfigError(
            f"{len(workers)} workers cannot share {replicas} replicas: a worker needs at least one; "
            f"ask for {replicas} workers or fewer, or for {len(workers)} replicas or more"
        )
    counts = split_evenly(replicas, len(workers))
    owners = tuple(worker for worker, count in zip(workers, counts, strict=True) for _ in range(count))
    return View(number, workers, owners)


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` into `parts` counts that differ by at most one, the larger ones first."""
    quotient, remainder = divmod(total, parts)
    return tuple(quotient + (part < remainder) for part in range(parts))
