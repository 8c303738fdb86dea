"""The digest log: its size stays below a limit, and another process can continue it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.digest_log import DigestLog, segments, thinned
from lockstep.observability.digest_records import DigestsRecorded, NamesRecorded, StepDigests
from lockstep.observability.event_log import encoded


def event(serial: int, *steps: int) -> PublishedEvent:
    made = tuple(StepDigests(step=step, call="fit 1", number=step, total="0" * 16) for step in steps)
    return PublishedEvent(1.0, 0, DigestsRecorded(serial=serial, stride=1, steps=made))


def names(folder: Path) -> list[str]:
    return [path.name for path in segments(folder)]


def steps(folder: Path) -> list[int]:
    records = [json.loads(line) for path in segments(folder) for line in path.read_text().splitlines()]
    return [step["step"] for record in records for step in record.get("steps", ())]


def test_old_segments_are_thinned_first_and_the_size_stays_below_the_limit(tmp_path: Path) -> None:
    folder, limit = tmp_path / "digests", 40_000
    log = DigestLog(folder, encoded, pytest.fail, limit=limit, segment=4_000)
    largest = 0
    for serial in range(1, 401):
        log.append(event(serial, *range(serial * 4 - 3, serial * 4 + 1)))
        largest = max(largest, sum(path.stat().st_size for path in segments(folder)))
    log.close()
    assert largest <= limit
    found = steps(folder)
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-9:] == list(range(1592, 1601))
    gaps = [later - earlier for earlier, later in pairwise(found[1:])]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 4
    assert all(step % gaps[0] == 0 for step in found[1:20])


def test_thinning_keeps_everything_but_steps(tmp_path: Path) -> None:
    kept = encoded(PublishedEvent(1.0, 0, NamesRecorded("k", ("a",))))
    text = b'{"event":"segment","stride":1}\n' + kept + encoded(event(1, 1, 2, 3, 4)) + b'{"torn'
    lines = [json.loads(line) for line in thinned(text, 2).splitlines()]
    assert lines[0] == {"event": "segment", "stride": 2}
    assert lines[1] == json.loads(kept)
    assert [step["step"] for step in lines[2]["steps"]] == [1, 2, 4]
    assert len(lines) == 3


def test_another_process_continues_in_a_segment_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "digests"
    first = DigestLog(folder, encoded, pytest.fail)
    assert not folder.exists()
    first.append(event(1, 1, 2))
    second = DigestLog(folder, encoded, pytest.fail)
    second.announce(event(7, 100))
    assert names(folder) == ["000001.jsonl"]
    second.append(event(2, 3))
    first.append(event(2, 4))
    assert names(folder) == ["000001.jsonl", "000002.jsonl"]
    assert steps(folder) == [1, 2, 4, 100, 3]
    first.close()
    second.close()


def test_a_log_that_cannot_be_written_is_lost_with_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "digests").write_text("a file")
    log = DigestLog(tmp_path / "digests", encoded, said.append)
    log.append(event(1, 1))
    log.append(event(2, 2))
    log.close()
    assert len(said) == 1
    assert "digest log is lost" in said[0]
