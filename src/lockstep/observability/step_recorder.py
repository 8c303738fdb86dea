"""Records the steps of a worker: sums of their parts, some single steps, and the chief's metrics.

It makes one `StepsMeasured` from many `StepEnded`, so the rate of measurements does not depend on the rate of
steps: at most one per second in the first hour of the process, later one per 1/3600 of its age. A run of a
month has about 20,000 per worker.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from operator import add
from typing import Any

from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.events import CallEnded
from lockstep.observability.measurements import (
    STEP_PARTS,
    MetricsRecorded,
    RestEnded,
    StepEnded,
    StepsMeasured,
)
from lockstep.system.clock import Clock

_EVERY = 1.0
_SHARE = 1 / 3600
_ALL_SINGLES = 1024
_WINDOW = 16
_MOST_SINGLES = 512
"""The most single steps in one measurement: its message must fit in a packet."""
_SHORTEST_REST = 0.01
"""Seconds after the last step of a call below which they get no measurement of their own."""
_MICRO = 1e6
_METHODS = frozenset({"train_on_batch", "test_on_batch"})
"""The names of calls of one step, which share a measurement."""


class StepRecorder:
    """Subscribes to the steps of a bus, and publishes measurements on it.

    Args:
        events: the bus.
        clock: measures intervals.
        is_chief: whether this worker is the chief now, which also records metrics.
    """

    def __init__(self, events: Bus, clock: Clock, is_chief: Callable[[], bool]) -> None:
        self._events = events
        self._clock = clock
        self._is_chief = is_chief
        self._born = self._due = clock.now()
        self._calls: dict[str, _Sums] = {}
        self._sums: _Sums | None = None
        self._logged: StepEnded | None = None
        events.subscribe(self._add, StepEnded)
        events.subscribe(self._add_rest, RestEnded)
        events.subscribe(self._end_call, CallEnded)

    def _add(self, published: PublishedEvent) -> None:
        step = published.event
        assert isinstance(step, StepEnded)
        sums, first = self._sums, False
        if sums is None or sums.last.call != step.call:
            call = _without_number(step.call)
            first = call not in self._calls
            sums = self._sums = self._calls.setdefault(call, _Sums(call, step))
        sums.add(step, published.time)
        now = self._clock.now()
        if first or now >= self._due or len(sums.singles) == _MOST_SINGLES:
            self._due = now + max(_EVERY, (now - self._born) * _SHARE)
            self.flush()
            self._record_metrics(step)
        if step.logs and sums.trains:
            self._logged = step

    def _add_rest(self, published: PublishedEvent) -> None:
        rest = published.event
        assert isinstance(rest, RestEnded)
        if (sums := self._calls.get(rest.call)) is not None:
            sums.add_rest(rest, published.time)

    def _end_call(self, published: PublishedEvent) -> None:
        self.flush()
        self._calls = {call: sums for call, sums in self._calls.items() if call in _METHODS}
        self._sums = None

    def flush(self) -> None:
        """Publish the steps since the last measurement."""
        for sums in self._calls.values():
            if sums.count or sums.rest >= _SHORTEST_REST:
                self._events.publish(sums.taken())

    def _record_metrics(self, step: StepEnded) -> None:
        """Record the metrics of an earlier step of the call: the backend may still compute those of this one.

        That is the previous one, or the last one that has any.
        """
        logged = self._logged
        if logged is None or logged.call != step.call or step.number == 1 or not self._is_chief():
            return
        values = finite_values(logged.logs or {})
        self._events.publish(
            MetricsRecorded(call=step.call, epoch=None, trained=logged.trained, values=values)
        )


class _Sums:
    """Sums over steps of one call since the last measurement."""

    def __init__(self, call: str, first: StepEnded) -> None:
        self._call = call
        self.last = first
        self.trains = trains(call)
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self.rest = 0.0
        self.singles: list[tuple[int, ...]] = []
        self._trained: list[int] = []
        self._began = 0.0
        self._examples = 0
        self._parts = [0.0] * len(STEP_PARTS)
        self._within: dict[str, float] = {}
        self._compiled = 0
        self._compiling = 0.0
        self._staleness: list[int] = []
        self._paused = 0.0

    def add(self, step: StepEnded, ended: float) -> None:
        """Add a step that ended at this time, in seconds since 1970."""
        if not self.count:
            self._began = ended - step.seconds
        self.count += 1
        self.last = step
        self._examples += step.examples
        parts = self._sum(step)
        if step.compiled:
            self._compiled += 1
            self._compiling += step.compute
        if step.staleness is not None:
            self._staleness.append(step.staleness)
        # With parameter servers, each worker takes some of the steps of the job. All record the same single
        # steps.
        step_number = step.number if step.staleness is None else step.trained
        if self.trains and is_single(step_number):
            start = ended - step.seconds - self._began
            self.singles.append((step.number, *(round(part * _MICRO) for part in (start, *parts))))
            self._trained.append(step.trained)

    def add_rest(self, rest: RestEnded, ended: float) -> None:
        """Add the time after the last step of the call, which ends at this time."""
        self.rest = sum(self._sum(rest))
        if not self.count:
            self._began = ended - self.rest

    def _sum(self, added: StepEnded | RestEnded) -> tuple[float, ...]:
        parts = (
            *(added.input, added.compute, added.wait, added.exchange, added.update, added.other),
            added.nested,
        )
        self._parts = list(map(add, self._parts, parts))
        self._paused += added.paused
        for method, seconds in added.calls.items():
            self._within[method] = self._within.get(method, 0.0) + seconds
        return parts

    def _consecutive(self) -> bool:
        """Whether the training steps follow from the numbers of the single steps in their call."""
        before = self.last.trained - self.last.number
        return all(
            trained - single[0] == before for trained, single in zip(self._trained, self.singles, strict=True)
        )

    def taken(self) -> StepsMeasured:
        """Return the measurement of the steps, and begin the next one."""
        last = self.last
        parts = dict(zip(STEP_PARTS, (round(seconds, 6) for seconds in self._parts), strict=True))
        measured = StepsMeasured(
            call=self._call,
            number=last.number,
            trained=last.trained,
            count=self.count,
            began=round(self._began, 6),
            examples=self._examples,
            replicas=last.replicas,
            seconds=round(sum(self._parts), 6),
            singles=tuple(self.singles),
            steps=() if self._consecutive() else tuple(self._trained),
            calls={method: round(seconds, 6) for method, seconds in self._within.items()},
            compiled=self._compiled,
            compiling=round(self._compiling, 6),
            staleness=sum(self._staleness) if self._staleness else None,
            largest_staleness=max(self._staleness, default=None),
            paused=round(self._paused, 6),
            **parts,
        )
        self._clear()
        return measured


def is_single(number: int) -> bool:
    """Whether the step with this number, from 1, is recorded by itself."""
    before = number - 1
    return before < _ALL_SINGLES or (before // _WINDOW) % (1 << (before // _ALL_SINGLES).bit_length()) == 0


def finite_values(logs: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the single numbers in Keras's logs, which may be arrays. One that is not finite is None."""
    values: dict[str, float | None] = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            number = float(value)
            values[str(name)] = number if math.isfinite(number) else None
    return values


def trains(call: str) -> bool:
    """Whether the steps of a call are training steps."""
    return call.startswith(("fit", "train_on_batch", "steps", "functions"))


def serves(call: str) -> bool:
    """Whether the steps of a call are the updates of a parameter server."""
    return call.startswith("updates")


def _without_number(call: str) -> str:
    """Return a name that all validations of a `fit` share: there may be thousands."""
    inner, within, outer = call.partition(" within ")
    return f"{inner.partition(' ')[0]}{within}{outer}" if within else call
