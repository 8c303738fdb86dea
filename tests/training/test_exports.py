"""What TensorBoard and a trace show of a training is what its run folder has, on every backend."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.monitoring.trace import trace_of
from lockstep.observability.measurements import STEP_PARTS


def extents(folder: Path) -> list[tuple[Any, ...]]:
    """Return the calls of `fit` of worker 0, with their epochs and the steps of an epoch."""
    names = ("name", "initial_epoch", "epochs", "steps_per_epoch")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    calls = [event for event in events if event["event"] == "call" and event["worker"] == 0]
    return [tuple(call[name] for name in names) for call in calls if call["name"].startswith("fit")]


@pytest.mark.ci
def test_a_training_with_one_replica_says_how_long_it_is(launch: Callable[..., Any]) -> None:
    done = launch("-n 1", "measured.py")
    assert done.status == 0, done.stderr
    assert extents(done.folder) == [("fit 1", 0, 3, 4), ("fit 2", 0, 1, 5)]


@pytest.mark.ci
def test_a_training_is_shown_as_its_run_folder_has_it(
    launch: Callable[..., Any],
    thorough_backend: str,
    tmp_path: Path,
    read_tensorboard: Callable[[Path], dict[str, list[tuple[int, Any]]]],
) -> None:
    done = launch(f"-n 2 --tensorboard {tmp_path}/board", "measured.py", backend=thorough_backend)
    assert done.status == 0, done.stderr
    assert extents(done.folder) == [("fit 1", 0, 3, 4), ("fit 2", 0, 1, 5)]
    measured = [json.loads(line) for line in (done.folder / "measurements.jsonl").read_text().splitlines()]
    epochs = [line for line in measured if line["event"] == "metrics" and line["epoch"]]
    assert [(line["call"], line["epoch"], line["trained"]) for line in epochs] == [
        ("fit 1", 1, 4),
        ("fit 1", 2, 8),
        ("fit 1", 3, 12),
        ("fit 2", 1, 17),
    ]
    runs = {run: read_tensorboard(tmp_path / "board" / run) for run in ("train", "validation", "fit-2/train")}
    expected: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for line in epochs:
        above = "" if line["call"] == "fit 1" else "fit-2/"
        for name, value in line["values"].items():
            run, tag = ("validation", name[4:]) if name.startswith("val_") else ("train", name)
            point = (line["epoch"] - 1, float(np.float32(value)))
            expected.setdefault((above + run, f"epoch_{tag}"), []).append(point)
    shown = {(run, tag): runs[run][tag] for run in runs for tag in runs[run] if tag.startswith("epoch_")}
    assert shown == expected
    assert {tag for run, tag in shown if run == "train"} == {
        "epoch_loss",
        "epoch_mae",
        "epoch_learning_rate",
    }
    assert {4, 8, 12, 17} <= {step for step, _ in runs["train"]["batch_loss"]}
    for worker in (0, 1):
        lines = [line for line in measured if line["event"] == "steps" and line["worker"] == worker]
        trained = [
            line["trained"] for line in lines if line["count"] and line["call"].startswith(("fit", "train"))
        ]
        assert [
            step
            for step, _ in read_tensorboard(tmp_path / "board" / f"worker-{worker}")["steps/seconds_per_step"]
        ] == trained

    slices = [event for event in trace_of(done.folder, range(1, 20)) if event["ph"] == "X"]
    for worker in (0, 1):
        own = [event for event in slices if event["tid"] == worker]
        assert [event["name"] for event in own if event["cat"] == "step"] == [
            f"step {at}" for at in range(1, 20)
        ]
        lines = [line for line in measured if line["event"] == "steps" and line["worker"] == worker]
        trained = [line for line in lines if line["call"].startswith(("fit", "train"))]
        for part in STEP_PARTS:
            shown_us = sum(event["dur"] for event in own if event["name"] == part)
            missing = sum(line[part] for line in trained) * 1e6 - shown_us
            # The time after the last step of a call belongs to no step.
            rest = part in ("wait", "other", "nested")
            assert missing >= -20, part
            assert rest or missing <= 20, part
