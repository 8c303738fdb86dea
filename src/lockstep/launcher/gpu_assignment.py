"""Assigns GPUs to the workers of `lockstep run`. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Sequence

from lockstep.errors import ConfigError
from lockstep.protocol.job_spec import Devices
from lockstep.system.cuda import LISTED, shown_gpus, visibility
from lockstep.system.nvml import Gpu

# A number, or a UUID such as GPU-8932f937-... or MIG-GPU-8932f937-.../1/0.
_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+", re.ASCII)


def parse_devices(text: str, gpus: Sequence[Gpu] | None = None) -> tuple[tuple[str, ...], ...]:
    """Split the value of `--devices`: a comma separates workers, `+` joins the GPUs of one worker.

    Args:
        text: the value.
        gpus: all GPUs of this machine; None if unknown.

    Raises:
        ConfigError: a name is not a GPU's, does not identify one of `gpus`, or is repeated in one worker.
    """
    entries = tuple(tuple(name.strip() for name in entry.split("+")) for entry in text.split(","))
    for name in (name for entry in entries for name in entry):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"--devices {text}: {name!r} is not a GPU; give numbers or UUIDs such as 0,1 (one "
                "per worker) or 0+1,2+3 (two per worker)"
            )
    for entry in entries:
        shown = visibility(gpus, ",".join(entry)) if gpus else None
        if len(set(entry)) < len(entry) or (shown is not None and "twice" in shown.problem):
            raise ConfigError(f"--devices {text}: {'+'.join(entry)} names a GPU twice")
        if shown is not None and shown.problem:
            raise ConfigError(f"--devices {text}: {shown.problem}; nvidia-smi -L lists their names")
        if sum(name.startswith("MIG-") for name in (shown.identities if shown else entry)) > 1:
            raise ConfigError(f"--devices {text}: CUDA lets a process use only one MIG instance")
    return entries


def visible(gpus: Sequence[Gpu] | None, listed: str | None) -> tuple[tuple[str, ...], str]:
    """Return the names of the devices that workers can use, and the part that CUDA does not accept.

    Args:
        gpus: all GPUs of this machine; None if unknown.
        listed: the value of `CUDA_VISIBLE_DEVICES`; None if it is not set.

    Raises:
        ConfigError: the variable names GPUs, and CUDA accepts none of them.
    """
    shown = shown_gpus(listed, gpus)
    if not shown.problem:
        return shown.names, ""
    problem = f"{LISTED}={listed}: {shown.problem}"
    if not shown.names:
        raise ConfigError(
            f"{problem}; it shows no GPU. Name GPUs as nvidia-smi -L shows them, each once, or set it to an "
            "empty value to compute on the CPU"
        )
    return shown.names, problem


def assign(
    entries: tuple[tuple[str, ...], ...], workers: int, gpus: Sequence[Gpu] | None = None
) -> tuple[Devices, ...]:
    """Give each worker its entry; all workers share a single entry.

    Args:
        entries: the names of the GPUs of each worker.
        workers: the number of workers.
        gpus: all GPUs of this machine; None if unknown.

    Raises:
        ConfigError: the number of entries is neither one nor the number of workers, or the machine has no
            GPU.
    """
    if len(entries) not in (1, workers):
        raise ConfigError(
            f"--devices has {len(entries)} entries for {workers} workers: give one entry per worker, or a "
            "single one for all"
        )
    if gpus == ():
        text = ",".join("+".join(entry) for entry in entries)
        raise ConfigError(f"--devices {text}: this machine has no GPU (see lockstep doctor)")
    return _with_users(entries * workers if len(entries) == 1 else entries, gpus)


def spread(names: Sequence[str], workers: int, gpus: Sequence[Gpu] | None = None) -> tuple[Devices, ...]:
    """Give each worker one of the visible GPUs; adjacent workers share one if there are too few.

    Args:
        names: the visible GPUs.
        workers: the number of workers.
        gpus: all GPUs of this machine; None if unknown.

    Returns:
        One entry per worker, and one for each further GPU, for workers that start later; empty if there is no
        GPU.
    """
    if not names:
        return ()
    if workers <= len(names):
        return _with_users(tuple((name,) for name in names), gpus)
    return _with_users(tuple((names[worker * len(names) // workers],) for worker in range(workers)), gpus)


def choose(
    slot_devices: Devices,
    others: Sequence[Devices],
    used: Collection[str],
    faults: Collection[str],
    yielding: Collection[str] = (),
) -> Devices | None:
    """Return the GPUs of a worker that starts while others run, or None if only faulty ones are left.

    It gets its own GPUs, or unused ones, or some that workers share anyway. It shares GPUs that another
    worker uses alone only if it has no GPUs of its own, because that worker may have reserved all memory.

    Args:
        slot_devices: the GPUs of its slot.
        others: the GPUs of all slots.
        used: the names of GPUs that workers use now.
        faults: the names of GPUs that cannot be used.
        yielding: the names of GPUs of workers that leave. It gets these only if no others are unused, because
            such a worker may hold memory, or may have computed wrongly.
    """
    fine = [each for each in (slot_devices, *others) if not set(each.names) & set(faults)]
    unused = [each for each in fine if not set(each.names) & set(used)]
    free = [each for each in unused if not set(each.names) & set(yielding)]
    shared = [each for each in fine if each.users > 1]
    return next(iter((*free, *unused, *shared)), None)


def describe_sharing(devices: tuple[Devices, ...]) -> str:
    """Return a text on the GPUs on which several of the workers compute, or an empty string.

    Args:
        devices: the GPUs of each worker.
    """
    users = Counter(name for mine in devices for name in mine.names)
    shared = [f"GPU {name}" for name, workers in users.items() if workers > 1]
    most = max(users.values(), default=0)
    if len(shared) < 2:
        return f"{most} workers share {shared[0]}" if shared else ""
    return f"up to {most} workers share each of {' and '.join(shared)}"


def _with_users(entries: tuple[tuple[str, ...], ...], gpus: Sequence[Gpu] | None) -> tuple[Devices, ...]:
    def identity(name: str) -> str:
        return next(iter(visibility(gpus or (), name).identities), name)

    users = Counter(each for entry in entries for each in {identity(name) for name in entry})
    return tuple(Devices(",".join(entry), max(users[identity(name)] for name in entry)) for entry in entries)
