"""The contracts by which an agent gets workers, and the starter of workers on this host."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lockstep.agent.worker_handle import OutputPipe, WorkerHandle
from lockstep.agent.worker_output import WorkerOutput
from lockstep.launcher.launcher import Launch, Launcher
from lockstep.protocol.job_spec import JobSpec
from lockstep.system.environment import WorkerIdentity, job_environment, tf_config, worker_environment
from lockstep.system.paths import RunPaths


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

    def start(self, worker: int, taken: frozenset[int], *, joins: bool) -> WorkerHandle:
        """Start a worker, or use a process that waits to become one.

        Args:
            worker: its id.
            taken: the slots of other workers.
            joins: whether it joins a running job.

        Raises:
            OSError: the worker cannot be started.
        """


class Arrivals(Protocol):
    """The processes that a user starts by hand. `fileno` is readable when there is something to `serve`."""

    def begin(self, job: str, came: Callable[[], None], *, late: bool) -> None:
        """Have each process wait from now on until `job` uses it; call `came` for each that arrives.

        If the host is `late`, because the job already runs, the processes that wait arrive now.
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
        output: takes their output.
        first_slot: the slot of the first worker of this host.
        host: the name of this host, as the user wrote it; empty if the job has one host.
    """

    spec: JobSpec
    paths: RunPaths
    pid: int
    launcher: Launcher
    output: WorkerOutput
    first_slot: int = 0
    host: str = ""

    def prepare(self) -> int | None:
        """Prepare to start workers; see `Starter`.

        Raises:
            OSError: the fork server cannot be started.
        """
        return self.launcher.prepare()

    def close(self) -> None:
        """Start no more workers."""
        self.launcher.close()

    def start(self, worker: int, taken: frozenset[int], *, joins: bool) -> WorkerHandle:
        """Start a worker at the first free slot.

        Raises:
            OSError: the worker cannot be started.
        """
        slot = next(slot for slot in itertools.count(self.first_slot) if slot not in taken)
        log, stdout, stderr = self.output.open(worker)
        environment = partial(self._environment, worker, slot, joins)
        handle = self.launcher.start(Launch(worker, environment))
        streams = OutputPipe(handle.stdout, log, stdout), OutputPipe(handle.stderr, log, stderr)
        return WorkerHandle(worker, slot, handle, log, streams, self.paths.stack(worker))

    def _environment(self, worker: int, slot: int, joins: bool, control: int) -> dict[str, str]:
        spec = self.spec
        shared = job_environment(spec.seed, spec.threads, backend=spec.backend)
        if spec.in_one_process and spec.backend in (None, "tensorflow"):
            # Threads of TensorFlow wait in functions while others run.
            shared["TF_NUM_INTEROP_THREADS"] = str(spec.replicas)
        devices = spec.devices_of(slot - self.first_slot)
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
