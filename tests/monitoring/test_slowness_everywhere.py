"""One judge of slowness: the line at the end of `fit`, `lockstep top`, the page and the report agree."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lockstep.monitoring import page_data
from lockstep.monitoring.overview import overview
from lockstep.monitoring.report import build_report
from lockstep.monitoring.run_folder import RunFolder
from lockstep.monitoring.top_text import as_text
from lockstep.observability.run_lines import happening, measurement
from lockstep.observability.run_state import RunState
from lockstep.observability.slowness import describe

from .recorded import event, gpu, job, load, record, started, steps

READING = (
    "reading takes {} % of the time: cache or prefetch the data, or do less work per example (see "
    "'input' in the documentation)"
)
VALIDATION = "validation takes {} % of the time: validate on less data, or less often (validation_freq)"
NESTED = {"nested": 10.0, "calls": {"validation": 10.0}}
BUSY_HOST = [{"worker": worker, "cores": 0.2, "delayed": 0.7} for worker in (0, 1)]
FAST: dict[str, Any] = {"input": 0.1, "compute": 0.8, "wait": 0.05, "exchange": 0.05}


class Planted(NamedTuple):
    """What is measured in twenty steps of each of two workers, and what all four places must say of it."""

    said: tuple[str, ...]
    workers: tuple[Mapping[str, Any], Mapping[str, Any]]
    loads: Iterable[Mapping[str, Any]] = ({"worker": 0}, {"worker": 1})
    host: Mapping[str, Any] = {}


def both(**measured: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return measured, measured


CAUSES = {
    "nothing": Planted((), both(**FAST)),
    "slow input": Planted((READING.format(70),), both(input=1.4, compute=0.5, wait=0.1)),
    "an input that takes less than computing": Planted(
        (READING.format(36),), both(input=0.72, compute=1.18, wait=0.1)
    ),
    "slow input and a validation that takes longer": Planted(
        (VALIDATION.format(83), READING.format(12)), both(input=1.4, compute=0.5, wait=0.1, **NESTED)
    ),
    "a slow worker": Planted(
        ("worker 1 is slow (0.50): slow compute: 80 ms per replica, 40 ms on worker 0",),
        ({"compute": 0.8, "wait": 0.8}, {"compute": 1.6}),
    ),
    "a slow worker on a host of other processes": Planted(
        (
            "worker 1 is slow (0.50): slow compute: 80 ms per replica, 40 ms on worker 0; other processes "
            "use its cores: each second, its threads together wait 0.8 s for a core",
        ),
        ({"compute": 0.8, "wait": 0.8}, {"compute": 1.6}),
        ({"worker": 0, "cores": 0.3}, {"worker": 1, "cores": 0.3, "delayed": 0.8}),
        {"cores": 2, "busy": 2.0},
    ),
    "a slow worker with a throttled GPU": Planted(
        (
            "worker 1 is slow (0.50): slow compute: 80 ms per replica, 40 ms on worker 0; throttled: GPU 1 "
            "(thermal)",
        ),
        ({"compute": 0.8, "wait": 0.8}, {"compute": 1.6}),
        host={"gpus": [gpu(0, 70), gpu(1, 71, throttled="thermal")]},
    ),
    "a callback that saves files": Planted(
        (
            "worker 0 is slow (0.50): slow callbacks and loop: 42 ms per replica, 2 ms on worker 1; "
            "one worker saves the files of callbacks: save less often, or do less in callbacks",
            "box: other processes use 1.4 of 2 cores: each second, the threads of a worker together wait up "
            "to 0.4 s for a core",
        ),
        ({"compute": 0.76, "other": 0.84}, {"compute": 0.76, "other": 0.04, "wait": 0.8}),
        ({"worker": 0, "cores": 0.3, "delayed": 0.4}, {"worker": 1, "cores": 0.3}),
        {"cores": 2, "busy": 2.0},
    ),
    "slow callbacks on a slow processor": Planted(
        ("worker 0 is slow (0.45): slow callbacks and loop: 50 ms per replica, 10 ms on worker 1",),
        ({"compute": 1.2, "other": 1.0}, {"compute": 0.8, "other": 0.2, "wait": 1.2}),
    ),
    "an overloaded host": Planted(
        (
            "box: other processes use 1.6 of 2 cores: each second, the threads of a worker together wait up "
            "to 0.7 s for a core",
        ),
        both(compute=0.8, wait=1.2),
        BUSY_HOST,
        {"cores": 2, "busy": 2.0},
    ),
    "a tiny batch": Planted(
        (
            "a step has 2 examples, and takes 3.5 ms without waiting: use larger batches, or -n 1 --replicas "
            "2, which computes the same bits",
        ),
        both(count=400, examples=800, compute=0.6, update=0.4, other=0.4, wait=0.5, exchange=0.3),
    ),
    "changing lengths": Planted(
        ("19 of 20 steps had batches of new shapes, and compiling them took 6 s; pad to a few lengths",),
        both(compute=7.0, wait=1.0, compiled=19, compiling=6.0),
    ),
    "one smaller last batch": Planted((), both(compute=7.0, wait=1.0, compiled=1, compiling=6.0)),
    "a slow exchange": Planted(
        ("the exchange takes 50 % of the time: use larger batches",),
        both(compute=1.0, exchange=1.2, wait=0.2),
    ),
    "a long validation": Planted((VALIDATION.format(83),), both(compute=1.9, input=0.1, **NESTED)),
    "waiting without a cause": Planted(
        (
            "waiting takes 75 % of the time, although no worker is slow: other processes may use the cores, "
            "or workers were lost",
        ),
        both(compute=0.4, input=0.1, wait=1.5),
    ),
}


def lines_of(planted: Planted) -> list[dict[str, Any]]:
    """Return the lines of a run: half of the measurements before a load, and half of them after it."""
    lines = [job(), *(started(worker) for worker in (0, 1))]
    lines += [event(1001.0, "call", worker=worker, name="fit 1") for worker in (0, 1)]
    lines += [steps(worker, 1002.0, 1, count=1, compute=100.0) for worker in (0, 1)]
    # The first load covers the time before the steps, too.
    lines.append(load(1002.5, workers=[{"worker": 0, "delayed": 9.0}, {"worker": 1, "delayed": 9.0}]))
    for half in (1, 2):
        for worker, measured in enumerate(planted.workers):
            known = dict(measured)
            calls = {method: seconds / 2 for method, seconds in known.pop("calls", {}).items()}
            sums = {name: known.pop(name) for name in ("examples", "compiled") if name in known}
            sums = {name: value // 2 + (value % 2 if half == 1 else 0) for name, value in sums.items()}
            compiling = known.pop("compiling", 0.0) / 2
            count = known.pop("count", 20) // 2
            parts = {part: seconds / 2 for part, seconds in known.items()}
            measurement = steps(worker, 1002.0 + half, half * count + 1, count=count, **parts)
            lines.append(measurement | sums | {"calls": calls, "compiling": compiling})
        lines.append(load(1002.5 + half, workers=planted.loads, **planted.host))
    return lines


def ends(*, finished: bool) -> list[dict[str, Any]]:
    lines = [event(1005.0, "call ended", worker=worker, name="fit 1") for worker in (0, 1)]
    # What a host does after the call says nothing about it.
    workers = [{"worker": 0, "faults": 900.0}, {"worker": 1, "delayed": 5.0}]
    lines.append(load(1006.0, workers=workers, cores=2, busy=2.0))
    if finished:
        lines.append(event(1007.0, "finished", status=0, message="", seconds=7.0, steps=41))
    return lines


def line_at_end(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the line at the end of the call, from the state of the process of the job."""
    state = RunState(keeps_history=False)
    for line in lines:
        text = json.dumps(line).encode()
        published = measurement(text) or happening(text)
        assert published is not None
        state = state.after(published)
    assert state.ended_call is not None
    return describe(state.ended_call.of(state.members))


