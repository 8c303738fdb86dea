"""The figures of a running job as OpenMetrics: a fold of its events, and the text of the format."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import (
    STEP_PARTS,
    CheckpointWritten,
    Event,
    GpuLoad,
    LoadMeasured,
    MetricsRecorded,
    StepsMeasured,
    TrainingResumed,
    ViewStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerLost,
)
from lockstep.observability.step_recorder import serves, trains

KINDS: tuple[type[Event], ...] = (
    *(CheckpointWritten, LoadMeasured, MetricsRecorded, StepsMeasured, TrainingResumed),
    *(ViewStarted, WorkerJoined, WorkerLeft, WorkerLost),
)
"""The events from which the figures follow."""

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_PERCENT = 100.0
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class LabelledValue(NamedTuple):
    """A value, and the labels that tell it from the others of its family."""

    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """Values with one name and one meaning; a unit is the end of the name."""

    name: str
    kind: Literal["counter", "gauge", "info"]
    help: str
    samples: Sequence[LabelledValue]
    unit: str = ""


class JobMetrics:
    """Adds up the events of a job; the methods may be called from any thread.

    Counters begin at zero with each coordinator, but for the number of steps.

    Args:
        labels: of the job, by their names.
        workers: number of its members before the first event.
    """

    def __init__(self, labels: Mapping[str, str], workers: int) -> None:
        self._lock = threading.Lock()
        self._labels = labels
        self._workers = workers
        self._changes = dict.fromkeys(("joined", "left", "lost"), 0)
        self._trained: int | None = None
        self._examples = 0
        self._first: int | None = None
        self._counted = 0
        self._reached: dict[int, tuple[int, int]] = {}
        self._steps: dict[int, int] = {}
        self._staleness: dict[int, int] = {}
        self._stalest: dict[int, int] = {}
        self._updates: dict[int, int] = {}
        self._serving: dict[tuple[int, str], float] = {}
        self._seconds: dict[tuple[int, str], float] = {}
        self._values: dict[str, float] = {}
        self._hosts: dict[str, LoadMeasured] = {}
        self._checkpoints = 0
        self._saved: int | None = None

    def add(self, published: PublishedEvent) -> None:
        """Take in an event of one of `KINDS`."""
        with self._lock:
            match event := published.event:
                case StepsMeasured() if published.worker is not None and trains(event.call):
                    self._add_steps(published.worker, event)
                case StepsMeasured() if published.worker is not None and serves(event.call):
                    self._updates[published.worker] = self._updates.get(published.worker, 0) + event.count
                    _add_parts(self._serving, published.worker, event)
                case MetricsRecorded(trained=trained, values=values):
                    self._reach(trained)
                    self._values |= {name: math.nan if one is None else one for name, one in values.items()}
                case LoadMeasured():
                    self._hosts[event.host] = event
                case TrainingResumed(step=step):
                    self._reach(step)
                case ViewStarted(workers=workers):
                    self._workers = len(workers)
                case WorkerJoined():
                    self._changes["joined"] += 1
                case WorkerLeft():
                    self._changes["left"] += 1
                case WorkerLost():
                    self._changes["lost"] += 1
                case CheckpointWritten(step=step):
                    self._checkpoints += 1
                    self._saved = step

    def text(self) -> bytes:
        """Return the figures as the body of a response with `CONTENT_TYPE`."""
        with self._lock:
            families = self._families()
        return exposition(families)

    def _reach(self, step: int) -> None:
        self._trained = step if self._trained is None else max(self._trained, step)

    def _add_steps(self, worker: int, steps: StepsMeasured) -> None:
        self._reach(steps.trained)
        self._steps[worker] = self._steps.get(worker, 0) + steps.count
        _add_parts(self._seconds, worker, steps)
        if steps.staleness is not None and steps.largest_staleness is not None:
            self._staleness[worker] = self._staleness.get(worker, 0) + steps.staleness
            self._stalest[worker] = steps.largest_staleness
            # The chief takes all steps.
            return
        # All workers measure the same examples, each in its own pieces. The one that is ahead counts.
        before = steps.trained - steps.count
        if self._first is None:
            self._first = self._counted = before
        reached, examples = self._reached.get(worker, (self._first, 0))
        if reached != before:
            # It has joined: how many there were before follows from the others, up to uneven batches.
            mean = self._examples / max(1, self._counted - self._first)
            examples = self._examples + round((before - self._counted) * mean)
        self._reached[worker] = (steps.trained, examples + steps.examples)
        if steps.trained > self._counted:
            self._counted, self._examples = steps.trained, max(self._examples, examples + steps.examples)

    def _families_of_servers(self) -> list[Family]:
        """Return the families of a job with parameter servers."""
        staleness, largest, updates = (
            [LabelledValue(of_worker(worker), value) for worker, value in values.items()]
            for values in (self._staleness, self._stalest, self._updates)
        )
        return [
            Family("lockstep_staleness", "counter", "Sum of the staleness of steps of a worker.", staleness),
            Family(
                "lockstep_largest_staleness", "gauge", "Largest staleness in the last measurement.", largest
            ),
            Family("lockstep_server_updates", "counter", "Updates of a parameter server.", updates),
            Family(
                "lockstep_server_seconds",
                "counter",
                "Time of a parameter server, by part.",
                _of_parts(self._serving),
                "seconds",
            ),
        ]

    def _families(self) -> list[Family]:
        joined, left, lost = (single(self._changes[name]) for name in ("joined", "left", "lost"))
        steps = [LabelledValue(of_worker(worker), count) for worker, count in self._steps.items()]
        seconds = _of_parts(self._seconds)
        metrics = [LabelledValue({"name": name}, value) for name, value in self._values.items()]
        of_servers = self._families_of_servers() if self._staleness or self._updates else []
        # Unknown values have no sample: a counter that falls to zero would count anew.
        trained = [] if self._trained is None else single(self._trained)
        saved = [] if self._saved is None else single(self._saved)
        return [
            Family("lockstep_job", "info", "The job.", [LabelledValue(self._labels, 1)]),
            Family("lockstep_workers", "gauge", "Members of the newest view.", single(self._workers)),
            Family("lockstep_workers_joined", "counter", "Workers that have joined.", joined),
            Family("lockstep_workers_left", "counter", "Workers that were asked to leave.", left),
            Family("lockstep_workers_lost", "counter", "Workers that were lost.", lost),
            Family(
                "lockstep_steps",
                "counter",
                "Training steps of the job, with those before it resumed.",
                trained,
            ),
            Family("lockstep_examples", "counter", "Examples in training steps.", single(self._examples)),
            Family("lockstep_worker_steps", "counter", "Training steps of a worker.", steps),
            Family(
                "lockstep_step_seconds",
                "counter",
                "Time of training steps of a worker, by part.",
                seconds,
                "seconds",
            ),
            *of_servers,
            Family("lockstep_metric", "gauge", "The last value of a metric of fit.", metrics),
            Family(
                "lockstep_checkpoints", "counter", "Checkpoints that were written.", single(self._checkpoints)
            ),
            Family("lockstep_checkpoint_step", "gauge", "Training steps in the last checkpoint.", saved),
            *load_families([self._hosts[name] for name in self._hosts]),
        ]


def _add_parts(sums: dict[tuple[int, str], float], worker: int, steps: StepsMeasured) -> None:
    for part in STEP_PARTS:
        sums[worker, part] = sums.get((worker, part), 0.0) + getattr(steps, part)


def load_families(hosts: Sequence[LoadMeasured]) -> list[Family]:
    """Return the families of the load of hosts, their workers and their GPUs."""

    def of_hosts(name: str, meaning: str, figure: str, unit: str = "") -> Family:
        samples = [LabelledValue({"host": host.host}, getattr(host, figure)) for host in hosts]
        return Family(f"lockstep_host_{name}", "gauge", meaning, samples, unit)

    def of_workers(name: str, meaning: str, figure: str, unit: str = "") -> Family:
        loads: list[tuple[str, WorkerLoad]] = [(host.host, one) for host in hosts for one in host.workers]
        samples = [
            LabelledValue({"host": host, **of_worker(load.worker)}, getattr(load, figure))
            for host, load in loads
        ]
        return Family(f"lockstep_worker_{name}", "gauge", meaning, samples, unit)

    def of_gpus(name: str, meaning: str, figure: str, unit: str = "", scale: float = 1.0) -> Family:
        gpus: list[tuple[str, GpuLoad]] = [(host.host, one) for host in hosts for one in host.gpus]
        samples = [
            LabelledValue({"host": host, "gpu": str(gpu.index)}, value / scale)
            for host, gpu in gpus
            if (value := getattr(gpu, figure)) is not None
        ]
        return Family(f"lockstep_gpu_{name}", "gauge", meaning, samples, unit)

    return [
        of_hosts("cores", "Cores that the job may use.", "cores"),
        of_hosts("busy_cores", "Cores in use by all processes.", "busy"),
        of_hosts("memory_used_bytes", "Memory in use.", "memory_used", "bytes"),
        of_hosts("memory_bytes", "Memory that can be used.", "memory_total", "bytes"),
        of_hosts("swapped_bytes_per_second", "Reads from and writes to swap.", "swapping"),
        of_hosts("throttled_ratio", "Share of time in which a CPU quota stopped processes.", "throttled"),
        of_workers("cores", "Cores that the threads of a worker use.", "cores"),
        of_workers("delayed_ratio", "Seconds per second in which threads waited for a core.", "delayed"),
        of_workers("memory_bytes", "Resident memory of a worker.", "memory", "bytes"),
        of_workers("disk_page_faults_per_second", "Page faults that read from the disk.", "faults"),
        of_gpus("busy_ratio", "Share of time in which a GPU computed.", "utilization", scale=_PERCENT),
        of_gpus("memory_used_bytes", "Memory of a GPU in use.", "memory_used", "bytes"),
        of_gpus("memory_bytes", "Memory of a GPU.", "memory_total", "bytes"),
        of_gpus("temperature_celsius", "Temperature of a GPU.", "temperature", "celsius"),
        of_gpus("power_watts", "Power of a GPU.", "power", "watts"),
    ]


def _of_parts(seconds: Mapping[tuple[int, str], float]) -> list[LabelledValue]:
    return [
        LabelledValue({**of_worker(worker), "part": part}, value) for (worker, part), value in seconds.items()
    ]


def of_worker(worker: int) -> dict[str, str]:
    """Return the label of a worker."""
    return {"worker": str(worker)}


def single(value: float) -> list[LabelledValue]:
    """Return the sample of a family that has one."""
    return [LabelledValue({}, value)]


def exposition(families: Sequence[Family]) -> bytes:
    """Return families in the text format of OpenMetrics 1.0."""
    ends = {"counter": "_total", "gauge": "", "info": "_info"}
    lines = []
    for family in families:
        lines.append(f"# TYPE {family.name} {family.kind}")
        if family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}")
        lines.append(f"# HELP {family.name} {family.help}")
        for labels, value in family.samples:
            listed = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
            lines.append(
                f"{family.name}{ends[family.kind]}{f'{{{listed}}}' if listed else ''} {number(value)}"
            )
    lines.append("# EOF\n")
    # A name that is not UTF-8 comes from the file system.
    return "\n".join(lines).encode(errors="replace")


def number(value: float) -> str:
    """Return a number as the format writes it."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
