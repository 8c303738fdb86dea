"""What the folder of a run says about it, as one object that follows the files while they grow.

`RunData` is a fold of the events and measurements in the order of the files. A folder may contain several
runs, one after the other: the last one counts, but for metrics and steps, which continue.
"""

import heapq
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError
from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import (
    FORMAT,
    STEP_PARTS,
    GpuLoad,
    LoadMeasured,
    Measurement,
    MetricsRecorded,
    StepsMeasured,
)
from lockstep.parameter_server.tasks import Tasks
from lockstep.system.paths import RunPaths

_CHUNK = 4 * 1024 * 1024
_MOST_EVENTS = 20_000
_FIRST_CAPACITY = 256

Phase = Literal[
    "starting",
    "running the script",
    "compiling",
    "training",
    "joining",
    "leaving",
    "lost",
    "failed",
    "finished",
    "ended",
]


_STEP_SUMS = (
    "number",
    "trained",
    "count",
    "began",
    "examples",
    "replicas",
    "compiled",
    "compiling",
    "staleness",
    "largest_staleness",
    *STEP_PARTS,
)
STEP_COLUMNS = ("time", "call", *_STEP_SUMS)
"""Of `WorkerInfo.steps`: `call` is the index in `RunData.calls`, the others are those of `StepsMeasured`; NaN
for what is None there."""

LOAD_COLUMNS = ("time", "cores", "delayed", "memory", "faults")
"""Of `WorkerInfo.load`, as in `WorkerLoad`."""

HOST_COLUMNS = ("time", "busy", "memory_used", "swapping", "throttled")
"""Of `HostInfo.load`, as in `LoadMeasured`."""

GPU_COLUMNS = ("time", "utilization", "memory_used", "temperature", "power")
"""Of `HostInfo.gpu_load`, as in `GpuLoad`; NaN for what the driver does not report."""

METRIC_COLUMNS = ("time", "trained", "value", "epoch")
"""Of a metric: `value` is NaN if it was not finite; `epoch` is 0 within epochs."""


class Columns:
    """Numbers in named columns of equal length, which grow; float64."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._size = 0
        self._rows: npt.NDArray[np.float64] = np.empty((_FIRST_CAPACITY, len(names)))

    def __len__(self) -> int:
        return self._size

    def add(self, *values: float) -> None:
        """Append a row, with a value for each column."""
        if self._size == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._size] = values
        self._size += 1

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return the values of a column, shape (length,); a view that later rows do not change."""
        return self._rows[: self._size, self.names.index(name)]

    def last(self) -> dict[str, float]:
        """Return the last row by column; empty without rows."""
        return (
            dict(zip(self.names, map(float, self._rows[self._size - 1]), strict=True)) if self._size else {}
        )


@dataclass
class WorkerInfo:
    """A worker of the run.

    Attributes:
        worker: its id.
        phase: what it does, or how it has ended.
        pid: of its process; None until it has started.
        host: the name of its host, once its load was measured; else empty.
        began: when it was started, in seconds since 1970.
        ended: when its process ended; None while it runs.
        status: its exit status; None while it runs.
        reason: why it was lost or left; empty otherwise.
        call: that it has begun last, or in which its last steps were measured.
        nested: seconds of calls within calls that train, by method.
        steps: its measured steps, with the columns `STEP_COLUMNS`; the first step of a call is a row of its
            own with count 1 and number 1.
        load: its measured load, with the columns `LOAD_COLUMNS`.
    """

    worker: int
    phase: Phase = "starting"
    pid: int | None = None
    host: str = ""
    began: float = 0.0
    ended: float | None = None
    status: int | None = None
    reason: str = ""
    call: str = ""
    nested: dict[str, float] = field(default_factory=dict)
    steps: Columns = field(default_factory=lambda: Columns(*STEP_COLUMNS))
    load: Columns = field(default_factory=lambda: Columns(*LOAD_COLUMNS))


@dataclass
class HostInfo:
    """A host of the run: its load, with the columns `HOST_COLUMNS`, and the newest state of its GPUs.

    `gpu_load` has their load by index, with the columns `GPU_COLUMNS`.
    """

    name: str
    cores: int = 0
    memory_total: int = 0
    gpus: tuple[GpuLoad, ...] = ()
    load: Columns = field(default_factory=lambda: Columns(*HOST_COLUMNS))
    gpu_load: dict[int, Columns] = field(default_factory=dict)


