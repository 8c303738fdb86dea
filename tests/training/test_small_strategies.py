"""Strategies of one machine: several devices, one, and none."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "small_strategies.py"


@pytest.mark.ci
def test_a_script_restarts_once_per_device(
    launch: Callable[..., Any],
    environment: dict[str, str],
    lean: Callable[..., dict[str, str]],
    tmp_path: Path,
) -> None:
    script = Path(__file__).parent / PROGRAM
    command = [sys.executable, str(script), "mirrored"]
    variables = environment | lean(script, "jax") | {"KERAS_BACKEND": "jax"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MirroredStrategy on 2 CPUs (CPU:0, CPU:1): starting the script once per device" in done.stderr
    workers = launch("-n 2", PROGRAM, "workers")
    assert done.stdout == workers.stdout
    assert "replicas: 2\ndigest: " in done.stdout


@pytest.mark.slow
def test_one_device_needs_no_restart(launch: Callable[..., Any], plain: Callable[..., str]) -> None:
    single = launch("-n 1", PROGRAM, "workers")
    one = launch("-n 1", PROGRAM, "one")
    assert one.status == 0, one.stderr
    assert single.stdout == one.stdout
    assert "replicas: 1\ndigest: " in one.stdout
    refused = launch("-n 2 --max-restarts 0", PROGRAM, "one")
    assert refused.status == 1
    assert "OneDeviceStrategy trains one replica, but this job has 2" in refused.stderr
    assert plain(PROGRAM, "default") == "default: as without a strategy\n"


def test_a_missing_device_is_refused(plain: Callable[..., str], thorough_backend: str) -> None:
    said = plain(PROGRAM, "missing", backend=thorough_backend)
    assert said.splitlines() == ["'GPU:7'", "'banana' is not a device that Keras can use here"]
