"""What workers do before the first step, reported while the terminal is silent. Pure."""

from collections.abc import Callable, Iterable

from lockstep.system.prose import name_workers

STARTING = "starting: importing the script's modules"
RUNNING = "running the script, which has not compiled a model yet"
PREPARING = "preparing the first distributed call"

_QUIET = 5.0
_EVERY = 10.0


def first_step(call: str) -> str:
    """Say that a worker has begun a call, of which no step is done yet."""
    return f"compiling and computing the first step of {call}"


class Progress:
    """Says what each worker is doing, after 5 seconds in which nothing was shown and then every 10 seconds.

    Args:
        workers: those of the first view.
        say: shows a note.
        shown: returns how much has been shown so far, notes included.
        now: when the job begins.

    Attributes:
        due: when there may be something to say; None once a step is done.
    """

    def __init__(
        self, workers: Iterable[int], say: Callable[[str], None], shown: Callable[[], int], now: float
    ) -> None:
        self.due: float | None = now + _QUIET
        self._does = dict.fromkeys(workers, STARTING)
        self._say = say
        self._shown = shown
        self._seen = shown()
        self._since = now

    def does(self, worker: int, what: str) -> None:
        """Note what a worker is doing from now on; ignores workers that join later."""
        if worker in self._does:
            self._does[worker] = what

    def gone(self, worker: int) -> None:
        """Forget a worker that has ended."""
        self._does.pop(worker, None)

    def end(self) -> None:
        """Say nothing any more: a step is done, or the job ends."""
        self.due = None

    def serve(self, now: float) -> None:
        """Say what is waited for, if it is time, and nothing was shown meanwhile."""
        if self.due is None or now < self.due:
            return
        quiet = self._shown() == self._seen
        if quiet and self._does:
            self._say(f"no step completed after {now - self._since:.0f} s; {self._listed()}")
        self.due = now + (_EVERY if quiet else _QUIET)
        self._seen = self._shown()

    def _listed(self) -> str:
        doing: dict[str, list[int]] = {}
        for worker, what in self._does.items():
            doing.setdefault(what, []).append(worker)
        return "; ".join(f"{name_workers(tuple(workers))}: {what}" for what, workers in doing.items())
