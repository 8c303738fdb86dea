"""What `lockstep top` says about recorded runs."""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.monitoring.overview import Overview, overview
from lockstep.monitoring.run_folder import RunFolder
from lockstep.monitoring.top_text import as_csv, as_json, as_text, csv_heading, table
from lockstep.protocol.admin import Status

from .recorded import GIB, event, gpu, job, load, record, started, steps

STATUS = Status("a", "train.py", 5, "/r", 1000.0, 4, (0, 1), (2,), 3, "fit 1")


def seen(folder: Path, now: float = 1021.0, **more: Any) -> Overview:
    run = RunFolder(folder)
    run.update()
    return overview(run.state, "train-1", now, **more)


def two_workers(
    folder: Path,
    slow: Mapping[str, float],
    loads: Iterable[Mapping[str, Any]] = (),
    **host: Any,
) -> Overview:
    """Record a run whose worker 1 is slow, with these parts of its steps; return its overview."""
    record(folder, job(), started(0), started(1))
    for time in (1019.0, 1020.0):
        record(folder, steps(0, time, 20, input=0.1, compute=0.4, wait=0.5))
        record(folder, steps(1, time, 20, **{"input": 0.1, "compute": 0.4, "wait": 0.0} | slow))
    # Without loads, the workers are as they should be.
    own = list(loads) or [{"worker": 0}, {"worker": 1}]
    # The first measurement covers the time before the steps, too.
    record(folder, *(load(time, workers=own, **host) for time in (1019.5, 1020.5)))
    return seen(folder)


SLOW_COMPUTE = "slow compute: 90 ms per replica, 40 ms on worker 0"
CAUSES: dict[str, tuple[dict[str, float], list[dict[str, Any]], dict[str, Any], str]] = {
    "input": ({"input": 0.6}, [], {}, "slow input: 60 ms per replica, 10 ms on worker 0"),
    "compute": ({"compute": 0.9}, [], {}, SLOW_COMPUTE),
    "other": (
        {"other": 0.5},
        [],
        {},
        "slow callbacks and loop: 50 ms per replica, 0 ms on worker 0",
    ),
    "swapping": (
        {"compute": 0.9},
        [{"worker": 0, "faults": 1.0}, {"worker": 1, "faults": 150.0, "delayed": 3.0}],
        {"swapping": 3.5 * 2**20},
        f"{SLOW_COMPUTE}; it waits for the disk: 150 page faults per second, and its host swaps 3.5 MiB/s",
    ),
    "neighbour": (
        {"compute": 0.9},
        [{"worker": 0, "delayed": 0.1}, {"worker": 1, "delayed": 0.8}],
        {},
        f"{SLOW_COMPUTE}; other processes use its cores: each second, its threads together wait 0.8 s for a "
        "core",
    ),
    "neighbours of all": (
        {"compute": 0.9},
        [{"worker": 0, "delayed": 0.7}, {"worker": 1, "delayed": 0.8}],
        {},
        SLOW_COMPUTE,
    ),
    "gpu": (
        {"compute": 0.9},
        [],
        {"gpus": [gpu(0, 70), gpu(1, 71, throttled="thermal")]},
        f"{SLOW_COMPUTE}; throttled: GPU 1 (thermal)",
    ),
    "quota of all": ({"compute": 0.9}, [], {"throttled": 0.5}, SLOW_COMPUTE),
}


@pytest.mark.parametrize(("slow", "loads", "host", "expected"), CAUSES.values(), ids=CAUSES.keys())
def test_the_cause_of_a_slow_worker(
    tmp_path: Path, slow: dict[str, float], loads: list[dict[str, Any]], host: dict[str, Any], expected: str
) -> None:
    view = two_workers(tmp_path, slow, loads, **host)
    assert [row.cause for row in view.workers] == ["", expected]
    assert [row.score for row in view.workers] == [
        1.0,
        pytest.approx(0.5 / sum(({"input": 0.1, "compute": 0.4} | slow).values())),
    ]
    score = view.workers[1].score
    assert list(view.advice) == [f"worker 1 is slow ({score:.2f}): {expected}"]


