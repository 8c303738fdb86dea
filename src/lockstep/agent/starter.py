"""The contracts by which an agent gets workers, and the starter of workers on this host."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from lockstep.agent.worker_handle import OutputPipe, WorkerHandle
from lockstep.agent.worker_output import WorkerOutput
from lockstep.launcher.gpu_assignment import choose
from lockstep.launcher.launcher import Launch, Launcher
from lockstep.protocol.job_spec import Devices, JobSpec
from lockstep.system.cuda import LimitedReader, Machine, ask_driver, faults_of
from lockstep.system.environment import WorkerIdentity, job_environment, tf_config, worker_environment
from lockstep.system.paths import RunPaths

_DRIVER_PATIENCE = 1.0
"""Seconds for which a loss or a start waits for the driver of GPUs, which may hang."""


class Starter(Protocol):
    """Starts the workers of one job."""

    def prepare(self) -> int | None:
        """Prepare to start workers.

        Returns:
            A descriptor that becomes readable when `prepare` should be called again; None if `start` can be
            called now.

        Raises:
            OSError: no worker can be started.
        """

    def close(self) -> None:
        """Start no more workers, and release everything that starting them needs."""

    def faults(self) -> dict[str, str]:
        """Return why GPUs of its workers cannot be used, by name; takes at most a second."""

    def start(
        self,
        worker: int,
        others: Sequence[WorkerHandle],
        *,
        joins: bool,
        yielding: Sequence[WorkerHandle] = (),
    ) -> WorkerHandle:
        """Start a worker, or use a process that waits to become one.

        Args:
            worker: its id.
            others: the other workers that run.
            joins: whether it joins a running job.
            yielding: other running workers whose slots it may take.

        Raises:
            NoGpuLeft: none of the GPUs that the worker could get can be used.
            OSError: the worker cannot be started.
        """


class NoGpuLeft(OSError):
    """No further worker can start on this host: a GPU cannot be used, and no other GPU is free."""


class Arrivals(Protocol):
    """The processes that a user starts by hand. `fileno` is readable when there is something to `serve`."""

    def begin(self, job: str, came: Callable[[], object], *, late: bool) -> None:
        """From now on, let each process wait until `job` uses it; call `came` for each that arrives.

        If the host is `late`, because the job already runs, the waiting processes arrive now.
        """

    def serve(self) -> None:
        """Serve arrivals and departures; never blocks."""

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""


@dataclass
class LocalStarter:
    """Starts the workers of one job; a `Starter`.

    Attributes:
        spec: the job.
        paths: the paths of the run, absolute.
        pid: process id of the agent; workers end with it.
        launcher: starts processes.
        output: receives their output.
        first_slot: the slot of the first worker of this host.
        host: the name of this host, as the user wrote it; empty if the job has one host.
        gpus: reads the GPUs of this machine.
    """

    spec: JobSpec
    paths: RunPaths
    pid: int
    launcher: Launcher
    output: WorkerOutput
    first_slot: int = 0
    host: str = ""
    gpus: LimitedReader[Machine] = field(default_factory=lambda: LimitedReader(ask_driver))
    _faults: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> int | None:
        """Prepare to start workers; see `Starter`.

        Raises:
            OSError: the fork server cannot be started.
        """
        return self.launcher.prepare()

    def close(self) -> None:
        """Start no more workers."""
        self.launcher.close()

    def faults(self) -> dict[str, str]:
        """Ask the driver which GPUs cannot be used; see `Starter`."""
        names = tuple(dict.fromkeys(name for devices in self.spec.devices for name in devices.names))
        machine = self.gpus.within(_DRIVER_PATIENCE) if names else None
        if machine is not None and machine.gpus is not None:
            self._faults = faults_of(names, machine.gpus)
        return self._faults

    def start(
        self,
        worker: int,
        others: Sequence[WorkerHandle],
        *,
        joins: bool,
        yielding: Sequence[WorkerHandle] = (),
    ) -> WorkerHandle:
        """Start a worker at the first free slot.

        Raises:
            NoGpuLeft: none of the GPUs that the worker could get can be used.
            OSError: the worker cannot be started.
        """
        taken = {other.slot for other in others}
        slot = next(slot for slot in itertools.count(self.first_slot) if slot not in taken)
        devices = self.spec.devices_of(slot - self.first_slot)
        if joins and devices is not None:
            used = {name for other in others for name in other.gpus}
            left = {name for other in yielding for name in other.gpus}
            chosen = choose(devices, self.spec.devices, used, self._faults, left)
            if chosen is None:
                raise NoGpuLeft(f"{'; '.join(self._faults.values())}; no other GPU is free")
            devices = chosen
        log, stdout, stderr = self.output.open(worker)
        environment = partial(self._environment, worker, slot, devices, joins)
        handle = self.launcher.start(Launch(worker, environment))
        streams = OutputPipe(handle.stdout, log, stdout), OutputPipe(handle.stderr, log, stderr)
        gpus = devices.names if devices else ()
        return WorkerHandle(worker, slot, handle, log, streams, stack=self.paths.stack(worker), gpus=gpus)

    def _environment(
        self, worker: int, slot: int, devices: Devices | None, joins: bool, control: int
    ) -> dict[str, str]:
        spec = self.spec
        shared = job_environment(spec.seed, spec.threads, backend=spec.backend)
        if spec.in_one_process and spec.backend in (None, "tensorflow"):
            # Threads of TensorFlow wait in functions while others run.
            shared["TF_NUM_INTEROP_THREADS"] = str(spec.replicas)
        return worker_environment(
            WorkerIdentity(
                worker,
                self.paths.root,
                self.pid,
                control,
                joins,
                host=self.host,
                device_users=devices.users if devices else 1,
            ),
            shared,
            cluster=tf_config(slot, spec.replicas, spec.parameter_servers),
            devices=devices.visible if devices else None,
        )
