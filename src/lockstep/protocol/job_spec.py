"""The specification of a job on this host."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from lockstep.observability.console import Tee
from lockstep.system.environment import Checkpoints
from lockstep.system.prose import count, interval
from lockstep.topology import View, place_on_hosts

GRACE = 20.0
"""The default number of seconds that a stopped job has to complete its step and write a checkpoint."""

InputReading = Literal["divided", "joint"]
"""Whether the workers divide the reading of datasets, or each reads everything."""

BACKEND_NAMES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
"""The Keras backends, and their names in messages."""


@dataclass(frozen=True)
class Devices:
    """The GPUs of one worker.

    Attributes:
        visible: the worker's `CUDA_VISIBLE_DEVICES`.
        shared: whether another worker uses one of them.
    """

    visible: str
    shared: bool


class JobHost(NamedTuple):
    """A host of a job: its name, as the user wrote it, and the number of workers with which it begins."""

    name: str
    workers: int


@dataclass(frozen=True)
class JobSpec:
    """One job, with all defaults resolved.

    Attributes:
        target: path of the script, or name of the module.
        module: whether `target` is a module.
        arguments: of the script.
        workers: number of workers.
        replicas: number of replicas.
        threads: number of threads that compute one replica; 0 until the cores of all hosts are known.
        seed: determines everything random in the job.
        timeout: seconds after which a worker that others wait for counts as stuck.
        run_dir: the run folder, as the user wrote it.
        tee: the workers whose output the terminal shows.
        backend: the Keras backend; None to leave it unchanged.
        chosen: the backend and the reason for it, for messages.
        devices: of each worker; empty to leave them unchanged.
        checkpoints: the checkpoints to save; None for none.
        accepts_changes: whether training resumes even if the script's settings differ from the checkpoint's.
        min_workers: with fewer workers, training waits.
        max_restarts: how many lost workers are replaced.
        grace: seconds that a stopped job has to complete its step and write a checkpoint.
        tf_distribute: whether names under `tf.distribute` are Lockstep's in the script.
        adopts: whether models that a script compiles without a strategy are distributed.
        joint_input: whether each worker reads everything of a dataset, also where reading could be divided.
        hosts: the hosts of the job, in the order of their first workers; empty for one host.
        plain: whether connections between hosts are not encrypted.
        hold: seconds for which the hosts train without an answer of the coordinator, before they pause; None
            if no other coordinator can lead the job meanwhile, because the address of this one is a lock.
        inherited: descriptors of this process that workers inherit with the same numbers.
        verify_every: the interval in training steps at which a second worker computes a replica again; 0 for
            never.
        verify_all: whether it is all replicas, instead of one.
        allow_unlike: whether hosts may compute different bits.
        parameter_servers: how many of the workers are parameter servers; one of the others is then the chief.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    workers: int
    replicas: int
    threads: int
    seed: int
    timeout: float
    run_dir: Path
    tee: Tee = "chief"
    backend: str | None = None
    chosen: str = ""
    devices: tuple[Devices, ...] = ()
    checkpoints: Checkpoints | None = None
    accepts_changes: bool = False
    min_workers: int = 1
    max_restarts: int = 0
    grace: float = GRACE
    tf_distribute: bool = False
    adopts: bool = True
    joint_input: bool = False
    hosts: tuple[JobHost, ...] = ()
    plain: bool = False
    hold: float | None = None
    inherited: tuple[int, ...] = ()
    verify_every: int = 0
    verify_all: bool = False
    allow_unlike: bool = False
    parameter_servers: int = 0

    @property
    def view(self) -> View:
        """The first view."""
        ids = iter(range(self.workers))
        counts = [host.workers for host in self.hosts] or [self.workers]
        return place_on_hosts(self.replicas, tuple(tuple(islice(ids, count)) for count in counts))

    @property
    def in_one_process(self) -> bool:
        """Whether one process has all tasks of a job with parameter servers: it repeats a run."""
        return self.parameter_servers > 0 and self.workers == 1

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
        """What tells this job from others, for programs that collect figures of many."""
        return {
            "job": self.run_dir.absolute().name,
            "script": self.target,
            "backend": self.backend or "",
            "replicas": str(self.replicas),
            "seed": str(self.seed),
        }

    def devices_of(self, slot: int) -> Devices | None:
        """Return the GPUs of the worker at a slot; None to leave them unchanged.

        A worker beyond the first slots shares the GPUs of one of them.
        """
        if not self.devices:
            return None
        devices = self.devices[slot % len(self.devices)]
        return devices if slot < len(self.devices) else Devices(devices.visible, shared=True)

    def describe(self) -> str:
        """Describe in one line what will run, and where its logs are."""
        return f"{self.shape}; logs in {self.run_dir}"

    @property
    def shape(self) -> str:
        """One line on what the result depends on, and on the number of workers."""
        on = f" on {count(len(self.hosts), 'host')}" if self.hosts else ""
        what = f"{count(self.workers, 'worker')}{on}, {count(self.replicas, 'replica')}"
        if self.parameter_servers:
            servers = self.parameter_servers
            what = f"a chief (worker 0), {count(self.replicas - servers - 1, 'worker')}, "
            what += count(servers, "parameter server")
            if self.in_one_process:
                what += " in one process"
            else:
                what += (
                    f" (worker {self.workers - 1})"
                    if servers == 1
                    else f" (from worker {self.workers - servers})"
                )
        parts = [f"{what}, {count(self.threads, 'thread')} each, seed {self.seed} unless the script sets one"]
        if self.joint_input:
            parts.append("each worker reads all input")
        if self.plain:
            parts.append("connections between hosts are not encrypted")
        if self.chosen:
            parts.append(self.chosen)
        if self.parameter_servers:
            parts.append("lockstep rerun repeats the bits")
        elif self.replicas > 1:
            threads = f" and --threads-per-worker {self.threads}, also on one host" if self.hosts else ""
            parts.append(f"the same bits with any 1 to {self.replicas} workers{threads}")
        if (kept := self.checkpoints) is not None:
            began = f"resuming from {kept.resume}, checkpoints"
            if kept.resume is None:
                began = f"new training with checkpoints in {kept.folder},"
            parts.append(f"{began} {interval(kept.steps, kept.seconds)}")
        return "; ".join(parts)
