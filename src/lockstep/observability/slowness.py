"""Finds the causes that slow a call, from its times and the load of its hosts, and gives advice. Pure.

All judgements come from `advise`, so the line at the end of a call, `lockstep top`, the page and the report
agree. It names up to three causes, the costliest first. A cause that explains another one replaces it: if a
worker is slow, the others wait, and only the slow worker is named.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lockstep.observability.events import HostStrain
from lockstep.observability.host_loads import HostLoads, WorkerLoads
from lockstep.observability.measurements import LoadMeasured
from lockstep.observability.step_parts import CallTimes, WorkerTimes, scores, shares
from lockstep.system.prose import count, name_workers, percent

SHORTEST = 1.0
"""Seconds of measured steps below which nothing is said about a call."""
SLOW = 0.8
"""The score below which a worker counts as slow."""
_MOST = 3
"""The number of causes that are named."""
_LEAST = 0.002
"""Seconds per step by which a slow worker is slower than the fastest one. Less comes and goes with the time
slices of the system, which take up to 3 ms, and would blame another worker in each run."""
_EXPLAINS = 0.15
"""The share in its time by which a slow worker is slower, from which it explains that others wait, and what
takes the most time of all workers together."""
_LARGE = 0.4
_NOTABLE = 0.25
"""The shares of the largest part of steps from which it is worth a word; the second one if workers wait
longer than it takes. Reading is worth a word from the second one on, even if computing takes longer, unless
steps are short. Calls within the call do not count for these shares."""
_WORTH = 0.1
"""The share of a part in all of the time below which it is not worth a word."""
_NESTED = 0.3
"""The share of a method of nested calls from which it is worth a word."""
_COMPILING = 0.2
"""The share of compiling in the time of a worker from which it is worth a word."""
_FEW_SHAPES = 2
"""So many steps may compile in a call: one for the smaller last batch of an epoch, another one for what a
worker computes after a change of membership."""
_SHORT = 0.003
"""Seconds of a step without waiting below which waiting has no other cause than that steps are short."""
_SYNCHRONIZING = 0.2
"""The share of waiting and exchange from which short steps are worth a word."""
_SMALL = 8
"""The examples per replica up to which a batch may be too small."""
_SMALL_STEP = 0.05
"""Seconds of a step without waiting up to which a batch may be too small."""
_OVERHEAD = 0.3
"""The share of all but reading and computing in steps from which a small batch is worth a word."""
_UNEVEN = 0.15
"""The share of waiting from which uneven numbers of replicas are worth a word, if they cause that much."""
_SAME_STEPS = 0.9
"""The share of the steps of the others that a worker has taken, if the membership has not changed."""
_DELAYED = 0.2
"""Seconds per second that a thread waits for a core, for each core in use."""
_OTHERS = 0.5
"""The cores in use by other processes from which they are worth a word, if workers wait for cores."""
_FULL = 0.9
"""The share of the cores in use from which a host counts as busy."""
_FAULTS = 10.0
"""Page faults per second that read from the disk."""
_STOPPED = 0.1
"""Seconds per second in which a CPU quota stops processes."""
_MORE = 1.5
"""A cause must be so many times stronger than on the fastest worker."""
_SAVES = 3.0
"""So many times longer callbacks must take than on the fastest worker to be the cause by what they save."""
_THROTTLED = 0.5
"""The share of the measurements in which a GPU has a lowered clock."""
_OFTEN = 0.1
"""The share of the measurements of a run in which a host is overloaded or throttled, from which that is worth
a word."""
_LEAST_MEASURED = 150
"""The number of measurements from which their share is worth a word: those of five minutes, or more."""
_MIB = 2**20
_OWN_PARTS = ("input", "compute", "update", "other")
"""The parts in which a worker can be slow."""
_ALWAYS = frozenset({"input", "compute", "wait", "exchange", "update"})
"""The parts that a line lists even if they take no time."""

_REMEDIES = {
    "input": "reading takes {share} of the time: cache or prefetch the data, or do less work per example "
    "(see 'input' in the documentation)",
    "exchange": "the exchange takes {share} of the time: use larger batches",
    "update": "the update takes {share} of the time, and every worker applies it: use larger batches",
    "other": "callbacks and the loop itself take {share} of the time: do less there, or use larger batches",
}


class _Cause(NamedTuple):
    """A cause that slows a call: the approximate share of the time that it costs, and a remedy."""

    cost: float
    text: str


def advise(call: CallTimes) -> tuple[str, ...]:
    """Return the causes that slow a call notably, with advice, the costliest first."""
    workers = call.workers
    if max((times.seconds for times in workers.values()), default=0.0) < SHORTEST:
        return ()
    computing, chiefs = _by_role(workers)
    time_shares, slow = shares(computing.values()), slow_workers(call)
    if not time_shares:
        return ()
    compiling = _new_shapes(computing)
    worst = _slowest(computing, slow)
    uneven = None if chiefs else _uneven_replicas(computing)
    short = None if chiefs else _short_steps(time_shares, computing)
    stands_out = worst is not None and worst.cost >= _EXPLAINS
    others = [times for worker, times in computing.items() if not (stands_out and worker in slow)]
    parts = _large_parts(shares(others), short=short is not None)
    hosts = [cause for name, host in call.hosts.items() if (cause := _overload(name, host, slow))]
    causes = [cause for cause in (compiling, worst, uneven, short) if cause is not None]
    causes += [*parts, *hosts, *_nested_calls(computing.values())]
    explained = any((compiling, uneven, short, parts, hosts, stands_out))
    if not explained and (waiting := _waiting(time_shares, len(computing), waits_for_chief=bool(chiefs))):
        causes.append(waiting)
    causes.sort(key=lambda cause: -cause.cost)
    return tuple(cause.text for cause in causes[:_MOST])


def describe(call: CallTimes) -> str:
    """Return a line such as `fit 1: 2,304 examples/s with 2 workers; input 61 %, ...`, with advice.

    The time is that of the call without its first step, but with nested calls such as a validation. The line
    is empty if the steps of the slowest worker took less than a second. With parameter servers, the chief
    takes all steps, or lets workers complete all scheduled functions, so the rate is the chief's. The parts
    are those of the workers, for which the chief waits.
    """
    workers = call.workers
    longest = max(workers.values(), key=lambda times: times.seconds, default=WorkerTimes())
    if longest.seconds < SHORTEST or not longest.steps:
        return ""
    computing, chiefs = _by_role(workers)
    if chiefs:
        longest = next(iter(chiefs.values()))
    unit = "functions" if call.call.startswith("functions") else "examples" if longest.examples else "steps"
    rate = (longest.examples if unit == "examples" else longest.steps) / longest.seconds
    with_ = ("a chief and " if chiefs else "") + count(len(computing), "worker")
    listed = [
        f"{part} {percent(share)}"
        for part, share in shares_of_time(call).items()
        if part in _ALWAYS or share >= 0.005
    ]
    listed += [
        f"{method} {percent(share)} of the chief's time"
        for method, share in _shares_of_calls(chiefs.values()).items()
        if share >= 0.005
    ]
    return "; ".join((f"{call.call}: {rate:,.0f} {unit}/s with {with_}; {', '.join(listed)}", *advise(call)))


def shares_of_time(call: CallTimes) -> dict[str, float]:
    """Return the share of each part of steps, and of each method of nested calls, in the time of a call."""
    computing, _ = _by_role(call.workers)
    parts = {part: share for part, share in shares(computing.values()).items() if part != "nested"}
    return {**parts, **_shares_of_calls(computing.values())}


def _by_role(workers: Mapping[int, WorkerTimes]) -> tuple[dict[int, WorkerTimes], dict[int, WorkerTimes]]:
    """Return the workers that execute replicas, and the chief of a job with parameter servers."""
    computing = {worker: times for worker, times in workers.items() if times.replicas}
    if not computing:
        return dict(workers), {}
    return computing, {worker: times for worker, times in workers.items() if worker not in computing}


# Slow workers.


def slow_workers(call: CallTimes) -> dict[int, str]:
    """Return each slow worker's slow part, with the reason; empty without two workers to compare."""
    workers, _ = _by_role(call.workers)
    paces = scores(workers)
    if len(paces) < 2:
        return {}
    fastest = max(paces, key=lambda worker: paces[worker])
    fast = workers[fastest]
    return {
        worker: _explained(call, worker, fastest)
        for worker, score in paces.items()
        if score < SLOW
        and workers[worker].seconds >= SHORTEST
        and (workers[worker].pace - fast.pace) * workers[worker].replicas >= _LEAST * workers[worker].steps
    }