def test_a_quota_of_another_host_is_a_cause(tmp_path: Path) -> None:
    record(tmp_path, job(hosts=[["node1", 1], ["node2", 1]]), started(0), started(1))
    record(tmp_path, steps(0, 1020.0, 20, count=20, compute=0.8))
    record(tmp_path, steps(1, 1020.0, 20, count=20, compute=1.8))
    for time in (1020.0, 1021.0):
        record(tmp_path, load(time, "node1", [{"worker": 0}]))
        record(tmp_path, load(time, "node2", [{"worker": 1}], throttled=0.5))
    rows = seen(tmp_path).workers
    assert [row.host for row in rows] == ["node1", "node2"]
    assert (
        rows[1].cause
        == f"{SLOW_COMPUTE}; throttled: a CPU quota stops processes of its host 0.5 s per second"
    )


def test_equally_fast_workers_have_no_cause(tmp_path: Path) -> None:
    view = two_workers(tmp_path, {"compute": 0.45}, [{"worker": 0}, {"worker": 1, "faults": 500.0}])
    assert [row.cause for row in view.workers] == ["", ""]
    assert view.advice == ()


DELAYED = [{"worker": worker, "cores": 0.2, "delayed": 0.7} for worker in (0, 1)]


def test_a_host_whose_cores_others_use_is_named_although_all_workers_suffer_equally(tmp_path: Path) -> None:
    view = two_workers(tmp_path, {}, DELAYED, cores=2, busy=2.0)
    assert view.advice == (
        "box: other processes use 1.6 of 2 cores: each second, the threads of a worker together wait up to "
        "0.7 s for a core",
    )
    assert "\nbox: 2.0 of 2 cores busy, 0.4 by this job; memory" in as_text(view)


@pytest.mark.parametrize(
    ("loads", "busy"),
    # A machine that is not full; one that the job itself fills; workers that wait for no core.
    [(DELAYED, 1.2), ([one | {"cores": 0.9} for one in DELAYED], 2.0), ([{"worker": 0}, {"worker": 1}], 2.0)],
)
def test_a_host_is_not_blamed_without_reason(
    tmp_path: Path, loads: list[dict[str, Any]], busy: float
) -> None:
    assert two_workers(tmp_path, {}, loads, cores=2, busy=busy).advice == ()


def test_the_advice_of_the_line_of_a_call_is_shown_with_all_parts(tmp_path: Path) -> None:
    record(tmp_path, job(workers=1), started(0))
    nested = {"nested": 3.0, "calls": {"predict": 3.0}}
    record(tmp_path, steps(0, 1019.0, 20, compute=0.5, other=1.0) | nested)
    view = seen(tmp_path)
    assert [text.partition(" of the time")[0] for text in view.advice] == [
        "predict in a callback takes 67 %",
        "callbacks and the loop itself take 22 %",
    ]
    heads, row = table(view)
    assert heads.split()[-4:-2] == ["OTHER", "NESTED"]
    assert row.endswith("22 %  67 %   -     -")
    # Most calls have none within.
    assert "NESTED" not in table(two_workers(tmp_path / "b", {}))[0]


def test_the_steps_of_one_replica_are_not_measured(tmp_path: Path) -> None:
    record(tmp_path, job(workers=1), started(0))
    assert seen(tmp_path).advice == ()
    record(tmp_path, event(1001.0, "call", worker=0, name="fit 1"))
    (text,) = seen(tmp_path).advice
    assert text.startswith(
        "Keras itself takes the steps of one replica, so they are not measured: with --replicas 2"
    )
    # Without measured steps, a job with several replicas has not taken the second one.
    record(tmp_path / "two", job(), started(0), event(1001.0, "call", worker=0, name="fit 1"))
    assert seen(tmp_path / "two").advice == ()


