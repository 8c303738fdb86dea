"""The ledger of a step: all time of a thread is charged to one part, the innermost one in progress."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INPUT = "input: the batch, and the rows of the replica"
COMPUTING = "forward and backward"
CHECKING = "hash of the batch"
WAITING_TO_ENTER = "wait until all members have entered the reduce"
PUBLISHING = "publish"
WAITING_TO_SUM = "wait until all members have published"
SUMMING = "sum"
WAITING_TO_RETURN = "wait until all members have summed"
APPLYING = "update"
LOCKSTEP = "Lockstep's own Python"
CALLBACKS = "callbacks"
KERAS = "Keras's own loop, and the begin and end of an epoch"

PARTS = (
    INPUT,
    COMPUTING,
    CHECKING,
    WAITING_TO_ENTER,
    PUBLISHING,
    WAITING_TO_SUM,
    SUMMING,
    WAITING_TO_RETURN,
    APPLYING,
    LOCKSTEP,
    CALLBACKS,
    KERAS,
)
"""The parts of a step in their order."""


class Ledger:
    """Adds up the seconds of each part; time outside all parts is charged to `rest`."""

    def __init__(self, rest: str) -> None:
        self._parts = [rest]
        self._since = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Discard all charges."""
        self.seconds.clear()
        self._since = time.perf_counter()

    def charge(self) -> None:
        """Charge the time up to now to the innermost part."""
        now = time.perf_counter()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Charge the time of the block to `part`."""
        self.charge()
        self._parts.append(part)
        try:
            yield
        finally:
            self.charge()
            self._parts.pop()

    @property
    def innermost(self) -> str:
        """The part to which time is charged now."""
        return self._parts[-1]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`; the time of its calls is charged to `part`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.within(part):
                return function(*args, **kwargs)

        return timed

    def drawn(self, part: str, values: Iterator[Any]) -> Iterator[Any]:
        """Yield `values`; the time to produce them is charged to `part`."""
        end = object()
        while True:
            with self.within(part):
                value = next(values, end)
            if value is end:
                return
            yield value
