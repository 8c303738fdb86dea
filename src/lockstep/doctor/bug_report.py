"""Writes the facts that a bug report needs, without names and secrets.

`lockstep doctor --report` shows everything that the checkup knows. `lockstep --version --verbose` shows the
versions: it starts no process, takes no time and names no folder.
"""

import os
import platform
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from platform import python_implementation, python_version

from lockstep.doctor.check import Finding, Rating, Sources
from lockstep.doctor.environment import plain
from lockstep.doctor.gpus import absence, title
from lockstep.doctor.machine import Cores, judge_cores, look_at_cores
from lockstep.doctor.redaction import SECRET, Identity, Redaction, is_secret
from lockstep.doctor.report import summary
from lockstep.doctor.versions import LOCKSTEP, Packages
from lockstep.launcher.backend import BACKENDS
from lockstep.system.nvml import GpuReading
from lockstep.system.prose import printable

_MARKS = {Rating.FINE: "ok  ", Rating.WARNING: "warn", Rating.FAILURE: "FAIL"}
_VARIABLES = re.compile(
    "(CUBLAS|CUDA|CUDNN|JAX|KERAS|LOCKSTEP|MKL|NCCL|NVIDIA|OMP|OPENBLAS|PYTORCH|TF|TORCH|XLA)_|PYTHON|LD_|NPROC$"
)
"""The variables that the report shows; of `TF_CONFIG` it shows what the checkup says."""
_PACKAGES = (
    *(LOCKSTEP, "keras", "jax", "jaxlib", "tensorflow", "tensorflow-cpu", "torch", "numpy", "ml-dtypes"),
    *("msgspec", "safetensors", "xxhash", "click", "rich", "psutil", "packaging", "nvidia-ml-py"),
    *("cloudpickle", "cryptography", "kubernetes", "pyyaml", "ray"),
)
_DEVELOPMENT = ("bench", "dev", "test")
"""Extras that only a checkout needs."""


def identity_here() -> Identity:
    """Return the names that identify this user and this machine."""
    users, homes = [], []
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:
        # A container may run as a user without a name.
        pass
    else:
        users += [entry.pw_name, entry.pw_gecos.partition(",")[0]]
        homes.append(entry.pw_dir)
    homes += [os.path.realpath(home) for home in homes]
    return Identity(tuple(users), tuple(homes), (platform.node(),))


def system_here(cpus: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the operating system and the processor, by headings."""
    try:
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        distribution = ""
    try:
        models = re.findall(r"^model name\s*:\s*(.+)$", cpus.read_text(), re.MULTILINE)
    except OSError:
        models = []
    libc = " ".join(platform.libc_ver())
    system = [distribution, f"{platform.system()} {platform.release()}", libc]
    return {
        "system": ", ".join(filter(None, system)),
        "processor": ", ".join(dict.fromkeys(models)) or platform.machine(),
    }


def packages_of_jobs(packages: Packages) -> str:
    """Return the versions of the installed packages that a job may use."""
    versions = packages.versions
    return ", ".join(f"{name} {versions[name]}" for name in _PACKAGES if name in versions)


def markdown(
    findings: Sequence[Finding], system: Mapping[str, str], environ: Mapping[str, str], identity: Identity
) -> str:
    """Return the report as a code block of Markdown.

    Args:
        findings: the findings of the checkup.
        system: the lines above them, by headings.
        environ: the variables of the shell.
        identity: the identity of the user and the machine, which the report does not name.
    """
    clean = Redaction(environ, identity).clean
    text = clean("\n".join(printable(line) for line in _lines(findings, system, environ)))
    ticks = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}text\n{text}\n{fence}\n"


def _lines(
    findings: Sequence[Finding], system: Mapping[str, str], environ: Mapping[str, str]
) -> Iterator[str]:
    for heading, value in system.items():
        yield f"{heading}: {value}"
    for section, group in groupby(findings, key=lambda finding: finding.section):
        yield ""
        yield f"{section}:"
        for finding in group:
            first, *others = finding.reason.splitlines() or [""]
            yield f"  {_MARKS[finding.rating]}  {finding.name}: {first}"
            if finding.remedy:
                others.append(f"-> {finding.remedy}")
            yield from (f"        {line}" for other in others for line in other.splitlines())
    yield ""
    yield "variables:"
    for name in sorted(environ):
        if _VARIABLES.match(name) and name != "TF_CONFIG":
            yield f"  {name}={SECRET if is_secret(name) else plain(environ[name])}"
    yield ""
    yield summary(findings)


def versions_here(version: str) -> str:
    """Return the report on this process and this machine, one line per subject; it imports no framework.

    Args:
        version: the version of the imported Lockstep.
    """
    python = f"{python_implementation()} {python_version()}"
    packages, reading = Packages.installed(), Sources().gpus()
    lines = version_lines(version, python, packages, system_here(), look_at_cores(Sources()), reading)
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
        version: the version of the imported Lockstep.
        python: implementation and version.
        packages: the installed packages.
        system: the operating system and the processor, by headings.
        cores: the cores of the machine.
        reading: the driver's data on GPUs.
    """
    installed = packages.versions.get(LOCKSTEP)
    difference = "not installed" if installed is None else f"installed as {installed}"
    yield "lockstep", version if installed == version else f"{version}, {difference}"
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