def test_a_worker_with_more_replicas_is_not_slow(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0), started(1))
    record(tmp_path, steps(0, 1020.0, 20, replicas=1, compute=0.4))
    record(tmp_path, steps(1, 1020.0, 20, replicas=3, compute=1.2))
    assert [row.score for row in seen(tmp_path).workers] == [1.0, pytest.approx(1.0)]


def test_rates_are_those_of_the_last_seconds(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0))
    # The first step, which compiles, and what is older than the window do not count.
    record(tmp_path, steps(0, 1002.0, 1, count=1, compute=1.5), steps(0, 1003.0, 11, compute=1.0))
    record(tmp_path, steps(0, 1015.0, 31, count=20, input=0.2, compute=0.8))
    record(tmp_path, steps(0, 1019.0, 61, count=30, input=0.3, compute=1.2))
    now, average = seen(tmp_path), seen(tmp_path, averages=True)
    assert now.workers[0].steps_per_second == pytest.approx(50 / 2.5)
    assert now.workers[0].parts["input"] == pytest.approx(0.2)
    assert now.examples_per_second == pytest.approx(50 * 64 / 2.5)
    assert average.workers[0].steps_per_second == pytest.approx(60 / 3.5)
    assert (now.step, now.trained, now.idle) == (61, 61, pytest.approx(2.0))
    assert seen(tmp_path, now=1060.0).workers[0].steps_per_second is None


def test_the_states_of_workers(tmp_path: Path) -> None:
    record(tmp_path, job(), *(started(worker) for worker in range(6)))
    record(tmp_path, *(event(1001.0, "ready", worker=worker) for worker in (1, 2, 3, 4, 5)))
    record(tmp_path, *(event(1002.0, "call", worker=worker, name="fit 1") for worker in (3, 4, 5)))
    record(tmp_path, steps(4, 1003.0, 1), steps(5, 1003.0, 1))
    record(tmp_path, event(1010.0, "wait", worker=4, what="step 3 of fit 1", waits_for=[3, 5], seconds=5.0))
    record(
        tmp_path, event(1011.0, "lost", worker=5, reason="x"), event(1011.0, "exited", worker=5, status=-9)
    )
    rows = seen(tmp_path, status=STATUS).workers
    assert [(row.worker, row.state, row.ended) for row in rows] == [
        (0, "starting", False),
        (1, "running the script", False),
        (2, "joining", False),
        (3, "compiling", False),
        (4, "waits for workers 3 and 5", False),
        (5, "lost", True),
    ]


def test_a_call_within_a_call_is_named_and_does_not_count_as_compiling(tmp_path: Path) -> None:
    record(tmp_path, job(workers=4), *(started(worker) for worker in range(4)))
    record(tmp_path, *(event(1002.0, "call", worker=worker, name="fit 1") for worker in range(4)))
    record(tmp_path, *(steps(worker, 1003.0, 1) for worker in range(4)))
    for call in ("predict 1 within fit 1", "predict 2 within fit 1"):
        record(tmp_path, event(1004.0, "call", worker=0, name=call))
    record(tmp_path, event(1004.0, "call", worker=1, name="evaluate 1 within fit 1"))
    record(tmp_path, event(1004.0, "call", worker=2, name="validation 1 within fit 1"))
    assert [row.state for row in seen(tmp_path).workers] == [
        *("predicting", "evaluating", "validating", "training")
    ]
    record(tmp_path, steps(0, 1005.0, 2))
    assert seen(tmp_path).workers[0].state == "training"
    record(tmp_path, event(1006.0, "call ended", worker=0, name="fit 1"))
    run = RunFolder(tmp_path)
    run.update()
    assert [(call.name, call.ended) for call in run.state.calls] == [
        (name, 1006.0)
        for name in ("fit 1", "predict within fit 1", "evaluate within fit 1", "validation within fit 1")
    ]


