"""The requested communication never changes the result; a requested timeout is observed."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_every_communication_option_gives_the_same_bits(launch: Callable[..., Any]) -> None:
    ring = launch("-n 2", "communicating.py", "RING")
    nccl = launch("-n 2", "communicating.py", "NCCL")
    digests = [run.marked(worker, "digest: ") for run in (ring, nccl) for worker in range(2)]
    assert digests[0]
    assert digests == [digests[0]] * 4
    assert "NCCL is not used yet" in nccl.stderr
    assert "NCCL" not in ring.stderr

    stuck = launch("-n 2 --max-restarts 0", "communicating.py", "AUTO", "stuck")
    assert stuck.status == 0, stuck.stderr
    assert "worker 1 did not reach" in stuck.stderr
    assert stuck.marked(0, "digest: ") == digests[0]
