"""Reports what workers do before the first step while the terminal is silent. Pure."""

from collections.abc import Callable, Iterable

from lockstep.system.prose import name_workers

STARTING = "starting: importing the script's modules"
RUNNING = "running the script, which has not compiled a model yet"
PREPARING = "preparing the first distributed call"

_QUIET = 5.0
_EVERY = 10.0


def first_step(call: str) -> str:
    """Describe a worker that has begun a call and completed no step of it."""
    return f"compiling and computing the first step of {call}"


class Progress:
    """Reports what each worker does: after 5 silent seconds, then every 10 seconds.

    Args:
        workers: the workers of the first view.
        say: shows a note.
        shown: returns how many bytes the terminal has shown so far, including notes.
        now: the time when the job begins.

    Attributes:
        due: when to call `serve` next; None once a step is complete.
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
        """Note what a worker does from now on; ignores workers that join later."""
        if worker in self._does:
            self._does[worker] = what

    def gone(self, worker: int) -> None:
        """Forget a worker that has ended."""
        self._does.pop(worker, None)

    def end(self) -> None:
        """Stop reporting, because a step is complete."""
        self.due = None

    def serve(self, now: float) -> None:
        """Report, if it is time and the terminal was silent."""
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