def _explained(call: CallTimes, worker: int, fastest: int) -> str:
    """Return the slow part of a slow worker, with the reason, if that is known."""
    slow, fast = call.workers[worker], call.workers[fastest]

    def per_replica(times: WorkerTimes, part: str) -> float:
        seconds = times.parts[part] - (times.compiling if part == "compute" else 0.0)
        return 1000 * seconds / times.replicas

    part = max(_OWN_PARTS, key=lambda part: per_replica(slow, part) - per_replica(fast, part))
    name = "callbacks and loop" if part == "other" else part
    behind, ahead = per_replica(slow, part), per_replica(fast, part)
    why = _why(call, worker, fastest)
    # Other programs on its cores, or a slow processor, would also slow its computations.
    computes_alike = per_replica(fast, "compute") >= SLOW * per_replica(slow, "compute")
    saves = part == "other" and worker == call.chief and behind >= _SAVES * ahead
    if saves and computes_alike and (not why or _CORES_TAKEN in why):
        why = "; one worker saves the files of callbacks: save less often, or do less in callbacks"
    return f"slow {name}: {behind:.3g} ms per replica, {ahead:.3g} ms on worker {fastest}{why}"


def _why(call: CallTimes, worker: int, fastest: int) -> str:
    """Return the explanations for a slow worker, if there are any, the strongest evidence first."""
    slow, host = _loads_of(call, worker)
    fast, fast_host = _loads_of(call, fastest)
    faults = _mean(slow.faults, slow)
    if faults > max(_FAULTS, _MORE * _mean(fast.faults, fast)):
        swapping = _mean(host.swapping, host)
        swap = f", and its host swaps {swapping / _MIB:.1f} MiB/s" if swapping else ""
        return f"; it waits for the disk: {faults:.0f} page faults per second{swap}"
    if _mean(slow.throttled, slow) >= _THROTTLED > _mean(fast.throttled, fast):
        return f"; throttled: {slow.gpus}"
    stopped = _mean(host.stopped, host)
    if stopped > max(_STOPPED, _MORE * _mean(fast_host.stopped, fast_host)):
        return f"; throttled: a CPU quota stops processes of its host {stopped:.2g} s per second"
    if _is_delayed(slow) and _mean(slow.delayed, slow) > _MORE * _mean(fast.delayed, fast):
        seconds = _mean(slow.delayed, slow)
        return f"; {_CORES_TAKEN}: each second, its threads together wait {seconds:.2g} s for a core"
    return ""


