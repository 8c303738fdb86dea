"""Where the time of steps goes: sums over the workers of a call, and one line about them. Pure."""

from collections.abc import Collection, Iterable, Mapping
from operator import add, attrgetter

import msgspec
from msgspec.structs import replace

from lockstep.observability.events import STEP_PARTS, LoadMeasured, StepsMeasured
from lockstep.observability.growth import GrowingMap
from lockstep.observability.overload import HostLoads
from lockstep.system.prose import count

SHORTEST = 1.0
"""Seconds of measured steps below which a call gets no line."""
SLOW = 0.8
"""The score below which a worker counts as slow."""
_LEAST = 0.002
"""Seconds per step by which a slow worker is slower than the fastest one. Less comes and goes with the time
slices of the system, which take up to 3 ms, and would blame another worker in each run."""
_SHORT = 0.003
"""Seconds of a step without waiting below which waiting has no other cause than that steps are short."""
_LARGE = 0.4
_NOTABLE = 0.25
_SYNCHRONIZING = 0.2
"""The share of waiting and exchange from which short steps are worth a word."""
_EXCESS = 0.15
"""The share in its time by which a slow worker is slower, from which it is the first thing to change."""
_COMPILING = 0.2
"""The share of compiling in the time of a worker from which it is worth a word."""
_UNEVEN = 0.15
"""The share of waiting from which uneven numbers of replicas are worth a word, if they cause that much."""
_OWN_PARTS = ("input", "compute", "update", "other")
"""The parts in which a worker can be slow."""
_ALWAYS = frozenset(STEP_PARTS) - {"other", "nested"}
"""The parts that a line lists even if they take no time."""

_ADVICE = {
    "input": "reading takes the most time: cache or prefetch the data, or cheapen what is done per example "
    "(page input of the documentation)",
    "exchange": "the exchange takes the most time: larger batches make it rarer",
    "update": "the update takes the most time, and every worker applies it: larger batches make it rarer",
    "other": "callbacks and the loop itself take the most time: do less there, or use larger batches",
}


_parts_of = attrgetter(*STEP_PARTS)


