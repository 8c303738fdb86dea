"""Whether each installed backend works on this machine, as reported by a process that uses it."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.doctor.finding import Finding, Rating
from lockstep.doctor.gpus import judge_build
from lockstep.system.child_process import command_of
from lockstep.system.nvml import GpuReading
from lockstep.system.programs import ProgramResult

_SECTION = "backends"
_COMMAND = shlex.join(command_of("lockstep.doctor.backend_probe"))
SMALL_PROGRAM = command_of("lockstep.keras.small_program")
"""The command that writes the time of a small program, in seconds, on the backend of `KERAS_BACKEND`."""
SLOW_SECONDS = 14.0
"""A backend that takes longer to import and compute is slow."""
_RUN_PROBE = f"run the test yourself to see its whole output: {_COMMAND} {{}}"


@dataclass(frozen=True)
class ProbeReport:
    """What a process reported about a backend before it ended.

    Attributes:
        result: how the process ended.
        built: the backend's version, and the CUDA and cuDNN it was built for; None if not reported.
        devices: the devices that the backend sees; None if not reported.
        tried: the result for each device that was tried, in order.
    """

    result: ProgramResult
    built: dict[str, str | None] | None = None
    devices: tuple[str, ...] | None = None
    tried: tuple[dict[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, result: ProgramResult) -> "ProbeReport":
        """Parse the output of `lockstep.doctor.backend_probe`."""
        built: dict[str, str | None] | None = None
        devices: tuple[str, ...] | None = None
        tried: list[dict[str, Any]] = []
        for part in _parts(result.output):
            match part:
                case {"built": {"version": _, "cuda": str() | None, "cudnn": str() | None} as found}:
                    built = found
                case {"devices": list() as found}:
                    devices = tuple(map(str, found))
                case {"device": str(), "fault": str(), "same": bool()}:
                    tried.append(part)
        return cls(result, built, devices, tuple(tried))

    @property
    def is_complete(self) -> bool:
        """Whether the process reported on all devices and succeeded."""
        devices = () if self.devices is None else self.devices
        return self.result.status == 0 and 0 < len(devices) <= len(self.tried)


def judge(
    backend: str, report: ProbeReport, reading: GpuReading, gpus: int, *, chosen: bool
) -> list[Finding]:
    """Return the findings on one backend.

    Args:
        backend: its name.
        report: of its process.
        reading: the driver's report on GPUs.
        gpus: the number of GPUs that CUDA shows.
        chosen: whether a job would use this backend.
    """
    bad = Rating.FAILURE if chosen else Rating.WARNING
    findings = []
    if report.built is not None:
        findings.append(judge_build(reading, backend, report.built["cuda"], report.built["cudnn"]))
        if report.devices is not None and report.built["cuda"] is not None and gpus:
            findings.append(_visible_gpus(backend, report.devices))
    findings += [_trial(backend, tried, bad) for tried in report.tried]
    if not report.is_complete:
        findings.append(_end(backend, report, bad))
    elif report.result.seconds > SLOW_SECONDS:
        findings.append(_slow(backend, report.result.seconds))
    return findings


def judge_limit(backend: str, limit: str, without: ProgramResult, limited: ProgramResult) -> Finding:
    """Return the finding on what a limit of the instruction set costs.

    Args:
        backend: its name.
        limit: the environment variables that set the limit.
        without: the result of `lockstep.keras.small_program`.
        limited: its result with these variables.
    """
    name = f"{backend} with fewer instructions"
    before, after = _last_number(without), _last_number(limited)
    if before is None or after is None:
        how = (without if before is None else limited).how()
        command = f"KERAS_BACKEND={backend} {limit} {shlex.join(SMALL_PROGRAM)}"
        remedy = f"run the program yourself to see its whole output: {command}"
        return Finding(_SECTION, name, Rating.WARNING, f"a small program {how}", remedy, {"limit": limit})
    ratio = after / before
    reason = f"a small program takes about {ratio:.1f} times as long with {limit}"
    return Finding(_SECTION, name, Rating.FINE, reason, "", {"limit": limit, "times": ratio})


def _last_number(result: ProgramResult) -> float | None:
    with suppress(ValueError, IndexError):
        return float(result.output.split()[-1]) if result.status == 0 else None
    return None


def _slow(backend: str, seconds: float) -> Finding:
    return Finding(
        _SECTION,
        f"{backend} is slow",
        Rating.WARNING,
        f"import and computation took {seconds:.0f} s",
        "the first import after an installation reads many files: try again; if it takes as long again, the "
        "disk or the cores are slow, and every job starts as slowly",
        {"seconds": seconds},
    )


def _visible_gpus(backend: str, devices: Sequence[str]) -> Finding:
    gpus = [device for device in devices if "cpu" not in device.lower()]
    name, facts = f"{backend} sees the GPU", {"devices": list(devices)}
    if gpus:
        return Finding(_SECTION, name, Rating.FINE, ", ".join(gpus), "", facts)
    return Finding(
        _SECTION,
        name,
        Rating.WARNING,
        f"it was built for CUDA, but sees only {', '.join(devices)}: it would compute on the CPU",
        _RUN_PROBE.format(backend),
        facts,
    )


def _trial(backend: str, tried: dict[str, Any], bad: Rating) -> Finding:
    name = f"{backend} computes on {tried['device']}"
    if tried["fault"]:
        return Finding(_SECTION, name, bad, tried["fault"], _RUN_PROBE.format(backend), tried)
    if not tried["same"]:
        return Finding(
            _SECTION,
            name,
            Rating.WARNING,
            "the same computation gave different bits the second time",
            "look for environment variables that disable deterministic operations",
            tried,
        )
    return Finding(_SECTION, name, Rating.FINE, "the same bits twice", "", tried)


def _end(backend: str, report: ProbeReport, bad: Rating) -> Finding:
    if report.built is None:
        where = "during import"
    elif report.devices is None:
        where = "while listing its devices"
    elif len(report.tried) < len(report.devices):
        where = f"while computing on {report.devices[len(report.tried)]}"
    else:
        where = "at exit"
    remedy = _RUN_PROBE.format(backend)
    if report.result.fault:
        remedy = "raise the limits of this shell (ulimit -a) on files, processes and memory"
    elif report.result.status is None:
        remedy = "it hangs, or the disk is very slow: try again; if it hangs again, " + remedy
    facts = {"status": report.result.status, "where": where}
    reason = f"it {report.result.how()}" if report.result.fault else f"{where} it {report.result.how()}"
    return Finding(_SECTION, backend, bad, reason, remedy, facts)


def _parts(output: str) -> Iterator[Any]:
    """Yield the valid lines: a killed process leaves part of a line, and libraries write to stdout, too."""
    for line in output.splitlines():
        with suppress(ValueError, RecursionError):
            yield json.loads(line)
