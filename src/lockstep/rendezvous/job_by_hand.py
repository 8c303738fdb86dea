"""The common code, on one host and on several, for jobs whose workers are started by hand."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lockstep.protocol.admin import StopChannel, StopRequest
from lockstep.protocol.job_spec import JobSpec
from lockstep.rendezvous.server import RendezvousServer
from lockstep.system.run_folder import RUNS, claim_folder, fresh_folder, leave_folder
from lockstep.transport.local_channel import LocalChannel


def stopped_by_signals() -> tuple[StopChannel, StopChannel]:
    """Return both ends of a channel: the one that sends, and the one over which signals now stop the job."""
    user, command = LocalChannel.pair()

    def pass_on(number: int, frame: FrameType | None) -> None:
        user.send(StopRequest(number))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    return user, command


@contextmanager
def job_of(server: RendezvousServer, threads: int = 0) -> Iterator[JobSpec]:
    """Yield the job of the processes that wait, whose run folder is locked within the block.

    Afterwards, the processes that still wait are turned away if none has become a worker.

    Args:
        server: the server at which the processes wait.
        threads: the number of threads that compute a replica; 0 until the cores of all hosts are known.

    Raises:
        ConfigError: the run folder cannot be used.
    """
    first, replicas = server.first, len(server.first.tasks)
    spec = JobSpec(
        target=first.target,
        module=first.module,
        workers=replicas,
        replicas=replicas,
        threads=threads,
        adopts=False,
        run_dir=fresh_folder(RUNS, Path(first.target).stem, time.time()),
        backend=first.backend,
    )
    lock = claim_folder(spec.run_dir)
    try:
        yield spec
    finally:
        leave_folder(spec.run_dir)
        os.close(lock)
    if not server.assigned:
        server.turn_away("the job could not start for the reason above")
