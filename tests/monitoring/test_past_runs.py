"""What `lockstep runs` says of folders of runs, and that nothing in them stops it."""

import csv
import io
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
from lockstep.monitoring.past_runs import (
    PastRun,
    as_csv,
    as_json,
    past_runs,
    select,
    summarize,
    table,
)
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
    return summarize("a", lines(events), lambda: lines(measured), now)


def test_a_run_that_finished() -> None:
    ended = event(10.0, "finished", status=0, message="", seconds=9.5, steps=60, digest="0123456789abcdef")
    run = of(job(hosts=[]), *EVENTS[1:], ended)
    assert run == PastRun(
        name="a",
        began=BEGAN,
        seconds=9.5,
        state="finished",
        script="train.py",
        backend="jax",
        workers=2,
        replicas=2,
        hosts=1,
        steps=60,
        lost=1,
        joined=1,
        warnings=0,
        digest="0123456789abcdef",
        end="finished",
        written=run.written,
    )
    assert table([run])[1].split()[:2] == ["a", "finished"]
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
        (None, "the end is not recorded: the run was killed, its host was lost, or the disk was full"),
    ],
)
def test_a_run_that_did_not_finish(end: dict[str, Any] | None, said: str) -> None:
    """Its steps are those that were measured if the end does not say them, as in earlier versions."""
    ends = [] if end is None else [event(9.0, "finished", steps=None, digest="", **end)]
    run = of(*EVENTS, *ends, measured=MEASURED)
    said += "; not finite: val_loss, first seen at step 60"
    assert (run.end, run.steps, run.seconds) == (said, 51, 9.0 if ends else 7.0)
    assert run.metrics == {"loss": 0.4, "accuracy": 0.8, "val_loss": None, "val_accuracy": 0.76}
    assert run.effective == pytest.approx(5 * 0.9 / (9.0 if ends else 7.0), abs=1e-4)


def test_a_run_that_is_running() -> None:
    run = of(*EVENTS, measured=MEASURED[:-4], now=BEGAN + 20)
    assert (run.end, run.steps, run.seconds) == ("running", 51, 20.0)


def test_the_last_run_in_a_folder_counts() -> None:
    later = event(100.0, "job", **SIZE)
    run = of(*EVENTS, *END, later, event(103.0, "started", worker=0, pid=1), measured=MEASURED)
    assert (run.began, run.seconds, run.steps) == (BEGAN + 100, 3.0, None)
    assert (run.digest, run.hosts) == ("", None)


def test_a_torn_last_line_and_lines_that_are_no_events() -> None:
    whole = lines((*EVENTS, *END))
    for cut in range(len(whole) - len(lines(END[-1:])), len(whole) - 1):
        torn = summarize("a", whole[:cut], bytes, None)
        assert torn.end.startswith("the end is not recorded")
        assert (torn.began, torn.workers) == (BEGAN, 2)
    found = whole[:-5] + b"\n[]\n{\n\xff\n" + lines([event(100.0, "job", **SIZE)])
    again = summarize("a", found, bytes, None)
    assert again.began == BEGAN + 100
    nothing = PastRun("a", state="lost", end=again.end, lost=0, joined=0, warnings=0)
    assert summarize("a", b"", bytes, None) == nothing


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
    run = summarize("a", data, lambda: data, BEGAN if active else None)
    heading, row = table([run])
    assert row.startswith("a ")
    assert json.loads(as_json([run]))["run"] == "a"
    assert as_csv([run]).startswith("run,state,")
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
    assert found[3].end == (
        "finished; not finite: val_loss, first seen at step 60; not compared with one process: no?"
    )
    assert found[4].end.startswith("cannot be read: ")
    assert (found[0].steps, found[0].digest[:12]) == (4, "45be74b16910")


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
    assert heading.split()[:3] == ["RUN", "STATE", "STARTED"]
    values = "a finished 2023-11-14 22:13:20 10 s 2 2 60 45 % 1 0.4 nan 0.8 0.76 ab12 not finite: val_loss"
    assert " ".join(row.split()).startswith(values)
    assert " ".join(heading.split()) == (
        "RUN STATE STARTED TOOK WORKERS REPLICAS STEPS EFFECTIVE LOST loss val_loss accuracy val_accuracy "
        "DIGEST END"
    )
    (tmp_path / "none").mkdir()
    assert CliRunner().invoke(cli, ["runs", "none"]).output == "there is no run here\n"


def test_the_last_event_has_what_a_run_did() -> None:
    """Then the measurements are not read."""
    ended = {"status": 0, "message": "", "seconds": 100.0, "effective": 75.0, "lost": 2, "joined": 1}
    ended |= {"metrics": {"loss": 0.25}, "epoch": 3, "warnings": 4, "failed_checkpoints": 22, "saved": 40}
    ended |= {"checkpoint_failure": "the disk is full", "steps": 60, "not_finite": {"loss": 7}}

    def measurements() -> bytes:
        raise AssertionError

    log = lines([job(tags=["lr=0.1", "night"]), event(100.0, "finished", **ended)])
    run = summarize("a", log, measurements, None)
    assert (run.effective, run.lost, run.joined, run.epoch, run.warnings) == (0.75, 2, 1, 3, 4)
    assert (run.metrics, run.tags, run.seconds) == ({"loss": 0.25}, ("lr=0.1", "night"), 100.0)
    assert run.end == (
        "finished; 22 checkpoints failed, the newest complete one is from step 40 of 60 (the disk is full); "
        "not finite: loss, first seen at step 7"
    )