def test_a_worker_that_compiles_new_shapes_is_compiling(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0), started(1))
    new = {"compiled": 3, "compiling": 0.8}
    record(tmp_path, steps(0, 1019.0, 20, compute=0.9, wait=0.1) | new)
    record(tmp_path, steps(1, 1019.0, 20, compute=0.9, wait=0.1) | new | {"compiling": 0.3})
    assert [row.state for row in seen(tmp_path).workers] == ["compiling", "training"]


def with_servers(folder: Path, call: str = "fit 1") -> Overview:
    """Record a job of a chief, two workers, a third that replaces the second one, and a server."""
    record(folder, job(workers=4, parameter_servers=1), *(started(worker) for worker in (0, 1, 2, 3, 7)))
    record(folder, event(1019.0, "exited", worker=2, status=-9))
    chief = {"replicas": 0, "call": call}
    record(folder, steps(0, 1020.0, 40, count=40, compute=0.1, wait=0.9) | chief)
    for worker, count, staleness, largest in ((1, 30, 15, 2), (7, 10, 30, 9)):
        known = {"staleness": staleness, "largest_staleness": largest, "call": call}
        record(folder, steps(worker, 1020.0, count, count=count, compute=0.6, exchange=0.4) | known)
    # A single step, the first one, compiles; its staleness counts.
    first = {"call": call, "staleness": 45, "largest_staleness": 45}
    record(folder, steps(7, 1020.1, 1, count=1, compute=9.0) | first)
    serves = {"replicas": 0, "examples": 0, "call": f"updates within {call}"}
    record(folder, steps(3, 1020.0, 38, count=38, update=0.5, exchange=0.25, wait=0.25) | serves)
    return seen(folder)


def test_a_job_with_parameter_servers_shows_tasks_staleness_and_updates(tmp_path: Path) -> None:
    view = with_servers(tmp_path)
    rows = {row.worker: row for row in view.workers}
    assert {worker: row.task for worker, row in rows.items()} == {
        0: "chief",
        1: "worker",
        2: "worker",
        3: "ps",
        7: "worker",
    }
    assert {worker: (row.staleness, row.largest_staleness) for worker, row in rows.items()} == {
        0: (None, None),
        1: (0.5, 2),
        2: (None, None),
        3: (None, None),
        7: (pytest.approx(75 / 11), 45),
    }
    assert rows[3].state == "serving"
    assert rows[3].steps_per_second == pytest.approx(38.0)
    assert (rows[3].parts["update"], rows[3].parts["wait"], rows[3].score) == (0.5, 0.25, None)
    # The chief takes all steps.
    assert (view.step, view.trained) == (40, 40)
    assert view.examples_per_second == pytest.approx(64 * 40)
    head, *lines = table(view)
    assert head.split()[:7] == ["WORKER", "PID", "TASK", "STATE", "REPL", "STEPS/S", "SCORE"]
    assert " 0.5   2   " in lines[1]
    assert " 6.8   45  " in lines[3]
    read = list(csv.DictReader(io.StringIO(csv_heading() + as_csv(view))))
    assert [row["task"] for row in read] == ["chief", "worker", "ps", "worker", "worker"]
    assert (read[1]["staleness"], read[1]["largest_staleness"], read[0]["staleness"]) == ("0.5", "2", "")
    others = table(two_workers(tmp_path / "without", {}))[0].split()
    assert not {"TASK", "STALE", "MAX"} & set(others)


def test_scheduled_functions_have_a_rate(tmp_path: Path) -> None:
    record(tmp_path, event(1001.0, "call", worker=0, name="functions 1"))
    view = with_servers(tmp_path, "functions 1")
    assert view.steps_per_second == pytest.approx(40.0)
    # Their examples are not known.
    unknown = replace(view, examples_per_second=None)
    assert "functions 1, step 40, 40 training steps, 40 functions/s\n" in as_text(unknown)
    assert {row.worker: row.steps_per_second for row in view.workers if row.steps_per_second} == {
        0: pytest.approx(40.0),
        1: pytest.approx(30.0),
        3: pytest.approx(38.0),
        7: pytest.approx(10.0),
    }


