"""The events that a run publishes: one frozen class each, whose tag is the name of the event on disk.

A fact has one class: workers and agents report these classes, and supervision decides on them
(`lockstep.supervisor.events`). Times are in seconds. The tag and the fields of a class are a row of
docs/run-folder.md, which a test compares.
"""

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from lockstep.system.nvml import Gpu

FORMAT = 1
"""The format of `events.jsonl`; docs/run-folder.md states what a format number guarantees."""

DIGEST_FORMAT = 1
"""The format of the digest log."""

HASH_DIGITS = 16
"""Digits of the hash of an array in the digest log."""


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    """An immutable event; its tag is its name on disk."""


class JobStarted(_Event, frozen=True, kw_only=True, tag="job"):
    """A run starts.

    Attributes:
        format: the format of the events of the run.
        versions: the versions of Python and of installed distributions, by name.
        script: `path` and `sha256` of its file; None if it cannot be read.
        cores: number of cores that the run may use.
        host: the name of the host.
        directory: where the command was started.
        job: the fields of `lockstep.protocol.job_spec.JobSpec` as built-in types. On disk, they are fields of
            the event itself.
    """

    format: int = FORMAT
    versions: dict[str, str]
    script: dict[str, str] | None
    cores: int
    host: str
    directory: str
    job: dict[str, Any]


class WorkerStarted(_Event, frozen=True, tag="started"):
    """The process of a worker has started."""

    worker: int
    pid: int


class WorkerReady(_Event, frozen=True, tag="ready"):
    """A worker is about to run its script."""

    worker: int


class JoinRequested(_Event, frozen=True, tag="asks"):
    """A joiner requests the position of the members, or, if `whole`, to join the next view."""

    worker: int
    whole: bool


class ViewStarted(_Event, frozen=True, tag="view"):
    """A new view, with its workers, the longest-serving first."""

    number: int
    workers: tuple[int, ...]
    reason: str


class WorkerJoined(_Event, frozen=True, tag="joined"):
    """A worker is in the next view."""

    worker: int
    reason: str


class WorkerLeft(_Event, frozen=True, tag="left"):
    """A worker was asked to leave, and is not in the next view."""

    worker: int
    reason: str


class WorkerLost(_Event, frozen=True, tag="lost"):
    """A worker was lost, and is not in the next view."""

    worker: int
    reason: str


class WorkerNotReplaced(_Event, frozen=True, tag="not replaced"):
    """A worker was lost and no other one takes its place: from now on, the job wants `wanted` workers."""

    wanted: int
    reason: str


class ScriptFailed(_Event, frozen=True, tag="failed"):
    """The script raised on a worker: the error in one line, and the traceback as Python prints it."""

    worker: int
    summary: str
    traceback: str


class ScriptEnded(_Event, frozen=True, tag="done"):
    """The script finished on a worker (status 0), or exited with another status; its process still runs."""

    worker: int
    status: int


class WorkerExited(_Event, frozen=True, tag="exited"):
    """The process of a worker has ended; its status is negative for a signal.

    `cause` continues the text of the status with what the agent knows beyond it; it is mostly empty.
    """

    worker: int
    status: int
    cause: str = ""


class HostJoined(_Event, frozen=True, tag="host joined"):
    """A host takes part in the job from now on, with room for `workers` workers, and `cores` cores."""

    host: str
    workers: int
    cores: int


class HostLost(_Event, frozen=True, tag="host lost"):
    """A host was lost, with the workers there."""

    host: str
    reason: str


class HostRetired(_Event, frozen=True, tag="host retired"):
    """No worker starts on a host any more, and those there leave: it is about to go, or is avoided.

    This is published once, also if the host is lost later, which is not counted then.
    """

    host: str
    reason: str


class WaitReported(_Event, frozen=True, tag="wait"):
    """A worker has waited for `waits_for` in the call `what`, for `seconds`; repeated while it waits."""

    worker: int
    what: str
    waits_for: tuple[int, ...]
    seconds: float


class StopRequested(_Event, frozen=True, tag="stop"):
    """A signal, or `lockstep stop`, requests the end of the job; only a signal is published.

    Attributes:
        signal: the signal.
        waited: the seconds of the grace period that had passed before the coordinator could act.
    """

    signal: int
    waited: float = 0.0


