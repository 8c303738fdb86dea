"""The overview of a run as text: lines for a terminal, lines of CSV, JSON. Pure."""

import csv
import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import msgspec

from lockstep.monitoring.overview import HostRow, Overview, WorkerRow
from lockstep.monitoring.progress import metric_rank
from lockstep.observability.measurements import STEP_PARTS, GpuLoad
from lockstep.system.prose import count, date_text, duration_text, printable

_GIB = 2**30
_MIB = 2**20
_IDLE = 5.0
"""Seconds without a step that are worth a word."""
_LONG = 600.0
"""Seconds of training that are left from which the time of its end is shown."""
_METRICS = 6


class _Column(NamedTuple):
    """A column of the table of workers. Columns of the highest ranks are omitted if room is scarce."""

    heading: str
    show: Callable[[WorkerRow], str]
    rank: int = 0


def _part(name: str) -> Callable[[WorkerRow], str]:
    return lambda row: _percent(row.parts.get(name))


_COLUMNS = (
    _Column("WORKER", lambda row: str(row.worker)),
    _Column("HOST", lambda row: row.host, 2),
    _Column("PID", lambda row: "" if row.pid is None or row.ended else str(row.pid), 2),
    _Column("TASK", lambda row: row.task, 2),
    _Column("STATE", lambda row: row.state),
    _Column("REPL", lambda row: _number(row.replicas), 4),
    _Column("STEPS/S", lambda row: _number(row.steps_per_second)),
    _Column("SCORE", lambda row: "-" if row.score is None else f"{row.score:.2f}"),
    _Column("STALE", lambda row: "" if row.staleness is None else f"{row.staleness:.1f}", 1),
    _Column("MAX", lambda row: "" if row.largest_staleness is None else str(row.largest_staleness), 1),
    _Column("INPUT", _part("input"), 1),
    _Column("COMP", _part("compute"), 1),
    _Column("WAIT", _part("wait"), 1),
    _Column("EXCH", _part("exchange"), 5),
    _Column("UPD", _part("update"), 6),
    _Column("OTHER", _part("other"), 4),
    _Column("NESTED", lambda row: _percent(row.parts.get("nested") or None).replace("-", ""), 3),
    _Column("CORES", lambda row: "-" if row.cores is None else f"{row.cores:.1f}", 1),
    _Column("MEMORY", lambda row: _size(row.memory), 1),
    _Column("GPU", lambda row: ",".join(map(str, row.gpus)), 1),
    _Column("UTIL", lambda row: "" if row.gpu_utilization is None else f"{row.gpu_utilization} %", 1),
    _Column("GPU MEM", lambda row: "" if row.gpu_memory is None else _size(row.gpu_memory), 3),
    _Column("TEMP", lambda row: "" if row.gpu_temperature is None else f"{row.gpu_temperature} C", 3),
)
_MOST_STATE = 22


def heading(view: Overview) -> list[str]:
    """Return the lines above the table."""
    since = date_text(view.began) if view.began else "unknown"
    wanted = "" if view.wanted is None else f" of {view.wanted}"
    living = sum(not row.ended for row in view.workers)
    workers = count(living, "worker") if not wanted else f"{living}{wanted} workers"
    if view.end or view.averages:
        workers = count(len(view.workers), "worker")
    process = "" if view.pid is None or view.end else f"  process {view.pid}"
    lines = [f"{view.job}  {printable(view.script)}  {workers}  since {since}{process}"]
    lines += [view.end] if view.end else []
    lines += [f"to do: {text}" for text in view.remedies]
    if view.call:
        of = f" of {view.epochs}" if view.epochs else ""
        doing = [view.call + (f" epoch {view.epoch}{of}" if view.epoch else "")]
        doing += [f"step {view.step:,}"] if view.step is not None else []
        doing += [f"{view.trained:,} training steps"]
        if view.examples_per_second is not None:
            doing.append(f"{view.examples_per_second:,.0f} examples/s")
        elif view.steps_per_second is not None:
            unit = "functions" if view.call.startswith("functions") else "steps"
            doing.append(f"{view.steps_per_second:,.0f} {unit}/s")
        if view.left is not None and not (view.end or view.averages):
            doing.append(_time_left(view.time, view.left))
        if view.idle is not None and view.idle >= _IDLE and not (view.end or view.averages):
            doing.append(f"last step {duration_text(view.idle)} ago")
        lines.append(", ".join(doing))
    if view.metrics:
        shown = sorted(view.metrics.items(), key=lambda metric: metric_rank(metric[0]))[:_METRICS]
        lines.append("  ".join(f"{printable(name)} {value:.5g}{_best(view, name)}" for name, value in shown))
    if view.compared not in view.end:
        lines.append(view.compared)
    if went := [text for text in view.went if text not in view.end]:
        lines.append("; ".join(went))
    if view.silent_since is not None:
        at = time.strftime("%H:%M:%S", time.localtime(view.silent_since))
        seconds = max(0.0, view.time - view.silent_since)
        lines.append(f"no answer from the coordinator since {at} ({duration_text(seconds)})")
    return lines


def _time_left(now: float, seconds: float) -> str:
    """Return how long a run will still train and, for a longer time, when it ends."""
    if seconds < _LONG:
        return f"{duration_text(seconds)} left"
    today, end = time.localtime(now), time.localtime(now + seconds)
    day = "" if end[:3] == today[:3] else "%a "
    return f"{duration_text(seconds)} left, until about {time.strftime(f'{day}%H:%M', end)}"


def _best(view: Overview, name: str) -> str:
    """Name an earlier epoch that was better; use a metric of training only if there is no validation."""
    if (best := view.better.get(name)) is None or f"val_{name}" in view.metrics:
        return ""
    shown = f"{best.value:.5g}"
    return "" if shown == f"{view.metrics[name]:.5g}" else f" (best {shown} in epoch {best.epoch})"


