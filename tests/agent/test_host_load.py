"""The measurement of load against counters of a kernel that the test writes, and in a real job."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.agent.host_load import LoadMeter
from lockstep.observability.measurements import GpuLoad, LoadMeasured, WorkerLoad
from lockstep.system.nvml import Driver, Gpu, GpuMemory, GpuReading
from lockstep.system.nvml import Process as GpuProcess
from virtual_clock import VirtualClock

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
GIB = 2**30


class Kernel:
    """The files of a kernel, under a folder."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write("proc/self/cgroup", "0::/job\n")
        self.write("cgroup/job/memory.max", "max\n")
        self.host()

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def host(self, busy: float = 0.0, swapped: int = 0, throttled: int = 0) -> None:
        half = int(busy * TICKS / 2)
        self.write("proc/stat", f"cpu {half} 0 {half} 999999 7777 0 0 5555 333 0\ncpu0 1 2 3\n")
        self.write("proc/meminfo", f"MemTotal: {8 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {3 * 2**20} kB\n")
        self.write("proc/vmstat", f"nr_free_pages 5\npswpin {swapped}\npswpout {2 * swapped}\n")
        self.write("cgroup/job/cpu.stat", f"usage_usec 5\nthrottled_usec {throttled}\n")

    def process(
        self, pid: int, cpu: float, delays: dict[int, float], memory: int = PAGE, faults: int = 0
    ) -> None:
        half = int(cpu * TICKS / 2)
        fields = ["S", *["0"] * 8, str(faults), "0", str(half), str(half), *["0"] * 8, str(memory // PAGE)]
        self.write(f"proc/{pid}/stat", f"{pid} (a) b (c) {' '.join(fields)} 0 0\n")
        for thread, delay in delays.items():
            self.write(f"proc/{pid}/task/{thread}/schedstat", f"123 {int(delay * 1e9)} 17\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


def meter_of(kernel: Kernel, clock: VirtualClock, **more: Any) -> LoadMeter:
    """Return a meter that reads `kernel`; its measurements cost nothing unless `more` says otherwise."""
    more.setdefault("processor_seconds", lambda: 0.0)
    return LoadMeter("node1", clock, proc=kernel.proc, cgroups=kernel.cgroups, **more)


def test_rates_are_what_counters_gain_per_second(kernel: Kernel, clock: VirtualClock) -> None:
    kernel.host(busy=50.0, swapped=10, throttled=500_000)
    kernel.process(7, cpu=20.0, delays={7: 3.0, 8: 1.0, 9: 5.0}, memory=3 * GIB, faults=100)
    meter = meter_of(kernel, clock)
    assert meter.measure({2: 7}) is None
    clock.advance(4.0)
    kernel.host(busy=56.0, swapped=30, throttled=2_500_000)
    # Thread 9 has ended, and 10 is new.
    kernel.process(7, cpu=26.0, delays={7: 4.0, 8: 1.0, 10: 0.5}, memory=2 * GIB, faults=140)
    (kernel.proc / "7/task/9/schedstat").unlink()
    load = meter.measure({2: 7})
    assert load is not None
    assert load == LoadMeasured(
        host="node1",
        cores=load.cores,
        busy=1.5,
        memory_used=5 * GIB,
        memory_total=8 * GIB,
        swapping=round(3 * 20 * PAGE / 4.0, 1),
        throttled=0.5,
        workers=(WorkerLoad(worker=2, cores=1.5, delayed=0.375, memory=2 * GIB, faults=10.0),),
    )
    assert load.cores == len(os.sched_getaffinity(0))


def test_the_limit_with_the_least_memory_left_counts(kernel: Kernel, clock: VirtualClock) -> None:
    kernel.write("cgroup/job/memory.max", f"{2 * GIB}\n")
    kernel.write("cgroup/job/memory.current", f"{GIB + GIB // 2}\n")
    kernel.write("cgroup/job/memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    meter = meter_of(kernel, clock)
    meter.measure({})
    clock.advance(2.0)
    load = meter.measure({})
    assert load is not None
    assert (load.memory_used, load.memory_total) == (GIB, 2 * GIB)


def test_a_quota_of_version_1_counts(kernel: Kernel, clock: VirtualClock) -> None:
    kernel.write("proc/self/cgroup", "3:cpu,cpuacct:/old\n")
    kernel.write("cgroup/cpu/old/cpu.stat", "nr_throttled 3\nthrottled_time 0\n")
    meter = meter_of(kernel, clock)
    meter.measure({})
    clock.advance(2.0)
    kernel.write("cgroup/cpu/old/cpu.stat", "nr_throttled 3\nthrottled_time 3000000000\n")
    load = meter.measure({})
    assert load is not None
    assert load.throttled == 1.5


def test_workers_come_and_go(kernel: Kernel, clock: VirtualClock) -> None:
    meter = meter_of(kernel, clock)
    meter.measure({})
    clock.advance(1.0)
    kernel.process(7, cpu=1.0, delays={7: 0.0})
    # Not due, but a new worker counts from here.
    assert meter.measure({0: 7, 1: 8}) is None
    clock.advance(1.0)
    kernel.process(7, cpu=2.5, delays={7: 0.0})
    kernel.process(8, cpu=9.0, delays={})
    load = meter.measure({0: 7, 1: 8})
    assert load is not None
    assert [(one.worker, one.cores) for one in load.workers] == [(0, 1.5)]
    (kernel.proc / "7/stat").unlink()
    clock.advance(2.0)
    load = meter.measure({0: 7, 1: 8})
    assert load is not None
    assert [(one.worker, one.cores, one.delayed) for one in load.workers] == [(1, 0.0, 0.0)]
    # A process that ends has no memory.
    kernel.process(8, cpu=9.0, delays={}, memory=0)
    clock.advance(2.0)
    load = meter.measure({1: 8})
    assert load is not None
    assert load.workers == ()


def test_a_kernel_that_tells_nothing_is_no_error(tmp_path: Path, clock: VirtualClock) -> None:
    meter = LoadMeter("", clock, proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")
    meter.measure({0: 7})
    clock.advance(2.0)
    load = meter.measure({0: 7})
    assert load is not None
    assert load.host == os.uname().nodename
    assert (load.busy, load.memory_used, load.memory_total, load.workers) == (0.0, 0, 0, ())


def test_the_interval_grows_with_the_age(kernel: Kernel, clock: VirtualClock) -> None:
    meter = meter_of(kernel, clock)
    meter.measure({})
    assert meter.left() == 2.0
    clock.advance(36_000.0)
    assert meter.measure({}) is not None
    assert meter.left() == 20.0
    clock.advance(19.0)
    assert meter.measure({}) is None
    assert meter.left() == pytest.approx(1.0)


def test_the_interval_grows_with_the_cost(kernel: Kernel, clock: VirtualClock) -> None:
    seconds = itertools.count(0.0, 0.005)
    meter = meter_of(kernel, clock, processor_seconds=lambda: next(seconds))
    clock.advance(2.0)
    assert meter.measure({}) is not None
    assert meter.left() == pytest.approx(5.0)


class FakeDriver:
    """The driver of GPUs, whose readings the test takes one by one."""

    def __init__(self, reading: GpuReading) -> None:
        self.reading, self.begun, self.answers = reading, threading.Semaphore(0), threading.Semaphore(0)
        self.done, self.closed = threading.Semaphore(0), threading.Event()

    @contextmanager
    def open(self) -> Iterator[Any]:
        yield self.read
        self.closed.set()

    def read(self) -> GpuReading:
        self.begun.release()
        assert self.answers.acquire(timeout=120)
        self.done.release()
        return self.reading


H100 = Gpu(
    0,
    name="H100",
    memory=GpuMemory(80 * GIB, 20 * GIB, 60 * GIB),
    temperature=71,
    power=412.5,
    utilization=98,
    processes=(GpuProcess(7, "python", 5 * GIB), GpuProcess(9, "", None)),
    throttled=("thermal", "power"),
)
H100_LOAD = GpuLoad(
    index=0,
    name="H100",
    utilization=98,
    memory_used=20 * GIB,
    memory_total=80 * GIB,
    temperature=71,
    power=412.5,
    throttled="thermal, power",
    processes=((7, 5 * GIB), (9, None)),
)


def test_what_a_gpu_reports() -> None:
    assert GpuLoad.of(H100) == H100_LOAD
    lost = GpuLoad.of(Gpu(3, fault="it has fallen off the bus"))
    assert (lost.index, lost.name, lost.utilization, lost.processes) == (3, "", None, ())


def test_a_slow_driver_does_not_delay_measurements(kernel: Kernel, clock: VirtualClock) -> None:
    driver = FakeDriver(GpuReading(Driver("570", None), (H100,)))
    meter = meter_of(kernel, clock, open_gpus=driver.open)
    meter.measure({})
    assert driver.begun.acquire(timeout=120)
    for _ in range(3):
        clock.advance(2.0)
        load = meter.measure({})
        assert load is not None
        assert load.gpus == ()
    driver.answers.release()
    assert driver.done.acquire(timeout=120)
    # It reads again, because it was asked meanwhile: the first reading is complete.
    assert driver.begun.acquire(timeout=120)
    clock.advance(2.0)
    load = meter.measure({})
    assert load is not None
    assert load.gpus == (H100_LOAD,)
    meter.close()
    driver.answers.release()
    assert driver.closed.wait(120)


def test_a_host_without_a_driver_is_asked_once(kernel: Kernel, clock: VirtualClock) -> None:
    driver = FakeDriver(GpuReading(None))
    meter = meter_of(kernel, clock, open_gpus=driver.open)
    meter.measure({})
    driver.answers.release()
    assert driver.closed.wait(120)
    clock.advance(2.0)
    load = meter.measure({})
    assert load is not None
    assert load.gpus == ()


WAITS = """
import json, time
from pathlib import Path
file = Path("run/measurements.jsonl")
deadline = time.monotonic() + 120
while True:
    sum(range(100_000))
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\\n")]
    if any({0, 1} == {one["worker"] for one in line["workers"]} for line in lines if line["event"] == "load"):
        break
    assert time.monotonic() < deadline
"""


@pytest.mark.ci
def test_a_real_job_records_the_load_of_both_workers(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--run-dir", "run", "waits.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run/measurements.jsonl").read_bytes().splitlines()
    loads = [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]
    load = next(one for one in loads if one["event"] == "load" and len(one["workers"]) == 2)
    assert load["host"] == os.uname().nodename
    assert 0 < load["memory_used"] < load["memory_total"]
    for one in load["workers"]:
        assert 0 < one["cores"] <= 2 * len(os.sched_getaffinity(0))
        assert one["memory"] > 5 * 2**20
        assert one["delayed"] >= 0
