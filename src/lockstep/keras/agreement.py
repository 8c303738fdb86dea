"""Whether all workers are about to compute the same thing, and if not, who differs in what."""

from collections.abc import Mapping, Sequence

import msgspec

from lockstep.errors import DisagreementError
from lockstep.job import Job

Facts = Mapping[str, str]
"""What a worker is about to do, by name, in the order in which differences are to be reported."""

_ADVICE = {
    "call": "all workers must make the same calls in the same order; look for code that depends on the "
    "worker",
    "data": "the workers read different examples: look for a shuffle or a generator without a seed, "
    "or for files that depend on the worker",
    "variable": "the models differ: look for weights that come from an unseeded generator, from a file, "
    "or from code that depends on the worker",
}


def agree(job: Job, what: str, facts: Facts) -> None:
    """Return if every worker calls this with equal facts.

    Raises:
        DisagreementError: on every worker; names the two workers and the first fact that differs.
    """
    if len(job.view.workers) == 1:
        return
    blobs = job.communicator.gather(msgspec.json.encode(list(facts.items())), what=what)
    gathered = [dict(msgspec.json.decode(blob, type=list[tuple[str, str]])) for blob in blobs]
    difference = describe_difference(job.view.workers, gathered)
    if difference:
        raise DisagreementError(f"{what}: {difference}")


def describe_difference(workers: Sequence[int], gathered: Sequence[Facts]) -> str | None:
    """Compare every worker's facts with those of the first; describe the first difference."""
    first = gathered[0]
    for worker, other in zip(workers[1:], gathered[1:], strict=True):
        for name in [*first, *(name for name in other if name not in first)]:
            ours, theirs = first.get(name, "nothing"), other.get(name, "nothing")
            if ours != theirs:
                return (
                    f"worker {workers[0]} has {name} = {ours} where worker {worker} has {theirs}; "
                    f"{_ADVICE.get(name.split(' ')[0], _ADVICE['call'])}"
                )
    return None
