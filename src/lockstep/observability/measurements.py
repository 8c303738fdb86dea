"""The measurements that a run publishes: figures of steps, metrics and load.

No decisions depend on them, and they may be lost when a process is slow or killed. The tag and the fields of
a class are a row of docs/run-folder.md, which a test compares.
"""

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from lockstep.system.nvml import Gpu


class StepEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="step"):
    """A worker completed a step of `fit`, `evaluate`, `train_on_batch` or `strategy.steps`.

    The job has several replicas: Keras's own function takes the steps of a job with one replica. In a job
    with parameter servers, the steps of `fit` are those that the chief has taken, or that a worker has
    computed. The steps of `functions 1` are scheduled functions, and those of `updates within fit 1` are the
    updates of a server.

    The parts are seconds of the worker's main thread; they do not overlap, and add up to `seconds`. A backend
    may return from an update before it is computed: the remaining time counts for the part that waits for the
    result, usually the next `compute`.

    Attributes:
        call: its call, such as `fit 1`, or the method for one step, such as `train_on_batch`.
        number: the number of the step in its call, from 1.
        trained: number of training steps of the job so far, in all calls.
        examples: number of examples of the global batch; 0 if it is unknown, in a loop of the script.
        replicas: number of replicas that this worker executes.
        seconds: from the end of the previous step; in the first step of a call, from the beginning of reading
            its batch.
        input: reading the batch and this worker's rows.
        compute: forward and backward passes of the replicas of this worker.
        wait: waiting for other workers, in the reduce and for a new view.
        exchange: publishing and summing in the reduce, without waiting; with parameter servers, reading
            weights and sending gradients, or answering on a server.
        update: applying the total.
        other: callbacks, the loop of Keras or of the script, comparing states and copying checkpoints.
        nested: distributed calls within this one, such as a validation, or `predict` in a callback.
        calls: the seconds of `nested` by method.
        compiled: whether the backend has compiled the step, because no earlier step had examples of these
            shapes.
        staleness: the staleness of the step, in a worker of a job with parameter servers; None elsewhere.
        paused: the seconds in which training paused, which are in the parts, too; see `TrainingPaused`.
        logs: the results of the step, as arrays of the backend, which may still be computing them.
    """

    call: str
    number: int
    trained: int
    examples: int
    replicas: int
    seconds: float
    input: float
    compute: float
    wait: float
    exchange: float
    update: float
    other: float
    nested: float = 0.0
    calls: Mapping[str, float] = {}
    compiled: bool = False
    staleness: int | None = None
    paused: float = 0.0
    logs: Mapping[str, Any] | None = None


class RestEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="rest"):
    """A worker ends a call: the time since its last step. The parts and pauses are those of `StepEnded`."""

    call: str
    input: float
    compute: float
    wait: float
    exchange: float
    update: float
    other: float
    nested: float = 0.0
    calls: Mapping[str, float] = {}
    paused: float = 0.0


class StepsMeasured(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="steps"):
    """Sums over consecutive steps of one call on a worker; the parts are those of `StepEnded`.

    The first step of a call, which compiles, is measured by itself. The time after the last step of a
    call counts for its last measurement.

    Attributes:
        call: as in `StepEnded`; the validations of a `fit` have one name, such as `validation within fit 1`.
        number: the number of the last step in its call, from 1.
        trained: number of training steps of the job after the last of them.
        count: number of steps; 0 if only time after the last step of the call is left.
        began: the time at which the first of these steps began, in seconds since 1970.
        examples: number of examples of their global batches.
        replicas: number of replicas that this worker executes.
        seconds: sum of their durations; also the sum of the parts.
        singles: some of the steps of a call that trains, the same on all workers: all of its first 1024 steps
            (of the job's, in a worker of a job with parameter servers), then windows of 16 steps with growing
            gaps. For each, the number in the call, the start in microseconds after `began`, and the parts in
            microseconds, in the order of `STEP_PARTS`.
        steps: the training step of each of `singles`, if they are not consecutive: a worker of a job with
            parameter servers takes only some of the steps of the call.
        calls: the seconds of `nested` by method, such as `predict`.
        compiled: the number of steps that the backend has compiled, because of new shapes of examples.
        compiling: the seconds of `compute` in these steps.
        staleness: the sum of the staleness of the steps, in a worker of a job with parameter servers; None
            elsewhere.
        largest_staleness: the largest staleness of a step; None elsewhere.
        paused: the seconds in which training paused, which are in the parts, too; see `TrainingPaused`.
    """

    call: str
    number: int
    trained: int
    count: int
    began: float
    examples: int
    replicas: int
    seconds: float
    input: float
    compute: float
    wait: float
    exchange: float
    update: float
    other: float
    nested: float = 0.0
    singles: tuple[tuple[int, ...], ...] = ()
    steps: tuple[int, ...] = ()
    calls: Mapping[str, float] = {}
    compiled: int = 0
    compiling: float = 0.0
    staleness: int | None = None
    largest_staleness: int | None = None
    paused: float = 0.0


