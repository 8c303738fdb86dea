"""Runs jobs over hosts with faults at random points; the bits must stay those of one process.

    soak_hosts.py [SEED [JOBS]]

Prints each job, and everything about those that fail. Needs root.
"""

import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from host_network import HostNetwork
from stepping_job import SteppingJob

POINTS = (
    *("before publishing", "after apply", "before+connect", "after+connect", "before+_accept", "after+_dial"),
    *("before+next_place", "after+next_place", "before+hand_over", "after+hand_over"),
    *("before+_meet", "after+_meet", "before+_announce", "after+_announce", "after+_receive_places"),
    *("before+_exchange_lane", "after+_exchange_lane", "before+_share", "after+_share", "before+_complete"),
    *("before+_greet", "after+_greet", "after+reduce", "before+gather", "after+_gather", "after+_make_room"),
)
JOINER_POINTS = ("after+position", "before+join", "after+join", *POINTS)
SPREADS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (1, 3), (2, 1, 1), (1, 1, 1, 1))
STEPS = 14


def draw(random_: random.Random) -> tuple[tuple[int, ...], list[str]]:
    """The workers of each host, and faults that at least one worker survives."""
    spread = random_.choice(SPREADS)
    first = sum(spread)
    if len(spread) > 1 and random_.random() < 0.5:
        # The coordinator is on the first host.
        lost = random_.randrange(spread[0], first)
        point, step = random_.choice(POINTS), random_.randrange(STEPS - 4)
        others = [worker for worker in range(1, first) if worker != lost and random_.random() < 0.3]
        faults = [f"{other}:{random_.randrange(STEPS)}:{random_.choice(POINTS)}:SIGKILL" for other in others]
        return spread, [f"{lost}:{step}:{point}:host", *faults]
    same = random_.random() < 0.3
    step = random_.randrange(STEPS - 4)
    faults = []
    for worker in random_.sample(range(first), random_.randint(1, first - 1)):
        at = step if same else random_.randrange(STEPS - 4)
        faults.append(f"{worker}:{at}:{random_.choice(POINTS)}:SIGKILL")
    for worker in range(first, first + random_.randint(0, 3)):
        faults.append(f"{worker}:{random_.randrange(STEPS)}:{random_.choice(JOINER_POINTS)}:SIGKILL")
    return spread, faults


@contextmanager
def network() -> Iterator[HostNetwork]:
    with tempfile.TemporaryDirectory() as cache, HostNetwork.open(4, Path(cache)) as made:
        yield made


def main(seed: int = 0, jobs: int = 10) -> int:
    failures = 0
    with network() as made:
        for number in range(seed, seed + jobs):
            made.reset()
            spread, faults = draw(random.Random(number))
            names = ",".join(f"node{at}:{workers}" for at, workers in enumerate(spread, 1))
            options = f"--hosts {names} --min-workers {sum(spread)} --max-restarts 20 --timeout 120"
            job = SteppingJob(made.hosts, options, STEPS, *faults)
            try:
                finished = job.finish()
                for host in made.hosts[1:]:
                    host.remove_abandoned()
                left = made.left(60.0)
                assert not left, left
                print(number, names, *faults, "finished:", sorted(finished), flush=True)
            except Exception as error:
                failures += 1
                print(number, names, *faults, "FAILED", repr(error)[:3000], flush=True)
                shutil.copytree(
                    job.folder, Path(tempfile.gettempdir()) / f"soak-hosts-{number}", dirs_exist_ok=True
                )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
