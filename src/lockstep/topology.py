"""The assignment of replicas to workers: a view. Pure arithmetic.

A job has R replicas for its whole life. W workers (1 <= W <= R) on one or several hosts compute them; a view
defines which worker owns which replica. Ownership is contiguous and balanced, and never affects a result: it
only determines where a replica is computed.
"""

from dataclasses import dataclass
from functools import cached_property

from lockstep.errors import ConfigError


@dataclass(frozen=True)
class View:
    """A numbered membership.

    Attributes:
        number: the number of the view in its job, from 1.
        hosts: ids of the live workers of each host that has some, the longest-serving first; the first host
            is that of the longest-serving worker.
        owners: `owners[r]` is the id of the worker that computes replica `r`; never decreasing in
            the rank of the worker, so that each worker, and each host, owns one contiguous range.
    """

    number: int
    hosts: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Ids of the live workers, host by host."""
        return tuple(worker for host in self.hosts for worker in host)

    @property
    def replicas(self) -> int:
        """R, the number of replicas."""
        return len(self.owners)

    @property
    def chief(self) -> int:
        """The longest-serving live worker, which writes."""
        return self.hosts[0][0]

    def replicas_of(self, worker: int) -> range:
        """The contiguous range of replicas that `worker` owns (may be empty)."""
        owned = [replica for replica, owner in enumerate(self.owners) if owner == worker]
        return range(owned[0], owned[-1] + 1) if owned else range(0)


def place(replicas: int, workers: tuple[int, ...], number: int = 1) -> View:
    """Return `place_on_hosts` for the workers of one host."""
    return place_on_hosts(replicas, (workers,), number)


def place_on_hosts(replicas: int, hosts: tuple[tuple[int, ...], ...], number: int = 1) -> View:
    """Give the workers of `hosts` contiguous ranges of `replicas` whose lengths differ by at most one.

    Raises:
        ConfigError: there is no worker, no replica, or more workers than replicas.
    """
    workers = [worker for host in hosts for worker in host]
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
    return View(number, hosts, owners)


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` into `parts` counts that differ by at most one, the larger ones first."""
    quotient, remainder = divmod(total, parts)
    return tuple(quotient + (part < remainder) for part in range(parts))
