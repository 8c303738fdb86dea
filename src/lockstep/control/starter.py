"""What a worker of a job is given when it is started."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lockstep.config import WorkerConfig, worker_environment
from lockstep.control.console import Console
from lockstep.control.launcher import Launch, Launcher
from lockstep.control.member import Member, Stream
from lockstep.control.output import Log
from lockstep.control.spec import JobSpec
from lockstep.paths import RunPaths


class Starter(Protocol):
    """Brings the workers of one job to life.

    Attributes:
        pid: of the agent, which workers check.
    """

    pid: int

    def prepare(self) -> int | None:
        """Make ready to start workers.

        Returns:
            A descriptor that becomes readable when it is time to ask again; None where `start` need not wait.

        Raises:
            OSError: the machine cannot.
        """

    def close(self) -> None:
        """Start no more; what is only there to start workers is gone then."""

    def start(self, worker: int, taken: frozenset[int], arena: int | None) -> Member:
        """Start a worker, or take one that is there.

        Args:
            worker: its id.
            taken: the seats of the others.
            arena: descriptor of the memory in which the first workers meet; None for a worker that joins.

        Raises:
            OSError: the machine cannot.
        """


@dataclass
class LocalStarter:
    """Starts the workers of one job; a `Starter`.

    Attributes:
        spec: the job.
        paths: of the run, absolute.
        pid: of the agent, which workers check.
        launcher: makes processes.
        console: shows what they write.
        pool: descriptor of the memory for partials and totals.
    """

    spec: JobSpec
    paths: RunPaths
    pid: int
    launcher: Launcher
    console: Console
    pool: int

    def prepare(self) -> int | None:
        """Make ready to start workers; return where to wait until that is so, if it is not yet.

        Raises:
            OSError: the machine cannot.
        """
        return self.launcher.prepare()

    def close(self) -> None:
        """Start no more."""
        self.launcher.close()

    def start(self, worker: int, taken: frozenset[int], arena: int | None) -> Member:
        """Start a worker at the first seat that is free.

        Raises:
            OSError: the machine cannot.
        """
        seat = next(seat for seat in itertools.count() if seat not in taken)
        log = Log.open(self.paths.log(worker), self.console.say)
        memory = (self.pool,) if arena is None else (self.pool, arena)
        environment = partial(self._environment, worker, seat, arena)
        handle = self.launcher.start(Launch(worker, environment, memory))
        stdout, stderr = self.console.outlets(worker)
        streams = Stream(handle.stdout, log, stdout), Stream(handle.stderr, log, stderr)
        return Member(worker, seat, handle, log, streams, self.paths.stack(worker))

    def _environment(self, worker: int, seat: int, arena: int | None, control: int) -> dict[str, str]:
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
            pool=self.pool,
            arena=arena,
            checkpoints=spec.checkpoints,
            accepts_changes=spec.accepts_changes,
            tf_distribute=spec.tf_distribute,
            adopts=spec.adopts,
        )
        devices = spec.devices_of(seat)
        return worker_environment(
            config,
            seat=seat,
            backend=spec.backend,
            devices=devices.visible if devices else None,
            shared=bool(devices and devices.shared),
        )