def test_the_head_tells_epoch_metrics_and_silence(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0), event(1001.0, "call", worker=0, name="fit 1"), steps(0, 1010.0, 40))
    values = {"loss": 0.5, "accuracy": 0.75}
    record(tmp_path, event(1010.0, "metrics", worker=0, call="fit 1", epoch=2, trained=40, values=values))
    view = seen(tmp_path, status=STATUS, silent_since=1011.0)
    text = as_text(view)
    assert "fit 1 epoch 3, step 40, 40 training steps" in text
    assert "last step 11 s ago" in text
    assert "loss 0.5  accuracy 0.75" in text
    assert "no answer from the coordinator since " in text
    assert "(10 s)" in text
    assert "1 of 3 workers" in text
    assert text.splitlines()[0].endswith("  process 5")


def test_processes_that_live_have_ids(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0), started(1), event(1010.0, "exited", worker=1, status=-9))
    view = seen(tmp_path)
    assert [line.split()[:2] for line in table(view)] == [["WORKER", "PID"], ["0", "70"], ["1", "ended"]]
    assert [row["pid"] for row in csv.DictReader(io.StringIO(csv_heading() + as_csv(view)))] == ["70", "71"]
    over = seen(tmp_path, end="a finished", status=STATUS)
    assert "process" not in as_text(over).splitlines()[0]


def test_events_are_told(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0))
    record(tmp_path, event(1065.0, "lost", worker=1, reason="worker 1 was killed by SIGKILL"))
    record(tmp_path, event(1065.0, "view", number=2, workers=[0], reason="worker 1 was killed by SIGKILL"))
    record(tmp_path, event(1065.5, "paused", worker=0, number=2, seconds=0.25))
    record(tmp_path, event(1065.6, "decision", reason="no", actions=[]))
    assert seen(tmp_path, now=1066.0).events == (
        "1:05 worker 1 lost: worker 1 was killed by SIGKILL",
        "1:05 view 2 with worker 0",
        "1:06 training paused for 250 ms",
    )


def test_equal_events_are_one_line_that_counts(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0))
    for at in range(22):
        record(tmp_path, event(1010.0 + at, "checkpoint failed", worker=0, reason="the disk is full"))
        record(tmp_path, event(1010.5 + at, "decision", reason="no checkpoint: the disk is full", actions=[]))
        if at == 10:
            record(tmp_path, event(1020.5, "checkpoint", worker=0, path="c/step-20", step=20, seconds=0.1))
    assert seen(tmp_path, now=1066.0).events == (
        "0:20 checkpoint step-20",
        "0:31 no checkpoint: the disk is full (22 times)",
    )


def test_equal_events_of_workers_are_one_line(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0))
    for worker in (0, 2, 1):
        record(tmp_path, event(4659.6, "resumed", worker=worker, where="step 3 of fit 1", step=3))
    record(tmp_path, event(4660.0, "joined", worker=2, reason="worker 2 joined (3 workers)"))
    record(tmp_path, event(4660.0, "checkpoint not removed", worker=0, path="c/step-20", reason="why"))
    assert seen(tmp_path, now=4700.0).events == (
        "1:01:00 workers 0, 1 and 2 resumed after step 3 of fit 1",
        "1:01:00 worker 2 joined (3 workers)",
        "1:01:00 an old checkpoint could not be removed: why",
    )


