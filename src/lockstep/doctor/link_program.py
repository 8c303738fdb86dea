"""A program that measures the exchange between the workers of two hosts, without Keras.

    lockstep run --hosts A,B ... -m lockstep.doctor.link_program

The chief prints a JSON object: the seconds of a barrier, and the bytes per second that each host
simultaneously sends and receives while it sums large arrays.
"""

import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from lockstep.collectives.contract import Span
from lockstep.worker import job

_BARRIERS = 100
_REDUCES = 8
_BYTES = 16 << 20


def main() -> None:
    """Measure, and print the result."""
    context = job.current()
    communicator = context.communicator
    (replica,) = context.view.replicas_of(context.worker)
    leaves = [np.ones(_BYTES // 4, np.float32)]
    barrier = _median(_BARRIERS, communicator.barrier)
    # With two hosts, each sends half of its array and half of the total.
    reduce = _median(_REDUCES, lambda: communicator.reduce({Span(replica, replica + 1): leaves}))
    if job.is_chief():
        print(json.dumps({"barrier": barrier, "bytes_per_second": _BYTES / reduce}))


def _median(times: int, act: Callable[[], object]) -> float:
    """Return the median seconds of `act`, after two calls that only prepare memory."""
    seconds = []
    for _ in range(times + 2):
        begun = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


if __name__ == "__main__":
    main()