_CORES_TAKEN = "other processes use its cores"


def _loads_of(call: CallTimes, worker: int) -> tuple[WorkerLoads, HostLoads]:
    """Return the load of a worker, and that of its host."""
    for host in call.hosts.values():
        if worker in host.workers:
            return host.workers[worker], host
    return WorkerLoads(), HostLoads()


def _mean(total: float, loads: WorkerLoads | HostLoads) -> float:
    return total / loads.count if loads.count > 0 else 0.0


def _slowest(workers: Mapping[int, WorkerTimes], slow: Mapping[int, str]) -> _Cause | None:
    """Return the cause that workers are slow, with the explanation for the slowest one."""
    if not slow:
        return None
    paces = scores(workers)
    worst = min(slow, key=lambda worker: paces[worker])
    times = workers[worst]
    text = f"worker {worst} is slow ({paces[worst]:.2f}): {slow[worst]}"
    if others := sorted(worker for worker in slow if worker != worst):
        text += f"; {name_workers(others)} {'is' if len(others) == 1 else 'are'} slow, too"
    return _Cause((1 - paces[worst]) * times.busy / times.seconds, text)


# Hosts.


def _is_delayed(loads: WorkerLoads) -> bool:
    """Whether the threads of a worker wait for a core for a notable time."""
    return _mean(loads.delayed, loads) > _DELAYED * max(1.0, _mean(loads.cores, loads))


