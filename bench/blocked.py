"""What a checkpoint in the middle of an epoch costs the training that goes on."""

import itertools
import statistics

STEPS = 24
"""Of an epoch."""
AT = 8
"""The step after which the checkpoint is taken; the first ones tell how long a step usually takes."""
PATIENCE_SECONDS = 60.0


def figures(times: list[float], call: float, size: int) -> dict[str, float]:
    """Return what is told of an epoch.

    Args:
        times: when the epoch began, and when each step ended.
        call: seconds for which whoever keeps the checkpoint has had the training's thread.
        size: bytes that were written.

    Returns:
        `late` is by how many seconds the step at which the checkpoint was taken and the next took longer than
        usual, together; `slowed` the same of all steps from there on.
    """
    steps = [after - before for before, after in itertools.pairwise(times)]
    usual = statistics.median(steps[1 : AT - 1])
    late = sum(steps[AT - 1 : AT + 1]) - 2 * usual
    slowed = sum(steps[AT - 1 :]) - (len(steps) - AT + 1) * usual
    return {"call": call, "step": usual, "late": late, "slowed": slowed, "bytes": size}
