"""What a comparison with one process has shown, in words."""

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.comparison import (
    MOST_CACHED,
    NO_CALL,
    NOT_COMPARED,
    cache_result,
    read_fields,
    read_verdict,
    save_verdict,
    verdict,
)
from lockstep.system.paths import RunPaths


def step(*named: str, reason: str = "") -> dict[str, Any]:
    parts = [{"part": "loss", "deviation": "double", "begins": "", "named": name} for name in named]
    return {"call": "fit 1", "reason": reason, "equal": ["mae"], "differences": parts}


@pytest.mark.parametrize(
    ("compared", "ended", "failed", "words"),
    [
        ([step()], "t.py:1 writes a", "", "compared with one process: equal"),
        ([step(), step("the loss f")], "", "", "compared with one process: 1 part differs, as noted"),
        ([step("the loss f", ""), step("")], "", "", "compared with one process: 2 parts differ"),
        ([step(reason="it has steps")], "t.py:1 writes a", "", "not compared with one process: it has steps"),
        ([], "t.py:1 writes a", "", "not compared with one process: t.py:1 writes a"),
        ([], "", "Traceback\nValueError: no\n", "not compared with one process: ValueError: no"),
        ([], "", "", f"not compared with one process: {NO_CALL}"),
    ],
)
def test_the_words_of_the_last_line(compared: Any, ended: str, failed: str, words: str) -> None:
    assert verdict({"compared": compared, "ended": ended, "failed": failed}) == words


def test_a_run_without_a_file_says_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert read_verdict(paths) == ""
    save_verdict(paths, "equal")
    assert read_verdict(paths) == read_verdict(paths, ended=False) == "equal"
    save_verdict(paths, NOT_COMPARED)
    assert read_verdict(paths) == "not compared with one process"
    # While it trains, it may still be compared.
    assert read_verdict(paths, ended=False) == ""
    paths.comparison.write_text("{")
    assert read_verdict(paths) == ""


def test_the_cache_keeps_the_newest_results(tmp_path: Path) -> None:
    folder = tmp_path / "compared"
    for number in range(MOST_CACHED + 2):
        path = folder / f"{number}.json"
        if number < MOST_CACHED:
            folder.mkdir(exist_ok=True)
            path.touch()
        else:
            cache_result(path, {"ended": str(number)})
        os.utime(path, (number, number))
    assert {int(path.stem) for path in folder.iterdir()} == {*range(2, MOST_CACHED + 2)}
    assert read_fields(path) == {"ended": str(MOST_CACHED + 1)}
