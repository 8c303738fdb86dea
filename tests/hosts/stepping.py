"""A training without a framework, with faults; prints the digest of its end.

    stepping.py STEPS [WORKER:STEP:WHEN:WHAT]...

WHEN is "before" or "after" and a method of a class in `POINTS`, with "+" between, or a point of the training.
WHAT is the name of a signal that the worker sends itself; "hold": it writes the file held-STEP and waits for
the file go-STEP; "pace": it waits a moment there from now on, until there is the file `fast`. Each worker
prints the steps that it has made. Lies in one folder with `chaos_steps` and `chaos_faults`.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import chaos_steps

from lockstep.collectives.network.communicator import NetworkCommunicator
from lockstep.observability.events import StrategyInstalled
from lockstep.worker import job
from lockstep.worker.membership import AgentMembership
from lockstep.worker.network_entrance import LaneConnector

POINTS = (AgentMembership, LaneConnector, NetworkCommunicator)


class Faults:
    """The faults of one worker, each due at its point in its step or a later one."""

    differs = False

    def __init__(self, texts: list[str], worker: int) -> None:
        self.step = 0
        self._pace = 0.0
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
        if point == "after apply":
            print("made", self.step, flush=True)
            time.sleep(0.0 if Path("fast").exists() else self._pace)
        for fault in self._due:
            step, when, what = fault
            if when == point and step <= self.step:
                self._due.remove(fault)
                if what == "hold":
                    Path(f"held-{step}").touch()
                    while not Path(f"go-{step}").exists():
                        time.sleep(0.01)
                elif what == "pace":
                    self._pace = 0.05
                else:
                    os.kill(os.getpid(), getattr(signal, what))
                return


def main() -> None:
    current = job.current()
    current.events.publish(StrategyInstalled("none"))
    current.note_distribution()
    faults = Faults(sys.argv[2:], current.worker)
    print("digest", chaos_steps.train(current, int(sys.argv[1]), faults))


main()
