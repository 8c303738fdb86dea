"""A run is found by the name of its job, or by its folder."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from played_jobs import Jobs, OwnSockets

from lockstep.coordinator import admin_client
from lockstep.coordinator.run_lookup import FoundRun, find_run, job_in, known_jobs, run_folders
from lockstep.errors import ConfigError
from lockstep.protocol.admin import StatusRequest

numbers = itertools.count()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Jobs]:
    """Jobs of this test only; the current folder is new."""
    made = Jobs(f"lookup-{os.getpid()}-{next(numbers)}")
    monkeypatch.setattr("lockstep.coordinator.admin_client._SOCKETS", OwnSockets(made.name))
    monkeypatch.chdir(tmp_path)
    yield made
    made.close()


def make_run(path: str) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True)
    (folder / "events.jsonl").touch()
    return folder


def test_a_folder_is_a_run_here_or_in_runs_whether_or_not_it_has_ended(jobs: Jobs) -> None:
    make_run("runs/a")
    make_run("elsewhere/b")
    assert find_run("a") == FoundRun(Path("runs/a"), None)
    assert find_run("runs/a") == FoundRun(Path("runs/a"), None)
    assert find_run("elsewhere/b/") == FoundRun(Path("elsewhere/b"), None)
    assert run_folders() == ["a"]


def test_the_name_of_a_job_comes_first_and_its_beginning_last(jobs: Jobs) -> None:
    job, other = jobs.play(folder="/there/a"), jobs.play("-more", folder="/there/b")
    make_run(f"runs/{jobs.name}")
    make_run(f"runs/{jobs.name}-m")
    assert find_run(jobs.name) == FoundRun(Path("/there/a"), jobs.name)
    assert find_run(f"{jobs.name}-m") == FoundRun(Path("runs") / f"{jobs.name}-m", None)
    assert find_run(f"{jobs.name}-mo") == FoundRun(Path("/there/b"), f"{jobs.name}-more")
    assert job.requests == other.requests == [StatusRequest()]


def test_a_run_that_has_ended_is_found_by_the_beginning_of_its_name(jobs: Jobs) -> None:
    jobs.play("-more", folder="/there/b")
    for name in ("night-1", "other-1", "other-2"):
        make_run(f"runs/{name}")
    assert find_run("nigh") == FoundRun(Path("runs/night-1"), None)
    with pytest.raises(ConfigError, match=r"^'oth' is ambiguous: other-1 or other-2;"):
        find_run("oth")
    for number in range(2, 7):
        make_run(f"runs/night-{number}")
    expected = "^'night' is ambiguous: night-4 or night-5 or night-6 or 3 others; give more of the name$"
    with pytest.raises(ConfigError, match=expected):
        find_run("night")


@pytest.mark.parametrize("text", ["", "nothing", "a-file", "a-folder"])
def test_what_is_no_run_is_refused(jobs: Jobs, text: str) -> None:
    Path("a-file").touch()
    make_run("a-folder/within")
    Path("events.jsonl").touch()
    jobs.play("-a")
    jobs.play("-b")
    expected = f"^'{text}' is neither a running job nor the folder of a run, here or in runs; running jobs: "
    with pytest.raises(ConfigError, match=f"{expected}{jobs.name}-a, {jobs.name}-b$"):
        find_run(text)
    with pytest.raises(ConfigError, match="is ambiguous"):
        find_run(jobs.name)


def test_a_job_that_does_not_reply_is_named(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = jobs.play_silent()
    send = admin_client.send
    monkeypatch.setattr(
        "lockstep.coordinator.run_lookup.send", lambda job, request: send(job, request, patience=0.01)
    )
    with pytest.raises(ConfigError, match=f"^{silent.name} has not replied in 0.01 seconds; try again"):
        find_run(jobs.name)
    assert known_jobs() == [silent.name]


def test_the_job_that_uses_a_folder(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    running, ended, paused = make_run("a"), make_run("b"), make_run(f"{jobs.name}-paused")
    Path("link").symlink_to(running)
    job = jobs.play(folder=str(running.absolute()))
    jobs.play("-gone", folder="/no/such/folder")
    assert job_in(Path("link")) == job.admin.name
    assert job_in(ended) is None
    asks = admin_client.running_jobs
    monkeypatch.setattr("lockstep.coordinator.run_lookup.running_jobs", lambda: asks(0.01))
    silent = jobs.play_silent("-paused")
    assert job_in(paused) == silent.name
    assert job_in(ended) is None


def test_what_cannot_be_listed_is_left_out(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.play()
    monkeypatch.setattr("lockstep.coordinator.admin_client._SOCKETS", Path("missing"))
    assert known_jobs() == []
    assert run_folders() == []
