"""What the writer for TensorBoard decides, and what TensorBoard's own backend reads of its files."""

import importlib.util
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.observability import tensorboard_writer
from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.events import CoordinatorStarted, Event, TrainingResumed, ViewStarted
from lockstep.observability.measurements import (
    GpuLoad,
    LoadMeasured,
    MetricsRecorded,
    StepsMeasured,
    WorkerLoad,
)
from lockstep.observability.tensorboard_writer import EventFiles, Point, Points, written_for_tensorboard
from lockstep.system.clock import SystemClock

PATIENCE = 300.0
Reader = Callable[[Path], dict[str, list[tuple[int, Any]]]]


def metrics(call: str, epoch: int | None, trained: int, **values: float | None) -> MetricsRecorded:
    return MetricsRecorded(call=call, epoch=epoch, trained=trained, values=values)


def steps(trained: int, count: int = 4, call: str = "fit 1") -> StepsMeasured:
    return StepsMeasured(
        call=call,
        number=trained,
        trained=trained,
        count=count,
        began=0.0,
        examples=64,
        replicas=1,
        seconds=2.0,
        input=0.1,
        compute=1.0,
        wait=0.5,
        exchange=0.2,
        update=0.15,
        other=0.05,
    )


def load(host: str) -> LoadMeasured:
    worker = WorkerLoad(worker=3, cores=1.5, delayed=0.25, memory=4096, faults=0.0)
    gpu = GpuLoad(
        index=1, name="H100", utilization=90, memory_used=7, memory_total=8, temperature=None, power=300.5
    )
    return LoadMeasured(
        host=host,
        cores=4,
        busy=3.5,
        memory_used=100,
        memory_total=200,
        swapping=0.0,
        throttled=0.5,
        workers=(worker,),
        gpus=(gpu,),
    )


@pytest.fixture
def points() -> Callable[..., list[tuple[str, str, int, float | str]]]:
    """Return the points of events of worker 0, one second apart, without their times."""
    fold = Points()

    def of(*events: Event) -> list[tuple[str, str, int, float | str]]:
        found = [point for at, event in enumerate(events) for point in fold.of(PublishedEvent(at, 0, event))]
        return [(point.run, point.tag, point.step, point.value) for point in found]

    return of


def test_metrics_have_the_names_of_the_callback_of_keras(points: Callable[..., object]) -> None:
    assert points(metrics("fit 1", None, 7, loss=0.5)) == [("train", "batch_loss", 7, 0.5)]
    assert points(metrics("fit 1", 2, 10, loss=0.25, val_loss=0.75)) == [
        ("train", "batch_loss", 10, 0.25),
        ("train", "epoch_loss", 1, 0.25),
        ("validation", "evaluation_loss_vs_iterations", 10, 0.75),
        ("validation", "epoch_loss", 1, 0.75),
    ]


def test_epochs_of_each_call_are_runs_of_their_own(points: Callable[..., object]) -> None:
    assert points(metrics("fit 2", 1, 12, loss=0.25)) == [
        ("train", "batch_loss", 12, 0.25),
        ("fit-2/train", "epoch_loss", 0, 0.25),
    ]
    assert points(metrics("fit 33", 1, 90, loss=0.25)) == [("train", "batch_loss", 90, 0.25)]
    assert points(metrics("train_on_batch", None, 91, loss=0.5)) == [("train", "batch_loss", 91, 0.5)]


