"""The links between the hosts of a job: latency, bandwidth and the cost of encryption."""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lockstep.doctor.check import Finding, failure, fine, in_section
from lockstep.errors import ConfigError
from lockstep.system.child_process import command_of
from lockstep.system.programs import ProbeProgram, ProgramResult

SECONDS = 120.0
"""The time limit of one measurement."""

_GRACE = 10.0
_NOTE = "lockstep: "

Measure = Callable[[tuple[str, str], bool], tuple[ProgramResult, Mapping[str, float]]]
"""Measures the link between two hosts, encrypted or not; returns how the program ended, and its result."""


def examine_links(names: Sequence[str], measure: Measure, say: Callable[[str], None]) -> list[Finding]:
    """Return a row for each pair of hosts.

    Raises:
        ConfigError: there are fewer than two hosts.
    """
    if len(names) < 2:
        raise ConfigError("--hosts needs two hosts or more: node1,node2")
    findings: list[Finding] = []
    for pair in itertools.combinations(names, 2):
        say(f"measuring the link between {pair[0]} and {pair[1]}")
        finding = _judge(pair, *(measure(pair, encrypted) for encrypted in (True, False)))
        findings += in_section("hosts", f"{pair[0]} - {pair[1]}", [finding])
    return findings


def _judge(
    pair: tuple[str, str],
    encrypted: tuple[ProgramResult, Mapping[str, float]],
    plain: tuple[ProgramResult, Mapping[str, float]],
) -> Finding:
    for job, _ in (encrypted, plain):
        if job.status != 0:
            return failure(
                f"a job on both hosts {describe_failure(job)}",
                f"run it yourself: lockstep run --hosts {','.join(pair)} -m lockstep.doctor.link_program",
                {"status": job.status},
            )
    (_, with_tls), (_, without) = encrypted, plain
    share = with_tls["bytes_per_second"] / without["bytes_per_second"]
    reason = (
        f"{_text(with_tls)}; {_text(without)} without encryption, which makes sums of large arrays "
        f"{1 / share:.1f} times as fast"
    )
    facts = {"encrypted": dict(with_tls), "plain": dict(without)}
    return fine(reason, facts)


def describe_failure(job: ProgramResult) -> str:
    """Return the last note of a failed job, which names the cause."""
    notes = [line for line in job.errors.splitlines() if line.startswith(_NOTE)]
    return f"failed: {notes[-1].removeprefix(_NOTE)}" if notes and job.status else job.how()


def _text(link: Mapping[str, float]) -> str:
    rate = link["bytes_per_second"] / 1e6
    return f"{link['barrier'] * 1e3:.2f} ms for a barrier, {rate:,.0f} MB/s in each direction"


def measured_by_a_job(environment: Mapping[str, str]) -> Measure:
    """Return the `Measure` that runs `link_program` as a job on both hosts."""

    def measure(pair: tuple[str, str], encrypted: bool) -> tuple[ProgramResult, Mapping[str, float]]:
        with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
            command = [
                *command_of("lockstep", "run", "--hosts", ",".join(pair)),
                *("--no-adopt", "--run-dir", str(Path(folder) / "run")),
                *(() if encrypted else ("--plain",)),
                *("-m", "lockstep.doctor.link_program"),
            ]
            program = ProbeProgram.start(command, environment, _GRACE)
            try:
                job = program.result(time.monotonic() + SECONDS)
            finally:
                program.end()
        return job, json.loads(job.output) if job.status == 0 else {}

    return measure
