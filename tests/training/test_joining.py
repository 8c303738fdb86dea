"""Workers leave and join a job while it runs: all workers at the end have the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.diff.comparison import compare
from lockstep.diff.recording import read_recording
from lockstep.diff.wording import detail

Launch = Callable[..., Any]
MARKS = ("fit ", "evaluate ", "predict ", "batch ", "table ", "end ")


def results(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    return [line for mark in MARKS for line in run.marked(worker, mark)]


@pytest.fixture
def undisturbed(undisturbed_run: Launch) -> Callable[[str], Any]:
    """An undisturbed run of a backend."""

    def run(backend: str) -> Any:
        return undisturbed_run("-n 1 --replicas 4", "resuming.py", "{folder}", backend=backend)

    return run


Undisturbed = Callable[[str], Any]


def assert_same_records(one: Path, other: Path) -> None:
    """The digest logs of two runs are equal, and the second one has no gap."""
    first, second = read_recording(one), read_recording(other)
    found = compare(first, second)
    assert found.equal, detail(found)
    steps = sorted(key.step for key in second.steps if not key.tests)
    assert steps == list(range(1, first.last + 1))


@pytest.fixture
def join(launch: Launch, undisturbed: Undisturbed, tmp_path_factory: Any) -> Callable[..., str]:
    """Run the program with workers that join; return the notes on the terminal."""

    def run(backend: str, options: str, how: str, place: str, last: tuple[int, ...]) -> str:
        folder = str(tmp_path_factory.mktemp("joining"))
        options = f"-n 2 --replicas 4 {options}"
        done = launch(options, "joining.py", folder, how, *place.split(), backend=backend)
        for worker in last:
            assert results(done, worker) == results(undisturbed(backend), 0)
        assert_same_records(undisturbed(backend).folder, done.folder)
        notes: str = done.stderr
        return notes

    return run


@pytest.mark.parametrize(
    # On JAX, workers join in the next two tests.
    "backend",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "tensorflow")), "torch"],
    indirect=True,
)
def test_a_lost_chief_is_replaced(join: Callable[..., str], backend: str) -> None:
    notes = join(backend, "--min-workers 2", "lost0", "fit 1 step 7", (1, 2))
    assert "worker 0 was killed by SIGKILL; worker 1 continues" in notes
    assert "training waits: 1 worker of at least 2 (--min-workers)" in notes
    assert "worker 2 joined (2 workers)" in notes
    assert "worker 2 is skipping the first steps of fit 1, which were taken before: 1 of 8" in notes


@pytest.mark.slow
@pytest.mark.ci
def test_workers_join_and_leave_on_request(join: Callable[..., str], thorough_backend: str) -> None:
    notes = join(thorough_backend, "", "scaled", "fit 1 step 7", (0,))
    assert "workers 2 and 3 joined (4 workers)" in notes
    assert "workers 1, 2 and 3 left (1 worker)" in notes


@pytest.mark.ci
def test_a_replacement_follows_the_others_to_a_later_call(
    join: Callable[..., str], quickest_backend: str
) -> None:
    notes = join(quickest_backend, "", "overtaken", "fit 1 step 7", (0, 2))
    assert "worker 2 joined (2 workers)" in notes


@pytest.mark.slow
@pytest.mark.parametrize("place", ["fit 1 epoch 1", "fit 2 step 4", "batch 0", "batch 3"])
def test_a_worker_is_replaced_at_any_place(join: Callable[..., str], backend: str, place: str) -> None:
    notes = join(backend, "--min-workers 2", "lost1", place, (0, 2))
    assert "worker 2 joined (2 workers)" in notes


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "kills", "backend"),
    [
        ("fit", "1", "jax"),
        *(
            pytest.param(how, kills, name, marks=pytest.mark.slow)
            for how, kills in (("fit", "0 1"), ("batches", "1"))
            for name in ("jax", "tensorflow", "torch")
        ),
        *(pytest.param("batches", "0 1", name, marks=pytest.mark.slow) for name in ("jax", "torch")),
    ],
    indirect=["backend"],
)
def test_a_model_is_not_tried_again_with_other_rows(
    launch: Callable[..., Any], backend: str, tmp_path: Path, how: str, kills: str
) -> None:
    """The second `fit` would show what the first one hides: the result would be another one after a loss."""
    program = ("tried_again.py", how, *kills.split())
    undisturbed = launch("-n 1 --replicas 2", "tried_again.py", how, backend=backend)
    words = f"-n 2 --min-workers 2 --checkpoint {tmp_path / 'kept'} --checkpoint-every 1"
    run = launch(words if kills == "0 1" else "-n 2 --min-workers 2", *program, backend=backend)
    if kills == "0 1":
        assert run.status == 137, run.stderr
        run = launch(words, *program, backend=backend)
        assert "resuming from" in run.stderr
    else:
        assert "worker 2 joined (2 workers)" in run.stderr
    assert run.status == 0, run.stderr
    for worker in (0, 2) if kills == "1" else (0, 1):
        assert run.marked(worker, "digest ") == undisturbed.marked(0, "digest ")


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_a_worker_joins_after_the_program_has_changed_what_decides(
    launch: Launch, backend: str, tmp_path: Path
) -> None:
    undisturbed = launch("-n 1 --replicas 2", "flips.py", str(tmp_path), "undisturbed", backend=backend)
    program = ("flips.py", str(tmp_path), "lost1", "fit", "1", "step", "6")
    run = launch("-n 2 --min-workers 2", *program, backend=backend)
    assert run.status == 0, run.stderr
    assert "worker 2 joined (2 workers)" in run.stderr
    for worker in (0, 2):
        assert run.marked(worker, "digest ") == undisturbed.marked(0, "digest ")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "place", "backend"),
    [
        ("lost1", "fit 1 step 5", "torch"),
        *(pytest.param("lost0", "fit 2 step 3", name, marks=pytest.mark.slow) for name in ("jax", "torch")),
        pytest.param("lost1", "fit 1 step 5", "jax", marks=pytest.mark.slow),
        *(
            pytest.param("killed", place, name, marks=pytest.mark.slow)
            for place, name in [
                ("fit 1 step 3", "jax"),
                ("fit 1 step 3", "torch"),
                ("fit 2 step 5", "jax"),
                ("fit 2 step 5", "tensorflow"),
            ]
        ),
    ],
    indirect=["backend"],
)
def test_a_process_takes_over_variables_of_python(
    launch: Launch, backend: str, tmp_path: Path, how: str, place: str
) -> None:
    """They have changed before and after the steps were compiled, and before and after `compile`."""
    program = ("changing.py", str(tmp_path))
    undisturbed = launch("-n 1 --replicas 3", *program, "undisturbed", backend=backend)
    options = (
        f"--checkpoint {tmp_path / 'kept'} --checkpoint-every 1" if how == "killed" else "--min-workers 2"
    )
    run = launch(f"-n 2 --replicas 3 {options}", *program, how, *place.split(), backend=backend)
    if how == "killed":
        assert run.status == 137, run.stderr
        run = launch(f"-n 3 {options}", *program, how, *place.split(), backend=backend)
    assert run.status == 0, run.stderr
    for worker in {"lost0": (1, 2), "lost1": (0, 2), "killed": (0, 2)}[how]:
        assert run.marked(worker, "digest ") == undisturbed.marked(0, "digest ")


@pytest.mark.ci
def test_a_joining_worker_takes_over_what_later_trials_have_shown(
    launch: Launch, quickest_backend: str, tmp_path: Path
) -> None:
    """It has skipped the call in which the others have tried the model again."""
    program = ("tried_later.py", str(tmp_path))
    undisturbed = launch("-n 1 --replicas 2", *program, "undisturbed", backend=quickest_backend)
    run = launch("-n 2", *program, "overtaken", "fit", "1", "step", "3", backend=quickest_backend)
    assert run.status == 0, run.stderr
    assert "worker 2 joined (2 workers)" in run.stderr
    for worker in (0, 2):
        assert run.marked(worker, "digest ") == undisturbed.marked(0, "digest ")
