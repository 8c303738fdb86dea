"""The cost of publishing the event of a step: without a subscriber, with a feed, and to events.jsonl.

    events.py [--turns N] [--steps N]

One process, with turns of many steps. Each step makes the calls of the timer that a step of `fit` makes. None
of them waits, so the figures are CPU time of the thread, which other processes do not affect.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.observability.bus import Bus
from lockstep.observability.event_log import EventLog
from lockstep.observability.measurements import StepEnded
from lockstep.observability.step_timer import StepTimer
from lockstep.system.clock import SystemClock
from report import print_row

TURNS = 20
STEPS = 10_000
LOGS = {"loss": 0.5}
SHARE = int


def steps(timer: StepTimer, count: int) -> float:
    """Return the CPU seconds per step of steps that only measure and publish themselves."""
    begun = time.thread_time()
    for number in range(count):
        timer.begin("fit 1")
        timer.lap("wait")
        if timer.running:
            timer.charging("input", SHARE)()
        timer.lap("compute")
        timer.lap("exchange")
        timer.lap("update")
        timer.end(number, LOGS)
        timer.lap("other")
    return (time.thread_time() - begun) / count


def without_subscriber(timer: StepTimer, bus: Bus, log: EventLog, count: int) -> float:
    return steps(timer, count)


def to_a_feed(timer: StepTimer, bus: Bus, log: EventLog, count: int) -> float:
    feed = bus.feed(StepEnded)
    try:
        return steps(timer, count)
    finally:
        feed.close()


def to_a_file(timer: StepTimer, bus: Bus, log: EventLog, count: int) -> float:
    unsubscribe = bus.subscribe(log.append, StepEnded)
    try:
        return steps(timer, count)
    finally:
        unsubscribe()


SUBSCRIBERS: dict[str, Callable[[StepTimer, Bus, EventLog, int], float]] = {
    "a step, without a subscriber": without_subscriber,
    "a step, with a full feed": to_a_feed,
    "a step, as a line of events.jsonl": to_a_file,
}


def main(turns: int = TURNS, count: int = STEPS) -> None:
    bus = Bus(SystemClock(), worker=0)
    timer = StepTimer(bus, lambda: 0.0)
    seconds: dict[str, list[float]] = {name: [] for name in SUBSCRIBERS}
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder,
        EventLog.open(Path(folder) / "events.jsonl", sys.exit) as log,
    ):
        for turn in range(turns):
            for name in list(SUBSCRIBERS)[:: 1 if turn % 2 else -1]:
                seconds[name].append(SUBSCRIBERS[name](timer, bus, log, count))
    print(f"events: measuring and publishing a step, {turns} turns of {count:,} steps: median (p10-p90)")
    for name, each in seconds.items():
        print_row(name, each, "us", "20")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per turn")
    options = parser.parse_args()
    main(options.turns, options.steps)
