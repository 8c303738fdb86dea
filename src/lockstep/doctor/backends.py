"""How each installed backend works on this machine, as reported by processes that import and use it."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.doctor.finding import Finding, Rating
from lockstep.doctor.gpus import GpuReading, judge_build
from lockstep.doctor.programs import Ended

_SECTION = "backends"
_COMMAND = shlex.join([sys.executable, "-P", "-m", "lockstep.doctor.backend_probe"])
SLOW_SECONDS = 14.0
"""A backend that takes longer to import and compute is slow."""
_AGAIN = f"run it yourself to see its whole output: {_COMMAND} {{}}"


@dataclass(frozen=True)
class Answer:
    """What a process reported about a backend before it ended.

    Attributes:
        ended: how it ended.
        built: the backend's version, and the CUDA and cuDNN it was built for; None if not reported.
        devices: the devices that the backend sees; None if not reported.
        tried: the result for each device that was tried, in order.
    """

    ended: Ended
    built: dict[str, str | None] | None = None
    devices: tuple[str, ...] | None = None
    tried: tuple[dict[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, ended: Ended) -> "Answer":
        """Parse the output of `lockstep.doctor.backend_probe`."""
        built: dict[str, str | None] | None = None
        devices: tuple[str, ...] | None = None
        tried: list[dict[str, Any]] = []
        for part in _parts(ended.output):
            match part:
                case {"built": {"version": _, "cuda": str() | None, "cudnn": str() | None} as told}:
                    built = told
                case {"devices": list() as told}:
                    devices = tuple(map(str, told))
                case {"device": str(), "fault": str(), "same": bool()}:
                    tried.append(part)
        return cls(ended, built, devices, tuple(tried))

    @property
    def is_whole(self) -> bool:
        """Whether it finished successfully."""
        devices = () if self.devices is None else self.devices
        return self.ended.status == 0 and 0 < len(devices) <= len(self.tried)


def judge(backend: str, answer: Answer, reading: GpuReading, gpus: int, *, chosen: bool) -> list[Finding]:
    """Return the findings on one backend.

    Args:
        backend: its name.
        answer: the report of its process.
        reading: the driver's report on GPUs.
        gpus: the number of GPUs that CUDA shows.
        chosen: whether a job would use this backend.
    """
    bad = Rating.FAILURE if chosen else Rating.WARNING
    findings = []
    if answer.built is not None:
        findings.append(judge_build(reading, backend, answer.built["cuda"], answer.built["cudnn"]))
        if answer.devices is not None and answer.built["cuda"] is not None and gpus:
            findings.append(_sight(backend, answer.devices))
    findings += [_trial(backend, tried, bad) for tried in answer.tried]
    if not answer.is_whole:
        findings.append(_end(backend, answer, bad))
    elif answer.ended.seconds > SLOW_SECONDS:
        findings.append(_slow(backend, answer.ended.seconds))
    return findings


def _slow(backend: str, seconds: float) -> Finding:
    return Finding(
        _SECTION,
        f"{backend} is slow",
        Rating.WARNING,
        f"importing it and computing took {seconds:.0f} s",
        "the first import after an installation reads many files: try again; if it takes as long, the "
        "disk or the cores are slow, and every job starts this slowly",
        {"seconds": seconds},
    )


def _sight(backend: str, devices: Sequence[str]) -> Finding:
    gpus = [device for device in devices if "cpu" not in device.lower()]
    name, facts = f"{backend} sees the GPU", {"devices": list(devices)}
    if gpus:
        return Finding(_SECTION, name, Rating.FINE, ", ".join(gpus), "", facts)
    return Finding(
        _SECTION,
        name,
        Rating.WARNING,
        f"it was built for CUDA, but sees {', '.join(devices)} only: it would compute on the CPU",
        _AGAIN.format(backend),
        facts,
    )


def _trial(backend: str, tried: dict[str, Any], bad: Rating) -> Finding:
    name = f"{backend} computes on {tried['device']}"
    if tried["fault"]:
        return Finding(_SECTION, name, bad, tried["fault"], _AGAIN.format(backend), tried)
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


def _end(backend: str, answer: Answer, bad: Rating) -> Finding:
    if answer.built is None:
        where = "during import"
    elif answer.devices is None:
        where = "while listing its devices"
    elif len(answer.tried) < len(answer.devices):
        where = f"while computing on {answer.devices[len(answer.tried)]}"
    else:
        where = "at exit"
    remedy = _AGAIN.format(backend)
    if answer.ended.fault:
        remedy = "raise the limits of this shell (ulimit -a) on files, processes and memory"
    elif answer.ended.status is None:
        remedy = "it hangs, or the disk is very slow: try again; if it happens again, " + remedy
    facts = {"status": answer.ended.status, "where": where}
    reason = f"it {answer.ended.how()}" if answer.ended.fault else f"{where} it {answer.ended.how()}"
    return Finding(_SECTION, backend, bad, reason, remedy, facts)


def _parts(output: str) -> Iterator[Any]:
    """Yield the valid lines: a killed process leaves part of a line, and libraries write there too."""
    for line in output.splitlines():
        with suppress(ValueError, RecursionError):
            yield json.loads(line)
