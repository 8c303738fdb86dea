"""The job that `hosts_losses.py` measures: hosts_losses_training.py PIPE.

A training without a framework, of a state of 11 MB whose gradient is as large. Each worker reports its steps
to a named pipe. In each step, the workers compare a hash of the state, so a wrong one ends the job.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.collectives.contract import Communicator, Span
from lockstep.observability.events import StrategyInstalled
from lockstep.topology import View
from lockstep.worker import job
from steps import PIPE, report_step

Array = np.ndarray[Any, np.dtype[np.float32]]
BYTES = 11_000_000


def summed(
    state: Array, check: bytes, worker: int, parts: dict[int, Array], view: View, communicator: Communicator
) -> Sequence[Array]:
    """Compute the gradients that `parts` lacks; return the sum over all replicas."""
    own = view.replicas_of(worker)
    for replica in own:
        if replica not in parts:
            parts[replica] = state * np.float32(1 / (replica + 2))
    spans = {Span(replica, replica + 1): [parts[replica]] for replica in own}
    return communicator.reduce(spans, check=check)


def main() -> None:
    os.environ[PIPE] = sys.argv[1]
    current = job.current()
    current.events.publish(StrategyInstalled("none"))
    current.note_distribution()
    step, state = 0, np.ones(BYTES // 4, np.float32)
    if current.joins:
        current.membership.position()
        received = current.join()
        step, state = received.step, np.array(received.arrays["state"])
    while True:
        check = xxhash.xxh3_128_digest(state)
        (total,) = current.exchange(partial(summed, state, check, current.worker, {}))
        state -= np.float32(1e-6) * total
        step += 1
        contents = Contents(step, {}, {"state": state})
        current.between_steps(lambda whole: contents if whole else Contents(step, {}, {}))  # noqa: B023
        report_step(current.worker, step, current.view.number)


main()
