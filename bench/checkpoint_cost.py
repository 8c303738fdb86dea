"""The cost of a checkpoint in the middle of an epoch for the training that continues."""

import itertools
import statistics

STEPS = 24
"""The steps of an epoch."""
AT = 8
"""The step after which the checkpoint is taken; the steps before it show the usual time of a step."""
PATIENCE_SECONDS = 60.0


def figures(times: list[float], call: float, size: int) -> dict[str, float]:
    """Return the measurements of an epoch.

    Args:
        times: when the epoch began, and when each step ended.
        call: seconds for which the checkpoint occupied the thread of the training.
        size: bytes that were written.

    Returns:
        `late` is the additional time, in seconds, of the step with the checkpoint and the next one; `slowed`
        that of all steps from the checkpoint on.
    """
    steps = [after - before for before, after in itertools.pairwise(times)]
    usual = statistics.median(steps[1 : AT - 1])
    late = sum(steps[AT - 1 : AT + 1]) - 2 * usual
    slowed = sum(steps[AT - 1 :]) - (len(steps) - AT + 1) * usual
    return {"call": call, "step": usual, "late": late, "slowed": slowed, "bytes": size}
