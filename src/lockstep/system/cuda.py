"""The GPUs that CUDA shows on a machine, and the CUDA versions that a driver supports."""

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from lockstep.errors import UnfitError
from lockstep.system import nvml
from lockstep.system.nvml import Driver, Gpu
from lockstep.system.prose import count

LISTED = "CUDA_VISIBLE_DEVICES"
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
"""The folder in which NVIDIA's driver has one entry for each GPU, except on WSL and Jetson."""
OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""For each CUDA version, the first driver that supports all of its minor versions."""
_MINORS_SINCE = 11
_NUMBER = re.compile(r"\+?[0-9]+")
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/nvmap"), Path("/dev/dxg"), Path("/dev/kfd"), GPU_FOLDER)
"""The files of drivers of GPUs: NVIDIA's on servers, on Jetson and on WSL, and AMD's."""
_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu\d+)?[^;]*?>?==?(\d+\.\d+)")
_LOCAL = re.compile(r"\+cu(\d+)(\d)$")
_PATIENCE = 30.0
"""Seconds in which the driver answers, before a job begins."""
_BUILDS = {"tensorflow": ("tensorflow",), "torch": ("torch",)}

Reading = TypeVar("Reading")


class Visibility(NamedTuple):
    """CUDA's interpretation of the value.

    Attributes:
        indices: the indices of the GPUs that CUDA shows, in its order.
        problem: the entry that CUDA does not accept; empty if it accepts all.
        by_number: whether the value contains numbers.
        names: a name for each device that a process can use: of each instance if a GPU is partitioned.
        identities: for each name, the full name of the device; equal for two names of one device.
    """

    indices: tuple[int, ...]
    problem: str
    by_number: bool
    names: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()


class Machine(NamedTuple):
    """The GPUs of this machine.

    Attributes:
        gpus: those that this process may use; None if no driver lists them.
        driver: NVIDIA's driver; None if it does not answer.
    """

    gpus: tuple[Gpu, ...] | None
    driver: Driver | None = None


def read_machine(folder: Path = GPU_FOLDER) -> Machine:
    """Return the GPUs of this machine.

    Raises:
        UnfitError: the driver hangs.
    """
    return in_time(partial(ask_driver, folder))


def ask_driver(folder: Path = GPU_FOLDER) -> Machine:
    """Return the GPUs of this machine, from its driver if there is one; may hang."""
    reading = nvml.read(nvml.load()) if nvml.driver_is_present() else None
    if reading is not None and reading.gpus:
        return Machine(tuple(gpu for gpu in reading.gpus if not gpu.denied), reading.driver)
    listed = len(list(folder.iterdir())) if folder.is_dir() else 0
    if listed or not any(path.exists() for path in _DRIVERS):
        return Machine(tuple(map(Gpu, range(listed))))
    return Machine(None)


def names_in(listed: str) -> tuple[str, ...]:
    """Return the names in a value of `CUDA_VISIBLE_DEVICES`, up to one that hides the rest."""
    names = [name.strip() for name in listed.split(",")]
    # "-1" and "" are common ways to hide GPUs.
    hidden = next((at for at, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return tuple(names[:hidden])


def shown_gpus(listed: str | None, gpus: Sequence[Gpu] | None) -> Visibility:
    """Return what CUDA shows for the value `listed`; if no GPU is known, all names count.

    Args:
        listed: the value of `CUDA_VISIBLE_DEVICES`; None if it is not set.
        gpus: all GPUs of this machine; None if no driver lists them.
    """
    if listed is None or gpus:
        return visibility(gpus or (), listed)
    names = names_in(listed)
    return Visibility((), "", False, names, names)


class LimitedReader(Generic[Reading]):
    """Reads GPUs for a limited time, because a driver that has lost a GPU may hang.

    While a reading hangs, there is neither another one nor another wait.

    Args:
        read: asks the driver.
    """

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._reading: threading.Thread | None = None

    def within(self, seconds: float) -> Reading | None:
        """Return the answer, or None if that takes longer."""
        if self._reading is not None and self._reading.is_alive():
            return None
        readings: list[Reading] = []
        self._reading = threading.Thread(target=lambda: readings.append(self._read()), daemon=True)
        self._reading.start()
        self._reading.join(seconds)
        return readings[0] if readings else None


def in_time(read: Callable[[], Reading], seconds: float = _PATIENCE) -> Reading:
    """Return what `read` returns, which asks the driver.

    Raises:
        UnfitError: that takes longer than `seconds`.
    """
    if (reading := LimitedReader(read).within(seconds)) is None:
        raise UnfitError(
            f"NVIDIA's driver hangs: no answer within {seconds:g} s, as after the loss of a GPU; if "
            "nvidia-smi hangs too, reboot; sudo dmesg | grep -i xid shows why"
        )
    return reading


def visibility(gpus: Sequence[Gpu], listed: str | None) -> Visibility:
    """Return which of `gpus`, all GPUs of the machine, CUDA shows for the value `listed`.

    CUDA stops at the first unknown name, and shows no GPU if one is listed twice. A process can use one
    instance of a partitioned GPU; its number stands for the first one.
    """
    if listed is None:
        every = [pair for index in range(len(gpus)) for pair in _devices(gpus, index)]
        all_names, identities = tuple(name for name, _ in every), tuple(full for _, full in every)
        return Visibility(tuple(range(len(gpus))), "", False, all_names, identities)
    names = [name.strip() for name in listed.split(",")]
    by_number = _kind(names[0]) == "number"
    shown: dict[str, tuple[int, str]] = {}
    problem = ""
    # "-1" and "" are common ways to hide GPUs.
    hidden = next((at for at, name in enumerate(names) if name.startswith("-")), len(names))
    for name in names[:hidden] if any(names) else ():
        if _kind(name) != _kind(names[0]):
            problem = f"{name!r} and {names[0]!r} are names of different kinds, and CUDA stops there"
            break
        matches = _find(name, gpus)
        if len(matches) != 1:
            identified = f"{'several' if matches else 'none'} of the {count(len(gpus), 'GPU')} here"
            if by_number and not matches and int(name) < len(gpus):
                identified = "a GPU that is partitioned (MIG) and has no instance"
            problem = f"{name!r} identifies {identified}, and CUDA stops there"
            break
        ((identity, index),) = matches
        if identity in shown:
            return Visibility((), f"{name!r} is listed twice, which CUDA treats as an error", by_number)
        shown[identity] = index, name
    return Visibility(
        tuple(index for index, _ in shown.values()),
        problem,
        by_number,
        tuple(name for _, name in shown.values()),
        tuple(shown),
    )


def _devices(gpus: Sequence[Gpu], index: int) -> list[tuple[str, str]]:
    """Return a name and the full name of each device of a GPU that a process can use."""
    gpu = gpus[index]
    if gpu.instances is not None:
        return [(instance, instance) for instance in gpu.instances]
    return [(str(index), gpu.uuid or str(index))]


def _find(name: str, gpus: Sequence[Gpu]) -> list[tuple[str, int]]:
    """Return the full names, and the indices of their GPUs, that `name` may refer to."""
    if digits := _NUMBER.match(name):
        # CUDA also uses the number at the beginning of a name.
        number = int(digits[0])
        return [(full, number) for _, full in _devices(gpus, number)[:1]] if number < len(gpus) else []
    return [
        (identity, index)
        for index, gpu in enumerate(gpus)
        for identity in ((gpu.uuid or "",) if _kind(name) == "GPU" else gpu.instances or ())
        if name and identity.startswith(name)
    ]


def _kind(name: str) -> str:
    if _NUMBER.match(name):
        return "number"
    return "MIG" if name.startswith("MIG-") else "GPU"


def faults_of(names: Sequence[str], gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return why GPUs cannot be used, by name; those without a fault are left out.

    Args:
        names: names of GPUs, as workers have them.
        gpus: the GPUs of this machine.
    """
    # A lost GPU may no longer report its UUID.
    nameless = next((gpu for gpu in gpus if gpu.fault and not gpu.uuid), None)
    faults = {}
    for name in names:
        matching = [gpus[index] for index in visibility(gpus, name).indices]
        gpu = matching[0] if matching else nameless
        if gpu is not None and gpu.fault:
            described = " at ".join(filter(None, (gpu.name, gpu.bus)))
            faults[name] = f"GPU {name}{f' ({described})' if described else ''}: {gpu.fault}"
    return faults


