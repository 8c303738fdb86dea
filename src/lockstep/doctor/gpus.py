"""The GPUs: the driver's report on them, which of them CUDA shows, and whether jobs can use them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from lockstep.doctor.check import Finding, Rating, Sources, fine, warning
from lockstep.system.cuda import (
    LISTED,
    OLDEST_DRIVERS,
    Visibility,
    dotted,
    numbers,
    remedy_of_driver,
    supports,
    visibility,
)
from lockstep.system.nvml import Driver, Gpu, GpuMemory, GpuReading, Process
from lockstep.system.prose import count

_ORDER = "PCI_BUS_ID"
_GIB = 2**30
_LEAST_FREE = 0.1
"""The fraction of a GPU's memory below which free memory is too little for training."""
_ON_CPU = "workers compute on the CPU"
_OLDEST_KINDS = {11: (3, 5), 12: (5, 0), 13: (7, 5)}
"""For each CUDA version, the lowest compute capability that it supports."""
_OLDEST_INSTALLED = 12
"""The oldest CUDA version that backends are still built for."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs, and the variables that choose among them.

    Attributes:
        reading: the driver's data.
        listed: the value of `CUDA_VISIBLE_DEVICES`; None if it is not set.
        order: the value of `CUDA_DEVICE_ORDER`; None if it is not set.
    """

    reading: GpuReading
    listed: str | None = None
    order: str | None = None

    @property
    def permitted(self) -> list[Gpu]:
        """The GPUs that this process may use: CUDA does not count others."""
        return [gpu for gpu in self.reading.gpus if not gpu.denied]

    @property
    def visible(self) -> Visibility:
        """Which of the permitted GPUs CUDA shows."""
        return visibility(self.permitted, self.listed)

    @property
    def shown(self) -> list[int]:
        """The driver's numbers of the GPUs that CUDA shows."""
        return [self.permitted[index].index for index in self.visible.indices]


def look_at_gpus(sources: Sources) -> Gpus:
    """Ask the driver for its GPUs."""
    environment = sources.environment
    return Gpus(sources.gpus(), environment.get(LISTED), environment.get("CUDA_DEVICE_ORDER"))


def judge_driver(gpus: Gpus) -> Iterator[Finding]:
    """Name the driver, if there is one."""
    if (driver := gpus.reading.driver) is not None:
        reason = f"{driver.version}, for CUDA up to {dotted(driver.cuda)}" if driver.cuda else driver.version
        yield fine(reason, asdict(driver))


def judge_absence(gpus: Gpus) -> Iterator[Finding]:
    """Judge a machine without GPUs."""
    if not gpus.reading.gpus:
        rating = Rating.WARNING if gpus.reading.remedy else Rating.FINE
        yield Finding(rating, absence(gpus.reading), gpus.reading.remedy)


def judge_list(gpus: Gpus) -> Iterator[Finding]:
    """Judge whether `CUDA_VISIBLE_DEVICES` shows the GPUs that it names."""
    listed, permitted, shown = gpus.listed, gpus.permitted, gpus.shown
    if listed is None or not permitted:
        return
    problem, by_number = gpus.visible.problem, gpus.visible.by_number
    names = "GPU " + " and ".join(map(str, shown)) if shown else "no GPU"
    facts = {"listed": listed, "shown": shown}
    is_mixed = len({gpu.name for gpu in permitted}) > 1 and gpus.order != _ORDER
    if problem:
        remedy = (
            f"name numbers from 0 to {len(permitted) - 1}, or UUIDs as nvidia-smi -L shows them, each once"
        )
        yield warning(f"{problem}: it shows {names}", remedy, facts)
    elif by_number and is_mixed and shown != [gpu.index for gpu in permitted]:
        reason = (
            f"{listed!r} may name different GPUs from those below: if models differ, CUDA counts the fastest "
            "first"
        )
        yield warning(reason, f"set CUDA_DEVICE_ORDER={_ORDER}, or name UUIDs", facts)
    else:
        yield fine(f"{listed!r} shows {names}" + ("" if shown else f": {_ON_CPU}"), facts)


def judge_gpus(gpus: Gpus) -> Iterator[Finding]:
    """Judge each GPU."""
    usable, shown = [gpu for gpu in gpus.permitted if not gpu.fault], gpus.shown
    for gpu in gpus.reading.gpus:
        yield _judge_gpu(gpu, usable, is_shown=gpu.index in shown)


