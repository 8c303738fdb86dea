"""What `lockstep --version --verbose` says, judged from given facts and from this machine."""

import sys
from platform import python_version

import pytest
from click.testing import CliRunner

import lockstep
from lockstep.cli.main import cli
from lockstep.doctor.bug_report import version_lines
from lockstep.doctor.machine import Cores
from lockstep.doctor.versions import LOCKSTEP, Packages
from lockstep.system.nvml import Driver, Gpu, GpuReading

NEEDS = (
    *("keras>=3.12", 'jax>=0.7; extra == "jax"', 'tensorflow>=2.16; extra == "tensorflow"'),
    *('cryptography>=42; extra == "hosts"', 'cryptography>=42; extra == "ray"', 'ray>=2.60; extra == "ray"'),
    *('mypy>=1.11; extra == "dev"', 'tensorboard>=2.16; extra == "tensorboard"', "numpy>=1.26"),
)
VERSIONS = {
    LOCKSTEP: "0.1",
    "keras": "3.15.1",
    "tensorflow-cpu": "2.21.0",
    "cryptography": "50.0",
    "tensorboard": "2.10",
    "numpy": "2.3",
}
PACKAGES = Packages(VERSIONS, {LOCKSTEP: NEEDS})
SYSTEM = {"system": "Some Linux, Linux 6.1, glibc 2.36", "processor": "Fast 9000"}


def shown(packages: Packages = PACKAGES, reading: GpuReading | None = None) -> dict[str, str]:
    given = reading or GpuReading(None, (), "no driver")
    return dict(version_lines("0.1", "CPython 3.11.7", packages, SYSTEM, Cores(8, 4, None), given))


def test_everything_that_a_description_of_a_bug_needs() -> None:
    assert shown() == {
        "lockstep": "0.1",
        "Python": "CPython 3.11.7",
        "Keras": "3.15.1",
        "jax": "not installed",
        "tensorflow": "2.21.0, by tensorflow-cpu",
        "torch": "not installed",
        **SYSTEM,
        "cores": "4 of 8 cores",
        "GPUs": "no GPU (no driver); workers compute on the CPU",
        "extras": "hosts",
        "extras that are not installed": "ray, tensorboard",
        "other packages": "numpy 2.3, cryptography 50.0",
    }


def test_gpus_and_their_driver() -> None:
    gpus = Gpu(0, name="Large GPU"), Gpu(1, bus="0000:3b:00.0", fault="is lost")
    lines = shown(reading=GpuReading(Driver("580.65", (13, 0)), gpus))
    assert (lines["GPUs"], lines["GPU driver"]) == ("Large GPU, 0000:3b:00.0", "580.65")


@pytest.mark.parametrize(("known", "text"), [("0.2", "0.1, installed as 0.2"), (None, "0.1, not installed")])
def test_an_imported_version_that_is_not_the_installed_one(known: str | None, text: str) -> None:
    versions = {name: version for name, version in VERSIONS.items() if name != LOCKSTEP}
    packages = Packages(versions if known is None else {**versions, LOCKSTEP: known}, {LOCKSTEP: NEEDS})
    assert shown(packages)["lockstep"] == text


@pytest.mark.parametrize("options", [["--version", "--verbose"], ["--verbose", "--version"]])
def test_the_command_describes_this_machine(options: list[str]) -> None:
    before = set(sys.modules)
    result = CliRunner().invoke(cli, options, prog_name="lockstep")
    assert result.exit_code == 0, result.output
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert lines["lockstep"].startswith(lockstep.__version__)
    assert python_version() in lines["Python"]
    assert not {"keras", "jax", "tensorflow", "torch"} & (set(sys.modules) - before)
    assert sys.executable not in result.stdout


def test_verbose_alone_is_refused() -> None:
    result = CliRunner().invoke(cli, ["--verbose", "list"])
    assert result.exit_code == 2
    assert "--verbose belongs to --version" in result.output
