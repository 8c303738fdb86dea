"""The figures of a job, read with the official parser of OpenMetrics."""

import math
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import (
    CallStarted,
    CheckpointFailed,
    CheckpointWritten,
    Event,
    HostJoined,
    HostLost,
    HostRetired,
    JobStarted,
    TrainingPaused,
    TrainingResumed,
    VerificationFailed,
    ViewStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from lockstep.observability.job_metrics import JobMetrics
from lockstep.observability.measurements import (
    STEP_PARTS,
    GpuLoad,
    LoadMeasured,
    MetricsRecorded,
    StepsMeasured,
    WorkerLoad,
)

LABELS = {"job": "train", "script": 'a"b\\c\nd\udcff.py'}


def steps(trained: int, count: int, examples: int = 0, call: str = "fit 1") -> StepsMeasured:
    parts = {part: (at + 1) / 8 for at, part in enumerate(STEP_PARTS)}
    return StepsMeasured(
        call=call,
        number=trained,
        trained=trained,
        count=count,
        began=0.0,
        examples=examples,
        replicas=1,
        seconds=sum(parts.values()),
        **parts,
    )


def read(metrics: JobMetrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values by the names of samples and the values of their labels."""
    text = metrics.text().decode()
    assert text.endswith("# EOF\n")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            assert tuple(sample.labels.values()) not in values
            values[tuple(sample.labels.values())] = sample.value
    return found


def folded(*events: tuple[int | None, Event]) -> dict[str, dict[tuple[str, ...], float]]:
    metrics = JobMetrics(LABELS, 2)
    for worker, event in events:
        metrics.add(PublishedEvent(0.0, worker, event))
    return read(metrics)


def test_a_job_that_has_begun() -> None:
    assert folded() == {
        "lockstep_job_info": {("train", 'a"b\\c\nd?.py'): 1},
        "lockstep_workers": {(): 2},
        "lockstep_workers_joined_total": {(): 0},
        "lockstep_workers_left_total": {(): 0},
        "lockstep_workers_lost_total": {(): 0},
        "lockstep_hosts_joined_total": {(): 0},
        "lockstep_hosts_lost_total": {(): 0},
        "lockstep_hosts_retired_total": {(): 0},
        "lockstep_examples_total": {(): 0},
        "lockstep_checkpoints_total": {(): 0},
        "lockstep_checkpoints_failed_total": {(): 0},
        "lockstep_verifications_failed_total": {(): 0},
        "lockstep_pauses_total": {(): 0},
        "lockstep_paused_seconds_total": {(): 0},
    }


def test_membership_and_checkpoints() -> None:
    found = folded(
        (None, WorkerLost(1, "killed")),
        (None, WorkerJoined(2, "for worker 1")),
        (None, WorkerJoined(3, "asked")),
        (None, ViewStarted(2, (0, 2, 3), "why")),
        (0, CheckpointWritten("c/10", 10, 0.1)),
        (0, CheckpointWritten("c/20", 20, 0.1)),
        (None, WorkerLeft(3, "asked")),
        (None, ViewStarted(3, (0, 2), "why")),
    )
    assert found["lockstep_workers"] == {(): 2}
    assert found["lockstep_workers_joined_total"] == {(): 2}
    assert found["lockstep_workers_left_total"] == found["lockstep_workers_lost_total"] == {(): 1}
    assert found["lockstep_checkpoints_total"] == {(): 2}
    assert found["lockstep_checkpoint_step"] == {(): 20}


def test_problems_are_counted() -> None:
    began = JobStarted(versions={}, script=None, cores=2, host="a", directory="/", job={"workers": 2})
    metrics = JobMetrics(LABELS, 2)
    for time, event in (
        (100.0, began),
        (101.0, CallStarted("fit 1")),
        (120.0, TrainingPaused(2, 0.5)),
        (120.0, msgspec.structs.replace(steps(10, 10), paused=0.5)),
        *[(120.0, CheckpointFailed("full"))] * 3,
        (120.0, VerificationFailed(step=9, replica=0, arrays=(), workers=(), verdict="step")),
        (120.0, HostLost("node2", "gone")),
        *[(120.0, HostRetired(f"node{at}", "the machine stops")) for at in (4, 5)],
        (120.0, HostJoined("node3", 1, 8)),
    ):
        metrics.add(PublishedEvent(time, 0, event))
    found = read(metrics)
    # Of the seven parts, the first five: an eighth of a second and its multiples.
    assert found["lockstep_effective_training_ratio"] == {(): (15 / 8 - 0.5) / 20}
    assert found["lockstep_pauses_total"] == {(): 1}
    assert found["lockstep_paused_seconds_total"] == {(): 0.5}
    assert found["lockstep_checkpoints_failed_total"] == {(): 3}
    assert found["lockstep_verifications_failed_total"] == {(): 1}
    assert found["lockstep_hosts_retired_total"] == {(): 2}
    assert found["lockstep_hosts_lost_total"] == found["lockstep_hosts_joined_total"] == {(): 1}


def test_time_is_added_up_by_worker_and_part() -> None:
    found = folded(
        (0, steps(1, 1)),
        (1, steps(1, 1)),
        (0, steps(8, 7)),
        (1, steps(3, 2, call="validation within fit 1")),
        (0, steps(9, 1, call="train_on_batch")),
        (0, steps(10, 1, call="steps 1")),
    )
    assert found["lockstep_worker_steps_total"] == {("0",): 10, ("1",): 1}
    expected = {("0", part): (at + 1) / 2 for at, part in enumerate(STEP_PARTS)}
    expected |= {("1", part): (at + 1) / 8 for at, part in enumerate(STEP_PARTS)}
    assert found["lockstep_step_seconds_total"] == expected
    assert found["lockstep_steps_total"] == {(): 10}


def test_a_job_with_parameter_servers_has_staleness_and_updates() -> None:
    def stale(trained: int, count: int, staleness: int, largest: int) -> StepsMeasured:
        measured = steps(trained, count, 64 * count)
        return msgspec.structs.replace(measured, staleness=staleness, largest_staleness=largest)

    def updates(count: int) -> StepsMeasured:
        return steps(count, count, call="updates within fit 1")

    found = folded(
        *((0, steps(1, 1, 64)), (1, stale(1, 1, 9, 9)), (3, updates(1)), (2, stale(7, 3, 6, 4))),
        *((1, stale(8, 4, 2, 1)), (3, updates(7)), (0, steps(8, 7, 448))),
    )
    assert found["lockstep_staleness_total"] == {("1",): 11, ("2",): 6}
    assert found["lockstep_largest_staleness"] == {("1",): 1, ("2",): 4}
    assert found["lockstep_server_updates_total"] == {("3",): 8}
    expected = {("3", part): (at + 1) / 4 for at, part in enumerate(STEP_PARTS)}
    assert found["lockstep_server_seconds_total"] == expected
    # The chief counts the steps of the job, and their examples.
    assert found["lockstep_worker_steps_total"] == {("0",): 8, ("1",): 5, ("2",): 3}
    assert (found["lockstep_steps_total"], found["lockstep_examples_total"]) == ({(): 8}, {(): 512})


def test_metrics_have_their_last_values_under_any_name() -> None:
    def metrics(trained: int, values: Mapping[str, float | None]) -> MetricsRecorded:
        return MetricsRecorded(call="fit 1", epoch=None, trained=trained, values=dict(values))

    hostile = 'a"} 1\nb{c="\\'
    found = folded((0, metrics(4, {"loss": 1.5, hostile: 2})), (0, metrics(5, {"loss": 0.1, "x": None})))
    assert found["lockstep_steps_total"] == {(): 5}
    values = found["lockstep_metric"]
    assert math.isnan(values.pop(("x",)))
    assert values == {("loss",): 0.1, (hostile,): 2}


def test_load_of_hosts_workers_and_gpus() -> None:
    worker = WorkerLoad(worker=3, cores=1.5, delayed=0.25, memory=4096, faults=2.0)
    gpu = GpuLoad(
        index=1, name="H100", utilization=90, memory_used=7, memory_total=8, temperature=None, power=300.5
    )
    figures: dict[str, Any] = {"memory_used": 100, "memory_total": 200, "swapping": 0.5, "throttled": 0.75}
    found = folded(
        *(
            (
                None,
                LoadMeasured(host="node1", cores=4, busy=busy, workers=(worker,), gpus=(gpu,), **figures),
            )
            for busy in (1.0, 3.5)
        )
    )
    assert {name: values for name, values in found.items() if "_host_" in name} == {
        "lockstep_host_cores": {("node1",): 4},
        "lockstep_host_busy_cores": {("node1",): 3.5},
        "lockstep_host_memory_used_bytes": {("node1",): 100},
        "lockstep_host_memory_bytes": {("node1",): 200},
        "lockstep_host_swapped_bytes_per_second": {("node1",): 0.5},
        "lockstep_host_throttled_ratio": {("node1",): 0.75},
    }
    assert {name: values for name, values in found.items() if "_worker_" in name} == {
        "lockstep_worker_cores": {("node1", "3"): 1.5},
        "lockstep_worker_delayed_ratio": {("node1", "3"): 0.25},
        "lockstep_worker_memory_bytes": {("node1", "3"): 4096},
        "lockstep_worker_disk_page_faults_per_second": {("node1", "3"): 2},
    }
    assert {name: values for name, values in found.items() if "gpu" in name} == {
        "lockstep_gpu_busy_ratio": {("node1", "1"): 0.9},
        "lockstep_gpu_memory_used_bytes": {("node1", "1"): 7},
        "lockstep_gpu_memory_bytes": {("node1", "1"): 8},
        "lockstep_gpu_power_watts": {("node1", "1"): 300.5},
    }


@pytest.mark.parametrize("seed", range(12))
def test_examples_are_counted_once_whoever_reports_them(seed: int) -> None:
    """Workers report the same steps in different pieces; one after the other is lost and replaced."""
    random_ = random.Random(seed)
    resumed = random_.choice((0, 1000))
    # The last batch of each epoch is smaller: without lost workers, the number is exact nevertheless.
    sizes = [64 if at % 10 else 16 for at in range(1, 400)]
    metrics = JobMetrics({}, 2)
    if resumed:
        metrics.add(PublishedEvent(0.0, 0, TrainingResumed("a checkpoint", resumed)))
    reached = {0: 0, 1: 0}
    lost = furthest = 0
    while min(reached.values()) < len(sizes):
        worker = min(reached, key=lambda one: reached[one])
        begin = reached[worker]
        end = min(len(sizes), begin + random_.randint(1, 30))
        reached[worker] = end
        furthest = max(furthest, end)
        measured = steps(resumed + end, end - begin, sum(sizes[begin:end]))
        metrics.add(PublishedEvent(0.0, worker, measured))
        if seed % 2 and random_.random() < 0.1:
            # A joiner takes over where the others are.
            del reached[worker]
            lost += 1
            reached[10 + lost] = furthest
        counted = metrics.text().partition(b"lockstep_examples_total ")[2].partition(b"\n")[0]
        exact = sum(sizes[:furthest])
        assert int(counted) == exact if not lost else abs(int(counted) - exact) <= 64 * lost
    assert read(metrics)["lockstep_steps_total"] == {(): resumed + len(sizes)}
