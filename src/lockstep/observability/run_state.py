"""The state of a run: one immutable value, and one pure step, `RunState.after`.

All views of a run are rendered from this state: the page, the report, `lockstep top` and `lockstep runs`
from the files of its folder, and its last line and its metrics while it publishes its events. An event has
the same meaning in all of them.

A reader in another thread has a state that does not change. Parts that grow with a run (rows of measurements,
events, calls) are values that share their rows with the previous state (`growth.py`), so an event costs
microseconds, however long the run is. The process of a job has sums instead of the history, so the size of
its state is bounded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add, attrgetter
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import HostStrain, JobTotals, is_within
from lockstep.observability.growth import Columns, GrowingList, GrowingMap, Numbering
from lockstep.observability.host_loads import throttled_gpus
from lockstep.observability.measurements import STEP_PARTS, LoadMeasured, MetricsRecorded, StepsMeasured
from lockstep.observability.run_lines import Happening, as_happening
from lockstep.observability.slowness import is_often, with_load
from lockstep.observability.step_parts import CallTimes, is_first, parts_of
from lockstep.observability.step_recorder import serves, trains

_MOST_EVENTS = 20_000

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
"""Of `WorkerInfo.steps`: `call` is the index in `RunState.calls`; the others are those of `StepsMeasured`,
with NaN for None."""

LOAD_COLUMNS = ("time", "cores", "delayed", "memory", "faults", "throttled")
"""Of `WorkerInfo.load`, as in `WorkerLoad`; `throttled` is 1 if a GPU of the worker has a lowered clock."""

HOST_COLUMNS = ("time", "busy", "memory_used", "swapping", "throttled")
"""Of `HostInfo.load`, as in `LoadMeasured`."""

GPU_COLUMNS = ("time", "utilization", "memory_used", "temperature", "power")
"""Of `HostInfo.gpu_load`, as in `GpuLoad`; NaN for what the driver does not report."""

METRIC_COLUMNS = ("time", "trained", "value", "epoch")
"""Of a metric: `value` is NaN if it was not finite; `epoch` is 0 within epochs."""


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker of the run.

    Attributes:
        worker: its id.
        phase: its phase, or how it ended.
        pid: the id of its process; None until it has started.
        host: the name of its host, after a measurement of its load; otherwise empty.
        began: the time of its start, in seconds since 1970.
        ended: the time at which its process ended or was lost; None while it runs.
        status: its exit status; None while it runs.
        reason: why it was lost or left; empty otherwise.
        call: the call that it began last, or in which its last steps were measured.
        preparing: the last event that shows how far it is before its first step; None before it is ready.
        nested: seconds of calls within calls that train, by method.
        steps: its measured steps, with the columns `STEP_COLUMNS`; the first step of a call is a separate row
            with count 1 and number 1.
        load: its measured load, with the columns `LOAD_COLUMNS`.
        throttled: its GPUs that last had a lowered clock, with the reason; empty if there never were any.
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
    preparing: Happening | None = None
    nested: Mapping[str, float] = {}
    steps: Columns = Columns(*STEP_COLUMNS)
    load: Columns = Columns(*LOAD_COLUMNS)
    throttled: str = ""


class HostInfo(msgspec.Struct, frozen=True):
    """A host of the run: its newest measurement, and its load, with the columns `HOST_COLUMNS`.

    `gpu_load` has the load of its GPUs by index, with the columns `GPU_COLUMNS`; `strain` counts its
    measurements.
    """

    measured: LoadMeasured
    strain: HostStrain = HostStrain()
    load: Columns = Columns(*HOST_COLUMNS)
    gpu_load: Mapping[int, Columns] = {}


class CallInfo(msgspec.Struct, frozen=True):
    """A distributed call, such as `fit 1`: when it began and ended, in seconds since 1970.

    The other attributes are those of `CallStarted`.
    """

    name: str
    began: float
    ended: float | None = None
    initial_epoch: int | None = None
    epochs: int | None = None
    steps_per_epoch: int | None = None


class ViewInfo(msgspec.Struct, frozen=True):
    """A membership: when it began, its workers, its reason, and how long training paused; None if unknown."""

    number: int
    time: float
    workers: tuple[int, ...]
    reason: str
    pause: float | None = None


_effective_parts_of = attrgetter("input", "compute", "wait", "exchange", "update")
_sums_of = attrgetter(*_STEP_SUMS)


class StepSums(msgspec.Struct, frozen=True):
    """Sums over the measured steps of a worker.

    Attributes:
        count: the number of steps.
        parts: seconds of each of `STEP_PARTS`.
        trained: the training steps of the job after the last of them.
        staleness: sum over the steps; None in a job without parameter servers.
        largest_staleness: the largest staleness of the last measurement; None in a job without parameter
            servers.
    """

    count: int = 0
    parts: tuple[float, ...] = (0.0,) * len(STEP_PARTS)
    trained: int = 0
    staleness: int | None = None
    largest_staleness: int | None = None

    def plus(self, steps: StepsMeasured) -> "StepSums":
        """Return the sums with another measurement."""
        stale = steps.staleness is not None and steps.largest_staleness is not None
        return StepSums(
            self.count + steps.count,
            tuple(map(add, self.parts, parts_of(steps))),
            max(self.trained, steps.trained),
            (self.staleness or 0) + (steps.staleness or 0) if stale else self.staleness,
            steps.largest_staleness if stale else self.largest_staleness,
        )


class ExampleCount(msgspec.Struct, frozen=True):
    """Counts the examples in training steps. All workers measure the same steps, each in its own pieces.

    Attributes:
        examples: the number of examples.
        first: the training steps before the first measurement; None if there is none yet.
        counted: the training steps up to which examples are counted.
        reached: for each worker, the step up to which it has measured, and the examples up to there.
    """

    examples: int = 0
    first: int | None = None
    counted: int = 0
    reached: GrowingMap[tuple[int, int]] = GrowingMap()

    def plus(self, worker: int, steps: StepsMeasured) -> "ExampleCount":
        """Return the count with another measurement; that of the worker which is ahead counts."""
        before = steps.trained - steps.count
        first, counted = (before, before) if self.first is None else (self.first, self.counted)
        reached, examples = self.reached.find(worker) or (first, 0)
        if reached != before:
            # The worker has joined. The number of earlier examples follows from the others, up to uneven
            # batches.
            mean = self.examples / max(1, counted - first)
            examples = self.examples + round((before - counted) * mean)
        examples += steps.examples
        counts = self.reached.plus(worker, (steps.trained, examples))
        if steps.trained > counted:
            return ExampleCount(max(self.examples, examples), first, steps.trained, counts)
        return ExampleCount(self.examples, first, counted, counts)


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, or of the last one of several in a folder.

    Steps, load, metrics, calls, checkpoints and events of earlier runs in the folder remain.

    Attributes:
        keeps_history: whether the state has every measurement and event: columns, events, checkpoints, views
            and calls. Otherwise its size is bounded, and it has sums instead: examples, taken, served and
            call_times.
        job: the fields of the event `job`; empty before it.
        began: when the run started, in seconds since 1970; 0 before that is known.
        last: the time of the last publication.
        members: the workers of the newest view, the longest-serving first.
        workers: the workers by id.
        hosts: the hosts by name.
        totals: the totals of the job, and its troubles; after its end, those of its last event.
        stepped: whether a worker has completed a first step.
        call_times: the times of the last call that trains, until all members have ended it.
        ended_call: the times of the last such call that all members have ended; None before.
        left: number of workers that were asked to leave.
        trained: training steps that workers have measured, or from which they have resumed; None before.
        examples: the examples of measured training steps.
        taken: sums over the training steps of each worker that has measured any.
        served: sums over the updates of each parameter server that has measured any.
        timed: the training steps whose time counts as effective so far; None before the first.
        values: the newest value of each metric; None if it was not finite.
        views: the views after the first one, the newest last.
        calls: the calls of the script in the order in which they began. Those within a call share one name,
            such as `validation within fit 1`.
        metrics: the metrics by name, at the end of epochs; columns `METRIC_COLUMNS`.
        batch_metrics: the same within epochs.
        waits: the last report of each wait in progress, by the worker that waits.
        events: the newest 20,000 events, without measurements.
        checkpoints: the events `checkpoint`.
        remaining: the paths or URLs of older checkpoints that could not be removed.
        finished: the fields of the event `finished`; None while the run has not ended.
        compared: the verdict of the comparison with one process; empty if none was requested.
        skipped: number of lines that could not be read.
    """

    keeps_history: bool = True
    job: Mapping[str, Any] = {}
    began: float = 0.0
    last: float = 0.0
    members: Sequence[int] = ()
    workers: GrowingMap[WorkerInfo] = GrowingMap()
    hosts: Mapping[str, HostInfo] = {}
    totals: JobTotals = JobTotals()
    stepped: bool = False
    call_times: CallTimes = CallTimes()
    ended_call: CallTimes | None = None
    left: int = 0
    trained: int | None = None
    examples: ExampleCount = ExampleCount()
    taken: GrowingMap[StepSums] = GrowingMap()
    served: GrowingMap[StepSums] = GrowingMap()
    timed: int | None = None
    values: Mapping[str, float | None] = {}
    views: tuple[ViewInfo, ...] = ()
    calls: GrowingList[CallInfo] = GrowingList()
    metrics: Mapping[str, Columns] = {}
    batch_metrics: Mapping[str, Columns] = {}
    waits: Mapping[int, Happening] = {}
    events: GrowingList[Happening] = GrowingList()
    checkpoints: GrowingList[Happening] = GrowingList()
    remaining: frozenset[str] = frozenset()
    finished: Mapping[str, Any] | None = None
    compared: str = ""
    skipped: int = 0
    _doubted: tuple[Any, ...] = ()
    _earlier_calls: int = 0
    _call_names: Numbering = Numbering()
    _epochs: Numbering = Numbering()

    def after(self, published: PublishedEvent | Happening) -> "RunState":
        """Return the state after an event."""
        if isinstance(published, Happening):
            return self._after_happening(published)
        match published.event:
            case StepsMeasured() as steps:
                worker = published.worker
                return self if worker is None else self._after_steps(published.time, worker, steps)
            case MetricsRecorded() as metrics:
                return self._after_metrics(published.time, metrics)
            case LoadMeasured() as load:
                return self._after_load(published.time, load)
        return self._after_happening(as_happening(published))

    def without_line(self) -> "RunState":
        """Return the state after a line of a file that cannot be read."""
        return replace(self, skipped=self.skipped + 1)

    def with_verdict(self, compared: str) -> "RunState":
        """Return the state with another verdict, which is in a separate file."""
        return self if compared == self.compared else replace(self, compared=compared)

    @property
    def seconds(self) -> float:
        """The seconds that the run took, or has taken until its last event."""
        seconds = (self.finished or {}).get("seconds")
        return seconds if isinstance(seconds, float) else self.last - self.began

    # Measurements.

    def _after_steps(self, time: float, worker: int, steps: StepsMeasured) -> "RunState":
        state, info = self, self.workers.find(worker) or WorkerInfo(worker)
        phase = "training" if info.ended is None else info.phase
        nested = info.nested
        if steps.calls:
            more = {method: nested.get(method, 0.0) + seconds for method, seconds in steps.calls.items()}
            nested = {**nested, **more}
        rows = info.steps
        if self.keeps_history:
            state, call = self._with_call(steps.call, steps.began)
            rows = rows.plus(time, call, *(math.nan if value is None else value for value in _sums_of(steps)))
        info = replace(info, phase=phase, call=steps.call, nested=nested, steps=rows)
        trained = self.trained
        if trains(steps.call):
            trained = steps.trained if trained is None else max(trained, steps.trained)
        state = replace(
            state,
            last=max(self.last, time),
            workers=self.workers.plus(worker, info),
            waits=_without(self.waits, worker),
            totals=_reached(self.totals, steps.trained),
            trained=trained,
        )
        state = state._with_effective(steps)
        return state if self.keeps_history else state._with_sums(worker, steps)

    def _with_effective(self, steps: StepsMeasured) -> "RunState":
        """Return the state with the time of training steps that no measurement of another worker has.

        With parameter servers, the chief takes all steps.
        """
        if not trains(steps.call) or not steps.count or steps.staleness is not None:
            return self
        before = steps.trained - steps.count
        added = steps.trained - max(before, before if self.timed is None else self.timed)
        if added <= 0:
            return self
        # The first step of a call compiles. Each worker measures its own pauses: a worker that is ahead waits
        # in another step.
        seconds = sum(_effective_parts_of(steps)) - steps.compiling - steps.paused
        seconds = 0.0 if is_first(steps) else max(0.0, seconds)
        effective = self.totals.effective + seconds * added / steps.count
        return replace(self._with_totals(effective=round(effective, 6)), timed=steps.trained)

    def _with_sums(self, worker: int, steps: StepsMeasured) -> "RunState":
        """Return the state with a measurement in its sums, which a state with history does not need."""
        examples, taken, served = self.examples, self.taken, self.served
        if trains(steps.call):
            taken = taken.plus(worker, (taken.find(worker) or StepSums()).plus(steps))
            if steps.staleness is None or steps.largest_staleness is None:
                # The chief of a job with parameter servers takes all steps.
                examples = examples.plus(worker, steps)
        elif serves(steps.call):
            served = served.plus(worker, (served.find(worker) or StepSums()).plus(steps))
        call_times = self.call_times.measured(worker, steps)
        return replace(self, examples=examples, taken=taken, served=served, call_times=call_times)

    def _after_metrics(self, time: float, metrics: MetricsRecorded) -> "RunState":
        trained, epoch = metrics.trained, metrics.epoch
        state = replace(
            self,
            last=max(self.last, time),
            trained=trained if self.trained is None else max(self.trained, trained),
            values={**self.values, **metrics.values},
            totals=_with_metrics(self.totals, metrics),
        )
        if not self.keeps_history:
            return state
        if epoch is not None:
            # The chief that follows a lost one may record an epoch again.
            name = f"epoch {epoch} of {metrics.call}"
            if self._epochs.number(name) is not None:
                return state
            state = replace(state, _epochs=self._epochs.plus(name))
        columns_before = state.batch_metrics if epoch is None else state.metrics
        columns = {
            name: columns_before.get(name, _NO_METRICS).plus(
                time, trained, math.nan if value is None else value, epoch or 0
            )
            for name, value in metrics.values.items()
        }
        changed = {**columns_before, **columns}
        return replace(state, batch_metrics=changed) if epoch is None else replace(state, metrics=changed)

    def _after_load(self, time: float, measured: LoadMeasured) -> "RunState":
        workers, host = self.workers, self.hosts.get(measured.host)
        host = HostInfo(measured) if host is None else replace(host, measured=measured)
        throttled = self._throttled(measured)
        for load in measured.workers:
            info = workers.find(load.worker) or WorkerInfo(load.worker)
            rows, gpus = info.load, throttled.get(load.worker, "")
            if self.keeps_history:
                rows = rows.plus(time, load.cores, load.delayed, load.memory, load.faults, bool(gpus))
            info = replace(info, host=measured.host, load=rows, throttled=gpus or info.throttled)
            workers = workers.plus(load.worker, info)
        if self.keeps_history:
            rows = host.load.plus(
                time, measured.busy, measured.memory_used, measured.swapping, measured.throttled
            )
            gpu_load = dict(host.gpu_load)
            for gpu in measured.gpus:
                values = (gpu.utilization, gpu.memory_used, gpu.temperature, gpu.power)
                columns = gpu_load.get(gpu.index, _NO_GPU_LOAD)
                gpu_load[gpu.index] = columns.plus(
                    time, *(math.nan if value is None else value for value in values)
                )
            host = replace(host, load=rows, gpu_load=gpu_load)
        host = replace(host, strain=with_load(host.strain, measured, throttled))
        totals, strained = self.totals, self.totals.strained
        if is_often(host.strain) or measured.host in strained:
            totals = replace(totals, strained={**strained, measured.host: host.strain})
        return replace(
            self,
            last=max(self.last, time),
            workers=workers,
            hosts={**self.hosts, measured.host: host},
            totals=totals,
            call_times=self.call_times.loaded(measured, throttled),
        )

    def _throttled(self, measured: LoadMeasured) -> dict[int, str]:
        """Return the GPUs with a lowered clock that workers use, in a measurement of their host."""
        if not any(gpu.throttled for gpu in measured.gpus):
            return {}
        workers = {load.worker for load in measured.workers}
        pids = {self.workers[worker].pid: worker for worker in workers if worker in self.workers}
        return throttled_gpus(measured, {pid: worker for pid, worker in pids.items() if pid is not None})

    # Events.

    def _after_happening(self, happening: Happening) -> "RunState":
        last = max(self.last, happening.time)
        if self.keeps_history:
            state = replace(self, last=last, events=self.events.plus(happening, _MOST_EVENTS))
        else:
            state = replace(self, last=last)
        act = _EVENTS.get(happening.event)
        try:
            return state if act is None else act(state, happening)
        except (TypeError, ValueError):
            # The value's type differs from the event's.
            return state.without_line()

    def _worker(self, happening: Happening) -> WorkerInfo:
        """Return the worker of an event; one with the id -1 for the run itself."""
        at = -1 if happening.worker is None else happening.worker
        return self.workers.find(at) or WorkerInfo(at)

    def _with_worker(self, info: WorkerInfo) -> "RunState":
        return replace(self, workers=self.workers.plus(info.worker, info))

    def _with_phase(self, happening: Happening, phase: Phase, **changes: Any) -> "RunState":
        """Return the state with a worker in a phase, unless its process has ended, and with other changes."""
        info = self._worker(happening)
        if info.ended is None:
            changes |= {"phase": phase, "reason": str(happening.fields.get("reason", ""))}
        return self._with_worker(replace(info, **changes))

    def _with_call(self, name: str, time: float) -> tuple["RunState", int]:
        """Return the state with a call, and the index of the call; `time` is when a new call begins."""
        number = self._call_names.number(name)
        if number is not None:
            return self, self._earlier_calls + number
        names, calls = self._call_names.plus(name), self.calls.plus(CallInfo(name, time))
        return replace(self, calls=calls, _call_names=names), len(calls) - 1

    def _job(self, happening: Happening) -> "RunState":
        # Ids of workers and numbers of views and calls begin again. A file may contain anything.
        count, restarts = (happening.fields.get(name) for name in ("workers", "job_restarts"))
        workers = self.workers
        for worker, info in self.workers.items():
            info = replace(info, phase="starting", status=None, reason="", ended=None, preparing=None)
            workers = workers.plus(worker, info)
        hosts = {name: replace(host, strain=HostStrain()) for name, host in self.hosts.items()}
        return replace(
            self,
            hosts=hosts,
            job=happening.fields,
            began=happening.time,
            members=range(count if isinstance(count, int) else 0),
            workers=workers,
            finished=None,
            views=(),
            waits={},
            totals=JobTotals(job_restarts=restarts if isinstance(restarts, int) else 0),
            remaining=frozenset(),
            _doubted=(),
            stepped=False,
            call_times=CallTimes(),
            ended_call=None,
            left=0,
            trained=None,
            examples=ExampleCount(),
            taken=GrowingMap(),
            served=GrowingMap(),
            timed=None,
            values={},
            _earlier_calls=len(self.calls),
            _call_names=Numbering(),
            _epochs=Numbering(),
        )

    def _started(self, happening: Happening) -> "RunState":
        info = replace(
            self._worker(happening),
            phase="starting",
            pid=happening.fields.get("pid"),
            began=happening.time,
            ended=None,
            status=None,
            reason="",
            preparing=None,
        )
        return self._with_worker(info)

    def _ready(self, happening: Happening) -> "RunState":
        return self._with_phase(happening, "running the script", preparing=happening)

    def _prepares(self, happening: Happening) -> "RunState":
        return self._with_worker(replace(self._worker(happening), preparing=happening))

    def _left(self, happening: Happening) -> "RunState":
        return replace(self._with_phase(happening, "leaving"), left=self.left + 1)

    def _lost(self, happening: Happening) -> "RunState":
        info, reason = self._worker(happening), str(happening.fields.get("reason", ""))
        # The end of its process may be known first, or never if its host is lost.
        ended = happening.time if info.ended is None else info.ended
        state = self._with_worker(replace(info, phase="lost", reason=reason, ended=ended))
        return replace(state._with_more(happening, "lost"), waits=_without(self.waits, info.worker))

    def _gpu_lost(self, happening: Happening) -> "RunState":
        host, fault = (str(happening.fields.get(name, "")) for name in ("host", "fault"))
        return self._with_totals(lost_gpus=(*self.totals.lost_gpus, f"{host}: {fault}" if host else fault))

    def _exited(self, happening: Happening) -> "RunState":
        info, status = self._worker(happening), happening.fields.get("status")
        phase = info.phase
        if phase not in ("lost", "failed", "leaving", "finished"):
            phase = "ended" if status else "finished"
        info = replace(info, ended=happening.time, status=status, phase=phase)
        return replace(self._with_worker(info), waits=_without(self.waits, info.worker))

    def _view(self, happening: Happening) -> "RunState":
        fields = happening.fields
        workers = tuple(fields.get("workers", ()))
        number, reason = int(fields.get("number", 0)), str(fields.get("reason", ""))
        views = (*self.views, ViewInfo(number, happening.time, workers, reason)) if self.keeps_history else ()
        return replace(self, members=workers, views=views, waits={})

    def _paused(self, happening: Happening) -> "RunState":
        totals, seconds = self.totals, float(happening.fields.get("seconds") or 0.0)
        pauses, paused = totals.pauses + 1, round(totals.paused + seconds, 6)
        return self._with_totals(pauses=pauses, paused=paused)._with_pause(happening)

    def _with_pause(self, happening: Happening) -> "RunState":
        """Return the state with the pause of a view."""
        for index in reversed(range(len(self.views))):
            if self.views[index].number == happening.fields.get("number"):
                view = replace(self.views[index], pause=happening.fields.get("seconds"))
                return replace(self, views=(*self.views[:index], view, *self.views[index + 1 :]))
        return self

    def _call_began(self, happening: Happening) -> "RunState":
        name = str(happening.fields.get("name", ""))
        method, _, _ = name.partition(" ")
        if is_within(name):
            # There may be such a call in each step.
            name = f"{method} within {name.partition(' within ')[2]}"
        state = self
        if self.keeps_history:
            state, at = self._with_call(name, happening.time)
            extent = {key: happening.fields.get(key) for key in _EXTENT}
            if any(isinstance(value, int) for value in extent.values()):
                call = msgspec.convert({**msgspec.to_builtins(state.calls[at]), **extent}, CallInfo)
                state = replace(state, calls=state.calls.replaced(at, call))
        # Only the first step of an outer call is known to compile. Those of one replica are not measured.
        measured = not is_within(name) and method != "predict" and self.job.get("replicas") != 1
        phase: Phase = "compiling" if measured else "training"
        return state._with_phase(happening, phase, call=name, preparing=happening)

    def _call_ended(self, happening: Happening) -> "RunState":
        state, name = self, str(happening.fields.get("name", ""))
        number = self._call_names.number(name)
        if happening.worker in self.members[:1]:
            # The steps of the next evaluation count from 1 again. The chief also publishes verdicts.
            state = replace(state, _doubted=())
        if number is not None:
            calls = self.calls
            for index in range(self._earlier_calls + number, len(calls)):
                call = calls[index]
                if call.name == name or call.name.endswith(f" within {name}"):
                    calls = calls.replaced(index, replace(call, ended=happening.time))
            state = replace(state, calls=calls)
        if name == self.call_times.call and happening.worker is not None:
            times = self.call_times.after_end(name, happening.worker)
            if times.ended.issuperset(self.members):
                state = replace(state, call_times=CallTimes(), ended_call=times)
            else:
                state = replace(state, call_times=times)
        return state._with_phase(happening, "running the script")

    def _waits(self, happening: Happening) -> "RunState":
        if happening.worker is None:
            return self
        return replace(self, waits={**self.waits, happening.worker: happening})

    def _checkpoint(self, happening: Happening) -> "RunState":
        step = int(happening.fields.get("step", 0))
        totals = replace(self.totals, checkpoints=self.totals.checkpoints + 1, saved=step)
        kept = self.checkpoints.plus(happening) if self.keeps_history else self.checkpoints
        return replace(self, checkpoints=kept, totals=_reached(totals, step))

    def _checkpoint_failed(self, happening: Happening) -> "RunState":
        # This is the part before the advice.
        reason, _, _ = str(happening.fields.get("reason", "")).partition("; ")
        return self._with_more(happening, "failed_checkpoints")._with_totals(checkpoint_failure=reason)

    def _checkpoint_removed(self, happening: Happening) -> "RunState":
        if not happening.fields.get("late"):
            return self._with_more(happening, "removed_checkpoints")
        remaining = self.remaining - {str(happening.fields.get("path", ""))}
        return self._with_remaining(remaining, self.totals.removal_failure if remaining else "")

    def _checkpoint_not_removed(self, happening: Happening) -> "RunState":
        # The next chief may also fail to remove it.
        remaining = self.remaining | {str(happening.fields.get("path", ""))}
        return self._with_remaining(remaining, str(happening.fields.get("reason", "")))

    def _with_remaining(self, remaining: frozenset[str], failure: str) -> "RunState":
        state = replace(self, remaining=remaining)
        return state._with_totals(remaining_checkpoints=len(remaining), removal_failure=failure)

    def _verification_failed(self, happening: Happening) -> "RunState":
        """Count a fault once, even if a part of a step was computed again before a worker was named."""
        fields = happening.fields
        part = tuple(fields.get(name) for name in ("step", "part", "replica"))
        is_open = fields.get("verdict") in ("third", "repeated")
        is_counted = part == self._doubted and not is_open
        state = self if is_counted else self._with_more(happening, "failed_verifications")
        return replace(state, _doubted=part if is_open else ())

    def _resumed(self, happening: Happening) -> "RunState":
        step, worker = int(happening.fields.get("step", 0)), happening.worker
        state = replace(self, trained=step if self.trained is None else max(self.trained, step))
        # A joiner that is the chief, because the hosts of all others retire, does not resume the job.
        if worker in self.members[:1] and (worker or 0) < int(self.job.get("workers", 0)):
            return replace(state, totals=_reached(replace(self.totals, before=step, saved=step), step))
        return state

    def _reports_trained(self, happening: Happening) -> "RunState":
        if happening.worker not in self.members[:1]:
            return self
        fields = happening.fields
        steps, model, digest = fields.get("steps"), str(fields.get("model", "")), fields.get("digest", "")
        return self._with_totals(steps=steps, model=model, digest=str(digest))

    def _finished(self, happening: Happening) -> "RunState":
        state = replace(self, finished=happening.fields, waits={})
        told = {name: happening.fields[name] for name in _TOTALS if name in happening.fields}
        try:
            recorded = msgspec.convert(told, JobTotals)
        except ValueError:
            return state.without_line()
        return state._with_totals(**{name: getattr(recorded, name) for name in told})

    def _with_more(self, _: Happening, name: str) -> "RunState":
        """Return the state with a total, of this name, that is larger by one."""
        return self._with_totals(**{name: getattr(self.totals, name) + 1})

    def _with_totals(self, **changes: Any) -> "RunState":
        return replace(self, totals=replace(self.totals, **changes))


