"""The content of the page and the report of a run, as values that are ready for JSON. Pure.

A run is shown in parts (`parts`), which rarely change, and in charts (`chart`), which have a bounded number
of points, however long the run is. Times within a run are seconds since it started.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.coordinator.job_report import headline, last_line, remedies, state_of, troubles
from lockstep.monitoring.progress import better_epochs, progress
from lockstep.monitoring.run_folder import steps_trained, task_of
from lockstep.monitoring.told_events import ToldEvents, details, join_equal
from lockstep.monitoring.training_times import advice, training_times
from lockstep.observability.events import is_within
from lockstep.observability.growth import Columns
from lockstep.observability.measurements import STEP_PARTS
from lockstep.observability.run_lines import Happening
from lockstep.observability.run_state import RunState, WorkerInfo, effective_share, location_of
from lockstep.observability.slowness import shares_of_time
from lockstep.observability.step_recorder import serves, trains
from lockstep.system.prose import duration_text

MOST_POINTS = 2000
"""The largest number of points of a series."""

MOST_SERIES = 64
"""The largest number of series of a chart."""

_SHOWN_EVENTS = 300
_SHOWN_WAITS = 100
_SHOWN_METRICS = 8
_SHOWN_TEXT = 10_000
_TREND = 60
_VALIDATION = "val_"
_DIGITS = 6
_NO_CONFIGURATION = ("event", "versions", "format")

_FRAME = re.compile(r'(^  File "[^\n]*\n(?: {4}[^\n]*\n|  \[Previous line [^\n]*\n)*)', re.MULTILINE)
_INTERNAL = re.compile(r'  File "[^"\n]*/(?:site-packages|dist-packages|src)/(?:lockstep|keras/src)/')

Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Window:
    """The part of a chart to compute.

    Attributes:
        axis: `step` for training steps, or `time` for seconds since the run started.
        start, stop: the ends of the axis; None for the first and the last value.
        points: the number of points of a series at most, between 1 and `MOST_POINTS`.
        smoothing: the width over which values are averaged, as a share of the window, from 0 to 1.
    """

    axis: str = "time"
    start: float | None = None
    stop: float | None = None
    points: int = 1000
    smoothing: float = 0.0


def parts(run: RunState, *, active: bool) -> dict[str, Any]:
    """Return everything but charts, by the name of the part.

    Args:
        run: the run.
        active: whether a process holds the lock of the run folder.
    """
    return {
        "summary": _summary(run, active),
        "configuration": _configuration(run),
        "workers": [_worker(run, info) for _, info in sorted(run.workers.items())],
        "views": [
            {
                "number": view.number,
                "time": _since(run, view.time),
                "workers": view.workers,
                "reason": view.reason,
                "pause": _number(view.pause),
            }
            for view in run.views
        ],
        "waits": _waits(run),
        "checkpoints": _checkpoints(run),
        "events": _events(run),
        "charts": _charts(run),
    }


_CHECKPOINT = ("path", "step", "seconds")
_NOTABLE = 0.001
"""The share of the time of a run from which it is named that something took it."""
_TITLES = {"": "", "worker": "", "chief": " (chief)", "ps": " (parameter server)"}


def _summary(run: RunState, active: bool) -> dict[str, Any]:
    job, finished, totals = run.job, run.finished or {}, run.totals
    checkpoints = settings if isinstance(settings := job.get("checkpoints"), Mapping) else {}
    end = run.last if not active or run.finished else None
    failure = next((event for event in run.events if event.event == "failed"), None)
    times = training_times(run, live=end is None)
    state = state_of(run.finished, active=active)
    return {
        "state": state,
        "headline": _text(headline(run, state)),
        "troubles": [_text(text) for text in troubles(totals)],
        "remedies": [_text(text) for text in remedies(run, state)],
        "script": _text(job.get("target", "")),
        "tags": [_text(tag) for tag in job.get("tags") or ()],
        "backend": _text(job.get("backend") or ""),
        "host": _text(job.get("host", "")),
        "began": run.began,
        "seconds": None if end is None else _number(end - run.began),
        "workers": sum(end is not None or _lives(run, worker) for worker in run.members),
        "wanted": job.get("workers"),
        "replicas": job.get("replicas"),
        "seed": job.get("seed"),
        "steps": max(steps_trained(run), totals.known_steps or 0),
        "epochs": max((int(columns.last().get("epoch", 0)) for columns in run.metrics.values()), default=0),
        "call": _text(_current_call(run)),
        "phase": _phase(run) if end is None else "",
        "progress": None if (doing := progress(run)) is None else asdict(doing),
        "metrics": _newest_metrics(run),
        **_rate(run, whole=end is not None),
        "lost": totals.lost,
        "joined": totals.joined,
        "lost_hosts": totals.lost_hosts,
        "retired_hosts": totals.retired_hosts,
        "joined_hosts": totals.joined_hosts,
        "pauses": totals.pauses,
        "paused": _number(totals.paused),
        "checkpoints": totals.checkpoints,
        "saved": totals.saved,
        "before": totals.before,
        "resumed_from": _text(location_of(checkpoints)) if totals.before and checkpoints else "",
        "effective": effective_share(totals, run.seconds),
        "elsewhere": _time_elsewhere(run),
        "advice": [_text(line) for line in advice(run, times)],
        "shares": {_text(part): round(share, 4) for part, share in shares_of_time(times).items()},
        "compared": _text(run.compared),
        "status": finished.get("status") if isinstance(finished.get("status"), int) else None,
        "message": _text(finished.get("message", "")),
        "model": _text(finished.get("model", "")),
        "digest": _text(finished.get("digest", "")),
        "failure": None
        if failure is None
        else {
            "worker": failure.worker,
            "summary": _text(failure.fields.get("summary", "")),
            "traceback": _text(_own_frames(str(failure.fields.get("traceback", "")))),
        },
        "skipped": run.skipped,
    }


def _time_elsewhere(run: RunState) -> dict[str, float]:
    """Return the seconds of a run that are not effective training time, by their purposes.

    Pauses in other calls than training also count as pauses.
    """
    totals = run.totals
    ended = [info.steps.column("time") for _, info in run.workers.items()]
    firsts = [float(times[times >= run.began][0]) for times in ended if (times >= run.began).any()]
    if totals.effective <= 0 or not firsts:
        return {}
    start = min(firsts) - run.began
    rest = run.seconds - totals.effective - start - totals.paused
    spent = {"the start and the first step": start, "pauses": totals.paused, "everything else": rest}
    return {name: round(seconds, 6) for name, seconds in spent.items() if seconds >= _NOTABLE * run.seconds}


def _own_frames(traceback: str) -> str:
    """Return a traceback without frames of Lockstep and Keras, unless the error comes from there."""
    pieces = _FRAME.split(traceback)
    # Pieces of text alternate with frames.
    frames = [piece for piece in pieces[1::2] if not _INTERNAL.match(piece)]
    if not frames or _INTERNAL.match(pieces[-2]):
        return traceback
    return "".join(piece for at, piece in enumerate(pieces) if at % 2 == 0 or not _INTERNAL.match(piece))


def _current_call(run: RunState) -> str:
    # The end of a call within a call is unknown.
    last = next((call for call in reversed(run.calls) if not is_within(call.name)), None)
    return last.name if last is not None and last.ended is None and run.finished is None else ""


def _rate(run: RunState, *, whole: bool) -> dict[str, Any]:
    """Return the speed of training: the average of the whole run with the rest of calls, or that at its end.

    It is in examples if the size of batches is known, otherwise in steps.
    """
    for rows in _training(run, _without_first_steps if whole else _without_first):
        seconds = sum((rows[part] for part in STEP_PARTS), np.zeros(len(rows["time"])))
        since = 0 if whole else -1
        if (duration := float(seconds[since:].sum())) > 0:
            examples, steps = (float(rows[name][since:].sum()) for name in ("examples", "count"))
            unit = "examples/s" if examples else "steps/s"
            return {"rate": _number((examples or steps) / duration), "rate_unit": unit}
    return {"rate": None, "rate_unit": ""}


def _lives(run: RunState, worker: int) -> bool:
    return worker not in run.workers or run.workers[worker].ended is None


def _configuration(run: RunState) -> list[dict[str, str]]:
    """Return rows of `section`, `name` and `value`."""
    rows = [
        {"section": "job", "name": name, "value": _shown(value)}
        for name, value in sorted(run.job.items())
        if name not in _NO_CONFIGURATION
    ]
    versions = dict(run.job.get("versions") or {})
    for event in run.events:
        if event.event == "strategy":
            versions |= event.fields.get("libraries") or {}
            break
    rows += [
        {"section": "versions", "name": _text(name), "value": _shown(value)}
        for name, value in sorted(versions.items())
    ]
    return rows


def _worker(run: RunState, info: WorkerInfo) -> dict[str, Any]:
    last, load = info.steps.last(), info.load.last()
    return {
        "worker": info.worker,
        "task": task_of(run, info.worker),
        "phase": info.phase,
        "pid": info.pid,
        "host": _text(info.host),
        "began": _since(run, info.began) if info.began else None,
        "ended": None if info.ended is None else _since(run, info.ended),
        "status": info.status,
        "reason": _text(info.reason),
        "call": _text(info.call),
        "step": int(last["trained"]) if last else None,
        "replicas": int(last["replicas"]) if last else None,
        "cores": _number(load.get("cores")),
        "memory": _number(load.get("memory")),
    }


def _phase(run: RunState) -> str:
    """Return the phase of the longest-serving worker, such as `compiling`, if one has started."""
    return next((run.workers[worker].phase for worker in run.members if worker in run.workers), "")


def _newest_metrics(run: RunState) -> list[dict[str, Any]]:
    """Return the newest values of the metrics of training and validation; None for those not finite.

    `best` is the best epoch, of validation if there is one; None if the newest epoch is the best one. The
    trends are their values at the ends of epochs, at most `_TREND` of them.
    """
    names, better = dict.fromkeys(name.removeprefix(_VALIDATION) for name in run.values), better_epochs(run)
    judged = {name: _VALIDATION + name if _VALIDATION + name in run.values else name for name in names}
    return [
        {
            "name": _text(name),
            "value": _number(run.values.get(name)),
            "recorded": name in run.values,
            "validation": _number(run.values.get(_VALIDATION + name)),
            "validated": _VALIDATION + name in run.values,
            "best": None if (best := better.get(judged[name])) is None else asdict(best),
            "trend": _trend(run, name),
            "validation_trend": _trend(run, _VALIDATION + name),
        }
        for name in sorted(names, key=lambda name: name != "loss")
    ][:_SHOWN_METRICS]


def _trend(run: RunState, name: str) -> list[float | None]:
    values = run.metrics[name].column("value") if name in run.metrics else np.zeros(0)
    if len(values) > _TREND:
        values = values[np.linspace(0, len(values) - 1, _TREND).round().astype(int)]
    return _rounded(values)


def _checkpoints(run: RunState) -> list[dict[str, Any]]:
    """Return the checkpoints, the oldest first; `deleted` marks those that newer ones have replaced."""
    kept: dict[str, Any] = {}
    removed: set[str] = set()
    if isinstance(settings := run.job.get("checkpoints"), Mapping):
        kept[location_of(settings)] = settings.get("keep")
    for event in run.events:
        if event.event == "keeps":
            kept[str(event.fields.get("folder"))] = event.fields.get("keep")
        elif event.event == "checkpoint removed":
            removed.add(str(event.fields.get("path")))
    newer: dict[str, set[str]] = {}
    shown = []
    for event in reversed(run.checkpoints):
        path = str(event.fields.get("path"))
        folder, _, _ = path.rpartition("/")
        others, keep = newer.setdefault(folder, set()), kept.get(folder)
        full = isinstance(keep, int) and 0 < keep <= len(others)
        fields = {name: event.fields.get(name) for name in _CHECKPOINT}
        deleted = full or path in removed or path in others
        shown.append({"time": _since(run, event.time), **fields, "deleted": deleted})
        others.add(path)
    return shown[::-1]


def _waits(run: RunState) -> list[dict[str, Any]]:
    """Return the newest waits, each with its last report; those in progress are `current`."""
    waits: list[Happening] = []
    for wait in run.events:
        if wait.event == "wait":
            same = waits and _key(waits[-1]) == _key(wait)
            waits[-1 if same else len(waits) :] = [wait]
    current = {id(wait) for wait in run.waits.values()}
    return [
        {
            "time": _since(run, wait.time),
            "worker": wait.worker,
            "what": _text(wait.fields.get("what", "")),
            "waits_for": wait.fields.get("waits_for", ()),
            "seconds": _number(wait.fields.get("seconds")),
            "current": id(wait) in current,
        }
        for wait in waits[-_SHOWN_WAITS:]
    ]


def _key(event: Happening) -> tuple[Any, ...]:
    return event.worker, event.fields.get("what")


def _events(run: RunState) -> list[dict[str, Any]]:
    """Return the newest events in the order of their times; equal ones are one row.

    Calls within calls, such as validations, are not shown, because there are many, and the charts have their
    time.
    """

    def told(event: Happening) -> str | None:
        if event.event in ("call", "call ended") and is_within(str(event.fields.get("name", ""))):
            return None
        return _text(_told_end(run, event) or details(event, _fields))

    return [
        {
            "time": _since(run, group.last),
            "event": _text(group.event),
            "workers": group.workers,
            "text": f"{group.text}{_often(run, group)}".lstrip(),
        }
        for group in join_equal(reversed(run.events), told, _SHOWN_EVENTS)
    ]


def _often(run: RunState, group: ToldEvents) -> str:
    if not group.is_repeated:
        return ""
    return f" ({group.number} times, first after {duration_text(_since(run, group.first))})"


def _fields(event: Happening) -> str:
    """Return the fields of an event that have a value."""
    shown = ((name, _shown(value)) for name, value in event.fields.items())
    return "; ".join(f"{name}: {text}" for name, text in shown if text)


def _told_end(run: RunState, event: Happening) -> str:
    """Return the last line of a run that has finished, or an empty string for other events."""
    if event.event != "finished" or event.fields is not run.finished or run.finished.get("status") != 0:
        return ""
    return _text(last_line(run.totals, run.seconds, len(run.members), compared=run.compared))


# ---------------------------------------------------------------------------------------------- charts


@dataclass(frozen=True)
class _Series:
    """Values over an axis, ascending in it after a stable sort.

    Attributes:
        label: the label of the series in its chart.
        role: `train`, `epoch` or `validation` for metrics, else empty.
        x, y: of equal length; NaN in `y` for values that are not finite.
        weight: weights, with which a point is the sum of `y` over the sum of `weight` instead of an average.
    """

    label: str
    role: str
    x: Numbers
    y: Numbers
    weight: Numbers | None = None


def _charts(run: RunState) -> list[dict[str, Any]]:
    """Return the run's charts in their order on the page; `version` changes if a chart has gained values."""
    charts: list[dict[str, Any]] = []

    def add(section: str, name: str, title: str, version: int, unit: str = "", kind: str = "lines") -> None:
        if version:
            charts.append(
                {"id": name, "section": section, "title": title, "unit": unit, "kind": kind}
                | {"version": version}
            )

    for name in _metric_names(run):
        version = sum(len(columns) for columns, _, _ in _columns_of(run, name))
        add("metrics", f"metric:{name}", _text(name), version)
    steps = sum(len(info.steps) for info in run.workers.values())
    has_examples = any(info.steps.column("examples").any() for info in run.workers.values())
    add("throughput", "throughput", "Throughput", steps * has_examples, "examples/s")
    add("throughput", "duration", "Duration of a step", steps, "s")
    if any(task_of(run, worker) for worker in run.workers):
        add("throughput", "rate", "Steps of each worker", steps, "steps/s")
        add("throughput", "updates", "Updates of each parameter server", steps, "updates/s")
        add("throughput", "staleness", "Staleness of the steps of each worker", steps)
        add("throughput", "largest_staleness", "Largest staleness of each worker", steps)
    for worker, info in sorted(run.workers.items()):
        title = f"Worker {worker}{_TITLES[task_of(run, worker)]}"
        add("parts", f"parts:{worker}", title, len(info.steps), "s", "stack")
    loads = sum(len(info.load) for info in run.workers.values())
    add("load", "load:cores", "Cores in use by each worker", loads)
    add("load", "load:delayed", "Threads that wait for a core", loads)
    add("load", "load:memory", "Memory of each worker", loads, "B")
    hosts = sum(len(host.load) for host in run.hosts.values())
    add("load", "host:busy", "Cores in use on each host", hosts)
    add("load", "host:memory_used", "Memory in use on each host", hosts, "B")
    gpus = sum(len(columns) for host in run.hosts.values() for columns in host.gpu_load.values())
    add("load", "gpu:utilization", "GPU utilization", gpus, "%")
    add("load", "gpu:memory_used", "GPU memory", gpus, "B")
    return charts


