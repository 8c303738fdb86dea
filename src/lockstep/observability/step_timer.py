"""Measures the parts of a step, while `StepEnded` has a subscriber."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from lockstep.observability.bus import Bus
from lockstep.observability.measurements import STEP_PARTS, RestEnded, StepEnded

Part = Literal["input", "compute", "wait", "exchange", "update", "other"]


class StepTimer:
    """Measures the steps of one thread, and publishes each as a `StepEnded`.

    A lap is the time since the previous lap. It counts for one part of the step, except for the time spent
    waiting for others, which counts for `wait`. Without a subscriber, each method returns at once and does
    not read a clock.

    Args:
        events: the bus that publishes steps.
        waited: returns the seconds that this worker has waited for others so far.
        now: reads a clock, in seconds.
    """

    def __init__(
        self, events: Bus, waited: Callable[[], float], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._events = events
        self._waited = waited
        self._now = now
        self._call: str | None = None
        self._parts: dict[str, float] = {}
        self._calls: dict[str, float] = {}
        self._start = 0.0
        self._last = 0.0
        self._last_waited = 0.0
        self._charged = 0.0
        self._paused = 0.0

    @property
    def running(self) -> bool:
        """Whether a call's steps are measured."""
        return self._call is not None

    def begin(self, call: str) -> None:
        """Note that a step of `call` begins: its first, or one after the end of another."""
        if not self._events.has_subscribers(StepEnded):
            self.stop()
        elif self._call == call:
            self.lap("input")
        else:
            self._call = call
            self._last_waited = self._waited()
            self._reset(self._now())

    def stop(self) -> None:
        """Note that the following time does not belong to a step, until `begin`."""
        self._call = None

    @contextmanager
    def within(self, method: str) -> Iterator[None]:
        """Measure a call of `method` for the block; its whole time counts for the call around it, if any."""
        self.lap("other")
        outer = self._call, self._parts, self._calls, self._start, self._last, self._paused
        self._call = None
        try:
            yield
        finally:
            self._call, self._parts, self._calls, self._start, self._last, self._paused = outer
            if self._call is not None:
                now = self._now()
                seconds = now - self._last
                self._parts["nested"] += seconds
                self._calls[method] = self._calls.get(method, 0.0) + seconds
                self._last, self._last_waited, self._charged = now, self._waited(), 0.0

    def end_call(self) -> None:
        """Publish the time since the call's last step, because no further step follows."""
        if self._call is not None:
            self.lap("other")
            self._events.publish(
                RestEnded(call=self._call, calls=self._calls, paused=self._paused, **self._parts)
            )
            self._call = None

    def lap(self, part: Part) -> None:
        """Count the time since the previous lap for `part`."""
        if self._call is None:
            return
        now, waited = self._now(), self._waited()
        seconds = now - self._last
        self._last = now
        if waited != self._last_waited:
            waiting = waited - self._last_waited
            self._last_waited = waited
            self._parts["wait"] += waiting
            seconds -= waiting
        if self._charged:
            seconds -= self._charged
            self._charged = 0.0
        self._parts[part] += seconds

    def note_pause(self, seconds: float) -> None:
        """Note that training has paused for the last `seconds`, which also count for parts of the step."""
        self._paused += seconds

    def charging(self, part: Part, act: Callable[[], Any]) -> Callable[[], Any]:
        """Return `act`, wrapped so that its time counts for `part` and not for the enclosing lap."""
        if self._call is None:
            return act

        def timed() -> Any:
            begun = self._now()
            result = act()
            seconds = self._now() - begun
            self._parts[part] += seconds
            self._charged += seconds
            return result

        return timed

    def end(
        self,
        number: int,
        logs: Mapping[str, Any] | None = None,
        *,
        trained: int = 0,
        examples: int = 0,
        replicas: int = 0,
        compiled: bool = False,
        staleness: int | None = None,
    ) -> None:
        """Publish step `number` of the call; the time since the previous lap counts for `other`.

        Args:
            number: the number of the step in its call, from 1.
            logs: the results of the step.
            trained: number of training steps of the job so far.
            examples: number of examples of the global batch.
            replicas: number of replicas that this worker executes.
            compiled: whether the backend has compiled the step.
            staleness: the staleness of the step, with parameter servers.
        """
        if self._call is None:
            return
        self.lap("other")
        self._events.publish(
            StepEnded(
                call=self._call,
                number=number,
                trained=trained,
                examples=examples,
                replicas=replicas,
                seconds=self._last - self._start,
                logs=logs,
                calls=self._calls,
                compiled=compiled,
                staleness=staleness,
                paused=self._paused,
                **self._parts,
            )
        )
        self._reset(self._last)

    def _reset(self, now: float) -> None:
        self._parts, self._calls = dict.fromkeys(STEP_PARTS, 0.0), {}
        self._start = self._last = now
        self._charged = self._paused = 0.0
