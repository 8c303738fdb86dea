"""What a job keeps that starts again, and which hosts it has after a verification has named some."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.job_restarts import EarlierStarts, earlier_starts, events_begin, trusted_hosts
from lockstep.cli.task_role import as_before
from lockstep.hosts.where import Hosts
from lockstep.protocol.job_spec import JobHost


def write(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        for number, event in enumerate(events):
            file.write(json.dumps({"time": float(number), **event}) + "\n")


def verdict(workers: Sequence[int], *hosts: str, kind: str = "worker") -> dict[str, Any]:
    return {"event": "verification failed", "verdict": kind, "workers": workers, "hosts": hosts}


def job(replicas: int, threads: int) -> dict[str, Any]:
    return {"event": "job", "replicas": replicas, "threads": threads}


def test_the_log_says_what_earlier_starts_of_the_job_have_found(tmp_path: Path) -> None:
    assert events_begin(tmp_path) == 0
    assert earlier_starts(tmp_path, 0) == EarlierStarts()
    # Another run with the same --run-dir.
    write(tmp_path, job(9, 9), verdict([1], "b"), verdict([2], "c"))
    begin = events_begin(tmp_path)
    assert earlier_starts(tmp_path, begin) == EarlierStarts()
    first = [job(4, 2), verdict([0, 1], "a", "b", kind="third"), verdict([1], "b"), verdict([])]
    write(tmp_path, *first, {"event": "coordinator", "term": 2}, verdict([1], "b"))
    assert earlier_starts(tmp_path, begin) == EarlierStarts(4, 2, ("b",))
    write(tmp_path, job(4, 2), verdict([1], "b"), verdict([1, 2], "b", "c"))
    assert earlier_starts(tmp_path, begin) == EarlierStarts(4, 2, ("b", "b", "b", "c"))


@pytest.mark.parametrize(
    ("set_here", "kept"), [((None, None, None), (3, 2)), ((6, 1, None), (6, 1)), ((None, None, 2), (None, 2))]
)
def test_a_job_that_starts_again_keeps_replicas_and_threads(
    set_here: tuple[int | None, ...], kept: tuple[int | None, ...]
) -> None:
    """They may follow from hosts or cores that the job no longer has."""
    options: dict[str, Any] = dict(zip(("replicas", "threads", "servers"), set_here, strict=True))
    options |= {"avoid_host_after": 1, "min_workers": 1, "checkpoint": "s3://bucket/job"}
    hosts = Hosts(tuple(JobHost(name, 1) for name in "abc"))
    destination = as_before(options, hosts, EarlierStarts(3, 2, ("b",)))
    assert destination == Hosts((hosts.hosts[0], hosts.hosts[2]))
    assert (options["replicas"], options["threads"]) == kept


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
    trusted = trusted_hosts(hosts, named, 2, min_workers, in_store=True)
    assert "".join(host.name for host in trusted) == left
    assert capsys.readouterr().err.count("the job starts without it (--avoid-host-after 2)") == 3 - len(left)
    # A host may have the only checkpoint.
    assert trusted_hosts(hosts, named, 2, min_workers, in_store=False) == hosts
    assert capsys.readouterr().err.count("but the job starts with all hosts") == (left != "abc")
