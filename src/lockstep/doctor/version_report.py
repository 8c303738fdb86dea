"""What `lockstep --version --verbose` prints: the versions that a description of a bug needs.

Unlike the checkup, it starts no process and takes no time, and unlike its report, it names no folder.
"""

from collections.abc import Iterator, Mapping
from platform import python_implementation, python_version

from lockstep.doctor.bug_report import packages_of_jobs, system_here
from lockstep.doctor.gpus import absence, title
from lockstep.doctor.machine import judge_cores
from lockstep.doctor.resources import Cores, inspect_cores
from lockstep.doctor.versions import LOCKSTEP, Packages
from lockstep.launcher.backend import BACKENDS
from lockstep.system.nvml import GpuReading, load, read

_DEVELOPMENT = ("bench", "dev", "test")
"""Extras that only a checkout needs."""


def versions_here(version: str) -> str:
    """Return the report on this process and this machine, one line per subject; it imports no framework.

    Args:
        version: of the imported Lockstep.
    """
    python = f"{python_implementation()} {python_version()}"
    packages, reading = Packages.installed(), read(load())
    lines = version_lines(version, python, packages, system_here(), inspect_cores(), reading)
    return "".join(f"{heading}: {value}\n" for heading, value in lines)


def version_lines(
    version: str,
    python: str,
    packages: Packages,
    system: Mapping[str, str],
    cores: Cores,
    reading: GpuReading,
) -> Iterator[tuple[str, str]]:
    """Yield the headings and values of the report. Pure.

    Args:
        version: of the imported Lockstep.
        python: implementation and version.
        packages: the installed ones.
        system: the operating system and the processor, by headings.
        cores: of the machine.
        reading: the driver's report on GPUs.
    """
    known = packages.versions.get(LOCKSTEP)
    installed = "not installed" if known is None else f"installed as {known}"
    yield "lockstep", version if known == version else f"{version}, {installed}"
    yield "Python", python
    yield "Keras", packages.versions.get("keras", "not installed")
    for backend in BACKENDS:
        provider = packages.provider(backend)
        by = f", by {provider}" if provider != backend else ""
        yield backend, "not installed" if provider is None else f"{packages.versions[provider]}{by}"
    yield from system.items()
    yield "cores", judge_cores(cores).reason
    driver, names = reading.driver, ", ".join(title(gpu) or "an unknown model" for gpu in reading.gpus)
    yield "GPUs", names or absence(reading)
    if driver is not None:
        yield "GPU driver", driver.version
    hidden = {*BACKENDS, *_DEVELOPMENT}
    extras = {name: there for name, there in packages.extras().items() if name not in hidden}
    for heading, wanted in (("extras", True), ("extras that are not installed", False)):
        yield heading, ", ".join(name for name, there in extras.items() if there == wanted) or "none"
    shown = {LOCKSTEP, "keras", *map(packages.provider, BACKENDS)}
    others = {name: version for name, version in packages.versions.items() if name not in shown}
    yield "other packages", packages_of_jobs(Packages(others, {}))