STEP_PARTS = ("input", "compute", "wait", "exchange", "update", "other", "nested")
"""The parts of a step."""


class MetricsRecorded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="metrics"):
    """Metrics that the chief's `fit` has reported: at the end of each epoch, and about once a second.

    The chief that follows a lost one may record an epoch again.

    Attributes:
        call: its call, such as `fit 1`.
        epoch: the epoch that has ended, from 1; None within an epoch, where the metrics cover its steps so
            far.
        trained: number of training steps of the job so far, in all calls.
        values: the values by name, as Keras reports them; None for a value that is not a finite number.
    """

    call: str
    epoch: int | None
    trained: int
    values: dict[str, float | None]


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of its host that the process of a worker uses.

    Attributes:
        worker: its id.
        cores: the cores that its threads use, on average since the last measurement.
        delayed: seconds per second in which its threads were ready to run and had no core: above 0.2 per
            thread in use, other processes use its cores.
        memory: resident memory in bytes, with memory that it shares.
        faults: page faults per second that read from the disk: memory that was swapped out, or files.
    """

    worker: int
    cores: float
    delayed: float
    memory: int
    faults: float


class GpuLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a GPU; None for values that the driver does not report.

    Attributes:
        index: its index on the host.
        name: the name of the model.
        utilization: the percentage of the time in which it computed.
        memory_used: its used memory, in bytes.
        memory_total: its memory, in bytes.
        temperature: its temperature, in degrees Celsius.
        power: its power, in watts.
        throttled: why its clock is lowered, such as `thermal`; empty if it is not.
        processes: process id and bytes of memory of each process that uses it.
    """

    index: int
    name: str
    utilization: int | None
    memory_used: int | None
    memory_total: int | None
    temperature: int | None
    power: float | None
    throttled: str = ""
    processes: tuple[tuple[int, int | None], ...] = ()

    @classmethod
    def of(cls, gpu: Gpu) -> "GpuLoad":
        """Return the load in a reading of the driver."""
        return cls(
            index=gpu.index,
            name=gpu.name or "",
            utilization=gpu.utilization,
            memory_used=None if gpu.memory is None else gpu.memory.used,
            memory_total=None if gpu.memory is None else gpu.memory.total,
            temperature=gpu.temperature,
            power=gpu.power,
            throttled=", ".join(gpu.throttled),
            processes=tuple((process.pid, process.memory) for process in gpu.processes or ()),
        )


class LoadMeasured(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="load"):
    """The load of a host and its workers, which its agent measures every few seconds.

    Attributes:
        host: its name.
        cores: number of cores that the run may use there.
        busy: cores in use on the host by all processes, on average since the last measurement.
        memory_used: bytes in use on the host, or in the container that limits the run.
        memory_total: bytes of the host, or that the container may use.
        swapping: bytes per second that the host reads from and writes to swap.
        throttled: seconds per second in which the container's CPU quota stopped its processes.
        workers: the load of the workers on this host.
        gpus: the GPUs of this host.
    """

    host: str
    cores: int
    busy: float
    memory_used: int
    memory_total: int
    swapping: float
    throttled: float
    workers: tuple[WorkerLoad, ...]
    gpus: tuple[GpuLoad, ...] = ()


WorkerMeasurement = StepsMeasured | MetricsRecorded
"""Measurements that a worker publishes; the coordinator publishes them again."""

Measurement = WorkerMeasurement | LoadMeasured
"""The lines of `measurements.jsonl`."""

WORKER_MEASUREMENTS: tuple[type[WorkerMeasurement], ...] = get_args(WorkerMeasurement)
"""The measurements that a worker sends to its agent."""

MEASUREMENTS: tuple[type[Measurement], ...] = (*WORKER_MEASUREMENTS, LoadMeasured)
"""The events in `measurements.jsonl`."""
