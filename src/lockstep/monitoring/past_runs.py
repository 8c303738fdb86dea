"""The runs in folders, one row each: their times, workers, progress and ends.

`summarize`, `select` and the tables are pure. Values that a log does not have, or has in a form that this
version does not know, are omitted: the last line may be incomplete, and earlier versions recorded less.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.coordinator.comparison import read_verdict
from lockstep.coordinator.job_report import NO_END, state_of, troubles
from lockstep.errors import ConfigError
from lockstep.monitoring.progress import metric_rank
from lockstep.monitoring.run_catalog import is_active
from lockstep.monitoring.top_text import csv_lines
from lockstep.observability.events import FORMAT
from lockstep.observability.run_lines import happenings, measurement
from lockstep.observability.run_state import RunState, effective_share, location_of
from lockstep.system.files import open_regular, read_regular
from lockstep.system.paths import RunPaths
from lockstep.system.prose import columns, date_text, duration_text, percent, printable, shortened

_MOST = 256 * 1024 * 1024
"""Bytes of measurements from which those of a run without an end are not read: that would take a minute."""
_DIGITS = 12
_LONGEST = 200
_METRICS = 4
"""The number of metrics in the table; the other forms have all."""
_END_OF_TIME = 1e11
_CONDITION = re.compile(r"(.+?)(!=|=|<|>)(.*)", re.DOTALL)


@dataclass(frozen=True)
class PastRun:
    """The last run in a folder; None or empty for unknown values.

    Attributes:
        name: the name of the folder.
        began: when it started, in seconds since 1970.
        seconds: the time that it took, or has taken so far.
        state: `finished`, `failed`, `stopped`, `running`, or `lost` without an end.
        script: its script.
        backend: the Keras backend.
        workers: the workers with which it started, without a chief that has parameter servers.
        servers: the number of parameter servers.
        replicas: R.
        hosts: the number of hosts.
        steps: training steps, with those before this run.
        epoch: the last epoch that has ended.
        effective: its effective training time as a share of its duration.
        lost: the number of lost workers.
        joined: the number of workers that joined.
        warnings: the number of warnings.
        metrics: the metrics of the last epoch, by name; None for a value that was not finite.
        tags: the tags of `lockstep run --tag`.
        digest: the digest of the model that was trained last.
        end: how it ended, or that it runs, its troubles, and the verdict of the comparison with one process.
        resumed: the folder and the step of the checkpoint from which it resumed; None if it did not.
        resumed_from: the name of the run that wrote that checkpoint, or else its folder.
        written: the time, the folder and the step of each checkpoint that the runs in the folder wrote.
    """

    name: str
    began: float | None = None
    seconds: float | None = None
    state: str = ""
    script: str = ""
    backend: str = ""
    workers: int | None = None
    servers: int = 0
    replicas: int | None = None
    hosts: int | None = None
    steps: int | None = None
    epoch: int | None = None
    effective: float | None = None
    lost: int | None = None
    joined: int | None = None
    warnings: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    digest: str = ""
    end: str = ""
    resumed: tuple[str, int] | None = None
    resumed_from: str = ""
    written: tuple[tuple[float, str, int], ...] = ()


def past_runs(folders: Sequence[Path], now: float) -> list[PastRun]:
    """Return the runs in some folders, the newest first.

    Args:
        folders: each a run folder, or a folder that contains run folders.
        now: seconds since 1970.

    Raises:
        OSError: one of the folders cannot be listed.
    """
    runs_by_folder: dict[Path, PastRun] = {}
    for folder in folders:
        run = _read(folder, now)
        if run is not None:
            runs_by_folder[folder] = run
        else:
            runs = ((subfolder, _read(subfolder, now)) for subfolder in sorted(folder.iterdir()))
            runs_by_folder.update((subfolder, run) for subfolder, run in runs if run is not None)
    ordered = sorted(runs_by_folder.values(), key=lambda run: run.began or 0.0, reverse=True)
    return [_linked(run, ordered) for run in ordered]


def _read(folder: Path, now: float) -> PastRun | None:
    """Return the run in a folder, or None if there is none."""
    paths = RunPaths(folder)
    try:
        events = read_regular(paths.events)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return PastRun(printable(folder.name), end=f"cannot be read: {error.strerror}")
    active = now if is_active(folder) else None
    return summarize(
        folder.name, events, lambda: _measurements(paths), active, read_verdict(paths, ended=active is None)
    )


def _measurements(paths: RunPaths) -> bytes:
    with contextlib.suppress(OSError), os.fdopen(open_regular(paths.measurements), "rb") as file:
        return file.read() if os.fstat(file.fileno()).st_size <= _MOST else b""
    return b""


def summarize(
    name: str, events: bytes, measurements: Callable[[], bytes], now: float | None, compared: str = ""
) -> PastRun:
    """Return the last run of a folder, from its logs.

    Args:
        name: the name of the folder.
        events: the event log.
        measurements: returns the log of measurements; called if the event log has no end with totals.
        now: seconds since 1970; None if no process uses the folder.
        compared: the verdict of the comparison with one process; empty if none was wanted.
    """
    name = printable(name)
    state, newest, kept = RunState(keeps_history=False), 0.0, ""
    written = []
    for event in happenings(events):
        state, newest = state.after(event), event.time
        match event.event:
            case "checkpoint":
                folder, _, _ = str(event.fields.get("path", "")).rpartition("/")
                written.append((event.time, folder, _integer(event.fields.get("step")) or 0))
            case "keeps":
                kept = str(event.fields.get("folder", ""))
    job, done = state.job, state.finished or {}
    began, recorded = _number(state.began) if job else None, job.get("format")
    if isinstance(recorded, int) and recorded > FORMAT:
        return PastRun(name, began, end=f"recorded in format {recorded} by a later version")
    for line in measurements().split(b"\n") if "effective" not in done else ():
        if (measured := measurement(line)) is not None and measured.time >= (began or 0.0):
            state = state.after(measured)
    ended = now if now is not None and state.finished is None else _number(newest)
    took = None if began is None or ended is None else ended - began
    seconds = _number(done.get("seconds"), took)
    servers = _integer(job.get("parameter_servers")) or 0
    # One process with all tasks of a job with servers may repeat a run.
    workers = _integer(job.get("replicas" if servers else "workers"))
    hosts, tags, totals = job.get("hosts"), job.get("tags"), state.totals
    checkpoints = job.get("checkpoints")
    if isinstance(checkpoints, dict):
        kept = location_of(checkpoints)
    return PastRun(
        name=name,
        began=began,
        seconds=seconds,
        state=state_of(state.finished, active=now is not None),
        script=printable(str(job.get("target", ""))),
        backend=printable(str(job.get("backend") or "")),
        workers=workers - servers - 1 if workers is not None and servers else workers,
        servers=servers,
        replicas=_integer(job.get("replicas")),
        hosts=(len(hosts) or 1) if isinstance(hosts, list) else None,
        steps=totals.known_steps or None,
        epoch=totals.epoch or None,
        effective=_share(effective_share(totals, seconds or 0.0)),
        lost=totals.lost,
        joined=totals.joined,
        warnings=totals.warnings,
        metrics={printable(metric): value for metric, value in totals.metrics.items()},
        tags=tuple(printable(str(tag)) for tag in tags) if isinstance(tags, list) else (),
        digest=printable(str(done.get("digest", ""))),
        end=_end(state.with_verdict(compared), active=now is not None),
        resumed=(kept, totals.before) if totals.before and kept else None,
        written=tuple(written),
    )


def _linked(run: PastRun, runs: Sequence[PastRun]) -> PastRun:
    """Return a run with the name of the run that wrote the checkpoint from which it resumed."""
    if run.resumed is None:
        return run
    folder, step = run.resumed
    # A killed command may not have recorded its last checkpoint, but an earlier one also names the run.
    before = [
        (written_step == step, time, other.name)
        for other in runs
        for time, written_folder, written_step in other.written
        if written_folder == folder and written_step <= step and time < (run.began or 0.0)
    ]
    return replace(run, resumed_from=max(before)[2] if before else printable(folder))


# ------------------------------------------------------------------------------------------------- columns


class _RunColumn(NamedTuple):
    """A column: its name, its value for a run, and its text in the table; None if it is not in the table."""

    name: str
    value: Callable[[PastRun], Any]
    show: Callable[[PastRun], str] | None = None


def _plain(name: str) -> Callable[[PastRun], str]:
    return lambda run: str(getattr(run, name) or "")


_METRIC_COLUMNS = "metrics"
"""Where the columns of metrics are, which have the names of the metrics."""

_COLUMNS = (
    _RunColumn("run", lambda run: run.name, lambda run: run.name),
    _RunColumn("state", lambda run: run.state, lambda run: run.state),
    _RunColumn("started", lambda run: run.began, lambda run: _date(run.began)),
    _RunColumn("took", lambda run: run.seconds, lambda run: _took(run.seconds)),
    _RunColumn("script", lambda run: run.script),
    _RunColumn("backend", lambda run: run.backend),
    _RunColumn("workers", lambda run: run.workers, lambda run: _workers(run)),
    _RunColumn("servers", lambda run: run.servers),
    _RunColumn(
        "replicas", lambda run: run.replicas, lambda run: "" if run.servers else _plain("replicas")(run)
    ),
    _RunColumn("hosts", lambda run: run.hosts, _plain("hosts")),
    _RunColumn("steps", lambda run: run.steps, _plain("steps")),
    _RunColumn("epoch", lambda run: run.epoch),
    _RunColumn("effective", lambda run: run.effective, lambda run: _percent(run.effective)),
    _RunColumn("lost", lambda run: run.lost, _plain("lost")),
    _RunColumn("joined", lambda run: run.joined),
    _RunColumn("warnings", lambda run: run.warnings, _plain("warnings")),
    _RunColumn(_METRIC_COLUMNS, lambda run: dict(run.metrics)),
    _RunColumn("tags", lambda run: list(run.tags), lambda run: ", ".join(run.tags)),
    _RunColumn("resumed", lambda run: run.resumed_from, lambda run: run.resumed_from),
    _RunColumn("digest", lambda run: run.digest, lambda run: run.digest[:_DIGITS]),
    _RunColumn("end", lambda run: run.end, lambda run: shortened(_remark(run), _LONGEST)),
)
_BY_NAME = {column.name: column for column in _COLUMNS}


def _all_columns(runs: Iterable[PastRun]) -> list[_RunColumn]:
    """Return the columns of some runs, with one for each metric."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    # A metric with the name of another column is `metrics.NAME`.
    metrics = [_metric(name) for name in sorted(names, key=metric_rank)]
    at = list(_BY_NAME).index(_METRIC_COLUMNS)
    return [*_COLUMNS[:at], *metrics, *_COLUMNS[at + 1 :]]