@dataclass
class CallInfo:
    """A distributed call, such as `fit 1`: when it began and ended, in seconds since 1970."""

    name: str
    began: float
    ended: float | None = None


@dataclass
class ViewInfo:
    """A membership: when it began, its workers, why, and how long the training paused; None if unknown."""

    number: int
    time: float
    workers: tuple[int, ...]
    reason: str
    pause: float | None = None


@dataclass(frozen=True)
class Happening:
    """An event as in the file: when it was published, its name, its worker (None for the run), its fields."""

    time: float
    event: str
    worker: int | None
    fields: Mapping[str, Any]


class RunData:
    """What is known of a run; see the attributes.

    Attributes:
        job: the fields of the event `job`; empty before it.
        began: when the run started, in seconds since 1970; 0 before that is known.
        last: when something was last published.
        workers: by id.
        hosts: by name.
        views: those that followed the first one, the newest last.
        calls: the calls of the script in the order in which they began. Those within a call share one name,
            such as `validation within fit 1`.
        metrics: by name, at the end of epochs; columns `METRIC_COLUMNS`.
        batch_metrics: the same within epochs.
        waits: the last report of each wait in progress, by the worker that waits.
        events: the newest 20,000 events of all kinds but measurements.
        checkpoints: `checkpoint` events.
        finished: the fields of the event `finished`; None while the run has not ended.
        skipped: number of lines that could not be read.
    """

    def __init__(self) -> None:
        self.job: Mapping[str, Any] = {}
        self.began = 0.0
        self.last = 0.0
        self.workers: dict[int, WorkerInfo] = {}
        self.hosts: dict[str, HostInfo] = {}
        self.views: list[ViewInfo] = []
        self.calls: list[CallInfo] = []
        self.metrics: dict[str, Columns] = {}
        self.batch_metrics: dict[str, Columns] = {}
        self.waits: dict[int, Happening] = {}
        self.events: deque[Happening] = deque(maxlen=_MOST_EVENTS)
        self.checkpoints: list[Happening] = []
        self.finished: Mapping[str, Any] | None = None
        self.skipped = 0
        self._call_numbers: dict[str, int] = {}
        self._epochs: set[tuple[str, int]] = set()

    @property
    def members(self) -> tuple[int, ...]:
        """The workers of the newest view, the longest-serving first; as started before a second view."""
        return self.views[-1].workers if self.views else tuple(range(int(self.job.get("workers", 0))))

    def task(self, worker: int) -> str:
        """Return `chief`, `worker` or `ps` in a job with parameter servers; empty in another one."""
        processes, servers = int(self.job.get("workers", 0)), int(self.job.get("parameter_servers", 0))
        if not servers:
            return ""
        if processes == 1:
            # One process with all tasks repeats a run.
            return "chief"
        # Others take the place of workers only.
        return Tasks(processes, servers).of(worker)[0] if 0 <= worker < processes else "worker"

    @property
    def trained(self) -> int:
        """The number of training steps so far, as measured; with parameter servers, by the chief."""
        taking = [info for info in self.workers.values() if self.task(info.worker) in ("", "chief")]
        return max((int(info.steps.last().get("trained", 0)) for info in taking), default=0)

    def add_event(self, happening: Happening) -> None:
        """Take in a line of `events.jsonl`."""
        self.last = max(self.last, happening.time)
        self.events.append(happening)
        act = _EVENTS.get(happening.event)
        if act is not None:
            act(self, happening)

    def add_measurement(self, line: PublishedEvent) -> None:
        """Take in a line of `measurements.jsonl`."""
        self.last = max(self.last, line.time)
        match line.event:
            case StepsMeasured() as steps if line.worker is not None:
                self._add_steps(line.time, line.worker, steps)
            case MetricsRecorded() as metrics:
                self._add_metrics(line.time, metrics)
            case LoadMeasured() as load:
                self._add_load(line.time, load)

    def _worker(self, worker: int | None) -> WorkerInfo:
        at = -1 if worker is None else worker
        return self.workers.setdefault(at, WorkerInfo(at))

    def _call(self, name: str, time: float) -> int:
        number = self._call_numbers.get(name)
        if number is None:
            number = self._call_numbers[name] = len(self.calls)
            self.calls.append(CallInfo(name, time))
        return number

    def _add_steps(self, time: float, worker: int, steps: StepsMeasured) -> None:
        info = self._worker(worker)
        info.call = steps.call
        if info.ended is None:
            info.phase = "training"
        self.waits.pop(worker, None)
        for method, seconds in steps.calls.items():
            info.nested[method] = info.nested.get(method, 0.0) + seconds
        call = self._call(steps.call, steps.began)
        found = (getattr(steps, name) for name in _STEP_SUMS)
        info.steps.add(time, call, *(math.nan if value is None else value for value in found))

    def _add_metrics(self, time: float, metrics: MetricsRecorded) -> None:
        epoch = metrics.epoch
        if epoch is not None:
            # The chief that follows a lost one may record an epoch again.
            if (metrics.call, epoch) in self._epochs:
                return
            self._epochs.add((metrics.call, epoch))
        found = self.batch_metrics if epoch is None else self.metrics
        for name, value in metrics.values.items():
            columns = found.setdefault(name, Columns(*METRIC_COLUMNS))
            columns.add(time, metrics.trained, math.nan if value is None else value, epoch or 0)

    def _add_load(self, time: float, measured: LoadMeasured) -> None:
        host = self.hosts.setdefault(measured.host, HostInfo(measured.host))
        host.cores, host.memory_total, host.gpus = measured.cores, measured.memory_total, measured.gpus
        host.load.add(time, measured.busy, measured.memory_used, measured.swapping, measured.throttled)
        for gpu in measured.gpus:
            found = (gpu.utilization, gpu.memory_used, gpu.temperature, gpu.power)
            columns = host.gpu_load.setdefault(gpu.index, Columns(*GPU_COLUMNS))
            columns.add(time, *(math.nan if value is None else value for value in found))
        for load in measured.workers:
            info = self._worker(load.worker)
            info.host = measured.host
            info.load.add(time, load.cores, load.delayed, load.memory, load.faults)

    def _job(self, happening: Happening) -> None:
        self.job, self.began, self.finished = happening.fields, happening.time, None
        # Ids of workers and numbers of views and calls begin again.
        for info in self.workers.values():
            info.phase, info.status, info.reason, info.ended = "starting", None, "", None
        self.views.clear()
        self.waits.clear()
        self._epochs.clear()
        self._call_numbers.clear()

    def _started(self, happening: Happening) -> None:
        info = self._worker(happening.worker)
        info.phase, info.pid, info.began = "starting", happening.fields.get("pid"), happening.time
        info.ended, info.status, info.reason = None, None, ""

    def _phase(self, happening: Happening, phase: Phase) -> None:
        info = self._worker(happening.worker)
        if info.ended is None:
            info.phase = phase
            info.reason = str(happening.fields.get("reason", ""))

    def _exited(self, happening: Happening) -> None:
        info = self._worker(happening.worker)
        info.ended, info.status = happening.time, happening.fields.get("status")
        if info.phase not in ("lost", "failed", "leaving", "finished"):
            info.phase = "ended" if info.status else "finished"
        self.waits.pop(info.worker, None)

    def _view(self, happening: Happening) -> None:
        fields = happening.fields
        workers = tuple(fields.get("workers", ()))
        number, reason = int(fields.get("number", 0)), str(fields.get("reason", ""))
        self.views.append(ViewInfo(number, happening.time, workers, reason))
        self.waits.clear()

    def _paused(self, happening: Happening) -> None:
        for view in reversed(self.views):
            if view.number == happening.fields.get("number"):
                view.pause = happening.fields.get("seconds")
                return

    def _call_began(self, happening: Happening) -> None:
        name = str(happening.fields.get("name", ""))
        method, _, _ = name.partition(" ")
        if " within " in name:
            # There may be one in each step.
            name = f"{method} within {name.partition(' within ')[2]}"
        self._call(name, happening.time)
        self._worker(happening.worker).call = name
        # Only the first step of an outer call is known to compile.
        self._phase(happening, "training" if " within " in name or method == "predict" else "compiling")

    def _call_ended(self, happening: Happening) -> None:
        number = self._call_numbers.get(str(happening.fields.get("name", "")))
        if number is not None:
            outer, *later = self.calls[number:]
            outer.ended = happening.time
            for call in later:
                if call.name.endswith(f" within {outer.name}"):
                    call.ended = happening.time
        self._phase(happening, "running the script")

    def _waits(self, happening: Happening) -> None:
        if happening.worker is not None:
            self.waits[happening.worker] = happening

    def _checkpoint(self, happening: Happening) -> None:
        self.checkpoints.append(happening)

    def _finished(self, happening: Happening) -> None:
        self.finished = happening.fields
        self.waits.clear()


