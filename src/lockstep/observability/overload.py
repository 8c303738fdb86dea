"""Whether other programs overload a host of the job, in words. Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from lockstep.observability.events import LoadMeasured

_DELAYED = 0.2
"""Seconds per second that a thread waits for a core, for each core in use."""
_OTHERS = 0.5
"""The cores in use by other processes from which they are worth a word, if workers wait for cores."""
_FULL = 0.9
"""The share of the cores in use from which a host counts as busy."""


def is_delayed(cores: float, delayed: float) -> bool:
    """Whether the threads of a worker, which use these cores, wait notably long for a core."""
    return delayed > _DELAYED * max(1.0, cores)


def tell_of_overload(host: str, cores: int, busy: float, used: float, delays: Iterable[float]) -> str:
    """Return a line about a host whose cores other processes use; empty if there is no such host.

    Args:
        host: its name.
        cores: number of cores that the job may use.
        busy: cores in use by all processes.
        used: cores in use by the workers.
        delays: how long the workers that wait notably long for a core wait, in seconds per second.
    """
    others, most = busy - used, max(delays, default=0.0)
    if not most or others < _OTHERS or busy < _FULL * cores:
        return ""
    return (
        f"{host}: other processes use {others:.1f} of {cores} cores: each second, the threads of a worker "
        f"together wait up to {most:.2g} s for a core"
    )


class _WorkerSums(msgspec.Struct, frozen=True):
    """Sums over measurements of a worker."""

    count: int = 0
    cores: float = 0.0
    delayed: float = 0.0


class HostLoads(msgspec.Struct, frozen=True):
    """Sums over the measurements of a host, without the first one, which covers an earlier time, too."""

    cores: int = 0
    _count: int = -1
    _busy: float = 0.0
    _workers: Mapping[int, _WorkerSums] = {}

    def plus(self, load: LoadMeasured) -> "HostLoads":
        """Return the sums with another measurement."""
        if self._count < 0:
            return HostLoads(load.cores, 0)
        workers = {**self._workers}
        for worker_load in load.workers:
            sums = workers.get(worker_load.worker) or _WorkerSums()
            workers[worker_load.worker] = _WorkerSums(
                sums.count + 1, sums.cores + worker_load.cores, sums.delayed + worker_load.delayed
            )
        return HostLoads(load.cores, self._count + 1, self._busy + load.busy, workers)

    def overload(self, host: str) -> str:
        """Return the line about the host on average; see `tell_of_overload`."""
        if self._count < 1:
            return ""
        means = [(sums.cores / sums.count, sums.delayed / sums.count) for sums in self._workers.values()]
        delays = [delayed for cores, delayed in means if is_delayed(cores, delayed)]
        used = sum(sums.cores for sums in self._workers.values()) / self._count
        return tell_of_overload(host, self.cores, self._busy / self._count, used, delays)
