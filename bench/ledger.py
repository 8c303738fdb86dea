"""Where a thread's time goes: every moment is charged to one part, the innermost that has begun."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Ledger:
    """Adds up the seconds of each part; what is nobody's own is charged to `rest`."""

    def __init__(self, rest: str) -> None:
        self._parts = [rest]
        self._since = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Forget what was charged."""
        self.seconds.clear()
        self._since = time.perf_counter()

    def charge(self) -> None:
        """Charge the part that has begun last for the time up to now."""
        now = time.perf_counter()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Charge `part` for the block."""
        self.charge()
        self._parts.append(part)
        try:
            yield
        finally:
            self.charge()
            self._parts.pop()

    @property
    def innermost(self) -> str:
        """What would be charged now."""
        return self._parts[-1]

    def turn(self, part: str, into: str) -> None:
        """From now on charge `into`, if `part` is what would be charged."""
        if self.innermost == part:
            self.charge()
            self._parts[-1] = into

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, for which `part` is charged."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.within(part):
                return function(*args, **kwargs)

        return timed

    def drawn(self, part: str, values: Iterator[Any]) -> Iterator[Any]:
        """Yield `values`; `part` is charged for what it takes to have them."""
        end = object()
        while True:
            with self.within(part):
                value = next(values, end)
            if value is end:
                return
            yield value