def _metric(name: str) -> _RunColumn:
    def show(run: PastRun) -> str:
        value = run.metrics.get(name, "")
        return "nan" if value is None else f"{value:.4g}" if value != "" else ""

    title = f"{_METRIC_COLUMNS}.{name}" if name in _BY_NAME else name
    return _RunColumn(title, lambda run: run.metrics.get(name), show)


def select(runs: Sequence[PastRun], conditions: Sequence[str], order: str = "") -> list[PastRun]:
    """Return the runs that meet all conditions, in an order.

    Args:
        runs: the runs.
        conditions: each a column, `=`, `!=`, `<` or `>`, and a value. A text may be a pattern such as
            `train*`. A run meets a condition on a list such as `tags` if one of the items does.
        order: the column by which to sort, after `-` for the largest value first; empty to keep the order.

    Raises:
        ConfigError: a condition has a different form, or there is no such column.
    """
    by_name = {column.name.lower(): column for column in _all_columns(runs)}

    def find(name: str, option: str) -> _RunColumn:
        try:
            return by_name[name.strip().lower()]
        except KeyError:
            raise ConfigError(
                f"{option}: there is no column {name.strip()!r} here; there are {', '.join(by_name)}"
            ) from None

    for condition in conditions:
        option = f"--where {condition}"
        parts = _CONDITION.fullmatch(condition)
        if parts is None:
            raise ConfigError(f"{option}: give a column, one of = != < >, and a value, such as lost>0")
        name, sign, wanted = parts.groups()
        column = find(name, option)
        if sign in "<>" and _parsed(wanted) is None:
            raise ConfigError(f"{option}: {sign} needs a number")
        runs = [run for run in runs if _meets(column.value(run), sign, wanted)]
    if not order:
        return list(runs)
    column = find(order.removeprefix("-"), f"--sort {order}")
    with_value = [run for run in runs if column.value(run) not in (None, "", [])]
    without = [run for run in runs if column.value(run) in (None, "", [])]
    return [*sorted(with_value, key=column.value, reverse=order.startswith("-")), *without]


