"""Reports what workers do before the first step while the terminal is silent. Pure."""

from collections.abc import Callable, Iterable

from lockstep.system.prose import name_workers

STARTING = "starting: importing the script's modules"
LOADING = f"{STARTING}, and reading the checkpoint"
RUNNING = "running the script, which has not compiled a model yet"
PREPARING = "preparing the first distributed call"

_QUIET = 5.0
_EVERY = 10.0


def importing(module: str) -> str:
    """Describe a worker whose script imports a module; if that is empty, a worker whose script runs."""
    return f"importing {module}" if module else RUNNING


def skipping(call: str, steps: int, of: int, what: str) -> str:
    """Describe a worker that has skipped some steps of a call, of those that were taken before it began."""
    return f"skipping the first {what} of {call}, which were taken before: {steps:,} of {of:,}"


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
        does: what they do first.

    Attributes:
        due: when to call `serve` next; None once a step is complete.
    """

    def __init__(
        self,
        workers: Iterable[int],
        say: Callable[[str], None],
        shown: Callable[[], int],
        now: float,
        does: str = STARTING,
    ) -> None:
        self.due: float | None = now + _QUIET
        self._does: dict[int, tuple[str, float | None]] = dict.fromkeys(workers, (does, None))
        self._say = say
        self._shown = shown
        self._seen = shown()
        self._since = now

    def does(self, worker: int, what: str, since: float | None = None) -> None:
        """Note what a worker does from now on; ignores workers that join later.

        Args:
            worker: its id.
            what: what it does.
            since: the present time if a report should say how long that takes.
        """
        if worker in self._does:
            self._does[worker] = what, since

    def covers(self, worker: int) -> bool:
        """Whether it still reports what `worker` does."""
        return self.due is not None and worker in self._does

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
            self._say(f"before the first step, {now - self._since:.0f} s: {self._listed(now)}")
        self.due = now + (_EVERY if quiet else _QUIET)
        self._seen = self._shown()

    def _listed(self, now: float) -> str:
        doing: dict[str, list[int]] = {}
        for worker, (what, since) in self._does.items():
            text = what if since is None else f"{what} ({now - since:.0f} s)"
            doing.setdefault(text, []).append(worker)
        return "; ".join(f"{name_workers(tuple(workers))}: {text}" for text, workers in doing.items())