def supports(driver: Driver, wanted: tuple[int, ...]) -> bool:
    """Return whether a driver runs programs that were built for a CUDA version.

    It runs those for its own CUDA version, for every older one, and for newer ones of the same major version.
    """
    if not wanted or (driver.cuda is not None and wanted <= driver.cuda):
        return True
    if wanted[0] < _MINORS_SINCE or (driver.cuda is not None and wanted[0] > driver.cuda[0]):
        return False
    return numbers(driver.version) >= numbers(OLDEST_DRIVERS.get(wanted[0], ""))


def remedy_of_driver(backend: str, wanted: tuple[int, ...], driver: Driver) -> str:
    """Return what to do about a driver that does not support a backend's CUDA version."""
    oldest = OLDEST_DRIVERS.get(wanted[0])
    remedy = f"install a driver, {oldest} or newer" if oldest else "install a newer driver"
    return remedy + (f", or a {backend} built for CUDA {driver.cuda[0]}" if driver.cuda else "")


def too_old(driver: Driver | None, backend: str, cuda: str | None) -> str:
    """Return a message if the driver is too old for a backend, or an empty string.

    Args:
        driver: the driver; None if it does not answer.
        backend: the name of the backend.
        cuda: the CUDA version that it was built for; None if it is unknown, or built without CUDA.
    """
    wanted = numbers(cuda or "")[:2]
    if driver is None or supports(driver, wanted):
        return ""
    limit = f", for CUDA up to {dotted(driver.cuda)}" if driver.cuda else ""
    return (
        f"{backend} is built for CUDA {cuda}, which the driver, {driver.version}{limit}, does not support: "
        f"{remedy_of_driver(backend, wanted, driver)}"
    )


def cuda_of(backend: str) -> str | None:
    """Return the CUDA version that an installed backend was built for, from its packages.

    None if it was built without CUDA, or if its packages do not name the version.
    """
    if backend == "jax":
        # JAX uses CUDA through a plugin.
        return next((major for major in ("13", "12") if version_of(f"jax-cuda{major}-plugin")), None)
    for distribution in _BUILDS.get(backend, ()):
        version = version_of(distribution)
        if version is None:
            continue
        if local := _LOCAL.search(version):
            return f"{local[1]}.{local[2]}"
        from importlib import metadata

        needed = (_RUNTIME.match(text.replace(" ", "")) for text in metadata.requires(distribution) or ())
        return next((match[1] for match in needed if match), None) if "+" not in version else None
    return None


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    # Imported late, because commands start faster without it.
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def dotted(version: tuple[int, int]) -> str:
    """Return "12.8"."""
    return f"{version[0]}.{version[1]}"


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers in a version."""
    return tuple(map(int, re.findall(r"[0-9]+", version)))