@pytest.mark.parametrize("planted", CAUSES.values(), ids=CAUSES.keys())
def test_all_places_say_the_same(tmp_path: Path, planted: Planted) -> None:
    lines = [*lines_of(planted), *ends(finished=True)]
    head, parts, *said = re.split(
        r"; (?!other processes use its|one worker saves|throttled|pad)", line_at_end(lines)
    )
    assert head.startswith("fit 1: ")
    assert parts.startswith("input ")
    assert tuple(said) == planted.said
    folder = record(tmp_path / "run", *lines)
    run = RunFolder(folder)
    run.update()
    view = overview(run.state, "run", run.state.last, averages=True)
    assert view.advice == planted.said
    text = as_text(view)
    assert all(f"\n{line}\n" in text for line in planted.said)
    summary = page_data.parts(run.state, active=False)["summary"]
    assert tuple(summary["advice"]) == planted.said
    data = build_report(folder).html.split('id="report-data">')[1].split("</script>", 1)[0]
    assert tuple(json.loads(data)["parts"]["summary"]["advice"]) == planted.said


@pytest.mark.parametrize("planted", CAUSES.values(), ids=CAUSES.keys())
def test_a_run_that_trains_is_judged_alike_by_top_and_page(tmp_path: Path, planted: Planted) -> None:
    folder = record(tmp_path / "run", *lines_of(planted))
    run = RunFolder(folder)
    run.update()
    # The page knows the time of the last line only.
    view = overview(run.state, "run", run.state.last + 1.5)
    assert view.advice == planted.said
    assert tuple(page_data.parts(run.state, active=True)["summary"]["advice"]) == planted.said


