"""What reading changes in inputs is part of the state: whoever comes later reads what the others read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
MARKS = ("evaluate ", "fit ", "predict ", "end ")


def results(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    return [line for mark in MARKS for line in run.marked(worker, mark)]


KINDS = {"loader": "torch", "dataset": "jax", "ordered": "jax"}
"""The kinds of inputs, and the backends on which they are tested."""
PLACES = {"loader": ("2 6",), "dataset": ("1 7", "2 1"), "ordered": ("2 1",)}
"""The calls and steps after which jobs are killed in `make test-ci`; slow tests have the others, too."""


# A job with inputs in order resumes below.
@pytest.mark.slow("ordered")
@pytest.mark.ci
@pytest.mark.parametrize(("kind", "backend"), KINDS.items(), indirect=["backend"])
def test_a_worker_that_joins_in_a_later_fit_reads_what_the_others_read(
    launch: Launch, undisturbed_run: Launch, backend: str, kind: str
) -> None:
    expected = results(undisturbed_run("-n 1 --replicas 2", "drawing.py", kind, backend=backend), 0)
    run = launch("-n 2 --min-workers 2", "drawing.py", kind, "lost", "2", "6", backend=backend)
    assert "worker 2 joined (2 workers)" in run.stderr, (run.folder / "events.jsonl").read_text()
    assert [results(run, worker) for worker in (0, 2)] == [expected] * 2


@pytest.mark.ci
@pytest.mark.parametrize(
    ("backend", "kind", "place"),
    [
        pytest.param(backend, kind, place, marks=() if place in PLACES[kind] else pytest.mark.slow)
        for kind, backend in KINDS.items()
        for place in ("1 7", "2 1", "2 6")
    ],
    indirect=["backend"],
)
def test_a_job_that_resumes_reads_on_where_it_was(
    launch: Launch, undisturbed_run: Launch, tmp_path: Path, backend: str, kind: str, place: str
) -> None:
    expected = results(undisturbed_run("-n 1 --replicas 2", "drawing.py", kind, backend=backend), 0)
    keeping = f"--checkpoint {tmp_path} --checkpoint-every 2"
    command = (f"-n 1 --replicas 2 {keeping}", "drawing.py", kind, "killed", *place.split())
    assert launch(*command, backend=backend).status == 137
    assert results(launch(*command, backend=backend), 0) == expected
