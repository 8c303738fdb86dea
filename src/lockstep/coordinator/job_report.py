"""The last message of a job: what it has done, or why it failed. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from lockstep.errors import code_in
from lockstep.observability.run_state import JobTotals
from lockstep.protocol.host import WorkerEvidence
from lockstep.supervisor.actions import Evidence, JobOutcome
from lockstep.system.prose import count


def fields_of_end(totals: JobTotals, seconds: float) -> dict[str, Any]:
    """Return the fields of what a job has done for the event at its end; it took `seconds`."""
    done = msgspec.structs.asdict(totals)
    reached = done.pop("reached")
    if totals.steps is None and reached:
        done["steps"] = reached
    return {"seconds": round(seconds, 3), **done}


def last_line(totals: JobTotals, seconds: float, workers: int, failed: int = 0, compared: str = "") -> str:
    """Return the last line of a job; empty if it trained nothing.

    Args:
        totals: what it has done.
        seconds: its duration.
        workers: the number of workers with which it ended.
        failed: the number of workers on which the script ended with an error.
        compared: what a comparison with one process has shown; empty if none was wanted.
    """
    if totals.steps is None:
        return ""
    before = f", {totals.before} of them before," if totals.before else ""
    numbers = {"lost": totals.lost, "joined": totals.joined}
    changes = [f"{number} {what}" for what, number in numbers.items() if number]
    changes += [f"the script failed on {count(failed, 'worker')}"] if failed else []
    # Lockstep does not count the steps of a custom loop that it does not drive.
    steps = f": {count(totals.steps, 'step')}{before}" if totals.steps else ""
    changed = f" ({', '.join(changes)})" if changes else ""
    parts = [f"finished in {_spoken(seconds)}{steps} on {count(workers, 'worker')}{changed}"]
    if compared:
        parts.append(compared)
    if totals.checkpoints:
        parts.append(count(totals.checkpoints, "checkpoint"))
    if totals.verified:
        parts.append(f"{count(totals.verified, 'computation')} verified")
    if totals.digest:
        parts.append(f"digest {totals.digest} of model {totals.model!r}")
    return "; ".join(parts)


def _spoken(seconds: float) -> str:
    """Return "4.2 s", "42 s", "3 min 12 s", "2 h 5 min"."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def explain(
    outcome: JobOutcome,
    evidence: Iterable[WorkerEvidence],
    shown: Callable[[int], bool],
    name_log: Callable[[int], str],
) -> str:
    """Return the message of a failed job with its evidence, and how to have an error of Lockstep explained.

    Args:
        outcome: how the job ended.
        evidence: the evidence of the workers that the outcome names.
        shown: whether the terminal has already shown a worker's output.
        name_log: returns the path of a worker's log, relative to the user's current folder if possible.
    """
    lines = [outcome.message]
    for one in evidence if outcome.evidence is not Evidence.NONE else ():
        if outcome.evidence is Evidence.STACK:
            lines += _stack(one)
        elif outcome.evidence is Evidence.LOG and not shown(one.worker):
            lines += [f"  | {line}" for line in one.log]
        if one.has_log:
            lines.append(f"  log: {name_log(one.worker)}")
    if code := code_in(outcome.message):
        lines.append(f"  help: lockstep explain {code}")
    return "\n".join(lines)


def _stack(evidence: WorkerEvidence) -> list[str]:
    if not evidence.stack:
        return [f"  worker {evidence.worker} sent no stack"]
    heading = f"  worker {evidence.worker} is here (most recent call first):"
    return [heading, *(f"    {frame}" for frame in evidence.stack)]