class WorkerTimes(msgspec.Struct, frozen=True):
    """Sums over steps of one worker in one call, without its first step, which compiles.

    Attributes:
        steps: their number.
        examples: the examples of their global batches.
        replicas: sum over steps of the replicas that the worker executed.
        parts: seconds by part.
        calls: seconds of the part `nested`, by the method of the nested calls.
        compiled: how many of the steps were compiled, because of new shapes of examples.
        compiling: seconds of the part `compute` in these steps.
    """

    steps: int = 0
    examples: int = 0
    replicas: int = 0
    parts: Mapping[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    calls: Mapping[str, float] = {}
    compiled: int = 0
    compiling: float = 0.0

    def plus(self, measured: StepsMeasured) -> "WorkerTimes":
        """Return the sums with another measurement."""
        calls = self.calls
        for method, seconds in measured.calls.items():
            calls = {**calls, method: calls.get(method, 0.0) + seconds}
        return WorkerTimes(
            steps=self.steps + measured.count,
            examples=self.examples + measured.examples,
            replicas=self.replicas + measured.replicas * measured.count,
            parts=dict(zip(STEP_PARTS, map(add, self.parts.values(), _parts_of(measured)), strict=True)),
            calls=calls,
            compiled=self.compiled + measured.compiled,
            compiling=self.compiling + measured.compiling,
        )

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


class CallTimes(msgspec.Struct, frozen=True):
    """The times of a call, on all workers, and the load of their hosts meanwhile.

    A line about the call is due when all members have ended it.

    Attributes:
        call: its name; empty before the first call.
        workers: the times of each worker.
        ended: the workers that have ended the call.
        hosts: the load of each host, by its name.
    """

    call: str = ""
    workers: GrowingMap[WorkerTimes] = GrowingMap()
    ended: frozenset[int] = frozenset()
    hosts: Mapping[str, HostLoads] = {}

    def measured(self, worker: int, measured: StepsMeasured) -> "CallTimes":
        """Return the times with a measurement of a worker, which may begin another call."""
        if not measured.call.startswith(("fit", "steps", "functions")):
            return self
        times = self if measured.call == self.call else CallTimes(measured.call)
        if is_first(measured):
            return times
        sums = (times.workers.find(worker) or WorkerTimes()).plus(measured)
        return replace(times, workers=times.workers.plus(worker, sums))

    def loaded(self, load: LoadMeasured) -> "CallTimes":
        """Return the times with a measurement of a host."""
        if not self.call:
            return self
        loads = (self.hosts.get(load.host) or HostLoads()).plus(load)
        return replace(self, hosts={**self.hosts, load.host: loads})

    def after_end(self, call: str, worker: int) -> "CallTimes":
        """Return the times after a worker has ended a call."""
        return replace(self, ended=self.ended | {worker}) if call == self.call else self

    def line(self, members: Collection[int]) -> str:
        """Return the line about the call; empty if it was short."""
        measured = {worker: times for worker in members if (times := self.workers.find(worker)) is not None}
        line = describe(self.call, measured)
        overloaded = [text for name, host in self.hosts.items() if line and (text := host.overload(name))]
        return "; ".join([line, *overloaded])


def slow_workers(workers: Mapping[int, WorkerTimes]) -> dict[int, str]:
    """Return which part of its steps is slow on each slow worker; empty without two workers to compare."""
    paces = scores(workers)
    if len(paces) < 2:
        return {}
    fastest = max(paces, key=lambda worker: paces[worker])
    fast = workers[fastest]
    return {
        worker: _slow_part(workers[worker], fast, fastest)
        for worker, score in paces.items()
        if score < SLOW
        and (workers[worker].pace - fast.pace) * workers[worker].replicas >= _LEAST * workers[worker].steps
    }


def _slow_part(slow: WorkerTimes, fast: WorkerTimes, fastest: int) -> str:
    def per_replica(times: WorkerTimes, part: str) -> float:
        return 1000 * times.parts[part] / times.replicas

    part = max(_OWN_PARTS, key=lambda part: per_replica(slow, part) - per_replica(fast, part))
    name = "Keras's loop and callbacks" if part == "other" else part
    behind, ahead = per_replica(slow, part), per_replica(fast, part)
    return f"slow {name}: {behind:.3g} ms per replica, {ahead:.3g} ms on worker {fastest}"


def tell_of_slow(worker: int, score: float, what: str) -> str:
    """Return a line such as `worker 1 is slow (0.42): slow input: ...`."""
    return f"worker {worker} is slow ({score:.2f}): {what}"


def describe(call: str, workers: Mapping[int, WorkerTimes]) -> str:
    """Return a line such as `fit 1: 2,304 examples/s with 2 workers; input 61 %, ...`, with advice.

    The time is that of the call without its first step, with nested calls such as a validation. The line is
    empty if the steps of the slowest worker took less than a second. With parameter servers, the rate is that
    of the chief, which takes all steps, or for which all scheduled functions are completed, and the parts are
    those of the workers, for which it waits.
    """
    longest = max(workers.values(), key=lambda times: times.seconds, default=WorkerTimes())
    if longest.seconds < SHORTEST or not longest.steps:
        return ""
    computing, chiefs = _by_role(workers)
    if chiefs:
        longest = next(iter(chiefs.values()))
    unit = "functions" if call.startswith("functions") else "examples" if longest.examples else "steps"
    rate = (longest.examples if unit == "examples" else longest.steps) / longest.seconds
    with_ = ("a chief and " if chiefs else "") + count(len(computing), "worker")
    time_shares = shares(computing.values())
    listed = [
        f"{part} {percent(share)}"
        for part, share in {**time_shares, **_shares_of_calls(computing.values())}.items()
        if part != "nested" and (part in _ALWAYS or share >= 0.005)
    ]
    listed += [
        f"{method} {percent(share)} of the chief's time"
        for method, share in _shares_of_calls(chiefs.values()).items()
        if share >= 0.005
    ]
    advice = advise(workers)
    text = f"{call}: {rate:,.0f} {unit}/s with {with_}; {', '.join(listed)}"
    return text + (f"; {advice}" if advice else "")


def percent(share: float) -> str:
    """Return a share between 0 and 1 such as `61 %`."""
    return f"{100 * share:.0f} %"


def _by_role(workers: Mapping[int, WorkerTimes]) -> tuple[dict[int, WorkerTimes], dict[int, WorkerTimes]]:
    """Return the workers that execute replicas, and the chief of a job with parameter servers."""
    computing = {worker: times for worker, times in workers.items() if times.replicas}
    if not computing:
        return dict(workers), {}
    return computing, {worker: times for worker, times in workers.items() if worker not in computing}


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


def advise(workers: Mapping[int, WorkerTimes], *, names_slow: bool = True) -> str:
    """Return what to change where something takes notable time; empty if computing does, or nothing.

    Args:
        workers: their times.
        names_slow: whether to name a slow worker; if not, the text is empty where it is the first thing to
            change.
    """
    computing, chiefs = _by_role(workers)
    compiles = max(computing.values(), key=lambda times: times.compiling, default=WorkerTimes())
    if compiles.compiling > _COMPILING * compiles.seconds:
        return (
            f"{compiles.compiled:,} of {compiles.steps:,} steps had batches of new shapes, which compile: "
            f"{compiles.compiling:.0f} s; pad to a few lengths"
        )
    slow, paces, told = slow_workers(computing), scores(computing), ""
    if slow:
        worst = min(slow, key=lambda worker: paces[worker])
        told = tell_of_slow(worst, paces[worst], slow[worst]) + " (lockstep top shows why)"
        told = told if names_slow else ""
        slowest = computing[worst]
        if (1 - paces[worst]) * slowest.pace * slowest.replicas >= _EXCESS * slowest.seconds:
            return told
    time_shares = shares(computing.values())
    if not time_shares:
        return told
    if not chiefs and (advice := _advise_on_sharing(time_shares, computing)):
        return advice
    return _advise_on_part(time_shares, computing, waits_for_chief=bool(chiefs)) or told


def _advise_on_sharing(time_shares: Mapping[str, float], workers: Mapping[int, WorkerTimes]) -> str:
    """Return what to change if workers wait because of their numbers of replicas, or steps are short."""
    if len(workers) < 2:
        return ""
    owned = {worker: times.replicas / times.steps for worker, times in workers.items() if times.steps}
    most = max(owned, key=lambda worker: owned[worker])
    uneven = 1 - sum(owned.values()) / len(owned) / owned[most]
    replicas = round(sum(owned.values()))
    if min(time_shares["wait"], uneven) >= _UNEVEN:
        return (
            f"worker {most} computes {owned[most]:.0f} of {replicas} replicas, and others wait for it: let "
            "the number of replicas be a multiple of the number of workers"
        )
    busy = max(
        (times.seconds - times.parts["wait"] - times.parts["exchange"] - times.parts["nested"]) / times.steps
        for times in workers.values()
        if times.steps
    )
    if time_shares["wait"] + time_shares["exchange"] >= _SYNCHRONIZING and busy < _SHORT:
        return (
            f"steps are short ({1000 * busy:.2g} ms without waiting): use larger batches, or -n 1 "
            f"--replicas {replicas}, which computes the same bits"
        )
    return ""


def _advise_on_part(
    time_shares: Mapping[str, float], workers: Mapping[int, WorkerTimes], *, waits_for_chief: bool
) -> str:
    """Return what to change if a part takes the most time, waiting for others apart."""
    largest = max(time_shares, key=lambda part: time_shares[part] if part != "wait" else -1.0)
    waits = time_shares["wait"] > time_shares[largest]
    notable = time_shares[largest] >= (_NOTABLE if waits else _LARGE)
    if notable and largest == "nested":
        return _advise_on_calls(next(iter(_shares_of_calls(workers.values())), "a call"))
    if notable and largest in _ADVICE:
        return _ADVICE[largest].replace("most time", "most time after waiting" if waits else "most time", 1)
    if time_shares["wait"] < _LARGE or not waits:
        return ""
    if waits_for_chief:
        return "waiting for the chief takes the most time"
    if len(workers) == 1:
        return "waiting for workers that were lost, or have left, takes the most time"
    return (
        "waiting takes the most time although the workers are equally fast: other processes may use "
        "their cores, or workers were lost"
    )


def _advise_on_calls(method: str) -> str:
    """Return what to change if calls of this method within a call take the most time."""
    if method == "validation":
        return "validation takes the most time: validate on less data, or less often (validation_freq)"
    return f"{method} in a callback takes the most time: call it at the end of epochs, or on less data"