def _overload(name: str, host: HostLoads, slow: Mapping[int, str]) -> _Cause | None:
    """Return the cause that other programs use the cores of a host, unless it explains slow workers there."""
    delays = [
        _mean(loads.delayed, loads)
        for worker, loads in host.workers.items()
        if _is_delayed(loads) and _CORES_TAKEN not in slow.get(worker, "")
    ]
    busy, most = _mean(host.busy, host), max(delays, default=0.0)
    used = sum(_mean(loads.cores, host) for loads in host.workers.values())
    others = busy - used
    if not most or others < _OTHERS or busy < _FULL * host.cores:
        return None
    text = (
        f"{name}: other processes use {others:.1f} of {host.cores} cores: each second, the threads of a "
        f"worker together wait up to {most:.2g} s for a core"
    )
    return _Cause(min(1.0, most), text)


def with_load(strain: HostStrain, load: LoadMeasured, throttled: Mapping[int, str]) -> HostStrain:
    """Return the strain of a host with another measurement.

    Args:
        strain: the strain before.
        load: the measurement.
        throttled: the GPUs with a lowered clock that each worker uses.
    """
    overloaded = _overload(load.host, HostLoads(load.cores, 0).plus(load, throttled), {}) is not None
    stopped = load.throttled > _STOPPED or bool(throttled)
    return HostStrain(strain.measured + 1, strain.overloaded + overloaded, strain.throttled + stopped)


def is_often(strain: HostStrain) -> bool:
    """Whether a host was overloaded or throttled often enough for a message."""
    most = max(strain.overloaded, strain.throttled)
    return strain.measured >= _LEAST_MEASURED and most >= _OFTEN * strain.measured


# Parts of steps.


def _new_shapes(workers: Mapping[int, WorkerTimes]) -> _Cause | None:
    """Return the cause that many batches have new shapes, which must be compiled."""
    times = max(workers.values(), key=lambda times: times.compiling, default=WorkerTimes())
    if times.shapes <= _FEW_SHAPES or times.compiling <= _COMPILING * times.seconds:
        return None
    text = (
        f"{times.compiled:,} of {times.steps:,} steps had batches of new shapes, and compiling them took "
        f"{times.compiling:.0f} s; pad to a few lengths"
    )
    return _Cause(times.compiling / times.seconds, text)


def _uneven_replicas(workers: Mapping[int, WorkerTimes]) -> _Cause | None:
    """Return the cause that workers wait because of their numbers of replicas."""
    owned = {worker: times.replicas / times.steps for worker, times in workers.items() if times.steps}
    # Before a change of membership, a worker has computed another number of replicas.
    changed = any(number != round(number) for number in owned.values())
    taken = [times.steps for times in workers.values()]
    if len(owned) < 2 or changed or min(taken) < _SAME_STEPS * max(taken):
        return None
    most = max(owned, key=lambda worker: owned[worker])
    uneven = 1 - sum(owned.values()) / len(owned) / owned[most]
    cost = min(shares(workers.values())["wait"], uneven)
    if cost < _UNEVEN:
        return None
    text = (
        f"worker {most} computes {owned[most]:.0f} of {sum(owned.values()):.0f} replicas, and others wait "
        "for it: use a number of replicas that is a multiple of the number of workers"
    )
    return _Cause(cost, text)


