"""How an agent comes to have workers: contracts, and workers that are started on this host."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lockstep.agent.worker_handle import OutputPipe, WorkerHandle
from lockstep.launcher.launcher import Launch, Launcher
from lockstep.observability.console import Console
from lockstep.protocol.job_spec import JobSpec
from lockstep.system.environment import WorkerConfig, worker_environment
from lockstep.system.output import Log
from lockstep.system.paths import RunPaths


class Starter(Protocol):
    """Starts the workers of one job."""

    def prepare(self) -> int | None:
        """Make ready to start workers.

        Returns:
            A descriptor that becomes readable when it is time to ask again; None where `start` need not wait.

        Raises:
            OSError: the machine cannot.
        """

    def close(self) -> None:
        """Start no more; what is only there to start workers is gone then."""

    def start(self, worker: int, taken: frozenset[int], *, joins: bool) -> WorkerHandle:
        """Start a worker, or take one that is there.

        Args:
            worker: its id.
            taken: the slots of the others.
            joins: whether it joins a job that runs already.

        Raises:
            OSError: the machine cannot.
        """


class Arrivals(Protocol):
    """Where workers arrive that a person starts by hand. `fileno` is readable when `serve` has work."""

    def begin(self, job: str, came: Callable[[], None]) -> None:
        """Keep processes waiting from now on until `job` takes them; call `came` for each that arrives."""

    def serve(self) -> None:
        """Handle what has arrived; never waits."""

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""


@dataclass
class LocalStarter:
    """Starts the workers of one job; a `Starter`.

    Attributes:
        spec: the job.
        paths: of the run, absolute.
        pid: of the agent, which workers check.
        launcher: makes processes.
        console: shows what they write.
    """

    spec: JobSpec
    paths: RunPaths
    pid: int
    launcher: Launcher
    console: Console

    def prepare(self) -> int | None:
        """Make ready to start workers; return where to wait until that is so, if it is not yet.

        Raises:
            OSError: the machine cannot.
        """
        return self.launcher.prepare()

    def close(self) -> None:
        """Start no more."""
        self.launcher.close()

    def start(self, worker: int, taken: frozenset[int], *, joins: bool) -> WorkerHandle:
        """Start a worker at the first slot that is free.

        Raises:
            OSError: the machine cannot.
        """
        slot = next(slot for slot in itertools.count() if slot not in taken)
        log = Log.open(self.paths.log(worker), self.console.say)
        environment = partial(self._environment, worker, slot, joins)
        handle = self.launcher.start(Launch(worker, environment))
        stdout, stderr = self.console.outlets(worker)
        streams = OutputPipe(handle.stdout, log, stdout), OutputPipe(handle.stderr, log, stderr)
        return WorkerHandle(worker, slot, handle, log, streams, self.paths.stack(worker))

    def _environment(self, worker: int, slot: int, joins: bool, control: int) -> dict[str, str]:
        spec = self.spec
        config = WorkerConfig(
            worker=worker,
            workers=spec.workers,
            replicas=spec.replicas,
            seed=spec.seed,
            threads=spec.threads,
            timeout=spec.timeout,
            run_dir=self.paths.root,
            agent=self.pid,
            control=control,
            joins=joins,
            checkpoints=spec.checkpoints,
            accepts_changes=spec.accepts_changes,
            tf_distribute=spec.tf_distribute,
            adopts=spec.adopts,
        )
        devices = spec.devices_of(slot)
        return worker_environment(
            config,
            slot=slot,
            backend=spec.backend,
            devices=devices.visible if devices else None,
            shared=bool(devices and devices.shared),
        )
