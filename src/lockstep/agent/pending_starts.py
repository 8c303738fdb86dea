"""Workers that are to be started, until nobody has to wait for that any more."""

import selectors
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.agent.starter import Starter

Start = Callable[[int, int | None], None]
Fail = Callable[[int, int | None, OSError], None]
Watch = Callable[[int, bool, int, Callable[[], object]], None]


@dataclass
class PendingStarts:
    """Starts workers in the order in which they were asked for, each as soon as the starter is ready.

    Attributes:
        starter: brings them to life.
        start: starts one: its id, and the descriptor of the control segment, if it does not join.
        fail: hears that one cannot be started.
        watch: has a function called when a descriptor becomes readable, or no more.
    """

    starter: Starter
    start: Start
    fail: Fail
    watch: Watch
    _asked: dict[int, int | None] = field(default_factory=dict)
    _watched: int | None = None

    def ask(self, worker: int, segment: int | None) -> None:
        """Have a worker started by `serve`."""
        self._asked[worker] = segment

    def cancel(self, worker: int) -> bool:
        """Do not start a worker; return whether it was not started."""
        unborn = worker in self._asked
        self._asked.pop(worker, None)
        return unborn

    def serve(self) -> None:
        """Start those for whom everything is ready."""
        if self._watched is not None:
            self.watch(self._watched, False, selectors.EVENT_READ, self.serve)
            self._watched = None
        while self._asked and self._watched is None:
            worker, segment = next(iter(self._asked.items()))
            try:
                self._watched = self.starter.prepare()
                if self._watched is None:
                    del self._asked[worker]
                    self.start(worker, segment)
            except OSError as error:
                self._asked.pop(worker, None)
                self.fail(worker, segment, error)
        if self._watched is not None:
            self.watch(self._watched, True, selectors.EVENT_READ, self.serve)
