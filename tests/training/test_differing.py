"""A replacement that reads different data ends; the others continue to the same bits."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_a_replacement_that_is_elsewhere_in_a_shared_generator_ends_alone(launch: Callable[..., Any]) -> None:
    (expected,) = launch("-n 1 --replicas 2", "differing.py").marked(0, "end ")
    run = launch("-n 2 --max-restarts 1", "differing.py", "killed")
    assert run.status == 0, run.stderr
    assert run.marked(0, "end ") == [expected]
    assert "worker 2 joined (2 workers, view 3)" in run.stderr
    (told,) = [line for line in run.stderr.splitlines() if "DisagreementError" in line]
    assert told.startswith("lockstep: worker 2: DisagreementError: ")
    assert "do not compute from the same data" in told
    assert "give each call its own input" in told
    assert told.endswith(
        "; lost workers are no longer replaced (--max-restarts 1); worker 0 continues (view 4)"
    )
    # The script has had no chance to continue differently.
    log = "\n".join(run.log(2))
    assert "DisagreementError: the workers do not compute from the same data" in log
    assert "handled" not in log
