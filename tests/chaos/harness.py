"""Jobs of forked workers under the real agent, with faults; prints what went wrong, and what it saw.

    harness.py [--seed N] [--jobs N] [--point NAME]

Everything but how workers are started is Lockstep's own. Each job's survivors have to come to the state and
the examples of one process that nothing happened to. Faults are drawn at random, with --point all at that
point, after a first loss.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import chaos_steps as steps
from chaos_faults import KINDS, POINTS, Fault, Faults, Misfortune, prepare

from lockstep.clock import SystemClock
from lockstep.collectives.shared import Arena
from lockstep.config import read_worker
from lockstep.control.agent import Agent, Exchange
from lockstep.control.client import Client
from lockstep.control.console import Console
from lockstep.control.launcher import Launch
from lockstep.control.output import Sink
from lockstep.control.spec import JobSpec
from lockstep.control.supervision import Limits, State
from lockstep.events import EventLog
from lockstep.job import Job
from lockstep.membership import Membership
from lockstep.paths import RunPaths
from lockstep.topology import place

STEPS = 12
LIMITS = Limits(timeout=5.0, blame=0.05, look=0.05)


@dataclass
class ForkedHandle:
    """A worker that was forked; `Handle` for the agent."""

    pid: int
    exited: int
    stdout: int
    stderr: int
    control: socket.socket
    _status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exited, number)

    def close(self) -> None:
        for descriptor in (self.exited, self.stdout, self.stderr):
            os.close(descriptor)
        self.control.close()


@dataclass
class ForkLauncher:
    """Starts workers by forking this process, which has everything loaded."""

    faults: list[Fault]
    handles: list[ForkedHandle] = field(default_factory=list)

    def start(self, launch: Launch) -> ForkedHandle:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (stdout, out), (stderr, err) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(out, 1)
            os.dup2(err, 2)
            for handle in self.handles:
                handle.close()
            mine.close()
            status = 1
            try:
                status = work(launch, theirs, os.dup(launch.arena), self.faults)
            finally:
                os._exit(status)
        theirs.close()
        os.close(out)
        os.close(err)
        mine.setblocking(False)
        for descriptor in (stdout, stderr):
            os.set_blocking(descriptor, False)
        handle = ForkedHandle(pid, os.pidfd_open(pid), stdout, stderr, mine)
        self.handles.append(handle)
        return handle


def work(launch: Launch, connection: socket.socket, arena: int, given: list[Fault]) -> int:
    """Be a worker, and print what it came to."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    config = read_worker(launch.environment(connection.fileno()))
    client = Client(connection)
    view = place(config.replicas, tuple(range(config.workers)))
    membership = Membership(config, client)
    faults = Faults([fault for fault in given if fault.worker == config.worker])
    prepare(faults)
    communicator = membership.enter(view, arena)
    entered = Job(
        view, config.worker, config.seed, 1, communicator, client.report, None, membership.next_place
    )
    client.started()
    client.report("strategy")
    try:
        os.write(1, f"result {steps.train(entered, STEPS, faults)}\n".encode())
    except Misfortune:
        client.failed(1, "Misfortune", "", blames=False)
        return 1
    except BaseException as error:
        os.write(2, traceback.format_exc().encode())
        client.failed(1, repr(error), "", blames=False)
        return 1
    client.finished()
    return 0


class Nobody:
    """No process is below a worker."""

    def reap(self, owned: frozenset[int]) -> None:
        """Do nothing."""

    def end(self, grace: float) -> tuple[int, ...]:
        """Do nothing."""
        return ()


def run(folder: Path, seed: int, workers: int, replicas: int, faults: list[Fault]) -> tuple[int, list[str]]:
    """Run one job; return its status and the results of its survivors."""
    paths = RunPaths(folder)
    spec = JobSpec("steps", False, (), workers, replicas, 1, seed, LIMITS.timeout, folder)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = ForkLauncher(faults)
    with (
        (folder / "out").open("wb", 0) as out,
        EventLog.open(paths.events, SystemClock(), print) as events,
    ):
        agent = Agent(
            spec=spec,
            paths=paths,
            pid=os.getpid(),
            launcher=launcher,
            open_exchange=open_exchange,
            command=there,
            console=Console(Sink(out.fileno()), Sink(out.fileno()), "chief", 0),
            events=events,
            clock=SystemClock(),
            descendants=Nobody(),
            state=State(frozenset(range(workers)), LIMITS, view=spec.view),
        )
        status = agent.run()
    here.close()
    lines = [paths.log(worker).read_text().splitlines() for worker in range(workers)]
    return status, [
        line.removeprefix("result ") for text in lines for line in text if line.startswith("result ")
    ]


def open_exchange(members: int) -> Exchange:
    arena = Arena.create(members)
    return Exchange(arena.fd, arena.abort, arena.close)


def drawn(random_: random.Random, point: str | None) -> tuple[int, int, list[Fault]]:
    """Draw a job: workers, replicas, and faults that leave somebody over.

    With `point`, a worker is lost first, and the others' faults are all there.
    """
    workers = random_.randint(3, 5) if point else random_.randint(2, 5)
    replicas = random_.randint(workers, 8)
    doomed = random_.sample(range(workers), random_.randint(2 if point else 1, workers - 1))
    same = random_.random() < 0.3
    step = random_.randrange(STEPS - 3)
    faults = []
    for worker in doomed:
        kind = random_.choices(KINDS, (6, 1, 1, 1))[0]
        at = step if same else random_.randrange(STEPS - 3)
        faults.append(Fault(worker, at, point or random_.choice(POINTS), kind))
    if point:
        faults[0] = Fault(doomed[0], random_.randrange(3), "after apply")
    return workers, replicas, faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--point", choices=POINTS)
    arguments = parser.parse_args()
    seen: Counter[str] = Counter()
    failures = 0
    with jobs_folder() as base:
        for number in range(arguments.seed, arguments.seed + arguments.jobs):
            workers, replicas, faults = drawn(random.Random(number), arguments.point)
            folder = base / str(number)
            folder.mkdir()
            status, results = run(folder, number, workers, replicas, faults)
            expected = steps.alone(number, replicas, STEPS)
            fatal = sum(fault.kind != "SIGSTOP" for fault in faults)
            struck = workers - len(results)
            if status != 0 or set(results) != {expected} or struck > fatal:
                failures += 1
                print(f"seed {number}: {workers} workers, {replicas} replicas, {faults}: status {status}")
                print(f"  expected {expected}, got {results}")
                print(*(path.read_text() for path in sorted(folder.iterdir()) if path.suffix), sep="\n")
            seen["lost"] += struck
            seen["stopped"] += sum(fault.kind == "SIGSTOP" for fault in faults)
            seen["jobs"] += 1
            shutil.rmtree(folder)
    print(f"jobs {seen['jobs']}, lost {seen['lost']}, stopped {seen['stopped']}, failed {failures}")
    return 1 if failures else 0


@contextlib.contextmanager
def jobs_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main())