def chart(run: RunState, name: str, window: Window) -> list[dict[str, Any]]:
    """Return the first `MOST_SERIES` series of a chart, at most `window.points` points each.

    A series has `label`, `role` and lists of equal length: `x`; `low` and `high`, the extremes of the values
    that a point represents, so that no spike is lost; and `mean`, their average over the width of the
    smoothing. They are None where no value is finite. `missing` counts values that are not finite, and
    `first_missing` is the `x` of the first one. `count` is the number of all values, and `extent` has the
    first and the last `x`.

    Args:
        run: the run.
        name: the `id` of one of its charts.
        window: the part to compute.

    Raises:
        KeyError: the run has no such chart.
    """
    return [_decimated(series, window) for series in islice(_series(run, name, window.axis), MOST_SERIES)]


def _series(run: RunState, name: str, axis: str) -> Iterator[_Series]:
    kind, _, rest = name.partition(":")
    match kind:
        case "metric" if rest in _metric_names(run):
            for columns, label, role in _columns_of(run, rest):
                yield _Series(_text(label), role, _axis(run, columns, axis), columns.column("value"))
        case "throughput":
            yield from _throughput(run, axis)
        case "duration":
            for rows in _training(run):
                seconds = sum((rows[part] for part in STEP_PARTS), np.zeros(len(rows["time"])))
                yield _Series("a step", "", _rows_axis(run, rows, axis), seconds, rows["count"])
        case "rate" | "updates" | "staleness" | "largest_staleness" if not rest:
            yield from _of_tasks(run, kind, axis)
        case "parts" if rest.lstrip("-").isdigit() and int(rest) in run.workers:
            rows = _without_first(run.workers[int(rest)].steps)
            for part in STEP_PARTS:
                yield _Series(part, "", _rows_axis(run, rows, axis), rows[part], rows["count"])
        case "load" if rest in ("cores", "delayed", "memory"):
            for worker, info in sorted(run.workers.items()):
                if len(info.load):
                    x = info.load.column("time") - run.began
                    yield _Series(f"worker {worker}", "", x, info.load.column(rest))
        case "host" if rest in ("busy", "memory_used"):
            for host_name, host in run.hosts.items():
                x = host.load.column("time") - run.began
                yield _Series(_text(host_name), "", x, host.load.column(rest))
        case "gpu" if rest in ("utilization", "memory_used"):
            for host_name, host in run.hosts.items():
                for index, columns in sorted(host.gpu_load.items()):
                    label = _text(f"GPU {index} of {host_name}")
                    yield _Series(label, "", columns.column("time") - run.began, columns.column(rest))
        case _:
            raise KeyError(name)


