"""Where the time of steps goes: sums over the workers of a call, and one line about them. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lockstep.observability.events import STEP_PARTS, StepsMeasured

SHORTEST = 1.0
"""Seconds of measured steps below which a call gets no line."""
_LARGE = 0.4
_SLOWER = 1.2
_COMPILING = 0.2
"""The share of compiling in the time of a worker from which it is worth a word."""
_ALWAYS = frozenset(STEP_PARTS) - {"other", "nested"}
"""The parts that a line lists even if they take no time."""

_ADVICE = {
    "input": "reading takes the most time: cache or prefetch the data, or cheapen what is done per example "
    "(docs/input.md)",
    "exchange": "the exchange takes the most time: larger batches make it rarer",
    "update": "the update takes the most time, and every worker applies it: larger batches make it rarer",
    "other": "callbacks and the loop itself take the most time: do less there, or use larger batches",
}


@dataclass
class WorkerTimes:
    """Sums over steps of one worker in one call, without its first step, which compiles.

    Attributes:
        steps: their number.
        examples: of their global batches.
        replicas: sum over steps of the replicas that the worker executed.
        parts: seconds by part.
        calls: seconds of the part `nested`, by the method of the nested calls.
        compiled: how many of the steps were compiled, because of new shapes of examples.
        compiling: seconds of the part `compute` in these steps.
    """

    steps: int = 0
    examples: int = 0
    replicas: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    calls: dict[str, float] = field(default_factory=dict)
    compiled: int = 0
    compiling: float = 0.0

    def add(self, measured: StepsMeasured) -> None:
        """Add a measurement."""
        self.steps += measured.count
        self.examples += measured.examples
        self.replicas += measured.replicas * measured.count
        self.compiled += measured.compiled
        self.compiling += measured.compiling
        for part in STEP_PARTS:
            self.parts[part] += getattr(measured, part)
        for method, seconds in measured.calls.items():
            self.calls[method] = self.calls.get(method, 0.0) + seconds

    @property
    def seconds(self) -> float:
        """The duration of the steps."""
        return sum(self.parts.values())

    @property
    def pace(self) -> float:
        """Seconds per replica that it executes, without waiting, summing and nested calls."""
        busy = self.seconds - sum(self.parts[part] for part in ("wait", "exchange", "nested"))
        return busy / self.replicas if self.replicas else 0.0


def is_first(measured: StepsMeasured) -> bool:
    """Whether a measurement is that of the first step of a call, which compiles."""
    return measured.number == 1 and measured.count == 1


def shares(workers: Iterable[WorkerTimes]) -> dict[str, float]:
    """Return the share of each part in the time of all workers, between 0 and 1; empty without any time."""
    sums = dict.fromkeys(STEP_PARTS, 0.0)
    for worker in workers:
        for part, seconds in worker.parts.items():
            sums[part] += seconds
    total = sum(sums.values())
    return {part: seconds / total for part, seconds in sums.items()} if total else {}


def scores(workers: Mapping[int, WorkerTimes]) -> dict[int, float]:
    """Return the pace of each worker relative to the fastest: 1.0 is the fastest, 0.5 takes twice as long."""
    paces = {worker: times.pace for worker, times in workers.items() if times.pace > 0}
    return {worker: min(paces.values()) / pace for worker, pace in paces.items()}


@dataclass
class CallTimes:
    """The times of the call in progress, on all workers.

    A line about a call is due when all members have ended it.
    """

    _call: str = ""
    _workers: dict[int, WorkerTimes] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def measured(self, worker: int, measured: StepsMeasured) -> None:
        """Add a measurement of a worker."""
        if measured.call.startswith(("fit", "steps")):
            self._begin(measured.call)
            if not is_first(measured):
                self._workers.setdefault(worker, WorkerTimes()).add(measured)

    def ended(self, call: str, worker: int, members: Iterable[int]) -> str:
        """Note that a worker has ended a call; return the line about it if it is due, or an empty text."""
        if call != self._call:
            return ""
        self._ended.add(worker)
        if not self._ended.issuperset(members):
            return ""
        line = describe(call, {one: self._workers[one] for one in members if one in self._workers})
        self._begin("")
        return line

    def _begin(self, call: str) -> None:
        if call != self._call:
            self._call, self._workers, self._ended = call, {}, set()


def describe(call: str, workers: Mapping[int, WorkerTimes]) -> str:
    """Return a line such as `fit 1: 2,304 examples/s with 2 workers; input 61 %, ...`, with advice.

    The time is that of the call without its first step, with nested calls such as a validation. The line is
    empty if the steps of the slowest worker took less than a second.
    """
    longest = max(workers.values(), key=lambda times: times.seconds, default=WorkerTimes())
    if longest.seconds < SHORTEST or not longest.steps:
        return ""
    unit = "examples" if longest.examples else "steps"
    rate = (longest.examples or longest.steps) / longest.seconds
    count = f"{len(workers)} worker" + "s" * (len(workers) > 1)
    found = shares(workers.values())
    listed = ", ".join(
        f"{part} {share:.0%}".replace("%", " %")
        for part, share in {**found, **_shares_of_calls(workers.values())}.items()
        if part != "nested" and (part in _ALWAYS or share >= 0.005)
    )
    advice = advise(found, workers)
    return f"{call}: {rate:,.0f} {unit}/s with {count}; {listed}" + (f"; {advice}" if advice else "")


def _shares_of_calls(workers: Iterable[WorkerTimes]) -> dict[str, float]:
    """Return the share of nested calls in the time of all workers, by method; the largest first."""
    sums: dict[str, float] = {}
    total = 0.0
    for worker in workers:
        total += worker.seconds
        for method, seconds in worker.calls.items():
            sums[method] = sums.get(method, 0.0) + seconds
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {method: seconds / total for method, seconds in ordered} if total else {}


def advise(found: Mapping[str, float], workers: Mapping[int, WorkerTimes]) -> str:
    """Return what to change if one part dominates; empty if computing does, or no part."""
    compiles = max(workers.values(), key=lambda times: times.compiling, default=WorkerTimes())
    if compiles.compiling > _COMPILING * compiles.seconds:
        return (
            f"{compiles.compiled:,} of {compiles.steps:,} steps had batches of new shapes, which compile: "
            f"{compiles.compiling:.0f} s; pad to a few lengths"
        )
    largest = max(found, key=lambda part: found[part])
    if found[largest] < _LARGE or largest == "compute":
        return ""
    if largest == "nested":
        return _advise_on_calls(next(iter(_shares_of_calls(workers.values())), ""))
    if largest != "wait":
        return _ADVICE[largest]
    if len(workers) == 1:
        return "waiting for workers that were lost, or have left, takes the most time"
    paces = {worker: times.pace for worker, times in workers.items()}
    slowest = max(paces, key=lambda worker: paces[worker])
    fastest = min(paces, key=lambda worker: paces[worker])
    if paces[slowest] < _SLOWER * paces[fastest]:
        return (
            "waiting takes the most time although the workers are equally fast: other processes may use "
            "their cores, or workers were lost"
        )
    behind = {part: workers[slowest].parts[part] / workers[slowest].steps for part in ("input", "compute")}
    ahead = {part: workers[fastest].parts[part] / workers[fastest].steps for part in ("input", "compute")}
    part = max(behind, key=lambda part: behind[part] - ahead[part])
    return f"waiting for worker {slowest} takes the most time: its {part} is slow (lockstep top shows why)"


def _advise_on_calls(method: str) -> str:
    """Return what to change if calls of this method within a call take the most time."""
    if method == "validation":
        return "validation takes the most time: validate on less data, or less often (validation_freq)"
    return f"{method} in a callback takes the most time: call it at the end of epochs, or on less data"
