"""The events that a run publishes: one frozen class each, whose tag is the name of the event on disk.

A fact has one class: workers and agents report these classes, and supervision decides on them
(`lockstep.supervisor.events`). Times are in seconds. The tag and the fields of a class are a row of
docs/run-folder.md, which a test compares. Measurements, and the records of the digest log, are in files of
their own: `measurements.py`, `digest_records.py`.
"""

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from lockstep.observability.digest_records import WorkerDigest
from lockstep.observability.measurements import Measurement, RestEnded, StepEnded

FORMAT = 1
"""The format of `events.jsonl`; docs/run-folder.md states what a format number guarantees."""


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
    """A worker was lost and is not replaced: from now on, the job should have `wanted` workers."""

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

    `cause` adds facts that the agent knows to the text of the status; it is usually empty.
    """

    worker: int
    status: int
    cause: str = ""


class HostJoined(_Event, frozen=True, tag="host joined"):
    """From now on, a host takes part in the job, with room for `workers` workers, and `cores` cores."""

    host: str
    workers: int
    cores: int


class HostLost(_Event, frozen=True, tag="host lost"):
    """A host was lost, with the workers there."""

    host: str
    reason: str


class HostRetired(_Event, frozen=True, tag="host retired"):
    """No worker starts on a host any more, and its workers leave: it is about to leave, or is avoided.

    This is published once. If the host is lost later, the loss does not count.
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
        job_restarts: the number of times that the command has restarted the job. The other totals begin with
            this start.
        lost: number of lost workers.
        joined: number of workers that joined.
        lost_hosts: number of lost hosts.
        retired_hosts: number of hosts on which no worker starts any more, because they were about to go or
            are avoided.
        joined_hosts: number of hosts that joined.
        pauses: the number of times that training paused because the workers changed.
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
        message: the reason, in one line; empty on success.
        workers: the workers that caused the end.
        seconds: duration of the run.
    """

    status: int
    message: str
    workers: tuple[int, ...] = ()
    seconds: float


class StrategyInstalled(_Event, frozen=True, tag="strategy"):
    """The script has created its strategy.

    Attributes:
        backend: the Keras backend.
        libraries: versions of the imported libraries, by name.
    """

    backend: str
    libraries: dict[str, str] = {}


class DistributionBegan(_Event, frozen=True, tag="distributes"):
    """The script uses the replicas for the first time."""


class ImportStarted(_Event, frozen=True, tag="imports"):
    """The script imports a framework, which may take long; `module` is empty when it imports none."""

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
    """A worker that resumes or joins has skipped `steps` of a call's first `of` steps, taken earlier.

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
    """An older checkpoint was removed to free space; if `late`, the remains of a removal or an upload."""

    path: str
    reason: str
    late: bool = False


class CheckpointNotRemoved(_Event, frozen=True, tag="checkpoint not removed"):
    """An older checkpoint, which newer ones have replaced, could not be removed.

    Each chief publishes this once for each checkpoint. A folder that was renamed meanwhile has its old name
    here.
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
        deviation: the size and the direction of the deviation.
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
        model: the name of the model.
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


def recorded_fields(event: Event) -> dict[str, Any]:
    """Return the name of an event and its fields, as on disk."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return fields | fields.pop("job") if isinstance(event, JobStarted) else fields