def test_the_last_seconds_count_while_a_run_trains(tmp_path: Path) -> None:
    folder = record(tmp_path, *lines_of(CAUSES["slow input"]))
    for worker in (0, 1):
        record(folder, steps(worker, 1030.0, 81, **{part: 10 * value for part, value in FAST.items()}))
    run = RunFolder(folder)
    run.update()
    assert overview(run.state, "run", 1030.0).advice == ()
    record(folder, *ends(finished=True))
    run.update()
    # Of the whole call, reading takes (2 * 1.4 + 2 * 1) of 24 seconds.
    assert overview(run.state, "run", 1030.0, averages=True).advice == ()
    assert line_at_end([*lines_of(CAUSES["slow input"]), *ends(finished=True)]).count(READING.format(70)) == 1


def test_the_call_before_counts_while_the_last_one_is_too_short(tmp_path: Path) -> None:
    folder = record(tmp_path, *lines_of(CAUSES["slow input"]), *ends(finished=False))
    record(folder, *(event(1050.0, "call", worker=worker, name="fit 2") for worker in (0, 1)))
    record(folder, *(steps(worker, 1051.0, 2, compute=0.3) | {"call": "fit 2"} for worker in (0, 1)))
    run = RunFolder(folder)
    run.update()
    for averages in (False, True):
        assert overview(run.state, "run", 1051.0, averages=averages).advice == (READING.format(70),)


def test_many_short_calls_are_judged_together(tmp_path: Path) -> None:
    folder = record(tmp_path, job(), started(0), started(1))
    for number in range(1, 31):
        time, name = 1000.0 + number, {"call": f"fit {number}"}
        for worker in (0, 1):
            record(folder, event(time, "call", worker=worker, name=f"fit {number}"))
            record(folder, steps(worker, time + 0.5, 9, input=0.07, compute=0.02, wait=0.01) | name)
    run = RunFolder(folder)
    run.update()
    assert overview(run.state, "run", 1031.0, averages=True).advice == (READING.format(70),)
