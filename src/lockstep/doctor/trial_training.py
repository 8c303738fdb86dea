"""A training of one second with two workers, as a test of the whole installation: command and judgement."""

import json
from pathlib import Path

from lockstep.doctor.finding import Finding, Rating
from lockstep.system.child_process import command_of
from lockstep.system.programs import ProgramResult

_SECTION = "training"
WORKERS = 2
RESULT = "result.json"
SLOW_SECONDS = 13.0


def command(backend: str, folder: Path) -> list[str]:
    """Return the command of the training, which writes all its files to `folder`."""
    options = ["-n", str(WORKERS), "--replicas", str(WORKERS), "--threads-per-worker", "1"]
    options += ["--backend", backend, "--run-dir", str(folder / "run")]
    return [
        *command_of("lockstep", "run", *options),
        *("-m", "lockstep.doctor.trial_program", str(folder / RESULT)),
    ]


def judge(backend: str, ended: ProgramResult, folder: Path) -> Finding:
    """Return the finding on the training."""
    name = f"{WORKERS} workers on {backend}"
    if ended.status != 0:
        return Finding(
            _SECTION,
            name,
            Rating.FAILURE,
            f"the training {ended.how()}",
            "the rows above may name the cause; otherwise run the same training yourself: "
            f"lockstep run -n {WORKERS} --backend {backend} -m lockstep.doctor.trial_program result.json",
            {"status": ended.status},
        )
    result = json.loads((folder / RESULT).read_text())
    is_slow = ended.seconds > SLOW_SECONDS
    return Finding(
        _SECTION,
        name,
        Rating.WARNING if is_slow else Rating.FINE,
        f"{result['images_per_second']:,.0f} images/s, hash {result['hash'][:16]}; {ended.seconds:.1f} s",
        "training is slow: check whether other programs use the cores or the disk" if is_slow else "",
        {**result, "seconds": ended.seconds},
    )
