"""The specification of a job, and the part of it that its workers get. Each setting is declared only here."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from lockstep.checkpoint.object_store import StoreLease
from lockstep.observability.console import Tee
from lockstep.system.prose import count, interval
from lockstep.topology import View, place_on_hosts

TIMEOUT = 600.0
"""Seconds after which a worker that others wait for counts as stuck, unless the job says otherwise."""

GRACE = 20.0
"""The default number of seconds that a stopped job has to complete its step and write a checkpoint."""

TERM = 3.0
"""Seconds that workers have to exit after SIGTERM or the signal that stops the job, until SIGKILL."""

AFTER_GRACE = TERM + 7.0
"""Seconds beyond the grace period in which a stopped job ends: after `TERM`, workers have 1 to be killed
(`TimeLimits`), and the processes that they have started have 5."""

MAX_RESTARTS = 10
"""How many lost workers a command replaces by default."""

LARGEST_EXCHANGE = 16 << 20
"""The most bytes of rows that replicas exchange in a step for losses and metrics of the whole batch, without
`--exact-batch`."""

InputReading = Literal["divided", "joint"]
"""Whether the workers divide the reading of datasets, or each reads everything."""

BACKEND_NAMES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
"""The Keras backends, and their names in messages."""


def default_threads(hosts: Iterable[tuple[int, int]]) -> int:
    """Return the number of threads per replica with which all replicas of a host can compute at once.

    Args:
        hosts: the cores of each host, and the number of replicas that it computes.
    """
    return max(1, min(cores // replicas for cores, replicas in hosts))


@dataclass(frozen=True)
class Devices:
    """The GPUs of one worker.

    Attributes:
        visible: the worker's `CUDA_VISIBLE_DEVICES`.
        users: the number of workers that use the same GPU; of several GPUs, the largest number.
    """

    visible: str
    users: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the GPUs."""
        return tuple(self.visible.split(","))


