"""The links between the hosts of a job: latency, bandwidth and the cost of encryption."""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lockstep.doctor.finding import Finding, Section
from lockstep.errors import ConfigError
from lockstep.system.child_process import command_of
from lockstep.system.programs import ProbeProgram, ProgramResult

SECONDS = 120.0
"""The time limit of one measurement."""

_SECTION = Section("hosts")
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
    findings = []
    for pair in itertools.combinations(names, 2):
        say(f"measuring the link between {pair[0]} and {pair[1]}")
        findings.append(_judge(pair, *(measure(pair, encrypted) for encrypted in (True, False))))
    return findings


def _judge(
    pair: tuple[str, str],
    encrypted: tuple[ProgramResult, Mapping[str, float]],
    plain: tuple[ProgramResult, Mapping[str, float]],
) -> Finding:
    name = f"{pair[0]} - {pair[1]}"
    for ended, _ in (encrypted, plain):
        if ended.status != 0:
            return _SECTION.failure(
                name,
                f"a job on both hosts {_failure(ended)}",
                f"run it yourself: lockstep run --hosts {','.join(pair)} -m lockstep.doctor.link_program",
                status=ended.status,
            )
    (_, with_tls), (_, without) = encrypted, plain
    share = with_tls["bytes_per_second"] / without["bytes_per_second"]
    reason = (
        f"{_text(with_tls)}; {_text(without)} without encryption, which makes sums of large arrays "
        f"{1 / share:.1f} times as fast"
    )
    facts = {"encrypted": dict(with_tls), "plain": dict(without)}
    return _SECTION.fine(name, reason, **facts)


def _failure(ended: ProgramResult) -> str:
    """Describe the failure of a job by its last note, which names the cause."""
    notes = [line for line in ended.errors.splitlines() if line.startswith(_NOTE)]
    return f"failed: {notes[-1].removeprefix(_NOTE)}" if notes and ended.status else ended.how()


def _text(measured: Mapping[str, float]) -> str:
    rate = measured["bytes_per_second"] / 1e6
    return f"{measured['barrier'] * 1e3:.2f} ms for a barrier, {rate:,.0f} MB/s in each direction"


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
                ended = program.result(time.monotonic() + SECONDS)
            finally:
                program.end()
        return ended, json.loads(ended.output) if ended.status == 0 else {}

    return measure
