"""Digest logs as runs leave them: of several workers, incomplete, and of several runs in one folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.diff.recording import Key, Recording, read_recording
from lockstep.errors import ConfigError

PROGRAM = {"event": "program", "format": 1, "replicas": 2, "seed": 0}


def written(folder: Path, *records: dict[str, Any] | str, segment: int = 1) -> Path:
    """Write a segment of a digest log."""
    (folder / "digests").mkdir(exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "digests" / f"{segment:06}.jsonl").write_text("\n".join(lines))
    return folder


def digests(worker: int, serial: int, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"event": "digests", "worker": worker, "serial": serial, "stride": 1, "steps": list(steps)}


def step(number: int, replica: int, **more: Any) -> dict[str, Any]:
    own = {str(replica): f"{number}.{replica}"}
    return {"step": number, "call": "fit 1", "number": number, "inputs": own, "partials": own, **more}


def steps_of(recording: Recording) -> dict[int, dict[int, str]]:
    return {key.step: one.partials for key, one in recording.steps.items()}


def test_the_records_of_all_workers_are_one_step(tmp_path: Path) -> None:
    names = {"event": "names", "key": "k", "names": ["a", "b"]}
    first = digests(0, 1, step(1, 0, total="t", names="k"), step(2, 0))
    written(tmp_path, PROGRAM | {"worker": 0}, names, first)
    written(tmp_path, digests(1, 1, step(1, 1)), digests(2, 1, step(2, 1)), segment=2)
    found = read_recording(tmp_path)
    assert steps_of(found) == {1: {0: "1.0", 1: "1.1"}, 2: {0: "2.0", 1: "2.1"}}
    assert (found.steps[Key(1, False)].total, found.steps[Key(1, False)].names) == ("t", ("a", "b"))
    assert (found.replicas, found.last, found.lost) == (2, 2, 0)


def test_incomplete_and_foreign_lines_are_skipped_and_lost_events_counted(tmp_path: Path) -> None:
    torn = json.dumps(digests(0, 3, step(3, 0)))[:-9]
    written(
        tmp_path,
        PROGRAM | {"worker": 0},
        digests(0, 1, step(1, 0)),
        "[]",
        "\x00",
        digests(0, 4, step(4, 0)),
        torn,
    )
    found = read_recording(tmp_path)
    assert sorted(steps_of(found)) == [1, 4]
    assert found.lost == 2


def test_a_run_that_resumed_continues_the_one_before(tmp_path: Path) -> None:
    job = {"event": "job", "replicas": 2}
    earlier = (job, PROGRAM | {"worker": 0}, digests(0, 1, step(1, 0), step(2, 0), step(3, 0)))
    resumed = (job, PROGRAM | {"worker": 0, "seed": 5}, digests(0, 1, step(3, 0, total="new"), step(4, 0)))
    written(tmp_path, *earlier, *resumed)
    found = read_recording(tmp_path)
    assert sorted(steps_of(found)) == [1, 2, 3, 4]
    assert found.steps[Key(3, False)].total == "new"
    again = (job, PROGRAM | {"worker": 0, "seed": 6}, digests(0, 1, step(1, 0)))
    written(tmp_path, *again, segment=2)
    assert sorted(steps_of(read_recording(tmp_path))) == [1]


def test_tests_are_apart_from_training_steps(tmp_path: Path) -> None:
    test = step(2, 0, trains=False) | {"call": "evaluate 1", "number": 1}
    written(tmp_path, PROGRAM | {"worker": 0}, digests(0, 1, step(2, 0), test, step(3, 0)))
    found = read_recording(tmp_path)
    assert sorted(found.steps) == [Key(2, False), Key(2, True, "evaluate 1", 1), Key(3, False)]


@pytest.mark.parametrize("records", [(), ("{}",), (PROGRAM | {"worker": 0, "format": 99},)])
def test_a_folder_without_a_readable_log_is_refused(tmp_path: Path, records: tuple[Any, ...]) -> None:
    if records:
        written(tmp_path, *records)
    with pytest.raises(ConfigError):
        read_recording(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        read_recording(tmp_path / "missing")
