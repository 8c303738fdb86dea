"""How long training pauses when a host is lost, and when it joins again.

    hosts_losses.py [--hosts N ...] [--turns N]

A job with one worker on each host and a state of 11 MB; the command is on a further host, without workers.
Hosts are those of the tests (`tests/hosts/host_network.py`), with a real sshd; this needs root. The kinds of
losses take turns in one job, and so do the chief's host and another one as the lost host: all of its
processes are killed, its cable is cut, or all of its processes are stopped. As soon as the others have
continued, the cable is connected again, or the processes continue, and end; `lockstep run` then starts the
agent again, and its worker joins. Then the coordinator is killed as many times, while all hosts train. The
times are those at which steps end in the workers. Processes are not pinned.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from programs import HERE
from report import print_row
from steps import PIPE, Step, Watch, gaps, of, usual, watching
from turns import FailedError

sys.path.insert(0, str(HERE.parent / "tests/hosts"))

from host_network import Host, HostNetwork, Unavailable

TURNS = 8
STEPS = 30
SETTLED = 3
AROUND = 1.0
"""Seconds before and after a join in which a long step counts as its consequence."""


@dataclass(frozen=True)
class Loss:
    """A kind of loss.

    Attributes:
        prepare: returns what causes it on a host.
        restore: lets the host come back.
        goal: milliseconds until the next step.
    """

    prepare: Callable[[Host], Callable[[], None]]
    restore: Callable[[Host], None]
    goal: str


def killing(host: Host) -> Callable[[], None]:
    pids = host.processes()

    def kill() -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return kill


LOSSES = {
    "killed": Loss(killing, lambda host: None, "300"),
    "cut": Loss(lambda host: host.cut, Host.reconnect, "5500"),
    "stopped": Loss(
        lambda host: partial(host.signal_all, signal.SIGSTOP),
        lambda host: host.signal_all(signal.SIGCONT),
        "5500",
    ),
}


@dataclass(frozen=True)
class Turn:
    """The measurements of one loss and of the return of the host, in seconds.

    Attributes:
        step: of all hosts, before the loss.
        step_without: a step of the remaining hosts.
        pause: from the loss to the end of the next step on all remaining hosts.
        noticed: the part of it until the coordinator has begun the next view.
        copied: the time that the state took to the host that joins, while the others wait.
        stall: the longest step within a second of the join, minus a usual one of that view.
        away: from the loss to the end of the first step with the host.
    """

    step: float
    step_without: float
    pause: float
    noticed: float
    copied: float
    stall: float
    away: float


@dataclass(frozen=True)
class Takeover:
    """The measurements of one loss of the coordinator, in seconds.

    Attributes:
        taken: until another one has taken over.
        stall: the longest step within a second of the loss, minus a usual one.
    """

    taken: float
    stall: float


class Job:
    """A job whose hosts are lost and come back.

    Args:
        network: the hosts; the first one has only the command.
        watch: receives the steps.
    """

    def __init__(self, network: HostNetwork, watch: Watch) -> None:
        self._command, *self._hosts = network.hosts
        self._watch = watch
        count = len(self._hosts)
        names = ",".join(host.name for host in self._hosts)
        options = ["--hosts", names, "--replicas", str(count), "--threads-per-worker", "1"]
        script = [str(HERE / "hosts_losses_training.py"), watch.variables[PIPE]]
        run = ["run", "--backend", "jax", "--run-dir", "run", *options, *script]
        watch.processes.append(self._command.lockstep(*run).process)
        watch.until(lambda: watch.have_taken(count, STEPS), "starting")

    def lose(self, kind: str, chief: bool) -> Turn:
        """Lose the chief's host or another one, and let it come back."""
        watch, loss = self._watch, LOSSES[kind]
        view = watch.steps[-1].view
        members = {step.worker: step.pid for step in watch.steps if step.view == view}
        victim = self._host_of(members.pop(min(members) if chief else max(members)))
        act = loss.prepare(victim)
        began, lost = time.time(), time.monotonic()
        act()
        watch.until(
            lambda: watch.have_taken(len(members), STEPS, lambda step: step.view > view), f"{kind}: next view"
        )
        known = {step.pid for step in watch.steps}
        loss.restore(victim)
        watch.until(lambda: watch.have_taken(1, STEPS, lambda step: step.pid not in known), f"{kind}: return")
        joined = next(step for step in watch.steps if step.pid not in known)
        watch.receive_for(AROUND)
        rest = [[step for step in of(pid, watch.steps) if step.view >= view] for pid in members.values()]
        ours = rest[0]
        alone = [step for step in ours if view < step.view < joined.view]
        return Turn(
            step=usual([step for step in ours if step.view == view][SETTLED:]),
            step_without=usual(alone[SETTLED:]),
            pause=max(next(step.time for step in one if step.view > view) for one in rest) - lost,
            noticed=self._time_of("view", number=alone[0].view) - began,
            copied=self._time_of("view", number=joined.view) - self._last_sent(),
            stall=max(stall(one, joined.view) for one in rest),
            away=joined.time - lost,
        )

    def replace_coordinator(self) -> Takeover:
        """Kill the coordinator, and wait until another one has taken over."""
        watch, terms = self._watch, len(self._events("coordinator"))
        watch.receive_for(AROUND)
        (pid,) = self._command.matching("lockstep.hosts.coordinator_process")
        began, lost = time.time(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        watch.until(lambda: len(self._events("coordinator")) > terms, "another coordinator")
        watch.receive_for(AROUND)
        taken = self._events("coordinator")[-1]["time"] - began
        steps = [step for step in of(watch.steps[-1].pid, watch.steps) if step.view == watch.steps[-1].view]
        near = [step for step in steps if abs(step.time - lost) <= AROUND]
        return Takeover(taken, max(gaps(near)) - usual([step for step in steps if step.time < lost]))

    def _host_of(self, pid: int) -> Host:
        return next(host for host in self._hosts if pid in host.processes())

    def _events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self._command.work / "run/events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def _time_of(self, kind: str, number: int) -> float:
        return float(next(event["time"] for event in self._events(kind) if event["number"] == number))

    def _last_sent(self) -> float:
        sent = [event["time"] for event in self._events("decision") if "SendState" in event["actions"]]
        return float(sent[-1])


def stall(steps: list[Step], view: int) -> float:
    """Return the longest step within `AROUND` of the beginning of a view, minus a usual one."""
    first = next(step for step in steps if step.view == view)
    near = [step for step in steps if abs(step.time - first.time) <= AROUND]
    return max(gaps(near)) - usual([step for step in steps if step.view == view][SETTLED:])


def measure(hosts: int, turns: int) -> None:
    found: dict[str, list[Turn]] = {kind: [] for kind in LOSSES}
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder,
        HostNetwork.open(hosts + 1, Path(folder)) as network,
        watching(Path(folder), {}) as watch,
    ):
        job = Job(network, watch)
        for turn in range(turns):
            for kind in LOSSES if turn % 2 == 0 else reversed(LOSSES):
                found[kind].append(job.lose(kind, chief=turn % 4 < 2))
        takeovers = [job.replace_coordinator() for _ in range(turns)]
    print(f"one of {hosts} hosts lost and back, state of 11 MB, {turns} times each: median (p10-p90)")
    every = [turn for of_kind in found.values() for turn in of_kind]
    print_row("a step", [turn.step for turn in every], "ms")
    print_row("a step of the remaining hosts", [turn.step_without for turn in every], "ms")
    for kind, of_kind in found.items():
        print_row(
            f"{kind}: to the end of the next step", [turn.pause for turn in of_kind], "ms", LOSSES[kind].goal
        )
        noticed = [turn.noticed for turn in of_kind]
        print_row(f"{kind}: part of it until the next view begins", noticed, "ms")
        print_row(f"{kind}: until the first step with the host", [turn.away for turn in of_kind], "s")
    print_row("the state on its way to the host that joins", [turn.copied for turn in every], "ms")
    print_row("the longest step at the join, minus a usual one", [turn.stall for turn in every], "ms")
    rest = [turn.stall - turn.copied for turn in every]
    print_row("the same without the time of the state", rest, "ms", "200")
    print_row("coordinator killed: until another one has taken over", [one.taken for one in takeovers], "ms")
    print_row("the longest step then, minus a usual one", [one.stall for one in takeovers], "ms", "1000")


def main(hosts: tuple[int, ...] = (2, 3), turns: int = TURNS) -> None:
    try:
        for count in hosts:
            measure(count, turns)
    except Unavailable as why:
        print(f"skipping the losses of hosts: {why}")
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3], help="numbers of hosts")
    parser.add_argument("--turns", type=int, default=TURNS, help="losses of each kind; at least 2")
    options = parser.parse_args()
    main(tuple(options.hosts), options.turns)
