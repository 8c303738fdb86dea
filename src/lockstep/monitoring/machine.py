"""The load of this machine for `lockstep top` without a job: its GPUs, and the user's running jobs."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import msgspec

from lockstep.coordinator.admin_client import RunningJobs, running_jobs, table
from lockstep.monitoring.overview import HostRow
from lockstep.monitoring.top_text import csv_lines, gpu_line
from lockstep.observability.measurements import GpuLoad
from lockstep.protocol.admin import Status
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.load import HostSampler
from lockstep.system.nvml import GpuMemory, GpuReading
from lockstep.system.prose import date_text, printable

_GIB = 2**30
_PATIENCE = 10.0
"""Seconds that the first look may take: the driver of a GPU may need some to begin."""
_COUNTED = 0.2
"""Seconds for which a look counts the use of cores, at least."""
_STALE = 5.0
"""Seconds without a new reading, beyond the interval, that are worth a line."""
_NO_ANSWER = "the driver of the GPUs has not answered"
_JOBS_PATIENCE = 1.0
_CSV = (
    *("time", "index", "name", "utilization", "memory_used", "memory_total", "temperature", "power"),
    *("throttled", "processes", "bar1_used", "fault"),
)


@dataclass(frozen=True)
class MachineLoad:
    """The machine at one time.

    Attributes:
        time: seconds since 1970.
        host: its load, and its GPUs.
        names: the names of the processes on the GPUs, by their id.
        bar1: the part of the memory of GPUs that other devices can address, by the index of the GPU.
        faults: why GPUs cannot be used, by their index.
        missing: why there is no GPU; empty if there is one.
        jobs: the running jobs, the oldest first.
        silent: the names of jobs that do not answer.
    """

    time: float
    host: HostRow
    names: dict[int, str]
    bar1: dict[int, GpuMemory]
    faults: dict[int, str]
    missing: str
    jobs: tuple[Status, ...]
    silent: tuple[str, ...]


def machine_now(
    read_gpus: Callable[[], GpuReading],
    clock: Clock,
    name: str,
    jobs: Callable[[float], RunningJobs] = running_jobs,
) -> MachineLoad:
    """Look at the machine.

    Args:
        read_gpus: queries the driver.
        clock: measures the time.
        name: the name of the host.
        jobs: returns the running jobs.
    """
    sampler = HostSampler(SystemClock())
    reading, running = read_gpus(), jobs(_JOBS_PATIENCE)
    time.sleep(_COUNTED)
    loads = tuple(GpuLoad.of(gpu) for gpu in reading.gpus)
    host = HostRow(name, os.cpu_count() or 1, *sampler.sample(), loads)
    return MachineLoad(
        clock.wall(),
        host,
        names={process.pid: process.name for gpu in reading.gpus for process in gpu.processes or ()},
        bar1={gpu.index: gpu.bar1 for gpu in reading.gpus if gpu.bar1 is not None},
        faults={gpu.index: gpu.fault for gpu in reading.gpus if gpu.fault},
        missing="" if reading.gpus else _absence(reading),
        jobs=running.running,
        silent=running.silent,
    )


def _absence(reading: GpuReading) -> str:
    remedy = f": {reading.remedy}" if reading.remedy else ""
    return f"no GPU: {reading.missing}{remedy}"


class MachineWatch:
    """Looks at the machine in a thread, because the driver of GPUs may hang.

    Args:
        look: looks at the machine.
        interval: seconds between two looks.
    """

    def __init__(self, look: Callable[[], MachineLoad], interval: float) -> None:
        self._look = look
        self._interval = interval
        self._seen = threading.Condition()
        self._newest: MachineLoad | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="machine", daemon=True).start()

    def newest(self) -> MachineLoad | None:
        """Return the last look, after waiting for the first one for a limited time, or None if it hangs."""
        with self._seen:
            self._seen.wait_for(lambda: self._newest is not None, _PATIENCE)
            return self._newest

    def close(self) -> None:
        """End the thread after its current look."""
        self._closed.set()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closed.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._interval, time.monotonic())
            seen = self._look()
            with self._seen:
                self._newest = seen
                self._seen.notify_all()


def machine_lines(machine: MachineLoad | None, now: float, interval: float) -> list[str]:
    """Return the machine as lines.

    Args:
        machine: the last look; None if it hangs.
        now: the time, in seconds since 1970.
        interval: seconds between two looks.
    """
    if machine is None:
        return [f"{_NO_ANSWER} for {_PATIENCE:g} s"]
    stamp = date_text(machine.time)
    host = machine.host
    memory = f"memory {host.memory_used / _GIB:.1f} of {host.memory_total / _GIB:.1f} GiB"
    lines = [f"{stamp}  {host.host}: {host.busy:.1f} of {host.cores} cores busy; {memory}"]
    if now - machine.time > interval + _STALE:
        lines.append(f"{_NO_ANSWER} for {now - machine.time:.0f} s")
    if machine.missing:
        lines.append(machine.missing)
    for gpu in machine.host.gpus:
        line = gpu_line(msgspec.structs.replace(gpu, processes=()))
        lines.append("  ".join((line, *_unrecorded(machine, gpu.index))))
        lines += [f"  {_process(pid, memory, machine.names)}" for pid, memory in gpu.processes]
    lines += ["", *(table(machine.jobs, now) if machine.jobs else ["no job is running"])]
    return lines + [f"{printable(name)} does not respond" for name in machine.silent]


def _unrecorded(machine: MachineLoad, index: int) -> list[str]:
    """Return the values of a GPU that no job records."""
    bar1, fault = machine.bar1.get(index), machine.faults.get(index, "")
    shown = [f"BAR1 {bar1.used / _GIB:.1f} of {bar1.total / _GIB:.1f} GiB"] if bar1 is not None else []
    return [*shown, *([printable(fault)] if fault else [])]


def _process(pid: int, memory: int | None, names: dict[int, str]) -> str:
    used = "" if memory is None else f"{memory / _GIB:.1f} GiB"
    return "  ".join(filter(None, (str(pid), printable(names.get(pid, "")), used)))


def machine_text(machine: MachineLoad | None, now: float, interval: float) -> str:
    """Return the machine as text; arguments as for `machine_lines`."""
    return "\n".join(machine_lines(machine, now, interval)) + "\n"


def machine_json(machine: MachineLoad | None) -> str:
    """Return a JSON object in one line, or an empty string if the look hangs."""
    return "" if machine is None else msgspec.json.encode(asdict(machine)).decode() + "\n"


def machine_csv_heading() -> str:
    """Return the line with the names of the columns."""
    return csv_lines([_CSV])


def machine_csv(machine: MachineLoad | None) -> str:
    """Return a line per GPU; sizes in bytes."""
    if machine is None:
        return ""
    return csv_lines([_csv_row(gpu, machine) for gpu in machine.host.gpus])


def _csv_row(gpu: GpuLoad, machine: MachineLoad) -> list[object]:
    bar1 = machine.bar1.get(gpu.index)
    return [
        f"{machine.time:.3f}",
        *(getattr(gpu, name) for name in _CSV[1:-3]),
        " ".join(str(pid) for pid, _ in gpu.processes),
        None if bar1 is None else bar1.used,
        machine.faults.get(gpu.index, ""),
    ]
