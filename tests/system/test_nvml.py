"""Readings through NVML, from a fake with scripted devices."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pynvml
import pytest

from lockstep.system.nvml import Driver, Gpu, GpuMemory, GpuReading, Process, load, read, reader

from .fake_nvml import (
    GIB,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Device,
    FakeNvml,
    geforce,
    h100,
    process,
)

NO_PID = 2**22 + 1
"""Larger than the largest id of a process."""


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """Return a PCI bus with an NVIDIA GPU, its sound device, and a GPU of another manufacturer."""
    put(tmp_path, "0000:3b:00.0", "0x10de", "0x030200")
    put(tmp_path, "0000:3b:00.1", "0x10de", "0x040300")
    put(tmp_path, "0000:00:02.0", "0x8086", "0x030000")
    return tmp_path


def put(bus: Path, address: str, vendor: str, kind: str) -> Path:
    device = bus / address
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    return device


def gpus(*devices: Device | Exception) -> tuple[Gpu, ...]:
    library = FakeNvml(*devices)
    found = read(library, Path("none")).gpus
    assert library.initialized == 0
    return found


def gpu(**answers: object) -> Gpu:
    (only,) = gpus(h100(0, **answers))
    return only


def test_all_values_of_a_gpu_are_read() -> None:
    running = [process(NO_PID + 1, 12 * GIB), process(NO_PID, 8 * GIB)]
    library = FakeNvml(
        h100(0, nvmlDeviceGetComputeRunningProcesses=running),
        nvmlSystemGetProcessName={NO_PID: "/usr/bin/python3", NO_PID + 1: b"train"},
    )
    assert read(library, Path("none")) == GpuReading(
        Driver("570.124.06", (12, 8)),
        (
            Gpu(
                0,
                "NVIDIA H100 80GB HBM3",
                "GPU-00000000-1111-2222-3333-444444444444",
                "00000000:1B:00.0",
                GpuMemory(80 * GIB, 20 * GIB, 60 * GIB),
                GpuMemory(128 * GIB, GIB, 127 * GIB),
                34,
                75.5,
                700.0,
                3,
                (Process(NO_PID, "/usr/bin/python3", 8 * GIB), Process(NO_PID + 1, "train", 12 * GIB)),
                slowdown=89,
                capability=(9, 0),
            ),
        ),
    )
    assert library.initialized == 0


def test_missing_values_and_bytes_of_an_old_gpu_are_read() -> None:
    _, old = gpus(h100(0), geforce(1))
    assert old == Gpu(
        1,
        "NVIDIA GeForce GT 710",
        "GPU-19999999-1111-2222-3333-444444444444",
        "00000000:2B:00.0",
        GpuMemory(2 * GIB, 0, 2 * GIB),
        temperature=41,
        capability=(3, 5),
    )


@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION, pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)])
@pytest.mark.parametrize("function", sorted(h100(0).answers))
def test_a_failed_query_gives_none_and_the_others_their_values(function: str, error: Exception) -> None:
    found = gpu(**{function: error})
    assert not found.fault
    assert sum(value is None for value in (found.name, found.uuid, found.memory, found.temperature)) <= 1
    whole = gpu()
    assert (found == whole) == (
        function
        in (
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetRemappedRows",
            "nvmlDeviceGetRetiredPagesPendingStatus",
            "nvmlDeviceGetMigMode",
            # The processes of the other kind are read.
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        )
    )


def test_a_library_newer_than_the_driver_is_supported() -> None:
    mismatch = pynvml.NVMLLibraryMismatchError("use a versioned function")
    found = gpu(nvmlDeviceGetComputeRunningProcesses=mismatch, nvmlDeviceGetGraphicsRunningProcesses=mismatch)
    assert found.processes is None
    assert found.temperature == 34


def test_a_missing_function_of_the_library_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "nvmlDeviceGetRemappedRows")
    assert not gpu().repair_pending


def test_a_lost_gpu_does_not_affect_the_others() -> None:
    first, lost, last = gpus(h100(0), LOST, h100(2))
    assert lost == Gpu(1, fault="it has fallen off the bus")
    assert [each.fault for each in (first, last)] == ["", ""]
    assert (first.temperature, last.index) == (34, 2)


def test_a_gpu_lost_during_a_reading_has_a_fault() -> None:
    (lost,) = gpus(h100(0, nvmlDeviceGetPowerUsage=LOST, nvmlDeviceGetTemperature=LOST))
    assert lost.fault == "it has fallen off the bus"
    assert lost.bus == "00000000:1B:00.0"
    assert lost.power is None


def test_a_gpu_that_does_not_respond_has_a_fault() -> None:
    reset, unknown, denied = gpus(
        pynvml.NVMLError(pynvml.NVML_ERROR_RESET_REQUIRED),
        pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN),
        NO_PERMISSION,
    )
    assert reset.fault == "it must be reset before it can be used again"
    assert unknown.fault == "it does not respond: Unknown Error"
    assert [each.denied for each in (reset, unknown, denied)] == [False, False, True]


def test_compute_and_graphics_processes_are_merged() -> None:
    found = gpu(
        nvmlDeviceGetComputeRunningProcesses=[process(os.getpid(), 5), process(NO_PID, None)],
        nvmlDeviceGetGraphicsRunningProcesses=[process(os.getpid(), 5), process(NO_PID + 1, 2**64 - 1)],
    )
    assert found.processes == (
        Process(os.getpid(), psutil.Process().name(), 5),
        Process(NO_PID, "", None),
        Process(NO_PID + 1, "", None),
    )


def test_the_name_of_a_process_is_safe_to_print() -> None:
    library = FakeNvml(
        h100(0, nvmlDeviceGetComputeRunningProcesses=[process(NO_PID, 1)]),
        nvmlSystemGetProcessName={NO_PID: b"a\x1b[2J\nb\xff"},
    )
    ((only,),) = [each.processes or () for each in read(library, Path("none")).gpus]
    assert only.name == "a?[2J?b\ufffd"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"nvmlDeviceGetRemappedRows": (1, 0, 1, 0)}, (True, False)),
        ({"nvmlDeviceGetRemappedRows": (1, 0, 0, 1)}, (False, True)),
        ({"nvmlDeviceGetRetiredPagesPendingStatus": 1}, (True, False)),
    ],
)
def test_defective_memory_is_read(answers: dict[str, object], expected: tuple[bool, bool]) -> None:
    found = gpu(**answers)
    assert (found.repair_pending, found.repair_failed) == expected


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, ("thermal",)),
        (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, ("thermal",)),
        (
            pynvml.nvmlClocksThrottleReasonHwSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            ("thermal",),
        ),
        (pynvml.nvmlClocksThrottleReasonGpuIdle | pynvml.nvmlClocksThrottleReasonSwPowerCap, ("power",)),
        (pynvml.nvmlClocksThrottleReasonHwSlowdown, ("hardware",)),
        (pynvml.nvmlClocksThrottleReasonGpuIdle | pynvml.nvmlClocksThrottleReasonSyncBoost, ()),
    ],
)
def test_why_the_clock_is_lowered_is_read(reason: int, expected: tuple[str, ...]) -> None:
    assert gpu(nvmlDeviceGetCurrentClocksThrottleReasons=reason).throttled == expected


def test_mig_instances_are_read() -> None:
    parts = [Device(nvmlDeviceGetUUID="MIG-1"), pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)]
    divided = {"nvmlDeviceGetMigMode": [1, 1], "nvmlDeviceGetMaxMigDeviceCount": 2}
    assert gpu(**divided, instances=parts).instances == ("MIG-1",)
    assert gpu(**divided, instances=parts[1:] * 2).instances == ()
    assert gpu().instances is None


def test_a_driver_without_a_cuda_version() -> None:
    unknown = FakeNvml(nvmlSystemGetCudaDriverVersion_v2=NOT_SUPPORTED)
    assert read(unknown, Path("none")).driver == Driver("570.124.06", None)
    older = FakeNvml(nvmlSystemGetCudaDriverVersion_v2=NOT_SUPPORTED, nvmlSystemGetCudaDriverVersion=11040)
    assert read(older, Path("none")).driver == Driver("570.124.06", (11, 4))


@pytest.mark.parametrize("kind", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED"])
def test_a_missing_driver_without_a_gpu_is_no_problem(kind: str) -> None:
    library = FakeNvml(refusal=pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{kind}")))
    assert read(library, Path("none")) == GpuReading(None, (), "none on the PCI bus, and no driver")


@pytest.mark.parametrize(
    ("kind", "missing", "remedy"),
    [
        ("LIBRARY_NOT_FOUND", "not installed", "install NVIDIA's driver"),
        ("DRIVER_NOT_LOADED", "not loaded", "sudo modprobe nvidia"),
        ("LIB_RM_VERSION_MISMATCH", "and its library differ", "reboot"),
        ("NO_PERMISSION", "this user may not use", "/dev/nvidiactl"),
        ("UNKNOWN", "does not respond: Unknown Error", "nvidia-smi"),
    ],
)
def test_a_gpu_without_a_working_driver_is_a_problem(pci: Path, kind: str, missing: str, remedy: str) -> None:
    library = FakeNvml(refusal=pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{kind}")))
    found = read(library, pci)
    assert found.missing.startswith("there is an NVIDIA device (0000:3b:00.0), but ")
    assert missing in found.missing
    assert remedy in found.remedy


@pytest.mark.parametrize("kind", ["LIB_RM_VERSION_MISMATCH", "NO_PERMISSION", "UNKNOWN"])
def test_a_refusal_of_the_driver_is_always_reported(kind: str) -> None:
    library = FakeNvml(refusal=pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{kind}")))
    assert read(library, Path("none")).remedy


def test_a_gpu_that_the_driver_does_not_support(pci: Path) -> None:
    found = read(FakeNvml(), pci)
    assert found.driver is not None
    assert found.missing.endswith("but the driver does not support it")
    assert read(FakeNvml(), Path("none")) == GpuReading(found.driver)


def test_a_gpu_passed_through_to_a_virtual_machine_is_ignored(pci: Path) -> None:
    (pci / "drivers" / "vfio-pci").mkdir(parents=True)
    (pci / "0000:3b:00.0" / "driver").symlink_to("../drivers/vfio-pci")
    assert not read(FakeNvml(refusal=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)), pci).remedy


def test_a_missing_pynvml_is_reported(pci: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(None, pci).remedy == "pip install nvidia-ml-py"
    nothing = read(None, Path("none"))
    assert nothing.missing.endswith("is not installed: pip install nvidia-ml-py")
    assert not nothing.remedy
    assert load() is pynvml
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load() is None


def test_the_driver_stays_initialized_between_readings() -> None:
    library = FakeNvml(h100(0))
    with reader(library, Path("none")) as look:
        assert library.initialized == 1
        assert look() == look()
        assert library.initialized == 1
    assert library.initialized == 0


def test_a_reader_without_a_driver_or_pynvml(pci: Path) -> None:
    refusing = FakeNvml(refusal=pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    for library in (refusing, None):
        with reader(library, pci) as look:
            assert look() == read(library, pci)
    assert refusing.initialized == 0


def test_nvml_is_shut_down_after_an_error() -> None:
    library = FakeNvml(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        read(library, Path("none"))
    assert library.initialized == 0


def test_this_machine_can_be_read() -> None:
    found = read(load())
    assert bool(found.gpus) <= (found.driver is not None)


def test_the_module_does_not_import_pynvml() -> None:
    script = "import sys, lockstep.system.nvml; print('pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
