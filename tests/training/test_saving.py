"""Files that all workers write: one worker does, and no reader sees a partial file."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def saved(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("saved")
    run = launch("-n 2", "saving.py", str(folder))
    assert run.status == 0, run.stderr
    return run, folder


def test_every_worker_loads_the_saved_files(saved: tuple[Any, Path]) -> None:
    for worker in range(2):
        assert saved[0].marked(worker, "loaded ") == [
            "loaded whole.keras True",
            "loaded best.keras True",
            f"loaded own-{worker}.keras True",
        ]


def test_one_worker_is_the_chief(saved: tuple[Any, Path]) -> None:
    assert [saved[0].marked(worker, "chief ") for worker in range(2)] == [["chief True"], ["chief False"]]


def test_callbacks_write_once_and_leave_no_temporary_files(saved: tuple[Any, Path]) -> None:
    folder = saved[1]
    with (folder / "log.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    assert sorted(path.name for path in (folder / "made").iterdir()) == [f"{i}.weights.h5" for i in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.keras", "chief.keras", "log.csv", "made", "own-0.keras", "own-1.keras", "whole.keras",
    ]  # fmt: skip
    assert not (saved[0].folder / "saved").exists(), "the markers of shared saves"


def test_a_failure_to_write_is_an_error_on_every_worker(saved: tuple[Any, Path]) -> None:
    (first,), (second,) = (saved[0].marked(worker, "error ") for worker in range(2))
    wanted = f"error OSError cannot write {saved[1]}/nowhere/x.weights.h5: "
    assert first.startswith(wanted)
    assert second.startswith(wanted)


def test_a_backup_is_restored_by_all_and_removed_by_one(saved: tuple[Any, Path]) -> None:
    (first,), (second,) = (saved[0].marked(worker, "resumed ") for worker in range(2))
    assert first == second
    assert first.startswith("resumed [3] ")
    assert not (saved[1] / "backup").exists()
