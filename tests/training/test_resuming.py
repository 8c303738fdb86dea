"""All processes of a job are lost; the same command resumes from its newest checkpoint, to the same bits."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.store import Store
from object_server import SECRET, store_server

Launch = Callable[..., Any]
PLACES = ("fit 1 step 2", "fit 1 epoch 1", "fit 2 step 4", "batch 3")
MARKS = ("fit ", "evaluate ", "predict ", "batch ", "table ", "end ")
WEIGHTS = {"fit 1": ("weights 1", "weights 2", "weights 3"), "fit 2": ("weights 2", "weights 3"), "batch": ()}
"""The weights that a script has when it resumes there: those of finished calls are not saved."""


def results(run: Any, place: str, worker: int = 0) -> list[str]:
    assert run.status == 0, run.stderr
    (seen,) = (marks for where, marks in WEIGHTS.items() if place.startswith(where))
    return [line for mark in (*MARKS, *seen) for line in run.marked(worker, mark)]


@pytest.fixture
def undisturbed(undisturbed_run: Launch) -> Callable[[str], Any]:
    """An undisturbed run of a backend."""
    return lambda backend: undisturbed_run("-n 1 --replicas 4", "resuming.py", "{folder}", backend=backend)


def resumes(
    launch: Launch, backend: str, how: str, place: str, folder: Path, expected: Any, url: str = ""
) -> Any:
    """End all workers, and run the same command again with another number of workers; return its run.

    With the URL of a store, the second command runs on another machine: this one has no checkpoints.
    """
    keeping = f"--checkpoint {url or folder / 'kept'} --checkpoint-every 2"
    keeping += " --one-writer" if url.startswith("file:") else ""
    arguments = (str(folder), how, *place.split())
    lost = launch(f"-n 2 --replicas 4 {keeping}", "resuming.py", *arguments, backend=backend)
    assert lost.status == {"killed": 137, "stopped": 143}[how]
    if how == "stopped":
        assert re.search(
            r"stopping: step (\d+) is complete[^$]*^lockstep: checkpoint written at step \1$",
            lost.stderr,
            re.M,
        )
    if url:
        (kept,) = (place for place in (folder / "cache" / "lockstep" / "checkpoints").iterdir())
        shutil.rmtree(kept)
    run = launch(f"-n 3 {keeping}", "resuming.py", *arguments, backend=backend)
    assert "resuming from" in run.stderr
    assert "was made with" not in run.stderr
    for worker in (0, 2):
        assert results(run, place, worker) == results(expected, place)
    return run


@pytest.mark.ci
@pytest.mark.parametrize(
    # On JAX, killed jobs resume in test_dividing.py and test_tf_reading.py.
    "backend",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "tensorflow")),
        "torch",
    ],
    indirect=True,
)
def test_a_killed_job_resumes_with_another_number_of_workers(
    launch: Launch, backend: str, undisturbed: Callable[[str], Any], tmp_path: Path
) -> None:
    run = resumes(launch, backend, "killed", "fit 1 step 7", tmp_path, undisturbed(backend))
    events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    skipped = [event for event in events if event["event"] == "skips steps" and event["worker"] == 0]
    assert [(event["call"], event["steps"], event["of"]) for event in skipped] == [
        ("fit 1", steps, 6) for steps in range(1, 7)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_job_that_was_killed_at_any_place_resumes(
    launch: Launch, backend: str, undisturbed: Callable[[str], Any], place: str, tmp_path: Path
) -> None:
    resumes(launch, backend, "killed", place, tmp_path, undisturbed(backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_a_model_with_several_optimizers_resumes(launch: Launch, backend: str, tmp_path: Path) -> None:
    """Its optimizers get their variables when its step applies them."""

    def run(*arguments: str) -> Any:
        keeping = f"--checkpoint {tmp_path / 'kept'} --checkpoint-every 2"
        return launch(f"-n 1 --replicas 2 {keeping}", "rounds.py", *arguments, backend=backend)

    pytest.importorskip(backend)
    undisturbed = launch("-n 1 --replicas 2", "rounds.py", backend=backend)
    failed = run("--fail")
    assert "epoch 1 fails" in failed.stderr
    resumed = run()
    assert resumed.status == 0, resumed.stderr
    assert resumed.marked(0, "result ")[-1:] == undisturbed.marked(0, "result ")[-1:] != []


# CI stops it the same way below, with its checkpoints in a store.
@pytest.mark.slow
def test_a_stopped_job_resumes_at_its_last_step(
    launch: Launch, undisturbed: Callable[[str], Any], tmp_path: Path
) -> None:
    resumes(launch, "jax", "stopped", "fit 2 step 4", tmp_path, undisturbed("jax"))


@pytest.mark.ci
@pytest.mark.parametrize(
    "scheme", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("file", "az", "gs")), "s3"]
)
def test_a_stopped_job_resumes_on_another_machine(
    launch: Launch,
    undisturbed: Callable[[str], Any],
    environment: dict[str, str],
    quickest_backend: str,
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    backend = quickest_backend
    expected = undisturbed(backend)
    monkeypatch.setitem(environment, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    url, server = f"file://{tmp_path / 'store'}", nullcontext(dict[str, str]())
    if scheme != "file":
        url, server = f"{scheme}://bucket/job", store_server(scheme, tmp_path)
    with server as variables:
        for name, value in variables.items():
            monkeypatch.setitem(environment, name, value)
        run = resumes(launch, backend, "stopped", "fit 2 step 4", tmp_path, expected, url)
        assert f"resuming from {url}/step-" in run.stderr
        recorded = [file.read_text(errors="replace") for file in run.folder.rglob("*") if file.is_file()]
        assert not any(SECRET in text for text in (run.stdout, run.stderr, *recorded))


@pytest.mark.slow
def test_a_successful_job_is_finished_until_it_has_more_steps(
    launch: Launch, thorough_backend: str, tmp_path: Path
) -> None:
    def run(options: str, *asked: str, kept: bool = True) -> Any:
        keeping = f"--checkpoint {tmp_path / 'kept'}" if kept else ""
        done = launch(f"{options} {keeping}", "finishing.py", *asked, backend=thorough_backend)
        assert done.status == 0, done.stderr
        return done

    def printed(done: Any, worker: int = 0) -> list[str]:
        return [line for mark in ("fit ", "end ", "evaluate ") for line in done.marked(worker, mark)]

    def steps() -> list[int]:
        return [entry.step for entry in Store(tmp_path / "kept").entries()]

    def digest(done: Any) -> str:
        return str(done.marked(0, "end ")[-1].split()[1])

    first = run("-n 2 --replicas 2", "2", "0")
    digest_and_model = f"digest {digest(first)} of model 'sequential'"
    assert first.last_line == f"10 steps on 2 workers; 1 checkpoint; {digest_and_model}"
    assert (steps(), Store(tmp_path / "kept").finished()) == ([10], 10)
    lost = run("-n 2 --max-restarts 0", "3", "0", "killed")
    assert "worker 0 was killed by SIGKILL" in lost.stderr
    assert steps() == [10], "the chief has written only half of the next one"
    more = run("-n 1", "3", "0")
    assert "is finished after 10 steps" in more.stderr
    assert steps() == [10, 12], "the fit was stopped in its third epoch"
    assert printed(more) == printed(lost, 1)
    still_more = run("-n 1", "3", "3")
    assert printed(still_more) == printed(run("-n 2 --replicas 2", "3", "3", kept=False))
    assert steps()[-1] == 15
    again = run("-n 2", "3", "3")
    assert "is finished after 15 steps: it repeats no training step" in again.stderr
    assert printed(again) == printed(still_more)
    digest_and_model = f"digest {digest(again)} of model 'sequential'"
    assert again.last_line == f"15 steps, 15 of them before, on 2 workers; {digest_and_model}"