def table(view: Overview, width: int | None = None) -> list[str]:
    """Return the table of workers: a line of headings, then a line per worker.

    Args:
        view: the overview of the run.
        width: the width of the terminal; None for all columns.
    """
    texts = [[_cut(column.show(row)) for column in _COLUMNS] for row in view.workers]
    hosts = {row.host for row in view.workers}
    kept = [
        at
        for at, column in enumerate(_COLUMNS)
        if any(text[at] for text in texts) and not (column.heading == "HOST" and len(hosts) < 2)
    ]
    widths = {at: max(len(_COLUMNS[at].heading), *(len(text[at]) for text in texts)) for at in kept}
    while width is not None and sum(widths[at] + 1 for at in kept) - 1 > width:
        last = max(kept, key=lambda at: _COLUMNS[at].rank)
        if not _COLUMNS[last].rank:
            break
        kept.remove(last)
    if not texts:
        return ["no worker has started"]
    rows = [[column.heading for column in _COLUMNS], *texts]
    return [clipped(" ".join(row[at].ljust(widths[at]) for at in kept).rstrip(), width) for row in rows]


def host_lines(view: Overview) -> list[str]:
    """Return a line per host, and a line per GPU."""
    owners = {row.worker: row for row in view.workers}
    lines = []
    for host in view.hosts:
        lines.append(host_line(host))
        rows = [row for row in owners.values() if row.host == host.host]
        for gpu in host.gpus:
            users = [row.worker for row in rows if gpu.index in row.gpus]
            lines.append(f"  {gpu_line(gpu)}" + (f"  worker {', '.join(map(str, users))}" if users else ""))
    return lines


def host_line(host: HostRow) -> str:
    """Return a host in one line."""
    memory = f"memory {host.memory_used / _GIB:.1f} of {host.memory_total / _GIB:.1f} GiB"
    # The job may be limited to some of the cores that are busy.
    busy = f"{host.busy:.1f} of {host.cores} cores busy"
    if host.busy > host.cores + 0.05:
        busy = f"{host.busy:.1f} cores busy, {host.cores} for the job"
    line = f"{host.host}: {busy}, {host.used or 0.0:.1f} by this job; {memory}"
    if host.swapping:
        line += f"; swap {host.swapping / _MIB:.1f} MiB/s"
    if host.throttled:
        line += f"; a CPU quota stops processes {host.throttled:.2g} s per second"
    return line


def gpu_line(gpu: GpuLoad) -> str:
    """Return a GPU in one line."""
    parts = [f"GPU {gpu.index} {printable(gpu.name)}".rstrip()]
    if gpu.utilization is not None:
        parts.append(f"{gpu.utilization} %")
    if gpu.memory_used is not None and gpu.memory_total is not None:
        parts.append(f"{gpu.memory_used / _GIB:.1f} of {gpu.memory_total / _GIB:.1f} GiB")
    if gpu.temperature is not None:
        parts.append(f"{gpu.temperature} C")
    if gpu.power is not None:
        parts.append(f"{gpu.power:.0f} W")
    if gpu.throttled:
        parts.append(f"throttled ({gpu.throttled})")
    if gpu.processes:
        parts.append("processes " + " ".join(str(pid) for pid, _ in gpu.processes))
    return "  ".join(parts)


def as_text(view: Overview, width: int | None = None) -> str:
    """Return everything, one line after the other.

    Args:
        view: the overview of the run.
        width: the width of the terminal; None for all columns.
    """
    lines = [*heading(view), "", *table(view, width), *view.advice, "", *host_lines(view)]
    if view.events:
        lines += ["", *view.events]
    return "\n".join(_join_blank(lines)) + "\n"


def as_json(view: Overview) -> str:
    """Return a JSON object in one line; units as in `Overview`."""
    return msgspec.json.encode(asdict(view)).decode(errors="replace") + "\n"


_CSV = (
    *("time", "job", "call", "epoch", "step", "worker", "host", "state", "replicas", "steps_per_second"),
    *("score", *STEP_PARTS, "cores", "delayed", "memory", "faults", "gpus", "gpu_memory"),
    *("gpu_utilization", "gpu_temperature", "cause", "task", "staleness", "largest_staleness"),
    "pid",
)
_OF_VIEW = ("time", "job", "call", "epoch", "step")


def csv_heading() -> str:
    """Return the line with the names of the columns."""
    return csv_lines([_CSV])


def as_csv(view: Overview) -> str:
    """Return CSV with a line per worker, in the units of `WorkerRow`. Unmeasured values are empty."""
    return csv_lines([[_csv_value(view, row, name) for name in _CSV] for row in view.workers])


def _csv_value(view: Overview, row: WorkerRow, name: str) -> object:
    if name in STEP_PARTS:
        value: object = row.parts.get(name)
    else:
        value = getattr(view if name in _OF_VIEW else row, name)
    if isinstance(value, float):
        return f"{value:.3f}" if name == "time" else f"{value:.4g}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return value


def csv_lines(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as lines of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"


def _cut(text: str) -> str:
    return clipped(printable(text), _MOST_STATE)


def clipped(text: str, width: int | None) -> str:
    """Return the start of a text that is longer than a width, with a mark. A width of None is no limit."""
    return text if width is None or len(text) <= width else text[: max(0, width - 1)] + "…"


def _join_blank(lines: list[str]) -> list[str]:
    """Return the lines with one empty line where several follow each other, and none at the end."""
    joined: list[str] = []
    for line in lines:
        if line or (joined and joined[-1]):
            joined.append(line)
    while joined and not joined[-1]:
        joined.pop()
    return joined
