"""The causes that slow a run in its last seconds, or in its last call that trains. Pure."""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from lockstep.observability.growth import Columns, GrowingMap
from lockstep.observability.host_loads import HostLoads, WorkerLoads
from lockstep.observability.measurements import STEP_PARTS
from lockstep.observability.run_state import RunState, WorkerInfo
from lockstep.observability.slowness import SHORTEST, advise
from lockstep.observability.step_parts import CallTimes, WorkerTimes
from lockstep.observability.step_recorder import trains

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_WINDOW = 10.0
"""Seconds over which rates are averaged, at least."""
_INTERVALS = 4 / 1800
"""The same as a share of the run's age, since measurements become rarer."""


def window(run: RunState, now: float) -> float:
    """Return the seconds over which the rates of a run that trains are averaged."""
    return max(_WINDOW, (now - run.began) * _INTERVALS)


def advice(run: RunState, times: CallTimes) -> tuple[str, ...]:
    """Return the causes that slow a run, one line each, or an empty tuple if no cause is notable.

    Args:
        run: the run.
        times: its `training_times`.
    """
    trained = any(trains(call.name) for call in run.calls)
    if run.job.get("replicas") == 1 and trained and not times.workers:
        return (
            "Keras itself takes the steps of one replica, so they are not measured: with --replicas 2 they "
            "are (with different bits from those of one replica)",
        )
    return advise(times)


def training_times(run: RunState, *, live: bool) -> CallTimes:
    """Return the times of the members of a run, and the load of their hosts.

    Args:
        run: the run.
        live: whether the last seconds count, if there are steps in them. Otherwise, the last call that took a
            second or more counts, or all calls that train if there is none.
    """
    calls = [index for index, call in enumerate(run.calls) if trains(call.name)]
    if live and calls:
        since = run.last - window(run, run.last)
        times = _times(run, "", calls, since)
        if _seconds(times) >= SHORTEST:
            return times
    seconds = _seconds_by_call(run)
    long_calls = [index for index in calls if seconds[index] >= SHORTEST]
    return (
        _times(run, run.calls[long_calls[-1]].name, long_calls[-1:]) if long_calls else _times(run, "", calls)
    )


def _seconds_by_call(run: RunState) -> "npt.NDArray[np.float64]":
    """Return the seconds of the slowest member in each call, without first steps, which compile."""
    import numpy as np

    seconds = np.zeros(len(run.calls))
    for worker in run.members:
        info = run.workers.find(worker)
        if info is not None and len(info.steps):
            steps = info.steps
            first = (steps.column("count") == 1) & (steps.column("number") == 1)
            taken = np.where(first, 0.0, sum(steps.column(part) for part in STEP_PARTS))
            calls = steps.column("call").astype(int)
            seconds = np.maximum(seconds, np.bincount(calls, taken, len(run.calls)))
    return seconds


def _seconds(times: CallTimes) -> float:
    return max((each.seconds for each in times.workers.values()), default=0.0)


def _times(run: RunState, name: str, calls: Collection[int], since: float = -math.inf) -> CallTimes:
    """Return the times of some calls, after a time, or with the load since their first measurement."""
    workers: GrowingMap[WorkerTimes] = GrowingMap()
    began = math.inf
    for worker in run.members:
        info = run.workers.find(worker)
        if info is None or not len(info.steps):
            continue
        chosen = steps_of(info.steps, calls)
        if chosen.any():
            began = min(began, float(info.steps.column("time")[chosen][0]))
        times = worker_times(info, chosen, since)
        if times.steps:
            workers = workers.plus(worker, times)
    ended = max((run.calls[index].ended or math.inf for index in calls), default=math.inf)
    counts_first = since > began
    hosts = {
        host: _loads(run, host, max(since, began), ended, counts_first=counts_first) for host in run.hosts
    }
    return CallTimes(call=name, workers=workers, hosts=hosts, chief=next(iter(run.members), None))


def steps_of(steps: Columns, calls: Collection[int]) -> "npt.NDArray[np.bool_]":
    """Return which measurements of steps are those of some calls."""
    import numpy as np

    chosen: npt.NDArray[np.bool_] = np.isin(steps.column("call"), list(calls))
    return chosen


def worker_times(info: WorkerInfo, chosen: "npt.NDArray[np.bool_]", since: float) -> WorkerTimes:
    """Return the sums of some measurements of a worker after a time, without first steps, which compile.

    Args:
        info: the worker, which has steps.
        chosen: which measurements to sum, shape (number of measurements,).
        since: seconds since 1970.
    """
    steps = info.steps
    counts, numbers = steps.column("count"), steps.column("number")
    chosen = chosen & ~((counts == 1) & (numbers == 1))
    shapes = int(steps.column("compiled")[chosen].sum())
    chosen &= steps.column("time") > since
    parts = {part: float(steps.column(part)[chosen].sum()) for part in STEP_PARTS}
    # The seconds by method are known only for the whole run.
    scale = parts["nested"] / (sum(info.nested.values()) or 1.0)
    return WorkerTimes(
        steps=int(counts[chosen].sum()),
        examples=int(steps.column("examples")[chosen].sum()),
        replicas=int((steps.column("replicas") * counts)[chosen].sum()),
        parts=parts,
        calls={method: seconds * scale for method, seconds in info.nested.items()},
        compiled=int(steps.column("compiled")[chosen].sum()),
        compiling=float(steps.column("compiling")[chosen].sum()),
        shapes=shapes,
    )


def _loads(run: RunState, host: str, since: float, until: float, *, counts_first: bool) -> HostLoads:
    """Return the load of a host between two times.

    The first measurement also covers an earlier time, and counts only if `counts_first`.
    """
    info = run.hosts[host]
    times = info.load.column("time")
    chosen = (times >= since) & (times <= until)
    if not counts_first and chosen.any():
        since = float(times[chosen][0])
        chosen = (times > since) & (times <= until)
    workers = {}
    for worker, worker_run in run.workers.items():
        if worker_run.host == host and len(worker_run.load):
            load, times = worker_run.load, worker_run.load.column("time")
            during = ((times >= since) if counts_first else (times > since)) & (times <= until)
            workers[worker] = WorkerLoads(
                count=int(during.sum()),
                cores=float(load.column("cores")[during].sum()),
                delayed=float(load.column("delayed")[during].sum()),
                faults=float(load.column("faults")[during].sum()),
                throttled=int(load.column("throttled")[during].sum()),
                gpus=worker_run.throttled,
            )
    return HostLoads(
        cores=info.measured.cores,
        count=int(chosen.sum()),
        busy=float(info.load.column("busy")[chosen].sum()),
        swapping=float(info.load.column("swapping")[chosen].sum()),
        stopped=float(info.load.column("throttled")[chosen].sum()),
        workers=workers,
    )