def _short_steps(time_shares: Mapping[str, float], workers: Mapping[int, WorkerTimes]) -> _Cause | None:
    """Return the cause that steps are short, so that most of their time does not depend on the batch."""
    stepping = [times for times in workers.values() if times.steps]
    if not stepping:
        return None
    busy = max(times.busy / times.steps for times in stepping)
    replicas = round(sum(times.replicas / times.steps for times in stepping))
    examples = max(times.examples / times.steps for times in stepping)
    synchronizing = time_shares["wait"] + time_shares["exchange"]
    overhead = synchronizing + time_shares["update"] + time_shares["other"]
    remedy = "use larger batches"
    if len(workers) > 1:
        remedy += f", or -n 1 --replicas {replicas}, which computes the same bits"
    small = 0 < examples <= _SMALL * replicas and busy < _SMALL_STEP
    if small and overhead >= _OVERHEAD * (1 - time_shares["nested"] - time_shares["input"]):
        text = f"a step has {_examples(examples)}, and takes {1000 * busy:.2g} ms without waiting: {remedy}"
        return _Cause(overhead, text)
    if len(workers) > 1 and synchronizing >= _SYNCHRONIZING and busy < _SHORT:
        return _Cause(synchronizing, f"steps are short ({1000 * busy:.2g} ms without waiting): {remedy}")
    return None


def _examples(number: float) -> str:
    return "one example" if round(number) == 1 else f"{number:.0f} examples"


def _large_parts(time_shares: Mapping[str, float], *, short: bool) -> list[_Cause]:
    """Return the causes that reading, or the largest part except waiting, takes much of the time of steps.

    Args:
        time_shares: the share of each part.
        short: whether steps are short, so that parts that do not depend on the batch are explained.
    """
    if not time_shares:
        return []
    largest = max(
        (part for part in time_shares if part not in ("wait", "nested")), key=lambda part: time_shares[part]
    )
    causes = []
    for part, remedy in _REMEDIES.items():
        share = time_shares[part]
        notable = time_shares["wait"] > share or (part == "input" and not short)
        least = (_NOTABLE if notable else _LARGE) * (1 - time_shares["nested"])
        explained = short and part != "input"
        if (part in (largest, "input")) and not explained and share >= max(_WORTH, least):
            causes.append(_Cause(share, remedy.format(share=percent(share))))
    return causes


def _nested_calls(workers: Iterable[WorkerTimes]) -> list[_Cause]:
    """Return the cause that calls within the call take much time."""
    causes = []
    for method, share in _shares_of_calls(workers).items():
        if share < _NESTED:
            continue
        who, remedy = f"{method} in a callback", "call it at the end of epochs, or on less data"
        if method == "validation":
            who, remedy = method, "validate on less data, or less often (validation_freq)"
        causes.append(_Cause(share, f"{who} takes {percent(share)} of the time: {remedy}"))
    return causes


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


def _waiting(time_shares: Mapping[str, float], workers: int, *, waits_for_chief: bool) -> _Cause | None:
    """Return the cause that workers wait for an unexplained reason."""
    share = time_shares["wait"]
    largest = max(time_shares[part] for part in time_shares if part != "nested")
    if share < max(_WORTH, _LARGE * (1 - time_shares["nested"]), largest):
        return None
    takes = f"takes {percent(share)} of the time"
    if waits_for_chief:
        text = f"waiting for the chief {takes}"
    elif workers == 1:
        text = f"waiting for workers that were lost, or have left, {takes}"
    else:
        text = (
            f"waiting {takes}, although no worker is slow: other processes may use the cores, or workers "
            "were lost"
        )
    return _Cause(share, text)
