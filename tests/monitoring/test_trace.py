"""Traces of single steps: which steps, which times, and the fields that the Trace Event Format requires."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.monitoring.trace import parse_steps, slowest, trace_of

PARTS = ("input", "compute", "wait", "exchange", "update", "other")
BEGAN = 1_700_000_000.25
"""When a run begins, in seconds since 1970."""


def job(time: float, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": "job", "workers": 2, "host": "here", "hosts": [], **fields}


def measured(worker: int, trained: int, numbers: range, at: float, call: str = "fit 1") -> dict[str, Any]:
    """A line about steps of 1000 us each, of which the last is the training step `trained`."""
    singles = [
        [number, at_step * 1001, 100 + worker, 500, 200, 0, 150, 50 - worker]
        for at_step, number in enumerate(numbers)
    ]
    named = {"worker": worker, "call": call, "number": numbers[-1], "trained": trained, "began": at}
    sums = {"count": len(numbers), "examples": 0, "replicas": 1, "seconds": 0.0, **dict.fromkeys(PARTS, 0.0)}
    return {"time": at + 1, "event": "steps", **named, **sums, "singles": singles}


def write(folder: Path, events: Sequence[Any], lines: Sequence[Any], end: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (folder / "measurements.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + end)
    return folder


def check(events: Sequence[Mapping[str, Any]]) -> None:
    """Check what the Trace Event Format requires of complete, instant and metadata events."""
    ends: dict[tuple[int, int], list[int]] = {}
    named = set()
    for event in json.loads(json.dumps(events)):
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert set(event["args"]) == {"name"}
                named.add((event["name"], event["pid"], event["tid"] if "thread" in event["name"] else 0))
            case "X":
                assert type(event["ts"]) is type(event["dur"]) is int
                assert event["dur"] >= 0
                # Slices of a thread nest: each lies in the one before, or begins after its end.
                open_ends = ends.setdefault((event["pid"], event["tid"]), [])
                while open_ends and open_ends[-1] <= event["ts"]:
                    open_ends.pop()
                assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1]
                open_ends.append(event["ts"] + event["dur"])
            case "i":
                assert type(event["ts"]) is int
                assert event["s"] in ("g", "p", "t")
            case other:
                raise AssertionError(other)
    assert {("thread_name", *place) for place in ends} <= named
    assert {("process_name", process, 0) for process, _ in ends} <= named


def slices(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """Return the parts and their times in microseconds, in their order, by step and worker."""
    found: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "step":
            parts = found[event["name"], event["tid"]] = []
        elif event["ph"] == "X":
            parts.append((event["name"], event["dur"]))
    return found


def test_steps_of_all_workers_have_their_parts_in_order(tmp_path: Path) -> None:
    lines = [
        measured(0, 1, range(1, 2), BEGAN),
        measured(1, 1, range(1, 2), BEGAN),
        # The training steps of a second call follow those of the first.
        measured(0, 13, range(1, 4), BEGAN + 2, call="fit 2"),
        measured(1, 13, range(1, 4), BEGAN + 2.0000005, call="fit 2"),
    ]
    changes = [
        {"time": BEGAN + 1, "event": "view", "number": 2, "workers": [0], "reason": "before"},
        {"time": BEGAN + 2.001, "event": "view", "number": 3, "workers": [0, 1], "reason": "why"},
        {"time": BEGAN + 2.002, "event": "checkpoint", "worker": 1, "path": "c", "step": 12, "seconds": 0.1},
        {"time": BEGAN + 2.002, "event": "warning", "text": "something else"},
        {"time": BEGAN + 3, "event": "lost", "worker": 1, "reason": "after"},
    ]
    events = trace_of(write(tmp_path, [job(BEGAN), *changes], lines), range(12, 14))
    check(events)
    nonzero = {
        worker: [
            ("input", 100 + worker),
            ("compute", 500),
            ("wait", 200),
            ("update", 150),
            ("other", 50 - worker),
        ]
        for worker in (0, 1)
    }
    assert slices(events) == {
        (f"step {step}", worker): nonzero[worker] for step in (12, 13) for worker in (0, 1)
    }
    steps = [event for event in events if event.get("cat") == "step"]
    start = round((BEGAN + 2) * 1e6)
    assert [(event["ts"], event["dur"]) for event in steps[:2]] == [
        (start + 1001, 1000),
        (start + 2002, 1000),
    ]
    assert steps[0]["args"] == {"call": "fit 2", "number in call": 2}
    instants = [(event["name"], event["tid"]) for event in events if event["ph"] == "i"]
    assert instants == [("checkpoint of step 12", 1)]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["here", "worker 0", "worker 1"]


def test_hosts_are_processes(tmp_path: Path) -> None:
    lines = [measured(worker, 1, range(1, 2), BEGAN) for worker in (0, 1, 2, 3)]
    figures = ("cores", "busy", "memory_used", "memory_total", "swapping", "throttled")
    of_worker = {"worker": 3, "cores": 1, "delayed": 0, "memory": 1, "faults": 0}
    named = {"time": BEGAN, "event": "load", "host": "other", "workers": [of_worker], "gpus": []}
    load = named | dict.fromkeys(figures, 1)
    begun = job(BEGAN, hosts=[["node1", 1], ["node2", 1]])
    events = trace_of(write(tmp_path, [begun], [*lines, load]), range(1, 2))
    check(events)
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    threads = {event["tid"]: names[event["pid"]] for event in events if event["ph"] == "X"}
    assert threads == {0: "node1", 1: "node2", 2: "unknown host", 3: "other"}


def test_a_folder_of_several_runs_shows_each_step_of_the_last_one(tmp_path: Path) -> None:
    first = [measured(worker, 10, range(1, 11), BEGAN) for worker in (0, 1, 2)]
    later = BEGAN + 100
    # It resumes after step 6, with fewer workers; the joiner 1 takes a step alone first.
    second = [
        measured(1, 7, range(7, 8), later),
        measured(0, 12, range(7, 13), later),
        measured(1, 12, range(7, 13), later + 1),
    ]
    folder = write(tmp_path, [job(BEGAN), job(later)], [*first, *second])
    events = trace_of(folder, range(6, 8))
    check(events)
    starts = {(event["name"], event["tid"]): event["ts"] for event in events if event.get("cat") == "step"}
    old = round(BEGAN * 1e6) + 5 * 1001
    assert starts == {
        ("step 6", 0): old,
        ("step 6", 1): old,
        ("step 6", 2): old,
        ("step 7", 0): round(later * 1e6),
        ("step 7", 1): round((later + 1) * 1e6),
    }


def test_workers_of_parameter_servers_take_some_of_the_steps(tmp_path: Path) -> None:
    lines = [
        measured(0, 14, range(1, 5), BEGAN),
        {**measured(1, 14, range(1, 3), BEGAN), "steps": [11, 14]},
        {**measured(2, 12, range(1, 3), BEGAN), "steps": [13, 12]},
        {**measured(2, 13, range(3, 4), BEGAN + 1), "steps": [13]},
    ]
    folder = write(tmp_path, [job(BEGAN, workers=4, parameter_servers=1)], lines)
    events = trace_of(folder, range(12, 15))
    check(events)
    assert list(slices(events)) == [
        *(("result 12", 0), ("result 13", 0), ("result 14", 0)),
        *(("step 14", 1), ("step 12", 2), ("step 13", 2)),
    ]
    found = [event for event in events if event.get("cat") == "step"]
    assert [event["args"] for event in found[2:4]] == [
        {"call": "fit 1", "number in call": 4},
        {"call": "fit 1", "number on worker": 2},
    ]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["here", "worker 0 (chief)", "worker 1", "worker 2"]


def test_steps_that_overlap_because_times_are_rounded_are_shown_one_after_the_other(tmp_path: Path) -> None:
    lines = [measured(0, 1, range(1, 2), BEGAN), measured(0, 2, range(2, 3), BEGAN + 0.000998)]
    events = trace_of(write(tmp_path, [job(BEGAN)], lines), range(1, 3))
    check(events)
    assert len(slices(events)) == 2


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            "1024:1025",
            "step 1025 was not recorded one by one; the nearest steps that were: 1:1024 and 2049:2064",
        ),
        (
            "1500",
            "step 1500 was not recorded one by one; the nearest steps that were: 1:1024 and 2049:2064",
        ),
        (
            "2050:999999999999999999",
            "step 2065 was not recorded one by one; the nearest steps that were: 2049:2064 and 4097; the run "
            "has taken 4097 steps",
        ),
        (
            "5000",
            "step 5000 was not recorded one by one; the nearest steps that were: 4097; the run has taken "
            "4097 steps",
        ),
    ],
)
def test_steps_that_were_not_recorded_are_named(tmp_path: Path, steps: str, message: str) -> None:
    lines = [
        {**measured(0, last, numbers, BEGAN), **dict.fromkeys(("seconds", "examples", "replicas", *PARTS), 1)}
        for last, numbers in ((1024, range(1, 1025)), (2064, range(2049, 2065)), (4097, range(4097, 4098)))
    ]
    folder = write(tmp_path, [job(BEGAN)], lines)
    with pytest.raises(ConfigError) as refused:
        trace_of(folder, parse_steps(steps))
    assert str(refused.value) == message
    check(trace_of(folder, parse_steps("2049:2064")))


@pytest.mark.parametrize(
    "text", ["", "0", "0:3", "5:4", "x", "1:", ":1", "-1:3", "1:2:3", "\u0661", "9" * 30]
)
def test_texts_that_name_no_steps(text: str) -> None:
    with pytest.raises(ConfigError, match="names no steps: give the first and the last one"):
        parse_steps(text)
    assert parse_steps("7") == range(7, 8)


def test_lines_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    lines = [measured(0, 2, range(1, 3), BEGAN)]
    folder = write(tmp_path, [job(BEGAN)], lines, '{"event":"steps","singles":[[1,2\n\xff{"singles":[[')
    assert len(slices(trace_of(folder, range(1, 3)))) == 2


def trace(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lockstep", "trace", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_command_writes_the_file(tmp_path: Path) -> None:
    write(tmp_path / "run", [job(BEGAN)], [measured(0, 2, range(1, 3), BEGAN)])
    # A job of this name may run elsewhere.
    done = trace(tmp_path, "./run", "--steps", "1:2")
    assert (done.returncode, done.stdout) == (0, "")
    longest = "step 1 took worker 0 the longest: 1 ms, of which compute took 0.5 ms"
    assert done.stderr == f"lockstep: run/trace.json shows 2 steps; {longest}\n"
    written = (tmp_path / "run" / "trace.json").read_text()
    assert json.loads(written) == trace_of(tmp_path / "run", range(1, 3))
    shown = trace(tmp_path, "./run", "--steps", "1:2", "-o", "-")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, written, "")


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "run", [job(BEGAN)], [])
    for folder, message in {
        "empty": "is not the folder of a run: it has no events.jsonl",
        "run": "no step of this run was recorded one by one: it has no training step yet",
    }.items():
        with pytest.raises(ConfigError, match=message):
            trace_of(tmp_path / folder, range(1, 2))
    unknown = trace(tmp_path, f"no-job-{os.getpid()}", "--steps", "1")
    assert unknown.returncode == 2
    assert unknown.stderr.count("\n") == 1
    assert list((tmp_path / "run").glob("trace*")) == []


def test_the_step_that_took_a_worker_longest_is_named(tmp_path: Path) -> None:
    lines = [measured(worker, 3, range(1, 4), BEGAN) for worker in (0, 1)]
    # Worker 0 waits for worker 1, which computes.
    lines[0]["singles"][1][4] += 9_000
    lines[1]["singles"][1][3] += 8_900
    events = trace_of(write(tmp_path, [job(BEGAN)], lines), range(1, 4))
    assert slowest(events) == "step 2 took worker 1 the longest: 9.9 ms, of which compute took 9.4 ms"