def test_the_head_tells_how_it_goes(tmp_path: Path) -> None:
    record(tmp_path, job(), started(0), steps(0, 1010.0, 40, compute=0.5))
    record(tmp_path, event(1065.0, "lost", worker=1, reason="worker 1 was killed by SIGKILL"))
    record(tmp_path, event(1066.0, "checkpoint failed", worker=0, reason="full; free space"))
    record(tmp_path, event(1067.0, "verified", worker=0, count=24, up_to=12))
    view = seen(tmp_path, now=1100.0)
    assert view.went == (
        view.went[0],
        "1 lost",
        "1 checkpoint failed, none is complete (full)",
        "24 computations verified",
    )
    assert view.went[0].endswith(" % effective training")
    assert "; ".join(view.went) in as_text(view).splitlines()
    # The last line has it, too.
    assert "1 lost" not in as_text(replace(view, end=f"x ended; {'; '.join(view.went)}")).splitlines()[:4]


@pytest.mark.parametrize("width", [80, 60])
def test_the_table_fits_a_terminal(tmp_path: Path, width: int) -> None:
    hosts = [["a-host-with-a-long-name.example.org", 2]]
    record(tmp_path, job(hosts=hosts), started(0), started(123_456))
    record(tmp_path, steps(0, 1020.0, 20, compute=0.4, wait=0.1), steps(123_456, 1020.0, 20, compute=0.9))
    record(tmp_path, load(1020.0, hosts[0][0], [{"worker": 0}, {"worker": 123_456}], gpus=[gpu(0, 70)]))
    record(tmp_path, load(1020.0, "b", []))
    view = seen(tmp_path)
    assert all(len(line) <= width for line in table(view, width))
    heads = table(view, width)[0].split()
    assert {"WORKER", "STATE", "STEPS/S", "SCORE"} <= set(heads)
    assert {"EXCH", "UPD", "GPU"} <= set(table(view)[0].split())


def test_what_a_gpu_does_is_beside_its_worker(tmp_path: Path) -> None:
    view = two_workers(tmp_path, {}, [], gpus=[gpu(0, 70), gpu(1, 71, 999, utilization=None), gpu(2)])
    rows = view.workers
    assert [row.gpus for row in rows] == [(0,), (1,)]
    assert [row.gpu_utilization for row in rows] == [90, None]
    assert [row.gpu_memory for row in rows] == [5 * GIB, 5 * GIB]
    text = as_text(view)
    assert "  GPU 0 H100  90 %  20.0 of 80.0 GiB  61 C  400 W  processes 70  worker 0\n" in text
    assert "  GPU 2 H100  90 %  20.0 of 80.0 GiB  61 C  400 W\n" in text


def test_json_and_csv_have_the_values_of_the_table(tmp_path: Path) -> None:
    view = two_workers(tmp_path, {"compute": 0.9})
    read = json.loads(as_json(view))
    assert as_json(view).count("\n") == 1
    assert read["workers"][1]["cause"] == SLOW_COMPUTE
    assert read["hosts"][0]["memory_total"] == 32 * GIB
    rows = list(csv.DictReader(io.StringIO(csv_heading() + as_csv(view))))
    assert [row["worker"] for row in rows] == ["0", "1"]
    assert rows[1]["cause"] == SLOW_COMPUTE
    assert (rows[0]["input"], rows[0]["wait"], rows[0]["memory"]) == ("0.1", "0.5", str(2 * GIB))
    assert rows[0]["gpu_memory"] == ""


def test_a_run_without_anything(tmp_path: Path) -> None:
    view = seen(tmp_path, end="x ended", active=False)
    assert view.workers == ()
    assert as_text(view).splitlines()[1:] == [
        "x ended",
        "to do: the same command begins again, because no checkpoint was written",
        "",
        "no worker has started",
    ]
    assert as_csv(view) == ""


def test_workers_of_an_earlier_run_in_the_folder_are_not_shown(tmp_path: Path) -> None:
    record(tmp_path, job(500.0, workers=3), *(started(worker, 501.0) for worker in range(3)))
    record(tmp_path, job(), started(0))
    assert [row.worker for row in seen(tmp_path).workers] == [0]
