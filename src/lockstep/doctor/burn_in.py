"""The burn-in: all cores compute the same results for some time, which finds faulty ones before training."""

import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from lockstep.doctor.check import Finding, Sources, failure, fine, in_section, warning
from lockstep.doctor.links import describe_failure
from lockstep.system.child_process import command_of
from lockstep.system.environment import WITHOUT_GPUS, job_environment
from lockstep.system.memory import available_memory
from lockstep.system.programs import ProbeProgram, ProgramResult, results
from lockstep.system.prose import count, duration_text

_PROGRAM, _JOB = "lockstep.keras.burn_in_program", "lockstep.doctor.burn_in_job"
GRACE = 120.0
"""Seconds that the programs may take beside their computations, to import and to compile."""
MEMORY = 1 << 30
"""Bytes of a program. With too little memory for one on each core, each program moves between some cores."""
_GRACE_OF_JOB = 10.0
"""Seconds that a job has to end its workers."""
_REPORT = 60.0
_REPLACE = (
    "do not train on this machine before its processor has been replaced; lockstep run --verify-every finds "
    "such faults during training"
)
_TEST_MEMORY = "do not train on this machine before a test of its memory, such as memtest86+, has passed"

Hashes = Sequence[Mapping[str, int]]
"""For each kind of input, how often a core has computed results with a hash."""


class CoreResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of the cores of a machine.

    Attributes:
        cores: the hashes of each core, by its number.
        changes: the number of changes of memory to which nothing writes.
        faults: sentences on how programs failed.
    """

    cores: Mapping[str, Hashes] = {}
    changes: int = 0
    faults: Sequence[str] = ()


def burn_in(backend: str, seconds: float, sources: Sources, say: Callable[[str], None]) -> CoreResults:
    """Compute on all cores that this process may use; return their results.

    Args:
        backend: the Keras backend.
        seconds: the time for which to compute.
        sources: the sources, which have the variables of jobs, and start programs.
        say: called with a line at the beginning and each minute.
    """
    cores = sorted(os.sched_getaffinity(0))
    number = max(1, min(len(cores), available_memory() // MEMORY))
    shares = [cores[first::number] for first in range(number)]
    environment = job_environment(0, 1, {**sources.environment, **WITHOUT_GPUS}, backend=backend)
    deadline = time.monotonic() + seconds + GRACE
    report = _progress(seconds, say)
    say(f"{count(len(cores), 'core')} compute on {backend} for {duration_text(seconds)}")
    with ExitStack() as stack:
        programs = list[ProbeProgram | ProgramResult]()
        for share in shares:
            command = command_of(_PROGRAM, ",".join(map(str, share)), str(seconds))
            programs.append(program := sources.start(command, environment, 0.0))
            if isinstance(program, ProbeProgram):
                stack.callback(program.end)
        ended = iter(results([each for each in programs if isinstance(each, ProbeProgram)], deadline, report))
        return merged(shares, [each if isinstance(each, ProgramResult) else next(ended) for each in programs])


def _progress(seconds: float, say: Callable[[str], None]) -> Callable[[Sequence[int], float], None]:
    """Return a function for `results` that reports each minute how much of the time has passed."""
    reported = 0.0

    def report(indices: Sequence[int], passed: float) -> None:
        nonlocal reported
        if passed - reported >= _REPORT and passed < seconds:
            reported = passed
            say(f"{duration_text(passed)} of {duration_text(seconds)} have passed")

    return report


def burn_in_hosts(
    names: Sequence[str], seconds: float, sources: Sources, say: Callable[[str], None]
) -> list[Finding]:
    """Burn in several hosts with a job that has a worker on each of them; return the findings.

    Args:
        names: the hosts, as ssh knows them.
        seconds: the time for which to compute.
        sources: the sources, which have the variables of the job, and start it.
        say: called with a line at the beginning and each minute.
    """
    say(f"all cores of {', '.join(names)} compute for {duration_text(seconds)}")
    words = ["-m", _JOB, f"{seconds:g}"]
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        options = ["--hosts", ",".join(names), "--no-adopt", "--timeout", f"{seconds + GRACE:g}"]
        command = command_of("lockstep", "run", *options, "--run-dir", str(Path(folder) / "run"), *words)
        program = sources.start(command, sources.environment, _GRACE_OF_JOB)
        if isinstance(program, ProbeProgram):
            try:
                deadline = time.monotonic() + seconds + 2 * GRACE
                (job,) = results([program], deadline, _progress(seconds, say))
            finally:
                program.end()
        else:
            job = program
    if job.status == 0:
        return judge_burn_in(msgspec.json.decode(job.output.splitlines()[-1], type=dict[str, CoreResults]))
    remedy = f"run it yourself: {shlex.join(['lockstep', 'run', *options, *words])}"
    finding = failure(f"the job {describe_failure(job)}", remedy, {"status": job.status})
    return in_section("burn-in", ", ".join(names), [finding])


def merged(shares: Sequence[Sequence[int]], ended: Sequence[ProgramResult]) -> CoreResults:
    """Merge the results of the programs that computed on shares of the cores."""
    cores, changes, faults = dict[str, Hashes](), 0, list[str]()
    for share, program in zip(shares, ended, strict=True):
        if program.status == 0:
            part = msgspec.json.decode(program.output.splitlines()[-1], type=CoreResults)
            cores |= part.cores
            changes += part.changes
        else:
            faults.append(f"on {_cores(share)}, a program {program.how()}")
    return CoreResults(cores, changes, faults)


def judge_burn_in(hosts: Mapping[str, CoreResults]) -> list[Finding]:
    """Return the findings on the cores of hosts. Pure.

    Args:
        hosts: the results of each host by its name, which is empty for this machine alone.
    """
    everywhere = _agreed(hashes for machine in hosts.values() for hashes in machine.cores.values())
    findings, agreed = list[Finding](), dict[str, str]()
    for host, machine in hosts.items():
        where = f" of {host}" if host else ""
        # Hosts with other processors may compute other bits, so the cores of a host decide first.
        votes = zip(_agreed(machine.cores.values()), everywhere, strict=False)
        expected = [of_host or common for of_host, common in votes]
        faults = [*_faults(machine, expected, where)]
        if not faults:
            agreed[host] = "".join(each[:4] for each in expected if each)
            total = sum(map(_total, machine.cores.values()))
            reason = f"{total:,} results on {count(len(machine.cores), 'core')} have the same bits; "
            reason += f"hash {agreed[host]}"
            findings.append(fine(reason, {"results": total, "hash": agreed[host]}, f"all cores{where}"))
        findings += faults
    if len({*agreed.values()}) > 1:
        alike = [[host for host in agreed if agreed[host] == each] for each in dict.fromkeys(agreed.values())]
        reason = f"{' and '.join(', '.join(group) for group in alike)} compute different bits"
        remedy = "if their processors are of one kind, one of them is faulty; otherwise limit them to the "
        remedy += "instructions that all have, which lockstep doctor names on each"
        findings.append(warning(reason, remedy, {"hashes": agreed}, "hosts"))
    return in_section("burn-in", "programs", findings)


def _agreed(cores: Iterable[Hashes]) -> list[str | None]:
    """Return for each kind the hash that most cores computed, or None in case of a tie."""
    agreed = list[str | None]()
    for counts in zip(*cores, strict=True):
        # A core that computes different bits from the same input is wrong, so the others decide.
        voters = [each for each in counts if len(each) == 1] or counts
        votes = Counter(max(each, key=lambda hash: each[hash]) for each in voters)
        (most, number), *rest = votes.most_common()
        agreed.append(most if not rest or rest[0][1] < number else None)
    return agreed


def _faults(machine: CoreResults, expected: Sequence[str | None], where: str) -> Iterator[Finding]:
    for fault in machine.faults:
        yield failure(fault, "lockstep doctor tests whether the backend works here", name=f"programs{where}")
    if machine.changes:
        reason = f"a block of memory changed {count(machine.changes, 'time')} while nothing wrote to it"
        yield failure(reason, _TEST_MEMORY, {"changes": machine.changes}, f"memory{where}")
    for core, hashes in machine.cores.items():
        wrong = sum(
            times
            for counts, wanted in zip(hashes, expected, strict=True)
            for hash, times in counts.items()
            if wanted is not None and hash != wanted
        )
        if wrong:
            total = _total(hashes)
            reason = f"{wrong:,} of {total:,} results have different bits from the rest"
            yield failure(reason, _REPLACE, {"results": total, "wrong": wrong}, f"core {core}{where}")
    if None in expected:
        reason = (
            f"{_cores(machine.cores)} compute different bits, and no majority shows which of them is wrong"
        )
        yield failure(reason, _REPLACE, name=f"cores{where}")


def _total(hashes: Hashes) -> int:
    return sum(sum(counts.values()) for counts in hashes)


def _cores(numbers: Iterable[object]) -> str:
    names = [*map(str, numbers)]
    return f"core{'s' if len(names) > 1 else ''} {', '.join(names)}"
