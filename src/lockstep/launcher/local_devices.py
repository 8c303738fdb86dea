"""One process a device of this machine: which devices are meant, and how a script is started once for each.

Everything is pure but `restart_once_a_device`.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError
from lockstep.system import invocation
from lockstep.system.environment import hide_gpus, visible_gpus
from lockstep.system.notes import flush_streams, note
from lockstep.system.prose import count
from lockstep.worker import job

_NAME = re.compile(r"/?(?:device:)?(CPU|GPU):(\d+)", re.ASCII | re.IGNORECASE)
_USE_LAUNCH = (
    "MirroredStrategy trains on several devices by starting the script once per device, and this "
    "process has no script to start; in a notebook or an interactive session, pass "
    "lockstep.launch a function that creates the strategy and trains"
)


@dataclass(frozen=True)
class Restart:
    """A script is to be started again, once a device.

    Attributes:
        what: the devices, for a person.
        options: of `lockstep run`.
        hides_gpus: whether the workers must see no GPU.
    """

    what: str
    options: tuple[str, ...]
    hides_gpus: bool


def restart_once_a_device(devices: Sequence[str] | None) -> None:
    """Return if this process is to compute by itself; else become the command that has a worker a device.

    It returns in a worker of a job, whose command has decided, and in a program by itself that needs one
    device only: the one that it takes anyhow. Otherwise the script is started again, from its beginning, by
    `lockstep run` in the place of this process.

    Args:
        devices: names such as "GPU:0"; None for all visible GPUs.

    Raises:
        ConfigError: `devices` cannot be meant, or there is no script to start again.
    """
    if job.is_worker():
        _note_on_rule(devices, job.current())
        return
    restart = decide(devices, visible_gpus())
    if restart is None:
        return
    own = invocation.own()
    if own is None:
        raise ConfigError(_USE_LAUNCH)
    arguments = ("run", *restart.options, *own.command)
    note(
        f"MirroredStrategy on {restart.what}: starting the script once per device, as by "
        f"lockstep {shlex.join(arguments)}"
    )
    if restart.hides_gpus:
        hide_gpus()
    flush_streams()
    os.execv(sys.executable, (sys.executable, "-P", "-m", "lockstep", *arguments))


def decide(devices: Sequence[str] | None, gpus: Sequence[str]) -> Restart | None:
    """Return how to start the script again; None if a single process takes the device by itself.

    Args:
        devices: what was asked for; None for all of `gpus`.
        gpus: the visible ones, as CUDA names them.

    Raises:
        ConfigError: `devices` is empty, has something twice, or that is no device, or a GPU that is not
            visible, or both CPUs and GPUs.
    """
    kind, numbers = ("GPU", list(range(len(gpus)))) if devices is None else _parse(devices, gpus)
    # A process by itself takes the first GPU, or the CPU where there is none.
    if len(numbers) < 2 and (not gpus or (kind == "GPU" and numbers == [0])):
        return None
    options = ["-n", str(len(numbers))]
    if kind == "GPU" and numbers != list(range(len(gpus))):
        options += ["--devices", ",".join(gpus[number] for number in numbers)]
    return Restart(
        f"{count(len(numbers), kind)} ({', '.join(f'{kind}:{number}' for number in numbers)})",
        tuple(options),
        kind == "CPU" and bool(gpus),
    )


def _parse(devices: Sequence[str], gpus: Sequence[str]) -> tuple[str, list[int]]:
    where = f"MirroredStrategy(devices={devices!r})"
    if not devices:
        raise ConfigError(f"{where} names no device; leave `devices` out for all visible GPUs")
    found = [_parse_one(where, name) for name in devices]
    for at, name in enumerate(devices):
        if found[at] in found[:at]:
            raise ConfigError(f"{where}: {name} is listed twice; one worker computes on each device")
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1:
        raise ConfigError(
            f"{where} has both CPUs and GPUs, whose results differ in their bits; name only one kind"
        )
    kind = kinds.pop()
    for name, (_, number) in zip(devices, found, strict=True):
        if kind == "GPU" and number >= len(gpus):
            raise ConfigError(f"{where}: {name} is not visible here; {_what_is_visible(gpus)}")
    return kind, [number for _, number in found]


def _parse_one(where: str, name: str) -> tuple[str, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"{where}: {name!r} is not a device; write GPU:0, /gpu:0, /device:GPU:0 or CPU:0")
    return match[1].upper(), int(match[2])


def _what_is_visible(gpus: Sequence[str]) -> str:
    if not gpus:
        return "no GPU is"
    return "GPU:0 is" if len(gpus) == 1 else f"GPU:0 to GPU:{len(gpus) - 1} are"


def _note_on_rule(devices: Sequence[str] | None, mine: job.Job) -> None:
    replicas = mine.view.replicas
    if devices is not None and len(devices) != replicas and mine.is_chief:
        note(
            f"MirroredStrategy names {count(len(devices), 'device')}, but this job has "
            f"{count(replicas, 'replica')}: in a worker, --workers and --devices decide"
        )
