"""Lines of a run folder that are not what they should be are left out, whatever they are."""

from pathlib import Path

import pytest

from lockstep.functions.history import RunHistory
from lockstep.observability.run_lines import Happening, happening, happenings, json_object, measurement

GARBAGE = [b"", b"[]", b"{", b"\xff", b'"\xff"', b"null", b"7", b"[" * 100_000, b'{"a":' * 100_000]


@pytest.mark.parametrize("line", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_no_line(line: bytes) -> None:
    assert (json_object(line), happening(line), measurement(line)) == (None, None, None)


def test_an_event_needs_a_time_a_name_and_the_id_of_a_worker() -> None:
    lines = b'{"time":1,"event":"new","worker":2,"of":"later"}\n{"time":1}\n{"time":"a","event":"job"}\n'
    lines += b'{"time":1,"event":2}\n{"time":1,"event":"view","worker":"x"}\n{"time":2,"event":"torn'
    assert list(happenings(lines)) == [Happening(1.0, "new", 2, {"of": "later"})]
    assert measurement(b'{"time":1.0,"event":"steps","worker":0}') is None


def test_the_error_of_a_job_whose_log_has_a_torn_end(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"time":1,"event":"failed","worker":1,"summary":"s","traceback":"the traceback"}\n'
        '{"time":2,"event":"finished","status":1,"message":"worker 1 failed","workers":[1]}\n{"time'
    )
    error = RunHistory(tmp_path, " on node1", whole=True).error(1)
    assert error.args[0] == f"worker 1 failed; log: {tmp_path}/worker-1.log on node1"
    assert (error.worker, error.traceback) == (1, "the traceback")
    assert (
        str(RunHistory(tmp_path).error(3)) == "the job's command exited with status 3; see its output above"
    )
