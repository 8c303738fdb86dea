"""Notes on files that several workers write."""

from pathlib import Path

import pytest

from lockstep.coordinator import file_conflicts
from lockstep.coordinator.file_conflicts import FileConflicts

RUNNING = frozenset({0, 1, 2})


def test_a_file_of_one_worker_is_not_reported() -> None:
    made = FileConflicts(Path("/work"))
    assert made.opened(1, "/work/a.csv", "train.py:3", RUNNING) is None
    assert made.opened(1, "/work/a.csv", "train.py:9", RUNNING) is None
    assert made.opened(2, "/work/b.csv", "train.py:3", RUNNING) is None


def test_a_file_of_two_workers_is_reported_once() -> None:
    made = FileConflicts(Path("/work"))
    assert made.opened(2, "/work/out/a.csv", "train.py:3", RUNNING) is None
    assert made.opened(0, "/work/out/a.csv", "train.py:3", RUNNING) == (
        "workers 0 and 2 both write out/a.csv (train.py:3); every worker runs the whole script: guard the "
        "line with if lockstep.is_chief():"
    )
    assert made.opened(1, "/work/out/a.csv", "train.py:3", RUNNING) is None
    assert made.opened(1, "/elsewhere/a.csv", "train.py:3", RUNNING) is None
    assert "write /elsewhere/a.csv (" in str(made.opened(0, "/elsewhere/a.csv", "train.py:3", RUNNING))


def test_a_worker_may_write_the_files_of_ended_workers() -> None:
    """Such workers are the next chief, and a replacement that runs the script again."""
    made = FileConflicts(Path("/work"))
    assert made.opened(0, "/work/a.csv", "train.py:3", RUNNING) is None
    assert made.opened(1, "/work/a.csv", "train.py:3", RUNNING - {0}) is None
    assert made.opened(2, "/work/a.csv", "train.py:3", RUNNING - {0}) is not None


def test_the_number_of_notes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_conflicts, "_MOST_FILES", 8)
    made = FileConflicts(Path("/work"))
    said = []
    for number in range(10):
        for worker in RUNNING:
            said.append(made.opened(worker, f"/work/{number}", "train.py:3", RUNNING))
    lines = [line for line in said if line]
    assert [line.startswith("workers 0 and 1 both write") for line in lines] == [True] * 5 + [False]
    assert lines[-1] == "several workers write more files; they are not listed"


def test_files_of_two_hosts_are_one_file_only_if_the_hosts_share_it() -> None:
    made = FileConflicts(Path("/work"))
    assert made.opened(0, "/work/a.csv", "train.py:3", RUNNING, host=0) is None
    assert made.opened(1, "/work/a.csv", "train.py:3", RUNNING, host=1) is None
    assert made.opened(2, "/work/a.csv", "train.py:3", RUNNING, host=1) is not None
    assert made.opened(0, "/shared/b.csv", "train.py:4", RUNNING) is None
    assert made.opened(1, "/shared/b.csv", "train.py:4", RUNNING) is not None