def judge_build(reading: GpuReading, backend: str, cuda: str | None, cudnn: str | None) -> Finding:
    """Return the finding on whether a backend that was built for a CUDA version can use the GPUs.

    A driver runs programs for its own CUDA version, for every older one, and for newer ones of the same major
    version if it need not compile code for them. Otherwise the backend computes on the CPU, which is a
    warning.

    Args:
        reading: the driver's data.
        backend: its name.
        cuda: the CUDA version, such as "12.8", or "12" if the minor version does not matter; None if the
            backend was built without CUDA.
        cudnn: the cuDNN version, such as "9.10.2" or "91002"; None if the backend was built without cuDNN.
    """
    usable = [gpu for gpu in reading.gpus if not gpu.fault]
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    if cuda and cudnn:
        built += f" and cuDNN {_show_cudnn(cudnn)}"
    driver = reading.driver
    if driver is None or not usable:
        rating, effect, remedy = Rating.FINE, "and there is no GPU that it could use", ""
    elif cuda:
        rating, effect, remedy = _compare(backend, numbers(cuda)[:2], driver, usable)
    else:
        effect = f"so it computes on the CPU, despite {count(len(usable), 'GPU')}"
        rating, remedy = Rating.WARNING, _install(backend, driver)
    facts = {"cuda": cuda, "cudnn": cudnn, "driver": None if driver is None else asdict(driver)}
    return Finding(rating, f"{built}, {effect}", remedy, facts, f"{backend} and the driver")


def absence(reading: GpuReading) -> str:
    """Return a text on the absence of GPUs and its reason, or an empty string if there is a GPU."""
    if reading.gpus:
        return ""
    if reading.remedy:
        return f"{reading.missing}; {_ON_CPU}"
    return f"no GPU ({reading.missing}); {_ON_CPU}" if reading.missing else f"no GPU; {_ON_CPU}"


def quantities(gpu: Gpu) -> dict[str, str]:
    """Return the measurements of a GPU as texts, by heading. Values that it does not report are empty."""
    limit = "" if gpu.power_limit is None else f" of {gpu.power_limit:.0f}"
    return {
        "memory": _show_memory(gpu.memory),
        "BAR1": _show_memory(gpu.bar1),
        "temperature": "" if gpu.temperature is None else f"{gpu.temperature} C",
        "power": "" if gpu.power is None else f"{gpu.power:.0f}{limit} W",
        "utilization": "" if gpu.utilization is None else f"{gpu.utilization} %",
        "processes": "" if gpu.processes is None else ", ".join(map(_show_process, gpu.processes)) or "none",
    }


def describe(gpu: Gpu) -> str:
    """Return everything that a GPU reports, or its fault, as one text."""
    if gpu.fault:
        return ": ".join(filter(None, (title(gpu), gpu.fault)))
    values = [f"{heading} {text}" for heading, text in quantities(gpu).items() if text]
    return ", ".join([gpu.name or "an unknown model", *values])


def title(gpu: Gpu) -> str:
    """Return a GPU's model, with its location if it has a fault, if the GPU reports these."""
    return " at ".join(filter(None, (gpu.name, gpu.bus if gpu.fault else None)))


def _show_memory(memory: GpuMemory | None) -> str:
    return "" if memory is None else f"{memory.used / _GIB:.1f} of {memory.total / _GIB:.1f} GiB"


def _show_process(process: Process) -> str:
    memory = "" if process.memory is None else f" ({process.memory / _GIB:.1f} GiB)"
    return f"{process.pid} {process.name}".rstrip() + memory


def _judge_gpu(gpu: Gpu, usable: Sequence[Gpu], *, is_shown: bool) -> Finding:
    rating, reasons = Rating.FINE, [describe(gpu)]
    remedies: list[str] = []
    if gpu.denied:
        # Clusters assign some of a machine's GPUs to a job in this way.
        if not usable:
            rating = Rating.WARNING
            remedies.append(f"ask for access to /dev/nvidia{gpu.index}, or for GPUs for the job")
    elif gpu.fault:
        rating = Rating.FAILURE if is_shown else Rating.WARNING
        remedies.append("look for its Xid in the kernel's log (sudo dmesg | grep -i xid), and reboot")
        if usable and is_shown:
            remedies.append(f"until then, name the UUIDs of the others in {LISTED}")
    elif is_shown and (problems := _problems(gpu)):
        rating = Rating.WARNING
        reasons += [problem for problem, _ in problems]
        remedies += [remedy for _, remedy in problems]
    if not is_shown and not gpu.denied:
        reasons.append(f"{LISTED} hides it")
    facts = asdict(gpu) | {"shown": is_shown}
    return Finding(rating, "; ".join(reasons), "; ".join(remedies), facts, f"GPU {gpu.index}")


