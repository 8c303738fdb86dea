"""Whether jobs work here: programs that use each backend, or train, in processes that may crash or hang."""

import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.doctor.check import Finding, Rating, Sources, failure, fine, in_section, warning
from lockstep.doctor.gpus import Gpus, judge_build
from lockstep.system.child_process import command_of
from lockstep.system.cuda import LISTED, visibility
from lockstep.system.environment import device_variables, job_environment, visible_gpus
from lockstep.system.processor import common_limit, limit_of, limited
from lockstep.system.programs import ProbeProgram, ProgramResult, results

SECONDS = 60.0
"""The limit for programs that run at the same time: the first import after an installation takes long.

The time for which they wait for a core does not count."""
SLOW_BACKEND, SLOW_TRAINING = 14.0, 13.0
"""Seconds. A backend that takes longer to import and compute is slow, and so is a longer training."""
WORKERS = 2
RESULT = "result.json"
_GRACE = 1.0
_PROBE = "lockstep.doctor.backend_probe"
_RUN_PROBE = f"run the test yourself to see its whole output: {shlex.join(command_of(_PROBE))} {{}}"
_SMALL_PROGRAM = command_of("lockstep.keras.small_program")
"""The command that writes the time of a small program, in seconds, on the backend of `KERAS_BACKEND`."""

Say = Callable[[str], None]
"""Called with a line on what the checkup waits for."""
Program = tuple[Sequence[str], Mapping[str, str]]
"""A command, and its variables."""


@contextmanager
def running(
    programs: Mapping[str, Program], sources: Sources, say: Say, grace: float = 0.0
) -> Iterator[Callable[[], dict[str, ProgramResult]]]:
    """Start programs, and end them with the block.

    Yields a function that waits for all of them, reports for which it waits, and returns their results by
    name.
    """
    deadline = time.monotonic() + SECONDS
    started = {name: sources.start(*program, grace) for name, program in programs.items()}
    processes = {name: each for name, each in started.items() if isinstance(each, ProbeProgram)}
    names = list(processes)

    def report(indices: Sequence[int], seconds: float) -> None:
        left = " and ".join(names[index] for index in indices)
        say(f"waiting for {left}: {seconds:.0f} s; at most {SECONDS:.0f} s in which a core is free for it")

    def wait() -> dict[str, ProgramResult]:
        ended = dict(zip(names, results(list(processes.values()), deadline, report), strict=True))
        return {
            name: each if isinstance(each, ProgramResult) else ended[name] for name, each in started.items()
        }

    with ExitStack() as stack:
        for process in processes.values():
            stack.callback(process.end)
        yield wait


def probes(backends: Iterable[str], environment: Mapping[str, str]) -> dict[str, Program]:
    """Return the programs that test backends, by backend."""
    return {
        backend: (command_of(_PROBE, backend), _as_in_a_job(environment, backend)) for backend in backends
    }


def _as_in_a_job(environment: Mapping[str, str], backend: str) -> dict[str, str]:
    """Return the environment of a worker that uses all visible GPUs."""
    variables = job_environment(0, 1, environment, backend=backend)
    if gpus := visible_gpus(environment):
        variables |= device_variables(environment, environment.get(LISTED, ",".join(gpus)), shared=False)
    return variables


@dataclass(frozen=True)
class ProbeReport:
    """The report of a process about a backend before it ended.

    Attributes:
        result: how the process ended.
        built: the backend's version, and those of CUDA and cuDNN for which it was built; None if not
            reported.
        devices: the devices that the backend finds; None if not reported.
        trials: the result for each device that was tried, in order.
    """

    result: ProgramResult
    built: dict[str, str | None] | None = None
    devices: tuple[str, ...] | None = None
    trials: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, result: ProgramResult) -> "ProbeReport":
        """Parse the output of `lockstep.doctor.backend_probe`."""
        built: dict[str, str | None] | None = None
        devices: tuple[str, ...] | None = None
        trials: list[dict[str, Any]] = []
        for part in _parts(result.output):
            match part:
                case {"built": {"version": _, "cuda": str() | None, "cudnn": str() | None} as versions}:
                    built = versions
                case {"devices": list() as names}:
                    devices = tuple(map(str, names))
                case {"device": str(), "fault": str(), "same": bool()}:
                    trials.append(part)
        return cls(result, built, devices, tuple(trials))

    @property
    def is_complete(self) -> bool:
        """Whether the process reported on all devices and succeeded."""
        devices = () if self.devices is None else self.devices
        return self.result.status == 0 and 0 < len(devices) <= len(self.trials)


