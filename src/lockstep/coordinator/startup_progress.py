"""Reports the progress of workers before the first step, while the terminal is silent. Pure."""

from collections.abc import Callable

from lockstep.observability.run_lines import Happening
from lockstep.observability.run_state import RunState
from lockstep.system.notes import NOTE_EVERY
from lockstep.system.prose import name_workers

_STARTING = "starting: importing the script's modules"
_LOADING = f"{_STARTING}, and reading the checkpoint"
_RUNNING = "running the script, which has not compiled a model yet"
_PREPARING = "preparing the first distributed call"

_QUIET = 5.0


def skipping(call: str, steps: int, of: int, unit: str) -> str:
    """Describe a worker that skips the first `of` steps of a call, and has skipped `steps` of them."""
    return f"skipping the first {unit} of {call}, which were taken before: {steps:,} of {of:,}"


def prepares(state: RunState, worker: int) -> bool:
    """Whether one of the first workers is alive, and no worker has completed a step."""
    info = state.workers.find(worker)
    return (
        not state.stepped
        and worker < int(state.job.get("workers", 0))
        and (info is None or (info.ended is None and info.phase not in ("lost", "leaving")))
    )


def preparations(state: RunState, now: float) -> str:
    """Return the progress of each worker without a first step, or an empty string if there is none.

    Args:
        state: the state of the run.
        now: seconds since 1970.
    """
    doing: dict[str, list[int]] = {}
    for worker in range(int(state.job.get("workers", 0))):
        if prepares(state, worker):
            info = state.workers.find(worker)
            text = _described(state, None if info is None else info.preparing, now)
            doing.setdefault(text, []).append(worker)
    return "; ".join(f"{name_workers(tuple(workers))}: {text}" for text, workers in doing.items())


def _described(state: RunState, sign: Happening | None, now: float) -> str:
    """Describe the progress of a worker, from its newest event before the first step."""
    if sign is None:
        resumes = (state.job.get("checkpoints") or {}).get("resume") is not None
        return _LOADING if resumes else _STARTING
    match sign.event, sign.fields:
        case "imports", {"module": str(module)} if module:
            return f"importing {module} ({now - sign.time:.0f} s)"
        case "strategy", _:
            return _PREPARING
        case "call", {"name": name}:
            return _first_step(name)
        case "skips steps", {"call": call, "steps": steps, "of": of, "what": unit}:
            return skipping(call, steps, of, unit) if steps < of else _first_step(call)
    return _RUNNING


def _first_step(call: str) -> str:
    return f"compiling and computing the first step of {call}"


class Progress:
    """Reports the progress of each worker: after 5 silent seconds, then every 10 seconds.

    Args:
        say: shows a note.
        shown: returns the number of bytes that the terminal has shown so far, including notes.
        now: the time at which the job begins.

    Attributes:
        due: the time of the next call of `serve`.
    """

    def __init__(self, say: Callable[[str], None], shown: Callable[[], int], now: float) -> None:
        self.due = now + _QUIET
        self._say = say
        self._shown = shown
        self._seen = shown()
        self._since = now

    def serve(self, now: float, doing: Callable[[], str]) -> None:
        """Report the texts of `doing`, if due and if the terminal was silent."""
        if now < self.due:
            return
        quiet = self._shown() == self._seen
        if quiet and (text := doing()):
            self._say(f"before the first step, {now - self._since:.0f} s: {text}")
        self.due = now + (NOTE_EVERY if quiet else _QUIET)
        self._seen = self._shown()
