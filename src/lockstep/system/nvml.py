"""Reads the GPUs of this machine through NVML, NVIDIA's library, which comes with the driver."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.system.prose import printable

PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_PASSTHROUGH = "vfio-pci"
"""The driver of GPUs that are passed through to virtual machines."""
_THROTTLES = {"thermal": 0x20 | 0x40, "power": 0x04 | 0x80, "hardware": 0x08}
"""The bits of the driver's reasons to lower a clock, without idleness and the settings of users."""
_UNKNOWN = 2**64 - 1
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""The devices through which programs reach the driver, on Linux and in Windows's Linux."""
_REFUSALS = {
    "NVMLError_LibraryNotFound": (
        "NVIDIA's driver is not installed: libnvidia-ml.so.1 is missing",
        "install NVIDIA's driver; for a container, start it with the GPUs (docker run --gpus all)",
    ),
    "NVMLError_DriverNotLoaded": (
        "NVIDIA's driver is installed, but not loaded",
        "load it: sudo modprobe nvidia; if that fails, the kernel's log (sudo dmesg) contains the reason",
    ),
    "NVMLError_LibRmVersionMismatch": (
        "the versions of the loaded driver and its library differ: the driver was updated after loading",
        "reboot; in a container, restart the container",
    ),
    "NVMLError_NoPermission": (
        "this user may not use NVIDIA's driver",
        "ask for access to /dev/nvidiactl and /dev/nvidia0, or for GPUs for the job",
    ),
}
_WITHOUT_DEVICE = ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
"""Errors that are normal on a machine without a GPU."""
_NONE = "none on the PCI bus"
_LOST = {
    "NVMLError_GpuIsLost": "it has fallen off the bus",
    "NVMLError_ResetRequired": "it must be reset before it can be used again",
}


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU, in bytes."""

    total: int
    used: int
    free: int


@dataclass(frozen=True)
class Process:
    """A process on a GPU.

    Attributes:
        pid: its id.
        name: its name; empty if unknown.
        memory: bytes of the GPU's memory that it uses; None if unknown.
    """

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU; values that it does not report are None.

    Attributes:
        index: its NVML index, in the order of the PCI bus.
        name: the name of the model.
        uuid: its UUID, as `CUDA_VISIBLE_DEVICES` accepts it.
        bus: its PCI address.
        memory: its own memory, also called FB.
        bar1: the part of the memory that other devices on the PCI bus can address.
        temperature: its temperature, in degrees Celsius.
        power: its power, in watts.
        power_limit: the limit on its power, in watts.
        utilization: the percentage of the time in which a program computed on it.
        processes: the processes that use it, if this process may see them.
        fault: why it cannot be used; empty if it can.
        denied: whether the only fault is a lack of permission.
        slowdown: the temperature, in degrees Celsius, from which on it throttles.
        throttled: why its clock is lowered: because of `thermal`, `power` or `hardware` limits.
        repair_pending: whether the replacement of a defective part of its memory is pending.
        repair_failed: whether the replacement of a defective part of its memory failed.
        capability: its CUDA compute capability.
        instances: the UUIDs of its MIG instances; None if it is not partitioned.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    bus: str | None = None
    memory: GpuMemory | None = None
    bar1: GpuMemory | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    utilization: int | None = None
    processes: tuple[Process, ...] | None = None
    fault: str = ""
    denied: bool = False
    slowdown: int | None = None
    throttled: tuple[str, ...] = ()
    repair_pending: bool = False
    repair_failed: bool = False
    capability: tuple[int, int] | None = None
    instances: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver.

    Attributes:
        version: its version.
        cuda: the newest CUDA version that it fully supports; None if it does not report one.
    """

    version: str
    cuda: tuple[int, int] | None


@dataclass(frozen=True)
class GpuReading:
    """The driver's data.

    Attributes:
        driver: the driver; None if it does not answer.
        gpus: the GPUs, in the order of their indices.
        missing: why there is no driver or no GPU.
        remedy: the remedy; empty if nothing needs to be done.
    """

    driver: Driver | None
    gpus: tuple[Gpu, ...] = ()
    missing: str = ""
    remedy: str = ""