def test_the_run_from_which_another_one_resumed(tmp_path: Path) -> None:
    saved = {"checkpoints": {"folder": "/c", "resume": "/c/step-40"}}
    first = [job(), event(5.0, "checkpoint", worker=0, path="/c/step-40", step=40, seconds=0.1)]
    # It wrote a checkpoint of this step later.
    third = [event(60.0, "job", **SIZE), event(70.0, "checkpoint", worker=0, path="/c/step-40", step=40)]
    resumed = event(21.0, "resumed", worker=0, where="step 40 of fit 1", step=40)
    second = [event(20.0, "job", **SIZE, **saved), resumed]
    by_callback = [event(20.0, "job", **SIZE), event(20.5, "keeps", worker=0, folder="/c"), resumed]
    # The command was killed before it recorded the checkpoint of step 45.
    later = [event(20.0, "job", **SIZE, **saved), event(21.0, "resumed", worker=0, where="step 45", step=45)]
    elsewhere = [event(20.0, "job", **SIZE), event(20.5, "keeps", worker=0, folder="/d"), resumed]
    of_itself = [*first, *second]
    logs = {
        "first": first,
        "second": second,
        "third": third,
        "callback": by_callback,
        "later": later,
        "d": elsewhere,
        "own": of_itself,
    }
    for name, log in logs.items():
        make_run(tmp_path / name, log, [])
    runs = {run.name: run for run in past_runs([tmp_path], BEGAN + 100)}
    assert runs["first"].written == ((BEGAN + 5.0, "/c", 40),)
    linked = {name: run.resumed_from for name, run in runs.items()}
    assert linked.pop("second") in ("first", "own")
    assert linked.pop("callback") in ("first", "own")
    assert linked.pop("later") in ("first", "own")
    assert linked == {"first": "", "third": "", "d": "/d", "own": "own"}


RUNS = [
    PastRun("a", began=3.0, state="finished", steps=10, lost=0, metrics={"loss": 0.5}, tags=("x", "lr=1")),
    PastRun("b", began=2.0, state="failed", steps=30, lost=2, metrics={"loss": None, "steps": 7.0}),
    PastRun("train-c", began=1.0, state="finished", steps=20, lost=1, metrics={"loss": 0.25}, tags=("y",)),
]


@pytest.mark.parametrize(
    ("conditions", "order", "names"),
    [
        ([], "", "a b train-c"),
        ([], "steps", "a train-c b"),
        ([], "-STEPS", "b train-c a"),
        ([], "loss", "train-c a b"),
        ([], "-loss", "a train-c b"),
        ([], "metrics.steps", "b a train-c"),
        (["state=finished"], "", "a train-c"),
        (["state!=finished"], "", "b"),
        (["run=train*"], "", "train-c"),
        (["lost>0", "steps<25"], "", "train-c"),
        (["loss<0.3"], "", "train-c"),
        (["lost=2"], "", "b"),
        (["tags=x"], "", "a"),
        (["tags=lr=1"], "", "a"),
        (["tags=lr*", "tags=x"], "", "a"),
        (["tags!=x"], "", "b train-c"),
        (["tags="], "", "b"),
        (["effective="], "", "a b train-c"),
        (["effective>0"], "", ""),
    ],
)
def test_runs_are_filtered_and_sorted(conditions: list[str], order: str, names: str) -> None:
    assert [run.name for run in select(RUNS, conditions, order)] == names.split()


@pytest.mark.parametrize(
    ("conditions", "order", "message"),
    [
        (["lost"], "", "--where lost: give a column, one of = != < >, and a value, such as lost>0"),
        (["state>a"], "", "--where state>a: > needs a number"),
        (["los=1"], "", "--where los=1: there is no column 'los' here; there are run, state, started, "),
        ([], "-x", "--sort -x: there is no column 'x' here; there are run, state"),
    ],
)
def test_conditions_that_say_nothing_are_refused(conditions: list[str], order: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        select(RUNS, conditions, order)
    assert str(error.value).startswith(message)


def test_json_and_csv_have_all_columns() -> None:
    first, second, _ = map(json.loads, as_json(RUNS).splitlines())
    assert (first["run"], first["metrics"], first["tags"]) == ("a", {"loss": 0.5}, ["x", "lr=1"])
    assert second["metrics"] == {"loss": None, "steps": 7.0}
    rows = list(csv.DictReader(io.StringIO(as_csv(RUNS))))
    assert [row["loss"] for row in rows] == ["0.5", "", "0.25"]
    assert (rows[1]["metrics.steps"], rows[1]["steps"], rows[0]["tags"]) == ("7.0", "30", "x lr=1")
    assert set(rows[0]) == (set(first) - {"metrics"}) | {"loss", "metrics.steps"}
    columns = ["STARTED", "STEPS", "LOST", "loss", "metrics.steps", "TAGS"]
    none = table(RUNS)
    assert none[0].split() == ["RUN", "STATE", *columns]
    assert none[2].split() == ["b", *none[2].split()[1:4], "30", "2", "nan", "7"]
