"""Inputs with a fixed order: every worker reads all of them, and all workers read the same rows."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from lockstep.keras.input.fit_inputs import AN_ITERATOR

KINDS = ["endless", "finite", "short", *(name for name in ("tensorflow", "torch") if find_spec(name))]


@pytest.mark.slow
@pytest.mark.ci
def test_streams_give_the_same_bits_on_one_and_two_workers(
    launch: Callable[..., Any], thorough_backend: str
) -> None:
    lines = []
    for workers in (1, 2):
        run = launch(f"-n {workers} --replicas 3", "streams.py", *KINDS, backend=thorough_backend)
        assert run.status == 0, run.stderr
        lines += [run.marked(worker, "stream ") for worker in range(workers)]
        # Three inputs are generators; one worker has nothing to divide.
        assert (
            run.stderr.count(f"input: every worker reads the whole dataset: {AN_ITERATOR}\n") == workers - 1
        )
        # One of two calls has arrays of that size in each worker.
        assert run.stderr.count("lockstep: each worker holds 0.0 GB of arrays in memory") == workers - 1
    assert lines == [lines[0]] * 3
    assert [line.split()[1] for line in lines[0]] == KINDS
    ended = {line.split()[1]: line.split()[4] for line in lines[0]}
    # The generator is exhausted in the second epoch, of which Keras warns, on every worker.
    assert ended["short"] == "1"
    assert ended["endless"] == "0"