def load() -> Any | None:
    """Return the module pynvml, or None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def driver_is_present() -> bool:
    """Whether this process could find NVIDIA's driver; costs less than asking it."""
    return any(device.exists() for device in _DEVICES)


def read(library: Any | None, pci: Path = PCI) -> GpuReading:
    """Take one reading.

    Args:
        library: the module pynvml; None if it is not installed.
        pci: the folder of the devices on the PCI bus.
    """
    devices = _devices(pci)
    if library is None:
        install = "pip install nvidia-ml-py"
        why = "nvidia-ml-py, which reads the driver's data, is not installed"
        if devices:
            return _nothing(devices, why, install)
        return GpuReading(None, (), f"{_NONE}, and {why}: {install}")
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return _without_driver(error, devices)
    try:
        return _with_driver(library, devices)
    finally:
        with suppress(library.NVMLError):
            library.nvmlShutdown()


@contextmanager
def reader(library: Any | None, pci: Path = PCI) -> Iterator[Callable[[], GpuReading]]:
    """Yield a faster function like `read`: the driver stays initialized between readings."""
    initialized = False
    if library is not None:
        with suppress(library.NVMLError):
            library.nvmlInit()
            initialized = True
    try:
        yield lambda: read(library, pci)
    finally:
        if library is not None and initialized:
            with suppress(library.NVMLError):
                library.nvmlShutdown()


class _Queries:
    """Queries of NVML.

    Attributes:
        fault: why the GPU cannot be used, according to the answers so far; empty if it can.
    """

    def __init__(self, library: Any) -> None:
        self.fault = ""
        self._library = library
        # NVML raises the second one if the library is newer than the driver.
        self._errors = (library.NVMLError, getattr(library, "NVMLLibraryMismatchError", library.NVMLError))

    def query(self, function: str, *arguments: Any) -> Any:
        """Return the result of a function, or None if the device, driver or library does not support it."""
        if not hasattr(self._library, function):
            return None
        try:
            return getattr(self._library, function)(*arguments)
        except self._errors as error:
            self.fault = self.fault or _LOST.get(type(error).__name__, "")
        except UnicodeDecodeError:
            pass
        return None

    def text(self, function: str, *arguments: Any) -> str | None:
        """Return a text result as one line that is safe to print."""
        answer = self.query(function, *arguments)
        return None if answer is None else _plain(answer)


def _without_driver(error: Exception, devices: tuple[str, ...]) -> GpuReading:
    kind = type(error).__name__
    other = (f"NVIDIA's driver does not respond: {error}", "check the output of nvidia-smi")
    why, remedy = _REFUSALS.get(kind, other)
    if devices or kind not in _WITHOUT_DEVICE:
        return _nothing(devices, why, remedy)
    return GpuReading(None, (), f"{_NONE}, and no driver")


def _nothing(devices: tuple[str, ...], why: str, remedy: str, driver: Driver | None = None) -> GpuReading:
    present = f"there is an NVIDIA device ({', '.join(devices)}), but " if devices else ""
    return GpuReading(driver, (), f"{present}{why}", remedy)


