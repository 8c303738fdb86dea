"""Work on a separate thread, one item at a time; a newer item replaces one that waits."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Latest(Generic[Item]):
    """Works on the latest item on a daemon thread, which runs while there is an item.

    Args:
        work: called with an item on that thread.
        name: the name of the thread.
    """

    def __init__(self, work: Callable[[Item], None], name: str) -> None:
        self._work = work
        self._name = name
        self._changed = threading.Condition()
        self._waiting: Item | None = None
        self._running = False

    def give(self, item: Item) -> None:
        """Request work on `item` and return at once; it replaces an item that waits."""
        with self._changed:
            self._waiting = item
            if not self._running:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._running = True

    def has_next(self) -> bool:
        """Whether an item waits."""
        return self._waiting is not None

    def busy(self) -> bool:
        """Whether there is work in progress, or an item waits."""
        return self._running

    def close(self, seconds: float) -> bool:
        """Wait until the work on all items is done; return False if `seconds` pass first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._work(item)
                del item
        except BaseException:
            with self._changed:
                self._waiting = None
                self._stop()
            raise

    def _next(self) -> Item | None:
        with self._changed:
            item, self._waiting = self._waiting, None
            if item is None:
                # From now on, a request starts another thread.
                self._stop()
            return item

    def _stop(self) -> None:
        self._running = False
        self._changed.notify_all()
