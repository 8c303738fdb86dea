"""Which workers are slow, and why, in words. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.observability.step_parts import WorkerTimes, scores

SLOW = 0.8
"""The score below which a worker counts as slow."""
_PARTS = ("input", "compute", "update", "other")
_FAULTS = 10.0
"""Page faults per second that read from the disk."""
_STOPPED = 0.1
"""Seconds per second in which a CPU quota stops processes."""
_DELAYED = 0.2
"""Seconds per second that a thread waits for a core, for each core in use."""
_MORE = 1.5
"""A cause must be so many times stronger than on the fastest worker."""
_MIB = 2**20


@dataclass(frozen=True)
class WorkerUse:
    """What a worker used of its host lately.

    Attributes:
        cores: the cores that its threads use.
        delayed: seconds per second in which its threads waited for a core.
        faults: page faults per second that read from the disk.
        swapping: bytes per second that its host reads from and writes to swap.
        stopped: seconds per second in which a CPU quota stops processes of its host.
        throttled: GPUs of the worker with a lowered clock, and why, such as `GPU 3 (thermal)`.
    """

    cores: float = 0.0
    delayed: float = 0.0
    faults: float = 0.0
    swapping: float = 0.0
    stopped: float = 0.0
    throttled: tuple[str, ...] = ()


def causes(times: Mapping[int, WorkerTimes], uses: Mapping[int, WorkerUse]) -> dict[int, str]:
    """Return why each slow worker is slow; empty without two workers to compare.

    Args:
        times: of each worker, over about the same steps.
        uses: of each worker, as far as its load was measured.
    """
    found = scores(times)
    if len(found) < 2:
        return {}
    fastest = max(found, key=lambda worker: found[worker])
    return {
        worker: _describe(times[worker], times[fastest], fastest)
        + _explain(uses.get(worker, WorkerUse()), uses.get(fastest, WorkerUse()))
        for worker, score in found.items()
        if score < SLOW
    }


def _describe(slow: WorkerTimes, fast: WorkerTimes, fastest: int) -> str:
    def per_replica(times: WorkerTimes, part: str) -> float:
        return 1000 * times.parts[part] / times.replicas

    part = max(_PARTS, key=lambda part: per_replica(slow, part) - per_replica(fast, part))
    name = "Keras's loop and callbacks" if part == "other" else part
    behind, ahead = per_replica(slow, part), per_replica(fast, part)
    return f"slow {name}: {behind:.3g} ms per replica, {ahead:.3g} ms on worker {fastest}"


def _explain(slow: WorkerUse, fast: WorkerUse) -> str:
    """Return what explains the difference, the strongest evidence first; empty if nothing does."""
    if slow.faults > max(_FAULTS, _MORE * fast.faults):
        swap = f", and its host swaps {slow.swapping / _MIB:.1f} MiB/s" if slow.swapping else ""
        return f"; it waits for the disk: {slow.faults:.0f} page faults per second{swap}"
    if slow.throttled and not fast.throttled:
        return f"; throttled: {', '.join(slow.throttled)}"
    if slow.stopped > max(_STOPPED, _MORE * fast.stopped):
        return f"; throttled: a CPU quota stops processes of its host {slow.stopped:.2g} s per second"
    if slow.delayed > max(_DELAYED * max(1.0, slow.cores), _MORE * fast.delayed):
        return f"; other processes use its cores: its threads wait {slow.delayed:.2g} s per second for one"
    return ""