def _with_driver(library: Any, devices: tuple[str, ...]) -> GpuReading:
    queries = _Queries(library)
    version = queries.text("nvmlSystemGetDriverVersion") or "of an unknown version"
    # The first function returns the CUDA version that programs find; it may be newer than the driver's own.
    names = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
    number = next((answer for answer in map(queries.query, names) if answer), None)
    driver = Driver(version, None if number is None else (number // 1000, number % 1000 // 10))
    gpus = tuple(_gpu(library, index) for index in range(queries.query("nvmlDeviceGetCount") or 0))
    if devices and not gpus:
        remedy = "the kernel's log contains the reason: sudo dmesg | grep -i nvrm"
        return _nothing(devices, "the driver does not support it", remedy, driver)
    return GpuReading(driver, gpus)


def _gpu(library: Any, index: int) -> Gpu:
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
    except library.NVMLError as error:
        if type(error).__name__ == "NVMLError_NoPermission":
            return Gpu(index, fault="this process may not use it", denied=True)
        return Gpu(index, fault=_LOST.get(type(error).__name__, f"it does not respond: {error}"))
    queries = _Queries(library)
    query, text = queries.query, queries.text
    bus, rates = query("nvmlDeviceGetPciInfo", handle), query("nvmlDeviceGetUtilizationRates", handle)
    _, _, pending, failed = query("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    kind = query("nvmlDeviceGetCudaComputeCapability", handle)
    return Gpu(
        index,
        name=text("nvmlDeviceGetName", handle),
        uuid=text("nvmlDeviceGetUUID", handle),
        bus=None if bus is None else _plain(bus.busId),
        memory=_memory(query("nvmlDeviceGetMemoryInfo", handle)),
        bar1=_memory(query("nvmlDeviceGetBAR1MemoryInfo", handle), "bar1Total", "bar1Used", "bar1Free"),
        temperature=query("nvmlDeviceGetTemperature", handle, library.NVML_TEMPERATURE_GPU),
        power=_watts(query("nvmlDeviceGetPowerUsage", handle)),
        power_limit=_watts(query("nvmlDeviceGetEnforcedPowerLimit", handle)),
        utilization=None if rates is None else int(rates.gpu),
        processes=_processes(queries, handle),
        slowdown=query(
            "nvmlDeviceGetTemperatureThreshold", handle, library.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        ),
        throttled=_throttles(query("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0),
        repair_pending=bool(pending or query("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
        repair_failed=bool(failed),
        capability=None if kind is None else (int(kind[0]), int(kind[1])),
        instances=_instances(queries, handle),
        # This must be the last argument: each query above may set the fault.
        fault=queries.fault,
    )


def _throttles(reasons: int) -> tuple[str, ...]:
    names = tuple(name for name, bits in _THROTTLES.items() if reasons & bits)
    # The driver also sets the hardware bit for heat.
    return tuple(name for name in names if name != "hardware") or names


def _processes(queries: _Queries, handle: Any) -> tuple[Process, ...] | None:
    """Return the compute and graphics processes, sorted by id, or None if the GPU reports neither."""
    kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    answer = [running for running in (queries.query(kind, handle) for kind in kinds) if running is not None]
    if not answer:
        return None
    memory: dict[int, int | None] = {}
    for process in (process for running in answer for process in running):
        # A process of both kinds is listed twice, with the same memory.
        used = None if process.usedGpuMemory == _UNKNOWN else process.usedGpuMemory
        memory[process.pid] = _most((memory.get(process.pid), used))
    return tuple(Process(pid, _name(queries, pid), used) for pid, used in sorted(memory.items()))


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _name(queries: _Queries, pid: int) -> str:
    # Imported late, because agents start faster without it.
    import psutil

    try:
        return _plain(psutil.Process(pid).name())
    except psutil.Error:
        return queries.text("nvmlSystemGetProcessName", pid) or ""


def _instances(queries: _Queries, handle: Any) -> tuple[str, ...] | None:
    now, _ = queries.query("nvmlDeviceGetMigMode", handle) or (0, 0)
    if not now:
        return None
    indices = range(queries.query("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    handles = [queries.query("nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in indices]
    names = [queries.text("nvmlDeviceGetUUID", instance) for instance in handles if instance is not None]
    return tuple(name for name in names if name is not None)


def _memory(answer: Any, total: str = "total", used: str = "used", free: str = "free") -> GpuMemory | None:
    return (
        None if answer is None else GpuMemory(*(int(getattr(answer, name)) for name in (total, used, free)))
    )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _plain(answer: str | bytes) -> str:
    # Any user can choose the name of a process.
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else answer
    return printable(text)


def _devices(pci: Path) -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA's GPUs that are not passed through to virtual machines."""
    if not pci.is_dir():
        return ()
    return tuple(sorted(device.name for device in pci.iterdir() if _is_gpu(device)))


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    is_passed = (device / "driver").resolve().name == _PASSTHROUGH
    return vendor == _NVIDIA and kind.startswith(_DISPLAY) and not is_passed
