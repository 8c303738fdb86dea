"""The load of hosts by workers during a call: sums over measurements. Pure."""

from collections.abc import Mapping

import msgspec

from lockstep.observability.measurements import LoadMeasured


class WorkerLoads(msgspec.Struct, frozen=True):
    """Sums over the measurements of a worker.

    Attributes:
        count: number of measurements.
        cores, delayed, faults: sums of the fields of `WorkerLoad`.
        throttled: number of measurements in which a GPU of the worker had a lowered clock.
        gpus: these GPUs in the last such measurement, with the reason, such as `GPU 3 (thermal)`.
    """

    count: int = 0
    cores: float = 0.0
    delayed: float = 0.0
    faults: float = 0.0
    throttled: int = 0
    gpus: str = ""


class HostLoads(msgspec.Struct, frozen=True):
    """Sums over the measurements of a host.

    Attributes:
        cores: number of cores that the job may use there.
        count: number of measurements; -1 before the first one of a call, which also covers an earlier time
            and does not count.
        busy, swapping, stopped: sums of the fields of `LoadMeasured`, the last one of `throttled`.
        workers: the sums of its workers.
    """

    cores: int = 0
    count: int = -1
    busy: float = 0.0
    swapping: float = 0.0
    stopped: float = 0.0
    workers: Mapping[int, WorkerLoads] = {}

    def plus(self, load: LoadMeasured, throttled: Mapping[int, str]) -> "HostLoads":
        """Return the sums with another measurement.

        Args:
            load: the measurement.
            throttled: the GPUs with a lowered clock that each worker uses.
        """
        if self.count < 0:
            return HostLoads(load.cores, 0)
        workers = {**self.workers}
        for each in load.workers:
            sums = workers.get(each.worker) or WorkerLoads()
            gpus = throttled.get(each.worker, "")
            workers[each.worker] = WorkerLoads(
                count=sums.count + 1,
                cores=sums.cores + each.cores,
                delayed=sums.delayed + each.delayed,
                faults=sums.faults + each.faults,
                throttled=sums.throttled + bool(gpus),
                gpus=gpus or sums.gpus,
            )
        return HostLoads(
            cores=load.cores,
            count=self.count + 1,
            busy=self.busy + load.busy,
            swapping=self.swapping + load.swapping,
            stopped=self.stopped + load.throttled,
            workers=workers,
        )


def throttled_gpus(load: LoadMeasured, workers: Mapping[int, int]) -> dict[int, str]:
    """Return the GPUs with a lowered clock that each worker uses, with the reason: `GPU 3 (thermal)`.

    Args:
        load: the measurement of a host.
        workers: the worker of each process on it.
    """
    gpus: dict[int, list[str]] = {}
    for gpu in load.gpus:
        for pid, _ in gpu.processes if gpu.throttled else ():
            if pid in workers:
                gpus.setdefault(workers[pid], []).append(f"GPU {gpu.index} ({gpu.throttled})")
    return {worker: ", ".join(texts) for worker, texts in gpus.items()}