class JobHost(NamedTuple):
    """A host of a job: its name, as the user wrote it, and the number of workers with which it begins."""

    name: str
    workers: int


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints that a job saves, and the one that it resumes from.

    Attributes:
        folder: the absolute path of the folder of the checkpoints.
        steps: the interval in training steps; None if it is a time.
        seconds: the interval in seconds; None if it is a number of steps.
        keep: the number of checkpoints to keep.
        resume: the checkpoint to resume from; None to start from the beginning.
        given: the folder or the URL as the user wrote it.
        store: the right to write to the store of a URL; None for a folder.
    """

    folder: Path
    steps: int | None
    seconds: float | None
    keep: int
    resume: Path | None = None
    given: str = ""
    store: StoreLease | None = None

    @property
    def location(self) -> str:
        """The folder, or the URL of the store, for messages."""
        return str(self.folder) if self.store is None else self.store.url


class Verification(msgspec.Struct, frozen=True, rename={"every": "verify_every", "all": "verify_all"}):
    """Which part of a step a second worker computes again.

    Attributes:
        every: the interval in training steps; 0 for never.
        all: whether the whole step is computed again, instead of one replica and its part of the sum.
    """

    every: int = 0
    all: bool = False


class JobLimits(msgspec.Struct, frozen=True):
    """How long a job waits, and how many workers it may lose.

    Attributes:
        timeout: seconds after which a worker that others wait for counts as stuck.
        grace: seconds that a stopped job has to complete its step and write a checkpoint.
        min_workers: training waits while there are fewer workers.
        max_restarts: the number of lost workers that are replaced.
        avoid_host_after: the number of times that verifications name workers of a host before no worker
            starts there; 0 for never.
    """

    timeout: float = TIMEOUT
    grace: float = GRACE
    min_workers: int = 1
    max_restarts: int = 0
    avoid_host_after: int = 0


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """The job's settings that all its workers know. The agent's first message to a worker contains them.

    The defaults are those of a process that is not a worker of a job.

    Attributes:
        workers: the number of workers with which the job begins.
        replicas: the number of replicas.
        threads: the number of threads that compute one replica; 0 until the cores of all hosts are known.
        seed: the seed of all random numbers in the job.
        limits: how long the job waits, and how many workers it may lose.
        joint_input: whether each worker reads whole datasets, even if reading could be divided.
        divided_update: whether the workers of a host divide the update of a step.
        adopts: whether models that a script compiles without a strategy are distributed.
        tf_distribute: whether names under `tf.distribute` are Lockstep's in the script.
        checkpoints: the checkpoints to save, if any.
        accepts_changes: whether training resumes even if the script's settings differ from the checkpoint's.
        verification: the parts of steps that are computed twice.
        exact_batch: whether replicas also exchange large rows for losses and metrics that compare examples.
        local_steps: the value of `--local-steps`; empty if replicas take each step together.
        allow_unlike: whether hosts may compute different bits.
        parameter_servers: the number of workers that are parameter servers. If there are any, one of the
            others is the chief.
        digests: the steps to record: empty for the usual ones, `off`, `all`, or the last step to record.
        checks: for a job that only compares the first steps of calls with plain Keras in one process, these
            calls: `first` of each kind of each compiled model, or `every-fit`. Empty for other jobs.
        kept_steps: the folder in which such a job keeps its steps for jobs on other backends, if any.
        order: the folder of the run whose order of arrivals this job follows, if any.
        env: the variables of the script on all hosts; None for a value that is not recorded, because it may
            be a secret.
    """

    workers: int = 1
    replicas: int = 1
    threads: int = 0
    seed: int = 0
    limits: JobLimits = field(default_factory=JobLimits)
    joint_input: bool = False
    divided_update: bool = False
    adopts: bool = True
    tf_distribute: bool = False
    checkpoints: Checkpoints | None = None
    accepts_changes: bool = False
    verification: Verification = field(default_factory=Verification)
    exact_batch: bool = False
    local_steps: str = ""
    allow_unlike: bool = False
    parameter_servers: int = 0
    digests: str = ""
    checks: str = ""
    kept_steps: Path | None = None
    order: Path | None = None
    env: dict[str, str | None] = field(default_factory=dict)

    @property
    def in_one_process(self) -> bool:
        """Whether one process has all tasks of a job with parameter servers, in order to repeat a run."""
        return self.parameter_servers > 0 and self.workers == 1


@dataclass(frozen=True, kw_only=True)
class JobSpec(JobSettings):
    """One job, with all defaults resolved: its settings, its program, and how it is started and supervised.

    Attributes:
        target: path of the script, or name of the module.
        module: whether `target` is a module.
        arguments: the arguments of the script.
        run_dir: the run folder, as the user wrote it.
        run_store: the URL to which the run folder is uploaded; empty if there is none.
        tee: the workers whose output the terminal shows.
        backend: the Keras backend; None to leave it unchanged.
        chosen: the backend and the reason for it, for messages.
        devices: the GPUs of each worker, then those of workers that join; empty to leave them unchanged.
        hosts: the hosts of the job, in the order of their first workers; empty for one host.
        job_restarts: the number of times that the command has restarted the job (`--restart-job`).
        named_hosts: the hosts whose workers verifications have named before the job was started again, once
            for each verdict.
        tags: words of the user, by which `lockstep runs` finds the run.
        plain: whether connections between hosts are not encrypted.
        hold: seconds for which the hosts train without an answer from the coordinator before they pause. None
            if the address of the coordinator is a lock, so that no other one can lead the job meanwhile.
        standby: HOST:PORT at which the agent of that host starts another coordinator if that of the job is
            lost; empty if there is none. The store of the checkpoints decides which of them leads.
        inherited: descriptors of this process that workers inherit with the same numbers.
    """

    target: str
    module: bool = False
    arguments: tuple[str, ...] = ()
    run_dir: Path
    run_store: str = ""
    tee: Tee = "chief"
    backend: str | None = None
    chosen: str = ""
    devices: tuple[Devices, ...] = ()
    hosts: tuple[JobHost, ...] = ()
    job_restarts: int = 0
    named_hosts: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    plain: bool = False
    hold: float | None = None
    standby: str = ""
    inherited: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.run_dir.absolute().name

    @property
    def settings(self) -> JobSettings:
        """The settings that its workers get."""
        return JobSettings(**{each.name: getattr(self, each.name) for each in fields(JobSettings)})

    def recorded(self) -> dict[str, Any]:
        """Return its fields as the event `job` has them: flat, with those of two components."""
        named: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return {**named.pop("limits"), **named.pop("verification"), **named}

    @property
    def view(self) -> View:
        """The first view."""
        ids = iter(range(self.workers))
        counts = [host.workers for host in self.hosts] or [self.workers]
        return place_on_hosts(self.replicas, tuple(tuple(islice(ids, count)) for count in counts))

    @property
    def vital(self) -> frozenset[int]:
        """The workers that the job cannot lose: with parameter servers the chief, and the only server."""
        match self.parameter_servers:
            case 0:
                return frozenset()
            case 1:
                return frozenset((self.view.chief, self.workers - 1))
        return frozenset((self.view.chief,))

    @property
    def servers(self) -> frozenset[int]:
        """The parameter servers."""
        if self.in_one_process:
            return frozenset()
        return frozenset(range(self.workers - self.parameter_servers, self.workers))

    @property
    def labels(self) -> dict[str, str]:
        """Labels that identify this job, for programs that collect the metrics of many jobs."""
        return {
            "job": self.name,
            "script": self.target,
            "backend": self.backend or "",
            "replicas": str(self.replicas),
            "seed": str(self.seed),
        }

    def devices_of(self, slot: int) -> Devices | None:
        """Return the GPUs of the worker at a slot, or None to leave them unchanged.

        A worker beyond the first slots shares the GPUs of one of them.
        """
        if not self.devices:
            return None
        devices = self.devices[slot % len(self.devices)]
        return devices if slot < len(self.devices) else Devices(devices.visible, devices.users + 1)

    def describe(self, folder: str = "logs") -> tuple[str, str]:
        """Describe the job in at most 25 words, then the rest; `folder` names the run folder's content."""
        return f"{self.shape}; {folder} in {self.run_dir}", self._rest

    @property
    def shape(self) -> str:
        """The number of workers and of replicas, and how other numbers of workers give the same bits."""
        on = f" on {count(len(self.hosts), 'host')}" if self.hosts else ""
        workers = f"{count(self.workers, 'worker')}{on}, {count(self.replicas, 'replica')}"
        if self.parameter_servers:
            servers = self.parameter_servers
            workers = f"a chief (worker 0), {count(self.replicas - servers - 1, 'worker')}, "
            workers += count(servers, "parameter server")
            if self.in_one_process:
                workers += " in one process"
            else:
                workers += (
                    f" (worker {self.workers - 1})"
                    if servers == 1
                    else f" (from worker {self.workers - servers})"
                )
            return f"{workers}; lockstep rerun repeats the bits"
        if self.replicas == 1:
            return f"{workers} (like plain Keras; --replicas 2 gives the bits of -n 2)"
        up_to = "1 or 2" if self.replicas == 2 else f"1 to {self.replicas}"
        return f"{workers} (fixed for this job; --replicas {self.replicas} gives these bits with -n {up_to})"

    @property
    def _rest(self) -> str:
        threads = count(self.threads, "thread")
        # Hosts with other numbers of cores would use other numbers of threads.
        threads += f" each (elsewhere, give --threads-per-worker {self.threads})" if self.hosts else " each"
        parts = [f"{threads}, seed {self.seed} unless the script sets one"]
        if self.joint_input:
            parts.append("each worker reads all input")
        if self.plain:
            parts.append("connections between hosts are not encrypted")
        if self.chosen:
            parts.append(self.chosen)
        if (kept := self.checkpoints) is not None:
            began = f"new training with checkpoints in {kept.location},"
            if kept.resume is not None:
                began = f"resuming from {kept.location}/{kept.resume.name}, checkpoints"
            parts.append(f"{began} {interval(kept.steps, kept.seconds)}")
        return "; ".join(parts)
