"""A fake of the module pynvml: its errors, constants and signatures, with scripted devices."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30
NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
NO_PERMISSION = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


class Device:
    """A GPU or a MIG instance: what each function returns or raises; other functions are not supported."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers


class FakeNvml:
    """The module. `initialized` counts initializations without a shutdown."""

    def __init__(
        self, *devices: Device | Exception, refusal: Exception | None = None, **answers: Any
    ) -> None:
        self.devices = devices
        self.refusal = refusal
        self.answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": "570.124.06",
            "nvmlSystemGetCudaDriverVersion_v2": 12080,
        } | answers
        self.initialized = 0

    def nvmlInit(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.initialized += 1

    def nvmlShutdown(self) -> None:
        self._need()
        self.initialized -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._need()
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        self._need()
        return _given(self.devices[index])

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        self._need()
        return _given(self.answers.get("nvmlSystemGetProcessName", {}).get(pid, NOT_SUPPORTED))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Device:
        self._need()
        return _given(device.answers["instances"][index])

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not name.startswith(("nvmlDevice", "nvmlSystem")):
            return real
        return self._function(name, inspect.signature(real))

    def _function(self, name: str, signature: inspect.Signature) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            self._need()
            signature.bind(*arguments)
            answers = arguments[0].answers if arguments else self.answers
            return _given(answers.get(name, NOT_SUPPORTED))

        return function

    def _need(self) -> None:
        if not self.initialized:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)


def _given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def process(pid: int, memory: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


def h100(number: int, **answers: Any) -> Device:
    """Return a GPU that reports everything."""
    values: dict[str, Any] = {
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": f"GPU-{number}0000000-1111-2222-3333-444444444444",
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=f"00000000:{number + 1}B:00.0"),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, used=20 * GIB, free=60 * GIB),
        "nvmlDeviceGetBAR1MemoryInfo": SimpleNamespace(bar1Total=128 * GIB, bar1Used=GIB, bar1Free=127 * GIB),
        "nvmlDeviceGetTemperature": 34,
        "nvmlDeviceGetTemperatureThreshold": 89,
        "nvmlDeviceGetPowerUsage": 75500,
        "nvmlDeviceGetEnforcedPowerLimit": 700000,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=3, memory=1),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetRetiredPagesPendingStatus": NOT_SUPPORTED,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
    }
    return Device(**values | answers)


def geforce(number: int, **answers: Any) -> Device:
    """Return an old GPU, which reports little, as bytes like old versions of pynvml."""
    values: dict[str, Any] = {
        "nvmlDeviceGetName": b"NVIDIA GeForce GT 710",
        "nvmlDeviceGetUUID": f"GPU-{number}9999999-1111-2222-3333-444444444444".encode(),
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=f"00000000:{number + 1}B:00.0".encode()),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=2 * GIB, used=0, free=2 * GIB),
        "nvmlDeviceGetTemperature": 41,
        "nvmlDeviceGetCudaComputeCapability": [3, 5],
    }
    return Device(**values | answers)
