"""The GPUs of this machine, as a fake driver reports them, and the running jobs."""

import csv
import io
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.coordinator.admin_client import RunningJobs
from lockstep.monitoring.machine import (
    MachineLoad,
    MachineWatch,
    machine_csv,
    machine_csv_heading,
    machine_json,
    machine_lines,
    machine_now,
)
from lockstep.protocol.admin import Status
from lockstep.system.nvml import read
from virtual_clock import VirtualClock

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
from fake_nvml import GIB, LOST, FakeNvml, geforce, h100, process

STATUS = Status("train-1", "train.py", 5, "/r/train-1", 940.0, 4, (0, 1), (), 2, "fit 1")
JOBS = RunningJobs((STATUS,), ("hung-1",))


def seen(library: Any, pci: Path, jobs: RunningJobs = JOBS) -> MachineLoad:
    return machine_now(partial(read, library, pci), VirtualClock(1000.0), "box", lambda patience: jobs)


@pytest.fixture
def machine(tmp_path: Path) -> MachineLoad:
    busy = h100(
        0,
        nvmlDeviceGetComputeRunningProcesses=[process(4_000_001, 5 * GIB)],
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=97, memory=40),
        nvmlDeviceGetCurrentClocksThrottleReasons=0x20,
    )
    names = {"nvmlSystemGetProcessName": {4_000_001: "python\x1b[31m"}}
    return seen(FakeNvml(busy, geforce(1), LOST, **names), tmp_path)


def test_gpus_their_processes_and_jobs_are_listed(machine: MachineLoad) -> None:
    lines = machine_lines(machine, 1000.0, 2.0)
    assert "  box: " in lines[0]
    assert lines[1:] == [
        "GPU 0 NVIDIA H100 80GB HBM3  97 %  20.0 of 80.0 GiB  34 C  76 W  throttled (thermal)  "
        "BAR1 1.0 of 128.0 GiB",
        "  4000001  python?[31m  5.0 GiB",
        "GPU 1 NVIDIA GeForce GT 710  0.0 of 2.0 GiB  41 C",
        "GPU 2  it has fallen off the bus",
        "",
        "JOB      PROCESS  WORKERS  REPLICAS  SINCE      DOING  FOLDER      SO FAR",
        "train-1  5        2 of 2   4         1 min 0 s  fit 1  /r/train-1",
        "hung-1 does not respond",
    ]


def test_json_and_csv_have_a_place_for_each_value(machine: MachineLoad) -> None:
    found = json.loads(machine_json(machine))
    assert found["host"]["gpus"][0]["utilization"] == 97
    assert found["jobs"][0]["job"] == "train-1"
    rows = list(csv.DictReader(io.StringIO(machine_csv_heading() + machine_csv(machine))))
    assert [row["index"] for row in rows] == ["0", "1", "2"]
    assert (rows[0]["memory_used"], rows[0]["processes"]) == (str(20 * GIB), "4000001")
    assert rows[0]["throttled"] == "thermal"
    assert (rows[1]["utilization"], rows[1]["processes"]) == ("", "")
    assert [row["bar1_used"] for row in rows] == [str(GIB), "", ""]
    assert [bool(row["fault"]) for row in rows] == [False, False, True]
    assert found["bar1"]["0"] == {"total": 128 * GIB, "used": GIB, "free": 127 * GIB}
    assert found["faults"].keys() == {"2"}


def test_the_host_is_sampled(tmp_path: Path) -> None:
    host = seen(None, tmp_path).host
    assert 0 <= host.busy <= 2 * host.cores
    assert 0 < host.memory_used < host.memory_total


def test_a_machine_without_a_gpu_says_why(tmp_path: Path) -> None:
    lines = machine_lines(seen(None, tmp_path, RunningJobs((), ())), 1000.0, 2.0)
    assert lines[1].startswith("no GPU: none on the PCI bus")
    assert lines[2:] == ["", "no job is running"]
    assert machine_csv(seen(None, tmp_path)) == ""


def test_a_driver_that_hangs_is_told(machine: MachineLoad) -> None:
    assert machine_lines(None, 1000.0, 2.0) == ["the driver of the GPUs has not answered for 10 s"]
    assert machine_lines(machine, 1012.0, 2.0)[1] == "the driver of the GPUs has not answered for 12 s"
    assert machine_lines(machine, 1003.0, 2.0)[1].startswith("GPU 0")


def test_the_machine_is_looked_at_in_a_thread(machine: MachineLoad) -> None:
    looks: list[Callable[[], object]] = []
    looked = threading.Semaphore(0)

    def look() -> MachineLoad:
        looks.append(threading.current_thread)
        looked.release()
        return machine

    watch = MachineWatch(look, 3600.0)
    assert watch.newest() is machine
    assert looked.acquire(timeout=120)
    watch.close()
