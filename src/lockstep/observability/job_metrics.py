"""The metrics of a running job in the format OpenMetrics, from the state of its run."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import (
    CallStarted,
    CheckpointFailed,
    CheckpointWritten,
    Event,
    HostJoined,
    HostLost,
    HostRetired,
    JobStarted,
    TrainingPaused,
    TrainingResumed,
    VerificationFailed,
    ViewStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from lockstep.observability.measurements import (
    STEP_PARTS,
    GpuLoad,
    LoadMeasured,
    MetricsRecorded,
    StepsMeasured,
    WorkerLoad,
)
from lockstep.observability.run_state import RunState, StepSums, effective_share

KINDS: tuple[type[Event], ...] = (
    *(JobStarted, CallStarted, TrainingPaused, TrainingResumed, LoadMeasured, MetricsRecorded, StepsMeasured),
    *(CheckpointWritten, CheckpointFailed, VerificationFailed),
    *(ViewStarted, WorkerJoined, WorkerLeft, WorkerLost, HostJoined, HostLost, HostRetired),
)
"""The events from which the figures follow."""

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_PERCENT = 100.0
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class LabelledValue(NamedTuple):
    """A value, and the labels that distinguish it from the others of its family."""

    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """Values with one name and one meaning. A unit is the end of the name."""

    name: str
    kind: Literal["counter", "gauge", "info"]
    help: str
    samples: Sequence[LabelledValue]
    unit: str = ""


class JobMetrics:
    """The metrics of a job, from its events; the methods may be called from any thread.

    Counters begin at zero with each coordinator, except for the number of steps.

    Args:
        labels: the labels of the job, by their names.
        workers: number of its members before the first event.
    """

    def __init__(self, labels: Mapping[str, str], workers: int) -> None:
        self._lock = threading.Lock()
        self._labels = labels
        self._state = RunState(keeps_history=False, members=range(workers))

    def add(self, published: PublishedEvent) -> None:
        """Add an event of one of `KINDS`."""
        with self._lock:
            self._state = self._state.after(published)

    def text(self) -> bytes:
        """Return the metrics as the body of a response with `CONTENT_TYPE`."""
        return exposition(job_families(self._labels, self._state))


def job_families(labels: Mapping[str, str], state: RunState) -> list[Family]:
    """Return the families of a job: its description, and the totals of its run."""
    totals, taken = state.totals, state.taken
    joined, left, lost = (single(number) for number in (totals.joined, state.left, totals.lost))
    steps = [LabelledValue(of_worker(worker), sums.count) for worker, sums in taken.items()]
    metrics = [
        LabelledValue({"name": name}, math.nan if value is None else value)
        for name, value in state.values.items()
    ]
    # Unknown values do not have a sample, because a counter that falls to zero would restart.
    trained = [] if state.trained is None else single(state.trained)
    saved = [] if totals.saved is None else single(totals.saved)
    examples = single(state.examples.examples)
    share = effective_share(totals, state.seconds) if state.began else None
    effective = [] if share is None else single(share)
    return [
        Family("lockstep_job", "info", "The job.", [LabelledValue(labels, 1)]),
        Family("lockstep_workers", "gauge", "Members of the newest view.", single(len(state.members))),
        Family("lockstep_workers_joined", "counter", "Workers that have joined.", joined),
        Family("lockstep_workers_left", "counter", "Workers that were asked to leave.", left),
        Family("lockstep_workers_lost", "counter", "Workers that were lost.", lost),
        Family("lockstep_hosts_joined", "counter", "Hosts that have joined.", single(totals.joined_hosts)),
        Family("lockstep_hosts_lost", "counter", "Hosts that were lost.", single(totals.lost_hosts)),
        Family(
            "lockstep_hosts_retired",
            "counter",
            "Hosts on which no new worker starts, because they announced that they would leave, or are "
            "avoided.",
            single(totals.retired_hosts),
        ),
        Family(
            "lockstep_steps", "counter", "Training steps of the job, with those before it resumed.", trained
        ),
        Family("lockstep_examples", "counter", "Examples in training steps.", examples),
        Family("lockstep_worker_steps", "counter", "Training steps of a worker.", steps),
        Family(
            "lockstep_step_seconds",
            "counter",
            "Time of training steps of a worker, by part.",
            _of_parts(taken),
            "seconds",
        ),
        *_server_families(state),
        Family("lockstep_metric", "gauge", "The last value of a metric of fit.", metrics),
        Family(
            "lockstep_checkpoints", "counter", "Checkpoints that were written.", single(totals.checkpoints)
        ),
        Family("lockstep_checkpoint_step", "gauge", "Training steps in the newest checkpoint.", saved),
        Family(
            "lockstep_checkpoints_failed",
            "counter",
            "Checkpoints that could not be written.",
            single(totals.failed_checkpoints),
        ),
        Family(
            "lockstep_verifications_failed",
            "counter",
            "Verified computations with unequal bits.",
            single(totals.failed_verifications),
        ),
        Family("lockstep_pauses", "counter", "Pauses because workers changed.", single(totals.pauses)),
        Family(
            "lockstep_paused_seconds", "counter", "Time of these pauses.", single(totals.paused), "seconds"
        ),
        Family(
            "lockstep_effective_training_ratio",
            "gauge",
            "Share of the time since the start in training steps.",
            effective,
        ),
        *load_families([host.measured for host in state.hosts.values()]),
    ]


def _server_families(state: RunState) -> list[Family]:
    """Return the families of a job with parameter servers, or an empty list for other jobs."""
    stale = {worker: sums for worker, sums in state.taken.items() if sums.staleness is not None}
    if not stale and not state.served:
        return []
    staleness = [LabelledValue(of_worker(worker), sums.staleness or 0) for worker, sums in stale.items()]
    largest = [
        LabelledValue(of_worker(worker), sums.largest_staleness or 0) for worker, sums in stale.items()
    ]
    updates = [LabelledValue(of_worker(worker), sums.count) for worker, sums in state.served.items()]
    return [
        Family("lockstep_staleness", "counter", "Sum of the staleness of steps of a worker.", staleness),
        Family("lockstep_largest_staleness", "gauge", "Largest staleness in the last measurement.", largest),
        Family("lockstep_server_updates", "counter", "Updates of a parameter server.", updates),
        Family(
            "lockstep_server_seconds",
            "counter",
            "Time of a parameter server, by part.",
            _of_parts(state.served),
            "seconds",
        ),
    ]


def load_families(hosts: Sequence[LoadMeasured]) -> list[Family]:
    """Return the families of the load of hosts, their workers and their GPUs."""

    def of_hosts(name: str, meaning: str, figure: str, unit: str = "") -> Family:
        samples = [LabelledValue({"host": host.host}, getattr(host, figure)) for host in hosts]
        return Family(f"lockstep_host_{name}", "gauge", meaning, samples, unit)

    def of_workers(name: str, meaning: str, figure: str, unit: str = "") -> Family:
        loads: list[tuple[str, WorkerLoad]] = [(host.host, load) for host in hosts for load in host.workers]
        samples = [
            LabelledValue({"host": host, **of_worker(load.worker)}, getattr(load, figure))
            for host, load in loads
        ]
        return Family(f"lockstep_worker_{name}", "gauge", meaning, samples, unit)

    def of_gpus(name: str, meaning: str, figure: str, unit: str = "", scale: float = 1.0) -> Family:
        gpus: list[tuple[str, GpuLoad]] = [(host.host, gpu) for host in hosts for gpu in host.gpus]
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


def _of_parts(sums: Mapping[int, StepSums]) -> list[LabelledValue]:
    return [
        LabelledValue({**of_worker(worker), "part": part}, seconds)
        for worker, of_steps in sums.items()
        for part, seconds in zip(STEP_PARTS, of_steps.parts, strict=True)
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
    """Return a number in the notation of the format."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
