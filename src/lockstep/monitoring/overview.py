"""The overview of a run, now or on average, as values for a table: from `RunState`, without I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.coordinator.job_report import how_it_goes, remedies, state_of
from lockstep.monitoring.progress import BetterEpoch, better_epochs, progress
from lockstep.monitoring.run_folder import steps_trained, task_of
from lockstep.monitoring.told_events import join_equal, seconds_of
from lockstep.monitoring.training_times import advice, steps_of, training_times, window, worker_times
from lockstep.observability.growth import Columns
from lockstep.observability.measurements import STEP_PARTS, GpuLoad
from lockstep.observability.run_lines import Happening
from lockstep.observability.run_state import HostInfo, RunState, WorkerInfo
from lockstep.observability.slowness import slow_workers
from lockstep.observability.step_parts import WorkerTimes, scores
from lockstep.observability.step_recorder import serves, trains
from lockstep.protocol.admin import Status
from lockstep.system.prose import clock_text, duration_text, name_workers

_ENDED = 3
"""The number of workers that have ended that are shown while others run."""
_SHOWN = 8
_TOLD = frozenset(
    {
        *(
            "joined",
            "left",
            "lost",
            "failed",
            "view",
            "paused",
            "stop",
            "no memory",
            "gpu lost",
            "coordinator",
        ),
        *("checkpoint", "checkpoint failed", "checkpoint removed", "checkpoint not removed"),
        *("resumed", "warning", "finished"),
    }
)
"""The kinds of events that are shown."""
_NAMED = frozenset({"joined", "left", "lost", "failed", "no memory", "resumed"})
"""Those of which the workers are named."""
_STATES = {
    "validation": "validating",
    "evaluate": "evaluating",
    "predict": "predicting",
    "updates": "serving",
}
"""What a worker does in a call of these methods."""


@dataclass(frozen=True)
class WorkerRow:
    """A worker; None for values that are not measured, or not now.

    Attributes:
        worker: its id.
        host: the name of its host; empty if unknown.
        state: a description of its state.
        task: `chief`, `worker` or `ps` in a job with parameter servers; else empty.
        replicas: the number of replicas that it executes.
        steps_per_second: training steps per second; for a parameter server, updates.
        parts: the share of each part of its steps in their time, from 0 to 1; empty without steps.
        score: its pace compared with the fastest worker, which has 1.0.
        staleness: the mean staleness of its steps, with parameter servers.
        largest_staleness: the largest staleness of its steps, with parameter servers.
        cores: the cores in use.
        delayed: seconds per second in which its threads waited for a core.
        memory: resident bytes.
        faults: page faults per second that read from the disk.
        gpus: the GPUs that it uses, by their index on the host.
        gpu_memory: the bytes that it uses on these GPUs.
        gpu_utilization: the highest utilization of these GPUs, in percent.
        gpu_temperature: the highest temperature of these GPUs, in degrees Celsius.
        cause: why it is slow; empty if it is not.
        ended: whether its process has ended.
        pid: the id of its process on its host; None before it has started.
    """

    worker: int
    host: str
    state: str
    task: str = ""
    replicas: int | None = None
    steps_per_second: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    score: float | None = None
    staleness: float | None = None
    largest_staleness: int | None = None
    cores: float | None = None
    delayed: float | None = None
    memory: int | None = None
    faults: float | None = None
    gpus: tuple[int, ...] = ()
    gpu_memory: int | None = None
    gpu_utilization: int | None = None
    gpu_temperature: int | None = None
    cause: str = ""
    ended: bool = False
    pid: int | None = None


@dataclass(frozen=True)
class HostRow:
    """A host: its cores and those in use, bytes of memory, bytes per second of swap, and its GPUs.

    `used` are the cores that the workers use; None if they are unknown.
    """

    host: str
    cores: int
    busy: float
    memory_used: int
    memory_total: int
    swapping: float
    throttled: float
    gpus: tuple[GpuLoad, ...]
    used: float | None = None


@dataclass(frozen=True)
class Overview:
    """A run at one time.

    Attributes:
        time: seconds since 1970.
        job: its name.
        script: its script.
        began: when it began, in seconds since 1970.
        call: the call in which it trains.
        step: the last training step of that call; None before the first.
        epoch: the epoch in progress, from 1; None if the call has none.
        epochs: the last epoch that the call requests; None if it is unknown.
        left: seconds until its last step at the present speed; None if they are unknown.
        trained: training steps of all calls.
        metrics: the newest metrics, by name.
        better: the best epochs of metrics that were better earlier; see `better_epochs`.
        examples_per_second: examples per second; None if the size of batches is unknown.
        steps_per_second: training steps per second.
        idle: seconds since the last measured step; None before the first.
        workers: the running workers, and the last ones that have ended.
        wanted: the number of workers that the job should have; None if unknown.
        hosts: the hosts of the workers.
        events: the last events, one line each.
        silent_since: the time since which the coordinator has not answered; None if it answers.
        compared: the verdict of the comparison with one process; empty if none was requested.
        end: how the run ended, in one line; empty while it runs.
        averages: whether rates are those of the whole run.
        remedies: remedies for its end and its troubles.
        went: its effective training time, pauses, losses and joiners, and its troubles; see `how_it_goes`.
        advice: causes that slow training, one line each; empty if none does notably.
        pid: the process id of the command; None if the coordinator has not answered.
    """

    time: float
    job: str
    script: str
    began: float
    call: str
    step: int | None
    epoch: int | None
    trained: int
    metrics: Mapping[str, float]
    examples_per_second: float | None
    steps_per_second: float | None
    idle: float | None
    workers: tuple[WorkerRow, ...]
    wanted: int | None
    hosts: tuple[HostRow, ...]
    events: tuple[str, ...]
    better: Mapping[str, BetterEpoch] = field(default_factory=dict)
    epochs: int | None = None
    left: float | None = None
    silent_since: float | None = None
    compared: str = ""
    end: str = ""
    averages: bool = False
    went: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    pid: int | None = None


def overview(
    run: RunState,
    job: str,
    now: float,
    *,
    status: Status | None = None,
    silent_since: float | None = None,
    end: str = "",
    active: bool = True,
    averages: bool = False,
) -> Overview:
    """Return the overview of a run.

    Args:
        run: the state of the run.
        job: its name.
        now: the time, in seconds since 1970.
        status: the last reply of its coordinator.
        silent_since: the time since which the coordinator has not answered; None if it answers.
        end: how the run ended, or why its end is unknown; empty while it runs.
        active: whether it runs.
        averages: whether to average over the whole run instead of the last seconds.
    """
    infos = _shown_workers(run)
    since = 0.0 if averages else now - window(run, now)
    taken = {info.worker: _times(run, info, since) for info in infos}
    taken = {worker: sums for worker, sums in taken.items() if sums.steps}
    # The steps of servers are updates.
    times = {worker: sums for worker, sums in taken.items() if task_of(run, worker) != "ps"}
    loads = {info.worker: _mean(info.load, since) for info in infos}
    judged = training_times(run, live=not averages)
    paces, why = scores(judged.workers), slow_workers(judged)
    rows = tuple(
        _row(
            run=run,
            info=info,
            times=taken.get(info.worker),
            staleness=_staleness(run, info, since),
            load=loads[info.worker],
            score=paces.get(info.worker),
            cause=why.get(info.worker, ""),
            joining=status.joining if status is not None else (),
        )
        for info in infos
    )
    doing = progress(run)
    timed = (sums for sums in times.values() if sums.seconds)
    leader = max(timed, key=lambda sums: (sums.steps, sums.seconds), default=None)
    last = max((_last(info.steps, "time") for info in infos if len(info.steps)), default=None)
    names = {row.host for row in rows}
    hosts = tuple(_host(host, rows) for name, host in run.hosts.items() if name in names)
    return Overview(
        time=now,
        job=job,
        script=str(run.job.get("target", status.script if status else "")),
        began=run.began or (status.since if status else 0.0),
        call=doing.call if doing else "",
        step=doing.step if doing else None,
        epoch=doing.epoch if doing else None,
        epochs=doing.epochs if doing else None,
        left=doing.left if doing else None,
        trained=steps_trained(run),
        metrics=_metrics(run),
        better=better_epochs(run),
        examples_per_second=leader.examples / leader.seconds if leader and leader.examples else None,
        steps_per_second=leader.steps / leader.seconds if leader else None,
        idle=None if last is None else max(0.0, now - last),
        workers=rows,
        wanted=status.wanted if status else None,
        hosts=hosts,
        advice=advice(run, judged),
        remedies=tuple(remedies(run, state_of(run.finished, active=active))),
        went=tuple(how_it_goes(run.totals, run.seconds if run.finished else now - run.began)),
        events=tuple(_told(run)),
        silent_since=silent_since,
        compared=run.compared,
        end=end,
        averages=averages,
        pid=status.pid if status else None,
    )


def _shown_workers(run: RunState) -> list[WorkerInfo]:
    infos = [info for info in run.workers.values() if info.worker >= 0 and info.began >= run.began]
    if run.finished is not None:
        # Workers that did not end with the run do not matter here.
        last = [info for info in infos if info.worker in run.members]
        return sorted(last or infos, key=lambda info: info.worker)
    living = [info for info in infos if info.ended is None]
    ended = sorted((info for info in infos if info.ended is not None), key=lambda info: info.ended or 0.0)
    return [*sorted(living, key=lambda info: info.worker), *ended[-_ENDED:]]


def _times(run: RunState, info: WorkerInfo, since: float) -> WorkerTimes:
    """Return the times of the training steps of a worker, or of the updates of a server, since a time."""
    return worker_times(info, _steps(run, info), since) if len(info.steps) else WorkerTimes()


def _steps(run: RunState, info: WorkerInfo) -> npt.NDArray[np.bool_]:
    """Return which measurements of a worker belong to training steps, or to updates."""
    calls = [at for at, call in enumerate(run.calls) if trains(call.name) or serves(call.name)]
    return steps_of(info.steps, calls)


def _staleness(run: RunState, info: WorkerInfo, since: float) -> tuple[float, int] | None:
    """Return the mean and the largest staleness of the steps of a worker since a time, if it took any."""
    if not len(info.steps):
        return None
    chosen = _steps(run, info) & (info.steps.column("time") > since)
    chosen &= ~np.isnan(info.steps.column("staleness"))
    counts = float(info.steps.column("count")[chosen].sum())
    if not counts:
        return None
    largest = int(info.steps.column("largest_staleness")[chosen].max())
    return float(info.steps.column("staleness")[chosen].sum()) / counts, largest


def _mean(load: Columns, since: float) -> dict[str, float]:
    """Return the means since a time, or an empty dict without a later measurement."""
    if not len(load):
        return {}
    chosen = load.column("time") > since
    if not chosen.any():
        return {}
    return {name: float(load.column(name)[chosen].mean()) for name in load.names}


def _last(columns: Columns, name: str) -> float:
    return float(columns.column(name)[-1])


def _gpus(run: RunState, info: WorkerInfo) -> list[GpuLoad]:
    host = run.hosts.get(info.host)
    if host is None or info.pid is None:
        return []
    return [gpu for gpu in host.measured.gpus if any(pid == info.pid for pid, _ in gpu.processes)]


def _row(
    run: RunState,
    info: WorkerInfo,
    times: WorkerTimes | None,
    staleness: tuple[float, int] | None,
    load: Mapping[str, float],
    score: float | None,
    cause: str,
    joining: Sequence[int],
) -> WorkerRow:
    seconds = times.seconds if times is not None else 0.0
    gpus = _gpus(run, info)
    used = [memory or 0 for gpu in gpus for pid, memory in gpu.processes if pid == info.pid]
    return WorkerRow(
        worker=info.worker,
        host=info.host or _only_host(run),
        state=_state(run, info, joining),
        task=task_of(run, info.worker),
        replicas=int(_last(info.steps, "replicas")) if len(info.steps) else None,
        steps_per_second=times.steps / seconds if times is not None and seconds else None,
        parts={part: spent / seconds for part, spent in times.parts.items()} if times and seconds else {},
        score=score,
        staleness=None if staleness is None else staleness[0],
        largest_staleness=None if staleness is None else staleness[1],
        cores=load.get("cores"),
        delayed=load.get("delayed"),
        memory=int(load["memory"]) if load else None,
        faults=load.get("faults"),
        gpus=tuple(gpu.index for gpu in gpus),
        gpu_memory=sum(used) or None,
        gpu_utilization=_highest([gpu.utilization for gpu in gpus]),
        gpu_temperature=_highest([gpu.temperature for gpu in gpus]),
        cause=cause,
        ended=info.ended is not None,
        pid=info.pid,
    )


def _highest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _only_host(run: RunState) -> str:
    """Return the name of the only host of a run, or an empty string if it has several."""
    return str(run.job.get("host", "")) if not run.job.get("hosts") else ""


def _state(run: RunState, info: WorkerInfo, joining: Sequence[int]) -> str:
    if (waits := run.waits.get(info.worker)) is not None:
        named = (
            name_workers(sorted(waits.fields.get("waits_for", ())))
            if waits.fields.get("waits_for")
            else "others"
        )
        return f"waits for {named}"
    if info.worker in joining and info.phase in ("starting", "running the script", "compiling"):
        return "joining"
    if info.phase == "training":
        last = info.steps.last()
        if last and last["compiling"] > sum(last[part] for part in STEP_PARTS) / 2:
            return "compiling"
        return _STATES.get(info.call.partition(" ")[0], info.phase)
    return info.phase


def _metrics(run: RunState) -> dict[str, float]:
    newest: dict[str, tuple[float, float]] = {}
    for metrics in (run.metrics, run.batch_metrics):
        for name, columns in metrics.items():
            if len(columns):
                newest[name] = max(
                    newest.get(name, (0.0, 0.0)), (_last(columns, "time"), _last(columns, "value"))
                )
    return {name: value for name, (_, value) in newest.items()}


def _host(info: HostInfo, rows: Sequence[WorkerRow]) -> HostRow:
    newest = info.measured
    return HostRow(
        host=newest.host,
        cores=newest.cores,
        busy=newest.busy,
        memory_used=newest.memory_used,
        memory_total=newest.memory_total,
        swapping=newest.swapping,
        throttled=newest.throttled,
        gpus=newest.gpus,
        used=sum(row.cores or 0.0 for row in rows if row.host == newest.host),
    )


def _told(run: RunState) -> list[str]:
    """Return the last events, such as `0:12 worker 2 joined: ...`; equal events are one line with a count."""

    def told(event: Happening) -> str | None:
        return _tell(event) if event.event in _TOLD and event.time >= run.began else None

    lines = []
    for group in join_equal(reversed(run.events), told, _SHOWN):
        who = f"{name_workers(group.workers)} " if group.event in _NAMED and group.workers else ""
        often = f" ({group.number} times)" if group.is_repeated else ""
        verb, _, reason = group.text.partition(": ")
        # The reason may contain the whole text.
        text = reason if who and reason.startswith(f"{who}{verb}") else f"{who}{group.text}"
        lines.append(f"{clock_text(group.last - run.began)} {text}{often}")
    return lines


def _tell(happening: Happening) -> str:
    """Return an event in one line, such as `joined: the job scales to 3 workers`."""
    fields = happening.fields
    match happening.event:
        case "joined" | "left" | "lost":
            text = f"{happening.event}: {fields.get('reason', '')}"
        case "failed":
            text = f"failed: {fields.get('summary', '')}"
        case "view":
            workers = tuple(fields.get("workers", ()))
            text = f"view {fields.get('number')} with {name_workers(workers) if workers else 'no worker'}"
        case "paused":
            text = f"training paused for {duration_text(seconds_of(happening))}"
        case "checkpoint":
            text = f"checkpoint {Path(str(fields.get('path', ''))).name}"
        case "gpu lost":
            text = str(fields.get("fault", ""))
        case "checkpoint failed" | "checkpoint removed" | "checkpoint not removed":
            outcome = {
                "checkpoint failed": "no checkpoint",
                "checkpoint removed": "an old checkpoint was removed"
                if fields.get("late")
                else "the oldest checkpoint was removed early",
                "checkpoint not removed": "an old checkpoint could not be removed",
            }[happening.event]
            text = f"{outcome}: {fields.get('reason', '')}"
        case "no memory" | "stop" | "coordinator":
            text = {
                "no memory": "ran out of memory",
                "stop": "asked to stop",
                "coordinator": f"another coordinator took over (process {fields.get('pid')})",
            }[happening.event]
        case "resumed":
            text = f"resumed after {fields.get('where', '')}"
        case "warning":
            text = str(fields.get("text", ""))
        case _:
            text = f"ended with status {fields.get('status')}"
    return text
