"""What `lockstep runs` says of folders of runs, and that nothing in them stops it."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.cli.main import cli
from lockstep.coordinator.comparison import save_verdict
from lockstep.errors import ConfigError
from lockstep.monitoring.past_runs import PastRun, past_runs, summarize, table
from lockstep.system.locks import try_lock
from lockstep.system.paths import RunPaths

from .made_runs import (
    BEGAN,
    END,
    EVENTS,
    HOSTILE,
    MEASURED,
    event,
    job,
    lines,
    make_hostile_run,
    make_run,
)

GOLDEN = Path(__file__).parents[1] / "release" / "golden" / "run"
SIZE = {"workers": 2, "replicas": 2}


def of(*events: dict[str, Any], measured: Any = (), now: float | None = None) -> PastRun:
    return summarize("a", lines(events), lines(measured), now)


def test_a_run_that_finished() -> None:
    ended = event(10.0, "finished", status=0, message="", seconds=9.5, steps=60, digest="0123456789abcdef")
    run = of(job(hosts=[]), *EVENTS[1:], ended)
    assert run == PastRun("a", BEGAN, 9.5, 2, 0, 2, 1, 60, "0123456789ab", "finished")
    hosts = [["node1", 2], ["node2", 1]]
    served = of(job(workers=6, replicas=6, parameter_servers=2, hosts=hosts), ended)
    assert (served.workers, served.servers, served.hosts) == (3, 2, 2)
    assert " 3 + 2 ps " in table([served])[1]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ({"status": 143, "message": "stopped by SIGTERM"}, "stopped by SIGTERM"),
        (
            {"status": 1, "message": "worker 1 exited with status 1: ValueError: no"},
            "failed (1): worker 1 exited with status 1: ValueError: no",
        ),
        ({"status": 137, "message": "two\nlines\x1b[2J"}, "failed (137): two?lines?[2J"),
        (None, "no end is recorded: it was killed, or its host was lost"),
    ],
)
def test_a_run_that_did_not_finish(end: dict[str, Any] | None, said: str) -> None:
    """Its steps are those that were measured if the end does not say them, as in earlier versions."""
    ends = [] if end is None else [event(9.0, "finished", steps=None, digest="", **end)]
    run = of(*EVENTS, *ends, measured=MEASURED)
    assert (run.end, run.steps, run.seconds) == (said, 51, 9.0 if ends else 7.0)


def test_a_run_that_is_running() -> None:
    run = of(*EVENTS, measured=MEASURED, now=BEGAN + 20)
    assert (run.end, run.steps, run.seconds) == ("running", 51, 20.0)


def test_the_last_run_in_a_folder_counts() -> None:
    later = event(100.0, "job", **SIZE)
    run = of(*EVENTS, *END, later, event(103.0, "started", worker=0, pid=1), measured=MEASURED)
    assert (run.began, run.seconds, run.steps) == (BEGAN + 100, 3.0, None)
    assert (run.digest, run.hosts) == ("", None)


def test_a_torn_last_line_and_lines_that_are_no_events() -> None:
    whole = lines((*EVENTS, *END))
    for cut in range(len(whole) - len(lines(END[-1:])), len(whole) - 1):
        torn = summarize("a", whole[:cut], b"", None)
        assert torn.end.startswith("no end is recorded")
        assert (torn.began, torn.workers) == (BEGAN, 2)
    again = summarize("a", whole[:-5] + b"\n[]\n{\n\xff\n" + lines([event(100.0, "job", **SIZE)]), b"", None)
    assert again.began == BEGAN + 100
    assert summarize("a", b"", b"", None) == PastRun("a", end=again.end)


def test_a_run_of_a_later_format_is_not_interpreted() -> None:
    run = of(job(format=7), *END)
    assert run == PastRun("a", BEGAN, end="recorded in format 7 by a later version")


value = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
records = st.dictionaries(
    st.sampled_from(["time", "event", "workers", "replicas", "hosts", "parameter_servers", "format"])
    | st.sampled_from(["status", "message", "seconds", "steps", "digest", "trained"]),
    value | st.sampled_from(["job", "finished", "steps"]),
)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(records.map(json.dumps) | st.text()), st.booleans())
@example(["[" * 100_000], False)
def test_any_file_is_a_row(found: list[str], active: bool) -> None:
    data = "\n".join(found).encode(errors="replace")
    heading, row = table([summarize("a", data, data, BEGAN if active else None)])
    assert row.startswith("a ")
    assert heading.startswith("RUN ")
    assert row.isprintable()


def test_folders_are_listed_the_newest_first(tmp_path: Path) -> None:
    save_verdict(RunPaths(make_run(tmp_path / "runs" / "old")), "not compared with one process: no\n")
    make_run(tmp_path / "runs" / "new", [event(50.0, "job", **SIZE)], ())
    make_hostile_run(tmp_path / "runs" / "hostile")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "file").touch()
    (tmp_path / "runs" / "odd" / "events.jsonl").mkdir(parents=True)
    descriptor = try_lock(RunPaths(tmp_path / "runs" / "new").lock)
    assert descriptor is not None
    try:
        found = past_runs([tmp_path / "runs", GOLDEN], BEGAN + 60)
    finally:
        os.close(descriptor)
    assert [run.name for run in found] == ["run", "new", "hostile", "old", "odd"]
    assert [run.end for run in found[:2]] == ["finished", "running"]
    assert HOSTILE.partition("\u2028")[0] in found[2].end
    assert found[3].end == "finished; not compared with one process: no?"
    assert found[4].end.startswith("cannot be read: ")
    assert (found[0].steps, found[0].digest) == (4, "45be74b16910")


def test_the_name_of_a_folder_has_no_control_characters(tmp_path: Path) -> None:
    """Whatever could move the cursor, or begin another line, is a question mark."""
    make_run(tmp_path / "runs" / "two\nlines\x1b[2J")
    (tmp_path / "runs" / "odd\x1b[2J" / "events.jsonl").mkdir(parents=True)
    found = past_runs([tmp_path / "runs"], BEGAN + 60)
    assert [run.name for run in found] == ["two?lines?[2J", "odd?[2J"]
    assert all(row.isprintable() for row in table(found))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.localtime", time.gmtime)
    missing = CliRunner().invoke(cli, ["runs"])
    assert isinstance(missing.exception, ConfigError)
    make_run(tmp_path / "runs" / "a")
    heading, row = CliRunner().invoke(cli, ["runs"]).output.splitlines()
    assert heading.split()[:3] == ["RUN", "STARTED", "TOOK"]
    assert row.split() == ["a", "2023-11-14", "22:13:20", "10s", "2", "2", "60", "ab12", "finished"]
    (tmp_path / "none").mkdir()
    assert CliRunner().invoke(cli, ["runs", "none"]).output == "there is no run here\n"
