"""Following the folder of a run: every prefix of its files, and files that are no run's."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.monitoring.run_folder import RunFolder, steps_trained
from lockstep.observability.events import FORMAT


def event(time: float, kind: str, /, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": kind, **fields}


def steps(time: float, worker: int, number: int, trained: int, call: str = "fit 1") -> dict[str, Any]:
    parts = {"input": 0.1, "compute": 0.2, "wait": 0.3, "exchange": 0.1, "update": 0.1, "other": 0.2}
    sums = {
        "count": 1 if number == 1 else 10,
        "began": time - 1,
        "examples": 640,
        "replicas": 1,
        "seconds": 1.0,
    }
    named = {"call": call, "number": number, "trained": trained, "singles": [[1, 0, 1, 1, 1, 1, 1, 1]]}
    return event(time, "steps", worker=worker, **named, **sums, **parts)


EVENTS = [
    event(100.0, "job", workers=2, replicas=2, target="train.py"),
    event(100.1, "started", worker=0, pid=10),
    event(100.1, "started", worker=1, pid=11),
    event(101.0, "ready", worker=0),
    event(101.0, "ready", worker=1),
    event(102.0, "call", worker=0, name="fit 1"),
    event(102.0, "call", worker=1, name="fit 1"),
    event(106.0, "wait", worker=0, what="step 20 of fit 1", waits_for=[1], seconds=3.0),
    event(107.0, "lost", worker=1, reason="worker 1 was killed"),
    event(107.0, "view", number=2, workers=[0], reason="worker 1 was killed"),
    event(107.0, "exited", worker=1, status=-9),
    event(107.5, "paused", worker=0, number=2, seconds=0.4),
    event(108.0, "checkpoint", worker=0, path="c/1", step=20, seconds=0.1),
    event(109.0, "call ended", worker=0, name="fit 1"),
    event(109.5, "done", worker=0, status=0),
    event(109.6, "exited", worker=0, status=0),
    event(110.0, "finished", status=0, message="", steps=30, digest="ab"),
]
MEASURED = [
    steps(103.0, 0, 1, 1),
    steps(103.0, 1, 1, 1),
    steps(104.0, 0, 11, 11),
    event(104.0, "metrics", worker=0, call="fit 1", epoch=None, trained=10, values={"loss": 0.5}),
    event(
        105.0, "metrics", worker=0, call="fit 1", epoch=1, trained=20, values={"loss": 0.25, "val_loss": None}
    ),
    # The next chief records it again.
    event(
        107.0, "metrics", worker=0, call="fit 1", epoch=1, trained=20, values={"loss": 0.25, "val_loss": None}
    ),
    steps(108.0, 0, 21, 21),
    event(
        108.0,
        "load",
        host="a",
        cores=2,
        busy=1.5,
        memory_used=1,
        memory_total=2,
        swapping=0.0,
        throttled=0.0,
        workers=[{"worker": 0, "cores": 1.0, "delayed": 0.5, "memory": 7, "faults": 0.0}],
        gpus=[],
    ),
]


def lines(events: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in events)


def summary(folder: RunFolder) -> dict[str, Any]:
    data = folder.state
    return {
        "workers": {
            worker: (
                info.phase,
                info.pid,
                info.status,
                info.reason,
                info.host,
                len(info.steps),
                len(info.load),
            )
            for worker, info in data.workers.items()
        },
        "views": [(view.number, view.workers, view.pause) for view in data.views],
        "members": tuple(data.members),
        "calls": [(call.name, call.began, call.ended) for call in data.calls],
        "epochs": {
            name: [columns.column("trained").tolist(), columns.column("epoch").tolist()]
            for name, columns in data.metrics.items()
        },
        "batches": {name: columns.column("value").tolist() for name, columns in data.batch_metrics.items()},
        "checkpoints": len(data.checkpoints),
        "waits": sorted(data.waits),
        "finished": data.finished and data.finished["digest"],
        "trained": steps_trained(data),
        "skipped": data.skipped,
    }


EXPECTED = {
    "workers": {
        0: ("finished", 10, 0, "", "a", 3, 1),
        1: ("lost", 11, -9, "worker 1 was killed", "", 1, 0),
    },
    "views": [(2, (0,), 0.4)],
    "members": (0,),
    "calls": [("fit 1", 102.0, 109.0)],
    "epochs": {"loss": [[20.0], [1.0]], "val_loss": [[20.0], [1.0]]},
    "batches": {"loss": [0.5]},
    "checkpoints": 1,
    "waits": [],
    "finished": "ab",
    "trained": 21,
    "skipped": 0,
}


def write(folder: Path, events: bytes, measured: bytes) -> None:
    (folder / "events.jsonl").write_bytes(events)
    (folder / "measurements.jsonl").write_bytes(measured)


def test_a_whole_run(tmp_path: Path) -> None:
    write(tmp_path, lines(EVENTS), lines(MEASURED))
    folder = RunFolder(tmp_path)
    assert folder.update()
    assert summary(folder) == EXPECTED
    assert math.isnan(folder.state.metrics["val_loss"].column("value")[0])
    assert folder.state.workers[0].steps.last()["wait"] == 0.3
    assert not folder.update()


@pytest.mark.parametrize("piece", [37, 500])
def test_a_run_that_grows_is_read_to_the_same_end(tmp_path: Path, piece: int) -> None:
    events, measured = lines(EVENTS), lines(MEASURED)
    folder = RunFolder(tmp_path)
    assert not folder.update()
    for end in range(0, max(len(events), len(measured)) + piece, piece):
        write(tmp_path, events[:end], measured[:end])
        folder.update()
    # Where lines of both files arrive in another order, a call may begin with its steps.
    assert {**summary(folder), "calls": EXPECTED["calls"]} == {
        **EXPECTED,
        "workers": summary(folder)["workers"],
    }
    phases = {worker: info.phase for worker, info in folder.state.workers.items()}
    assert phases == {0: "finished", 1: "lost"}


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    garbage = (
        b'{"time": 1}\n\x00\xff\n[]\n{"time":"a","event":"job"}\n{"time":1.0,"event":"new","of":"later"}\n'
    )
    garbage += b'{"time":1.0,"event":"view","number":"x","workers":3}\n'
    write(tmp_path, garbage + lines(EVENTS), b'{"time":1.0,"event":"steps"}\n' + lines(MEASURED))
    folder = RunFolder(tmp_path)
    folder.update()
    assert summary(folder) == {**EXPECTED, "skipped": 6}


def test_a_run_of_a_later_format_is_refused(tmp_path: Path) -> None:
    later = {**EVENTS[0], "format": FORMAT + 1}
    write(tmp_path, lines([later, *EVENTS[1:]]), b"")
    folder = RunFolder(tmp_path)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=f"has format {FORMAT + 1}, and this version reads format {FORMAT}"
        ):
            folder.update()
    # A run that an earlier version has added to the folder counts.
    write(tmp_path, lines([later, {**EVENTS[0], "format": FORMAT}]), b"")
    assert folder.update()


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, lines(EVENTS), lines(MEASURED))
    folder = RunFolder(tmp_path)
    folder.update()
    write(tmp_path, lines(EVENTS[:3]), b"")
    assert folder.update()
    assert [info.phase for info in folder.state.workers.values()] == ["starting", "starting"]
    assert folder.state.finished is None
    (tmp_path / "events.jsonl").unlink()
    folder.update()
    assert not folder.state.workers


def test_the_last_run_of_a_folder_counts(tmp_path: Path) -> None:
    later = [{**one, "time": one["time"] + 1000} for one in EVENTS[:4]]
    write(tmp_path, lines([*EVENTS, *later]), lines(MEASURED))
    folder = RunFolder(tmp_path)
    folder.update()
    data = folder.state
    assert (data.began, data.finished, data.views, tuple(data.members)) == (1100.0, None, (), (0, 1))
    assert data.workers[1].reason == ""
    assert len(data.metrics["loss"]) == 1
