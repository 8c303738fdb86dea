"""Restarts the script of a `MirroredStrategy` with one worker per device of this host.

Everything except `restart_per_device` is pure. `lockstep.launcher.gpu_assignment` gives each worker of
`lockstep run` its GPUs.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError
from lockstep.system import invocation
from lockstep.system.child_process import command_of
from lockstep.system.environment import hide_gpus, visible_gpus
from lockstep.system.notes import note
from lockstep.system.prose import count
from lockstep.system.standard_streams import flush_streams
from lockstep.worker import job

_NAME = re.compile(r"/?(?:device:)?(CPU|GPU):(\d+)", re.ASCII | re.IGNORECASE)
_USE_LAUNCH = (
    "MirroredStrategy trains on several devices by starting the script once per device, and this "
    "process has no script to start; in a notebook or an interactive session, pass "
    "lockstep.launch a function that creates the strategy and trains"
)


@dataclass(frozen=True)
class Restart:
    """How to restart a script with one worker per device.

    Attributes:
        shown: the devices, for messages.
        options: the options of `lockstep run`.
        hides_gpus: whether GPUs are hidden from the workers.
    """

    shown: str
    options: tuple[str, ...]
    hides_gpus: bool


def restart_per_device(devices: Sequence[str] | None) -> None:
    """Return if this process needs no other worker; otherwise become a command with one worker per device.

    This returns in a worker of a job, whose command has chosen the devices, and in a plain program that needs
    only its default device. Otherwise `lockstep run` replaces this process and restarts the script from its
    beginning.

    Args:
        devices: names such as "GPU:0"; None for all visible GPUs.

    Raises:
        ConfigError: `devices` is invalid, or there is no script to restart.
    """
    if job.is_worker():
        _note_on_rule(devices, job.current())
        return
    restart = decide(devices, visible_gpus())
    if restart is None:
        return
    started_by = invocation.current_program()
    if started_by is None:
        raise ConfigError(_USE_LAUNCH)
    arguments = ("run", *restart.options, *started_by.command)
    note(
        f"MirroredStrategy on {restart.shown}: starting the script once per device, as with "
        f"lockstep {shlex.join(arguments)}"
    )
    if restart.hides_gpus:
        hide_gpus()
    flush_streams()
    os.execv(sys.executable, command_of("lockstep", *arguments))


def decide(devices: Sequence[str] | None, gpus: Sequence[str]) -> Restart | None:
    """Return how to restart the script, or None if a single process uses the device by default.

    Args:
        devices: the requested devices; None for all of `gpus`.
        gpus: the visible GPUs, as CUDA names them.

    Raises:
        ConfigError: `devices` is empty, has a duplicate, an unknown device or an invisible GPU, or mixes CPUs
            and GPUs.
    """
    kind, numbers = ("GPU", list(range(len(gpus)))) if devices is None else _parse(devices, gpus)
    # A plain process uses the first GPU, or the CPU if there is none.
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
        raise ConfigError(f"{where} names no device; omit `devices` to use all visible GPUs")
    parsed = [_parse_one(where, name) for name in devices]
    for at, name in enumerate(devices):
        if parsed[at] in parsed[:at]:
            raise ConfigError(f"{where}: {name} is listed twice; one worker computes on each device")
    kinds = {kind for kind, _ in parsed}
    if len(kinds) > 1:
        raise ConfigError(
            f"{where} has both CPUs and GPUs, whose results differ in their bits; name only one kind"
        )
    kind = kinds.pop()
    for name, (_, number) in zip(devices, parsed, strict=True):
        if kind == "GPU" and number >= len(gpus):
            raise ConfigError(f"{where}: {name} is not visible here; {_what_is_visible(gpus)}")
    return kind, [number for _, number in parsed]


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