_EVENTS: dict[str, Callable[[RunData, Happening], None]] = {
    "job": RunData._job,
    "started": RunData._started,
    "ready": lambda data, happening: data._phase(happening, "running the script"),
    "asks": lambda data, happening: data._phase(happening, "joining"),
    "lost": lambda data, happening: data._phase(happening, "lost"),
    "left": lambda data, happening: data._phase(happening, "leaving"),
    "failed": lambda data, happening: data._phase(happening, "failed"),
    "done": lambda data, happening: data._phase(happening, "finished"),
    "exited": RunData._exited,
    "view": RunData._view,
    "paused": RunData._paused,
    "call": RunData._call_began,
    "call ended": RunData._call_ended,
    "wait": RunData._waits,
    "checkpoint": RunData._checkpoint,
    "finished": RunData._finished,
}


class _Origin(msgspec.Struct):
    """What every line of `measurements.jsonl` says beside its measurement."""

    time: float
    worker: int | None = None


_origins: msgspec.json.Decoder[_Origin] = msgspec.json.Decoder(_Origin)
_measurements: msgspec.json.Decoder[Measurement] = msgspec.json.Decoder(Measurement)


class RunFolder:
    """Follows the files of a run.

    Args:
        folder: the run folder; its files may appear later.

    Attributes:
        paths: of the folder.
        data: what was read so far; another object after a file was replaced or shortened.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder)
        self._restart()

    def update(self) -> bool:
        """Read what the files have gained; return whether anything is new.

        A line without its end is read when it is complete. One that cannot be read is skipped, and counted.

        Raises:
            OSError: a file exists and cannot be read.
            ConfigError: the last run in the folder was recorded in a format of a later version.
        """
        if self._events.shrank() or self._measurements.shrank():
            self._restart()
        found = False
        # In the order of time: what a worker does follows from both files.
        for entry in heapq.merge(self._happenings(), self._measured(), key=lambda one: one.time):
            found = True
            if isinstance(entry, Happening):
                try:
                    self.data.add_event(entry)
                except (TypeError, ValueError):
                    # A value of another type than the event's.
                    self.data.skipped += 1
            else:
                self.data.add_measurement(entry)
        written = self.data.job.get("format")
        if isinstance(written, int) and written > FORMAT:
            raise ConfigError(
                f"{self.paths.events} has format {written}, and this version reads format {FORMAT}: install "
                "the version of Lockstep that has written it"
            )
        return found

    def _happenings(self) -> Iterator[Happening | PublishedEvent]:
        for line in self._events.lines():
            if (happening := _happening(line)) is not None:
                yield happening
            else:
                self.data.skipped += 1

    def _measured(self) -> Iterator[Happening | PublishedEvent]:
        for line in self._measurements.lines():
            try:
                origin = _origins.decode(line)
                yield PublishedEvent(origin.time, origin.worker, _measurements.decode(line))
            except msgspec.DecodeError:
                self.data.skipped += 1

    def _restart(self) -> None:
        self.data = RunData()
        self._events = _GrowingFile(self.paths.events)
        self._measurements = _GrowingFile(self.paths.measurements)


class _GrowingFile:
    """The lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None

    def shrank(self) -> bool:
        """Whether the file is another one, or shorter, than when it was last read."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return self._inode is not None
        return found.st_size < self._offset or self._inode not in (None, found.st_ino)

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK):
                *complete, rest = (rest + chunk).split(b"\n")
                for line in complete:
                    self._offset += len(line) + 1
                    if line:
                        yield line


def _happening(line: bytes) -> Happening | None:
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        time, event, worker = float(fields.pop("time")), fields.pop("event"), fields.pop("worker", None)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    if not isinstance(event, str) or not (worker is None or isinstance(worker, int)):
        return None
    return Happening(time, event, worker, fields)
