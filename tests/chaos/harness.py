"""Runs jobs of forked workers with faults under the real agent; prints errors and counts.

    harness.py [--seed N] [--jobs N] [--point NAME] [--replace]

Only the start of workers differs from Lockstep's. The survivors of each job must have the state and the
examples of one process without faults. Faults are drawn at random; with --point, all are at that point,
after a first loss. With --replace, training waits until lost workers are replaced, and the job saves
checkpoints, which must hold the state of their step.
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
from chaos_faults import (
    JOINER_KINDS,
    KINDS,
    POINTS,
    WHILE_JOINING,
    WHILE_OTHERS_JOIN,
    Fault,
    Faults,
    ScriptError,
    prepare,
)

from lockstep.agent.starter import LocalStarter
from lockstep.agent.worker_output import LocalOutput
from lockstep.checkpoint.checkpoint_files import load
from lockstep.checkpoint.store import Store
from lockstep.launcher.launcher import Launch, LocalHandle
from lockstep.local_job.composition import LocalHost, run_job
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.observability.events import WORKER_EVENTS, StrategyInstalled
from lockstep.protocol.job_spec import Checkpoints, JobLimits, JobSpec
from lockstep.protocol.worker import AgentMessage, WorkerMessage
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.system.clock import SystemClock
from lockstep.system.environment import read_worker
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.topology import place
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import PacketChannel
from lockstep.transport.state_memory import MemoryTransport
from lockstep.worker.agent_client import AgentClient
from lockstep.worker.checkpoints import open_checkpoints
from lockstep.worker.job import Job, JobContext, by_itself
from lockstep.worker.membership import AgentMembership, take_welcome, wait_policy

STEPS = 12
# No worker stays stopped, so only a fault lasts until the timeout.
LIMITS = TimeLimits(timeout=120.0, blame=0.05, look=0.05, pause=0.001, longest_pause=0.01)


@dataclass
class ForkLauncher:
    """Starts workers by forking this process, which has imported every module."""

    faults: list[Fault]
    handles: list[LocalHandle] = field(default_factory=list)

    def prepare(self) -> None:
        """Do nothing: this process is ready."""

    def close(self) -> None:
        """Do nothing: there is no fork server."""

    def start(self, launch: Launch) -> LocalHandle:
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
                status = work(launch, theirs, self.faults)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)
        theirs.close()
        os.close(out)
        os.close(err)
        for descriptor in (stdout, stderr):
            os.set_blocking(descriptor, False)
        handle = LocalHandle(pid, os.pidfd_open(pid), stdout, stderr, PacketChannel(mine, WorkerMessage))
        self.handles.append(handle)
        return handle


def work(launch: Launch, connection: socket.socket, given: list[Fault]) -> int:
    """Run as a worker, and print its result."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    identity = read_worker(launch.environment(connection.fileno()))
    client = AgentClient(PacketChannel(connection, AgentMessage), identity.worker)
    events = Bus(SystemClock(), identity.worker)
    events.subscribe(client.report, *WORKER_EVENTS)
    faults = Faults([fault for fault in given if fault.worker == identity.worker])
    prepare(faults)
    welcome = take_welcome(client)
    settings = welcome.settings
    membership = AgentMembership(
        identity, welcome, client, wait_policy(settings.limits.timeout), MemoryTransport()
    )
    if identity.joins:
        view = place(settings.replicas, (identity.worker,))
        communicator = by_itself(view)
    else:
        view, communicator = membership.first_view()
    context = JobContext(identity.worker, events, settings)
    entered: Job
    checkpoints = open_checkpoints(settings, events, lambda: entered.is_chief, joins=identity.joins)
    entered = Job(context, (view, communicator), membership, checkpoints, joins=identity.joins)
    client.started()
    events.publish(StrategyInstalled("none"))
    try:
        os.write(1, f"result {steps.train(entered, STEPS, faults)}\n".encode())
    except ScriptError:
        client.failed(1, "ScriptError", "", blames=False, prints=False)
        return 1
    except BaseException as error:
        os.write(2, traceback.format_exc().encode())
        client.failed(1, repr(error), "", blames=False, prints=False)
        return 1
    client.finished()
    return 0


class NoDescendants:
    """Workers have no child processes."""

    def reap(self, owned: frozenset[int]) -> None:
        """Do nothing."""

    def end(self, grace: float) -> tuple[int, ...]:
        """Do nothing."""
        return ()


@dataclass(frozen=True)
class DrawnJob:
    """A job: workers, replicas, its faults, and whether lost workers are replaced."""

    workers: int
    replicas: int
    faults: list[Fault]
    replace: bool


