"""Which workers are slow, and why, in words. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.observability.overload import is_delayed
from lockstep.observability.step_parts import WorkerTimes, scores, slow_workers

_FAULTS = 10.0
"""Page faults per second that read from the disk."""
_STOPPED = 0.1
"""Seconds per second in which a CPU quota stops processes."""
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
        times: the times of each worker, over about the same steps.
        uses: the load of each worker, as far as it was measured.
    """
    paces = scores(times)
    fastest = max(paces, key=lambda worker: paces[worker], default=-1)
    return {
        worker: what + _explain(uses.get(worker, WorkerUse()), uses.get(fastest, WorkerUse()))
        for worker, what in slow_workers(times).items()
    }


def _explain(slow: WorkerUse, fast: WorkerUse) -> str:
    """Return what explains the difference, the strongest evidence first; empty if nothing does."""
    if slow.faults > max(_FAULTS, _MORE * fast.faults):
        swap = f", and its host swaps {slow.swapping / _MIB:.1f} MiB/s" if slow.swapping else ""
        return f"; it waits for the disk: {slow.faults:.0f} page faults per second{swap}"
    if slow.throttled and not fast.throttled:
        return f"; throttled: {', '.join(slow.throttled)}"
    if slow.stopped > max(_STOPPED, _MORE * fast.stopped):
        return f"; throttled: a CPU quota stops processes of its host {slow.stopped:.2g} s per second"
    if is_delayed(slow.cores, slow.delayed) and slow.delayed > _MORE * fast.delayed:
        return (
            "; other processes use its cores: each second, its threads together wait "
            f"{slow.delayed:.2g} s for a core"
        )
    return ""
