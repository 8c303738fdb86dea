"""The report for a bug is one block of Markdown."""

from pathlib import Path

from lockstep.doctor.bug_report import identity_here, markdown, packages_of_jobs, system_here
from lockstep.doctor.check import Finding, Rating
from lockstep.doctor.redaction import Identity
from lockstep.doctor.versions import Packages

NO_ONE = Identity((), (), ())


def test_all_findings_are_in_one_block() -> None:
    findings = [
        Finding(Rating.FINE, "3.15.1", name="Keras", section="versions"),
        Finding(Rating.WARNING, "first\nsecond", "do this\nand that", name="jax", section="versions"),
        Finding(
            Rating.FAILURE, "```\x1b[31m boom", "look above", name="2 workers on jax", section="training"
        ),
    ]
    environ = {
        "JAX_PLATFORMS": "cpu",
        "LOCKSTEP_KEY_FILE": "/k",
        "XLA_FLAGS": "--x\n--y",
        "TF_CONFIG": "{}",
        "EDITOR": "vi",
    }
    assert markdown(findings, {"system": "Linux"}, environ, NO_ONE).splitlines() == [
        "````text",
        "system: Linux",
        "",
        "versions:",
        "  ok    Keras: 3.15.1",
        "  warn  jax: first",
        "        second",
        "        -> do this",
        "        and that",
        "",
        "training:",
        "  FAIL  2 workers on jax: ```?[31m boom",
        "        -> look above",
        "",
        "variables:",
        "  JAX_PLATFORMS=cpu",
        "  LOCKSTEP_KEY_FILE=<secret>",
        "  XLA_FLAGS=--x?--y",
        "",
        "jobs will not work here: 1 failure and 1 warning",
        "````",
    ]


def test_the_packages_that_a_job_uses() -> None:
    packages = Packages({"numpy": "2.4", "keras-lockstep": "0.1", "pytest": "9"}, {})
    assert packages_of_jobs(packages) == "keras-lockstep 0.1, numpy 2.4"


def test_the_processor_has_its_name_if_the_kernel_knows_it(tmp_path: Path) -> None:
    cpus = tmp_path / "cpuinfo"
    cpus.write_text("processor\t: 0\nmodel name\t: Fast 9000\n\nprocessor\t: 1\nmodel name\t: Fast 9000\n")
    assert system_here(cpus)["processor"] == "Fast 9000"
    assert system_here(tmp_path / "missing")["processor"]
    assert system_here()["system"]


def test_this_user_and_this_machine_are_known() -> None:
    here = identity_here()
    assert all((here.users, here.homes, here.hosts[0]))
