"""The devices of a MirroredStrategy, and the start of its script once per device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launcher.restart_per_device import decide

FOUR = ("4", "5", "6", "7")


@pytest.mark.parametrize(
    ("devices", "gpus", "options", "hides"),
    [
        (None, ("0", "1"), "-n 2", False),
        (["GPU:0", "/gpu:1"], ("0", "1"), "-n 2", False),
        (["/device:GPU:1", "gpu:3"], FOUR, "-n 2 --devices 5,7", False),
        (["GPU:1", "GPU:0"], ("GPU-8932f937", "3"), "-n 2 --devices 3,GPU-8932f937", False),
        (["GPU:1"], ("0", "1"), "-n 1 --devices 1", False),
        (["CPU:0", "/device:cpu:1", "CPU:7"], (), "-n 3", False),
        (["CPU:0", "CPU:1"], ("0",), "-n 2", True),
        (["CPU:0"], ("0",), "-n 1", True),
    ],
)
def test_each_device_has_a_worker(
    devices: list[str] | None, gpus: tuple[str, ...], options: str, hides: bool
) -> None:
    restart = decide(devices, gpus)
    assert restart is not None
    assert (" ".join(restart.options), restart.hides_gpus) == (options, hides)


@pytest.mark.parametrize(
    ("devices", "gpus"),
    [(None, ()), (None, ("0",)), (["GPU:0"], ("0",)), (["GPU:0"], FOUR), (["CPU:0"], ()), (["cpu:3"], ())],
)
def test_a_single_device_needs_no_other_process(devices: list[str] | None, gpus: tuple[str, ...]) -> None:
    assert decide(devices, gpus) is None


@pytest.mark.parametrize(
    ("devices", "gpus", "reason"),
    [
        ([], FOUR, " names no device; omit `devices` to use all visible GPUs"),
        (["TPU:0"], FOUR, ": 'TPU:0' is not a device; write GPU:0, /gpu:0, /device:GPU:0 or CPU:0"),
        (["GPU"], FOUR, ": 'GPU' is not a device; "),
        (["GPU:0", "/gpu:0"], FOUR, ": /gpu:0 is listed twice; one worker computes on each device"),
        (
            ["GPU:0", "CPU:0"],
            FOUR,
            " has both CPUs and GPUs, whose results differ in their bits; name only one kind",
        ),
        (["GPU:0", "GPU:4"], FOUR, ": GPU:4 is not visible here; GPU:0 to GPU:3 are"),
        (["GPU:1"], ("0",), ": GPU:1 is not visible here; GPU:0 is"),
        (["GPU:0"], (), ": GPU:0 is not visible here; no GPU is"),
    ],
)
def test_invalid_devices_are_refused_with_the_reason(
    devices: list[str], gpus: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'MirroredStrategy(devices={devices!r}){reason}')}"):
        decide(devices, gpus)


SCRIPT = """
import sys
from lockstep.worker import job
from lockstep.launcher.restart_per_device import restart_per_device
restart_per_device(["CPU:0", "CPU:1"])
restart_per_device(["CPU:0", "CPU:1", "CPU:2"])
job.current().communicator.barrier()
print(job.current().worker, job.current().view.replicas, sys.argv[1:], __name__)
"""


def python(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=600, env=os.environ
    )


@pytest.mark.parametrize("start", ["{folder}/train.py", "-m train"])
def test_a_script_starts_once_per_device(tmp_path: Path, start: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    own = start.format(folder=tmp_path)
    done = python(tmp_path, "-u", *own.split(), "--epochs", "3")
    assert (done.returncode, done.stdout) == (0, "0 2 ['--epochs', '3'] __main__\n")
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "worker-1.log").read_text() == "1 2 ['--epochs', '3'] __main__\n"
    said = [line for line in done.stderr.splitlines() if "MirroredStrategy" in line]
    assert said == [
        "lockstep: MirroredStrategy on 2 CPUs (CPU:0, CPU:1): starting the script once per device, as with "
        f"lockstep run -n 2 {own} --epochs 3",
        "lockstep: MirroredStrategy names 3 devices, but this job has 2 replicas: in a worker, "
        "--workers and --devices decide",
    ]


def test_a_process_without_a_script_does_not_restart(tmp_path: Path) -> None:
    done = python(tmp_path, "-c", SCRIPT)
    assert done.returncode == 1
    assert re.search(
        r"^lockstep.errors.ConfigError: .*no script.*lockstep\.launch", done.stderr, re.MULTILINE
    )
    assert list(tmp_path.iterdir()) == []
