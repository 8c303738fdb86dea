"""A training without a framework, with faults; prints the digest of its end.

    stepping.py STEPS[+MEGABYTES] [WORKER:STEP:WHEN:WHAT]...

With MEGABYTES, the state has that many more, which joiners compare.
WHEN is "before" or "after" and a method of a class in `POINTS`, with "+" between, or a point of the training.
WHAT is the name of a signal that the worker sends itself; "hold": it writes the file held-STEP and waits for
the file go-STEP; "pace" or "crawl": it waits a moment or half a second there from now on, until there is the
file `fast`; "host": it kills everything on its host; "coordinator": it kills the coordinator there. Each
worker prints the steps that it computes, and those that it has made, and writes when to the file made-WORKER,
by the clock that hosts of one machine share. Lies in one folder with `chaos_steps` and `chaos_faults`.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import chaos_steps
import numpy as np
from chaos_faults import kill_here

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.collectives.network.communicator import NetworkCommunicator
from lockstep.observability.events import StrategyInstalled
from lockstep.worker import job
from lockstep.worker.membership import AgentMembership
from lockstep.worker.network_entrance import LaneConnector

POINTS = (AgentMembership, LaneConnector, NetworkCommunicator)
PACES = {"pace": 0.05, "crawl": 0.5}
NUMBERS = 1 << 17
"""In a megabyte."""


class Faults:
    """The faults of one worker, each due at its point in its step or a later one."""

    differs = False

    def __init__(self, texts: list[str], worker: int) -> None:
        self.step = 0
        self._pace = 0.0
        self._made = os.open(f"made-{worker}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._due = []
        for text in texts:
            who, step, when, what = text.split(":")
            if int(who) == worker:
                self._due.append((int(step), when, what))
                self._insert(*when.split("+")) if "+" in when else None

    def _insert(self, place: str, name: str) -> None:
        owner = next(owner for owner in POINTS if name in vars(owner))
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if place == "before":
                self.passing(f"before+{name}")
            result = original(*arguments, **options)
            if place == "after":
                self.passing(f"after+{name}")
            return result

        setattr(owner, name, wrapped)

    def passing(self, point: str) -> None:
        if point == "before publishing":
            print("computes", self.step, flush=True)
        if point == "after apply":
            print("made", self.step, flush=True)
            os.write(self._made, f"{time.monotonic()}\n".encode())
            time.sleep(0.0 if Path("fast").exists() else self._pace)
        for fault in self._due:
            step, when, what = fault
            if when == point and step <= self.step:
                self._due.remove(fault)
                if what == "hold":
                    Path(f"held-{step}").touch()
                    while not Path(f"go-{step}").exists():
                        time.sleep(0.01)
                elif what in PACES:
                    self._pace = PACES[what]
                elif what == "host":
                    kill_here(b"")
                    os.kill(os.getpid(), signal.SIGKILL)
                elif what == "coordinator":
                    kill_here(b"lockstep.hosts.coordinator_process")
                else:
                    os.kill(os.getpid(), getattr(signal, what))
                return


def enlarge(megabytes: int) -> None:
    """Let the states of the chief carry an array of this size, whose pieces differ."""
    packed, unpacked = chaos_steps.packed, chaos_steps.unpacked
    numbers = np.empty(0, "int64")

    def piece(at: int) -> Any:
        return np.arange(at * NUMBERS, (at + 1) * NUMBERS) * 7

    def enlarged(step: int, *rest: Any) -> Contents:
        nonlocal numbers
        contents = packed(step, *rest)
        if not numbers.size and job.current().is_chief:
            numbers = np.empty(megabytes * NUMBERS, "int64")
            for at in range(megabytes):
                numbers[at * NUMBERS : (at + 1) * NUMBERS] = piece(at)
        return Contents(step, contents.manifest, {**contents.arrays, "numbers": numbers})

    def compared(contents: Contents) -> Any:
        nonlocal numbers
        numbers = contents.arrays["numbers"]
        assert numbers.size == megabytes * NUMBERS
        for at in range(megabytes):
            assert np.array_equal(numbers[at * NUMBERS : (at + 1) * NUMBERS], piece(at))
        return unpacked(contents)

    chaos_steps.packed, chaos_steps.unpacked = enlarged, compared


def main() -> None:
    steps, _, megabytes = sys.argv[1].partition("+")
    if megabytes:
        enlarge(int(megabytes))
    current = job.current()
    faults = Faults(sys.argv[2:], current.worker)
    faults.passing("before the strategy")
    current.events.publish(StrategyInstalled("none"))
    current.note_distribution()
    print("digest", chaos_steps.train(current, int(steps), faults))


main()
