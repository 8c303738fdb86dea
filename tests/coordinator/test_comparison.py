"""What a comparison with one process has shown, in words."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from lockstep.coordinator.comparison import (
    MOST_CACHED,
    NO_CALL,
    NOT_COMPARED,
    cache_result,
    name_of_cached,
    read_fields,
    read_verdict,
    save_verdict,
    verdict,
)
from lockstep.observability.digest_records import (
    DigestsRecorded,
    ProgramRecorded,
    SettingsRecorded,
    StepDigests,
)
from lockstep.system.paths import RunPaths


def step(*named: str, reason: str = "", kind: str = "train") -> dict[str, Any]:
    parts = [{"part": "loss", "deviation": "double", "begins": "", "named": name} for name in named]
    return {"call": "fit 1", "kind": kind, "reason": reason, "equal": ["mae"], "differences": parts}


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
        ([step(kind="test")], "", "", "compared with one process: equal (no training step)"),
    ],
)
def test_the_words_of_the_last_line(compared: Any, ended: str, failed: str, words: str) -> None:
    assert verdict({"compared": compared, "ended": ended, "failed": failed}) == words


def test_the_last_line_says_how_the_steps_of_the_run_are_others() -> None:
    def words(*steps: Any) -> str:
        return verdict({"compared": steps, "ended": "", "failed": ""}, "--local-steps")

    assert words(step()) == "compared with one process: equal (without --local-steps)"
    assert words(step("")) == "compared with one process: 1 part differs (without --local-steps)"
    # An evaluation is as always.
    assert words(step(kind="test")) == "compared with one process: equal (no training step)"
    assert words(step(reason="it waits")) == "not compared with one process: it waits"


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


def test_a_cached_result_counts_for_the_same_program_data_options_and_versions() -> None:
    versions = {"keras": "3.15.1", "jax": "0.9", "keras-lockstep": "0.1"}
    program = ProgramRecorded(
        seed=1,
        replicas=2,
        threads=1,
        input="divided",
        backend="jax",
        versions=versions,
        flags={},
        processor="p",
        features="avx2",
        sources={"train.py": "5f"},
        script="train.py",
    )
    settings = SettingsRecorded(call="fit 1", trained=0, settings={"call batch size": "32"})
    first = StepDigests(step=1, call="fit 1", number=1, shapes=("float32[32, 8]",), inputs={0: "0a"})
    digests = DigestsRecorded(serial=1, stride=1, steps=(first,))

    def name(*words: str, time: float = 0.0, **changes: Any) -> str:
        events = [program, settings, digests]
        changed = [
            structs.replace(event, **{key: changes[key] for key in changes if hasattr(event, key)})
            for event in events
        ]
        records = [{"time": time, "worker": 0, **msgspec.to_builtins(event)} for event in changed]
        return name_of_cached(words or ("--replicas", "2"), records)

    others = [
        *({"versions": versions | {key: "9"}} for key in versions),
        {"sources": {"train.py": "60"}},
        {"backend": "torch"},
        {"features": "avx512"},
        {"variables": {"RATE": "1a2b"}},
        {"settings": {"call batch size": "64"}},
        {"steps": (structs.replace(first, shapes=("float32[32, 9]",)),)},
        {"steps": (structs.replace(first, shapes=("float32[64, 8]",)),)},
    ]
    names = [name(), name("--replicas", "3"), *(name(**changes) for changes in others)]
    assert len({*names}) == len(names)
    # Other data of the same shapes, at another time.
    assert name(time=2.0, serial=2, steps=(structs.replace(first, inputs={0: "0b"}),)) == names[0]


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
