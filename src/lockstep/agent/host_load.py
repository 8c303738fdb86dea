"""The load of this host and of its workers, from counters of the kernel and the driver of GPUs.

A measurement takes about 10 microseconds per thread of a worker, and never waits: the driver of GPUs, which
may take longer, has a separate thread.

Load is not numbered: it may be lost when another coordinator takes over.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from lockstep.observability.measurements import GpuLoad, LoadMeasured, WorkerLoad
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.environment import usable_cores
from lockstep.system.load import CGROUPS, PROC, HostSampler, ProcessCounters, process_counters
from lockstep.system.nvml import GpuReading, driver_is_present, load, reader

_EVERY = 2.0
_SHARE = 1 / 1800
"""The interval grows with the age of the agent, so that a run of a month has some 15,000 measurements."""
_MOST_COST = 0.001
"""The share of a core that measuring may use: with many workers, the interval is longer."""

GpuReader = Callable[[], AbstractContextManager[Callable[[], GpuReading]]]
"""Opens the driver of GPUs; returns a function that takes a reading."""


_Read = tuple[float, ProcessCounters | None]


def _worker_load(worker: int, earlier: _Read, later: _Read) -> WorkerLoad | None:
    """Return the load of a worker between two readings, or None if one of them is missing."""
    (start, before), (end, now) = earlier, later
    seconds = end - start
    if before is None or now is None or seconds <= 0:
        return None
    delayed = sum(max(0.0, delay - before.delays.get(thread, 0.0)) for thread, delay in now.delays.items())
    return WorkerLoad(
        worker=worker,
        cores=round(max(0.0, now.cpu - before.cpu) / seconds, 3),
        delayed=round(delayed / seconds, 3),
        memory=now.memory,
        faults=round(max(0, now.faults - before.faults) / seconds, 3),
    )


class LoadMeter:
    """Measures the load of this host about every two seconds, or less often (see `_MOST_COST`).

    Args:
        host: its name; empty for that of the machine.
        clock: for intervals.
        open_gpus: opens the driver of GPUs; None for a host without GPUs.
        proc: where the kernel's data on processes are mounted.
        cgroups: where the cgroup file systems are mounted.
        processor_seconds: the processor time that the calling thread has used.
    """

    def __init__(
        self,
        host: str = "",
        clock: Clock | None = None,
        open_gpus: GpuReader | None = None,
        proc: Path = PROC,
        cgroups: Path = CGROUPS,
        processor_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self._processor_seconds = processor_seconds
        self._host = host or socket.gethostname()
        self._clock = clock or SystemClock()
        self._proc, self._sampler = proc, HostSampler(self._clock, proc, cgroups)
        self._cores = usable_cores()
        self._gpus = None if open_gpus is None else _GpuThread(open_gpus)
        self._born = self._clock.now()
        self._due = self._born + _EVERY
        self._workers: dict[int, _Read] = {}

    @classmethod
    def of_host(cls, host: str) -> "LoadMeter":
        """Return a meter of this machine with its GPUs; `host` is its name in the job, or empty."""
        return cls(host, open_gpus=(lambda: reader(load())) if driver_is_present() else None)

    def measure(self, processes: Mapping[int, int]) -> LoadMeasured | None:
        """Measure if that is due.

        Args:
            processes: the process id of each worker that runs on the host.

        Returns:
            The load since the last measurement; of a new worker, since it was first seen. None if no
            measurement is due yet.
        """
        now = self._clock.now()
        for worker in processes.keys() - self._workers.keys():
            self._workers[worker] = now, process_counters(processes[worker], self._proc)
        if now < self._due:
            return None
        begun = self._processor_seconds()
        sample = self._sampler.sample()
        workers = {worker: (now, process_counters(pid, self._proc)) for worker, pid in processes.items()}
        loads = [_worker_load(worker, self._workers[worker], read) for worker, read in workers.items()]
        gpus = self._gpus.take() if self._gpus is not None else ()
        cost = (self._processor_seconds() - begun) / _MOST_COST
        self._due = now + max(_EVERY, (now - self._born) * _SHARE, cost)
        self._workers = workers
        return LoadMeasured(
            host=self._host,
            cores=self._cores,
            busy=sample.busy,
            memory_used=sample.memory_used,
            memory_total=sample.memory_total,
            swapping=sample.swapping,
            throttled=sample.throttled,
            workers=tuple(load for load in loads if load is not None),
            gpus=gpus,
        )

    def left(self) -> float:
        """Return the seconds until the next measurement is due."""
        return max(0.0, self._due - self._clock.now())

    def close(self) -> None:
        """End the reading of GPUs; does not wait for the driver."""
        if self._gpus is not None:
            self._gpus.close()


class _GpuThread:
    """Reads the GPUs in a thread, because the driver may take long, or hang."""

    def __init__(self, open_gpus: GpuReader) -> None:
        self._open_gpus = open_gpus
        self._wanted = threading.Event()
        self._wanted.set()
        self._reading: tuple[GpuLoad, ...] = ()
        self._closed = False
        threading.Thread(target=self._read, name="gpus", daemon=True).start()

    def take(self) -> tuple[GpuLoad, ...]:
        """Return the readings since the last call, and request the next one."""
        reading, self._reading = self._reading, ()
        self._wanted.set()
        return reading

    def close(self) -> None:
        """End the thread as soon as its call of the driver returns."""
        self._closed = True
        self._wanted.set()

    def _read(self) -> None:
        with self._open_gpus() as read_gpus:
            while self._wanted.wait() and not self._closed:
                self._wanted.clear()
                reading = read_gpus()
                if reading.driver is None:
                    return
                self._reading = tuple(GpuLoad.of(gpu) for gpu in reading.gpus)