class DecisionMade(_Event, frozen=True, tag="decision"):
    """Supervision decided on actions, given by their class names, for a reason."""

    reason: str
    actions: tuple[str, ...]


class MemoryExhausted(_Event, frozen=True, tag="no memory"):
    """The kernel killed `kills` processes because memory ran out, probably including this worker."""

    worker: int
    kills: int


class GpuLost(_Event, frozen=True, tag="gpu lost"):
    """A GPU of workers cannot be used any more: `fault`. `host` is empty if the job has one host."""

    host: str
    gpu: str
    fault: str


class OutputLost(_Event, frozen=True, tag="output lost"):
    """The terminal or a log can no longer be written."""

    reason: str


class ConflictingWrite(_Event, frozen=True, tag="written by several"):
    """A worker opens a file that another live worker writes; `line` of the script, such as `train.py:41`."""

    worker: int
    path: str
    line: str


class MessageMisunderstood(_Event, frozen=True, tag="misunderstood"):
    """A worker sent an invalid message, or an event that this version does not know."""

    worker: int
    error: str


class CoordinatorStarted(_Event, frozen=True, tag="coordinator"):
    """Another coordinator takes over the job, because the previous one was lost."""

    term: int
    pid: int


class WorkerConnectedLate(_Event, frozen=True, tag="connected late"):
    """A worker at an address connected to a host for a view that had ended there."""

    host: str
    address: str
    view: int


class WarningShown(_Event, frozen=True, tag="warning"):
    """The command, or a worker, showed a warning."""

    text: str


class HostStrain(msgspec.Struct, frozen=True):
    """The number of measurements of a host in which the job lacked cores or clock rate.

    Attributes:
        measured: number of measurements.
        overloaded: the number in which workers waited for cores that other processes used.
        throttled: the number in which a CPU quota stopped processes, or GPUs of workers had a lowered clock.
    """

    measured: int = 0
    overloaded: int = 0
    throttled: int = 0


class JobTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a job, and its troubles.

    Attributes:
        job_restarts: how often the command has started the job before. The other totals begin with this
            start.
        lost: number of lost workers.
        joined: number of workers that joined.
        lost_hosts: number of lost hosts.
        retired_hosts: number of hosts on which no worker starts any more, because they were about to go or
            are avoided.
        joined_hosts: number of hosts that joined.
        pauses: how often training paused because the workers changed.
        paused: seconds of these pauses.
        effective: seconds in training steps; see "Effective training time" in docs/monitoring.md.
        checkpoints: number of written checkpoints.
        failed_checkpoints: number of checkpoints that could not be written.
        checkpoint_failure: why the last one could not be written; empty without a failure.
        removed_checkpoints: number of older checkpoints that were removed early, because the disk was full.
        remaining_checkpoints: number of older checkpoints that could not be removed.
        removal_failure: why the last one could not be removed; empty without a failure.
        saved: training steps in the newest checkpoint that was written, or from which the job resumed; None
            without one.
        verified: number of replicas' computations that a second worker has repeated, with equal bits.
        failed_verifications: number of such computations with unequal bits.
        epoch: the last epoch of `fit` that has ended, from 1; 0 before.
        metrics: its metrics by name, or the newest ones before its end; None if a value was not finite.
        not_finite: for each metric with a value that was not finite, the training steps before the first.
        strained: the load of hosts that were often overloaded or throttled, by name.
        lost_gpus: why GPUs of workers cannot be used any more.
        lost_outputs: number of files of the run folder and of streams that could not be written.
        warnings: number of warnings that the command has shown.
        before: training steps in the checkpoint from which the job resumed.
        steps: training steps, including those before; None until the chief reports them.
        model: the name of the model that was trained last; empty if there is none.
        digest: `lockstep.digest` of that model at the end of the script.
        reached: training steps that are known to be completed, including those in the checkpoint.
    """

    job_restarts: int = 0
    lost: int = 0
    joined: int = 0
    lost_hosts: int = 0
    retired_hosts: int = 0
    joined_hosts: int = 0
    pauses: int = 0
    paused: float = 0.0
    effective: float = 0.0
    checkpoints: int = 0
    failed_checkpoints: int = 0
    checkpoint_failure: str = ""
    removed_checkpoints: int = 0
    remaining_checkpoints: int = 0
    removal_failure: str = ""
    saved: int | None = None
    verified: int = 0
    failed_verifications: int = 0
    epoch: int = 0
    metrics: Mapping[str, float | None] = {}
    not_finite: Mapping[str, int] = {}
    strained: Mapping[str, HostStrain] = {}
    lost_gpus: tuple[str, ...] = ()
    lost_outputs: int = 0
    warnings: int = 0
    before: int = 0
    steps: int | None = None
    model: str = ""
    digest: str = ""
    reached: int = 0

    @property
    def known_steps(self) -> int | None:
        """The training steps; those that are known if the chief has not reported them, or None."""
        return self.steps if self.steps is not None else self.reached or None


class JobFinished(JobTotals, frozen=True, kw_only=True, tag_field="event", tag="finished"):
    """The run has ended.

    Attributes:
        status: exit status of the command.
        message: why, in one line; empty on success.
        workers: the workers that caused the end.
        seconds: duration of the run.
    """

    status: int
    message: str
    workers: tuple[int, ...] = ()
    seconds: float


class StrategyInstalled(_Event, frozen=True, tag="strategy"):
    """The script created its strategy.

    Attributes:
        backend: the Keras backend.
        libraries: versions of the imported libraries, by name.
    """

    backend: str
    libraries: dict[str, str] = {}


class DistributionBegan(_Event, frozen=True, tag="distributes"):
    """The script uses the replicas for the first time."""


class ImportStarted(_Event, frozen=True, tag="imports"):
    """The script imports a framework, which may take long; `module` is empty once it imports none."""

    module: str


def is_within(call: str) -> bool:
    """Whether a call is within another one, such as `validation 1 within fit 1`."""
    return " within " in call


class CallStarted(_Event, frozen=True, tag="call"):
    """A distributed call starts, such as `fit 1`.

    Attributes:
        name: the call.
        initial_epoch, epochs: the arguments of a `fit`; None in other calls.
        steps_per_epoch: number of steps of its epochs; None if it is unknown before they are read.
    """

    name: str
    initial_epoch: int | None = None
    epochs: int | None = None
    steps_per_epoch: int | None = None


class FirstStepEnded(_Event, frozen=True, tag="first step"):
    """The first step was computed and summed."""


class StepsSkipped(_Event, frozen=True, tag="skips steps"):
    """A worker that resumes or joins has skipped `steps` of `of` steps of a call that were taken before.

    `what` is `steps`, or `elements` of a dataset that a loop of `strategy.steps` reads.
    """

    call: str
    steps: int
    of: int
    what: str = "steps"


class VerificationFailed(_Event, frozen=True, kw_only=True, tag="verification failed"):
    """In training step `step`, workers got different bits in the `arrays` with these names.

    `part` is the part of the step: "gradient", "sum", "update", or "memory" for the state before it.
    `replica` is the replica, or the part of the total with its number; -1 for the state. `verdict` is that of
    `lockstep.keras.verdicts.judge` or `judge_sum`, about `workers`. `hosts` has the names of their
    hosts, which the coordinator adds if the job has several.
    """

    step: int
    part: str = "gradient"
    replica: int = -1
    arrays: tuple[str, ...]
    workers: tuple[int, ...]
    verdict: str
    hosts: tuple[str, ...] = ()


class HostsDiffer(_Event, frozen=True, tag="hosts differ"):
    """Hosts compute different bits, and the user allows it; `what` names the hosts and the reason."""

    what: str


class ReplicasVerified(_Event, frozen=True, tag="verified"):
    """A second worker has computed `count` partials again so far, with equal bits.

    Each replica was verified in step `up_to` or later.
    """

    count: int
    up_to: int


class TimeoutSet(_Event, frozen=True, tag="patience"):
    """The script set the number of seconds after which a worker that others wait for counts as stuck."""

    seconds: float


class SourceChanged(_Event, frozen=True, tag="source"):
    """The file of a module differs from the source that the workers run; `what` describes the difference."""

    path: str
    what: str


class ChiefWrites(_Event, frozen=True, tag="chief writes"):
    """Keras's callbacks write to `paths` on the chief's host, which other hosts do not share."""

    paths: tuple[str, ...]


class DownloadAwaited(_Event, frozen=True, tag="waits for download"):
    """The worker has waited for `seconds` until `of` has downloaded a file."""

    file: str
    of: str
    seconds: float


class CheckpointsConfigured(_Event, frozen=True, tag="keeps"):
    """The script starts to save checkpoints in a folder, and keeps the newest `keep` ones."""

    folder: str
    keep: int | None = None


class CheckpointWritten(_Event, frozen=True, tag="checkpoint"):
    """The checkpoint of a step is on disk; writing it took `seconds`."""

    path: str
    step: int
    seconds: float


class CheckpointFailed(_Event, frozen=True, tag="checkpoint failed"):
    """A checkpoint could not be written."""

    reason: str


class CheckpointRemoved(_Event, frozen=True, tag="checkpoint removed"):
    """An older checkpoint was removed to free space; if `late`, what a removal or an upload had left."""

    path: str
    reason: str
    late: bool = False


class CheckpointNotRemoved(_Event, frozen=True, tag="checkpoint not removed"):
    """An older checkpoint, which newer ones have replaced, could not be removed.

    Published once for each by each chief. A folder that was renamed meanwhile keeps its name here.
    """

    path: str
    reason: str


class TrainingResumed(_Event, frozen=True, tag="resumed"):
    """Training resumes after `where`, with `step` steps taken, from a checkpoint or from other workers."""

    where: str
    step: int


class LastStepEnded(_Event, frozen=True, tag="leaving"):
    """The chief, asked to stop, completed its last step."""

    step: int


class TrainingEnded(_Event, frozen=True, tag="trained"):
    """The chief's script finished.

    Attributes:
        steps: training steps in total.
        model: name of the model that was trained last; empty if there is none.
        digest: `lockstep.digest` of it; empty if there is none.
    """

    steps: int
    model: str = ""
    digest: str = ""


class TrainingPaused(_Event, frozen=True, tag="paused"):
    """The chief entered a view, and has completed the call of the exchange that the change interrupted.

    Attributes:
        number: the number of the view.
        seconds: the time that it waited for others in the call, and from the change until the call was
            complete, including repeated computations.
    """

    number: int
    seconds: float


class CallEnded(_Event, frozen=True, tag="call ended"):
    """A distributed call of the script returns; the worker has published the measurements of its steps."""

    name: str


class StepEnded(_Event, frozen=True, kw_only=True, tag="step"):
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


class RestEnded(_Event, frozen=True, kw_only=True, tag="rest"):
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


class StepsMeasured(_Event, frozen=True, kw_only=True, tag="steps"):
    """Sums over consecutive steps of one call on a worker; the parts are those of `StepEnded`.

    The first step of a call, which compiles, is measured by itself. The time after the last step of a
    call counts for its last measurement.

    Attributes:
        call: as in `StepEnded`; the validations of a `fit` have one name, such as `validation within fit 1`.
        number: the number of the last step in its call, from 1.
        trained: number of training steps of the job after the last of them.
        count: number of steps; 0 if only time after the last step of the call is left.
        began: when the first of these steps began, in seconds since 1970.
        examples: number of examples of their global batches.
        replicas: number of replicas that this worker executes.
        seconds: sum of their durations; also the sum of the parts.
        singles: some of the steps of a call that trains, the same on all workers: all of its first 1024
            steps (of the job's, in a worker of a job with parameter servers), then windows of 16 steps with
            growing gaps. For each, the number in the call, the start in microseconds after `began`, and the
            parts in microseconds in the order of `STEP_PARTS`.
        steps: the training step of each of `singles`, if they are not consecutive: a worker of a job with
            parameter servers takes only some of the steps of the call.
        calls: the seconds of `nested` by method, such as `predict`.
        compiled: how many of the steps the backend has compiled, because of new shapes of examples.
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


class MetricsRecorded(_Event, frozen=True, kw_only=True, tag="metrics"):
    """Metrics that the chief's `fit` has reported: at the end of an epoch, and about once a second within.

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
        utilization: percent of the time in which it computed.
        memory_used: bytes.
        memory_total: bytes.
        temperature: degrees Celsius.
        power: watts.
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


class LoadMeasured(_Event, frozen=True, kw_only=True, tag="load"):
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


class ProgramRecorded(_Event, frozen=True, kw_only=True, tag="program"):
    """Everything but data on which the bits of a run depend, as a worker sees it; published when it changes.

    Attributes:
        format: the format of the digest log.
        seed: the seed of the job.
        replicas: R.
        threads: number of threads that compute one replica.
        input: how the workers read datasets: `divided` or `joint`.
        backend: the Keras backend.
        versions: the versions of Python, of Keras and its libraries, and of packages that the program's own
            source files import, by name.
        flags: environment variables that can change the results of a script, by name.
        processor: the kind of the processor.
        features: the instruction sets of the processor, separated by spaces.
        sources: SHA-256 of the program's own source files, by path; below the script's folder relative to it.
        script: the path of the script in `sources`; empty if there is none.
        keras: values of Keras's configuration, by the name of the function of `keras.config`.
        variables: for each environment variable that the program's source names and that is set, 4 digits of
            a hash of its value, or `set` for one that may be a secret; None in earlier versions.
    """

    format: int = DIGEST_FORMAT
    seed: int
    replicas: int
    threads: int
    input: str
    backend: str
    versions: dict[str, str]
    flags: dict[str, str]
    processor: str
    features: str
    sources: dict[str, str]
    script: str
    keras: dict[str, str] = {}
    variables: dict[str, str] | None = None


class SettingsRecorded(_Event, frozen=True, kw_only=True, tag="settings"):
    """The settings of a distributed call that begins: of the call, the model, optimizer, loss and callbacks.

    Published for the first call of a method, and for each call whose settings differ from those of the
    previous one.

    Attributes:
        call: its call, such as `fit 1`.
        trained: number of training steps before the call.
        settings: short texts by name.
    """

    call: str
    trained: int
    settings: dict[str, str]


class NamesRecorded(_Event, frozen=True, tag="names"):
    """The names of the arrays of partials and totals, or of variables, in the order of their hashes.

    Attributes:
        key: identifies this list of names in `StepDigests`.
        names: the names of the arrays.
    """

    key: str
    names: tuple[str, ...]


class StepDigests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hashes (XXH3, hexadecimal) of the part of one step that one worker has computed.

    A hash of several arrays is the hash of their 8-byte hashes in the order of their names. `..._parts` has
    the latter, 16 digits each, one after the other.

    Attributes:
        step: number of training steps of the job, with this one if it trains, in all calls.
        call: its call, such as `fit 1`.
        number: the number of the step in its call, from 1.
        trains: whether it is a training step.
        shapes: the dtypes and shapes of the arrays of the whole batch, of the first step of a call.
        examples: the examples of each replica that this worker has computed, by replica.
        inputs: the examples of each replica as read.
        rows: the examples of each replica in at most 1024 parts of equal numbers of rows, 8 digits per part.
        names: key of the names of partials and total.
        partials: the partial of each replica that this worker has computed.
        partial_parts: the same by array.
        total: the sum of all partials; empty if not recorded.
        total_parts: the same by array.
        variables: key of the names of the variables.
        before: the weights, layer state and optimizer's variables before the step; empty if not recorded.
        before_parts: the same by variable.
        after: the same after the step, before anything else changes them.
        after_parts: the same by variable.
    """

    step: int
    call: str
    number: int
    trains: bool = True
    shapes: tuple[str, ...] = ()
    examples: dict[int, int] = {}
    inputs: dict[int, str] = {}
    rows: dict[int, str] = {}
    names: str = ""
    partials: dict[int, str] = {}
    partial_parts: dict[int, str] = {}
    total: str = ""
    total_parts: str = ""
    variables: str = ""
    before: str = ""
    before_parts: str = ""
    after: str = ""
    after_parts: str = ""


class DigestsRecorded(_Event, frozen=True, kw_only=True, tag="digests"):
    """Hashes of steps of a worker, in the order in which it has completed them.

    Attributes:
        serial: number of this event among those of its worker's process, from 1. A missing number is a lost
            event.
        stride: the stride of the last step; steps whose number it does not divide are not recorded.
        steps: the steps.
    """

    serial: int
    stride: int
    steps: tuple[StepDigests, ...]


class OrderRecorded(_Event, frozen=True, kw_only=True, tag="order"):
    """A part of an order of arrival, from a process whose host may not be that of the run folder.

    Attributes:
        name: the name of the order, such as `chief` or `ps-0`.
        number: the number of this part among those of a call, from 0. A missing number is a lost part.
        data: the records.
    """

    name: str
    number: int
    data: bytes


class Difference(msgspec.Struct, frozen=True):
    """A part of a step that replicas do not compute as one process does.

    Attributes:
        part: a part of the step, such as `gradient dense/kernel`.
        deviation: how much, and in which direction.
        begins: the layer with which it begins; empty if that is unknown.
        named: the parts of the program in a note that explain it; empty if none does.
    """

    part: str
    deviation: str
    begins: str = ""
    named: str = ""


class StepCompared(_Event, frozen=True, kw_only=True, tag="compared"):
    """A step of replicas was compared with plain Keras in one process, or plain Keras with another backend.

    Attributes:
        call: the call of the script, such as `fit 1`.
        model: its name.
        kind: the kind of the step, `train`, `test` or `predict`.
        reference: the other backend; empty if replicas were compared.
        equal: the parts that are equal up to rounding.
        differences: the other parts.
        reason: why the step could not be compared; empty if it was.
    """

    call: str
    model: str
    kind: str
    reference: str = ""
    equal: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    reason: str = ""


class CheckEnded(_Event, frozen=True, tag="check ended"):
    """A job that only checks the script has ended it."""

    reason: str


CoordinatorEvent = (
    JobStarted
    | WorkerStarted
    | WorkerReady
    | JoinRequested
    | ViewStarted
    | WorkerJoined
    | WorkerLeft
    | WorkerLost
    | WorkerNotReplaced
    | HostJoined
    | HostLost
    | HostRetired
    | ScriptFailed
    | ScriptEnded
    | WorkerExited
    | WaitReported
    | StopRequested
    | DecisionMade
    | MemoryExhausted
    | GpuLost
    | OutputLost
    | ConflictingWrite
    | MessageMisunderstood
    | CoordinatorStarted
    | WorkerConnectedLate
    | WarningShown
    | JobFinished
)
"""Events that the coordinator publishes."""

WorkerEvent = (
    StrategyInstalled
    | DistributionBegan
    | ImportStarted
    | CallStarted
    | StepCompared
    | CheckEnded
    | StepsSkipped
    | VerificationFailed
    | ReplicasVerified
    | HostsDiffer
    | FirstStepEnded
    | TimeoutSet
    | SourceChanged
    | ChiefWrites
    | DownloadAwaited
    | CheckpointsConfigured
    | CheckpointWritten
    | CheckpointFailed
    | CheckpointRemoved
    | CheckpointNotRemoved
    | WarningShown
    | TrainingResumed
    | LastStepEnded
    | TrainingEnded
    | TrainingPaused
    | CallEnded
)
"""Events that a worker publishes; the coordinator publishes them again."""

WorkerMeasurement = StepsMeasured | MetricsRecorded
"""Measurements that a worker publishes; the coordinator publishes them again."""

Measurement = WorkerMeasurement | LoadMeasured
"""Figures of a run. They decide nothing, and may be lost when a process is slow or killed."""

WorkerDigest = ProgramRecorded | SettingsRecorded | NamesRecorded | DigestsRecorded
"""What a worker records of the bits of a training; the coordinator publishes it again."""

HostFact = WorkerStarted | MessageMisunderstood | WorkerConnectedLate | GpuLost
"""What an agent reports of its host and the workers there; the coordinator publishes it."""

WorkerFact = WorkerReady | JoinRequested | WaitReported | ScriptEnded
"""What a worker reports of itself; the coordinator publishes it."""

Event = CoordinatorEvent | WorkerEvent | Measurement | WorkerDigest | OrderRecorded | StepEnded | RestEnded
"""All events. `StepEnded` and `RestEnded` stay in their worker."""

WORKER_EVENTS: tuple[type[Event], ...] = get_args(WorkerEvent)
"""The events that a worker sends to its agent."""

RUN_EVENTS: tuple[type[Event], ...] = get_args(CoordinatorEvent | WorkerEvent)
"""The events in `events.jsonl`."""

WORKER_MEASUREMENTS: tuple[type[Event], ...] = get_args(WorkerMeasurement)
"""The measurements that a worker sends to its agent."""

MEASUREMENTS: tuple[type[Event], ...] = (*WORKER_MEASUREMENTS, LoadMeasured)
"""The events in `measurements.jsonl`."""

WORKER_DIGESTS: tuple[type[Event], ...] = get_args(WorkerDigest)
"""The events in the digest log, after the `job` event of each run."""


def recorded_fields(event: Event) -> dict[str, Any]:
    """Return the name of an event and its fields, as on disk."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return fields | fields.pop("job") if isinstance(event, JobStarted) else fields
