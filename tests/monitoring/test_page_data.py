"""What the page shows: charts of any length keep their extremes, and runs are compared by what differs."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.monitoring.page_data import MOST_POINTS, MOST_SERIES, Window, chart, compare, parts
from lockstep.monitoring.run_folder import RunFolder
from lockstep.monitoring.told_events import details
from lockstep.observability.growth import Columns, GrowingMap
from lockstep.observability.measurements import STEP_PARTS
from lockstep.observability.run_lines import Happening
from lockstep.observability.run_state import LOAD_COLUMNS, METRIC_COLUMNS, RunState, WorkerInfo

from .made_runs import END, EVENTS, HOSTILE, MEASURED, event, job, make_hostile_run, make_run, metrics, steps


def read(folder: Path) -> RunState:
    run = RunFolder(folder)
    run.update()
    return run.state


@pytest.fixture
def data(tmp_path: Path) -> RunState:
    return read(make_run(tmp_path / "run"))


def with_losses(values: list[float]) -> RunState:
    columns = Columns(*METRIC_COLUMNS)
    for at, value in enumerate(values):
        columns = columns.plus(float(at), float(at), value, 0)
    return RunState(batch_metrics={"loss": columns})


def loss(data: RunState, **window: Any) -> dict[str, Any]:
    return chart(data, "metric:loss", Window(axis="step", **window))[0]


def test_a_run_in_parts(data: RunState) -> None:
    found = parts(data, active=False)
    summary = found["summary"]
    assert {name: summary[name] for name in ("state", "workers", "wanted", "steps", "epochs", "digest")} == {
        "state": "finished",
        "workers": 2,
        "wanted": 2,
        "steps": 60,
        "epochs": 2,
        "digest": "ab12",
    }
    assert (summary["lost"], summary["joined"], summary["seconds"]) == (1, 1, 10.0)
    assert (summary["pauses"], summary["paused"]) == (2, pytest.approx(0.012621))
    assert summary["headline"] == "finished with 1 problem"
    assert [text.partition(":")[0] for text in summary["remedies"]] == ["look for the cause in the program"]
    # The steps of 51 without the first one, without 0.1 s of other parts in 1.0 s, in 10 s.
    assert summary["effective"] == pytest.approx(5 * 0.9 / 10, abs=1e-6)
    # The first measurement is at 2.5 s. The pauses of 12 ms are longer than a thousandth of the time.
    assert summary["elsewhere"] == pytest.approx(
        {"the start and the first step": 2.5, "pauses": 0.013, "everything else": 2.987}, abs=1e-3
    )
    assert summary["troubles"] == ["not finite: val_loss, first seen at step 60"]
    # All measurements of training have this rate.
    assert summary["rate"] == pytest.approx(640.0)
    assert [(one["worker"], one["phase"], one["ended"]) for one in found["workers"]] == [
        (0, "finished", 9.2),
        (1, "lost", 4.0),
        (2, "finished", 9.2),
    ]
    assert [(one["number"], one["time"], one["pause"]) for one in found["views"]] == [
        (2, 4.0, 0.0123),
        (3, 6.0, 0.000321),
    ]
    assert [(one["worker"], one["waits_for"], one["current"]) for one in found["waits"]] == [(0, [1], False)]
    kept = {"time": 7.0, "path": "saved/step-40", "step": 40, "seconds": 0.25, "deleted": False}
    assert found["checkpoints"] == [kept]
    assert {"section": "versions", "name": "keras", "value": "3.15.1"} in found["configuration"]
    assert {"section": "job", "name": "seed", "value": "7"} in found["configuration"]
    # Two workers start, are ready, and exit.
    assert len(found["events"]) == len(EVENTS) + len(END) - 3
    assert summary["compared"] == ""
    compared = parts(data.with_verdict("compared with one process: equal"), active=False)["summary"]
    assert compared["compared"] == "compared with one process: equal"
    json.dumps(found, allow_nan=False)


def test_equal_events_are_one_row_that_counts(tmp_path: Path) -> None:
    failures = [
        one
        for at in range(22)
        for one in (
            event(5.0 + at, "checkpoint failed", worker=0, reason="full"),
            event(5.1 + at, "decision", reason="no checkpoint: full", actions=[]),
        )
    ]
    found = parts(read(make_run(tmp_path / "run", [job(), *failures], [])), active=True)
    assert [(row["time"], row["event"], row["text"]) for row in found["events"][1:]] == [
        (26.0, "checkpoint failed", "full (22 times, first after 5.0 s)"),
        (26.1, "decision", "no checkpoint: full (22 times, first after 5.1 s)"),
    ]
    assert found["summary"]["troubles"] == ["22 checkpoints failed, none is complete (full)"]


def test_states(tmp_path: Path) -> None:
    def state(name: str, events: list[dict[str, Any]], *, active: bool) -> str:
        run = make_run(tmp_path / name, events)
        return str(parts(read(run), active=active)["summary"]["state"])

    failed = event(9.0, "finished", status=137, message="killed", steps=None)
    assert state("a", EVENTS, active=True) == "running"
    assert state("b", EVENTS, active=False) == "lost"
    assert state("c", [*EVENTS, *END], active=True) == "finished"
    assert state("d", [*EVENTS, failed], active=False) == "failed"
    stopped = event(9.0, "finished", status=143, message="stopped by SIGTERM", steps=None)
    assert state("e", [*EVENTS, stopped], active=False) == "stopped"


def test_events_have_no_validations_and_one_report_of_a_wait(tmp_path: Path) -> None:
    def wait(time: float, worker: int, step: int) -> dict[str, Any]:
        what = f"step {step} of fit 1"
        return event(time, "wait", worker=worker, what=what, waits_for=[2], seconds=time - 3.0)

    within = [
        event(time, kind, worker=worker, name=f"validation {number} within fit 1")
        for number in (1, 2)
        for time, kind in ((8.0, "call"), (8.1, "call ended"))
        for worker in (0, 1)
    ]
    waits = [wait(4.0, 0, 1), wait(4.0, 1, 1), wait(5.0, 0, 1), wait(5.0, 1, 1), wait(6.0, 0, 9)]
    found = parts(read(make_run(tmp_path / "run", [*EVENTS[:6], *waits, *within])), active=False)["events"]
    assert [(one["event"], one["time"], one["workers"], one["text"]) for one in found[3:]] == [
        ("call", 2.0, (0,), "fit 1"),
        ("wait", 5.0, (0, 1), "step 1 of fit 1: 2.0 s for worker 2"),
        ("wait", 6.0, (0,), "step 9 of fit 1: 3.0 s for worker 2"),
    ]


def test_equal_events_of_workers_are_one_row_until_the_membership_changes(tmp_path: Path) -> None:
    reason = "host node2 was lost"
    events = [
        job(workers=3),
        *(event(2.0 + worker / 10, "call", worker=worker, name="fit 1", epochs=3) for worker in (2, 0, 1)),
        *(event(4.0, "lost", worker=worker, reason=reason) for worker in (1, 2)),
        event(4.0, "decision", reason=reason, actions=["AbortExchange", "StartView", "ShowMessage"]),
        event(4.0, "view", number=2, workers=[0], reason=reason),
        event(5.0, "call", worker=3, name="fit 1", epochs=3),
        event(6.0, "invented", worker=3, what=[1, 2]),
    ]
    found = parts(read(make_run(tmp_path / "run", events, [])), active=True)["events"]
    view = "ends the exchange of the previous membership, begins a new view"
    assert [(row["event"], row["workers"], row["text"]) for row in found[1:]] == [
        ("call", (0, 1, 2), "fit 1 until epoch 3"),
        ("lost", (1, 2), reason),
        ("decision", (), f"{reason}; Lockstep {view}"),
        ("view", (), f"view 2 with worker 0: {reason}"),
        ("call", (3,), "fit 1 until epoch 3"),
        ("invented", (3,), "what: 1, 2"),
    ]


def test_checkpoints_say_which_ones_are_deleted(tmp_path: Path) -> None:
    def deleted(name: str, *events: dict[str, Any], **settings: Any) -> list[bool]:
        run = read(make_run(tmp_path / name, [job(**settings), *events]))
        return [one["deleted"] for one in parts(run, active=False)["checkpoints"]]

    def written(*steps: int) -> list[dict[str, Any]]:
        return [
            event(step, "checkpoint", worker=0, path=f"/a/{step}", step=step, seconds=0.1) for step in steps
        ]

    kept = {"folder": "/a", "keep": 2}
    assert deleted("unknown", *written(1, 2, 3)) == [False] * 3
    assert deleted("kept", *written(1, 2, 3), checkpoints=kept) == [True, False, False]
    # Step 2 was written again after a loss.
    assert deleted("again", *written(1, 2, 2, 3), checkpoints=kept) == [True, True, False, False]
    full = event(4.0, "checkpoint removed", worker=0, path="/a/2", reason="the disk is full")
    assert deleted("full", *written(1, 2, 3), full, checkpoints=kept) == [True, True, False]
    keeps = event(0.5, "keeps", worker=0, folder="/a", keep=1)
    assert deleted("callback", keeps, *written(1, 2)) == [True, False]
    assert deleted("hostile", *written(1, 2), checkpoints={"folder": [], "keep": "x"}) == [False, False]


def test_a_traceback_has_no_frames_of_lockstep_and_keras(tmp_path: Path) -> None:
    def shown(name: str, *files: str) -> list[str]:
        frames = "".join(f'  File "{file}", line 3, in f\n    g()\n    ^^^\n' for file in files)
        text = f"Traceback (most recent call last):\n{frames}ValueError: x\n"
        failed = event(4.0, "failed", worker=1, summary="ValueError: x", traceback=text)
        run = read(make_run(tmp_path / name, [*EVENTS, failed]))
        found = parts(run, active=False)["summary"]["failure"]["traceback"]
        assert found.startswith("Traceback (most recent call last):\n  File ")
        assert found.endswith("    ^^^\nValueError: x\n")
        return re.findall('File "([^"]*)"', found)

    library = "/venv/lib/python3.13/site-packages"
    internal = [f"{library}/lockstep/keras/patches.py", f"{library}/keras/src/trainer.py"]
    assert shown("script", "/home/a/lockstep/train.py", *internal, "/home/a/b.py") == [
        "/home/a/lockstep/train.py",
        "/home/a/b.py",
    ]
    # A fault of the libraries themselves.
    assert shown("library", "/home/a/train.py", *internal) == ["/home/a/train.py", *internal]


def test_the_newest_metrics_and_what_workers_do(tmp_path: Path) -> None:
    summary = parts(read(make_run(tmp_path / "run")), active=False)["summary"]
    assert [
        (one["name"], one["value"], one["validation"], one["validated"]) for one in summary["metrics"]
    ] == [
        ("loss", 0.4, None, True),
        ("accuracy", 0.8, 0.76, True),
    ]
    trends = [(one["trend"], one["validation_trend"]) for one in summary["metrics"]]
    assert trends == [([0.6, 0.4], [0.65, None]), ([0.7, 0.8], [0.66, 0.76])]
    assert [one["best"] for one in summary["metrics"]] == [{"value": 0.65, "epoch": 1}, None]
    assert summary["phase"] == ""
    assert summary["shares"]["compute"] == pytest.approx(0.4)
    running = parts(read(make_run(tmp_path / "running", EVENTS[:5], [])), active=True)["summary"]
    assert (running["phase"], running["progress"], running["metrics"]) == ("running the script", None, [])


def test_a_run_that_has_not_begun_has_parts_and_no_charts() -> None:
    found = parts(RunState(), active=True)
    assert found["charts"] == found["workers"] == found["events"] == []
    json.dumps(found, allow_nan=False)


def test_the_charts_of_a_run(data: RunState) -> None:
    names = [one["id"] for one in parts(data, active=False)["charts"]]
    assert names == [
        *("metric:loss", "metric:accuracy", "throughput", "duration", "parts:0", "parts:1", "parts:2"),
        *("load:cores", "load:delayed", "load:memory", "host:busy", "host:memory_used"),
        *("gpu:utilization", "gpu:memory_used"),
    ]
    for name in names:
        for axis in ("step", "time"):
            for one in chart(data, name, Window(axis=axis)):
                assert one["x"], name
                json.dumps(one, allow_nan=False)


@pytest.mark.parametrize("name", ["", "metric:other", "parts:9", "parts:x", "load:pid", "host:", "gpu:name"])
def test_a_chart_that_does_not_exist(data: RunState, name: str) -> None:
    with pytest.raises(KeyError):
        chart(data, name, Window())


def test_metrics_of_training_and_validation_share_a_chart(data: RunState) -> None:
    found = chart(data, "metric:loss", Window(axis="step"))
    assert [(one["label"], one["role"], one["x"], one["mean"]) for one in found] == [
        ("loss", "train", [10, 20], [0.9, 0.7]),
        ("loss, epochs", "epoch", [30, 60], [0.6, 0.4]),
        ("val_loss", "validation", [30, 60], [0.65, None]),
    ]
    assert (found[2]["missing"], found[2]["first_missing"]) == (1, 60.0)
    assert chart(data, "metric:loss", Window(axis="time"))[0]["x"] == [3.0, 4.0]


def test_a_metric_of_validation_alone_has_a_chart_of_its_own(tmp_path: Path) -> None:
    data = read(make_run(tmp_path / "run", measured=[metrics(1.0, 1, 1, loss=1.0, val_top=0.5)]))
    assert [one["id"] for one in parts(data, active=False)["charts"]] == ["metric:loss", "metric:val_top"]
    assert chart(data, "metric:val_top", Window())[0]["mean"] == [0.5]


def test_the_parts_of_a_step_are_seconds_of_one_step(data: RunState) -> None:
    found = chart(data, "parts:0", Window())
    assert [one["label"] for one in found] == list(STEP_PARTS)
    means = (0.01, 0.04, 0.02, 0.01, 0.01, 0.01, 0.0)
    assert [one["mean"] for one in found] == [[value] * 5 for value in means]


def test_the_speed_of_a_run_that_has_ended_is_that_of_the_whole_run(tmp_path: Path) -> None:
    none = dict.fromkeys(STEP_PARTS, 0.0)
    slow, quick = (
        steps(time, 0, number, **none | {"compute": seconds})
        for time, number, seconds in ((3.0, 11, 9.0), (4.0, 21, 1.0))
    )
    # The time of the last validation.
    rest = steps(5.0, 0, 21, count=0, **none | {"nested": 10.0})
    running = read(make_run(tmp_path / "running", EVENTS[:6], [slow, quick, rest]))
    assert parts(running, active=True)["summary"]["rate"] == pytest.approx(quick["examples"] / 1.0)
    ended = read(make_run(tmp_path / "ended", measured=[slow, quick, rest]))
    total = slow["examples"] + quick["examples"]
    assert parts(ended, active=False)["summary"]["rate"] == pytest.approx(total / 20.0)


def test_each_step_counts_once_in_the_throughput(tmp_path: Path) -> None:
    measured = [
        *(steps(at + 1.0, 0, 10 * at) for at in range(1, 4)),
        *(steps(at + 1.1, 1, 10 * at) for at in range(1, 8)),
        steps(20.0, 1, 5, call="validation within fit 1"),
        steps(21.0, 1, 1, count=1, call="fit 2"),
    ]
    events = [job(), event(0.1, "started", worker=0, pid=1), event(0.2, "started", worker=1, pid=2)]
    found = chart(read(make_run(tmp_path / "run", events, measured)), "throughput", Window())
    # Worker 0 until its last step at 4 s, then worker 1; without the validation and the first step of a call.
    assert [(one["x"], one["mean"]) for one in found] == [([2.0, 3.0, 4.0, 5.1, 6.1, 7.1, 8.1], [640.0] * 7)]


def test_a_job_with_parameter_servers_has_charts_of_staleness_and_rates(tmp_path: Path) -> None:
    serves = {"call": "updates within fit 1", "replicas": 0, "examples": 0}
    measured = [
        *(steps(at + 1.0, 0, 20 * at, count=20, replicas=0, examples=640) for at in (1, 2)),
        *(steps(at + 1.0, 1, 10 * at, staleness=at, largest_staleness=9 * at) for at in (1, 2)),
        *(steps(at + 1.0, 2, 18 * at, count=18, **serves) for at in (1, 2)),
    ]
    events = [job(workers=3, parameter_servers=1)]
    events += [event(0.1, "started", worker=worker, pid=worker + 1) for worker in (0, 1, 2)]
    data = read(make_run(tmp_path / "run", events, measured))
    found = parts(data, active=True)
    assert [one["task"] for one in found["workers"]] == ["chief", "worker", "ps"]
    assert found["summary"]["call"] == "fit 1"
    # Only the chief takes all steps.
    assert (found["summary"]["rate"], found["summary"]["rate_unit"]) == (pytest.approx(640.0), "examples/s")
    titles = {one["id"]: one["title"] for one in found["charts"]}
    assert titles["parts:2"] == "Worker 2 (parameter server)"
    shown = {
        name: [(one["label"], one["mean"]) for one in chart(data, name, Window())]
        for name in titles
        if not name.startswith("parts")
    }
    assert shown == {
        "throughput": [("all workers", [640.0, 640.0])],
        "duration": [("a step", [0.05, 0.05])],
        "rate": [("worker 0 (chief)", [20.0, 20.0]), ("worker 1", [10.0, 10.0])],
        "updates": [("worker 2 (parameter server)", [18.0, 18.0])],
        "staleness": [("worker 1", [0.1, 0.2])],
        "largest_staleness": [("worker 1", [9.0, 18.0])],
    }


def test_steps_whose_examples_are_not_known_have_a_rate_of_steps(tmp_path: Path) -> None:
    measured = [steps(at + 1.0, 0, 10 * at, examples=0, call="steps 1") for at in (1, 2)]
    data = read(make_run(tmp_path / "run", measured=measured))
    found = parts(data, active=True)
    assert (found["summary"]["rate"], found["summary"]["rate_unit"]) == (pytest.approx(10.0), "steps/s")
    assert [one["id"] for one in found["charts"]] == ["duration", "parts:0"]


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300),
    points=st.integers(1, 100),
    smoothing=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_no_extreme_is_lost(values: list[float], points: int, smoothing: float) -> None:
    found = loss(with_losses(values), points=points, smoothing=smoothing)
    finite = [value for value in values if math.isfinite(value)]
    low = [value for value in found["low"] if value is not None]
    high = [value for value in found["high"] if value is not None]
    assert len(found["x"]) == len(found["low"]) == len(found["high"]) == len(found["mean"])
    assert len(found["x"]) <= max(points, 2)
    assert found["count"] == len(values)
    assert found["missing"] == len(values) - len(finite)
    assert found["x"] == sorted(found["x"])
    if finite:
        assert min(low) == pytest.approx(min(finite), rel=1e-5, abs=1e-300)
        assert max(high) == pytest.approx(max(finite), rel=1e-5, abs=1e-300)
        means = [value for value in found["mean"] if value is not None]
        assert all(min(finite) - 11 <= value <= max(finite) + 11 for value in means)
    else:
        assert not low


def test_a_spike_of_one_step_in_a_million_is_shown() -> None:
    values = np.ones(1_000_000)
    values[123_456] = 9.0
    data = with_losses(values.tolist())
    found = loss(data, points=100)
    assert len(found["x"]) <= 100
    assert max(found["high"]) == 9.0
    at = found["high"].index(9.0)
    assert abs(found["x"][at] - 123_456) <= 10_500
    near = loss(data, start=123_450.0, stop=123_460.0, points=100)
    assert near["x"][near["high"].index(9.0)] == 123_456.0
    assert near["extent"] == [0.0, 999_999.0]


def test_the_window_continues_to_its_neighbors() -> None:
    data = with_losses([float(at) for at in range(100)])
    assert loss(data, start=10.5, stop=12.5)["x"] == [10.0, 11.0, 12.0, 13.0]
    assert loss(data, start=10.2, stop=10.4)["x"] == [10.0, 11.0]
    assert len(loss(data, start=1000.0, stop=2000.0)["x"]) <= 2


def test_smoothing_averages_over_a_share_of_the_window() -> None:
    values = [float(at % 2) for at in range(100)]
    found = loss(with_losses(values), smoothing=0.2)
    # At step 50: the mean of the steps within 9.9 of it.
    assert found["mean"][50] == pytest.approx(sum(values[41:60]) / 19, rel=1e-5)
    assert (found["low"][50], found["high"][51]) == (0.0, 1.0)
    edge = loss(with_losses(values), start=50.0, stop=60.0, smoothing=1.0)
    assert edge["mean"][edge["x"].index(50.0)] == pytest.approx(sum(values[45:56]) / 11, rel=1e-5)


def test_the_number_of_points_is_bounded() -> None:
    data = with_losses([0.0] * 10_000)
    assert len(loss(data, points=10**9)["x"]) <= MOST_POINTS
    assert len(loss(data, points=-5)["x"]) <= 2


def test_huge_and_infinite_values() -> None:
    found = loss(with_losses([1e308, -1e308, math.inf, 5e-324, 0.0]))
    assert found["low"] == [1e308, -1e308, None, 5e-324, 0.0]
    json.dumps(found, allow_nan=False)


def test_steps_that_were_trained_again_are_in_order() -> None:
    columns = Columns(*METRIC_COLUMNS)
    for at, step in enumerate([1, 2, 3, 2, 3, 4]):
        columns = columns.plus(float(at), float(step), float(at), 0)
    found = loss(RunState(batch_metrics={"loss": columns}))
    assert (found["x"], found["mean"]) == ([1, 2, 2, 3, 3, 4], [0, 1, 3, 2, 4, 5])


def test_two_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    one = parts(read(make_run(tmp_path / "a")), active=False)
    other_events = [job(seed=8, replicas=None, versions={"keras": "3.15.1", "torch": "2.13"}), *EVENTS[1:]]
    other = parts(read(make_run(tmp_path / "b", other_events)), active=False)
    rows = compare(one, other)
    differing = {(row["section"], row["name"]): (row["a"], row["b"]) for row in rows if row["differs"]}
    assert differing == {
        ("result", "state"): ("finished", "lost"),
        ("result", "digest"): ("ab12", ""),
        ("result", "model"): ("sequential", ""),
        ("job", "replicas"): ("2", "none"),
        ("job", "seed"): ("7", "8"),
        ("versions", "python"): ("3.11.7", ""),
        ("versions", "torch"): ("", "2.13"),
        ("result", "steps"): ("60", "51"),
    }
    assert [row["differs"] for row in rows] == sorted((row["differs"] for row in rows), reverse=True)
    assert not any(row["differs"] for row in compare(one, one))


def test_the_number_of_series_is_bounded() -> None:
    load = Columns(*LOAD_COLUMNS).plus(1.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    workers: GrowingMap[WorkerInfo] = GrowingMap()
    for worker in range(100):
        workers = workers.plus(worker, WorkerInfo(worker, load=load))
    data = RunState(workers=workers)
    assert len(chart(data, "load:cores", Window())) == MOST_SERIES


def test_texts_are_kept_as_they_are(tmp_path: Path) -> None:
    found = parts(read(make_hostile_run(tmp_path / "run")), active=False)
    assert found["summary"]["script"] == found["summary"]["failure"]["summary"] == HOSTILE
    assert found["charts"][0] == {
        "id": f"metric:{HOSTILE}",
        "section": "metrics",
        "title": HOSTILE,
        "unit": "",
        "kind": "lines",
        "version": 1,
    }


def test_a_lone_surrogate_does_not_break_the_json(tmp_path: Path) -> None:
    found = parts(read(make_run(tmp_path / "run", [job(target="a\ud800b")])), active=False)
    json.dumps(found, ensure_ascii=False).encode()


def test_measurements_without_events(tmp_path: Path) -> None:
    data = read(make_run(tmp_path / "run", [], MEASURED))
    assert next(one["id"] for one in parts(data, active=True)["charts"]) == "metric:loss"


def test_the_cause_of_an_exit_follows_its_status() -> None:
    fields = {"status": -9, "cause": "by the kernel, because memory ran out"}
    texts = [details(Happening(0.0, "exited", 1, each), str) for each in (fields, {"status": -9})]
    assert texts == [
        "was killed by SIGKILL, by the kernel, because memory ran out",
        "was killed by SIGKILL",
    ]


def test_a_failed_verification_names_workers_and_hosts() -> None:
    fields = {"step": 9, "part": "update", "arrays": ["out/kernel"], "workers": [1], "verdict": "worker"}
    third = {**fields, "part": "gradient", "workers": [0, 1], "verdict": "third", "hosts": ["node1", "node2"]}
    again = {**fields, "part": "gradient", "verdict": "repeated"}
    summed = {**again, "part": "sum", "workers": []}
    # Only a gradient has examples: states and sums of which no array is known just differ.
    unnamed = {**fields, "verdict": "undecided", "arrays": []}
    events = (fields, third, again, summed, {**third, "arrays": []}, unnamed, {**summed, "arrays": []})
    texts = [details(Happening(0.0, "verification failed", 0, each), str) for each in events]
    assert texts == [
        "step 9, update: wrong bits of worker 1 in out/kernel",
        "step 9, gradient: different bits of workers 0 and 1 (node1, node2), and another worker decides "
        "which are right, in out/kernel",
        "step 9, gradient: wrong bits of worker 1, which are computed again, in out/kernel",
        "step 9, sum: a wrong sum or check of it, which is summed again, in out/kernel",
        "step 9, gradient: different bits of workers 0 and 1 (node1, node2), and another worker decides "
        "which are right, in its examples",
        "step 9, update: different bits of worker 1, and nobody decides which are right",
        "step 9, sum: a wrong sum or check of it, which is summed again",
    ]
