"""Run folders that tests write."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GIB = 2**30


def record(folder: Path, *lines: Mapping[str, Any]) -> Path:
    """Append events and measurements to the files of a run folder; return the folder."""
    folder.mkdir(exist_ok=True)
    for line in lines:
        name = "measurements" if line["event"] in ("steps", "metrics", "load") else "events"
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return folder


def job(time: float = 1000.0, workers: int = 2, **fields: Any) -> dict[str, Any]:
    known = {"workers": workers, "replicas": workers, "target": "train.py", "host": "box", "hosts": []}
    return {"time": time, "event": "job", **known, **fields}


def started(worker: int, time: float = 1000.5) -> dict[str, Any]:
    return {"time": time, "event": "started", "worker": worker, "pid": 70 + worker}


def event(time: float, name: str, /, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": name, **fields}


def steps(
    worker: int, time: float, number: int, *, count: int = 10, replicas: int = 1, **parts: float
) -> dict[str, Any]:
    """Return a measurement of steps of `fit 1`, of 64 examples each; the parts are seconds of all of them."""
    seconds = dict.fromkeys(("input", "compute", "wait", "exchange", "update", "other"), 0.0) | parts
    total = sum(seconds.values())
    sums = {"count": count, "examples": 64 * count, "replicas": replicas, "seconds": total}
    place = {"call": "fit 1", "number": number, "trained": number, "began": time - total, "singles": []}
    return {"time": time, "event": "steps", "worker": worker, **place, **sums, **seconds}


def load(
    time: float, host: str = "box", workers: Iterable[Mapping[str, Any]] = (), **fields: Any
) -> dict[str, Any]:
    known = {"cores": 8, "busy": 3.5, "memory_used": 12 * GIB, "memory_total": 32 * GIB, "swapping": 0.0}
    more = {"throttled": 0.0, "gpus": [], "workers": [used() | one for one in workers]}
    return {"time": time, "event": "load", "host": host, **known, **more, **fields}


def used() -> dict[str, Any]:
    return {"worker": 0, "cores": 1.0, "delayed": 0.0, "memory": 2 * GIB, "faults": 0.0}


def gpu(index: int, *pids: int, **fields: Any) -> dict[str, Any]:
    known = {"index": index, "name": "H100", "utilization": 90, "memory_used": 20 * GIB, "temperature": 61}
    more = {"memory_total": 80 * GIB, "power": 400.0, "throttled": ""}
    return known | more | {"processes": [[pid, 5 * GIB] for pid in pids]} | fields