def location_of(checkpoints: Mapping[str, Any]) -> str:
    """Return where a job saves checkpoints, according to its settings: a folder, or a store's URL."""
    store = checkpoints.get("store")
    return str(store.get("url") if isinstance(store, Mapping) else checkpoints.get("folder", ""))


def effective_share(totals: JobTotals, seconds: float) -> float | None:
    """Return the effective training time of a job as a share of the `seconds` that it has taken so far.

    None if no training steps were measured.
    """
    return min(1.0, totals.effective / seconds) if totals.effective > 0 and seconds > 0 else None


_EXTENT = ("initial_epoch", "epochs", "steps_per_epoch")
_NO_METRICS = Columns(*METRIC_COLUMNS)
_NO_GPU_LOAD = Columns(*GPU_COLUMNS)
_TOTALS = JobTotals.__struct_fields__


def _reached(totals: JobTotals, step: int) -> JobTotals:
    return replace(totals, reached=step) if step > totals.reached else totals


def _with_metrics(totals: JobTotals, metrics: MetricsRecorded) -> JobTotals:
    """Return the totals with metrics: those of the last epoch, or the newest ones before its end."""
    new = {name: metrics.trained for name, value in metrics.values.items() if value is None}
    if new.keys() - totals.not_finite.keys():
        totals = replace(totals, not_finite={**new, **totals.not_finite})
    if metrics.epoch is not None:
        return replace(totals, epoch=metrics.epoch, metrics=metrics.values)
    return totals if totals.epoch else replace(totals, metrics={**totals.metrics, **metrics.values})


