"""Assigns GPUs to the workers of `lockstep run`. Pure."""

import re
from collections import Counter

from lockstep.errors import ConfigError
from lockstep.protocol.job_spec import Devices
from lockstep.system.environment import unknown_numbers
from lockstep.system.prose import count

# A number, or a UUID such as GPU-8932f937-... or MIG-GPU-8932f937-.../1/0.
_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+", re.ASCII)


def parse_devices(text: str, gpus: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
    """Split the value of `--devices`: a comma separates workers, `+` joins the GPUs of one worker.

    Args:
        text: the value.
        gpus: all GPUs of this machine; empty if unknown.

    Raises:
        ConfigError: a name is not that of a GPU, is a number of none of `gpus`, or is repeated in one worker.
    """
    entries = tuple(tuple(name.strip() for name in entry.split("+")) for entry in text.split(","))
    for name in (name for entry in entries for name in entry):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"--devices {text}: {name!r} is not a GPU; give numbers or UUIDs such as 0,1 (one "
                "per worker) or 0+1,2+3 (two per worker)"
            )
    for entry in entries:
        if len(set(entry)) < len(entry):
            raise ConfigError(f"--devices {text}: {'+'.join(entry)} names a GPU twice")
    for name in unknown_numbers([name for entry in entries for name in entry], gpus):
        raise ConfigError(
            f"--devices {text}: there is no GPU {name}; this machine has {count(len(gpus), 'GPU')}, numbered "
            "from 0"
        )
    return entries


def assign(entries: tuple[tuple[str, ...], ...], workers: int) -> tuple[Devices, ...]:
    """Give each worker its entry; all workers share a single entry.

    Raises:
        ConfigError: the number of entries is neither one nor that of the workers.
    """
    if len(entries) not in (1, workers):
        raise ConfigError(
            f"--devices has {len(entries)} entries for {workers} workers: give one entry per worker, or a "
            "single one for all"
        )
    mine = entries * workers if len(entries) == 1 else entries
    return _mark_shared(mine)


def spread(gpus: tuple[str, ...], workers: int) -> tuple[Devices, ...]:
    """Give each worker one of the visible GPUs; adjacent workers share one if there are too few.

    Returns:
        One entry per worker; empty if there is no GPU.
    """
    if not gpus:
        return ()
    if workers <= len(gpus):
        return _mark_shared(tuple((gpu,) for gpu in gpus[:workers]))
    return _mark_shared(tuple((gpus[worker * len(gpus) // workers],) for worker in range(workers)))


def describe_sharing(devices: tuple[Devices, ...]) -> str:
    """Return a text on the GPUs that several of the workers compute on; empty if there are none.

    Args:
        devices: the GPUs of each worker.
    """
    users = Counter(name for mine in devices for name in mine.visible.split(","))
    shared = [f"GPU {name}" for name, workers in users.items() if workers > 1]
    most = max(users.values(), default=0)
    if len(shared) < 2:
        return f"{most} workers share {shared[0]}" if shared else ""
    return f"up to {most} workers share each of {' and '.join(shared)}"


def _mark_shared(entries: tuple[tuple[str, ...], ...]) -> tuple[Devices, ...]:
    users = Counter(name for entry in entries for name in entry)
    return tuple(Devices(",".join(entry), any(users[name] > 1 for name in entry)) for entry in entries)
