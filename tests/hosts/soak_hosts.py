"""Runs jobs over hosts with faults at random points; the bits must stay those of one process.

    soak_hosts.py [SEED [LOSSES]]

Half of the jobs lose workers, hosts and coordinators at named points of a call and of the way into a view.
The other half lose them, and the connections between them, at random times. Runs jobs until so many workers
and coordinators are lost. Prints each job, and everything about those that fail. Needs root.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from host_network import Host, HostNetwork
from stepping_job import SteppingJob

POINTS = (
    *("before publishing", "after apply", "before+connect", "after+connect", "before+_accept", "after+_dial"),
    *("before+next_view", "after+next_view", "before+hand_over", "after+hand_over"),
    *("before+_meet", "after+_meet", "before+_announce", "after+_announce", "after+_receive_places"),
    *("before+_exchange_lane", "after+_exchange_lane", "before+_share", "after+_share", "before+_complete"),
    *(
        "before+_meet_hosts",
        "after+_meet_hosts",
        "after+reduce",
        "before+gather",
        "after+_gather",
        "after+_make_room",
    ),
)
JOINER_POINTS = ("after+position", "before+join", "after+join", *POINTS)
SPREADS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (1, 3), (2, 1, 1), (1, 1, 1, 1))
STEPS = 14
KINDS = ("coordinator", "coordinator", "worker", "worker", "kill", "stop", "cut", "one way")
PACED = 80
"""Steps of a job with faults at random times; each takes a twentieth of a second."""
KILLED = 128 + signal.SIGKILL
"""The exit status of a job whose last member was killed."""
COORDINATOR = "lockstep.hosts.coordinator_process"


def at_points(random_: random.Random, spread: Sequence[int]) -> list[str]:
    """Faults that at least one worker survives."""
    first, faults = sum(spread), []
    if random_.random() < 0.5:
        # The coordinator is on the first host.
        own = random_.randrange(spread[0])
        faults = [f"{own}:{random_.randrange(STEPS)}:{random_.choice(POINTS)}:coordinator"]
    if len(spread) > 1 and random_.random() < 0.5:
        lost = random_.randrange(spread[0], first)
        point, step = random_.choice(POINTS), random_.randrange(STEPS - 4)
        others = [worker for worker in range(1, first) if worker != lost and random_.random() < 0.3]
        faults += [f"{other}:{random_.randrange(STEPS)}:{random_.choice(POINTS)}:SIGKILL" for other in others]
        return [*faults, f"{lost}:{step}:{point}:host"]
    same = random_.random() < 0.3
    step = random_.randrange(STEPS - 4)
    for worker in random_.sample(range(first), random_.randint(1, first - 1)):
        at = step if same else random_.randrange(STEPS - 4)
        faults.append(f"{worker}:{at}:{random_.choice(POINTS)}:SIGKILL")
    for worker in range(first, first + random_.randint(0, 3)):
        faults.append(f"{worker}:{random_.randrange(STEPS)}:{random_.choice(JOINER_POINTS)}:SIGKILL")
    return faults


@dataclass(frozen=True)
class Fault:
    """What happens to a job at some time.

    Attributes:
        after: seconds since the fault before.
        kind: what happens: "coordinator", "worker", "kill", "stop", "cut" or "one way".
        host: the index of the host to which it happens; the coordinator's is 0.
        lasts: seconds until a host is continued or connected again.
    """

    after: float
    kind: str
    host: int
    lasts: float

    def __str__(self) -> str:
        lasts = f" for {self.lasts:.1f} s" if self.kind in ("stop", "cut", "one way") else ""
        return f"{self.kind} node{self.host + 1}{lasts} after {self.after:.1f} s"


def at_times(random_: random.Random, hosts: int) -> list[Fault]:
    """Faults that workers on the first host survive."""
    faults = []
    for _ in range(random_.randint(2, 6)):
        kind = random_.choice(KINDS)
        host = random_.randrange(hosts) if kind in ("worker", "stop") else random_.randrange(1, hosts)
        lasts = random_.choice((1.0, 3.0, 4.5, 7.0, 12.0, 30.0))
        faults.append(Fault(random_.choice((0.0, 0.02, 0.1, 0.5, 2.0)), kind, host, lasts))
    return faults


def happen(fault: Fault, job: SteppingJob, hosts: Sequence[Host], random_: random.Random) -> None:
    """Let a fault happen, and end."""
    time.sleep(fault.after)
    host = hosts[fault.host]
    match fault.kind:
        case "coordinator":
            kill(hosts[0].matching(COORDINATOR))
        case "worker":
            living = [event["pid"] for event in job.events("started") if lives(event["pid"])]
            kill(random_.sample(living, 1) if len(living) > 1 else [])
        case "kill":
            host.signal_all(signal.SIGKILL)
        case "stop":
            host.signal_all(signal.SIGSTOP)
            wait(job, fault.lasts)
            host.signal_all(signal.SIGCONT)
        case "cut" | "one way":
            host.cut() if fault.kind == "cut" else host.part_from(hosts[0])
            wait(job, fault.lasts)
            host.reconnect()


def kill(processes: Sequence[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait(job: SteppingJob, seconds: float) -> None:
    """Wait so many seconds, or until a job has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.running.end(seconds)


def play(made: HostNetwork, number: int) -> tuple[SteppingJob, str]:
    """Run a job to its end; return it, with what happened to it."""
    random_ = random.Random(number)
    spread = random_.choice(SPREADS)
    names = ",".join(f"node{at}:{workers}" for at, workers in enumerate(spread, 1))
    options = f"--hosts {names} --max-restarts 50 --timeout 60"
    if number % 2:
        faults = at_times(random_, len(spread))
        paces = [f"{worker}:0:after apply:pace" for worker in range(100)]
        job = SteppingJob(made.hosts, options, PACED, *paces)
        job.running.wait_until(lambda: job.steps(0) > 0)
        for fault in faults:
            if job.running.process.poll() is None:
                happen(fault, job, made.hosts, random_)
        return job, f"{names} {'; '.join(map(str, faults))}"
    points = at_points(random_, spread)
    workers = sum(spread)
    return SteppingJob(
        made.hosts, f"{options} --min-workers {workers}", STEPS, *points
    ), f"{names} {' '.join(points)}"


@contextmanager
def network() -> Iterator[HostNetwork]:
    with tempfile.TemporaryDirectory() as cache, HostNetwork.open(4, Path(cache)) as made:
        yield made


def main(seed: int = 0, losses: int = 1000) -> int:
    failures, number = 0, seed
    lost: Counter[str] = Counter()
    with network() as made:
        while lost.total() < losses:
            made.reset()
            job, what = play(made, number)
            try:
                status = job.end()
                # Faults at random times may hit the last member while others join.
                if (status and "no workers remain" in job.running.err) or status == KILLED:
                    result = "lost all workers"
                else:
                    result = f"finished: {sorted(job.finish())}"
                for host in made.hosts[1:]:
                    host.remove_abandoned()
                left = made.left(120.0)
                assert not left, left
            except Exception as error:
                failures += 1
                result = f"FAILED {error!r:.3000}"
                kept = Path(tempfile.gettempdir()) / f"soak-hosts-{number}"
                shutil.copytree(job.folder, kept, dirs_exist_ok=True)
            lost.update(workers=len(job.events("lost")), coordinators=len(job.events("coordinator")))
            print(number, what, result, flush=True)
            number += 1
    print(f"{number - seed} jobs, {failures} failed; lost:", dict(lost))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