def _problems(gpu: Gpu) -> list[tuple[str, str]]:
    """Return the problems of a GPU with their remedies."""
    problems: list[tuple[str, str]] = []
    if gpu.instances == ():
        switch = (
            f"create instances with nvidia-smi mig, or disable MIG: sudo nvidia-smi -i {gpu.index} -mig 0"
        )
        problems.append(("MIG is enabled but no instance exists, so CUDA cannot use it", switch))
    now, limit = gpu.temperature, gpu.slowdown
    if "thermal" in gpu.throttled or (now is not None and limit is not None and now >= limit):
        since = "" if limit is None else f" (from {limit} C)"
        problems.append((f"it is throttled because it is hot{since}", "check its fans and its air flow"))
    if gpu.repair_failed:
        problems.append(("a defective part of its memory could not be replaced", "replace the GPU"))
    if gpu.repair_pending:
        reset = f"when no process uses it, sudo nvidia-smi --gpu-reset -i {gpu.index}, or reboot"
        problems.append(("a defective part of its memory is pending replacement", reset))
    if gpu.memory is not None and gpu.memory.free < _LEAST_FREE * gpu.memory.total:
        problems.append(_used_up(gpu.processes or (), gpu.memory))
    return problems


def _used_up(processes: Sequence[Process], memory: GpuMemory) -> tuple[str, str]:
    reason = f"only {memory.free / _GIB:.1f} GiB of its memory is free"
    if processes:
        reason += (
            f": {' and '.join(map(_show_process, processes))} {'uses' if len(processes) == 1 else 'use'} it"
        )
        end = (
            f"stop processes that are not needed: kill {' '.join(str(process.pid) for process in processes)}"
        )
    else:
        end = "stop the processes that use it; they may belong to another user or run in another container"
    return reason, f"{end}; or name other GPUs in {LISTED}"


def _compare(
    backend: str, wanted: tuple[int, ...], driver: Driver, usable: Sequence[Gpu]
) -> tuple[Rating, str, str]:
    if not supports(driver, wanted):
        remedy = remedy_of_driver(backend, wanted, driver)
        return Rating.WARNING, f"which the driver, {driver.version}, does not support", remedy
    oldest_kind = _OLDEST_KINDS.get(wanted[0], (0, 0)) if wanted else (0, 0)
    left = [gpu for gpu in usable if gpu.capability is not None and gpu.capability < oldest_kind]
    if left:
        names = " and ".join(sorted({gpu.name or f"GPU {gpu.index}" for gpu in left}))
        remedy = f"install a {backend} built for an older CUDA"
        return Rating.WARNING, f"which has no code for {names}", remedy
    if driver.cuda is not None and wanted > driver.cuda:
        limit = f"but the driver supports up to {dotted(driver.cuda)}"
        return Rating.FINE, f"{limit}: only code that the driver must compile (PTX) does not work", ""
    return Rating.FINE, "which the driver supports", ""


def _install(backend: str, driver: Driver) -> str:
    major = driver.cuda[0] if driver.cuda else _OLDEST_INSTALLED
    if major < _OLDEST_INSTALLED:
        oldest = OLDEST_DRIVERS[_OLDEST_INSTALLED]
        return f"install a driver, {oldest} or newer, and a {backend} built for CUDA"
    major = min(major, max(OLDEST_DRIVERS))
    ways = {
        "jax": f"pip install 'jax[cuda{major}]'",
        "tensorflow": "pip install 'tensorflow[and-cuda]'",
        "torch": f"install it for CUDA {major}, as pytorch.org/get-started describes",
    }
    return ways.get(backend, f"install a {backend} built for CUDA {major}")


def _show_cudnn(version: str) -> str:
    if not version.isdecimal() or len(version) < 4:
        return version
    # 8902 is 8.9.2; since version 9, 91002 is 9.10.2.
    major, rest = divmod(int(version), 1000 if len(version) == 4 else 10000)
    return f"{major}.{rest // 100}.{rest % 100}"