def _metric_names(run: RunState) -> list[str]:
    """Return the names of metrics in groups, such as `loss` with `val_loss`; the loss comes first."""
    both = dict.fromkeys((*run.metrics, *run.batch_metrics))
    names = dict.fromkeys(base if (base := name.removeprefix(_VALIDATION)) in both else name for name in both)
    return sorted(names, key=lambda name: name != "loss")


def _columns_of(run: RunState, name: str) -> Iterator[tuple[Columns, str, str]]:
    for metrics, label, role in (
        (run.batch_metrics, name, "train"),
        (run.metrics, f"{name}, epochs", "epoch"),
    ):
        if name in metrics:
            yield metrics[name], label, role
    validation = _VALIDATION + name
    for metrics in (run.batch_metrics, run.metrics):
        if validation in metrics:
            yield metrics[validation], validation, "validation"


def _axis(run: RunState, columns: Columns, axis: str) -> Numbers:
    return columns.column("trained") if axis == "step" else columns.column("time") - run.began


def _rows_axis(run: RunState, rows: Mapping[str, Numbers], axis: str) -> Numbers:
    return rows["trained"] if axis == "step" else rows["time"] - run.began


def _without_first_steps(steps: Columns) -> dict[str, Numbers]:
    """Return measurements without those of the first step of each call, which compiles."""
    keep = ~((steps.column("number") == 1) & (steps.column("count") == 1))
    return {name: steps.column(name)[keep] for name in steps.names}


