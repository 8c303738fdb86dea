"""Notes on files that several workers write."""

from pathlib import Path

import pytest

from lockstep.coordinator import file_conflicts
from lockstep.coordinator.file_conflicts import FileConflicts

RUNNING = frozenset({0, 1, 2})
NOTHING = (False, "")


def test_a_file_of_one_worker_is_not_reported() -> None:
    made = FileConflicts(Path("/work"))
    assert made.opened(1, "/work/a.csv", "train.py:3", RUNNING) == NOTHING
    assert made.opened(1, "/work/a.csv", "train.py:9", RUNNING, appends=True) == NOTHING
    assert made.opened(2, "/work/b.csv", "train.py:3", RUNNING) == NOTHING


def test_a_file_of_two_workers_is_reported_once() -> None:
    made = FileConflicts(Path("/work"))
    assert made.opened(2, "/work/out/a.csv", "train.py:3", RUNNING) == NOTHING
    assert made.opened(0, "/work/out/a.csv", "train.py:3", RUNNING) == (
        True,
        "workers 0 and 2 both write out/a.csv (train.py:3); every worker runs the whole script: guard the "
        "line with if lockstep.is_chief():",
    )
    assert made.opened(1, "/work/out/a.csv", "train.py:3", RUNNING) == NOTHING
    assert made.opened(1, "/elsewhere/a.csv", "train.py:3", RUNNING) == NOTHING
    assert "write /elsewhere/a.csv (" in str(made.opened(0, "/elsewhere/a.csv", "train.py:3", RUNNING))


def test_a_file_that_a_library_writes_may_belong_to_a_line_that_trains() -> None:
    made = FileConflicts(Path("/work"))
    for worker, wanted in (
        (0, NOTHING),
        (1, (True, "in some_library); every worker runs the whole script: ")),
    ):
        found, text = made.opened(worker, "/work/a.json", "train.py:3", RUNNING, library="some_library")
        assert (found, wanted[1] in text) == (wanted[0], True)
    assert "if lockstep.is_chief(): unless it also trains or creates something that all workers need" in text


def test_a_worker_may_write_the_files_of_ended_workers() -> None:
    """Such workers are the next chief, and a replacement that runs the script again."""
    made = FileConflicts(Path("/work"))
    assert made.opened(0, "/work/a.csv", "train.py:3", RUNNING) == NOTHING
    assert made.opened(1, "/work/a.csv", "train.py:3", RUNNING - {0}) == NOTHING
    assert made.opened(2, "/work/a.csv", "train.py:3", RUNNING - {0}) != NOTHING


def test_the_number_of_notes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_conflicts, "_MOST_FILES", 8)
    made = FileConflicts(Path("/work"))
    said = [
        made.opened(worker, f"/work/{number}", "train.py:3", RUNNING)
        for number in range(10)
        for worker in RUNNING
    ]
    texts = [text for _, text in said if text]
    assert [text.startswith("workers 0 and 1 both write") for text in texts] == [True] * 5
    assert (sum(found for found, _ in said), made.unnamed) == (8, 3)


def test_files_to_which_workers_append_are_named_also_after_others() -> None:
    made = FileConflicts(Path("/work"))

    def opened(path: str, *, appends: bool) -> str:
        made.opened(0, path, "train.py:3", RUNNING, appends=appends)
        return made.opened(1, path, "train.py:3", RUNNING, appends=appends)[1]

    written = [bool(opened(f"/work/{number}", appends=False)) for number in range(7)]
    assert (written, made.unnamed) == ([True] * 5 + [False] * 2, 2)
    assert opened("/work/rows.csv", appends=True) == (
        "workers 0 and 1 both append to rows.csv (train.py:3), so it has each line several times; every "
        "worker runs the whole script: guard the line with if lockstep.is_chief():"
    )
    # One that had a name needs no second note; one that had none gets it now.
    assert (opened("/work/0", appends=True), made.unnamed) == ("", 2)
    found, text = made.opened(0, "/work/6", "train.py:9", RUNNING, appends=True)
    assert (found, "append to 6 (train.py:9)" in text, made.unnamed) == (False, True, 1)


def test_files_of_two_hosts_are_one_file_only_if_the_hosts_share_it() -> None:
    made = FileConflicts(Path("/work"))
    assert made.opened(0, "/work/a.csv", "train.py:3", RUNNING, host=0) == NOTHING
    assert made.opened(1, "/work/a.csv", "train.py:3", RUNNING, host=1) == NOTHING
    assert made.opened(2, "/work/a.csv", "train.py:3", RUNNING, host=1) != NOTHING
    assert made.opened(0, "/shared/b.csv", "train.py:4", RUNNING) == NOTHING
    assert made.opened(1, "/shared/b.csv", "train.py:4", RUNNING) != NOTHING
