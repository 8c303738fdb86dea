"""On GPUs, the number of workers never changes a bit, and workers can share one. Run by `make gpu`."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.system.environment import visible_gpus

pytestmark = pytest.mark.skipif(not visible_gpus(), reason="the driver shows no GPU on this machine")

Launch = Callable[..., Any]
NAMES = ["convolutional", "half", "recurrent"]
ON_ONE_GPU = "--devices 0 --replicas 2"


def results(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    found = run.marked(worker, "result ")
    assert [line.split()[1] for line in found] == NAMES
    (device,) = run.marked(worker, "device ")
    assert "cuda" in device.lower() or "gpu" in device.lower(), (
        f"the framework does not use the GPU: {device}"
    )
    return found


@pytest.fixture(scope="module")
def two(launch: Launch, backend: str) -> Any:
    return launch(f"-n 2 {ON_ONE_GPU}", "gpus.py", backend=backend, optimized=True)


def test_one_and_two_workers_have_the_same_bits(launch: Launch, two: Any, backend: str) -> None:
    one = launch(f"-n 1 {ON_ONE_GPU}", "gpus.py", backend=backend, optimized=True)
    assert results(two, 0) == results(two, 1) == results(one, 0)


def test_a_lost_worker_does_not_change_a_bit(launch: Launch, two: Any, backend: str) -> None:
    lost = launch(f"-n 2 {ON_ONE_GPU}", "gpus.py", "--lose", "3", backend=backend, optimized=True)
    assert "(1 lost" in lost.last_line
    assert results(lost, 0) == results(two, 0)


def test_one_replica_is_plain_keras(launch: Launch, plain: Callable[..., str], backend: str) -> None:
    run = launch("-n 1 --devices 0", "gpus.py", backend=backend, optimized=True)
    printed = plain("gpus.py", "--plain", backend=backend, optimized=True)
    found = [line for line in printed.splitlines() if line.startswith("result ")]
    assert found == results(run, 0)


def test_workers_that_share_a_gpu_take_memory_as_they_need_it(two: Any) -> None:
    lines = (two.folder / "measurements.jsonl").read_text().splitlines()
    gpus = [gpu for line in lines for gpu in json.loads(line).get("gpus", ())]
    assert gpus, "no load of a GPU was recorded"
    assert max(gpu["memory_used"] / gpu["memory_total"] for gpu in gpus) < 0.5


@pytest.mark.parametrize("script", ["serving.py", "scheduling.py"])
def test_a_run_with_parameter_servers_can_be_repeated(
    launch: Launch, repeat: Callable[..., Any], backend: str, script: str
) -> None:
    """With `fit`, and with functions; a worker is lost."""
    run = launch("-n 3 --ps 2 --max-restarts 0", script, "free", backend=backend)
    assert "(1 lost)" in run.last_line, run.stderr
    repeat(run, (1, 2))