def run(folder: Path, seed: int, job: DrawnJob) -> tuple[int, list[str], int]:
    """Run one job; return its status, the results of its survivors, and the number of started workers."""
    paths = RunPaths(folder)
    checkpoints = Checkpoints(folder / "checkpoints", 2, None, 2) if job.replace else None
    spec = JobSpec(
        target="steps",
        workers=job.workers,
        replicas=job.replicas,
        threads=1,
        seed=seed,
        run_dir=folder,
        checkpoints=checkpoints,
        limits=JobLimits(
            timeout=LIMITS.timeout,
            min_workers=job.workers if job.replace else 1,
            max_restarts=100 if job.replace else 0,
        ),
    )
    user, command = LocalChannel.pair()
    launcher = ForkLauncher(job.faults)
    with (folder / "out").open("wb", 0) as out, EventLoop() as loop:
        console = Console(Sink(out.fileno()), Sink(out.fileno()), "chief", 0)
        output = LocalOutput(console, paths)
        status = run_job(
            spec,
            State.of(
                spec.view, LIMITS, JobSize.of(job.workers, spec.limits.min_workers, spec.limits.max_restarts)
            ),
            paths,
            command,
            pid=os.getpid(),
            console=console,
            loop=loop,
            local=LocalHost(
                output, LocalStarter(spec, paths, os.getpid(), launcher, output), NoDescendants()
            ),
        )
    user.close()
    lines = [path.read_text().splitlines() for path in sorted(folder.glob("worker-*.log"))]
    results = [line.removeprefix("result ") for text in lines for line in text if line.startswith("result ")]
    return status, results, len(launcher.handles)


def wrong_checkpoints(folder: Path, expected: list[str]) -> list[str]:
    """Return the errors in the checkpoints of a job."""
    wrong = []
    for entry in Store(folder / "checkpoints").entries():
        step, state, chain = steps.unpacked(load(entry.path))
        if steps.digest(state, chain) != expected[step - 1]:
            wrong.append(f"{entry.path.name} does not hold the state of its step")
    return wrong


def draw_job(random_: random.Random, point: str | None) -> DrawnJob:
    """Draw a job with faults that at least one worker survives.

    With `point`, one worker is lost first, and all other faults are at that point.
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
    return DrawnJob(workers, replicas, faults, replace=False)


def draw_job_with_joins(random_: random.Random, point: str | None) -> DrawnJob:
    """Draw a job in which lost workers are replaced, and others are lost, or differ, meanwhile."""
    workers = random_.randint(2, 4)
    replicas = random_.randint(workers, 8)
    faults = [Fault(random_.randrange(workers), random_.randrange(3), random_.choice(POINTS[:8]))]
    others = [worker for worker in range(workers) if worker != faults[0].worker]
    # At least one of the first workers remains until the end.
    for worker in random_.sample(others, random_.randint(0, len(others) - 1)):
        at = point if point in WHILE_OTHERS_JOIN else random_.choice((*POINTS, *WHILE_OTHERS_JOIN))
        faults.append(Fault(worker, random_.randrange(STEPS - 3), at, random_.choice(KINDS[:2])))
    for worker in range(workers, workers + random_.randint(0, 3)):
        at = point if point in WHILE_JOINING else random_.choice((*POINTS, *WHILE_JOINING))
        faults.append(Fault(worker, random_.randrange(STEPS - 3), at, random_.choice(JOINER_KINDS)))
    return DrawnJob(workers, replicas, faults, replace=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--point", choices=(*POINTS, *WHILE_OTHERS_JOIN, *WHILE_JOINING))
    parser.add_argument("--replace", action="store_true")
    arguments = parser.parse_args()
    seen: Counter[str] = Counter()
    failures = 0
    with jobs_folder() as base:
        for number in range(arguments.seed, arguments.seed + arguments.jobs):
            draw = draw_job_with_joins if arguments.replace else draw_job
            job = draw(random.Random(number), arguments.point)
            folder = base / str(number)
            folder.mkdir()
            status, results, started = run(folder, number, job)
            expected = steps.alone(number, job.replicas, STEPS)
            fatal = sum(fault.kind != "SIGSTOP" for fault in job.faults)
            struck = started - len(results)
            wrong = wrong_checkpoints(folder, expected)
            # A replacement that starts at the end of the job may be unnecessary.
            many = not job.replace and struck > fatal
            if status != 0 or set(results) != {expected[-1]} or many or wrong:
                failures += 1
                print(f"seed {number}: {job}: status {status}, {wrong}")
                print(f"  expected {expected[-1]}, got {results}")
                print(*(path.read_text() for path in sorted(folder.iterdir()) if path.suffix), sep="\n")
            seen["lost"] += struck
            seen["replaced"] += started - job.workers
            seen["stopped"] += sum(fault.kind == "SIGSTOP" for fault in job.faults)
            seen["jobs"] += 1
            shutil.rmtree(folder)
    print(
        *(f"{name} {seen[name]}," for name in ("jobs", "lost", "replaced", "stopped")), f"failed {failures}"
    )
    return 1 if failures else 0


@contextlib.contextmanager
def jobs_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main())
