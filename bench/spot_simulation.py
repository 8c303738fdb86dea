"""How much of its time a job trains on spot machines, in virtual time, with the real decisions.

    spot_simulation.py [--losses PER_HOUR] [--hours N] [--step SECONDS]

`spot.py` disturbs a real job. Here, `lockstep.supervisor.decide` decides in the same way, and its limits are
those of a job, but hosts, workers and the network only take the times of `Times`. Four hosts have one worker
each, and the command is on a further one. At random times a host is lost, and comes back after 30 to 120
seconds. A host whose worker is the last one that trains stays. A host is lost in one of three ways:

    silent     its network and its processes end at once, as if a machine vanished
    closed     its processes are killed: the kernel closes their connections
    announced  its agent hears of it 30 s before, and says so

A row has two figures. "training" is the share of the time from the command on in which steps were computed
that count; a wait for a silent host does not count. "work" compares the steps with those that the present
hosts could have taken, without a pause.
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from lockstep.hosts.newcomers import FIRST_PAUSE, LONGEST_PAUSE
from lockstep.observability.events import HostJoined, JoinRequested, StrategyInstalled
from lockstep.protocol.host import (
    ALIVE_EVERY,
    AskMembers,
    HostRetires,
    SendPosition,
    SendState,
    StartView,
    StartWorker,
    StateArrived,
)
from lockstep.protocol.worker import Notice, StateGiven, StateSource
from lockstep.supervisor.actions import FinishJob
from lockstep.supervisor.decide import decide
from lockstep.supervisor.events import DeadlinePassed, Event, HostGone, HostsHeard
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.topology import View, place_on_hosts

HOSTS = 4
AWAY = 30.0, 120.0
"""Seconds, the least and the most, from the loss of a host to its return."""
NOTICE = 30.0
WAYS = ("silent", "closed", "announced")


@dataclass(frozen=True)
class Times:
    """What the parts of a job take, in seconds.

    Attributes:
        replica: a step of one replica; a host computes those that it has one after the other.
        agent: an agent, until it has described its host.
        worker: a worker, until it asks to join: it imports the framework and runs the script until `fit`.
        compiling: from the position of the job until the worker has compiled the step.
        view: the members enter a view.
        state: the state reaches the host of a joiner, while training waits.
        ssh: an attempt to reach a host that is away.
    """

    replica: float = 1.0
    agent: float = 1.0
    worker: float = 15.0
    compiling: float = 10.0
    view: float = 0.1
    state: float = 0.5
    ssh: float = 20.0


@dataclass
class Machine:
    """A host.

    Attributes:
        index: its index in the job; None if it does not take part.
        there: whether it is there.
        heard: when it was last heard; it does not count while the host is there.
    """

    index: int | None
    there: bool = True
    heard: float = 0.0


@dataclass
class Job:
    """A job and its market, in virtual time."""

    times: Times
    way: str
    mean: float
    dice: random.Random
    now: float = 0.0
    trained: float = 0.0
    steps: int = 0
    capacity: float = 0.0
    losses: int = 0
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _pushed: int = 0
    _turn: int = 0
    _posted: Notice = Notice.NOTHING

    def __post_init__(self) -> None:
        self.machines = [Machine(index) for index in range(HOSTS)]
        view = place_on_hosts(HOSTS, tuple((worker,) for worker in range(HOSTS)), 1)
        size = JobSize.of(HOSTS, 1, 100_000)
        names = tuple(f"node{index}" for index in range(HOSTS))
        state = State.of(view, TimeLimits(), size, names=names, cores=(1,) * HOSTS)
        self.state = replace(state, distributes=True)
        self.view = view

    def run(self, seconds: float) -> None:
        """Play for so long."""
        begins = self.times.agent + self.times.worker + self.times.compiling
        self.after(begins, self._begin)
        self.after(begins + self.dice.expovariate(1 / self.mean), self._lose)
        while True:
            due = self.state.due
            first = self._queue[0][0]
            if due is not None and due <= first:
                self._go_to(min(due, seconds))
                if due >= seconds:
                    return
                self.decide(DeadlinePassed())
                continue
            self._go_to(min(first, seconds))
            if first >= seconds:
                return
            heapq.heappop(self._queue)[2]()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Schedule what happens."""
        self._pushed += 1
        heapq.heappush(self._queue, (self.now + seconds, self._pushed, happen))

    def _go_to(self, now: float) -> None:
        there = sum(machine.there for machine in self.machines)
        self.capacity += (now - self.now) / self._step_of(there)
        self.now = now

    def _step_of(self, workers: int) -> float:
        return self.times.replica * -(-HOSTS // workers)

    # The market.

    def _lose(self) -> None:
        self.after(self.dice.expovariate(1 / self.mean), self._lose)
        # A host that has announced its end is lost already.
        stay = [
            machine for machine in self.machines if machine.there and machine.index not in self.state.retiring
        ]
        if not stay or not self._others_train(machine := self.dice.choice(stay)):
            return
        self.losses += 1
        if self.way == "announced" and machine.index is not None:
            self.decide(HostRetires(machine.index, f"host {machine.index} retires"))
            self.after(NOTICE, lambda: self._take(machine))
        else:
            self._take(machine)

    def _others_train(self, machine: Machine) -> bool:
        """Return whether a member of the view remains without this host, and those that retire."""
        hosts = {
            other.index
            for other in self.machines
            if other.there and other is not machine and other.index not in self.state.retiring
        }
        return any(self.state.workers[worker].host in hosts for worker in self.view.workers)

    def _take(self, machine: Machine) -> None:
        if not machine.there:
            return
        if not self._others_train(machine):
            if machine.index in self.state.retiring:
                # It leaves when other hosts train.
                self.after(1.0, lambda: self._take(machine))
            return
        machine.there, machine.heard = False, self.now - self.dice.uniform(0.0, ALIVE_EVERY)
        self.after(self.dice.uniform(*AWAY), lambda: self._give_back(machine))
        if (index := machine.index) is None:
            return
        if self.way == "silent":
            silent = max(machine.heard, self.state.heard_from) + self.state.limits.silence
            self.after(silent - self.now, lambda: self._notice(machine, self._heard()))
        else:
            self.after(0.01, lambda: self._notice(machine, HostGone(index, "was lost")))

    def _heard(self) -> HostsHeard:
        heard = {}
        for machine in self.machines:
            if machine.index is not None:
                heard[machine.index] = self.now if machine.there else machine.heard
        return HostsHeard(heard)

    def _notice(self, machine: Machine, event: Event) -> None:
        self.decide(event)
        machine.index = None
        self.after(FIRST_PAUSE, lambda: self._call(machine, FIRST_PAUSE))

    def _give_back(self, machine: Machine) -> None:
        machine.there = True

    def _call(self, machine: Machine, pause: float) -> None:
        """Start the agent of a lost host, as the command of `--hosts` does."""
        if machine.there:
            self.after(self.times.agent, lambda: self._join(machine))
            return
        pause = min(2 * pause, LONGEST_PAUSE)
        self.after(self.times.ssh + pause, lambda: self._call(machine, pause))

    def _join(self, machine: Machine) -> None:
        if not machine.there:
            self._call(machine, FIRST_PAUSE)
            return
        machine.index = len(self.state.slots)
        self.decide(HostJoined(f"node{machine.index}", 1, 1))

    # Workers and training.

    def _begin(self) -> None:
        self.decide(StrategyInstalled("jax"))
        self._step()

    def _is_alive(self, worker: int) -> bool:
        host = self.state.workers[worker].host
        return any(machine.there and machine.index == host for machine in self.machines)

    def _step(self) -> None:
        """Begin a step; it ends if no member is lost meanwhile."""
        self._turn += 1
        turn, begun = self._turn, self.now
        seconds = max(len(self.view.replicas_of(worker)) for worker in self.view.workers) * self.times.replica

        def end() -> None:
            if turn == self._turn and all(map(self._is_alive, self.view.workers)):
                self.trained += self.now - begun
                self.steps += 1
                self._end_step()

        self.after(seconds, end)

    def _enter(self, turn: int) -> None:
        if turn == self._turn:
            self._step()

    def _end_step(self) -> None:
        posted, view = self._posted, self.view
        host = self.state.workers[view.chief].host
        if posted is Notice.CHANGE:
            self._turn += 1
            self.after(self.times.view, lambda: self._give(view, host, whole=True))
            return
        if posted is Notice.POSITION:
            self._give(view, host, whole=False)
        if view is self.view:
            self._step()

    def _give(self, view: View, host: int, *, whole: bool) -> None:
        if view is self.view:
            self.decide(StateGiven(view.number, whole, source=StateSource(view.number, 1, 1000, host)))

    def decide(self, event: Event) -> None:
        """Let supervision decide, and perform its actions."""
        decision = decide(self.state, event, self.now)
        self.state = decision.state
        for action in decision.actions:
            match action:
                case StartView():
                    self.view, self._posted = self.state.view, Notice.NOTHING
                    self._turn += 1
                    self.after(self.times.view, partial(self._enter, self._turn))
                case AskMembers(notice):
                    self._posted = notice
                case StartWorker(worker):
                    self.after(self.times.worker, partial(self._ask, worker, whole=False))
                case SendPosition(worker):
                    self.after(self.times.compiling, partial(self._ask, worker, whole=True))
                case SendState(host):
                    arrived = StateArrived(host, self.view.number, "")
                    self.after(self.times.state, partial(self._arrive, arrived))
                case FinishJob(outcome):
                    raise AssertionError(f"the job ended: {outcome.message}")

    def _ask(self, worker: int, *, whole: bool) -> None:
        if self._is_alive(worker):
            self.decide(JoinRequested(worker, whole=whole))

    def _arrive(self, arrived: StateArrived) -> None:
        if any(machine.there and machine.index == arrived.host for machine in self.machines):
            self.decide(arrived)


def row(times: Times, way: str, losses: float, hours: int) -> str:
    """Play so many hours, one job each; return their figures."""
    training, work, lost = [], [], []
    for seed in range(hours):
        job = Job(times, way, 3600 / losses, random.Random(seed))
        job.run(3600.0)
        training.append(job.trained / 3600)
        work.append(job.steps / job.capacity)
        lost.append(job.losses)
    figures = []
    for values in (training, work):
        tenths = statistics.quantiles(values, n=10)
        figures.append(f"{statistics.median(values):.3f} ({tenths[0]:.3f}-{tenths[-1]:.3f})")
    return (
        f"{losses:5g} losses an hour, {way:9}  training {figures[0]}  work {figures[1]}  "
        f"{statistics.mean(lost):.1f} hosts lost"
    )


def main(losses: tuple[float, ...] = (12.0, 100.0), hours: int = 200, step: float = 1.0) -> None:
    print(f"{HOSTS} hosts, {hours} hours of each kind; medians (p10-p90)")
    for rate in losses:
        for way in WAYS:
            print(row(Times(replica=step), way, rate, hours), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=float, nargs="*", default=[12.0, 100.0], help="lost hosts an hour")
    parser.add_argument("--hours", type=int, default=200, help="jobs of an hour for each row")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of a replica's step")
    options = parser.parse_args()
    main(tuple(options.losses), options.hours, options.step)