def _without_first(steps: Columns) -> dict[str, Numbers]:
    """Return measurements without those of the time after the last step of a call, which have no steps."""
    rows = _without_first_steps(steps)
    return {name: column[rows["count"] > 0] for name, column in rows.items()}


def _training(
    run: RunState, chosen: Callable[[Columns], dict[str, Numbers]] = _without_first
) -> Iterator[dict[str, Numbers]]:
    """Yield the steps of calls that train, each from one worker; after its end, from another one.

    With parameter servers, the chief takes all steps.
    """
    calls = {number for number, call in enumerate(run.calls) if trains(call.name)}
    until = -math.inf
    pieces: list[dict[str, Numbers]] = []
    taking = [info for info in run.workers.values() if task_of(run, info.worker) in ("", "chief")]
    for info in sorted(taking, key=lambda info: (info.began, info.worker)):
        rows = chosen(info.steps)
        keep = np.isin(rows["call"], list(calls)) & (rows["began"] >= until)
        if keep.any():
            pieces.append({name: column[keep] for name, column in rows.items()})
            until = float(rows["time"][keep].max())
    if pieces:
        yield {name: np.concatenate([rows[name] for rows in pieces]) for name in pieces[0]}


def _throughput(run: RunState, axis: str) -> Iterator[_Series]:
    for rows in _training(run):
        seconds = sum((rows[part] for part in STEP_PARTS), np.zeros(len(rows["time"])))
        keep = seconds > 0
        x = _rows_axis(run, rows, axis)[keep]
        yield _Series("all workers", "", x, rows["examples"][keep], seconds[keep])