def test_steps_are_shown_by_worker_with_the_shares_of_their_parts(points: Callable[..., list[Any]]) -> None:
    assert points(steps(8)) == [
        ("worker-0", "steps/seconds_per_step", 8, 0.5),
        ("worker-0", "steps/examples_per_second", 8, 32.0),
        ("worker-0", "share/input", 8, 0.05),
        ("worker-0", "share/compute", 8, 0.5),
        ("worker-0", "share/wait", 8, 0.25),
        ("worker-0", "share/exchange", 8, 0.1),
        ("worker-0", "share/update", 8, 0.075),
        ("worker-0", "share/other", 8, 0.025),
        ("worker-0", "share/nested", 8, 0.0),
    ]
    stale = msgspec.structs.replace(steps(8), staleness=6, largest_staleness=3)
    assert {point for point in points(stale) if "stale" in point[1]} == {
        ("worker-0", "steps/staleness", 8, 1.5),
        ("worker-0", "steps/largest_staleness", 8, 3.0),
    }
    served = msgspec.structs.replace(steps(8, call="updates within fit 1"), examples=0)
    assert points(served)[:2] == [
        ("worker-0", "updates/seconds_per_update", 8, 0.5),
        ("worker-0", "share/input", 8, 0.05),
    ]
    # Time after the last step of a call is that of no step.
    assert points(msgspec.structs.replace(steps(8), count=0)) == []
    assert points(steps(8, call="validation within fit 1"), steps(8, call="evaluate")) == []


def test_load_is_shown_from_the_first_step_on(points: Callable[..., list[object]]) -> None:
    assert points(load("a"), TrainingResumed("step 5", 5)) == []
    assert points(load("../node 1/x")) == [
        ("host-.._node_1_x", "load/busy", 5, 3.5),
        ("host-.._node_1_x", "load/memory_used", 5, 100),
        ("host-.._node_1_x", "load/swapping", 5, 0.0),
        ("host-.._node_1_x", "load/throttled", 5, 0.5),
        ("host-.._node_1_x", "gpu-1/utilization", 5, 90),
        ("host-.._node_1_x", "gpu-1/memory_used", 5, 7),
        ("host-.._node_1_x", "gpu-1/power", 5, 300.5),
        ("worker-3", "load/cores", 5, 1.5),
        ("worker-3", "load/delayed", 5, 0.25),
        ("worker-3", "load/memory", 5, 4096),
        ("worker-3", "load/faults", 5, 0.0),
    ]
    # The older state of a joiner, and a worker that reports later than others.
    assert points(TrainingResumed("step 3", 3), load("a"))[0] == ("host-a", "load/busy", 5, 3.5)


def test_the_text_of_a_step_has_all_changes_at_this_step(
    points: Callable[..., list[tuple[str, str, int, str]]],
) -> None:
    assert points(ViewStarted(2, (0, 2), "worker 1 was lost"), CoordinatorStarted(2, 77)) == []
    found = points(TrainingResumed("step 4", 4))
    assert [point[:3] for point in found] == [
        ("job", "membership", 4),
        ("job", "workers", 4),
        ("job", "membership", 4),
    ]
    first, second = found[2][3].split("\n")
    assert found[0][3] == first
    assert first.endswith(": view 2 with workers 0 and 2: worker 1 was lost")
    assert second.endswith(": another coordinator (process 77) takes over")
    assert found[1][3] == 2
    (later,) = points(TrainingResumed("step 5", 5), CoordinatorStarted(3, 78))
    assert later[2] == 5
    assert "\n" not in later[3]


def test_tensorboard_reads_each_value_in_single_precision(tmp_path: Path, read_tensorboard: Reader) -> None:
    values = [0.1, -1 / 3, 1e-40, 3.0e38, 1e300, 16777217, 0.0]
    files = EventFiles(tmp_path)
    files.write(Point("train", "epoch_loss", at, 1e9 + at, value) for at, value in enumerate(values[:3]))
    files.write(Point("train", "epoch_loss", at + 3, 1e9 + at, value) for at, value in enumerate(values[3:]))
    files.write([Point("train", "x", 1, 1e9, math.nan), Point("fit-2/train", "a\udcffé/\n", 2, 1e9, 2.0)])
    found = read_tensorboard(tmp_path / "train")
    with np.errstate(over="ignore"):
        assert found["epoch_loss"] == [(at, float(np.float32(value))) for at, value in enumerate(values)]
    assert math.isnan(found["x"][0][1])
    assert read_tensorboard(tmp_path / "fit-2" / "train") == {"a?é/\n": [(2, 2.0)]}


