"""The complete examination: which checks run, in which order, and with which time limits."""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from subprocess import SubprocessError

from lockstep.doctor import backends, training
from lockstep.doctor.addresses import examine_tf_config
from lockstep.doctor.environment import examine_environment
from lockstep.doctor.finding import Finding, Rating, worst
from lockstep.doctor.gpus import GpuReading
from lockstep.doctor.gpus import judge as judge_gpus
from lockstep.doctor.machine import examine_machine
from lockstep.doctor.programs import Ended, ProbeProgram, results
from lockstep.doctor.shown import shown
from lockstep.doctor.versions import Packages, Wish, examine_versions
from lockstep.launcher.backend import BACKENDS
from lockstep.system.environment import device_variables, job_environment, visible_gpus

_LISTED = "CUDA_VISIBLE_DEVICES"
PROBE_SECONDS = 60.0
"""For all backends together: the first import after an installation may take most of it."""
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
class Surroundings:
    """The input of the examination.

    Attributes:
        environment: variables.
        wish: the requested backend.
        installed: whether a module can be imported.
        reading: the driver's report on GPUs.
        say: called with a line on what the examination waits for.
    """

    environment: Mapping[str, str]
    wish: Wish
    installed: Callable[[str], bool]
    reading: GpuReading
    say: Callable[[str], None]


def examine(around: Surroundings, *, train: bool) -> list[Finding]:
    """Return all findings, section by section.

    Args:
        around: what to examine.
        train: whether to train for a second at the end, if no check has failed.
    """
    findings, chosen = examine_versions(
        Packages.installed(), sys.executable, python_version(), around.wish, around.installed
    )
    with ExitStack() as stack:
        deadline = time.monotonic() + PROBE_SECONDS
        probes = {
            backend: _started(_probe(backend), _as_in_a_job(around.environment, backend))
            for backend in filter(around.installed, BACKENDS)
        }
        for probe in probes.values():
            if isinstance(probe, ProbeProgram):
                stack.callback(probe.end)
        listed = around.environment.get(_LISTED)
        findings += judge_gpus(around.reading, listed, around.environment.get("CUDA_DEVICE_ORDER"))
        # These run while the backends are imported.
        surroundings = [
            *examine_machine(),
            *examine_environment(around.environment),
            *examine_tf_config(around.environment.get("TF_CONFIG")),
        ]
        if probes:
            around.say(f"asking {', '.join(probes)} to compute; this takes a few seconds")
        gpus = len(shown(around.reading.gpus, listed).places)
        for backend, ended in _outcomes(probes, deadline, around.say).items():
            answer = backends.Answer.of(ended)
            findings += backends.judge(backend, answer, around.reading, gpus, chosen=backend == chosen)
    findings += surroundings
    if train:
        able = chosen is not None and worst(findings) < Rating.FAILURE
        findings.append(_train(chosen, around) if able and chosen else _UNTRAINED)
    return findings


def _outcomes(
    probes: Mapping[str, ProbeProgram | Ended], deadline: float, say: Callable[[str], None]
) -> dict[str, Ended]:
    running = {backend: probe for backend, probe in probes.items() if isinstance(probe, ProbeProgram)}
    names = list(running)

    def waits(places: Sequence[int], seconds: float) -> None:
        say(_waiting(" and ".join(names[place] for place in places), seconds, PROBE_SECONDS))

    ended = dict(zip(running, results(list(running.values()), deadline, waits), strict=True))
    return {
        backend: probe if isinstance(probe, Ended) else ended[backend] for backend, probe in probes.items()
    }


def _waiting(what: str, seconds: float, limit: float) -> str:
    return f"waiting for {what}, {seconds:.0f} s of {limit:.0f} at most"


def _train(backend: str, around: Surroundings) -> Finding:
    around.say(f"training on {backend} with {training.WORKERS} workers; this takes a few seconds")
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as name:
        program = _started(training.command(backend, Path(name)), around.environment, _GRACE)
        if isinstance(program, Ended):
            return training.judge(backend, program, Path(name))
        try:
            ended = program.result(
                time.monotonic() + TRAINING_SECONDS,
                lambda seconds: around.say(_waiting("the training", seconds, TRAINING_SECONDS)),
            )
        finally:
            program.end()
        return training.judge(backend, ended, Path(name))


def _started(
    command: Sequence[str], environment: Mapping[str, str], grace: float = 0.0
) -> ProbeProgram | Ended:
    try:
        return ProbeProgram.start(command, environment, grace)
    except (OSError, SubprocessError) as error:
        return Ended(None, "", "", 0.0, getattr(error, "strerror", None) or str(error))


def _probe(backend: str) -> list[str]:
    return [sys.executable, "-P", "-m", "lockstep.doctor.backend_probe", backend]


def _as_in_a_job(environment: Mapping[str, str], backend: str) -> dict[str, str]:
    """Return the environment of a worker that uses all visible GPUs."""
    variables = job_environment(0, 1, environment, backend=backend)
    if gpus := visible_gpus(environment):
        variables |= device_variables(environment, environment.get(_LISTED, ",".join(gpus)), shared=False)
    return variables