def _of_tasks(run: RunState, kind: str, axis: str) -> Iterator[_Series]:
    """Yield series of the processes of a job with parameter servers: rates, or the staleness of steps."""
    for worker, info in sorted(run.workers.items()):
        rows, task = _without_first(info.steps), task_of(run, worker)
        if not task or (task == "ps") != (kind == "updates"):
            continue
        keep = np.array([serves(call.name) or trains(call.name) for call in run.calls], bool)
        chosen = keep[rows["call"].astype(int)]
        label = f"worker {worker}{_TITLES[task]}"
        x = _rows_axis(run, rows, axis)
        match kind:
            case "rate" | "updates":
                seconds = sum((rows[part] for part in STEP_PARTS), np.zeros(len(x)))
                chosen &= seconds > 0
                y, weight = rows["count"], seconds
            case "staleness":
                chosen &= ~np.isnan(rows["staleness"])
                y, weight = rows["staleness"], rows["count"]
            case _:
                y, weight = rows["largest_staleness"], np.ones(len(x))
                chosen &= ~np.isnan(y)
        if chosen.any():
            yield _Series(label, "", x[chosen], y[chosen], weight[chosen])


def _decimated(series: _Series, window: Window) -> dict[str, Any]:
    x, y = series.x, series.y
    weight = np.ones(len(x)) if series.weight is None else series.weight
    if len(x) > 1 and np.any(np.diff(x) < 0):
        order = np.argsort(x, kind="stable")
        x, y, weight = x[order], y[order], weight[order]
    finite = np.isfinite(y)
    described = {"label": series.label, "role": series.role, "count": len(x)}
    lost = np.flatnonzero(~finite)
    described |= {"missing": len(lost), "first_missing": _number(float(x[lost[0]])) if len(lost) else None}
    described["extent"] = [float(x[0]), float(x[-1])] if len(x) else None
    if not len(x):
        return described | {"x": [], "low": [], "high": [], "mean": []}
    start = float(x[0]) if window.start is None else window.start
    stop = float(x[-1]) if window.stop is None else window.stop
    half = max(stop - start, 0.0) * min(max(window.smoothing, 0.0), 1.0) / 2
    # The averages at the edges need values beyond them; lines continue to the neighbours of the window.
    first = max(int(np.searchsorted(x, start - half, "left")) - 1, 0)
    last = min(int(np.searchsorted(x, stop + half, "right")) + 1, len(x))
    x, y, weight, finite = x[first:last], y[first:last], weight[first:last], finite[first:last]
    points = max(1, min(window.points, MOST_POINTS))
    if len(x) > points:
        share = (stop - start + 2 * half) / (stop - start) if stop > start else 1.0
        edges = np.linspace(start - half, stop + half, max(1, int(points * share) - 2) + 1)
        starts = np.unique(np.r_[0, np.searchsorted(x, edges, "left")])
        starts = starts[starts < len(x)]
    else:
        starts = np.arange(len(x))
    ends = np.r_[starts[1:], len(x)]
    single = y / weight
    low = np.fmin.reduceat(np.where(finite, single, np.nan), starts)
    high = np.fmax.reduceat(np.where(finite, single, np.nan), starts)
    sums = np.add.reduceat(np.where(finite, y, 0.0), starts)
    counts = np.add.reduceat(np.where(finite, weight, 0.0), starts)
    centre = (x[starts] + x[ends - 1]) / 2
    left, right = np.arange(len(centre)), np.arange(len(centre)) + 1
    if half > 0:
        left = np.searchsorted(centre, centre - half, "left")
        right = np.searchsorted(centre, centre + half, "right")
    within = np.flatnonzero((centre >= start) & (centre <= stop))
    if len(within):
        within = np.arange(max(within[0] - 1, 0), min(within[-1] + 2, len(centre)))
    else:
        within = np.arange(len(centre))
    shown = within[: MOST_POINTS + 2]
    total, weighed = (_sums(values, left[shown], right[shown]) for values in (sums, counts))
    mean = np.divide(total, weighed, out=np.full(len(shown), np.nan), where=weighed != 0)
    return described | {
        "x": np.round(centre[shown], 3).tolist(),
        "low": _rounded(low[shown]),
        "high": _rounded(high[shown]),
        "mean": _rounded(mean),
    }