def test_a_run_that_resumes_continues_in_the_same_folder(tmp_path: Path, read_tensorboard: Reader) -> None:
    for first, last in ((1, 6), (4, 8)):
        files = EventFiles(tmp_path)
        files.write(Point("train", "batch_loss", at, 1e9, at / 2) for at in range(first, last))
        files.write([Point("job", "membership", first, 1e9, f"* from {first} ü")])
    # Steps that are repeated have the same values.
    found = read_tensorboard(tmp_path / "train")["batch_loss"]
    assert [step for step, _ in found] == [*range(1, 6), *range(4, 8)]
    assert dict(found) == {step: step / 2 for step in range(1, 8)}
    assert read_tensorboard(tmp_path / "job") == {"membership": [(1, "* from 1 ü"), (4, "* from 4 ü")]}


def test_it_writes_while_the_job_runs_and_never_imports_tensorflow(tmp_path: Path) -> None:
    assert importlib.util.find_spec("tensorflow")
    script = f"""
import sys
from pathlib import Path
from lockstep.observability.bus import Bus
from lockstep.observability.measurements import MetricsRecorded
from lockstep.observability.tensorboard_writer import written_for_tensorboard
from lockstep.system.clock import SystemClock
bus = Bus(SystemClock(), 0)
with written_for_tensorboard(bus, Path({str(tmp_path)!r}), print):
    bus.publish(MetricsRecorded(call="fit 1", epoch=1, trained=1, values={{"loss": 1.0}}))
print(sorted({{"tensorboard", "tensorflow", "keras", "grpc"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['tensorboard']\n", "")
    assert len(list((tmp_path / "train").iterdir())) == 1


def test_a_slow_disk_costs_points_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()
    written: list[int] = []

    def write(files: EventFiles, points: object) -> None:
        written.extend(sorted({point.step for point in points}))  # type: ignore[attr-defined]
        begun.set()
        assert released.wait(PATIENCE)

    monkeypatch.setattr(EventFiles, "write", write)
    monkeypatch.setattr(tensorboard_writer, "_QUEUE", 8)
    bus, said = Bus(SystemClock(), 0), list[str]()
    with written_for_tensorboard(bus, tmp_path, said.append):
        bus.publish(metrics("fit 1", None, 0, loss=1.0))
        assert begun.wait(PATIENCE)
        for step in range(1, 101):
            bus.publish(metrics("fit 1", None, step, loss=1.0))
        released.set()
    assert written == [0, *range(93, 101)]
    assert said == [f"{tmp_path} is slow: some points for TensorBoard are lost"]


def test_a_disk_that_hangs_does_not_keep_the_job_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), threading.Event()

    def write(files: EventFiles, points: object) -> None:
        begun.set()
        assert released.wait(PATIENCE)

    monkeypatch.setattr(EventFiles, "write", write)
    monkeypatch.setattr(tensorboard_writer, "_PATIENCE", 0.0)
    bus, said = Bus(SystemClock(), 0), list[str]()
    with written_for_tensorboard(bus, tmp_path, said.append):
        bus.publish(metrics("fit 1", None, 0, loss=1.0))
        assert begun.wait(PATIENCE)
    assert said == [f"the last points for TensorBoard are lost: writing to {tmp_path} takes too long"]
    released.set()


def test_a_folder_that_can_no_longer_be_written_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("a file")
    bus, said = Bus(SystemClock(), 0), list[str]()
    with written_for_tensorboard(bus, tmp_path, said.append):
        for step in range(3):
            bus.publish(metrics("fit 1", None, step, loss=1.0))
    assert said == [f"cannot write to {tmp_path}: File exists; further points for TensorBoard are lost"]
    assert not bus.has_subscribers(MetricsRecorded)