def judge_probe(backend: str, report: ProbeReport, gpus: Gpus, *, chosen: bool) -> list[Finding]:
    """Return the findings on one backend. Pure.

    Args:
        backend: its name.
        report: the report of its process.
        gpus: the machine's GPUs.
        chosen: whether a job would use this backend.
    """
    bad = Rating.FAILURE if chosen else Rating.WARNING
    findings = []
    if report.built is not None:
        findings.append(judge_build(gpus.reading, backend, report.built["cuda"], report.built["cudnn"]))
        shown = visibility(gpus.reading.gpus, gpus.listed).indices
        if report.devices is not None and report.built["cuda"] is not None and shown:
            findings.append(_judge_visible_gpus(backend, report.devices))
    findings += [_judge_device(backend, trial, bad) for trial in report.trials]
    if not report.is_complete:
        findings.append(_judge_end(backend, report, bad))
    elif report.result.seconds > SLOW_BACKEND:
        findings.append(_judge_slowness(backend, report.result.seconds))
    return in_section("backends", backend, findings)


def _judge_visible_gpus(backend: str, devices: Sequence[str]) -> Finding:
    gpus = [device for device in devices if "cpu" not in device.lower()]
    name, facts = f"{backend} sees the GPU", {"devices": list(devices)}
    if gpus:
        return fine(", ".join(gpus), facts, name)
    reason = f"it was built for CUDA, but sees only {', '.join(devices)}: it would compute on the CPU"
    return warning(reason, _RUN_PROBE.format(backend), facts, name)


def _judge_device(backend: str, trial: dict[str, Any], bad: Rating) -> Finding:
    name = f"{backend} computes on {trial['device']}"
    if trial["fault"]:
        return Finding(bad, trial["fault"], _RUN_PROBE.format(backend), trial, name)
    if not trial["same"]:
        return warning(
            "the same computation gave different bits the second time",
            "look for environment variables that disable deterministic operations",
            trial,
            name,
        )
    return fine("the same bits twice", trial, name)


def _judge_end(backend: str, report: ProbeReport, bad: Rating) -> Finding:
    if report.built is None:
        where = "during import"
    elif report.devices is None:
        where = "while listing its devices"
    elif len(report.trials) < len(report.devices):
        where = f"while computing on {report.devices[len(report.trials)]}"
    else:
        where = "at exit"
    remedy = _RUN_PROBE.format(backend)
    if report.result.fault:
        remedy = "raise the limits of this shell (ulimit -a) on files, processes and memory"
    elif report.result.status is None:
        remedy = "it hangs, or the disk is very slow: try again; if it hangs again, " + remedy
    reason = f"it {report.result.how()}" if report.result.fault else f"{where} it {report.result.how()}"
    return Finding(bad, reason, remedy, {"status": report.result.status, "where": where})


def _judge_slowness(backend: str, seconds: float) -> Finding:
    return warning(
        f"import and computation took {seconds:.0f} s",
        "the first import after an installation reads many files: try again; if it takes as long again, the "
        "disk or the cores are slow, and every job starts as slowly",
        {"seconds": seconds},
        f"{backend} is slow",
    )