def _without(waits: Mapping[int, Happening], worker: int) -> Mapping[int, Happening]:
    return {other: wait for other, wait in waits.items() if other != worker} if worker in waits else waits


def _one_more(name: str) -> Callable[[RunState, Happening], RunState]:
    return partial(RunState._with_more, name=name)


def _phase(phase: Phase) -> Callable[[RunState, Happening], RunState]:
    return partial(RunState._with_phase, phase=phase)


_EVENTS: dict[str, Callable[[RunState, Happening], RunState]] = {
    "job": RunState._job,
    "started": RunState._started,
    "ready": RunState._ready,
    "imports": RunState._prepares,
    "strategy": RunState._prepares,
    "skips steps": RunState._prepares,
    "first step": lambda state, _: replace(state, stepped=True),
    "asks": _phase("joining"),
    "joined": _one_more("joined"),
    "host joined": _one_more("joined_hosts"),
    "host lost": _one_more("lost_hosts"),
    "host retired": _one_more("retired_hosts"),
    "gpu lost": RunState._gpu_lost,
    "output lost": _one_more("lost_outputs"),
    "warning": _one_more("warnings"),
    "lost": RunState._lost,
    "left": RunState._left,
    "failed": _phase("failed"),
    "done": _phase("finished"),
    "exited": RunState._exited,
    "view": RunState._view,
    "paused": RunState._paused,
    "call": RunState._call_began,
    "call ended": RunState._call_ended,
    "wait": RunState._waits,
    "checkpoint": RunState._checkpoint,
    "checkpoint failed": RunState._checkpoint_failed,
    "checkpoint removed": RunState._checkpoint_removed,
    "checkpoint not removed": RunState._checkpoint_not_removed,
    "verification failed": RunState._verification_failed,
    "resumed": RunState._resumed,
    "leaving": lambda state, happening: replace(
        state, totals=_reached(state.totals, int(happening.fields.get("step", 0)))
    ),
    "verified": lambda state, happening: state._with_totals(verified=happening.fields.get("count", 0)),
    "trained": RunState._reports_trained,
    "finished": RunState._finished,
}
