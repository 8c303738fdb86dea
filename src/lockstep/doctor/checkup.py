"""The complete checkup: which checks run, in which order, and with which time limits."""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from platform import python_version
from subprocess import SubprocessError

from lockstep.doctor import backends, trial_training
from lockstep.doctor.addresses import examine_tf_config
from lockstep.doctor.cuda_visibility import visibility
from lockstep.doctor.environment import examine_environment
from lockstep.doctor.finding import Finding, Rating, worst
from lockstep.doctor.gpus import judge as judge_gpus
from lockstep.doctor.machine import examine_machine
from lockstep.doctor.versions import Packages, examine_versions
from lockstep.launcher.backend import BACKENDS, Wishes
from lockstep.system.child_process import command_of
from lockstep.system.environment import device_variables, job_environment, visible_gpus
from lockstep.system.nvml import GpuReading
from lockstep.system.processor import common_limit, instruction_set, limit_of, limited, processor_features
from lockstep.system.programs import ProbeProgram, ProgramResult, results

_LISTED = "CUDA_VISIBLE_DEVICES"
PROBE_SECONDS = 60.0
"""The limit for all backends together: the first import after an installation takes long."""
TRAINING_SECONDS = 60.0
_GRACE = 1.0
_UNTRAINED = Finding(
    "training",
    "not tested",
    Rating.FINE,
    "the failures above would make it fail",
    "fix the failures above first",
)


@dataclass(frozen=True)
class CheckupInput:
    """The input of the checkup.

    Attributes:
        environment: variables.
        wishes: the requests for a backend.
        installed: whether a module can be imported.
        reading: the driver's report on GPUs.
        say: called with a line on what the checkup waits for.
        features: of the processor, as `lockstep.system.processor.processor_features` returns them.
    """

    environment: Mapping[str, str]
    wishes: Wishes
    installed: Callable[[str], bool]
    reading: GpuReading
    say: Callable[[str], None]
    features: str = field(default_factory=processor_features)


def examine(given: CheckupInput, *, train: bool) -> list[Finding]:
    """Return all findings, section by section.

    Args:
        given: the input.
        train: whether to train for a second at the end if no check has failed.
    """
    findings, chosen = examine_versions(
        Packages.installed(), sys.executable, python_version(), given.wishes, given.installed
    )
    with ExitStack() as stack:
        deadline = time.monotonic() + PROBE_SECONDS
        probes = {
            backend: _started(_probe(backend), _as_in_a_job(given.environment, backend))
            for backend in filter(given.installed, BACKENDS)
        }
        for probe in probes.values():
            if isinstance(probe, ProbeProgram):
                stack.callback(probe.end)
        listed = given.environment.get(_LISTED)
        findings += judge_gpus(given.reading, listed, given.environment.get("CUDA_DEVICE_ORDER"))
        # These checks run while the probes import the backends.
        others = [
            *examine_machine(),
            *examine_environment(given.environment),
            *examine_tf_config(given.environment.get("TF_CONFIG")),
        ]
        if probes:
            given.say(f"testing {', '.join(probes)}; this takes a few seconds")
        gpus = len(visibility(given.reading.gpus, listed).indices)
        for backend, result in _results(probes, deadline, given.say).items():
            report = backends.ProbeReport.of(result)
            findings += backends.judge(backend, report, given.reading, gpus, chosen=backend == chosen)
    findings += others
    if train:
        able = chosen is not None and worst(findings) < Rating.FAILURE
        if able and chosen:
            findings += _limit(chosen, given)
        findings.append(_train(chosen, given) if able and chosen else _UNTRAINED)
    return findings


def _results(
    probes: Mapping[str, ProbeProgram | ProgramResult], deadline: float, say: Callable[[str], None]
) -> dict[str, ProgramResult]:
    running = {backend: probe for backend, probe in probes.items() if isinstance(probe, ProbeProgram)}
    names = list(running)

    def report(indices: Sequence[int], seconds: float) -> None:
        say(_waiting(" and ".join(names[index] for index in indices), seconds, PROBE_SECONDS))

    ended = dict(zip(running, results(list(running.values()), deadline, report), strict=True))
    return {
        backend: probe if isinstance(probe, ProgramResult) else ended[backend]
        for backend, probe in probes.items()
    }


def _waiting(what: str, seconds: float, limit: float) -> str:
    return f"waiting for {what}: {seconds:.0f} of at most {limit:.0f} s"


def _limit(backend: str, given: CheckupInput) -> list[Finding]:
    """Measure what it costs to limit a backend to the instructions that nearly all processors have."""
    common = common_limit(instruction_set(given.features))
    if not common:
        return []
    given.say(f"measuring {backend} with and without {common} as limit; this takes a few seconds")
    environment, limit = _as_in_a_job(given.environment, backend), limit_of(backend, common)
    with ExitStack() as stack:
        # At the same time, so that other programs disturb both alike.
        programs = {
            name: _started(backends.SMALL_PROGRAM, variables)
            for name, variables in (
                ("the small program", environment),
                ("the limited one", limited(environment, limit)),
            )
        }
        for program in programs.values():
            if isinstance(program, ProbeProgram):
                stack.callback(program.end)
        ended = _results(programs, time.monotonic() + PROBE_SECONDS, given.say)
    return [backends.judge_limit(backend, limit, *ended.values())]


def _train(backend: str, given: CheckupInput) -> Finding:
    given.say(f"training on {backend} with {trial_training.WORKERS} workers; this takes a few seconds")
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as name:
        program = _started(trial_training.command(backend, Path(name)), given.environment, _GRACE)
        if isinstance(program, ProgramResult):
            return trial_training.judge(backend, program, Path(name))
        try:
            ended = program.result(
                time.monotonic() + TRAINING_SECONDS,
                lambda seconds: given.say(_waiting("the training", seconds, TRAINING_SECONDS)),
            )
        finally:
            program.end()
        return trial_training.judge(backend, ended, Path(name))


def _started(
    command: Sequence[str], environment: Mapping[str, str], grace: float = 0.0
) -> ProbeProgram | ProgramResult:
    try:
        return ProbeProgram.start(command, environment, grace)
    except (OSError, SubprocessError) as error:
        return ProgramResult(None, "", "", 0.0, getattr(error, "strerror", None) or str(error))


def _probe(backend: str) -> list[str]:
    return command_of("lockstep.doctor.backend_probe", backend)


def _as_in_a_job(environment: Mapping[str, str], backend: str) -> dict[str, str]:
    """Return the environment of a worker that uses all visible GPUs."""
    variables = job_environment(0, 1, environment, backend=backend)
    if gpus := visible_gpus(environment):
        variables |= device_variables(environment, environment.get(_LISTED, ",".join(gpus)), shared=False)
    return variables