def _meets(value: Any, sign: str, wanted: str) -> bool:
    number = _parsed(wanted)
    match value:
        case None:
            equal = not wanted
        case list():
            equal = any(fnmatchcase(item, wanted) for item in value) or (not value and not wanted)
        case str():
            equal = fnmatchcase(value, wanted)
        case _:
            if sign in "<>" and number is not None:
                return bool(value < number if sign == "<" else value > number)
            equal = value == number
    return equal == (sign == "=") and sign in ("=", "!=")


def _parsed(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def table(runs: Sequence[PastRun]) -> list[str]:
    """Return a line of headings and a line per run, without columns that are empty; times are local."""
    shown = [(column.name, column.show) for column in _all_columns(runs) if column.show is not None]
    metrics = [name for name, _ in shown if name not in _BY_NAME]
    texts = [
        (name if name in metrics else name.upper(), cells)
        for name, show in shown
        if name not in metrics[_METRICS:] and (any(cells := [show(run) for run in runs]) or name == "run")
    ]
    headings = [name for name, _ in texts]
    return columns([headings, *(list(row) for row in zip(*(cells for _, cells in texts), strict=True))])


def as_json(runs: Sequence[PastRun]) -> str:
    """Return a JSON object in one line per run; times in seconds, since 1970 for its start."""
    rows = ({column.name: column.value(run) for column in _COLUMNS} for run in runs)
    return "".join(msgspec.json.encode(row).decode(errors="replace") + "\n" for row in rows)


def as_csv(runs: Sequence[PastRun]) -> str:
    """Return a line of names of columns, and a line per run, with a column for each metric."""
    shown = _all_columns(runs)

    def cell(value: Any) -> Any:
        return " ".join(value) if isinstance(value, list) else value

    return csv_lines(
        [[column.name for column in shown], *([cell(column.value(run)) for column in shown] for run in runs)]
    )


def _date(began: float | None) -> str:
    return "" if began is None else date_text(began)


def _took(seconds: float | None) -> str:
    return "" if seconds is None else duration_text(seconds)


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)


def _workers(run: PastRun) -> str:
    return _plain("workers")(run) + (f" + {run.servers} ps" if run.servers else "")


def _remark(run: PastRun) -> str:
    """Return how a run ended, without its state, which has a column."""
    first, _, rest = run.end.partition("; ")
    return rest if first == run.state else run.end


# --------------------------------------------------------------------------------------------------- ends


def _end(state: RunState, *, active: bool) -> str:
    finished = state.finished or {}
    message = printable(str(finished.get("message", "")))
    match state_of(state.finished, active=active):
        case "lost":
            end = NO_END
        case "stopped":
            end = message
        case "failed":
            end = f"failed ({finished.get('status')}): {message}"
        case other:
            end = other
    return "; ".join(filter(None, [end, *troubles(state.totals), printable(state.compared)]))


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _share(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _number(value: Any, otherwise: float | None = None) -> float | None:
    """Return a time, or None if the value is not a number or not a time in the calendar."""
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _END_OF_TIME
    return float(value) if is_valid else otherwise