def _sums(values: Numbers, left: Indices, right: Indices) -> Numbers:
    """Return the sums of parts of `values`, which may overlap and are not empty."""
    # A part may end at the end, where `reduceat` needs an element.
    sums: Numbers = np.add.reduceat(np.r_[values, 0.0], np.stack((left, right), axis=1).ravel())[::2]
    return sums


def _rounded(values: Numbers) -> list[float | None]:
    """Return values with six significant digits, and None in place of NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.abs(values))))
        rounded = np.where(np.isfinite(scale) & (scale > 0), np.round(values * scale) / scale, values)
    numbers = rounded.astype(object)
    numbers[~np.isfinite(rounded)] = None
    return list(numbers)


# ------------------------------------------------------------------------------------------ comparison


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how two runs differ, differences first.

    Args:
        first, second: the `parts` of the runs.

    Returns:
        Rows of `section`, `name`, the values `a` and `b` (empty where a run has none), and `differs`.
    """
    left, right = _facts(first), _facts(second)
    rows: list[dict[str, Any]] = [
        {
            "section": section,
            "name": name,
            "a": left.get((section, name), ""),
            "b": right.get((section, name), ""),
        }
        for section, name in dict.fromkeys((*left, *right))
    ]
    rows = [row | {"differs": row["a"] != row["b"]} for row in rows]
    return sorted(rows, key=lambda row: not row["differs"])


def _facts(parts: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    summary = parts["summary"]
    facts = {("result", name): _shown(summary[name]) for name in _RESULT}
    return facts | {(row["section"], row["name"]): row["value"] for row in parts["configuration"]}


_RESULT = ("state", "steps", "epochs", "digest", "model", "lost", "joined")


# ----------------------------------------------------------------------------------------------- values


def _since(run: RunState, time: float) -> float:
    return round(time - run.began, 3)


def _number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    ok = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if ok else None


def _shown(value: Any) -> str:
    """Return a value of an event as text."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return _text(", ".join(f"{name}: {_shown(item)}" for name, item in value.items()))
        case str():
            return _text(value)
        case float():
            return f"{value:.{_DIGITS}g}"
        case Iterable():
            return _text(", ".join(map(_shown, value))) if not isinstance(value, bytes) else ""
        case _:
            return _text(value)


def _text(value: Any) -> str:
    """Return text of bounded length without lone surrogates, which JSON cannot carry."""
    text = str(value)[:_SHOWN_TEXT]
    return text.encode(errors="replace").decode()
