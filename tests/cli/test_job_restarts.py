"""Which hosts a job has that starts again after a verification has named some."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.cli.job_restarts import named_hosts, trusted_hosts
from lockstep.protocol.job_spec import JobHost


def test_each_verdict_on_a_worker_names_its_host_once(tmp_path: Path) -> None:
    assert named_hosts(tmp_path) == ()
    verdicts = [("third", ["a", "b"]), ("worker", ["b"]), ("worker", ["b", "c"]), ("worker", [])]
    lines = [
        {"time": 1.0, "event": "verification failed", "verdict": verdict, "hosts": hosts}
        for verdict, hosts in verdicts
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert named_hosts(tmp_path) == ("b", "b", "c")


@pytest.mark.parametrize(
    ("named", "min_workers", "left"),
    [
        ((), 1, "abc"),
        (("b",), 1, "abc"),
        (("b", "b"), 1, "ac"),
        (("b", "c", "b", "c", "c"), 1, "a"),
        # A host stays if too few workers remained without it; the others are named more often.
        (("b", "c", "b", "c", "c"), 3, "ab"),
        (("a", "b", "c") * 2, 1, "c"),
        (("gone", "gone"), 1, "abc"),
    ],
)
def test_hosts_that_were_named_too_often_are_left_out(
    named: Sequence[str], min_workers: int, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tuple(JobHost(name, 2) for name in "abc")
    assert "".join(host.name for host in trusted_hosts(hosts, named, 2, min_workers)) == left
    assert capsys.readouterr().err.count("the job starts without it (--avoid-host-after 2)") == 3 - len(left)
