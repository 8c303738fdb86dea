"""A check: a row of the table in `lockstep.doctor.checkup`, with its sources and findings.

A look reads the machine and makes no judgements. A judgement is a pure function of the result of a look.
"""

import importlib.util
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, Generic, TypeVar

import psutil

from lockstep.launcher.backend import Wishes
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.cuda import in_time
from lockstep.system.nvml import GpuReading, load, read
from lockstep.system.programs import ProbeProgram, ProgramResult

Facts = TypeVar("Facts")


class Rating(IntEnum):
    """Whether a job would work; the worst rating of a report is the exit status of the command."""

    FINE = 0
    WARNING = 1
    FAILURE = 2

    def __str__(self) -> str:
        return ("fine", "warning", "failure")[self]


@dataclass(frozen=True)
class Finding:
    """A row of the report. Judgements leave `section` to their check, and usually `name` too.

    Attributes:
        rating: `FAILURE` if a job would not work, `WARNING` if it works with a problem.
        reason: one sentence at most.
        remedy: the remedy; empty if nothing needs to be done.
        facts: the values of the finding as JSON, for programs.
        name: the subject that was examined.
        section: the part of the report: "versions", "gpus", "backends", "machine", "environment", "training",
            "hosts".
    """

    rating: Rating
    reason: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    section: str = ""


def fine(reason: str, facts: Mapping[str, Any] | None = None, name: str = "") -> Finding:
    """Return a finding without a problem."""
    return Finding(Rating.FINE, reason, "", facts or {}, name)


def warning(reason: str, remedy: str, facts: Mapping[str, Any] | None = None, name: str = "") -> Finding:
    """Return a finding on a problem that does not keep jobs from working."""
    return Finding(Rating.WARNING, reason, remedy, facts or {}, name)


def failure(reason: str, remedy: str, facts: Mapping[str, Any] | None = None, name: str = "") -> Finding:
    """Return a finding on a problem that keeps jobs from working."""
    return Finding(Rating.FAILURE, reason, remedy, facts or {}, name)


def worst(findings: Iterable[Finding]) -> Rating:
    """Return the worst rating; `FINE` if there is none."""
    return max((finding.rating for finding in findings), default=Rating.FINE)


def resolve_host(host: str) -> str:
    """Return the IP address that a script started by hand would use."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    infos.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(infos[0][4][0])


def start_program(
    command: Sequence[str], environment: Mapping[str, str], grace: float
) -> ProbeProgram | ProgramResult:
    """Start a program; see `Sources`."""
    try:
        return ProbeProgram.start(command, environment, grace)
    except (OSError, SubprocessError) as error:
        return ProgramResult(None, "", "", 0.0, getattr(error, "strerror", None) or str(error))


@dataclass(frozen=True)
class Sources:
    """The sources of looks: by default this machine, without variables. A test uses other sources.

    Attributes:
        environment: the variables that the command was started with.
        wishes: the user's requests for a backend.
        is_importable: whether a module can be imported.
        gpus: reads the driver's data on GPUs; raises UnfitError if the driver hangs.
        proc: the mount point of procfs.
        cgroups: the folder in which the cgroup file systems are mounted.
        shm: the folder of files in shared memory.
        clock_source: the file that names the clock source.
        gpu_folder: the folder in which the driver lists GPUs.
        folder: the current folder of jobs.
        package_folders: the folders in which packages are installed; None for the folders of this Python.
        dated_files: files written by the installation of Lockstep and its dependencies.
        clock: the machine's clocks.
        resolve: returns the IP address of a host; raises OSError or UnicodeError if it has none.
        patience: the most seconds to wait for all addresses together.
        start: starts a program with its variables and its seconds after SIGTERM; returns how it ended if it
            could not be started.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    wishes: Wishes = field(default_factory=Wishes)
    is_importable: Callable[[str], bool] = lambda module: importlib.util.find_spec(module) is not None
    gpus: Callable[[], GpuReading] = lambda: in_time(lambda: read(load()))
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")
    clock_source: Path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    gpu_folder: Path = Path("/proc/driver/nvidia/gpus")
    folder: Path = Path()
    package_folders: Sequence[Path] | None = None
    dated_files: Sequence[Path] = (Path(__file__), Path(psutil.__file__), Path(sys.executable))
    clock: Clock = field(default_factory=SystemClock)
    resolve: Callable[[str], str] = resolve_host
    patience: float = 3.0
    start: Callable[[Sequence[str], Mapping[str, str], float], ProbeProgram | ProgramResult] = start_program


@dataclass(frozen=True)
class Check(Generic[Facts]):
    """A row of the table.

    Attributes:
        name: the subject of the check.
        look: reads the machine; checks may share a look.
        judge: turns facts into findings, if any; each problem has a remedy.
        shown: the attributes of the facts that every finding shows to programs.
    """

    name: str
    look: Callable[[Sources], Facts]
    judge: Callable[[Facts], Finding | Iterable[Finding]]
    shown: Sequence[str] = ()


def look(checks: Iterable[Check[Any]], sources: Sources) -> dict[Callable[[Sources], Any], Any]:
    """Look once for all checks that share a look; return the facts by look."""
    return {look: look(sources) for look in dict.fromkeys(check.look for check in checks)}


def judge(
    section: str, checks: Iterable[Check[Any]], facts: Mapping[Callable[[Sources], Any], Any]
) -> list[Finding]:
    """Return the findings of checks on the facts that `look` returns. Pure."""
    findings = []
    for check in checks:
        verdict = check.judge(facts[check.look])
        shown = {name: getattr(facts[check.look], name) for name in check.shown}
        findings += in_section(
            section, check.name, [verdict] if isinstance(verdict, Finding) else verdict, shown
        )
    return findings


def in_section(
    section: str, name: str, findings: Iterable[Finding], facts: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Return findings with their section, the default name, and the facts that all of them show."""
    return [
        replace(finding, facts={**(facts or {}), **finding.facts}, name=finding.name or name, section=section)
        for finding in findings
    ]
