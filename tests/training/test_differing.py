"""A replacement that reads different data exits; the others continue to the same bits."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_only_the_replacement_with_another_generator_position_exits(launch: Callable[..., Any]) -> None:
    (expected,) = launch("-n 1 --replicas 2", "differing.py").marked(0, "end ")
    run = launch("-n 2 --max-restarts 1", "differing.py", "killed")
    assert run.status == 0, run.stderr
    assert run.marked(0, "end ") == [expected]
    assert "worker 2 joined (2 workers)" in run.stderr
    (note,) = [line for line in run.stderr.splitlines() if "DisagreementError" in line]
    assert note.startswith("lockstep: worker 2: DisagreementError: ")
    assert "do not compute from the same data" in note
    assert "give each call its own input" in note
    assert note.endswith("; lost workers are no longer replaced (--max-restarts 1); worker 0 continues")
    # The script cannot handle the error and continue differently.
    log = "\n".join(run.log(2))
    assert "DisagreementError: the workers do not compute from the same data" in log
    assert "handled" not in log
