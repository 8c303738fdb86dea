"""Folders of runs that were never executed."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0
HOSTILE = "<img src=x onerror=window.attacked=1></script><script>window.attacked=1</script>\u2028"
PARTS = {"input": 0.1, "compute": 0.4, "wait": 0.2, "exchange": 0.1, "update": 0.1, "other": 0.1}
"""The seconds of the parts of ten steps."""


def event(time: float, kind: str, /, **fields: Any) -> dict[str, Any]:
    return {"time": BEGAN + time, "event": kind, **fields}


def steps(time: float, worker: int, number: int, count: int = 10, **fields: Any) -> dict[str, Any]:
    sums = {"count": count, "began": BEGAN + time - 1, "examples": 64 * count, "replicas": 1, "seconds": 1.0}
    named = {"call": "fit 1", "number": number, "trained": number, "singles": []}
    return event(time, "steps", worker=worker, **(named | sums | PARTS | fields))


def metrics(time: float, trained: int, epoch: int | None, **values: float | None) -> dict[str, Any]:
    return event(time, "metrics", worker=0, call="fit 1", epoch=epoch, trained=trained, values=values)


def load(time: float) -> dict[str, Any]:
    worker = {"worker": 0, "cores": 1.5, "delayed": 0.1, "memory": 2**30, "faults": 0.0}
    gpu = {"index": 0, "name": "H100", "utilization": 90, "memory_used": 2**33, "memory_total": 2**36}
    gpu |= {"temperature": 60, "power": None, "throttled": "", "processes": []}
    host = {"host": "node1", "cores": 8, "busy": 3.5, "memory_used": 2**34, "memory_total": 2**35}
    return event(time, "load", **host, swapping=0.0, throttled=0.0, workers=[worker], gpus=[gpu])


def job(**fields: Any) -> dict[str, Any]:
    named = {"workers": 2, "replicas": 2, "seed": 7, "target": "train.py", "backend": "jax", "host": "node1"}
    return event(0.0, "job", **(named | {"versions": {"python": "3.11.7", "keras": "3.15.1"}} | fields))


EVENTS = [
    job(),
    event(0.1, "started", worker=0, pid=10),
    event(0.1, "started", worker=1, pid=11),
    event(1.0, "ready", worker=0),
    event(1.0, "ready", worker=1),
    event(2.0, "call", worker=0, name="fit 1"),
    event(3.5, "wait", worker=0, what="step 20 of fit 1", waits_for=[1], seconds=1.5),
    event(4.0, "lost", worker=1, reason="worker 1 was killed by SIGKILL"),
    event(4.0, "view", number=2, workers=[0], reason="worker 1 was killed by SIGKILL"),
    event(4.0, "exited", worker=1, status=-9),
    event(4.1, "paused", worker=0, number=2, seconds=0.0123),
    event(5.0, "started", worker=2, pid=12),
    event(6.0, "joined", worker=2, reason="worker 2 joined"),
    event(6.0, "view", number=3, workers=[0, 2], reason="worker 2 joined"),
    event(6.1, "paused", worker=0, number=3, seconds=0.000321),
    event(7.0, "checkpoint", worker=0, path="saved/step-40", step=40, seconds=0.25),
]
END = [
    event(9.0, "call ended", worker=0, name="fit 1"),
    event(9.1, "done", worker=0, status=0),
    event(9.2, "exited", worker=0, status=0),
    event(9.2, "exited", worker=2, status=0),
    event(10.0, "finished", status=0, message="", steps=60, digest="ab12", model="sequential"),
]
MEASURED = [
    steps(2.5, 0, 1, count=1),
    steps(2.5, 1, 1, count=1),
    *(steps(2.5 + at, 0, 10 * at + 1) for at in range(1, 6)),
    steps(3.5, 1, 11),
    steps(7.5, 2, 51),
    metrics(3.0, 10, None, loss=0.9, accuracy=0.5),
    metrics(4.0, 20, None, loss=0.7, accuracy=0.6),
    metrics(5.0, 30, 1, loss=0.6, accuracy=0.7, val_loss=0.65, val_accuracy=0.66),
    metrics(8.0, 60, 2, loss=0.4, accuracy=0.8, val_loss=None, val_accuracy=0.76),
    load(3.0),
    load(5.0),
]
LOG = "".join(f"line {number} of the log\n" for number in range(40)) + "the needle is here\nEND of the log\n"


def lines(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in events)


def make_run(
    folder: Path,
    events: Iterable[dict[str, Any]] = (*EVENTS, *END),
    measured: Iterable[dict[str, Any]] = MEASURED,
    log: str = LOG,
) -> Path:
    """Write the folder of a run, and return it."""
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_bytes(lines(events))
    (folder / "measurements.jsonl").write_bytes(lines(measured))
    (folder / "worker-0.log").write_text(log)
    (folder / "worker-1.log").write_text("")
    return folder


def make_hostile_run(folder: Path) -> Path:
    """Write the folder of a run whose every text is markup that runs a script."""
    events = [
        job(target=HOSTILE, versions={HOSTILE: HOSTILE}, backend=HOSTILE),
        event(0.1, "started", worker=0, pid=1),
        event(1.0, "wait", worker=0, what=HOSTILE, waits_for=[1], seconds=1.0),
        event(2.0, "lost", worker=0, reason=HOSTILE),
        event(2.0, "view", number=2, workers=[1], reason=HOSTILE),
        event(3.0, "checkpoint", worker=1, path=HOSTILE, step=1, seconds=0.1),
        event(4.0, "failed", worker=1, summary=HOSTILE, traceback=HOSTILE),
        event(5.0, HOSTILE, worker=1),
        event(6.0, "finished", status=1, message=HOSTILE, steps=3, digest=HOSTILE, model=HOSTILE),
    ]
    measured = [
        event(3.0, "metrics", worker=0, call=HOSTILE, epoch=None, trained=3, values={HOSTILE: 1.0}),
        steps(3.0, 0, 11, call=HOSTILE),
        load(3.0) | {"host": HOSTILE},
    ]
    return make_run(folder, events, measured, HOSTILE + "\nlast line\n")


def make_long_run(folder: Path, count: int) -> Path:
    """Write the folder of a run with this many lines of metrics, with one spike in the loss."""
    make_run(folder, measured=[])
    with (folder / "measurements.jsonl").open("w") as file:
        for at in range(1, count + 1):
            loss = 1e6 if at == count // 3 else 1 + 1000 / (at + 1000) + (at * 7919 % 1000) / 5000
            file.write(
                f'{{"time":{BEGAN + at},"event":"metrics","worker":0,"call":"fit 1","epoch":null,'
                f'"trained":{at},"values":{{"loss":{loss},"accuracy":{1 - 1 / (1 + at / 1e5)}}}}}\n'
            )
    return folder