def _parts(output: str) -> Iterator[Any]:
    """Yield the valid lines: a killed process leaves part of a line, and libraries also write to stdout."""
    for line in output.splitlines():
        with suppress(ValueError, RecursionError):
            yield json.loads(line)


def examine_limit(backend: str, instructions: str, sources: Sources, say: Say) -> list[Finding]:
    """Measure the cost of limiting a backend to the instructions that nearly all processors have."""
    common = common_limit(instructions)
    if not common:
        return []
    say(f"measuring {backend} with and without {common} as limit; this takes a few seconds")
    environment, limit = _as_in_a_job(sources.environment, backend), limit_of(backend, common)
    # Both run at the same time, so that other programs disturb both alike.
    programs = {
        "the small program": (_SMALL_PROGRAM, environment),
        "the limited one": (_SMALL_PROGRAM, limited(environment, limit)),
    }
    with running(programs, sources, say) as wait:
        return judge_limit(backend, limit, *wait().values())


def judge_limit(backend: str, limit: str, without: ProgramResult, limited: ProgramResult) -> list[Finding]:
    """Return the finding on the cost of a limit of the instruction set. Pure.

    Args:
        backend: its name.
        limit: the environment variables that set the limit.
        without: the result of `lockstep.keras.small_program`.
        limited: its result with these variables.
    """
    before, after = _last_number(without), _last_number(limited)
    if before is None or after is None:
        how = (without if before is None else limited).how()
        command = f"KERAS_BACKEND={backend} {limit} {shlex.join(_SMALL_PROGRAM)}"
        remedy = f"run the program yourself to see its whole output: {command}"
        finding = warning(f"a small program {how}", remedy, {"limit": limit})
    else:
        times = after / before
        reason = f"a small program takes about {times:.1f} times as long with {limit}"
        finding = fine(reason, {"limit": limit, "times": times})
    return in_section("backends", f"{backend} with fewer instructions", [finding])


def _last_number(result: ProgramResult) -> float | None:
    with suppress(ValueError, IndexError):
        return float(result.output.split()[-1]) if result.status == 0 else None
    return None


def examine_training(backend: str, sources: Sources, say: Say) -> list[Finding]:
    """Train for a second with two workers."""
    say(f"training on {backend} with {WORKERS} workers; this takes a few seconds")
    with TemporaryDirectory(prefix="lockstep-doctor-") as name:
        program = _training(backend, Path(name)), sources.environment
        with running({"the training": program}, sources, say, _GRACE) as wait:
            (training,) = wait().values()
        return judge_training(backend, training, Path(name))


def _training(backend: str, folder: Path) -> list[str]:
    """Return the training command, which writes all its files to `folder`."""
    options = ["-n", str(WORKERS), "--replicas", str(WORKERS), "--threads-per-worker", "1"]
    options += ["--backend", backend, "--run-dir", str(folder / "run")]
    return [
        *command_of("lockstep", "run", *options),
        *("-m", "lockstep.doctor.trial_program", str(folder / RESULT)),
    ]


def judge_training(backend: str, training: ProgramResult, folder: Path) -> list[Finding]:
    """Return the finding on the training trial, which has written its result to `folder`."""
    if training.status != 0:
        finding = failure(
            f"the training {training.how()}",
            "the rows above may name the cause; otherwise run the same training yourself: "
            f"lockstep run -n {WORKERS} --backend {backend} -m lockstep.doctor.trial_program result.json",
            {"status": training.status},
        )
    else:
        result = json.loads((folder / RESULT).read_text())
        is_slow = training.seconds > SLOW_TRAINING
        rate = f"{result['images_per_second']:,.0f} images/s"
        finding = Finding(
            Rating.WARNING if is_slow else Rating.FINE,
            f"{rate}, hash {result['hash'][:16]}; {training.seconds:.1f} s",
            "training is slow: check whether other programs use the cores or the disk" if is_slow else "",
            {**result, "seconds": training.seconds},
        )
    return in_section("training", f"{WORKERS} workers on {backend}", [finding])
