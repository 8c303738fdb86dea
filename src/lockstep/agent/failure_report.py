"""What a person is told of how a job ended."""

from collections.abc import Callable, Mapping

from lockstep.agent.worker_handle import WorkerHandle
from lockstep.supervisor.events import Evidence, JobOutcome

_LOG_LINES = 20
_FRAMES = 10


def explain(
    outcome: JobOutcome,
    members: Mapping[int, WorkerHandle],
    shown: Callable[[int], bool],
    name_log: Callable[[int], str],
) -> str:
    """Return the verdict's message with its evidence.

    Args:
        outcome: how the job ended.
        members: the workers.
        shown: whether the terminal has had the worker's output already.
        name_log: the path of a worker's log as the person knows it.
    """
    lines = [outcome.message]
    workers = outcome.workers if outcome.evidence is not Evidence.NONE else ()
    for member in (members[worker] for worker in workers if worker in members):
        if outcome.evidence is Evidence.STACK:
            lines += _stack(member)
        elif outcome.evidence is Evidence.LOG and member.log is not None and not shown(member.worker):
            lines += [f"  | {line}" for line in member.log.tail(_LOG_LINES)]
        if member.log is not None:
            lines.append(f"  log: {name_log(member.worker)}")
    return "\n".join(lines)


def _stack(member: WorkerHandle) -> list[str]:
    frames = member.innermost_frames(_FRAMES)
    if not frames:
        return [f"  worker {member.worker} sent no stack"]
    heading = f"  worker {member.worker} is here (most recent call first):"
    return [heading, *(f"    {frame}" for frame in frames)]
