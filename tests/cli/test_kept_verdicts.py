"""A kept verdict holds as long as all sources of the script are the same; a comparison that ends says why."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lockstep.cli.run import _witness
from lockstep.cli.witness import _end_of, _hashes, _sources
from lockstep.coordinator.comparison import read_verdict
from lockstep.protocol.job_spec import JobSpec
from lockstep.system.paths import RunPaths
from lockstep.worker.program_sources import file_hash


@pytest.mark.parametrize("program", [["--", "code/train.py", "-m"], ["-m", "--", "code.train", "a"]])
def test_sources_are_found_beside_the_script(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, other = tmp_path / "code", tmp_path / "other.py"
    folder.mkdir()
    for path in (folder / "train.py", folder / "late.py", other):
        path.write_text(path.name)
    before = _hashes(["train.py", "late.py", str(other), "lost.py"], program)
    expected = [file_hash(path) for path in (folder / "train.py", folder / "late.py", other)]
    assert [*before.values()] == [*expected, ""]
    (folder / "late.py").write_text("changed")
    changed = _hashes(before, program)
    assert {source for source in before if before[source] != changed[source]} == {"late.py"}


def test_the_sources_of_a_comparison_are_those_of_its_last_call(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert _sources(paths) == {}
    paths.digests.mkdir()
    records = [
        {"event": "program", "sources": {"train.py": "1"}},
        {"event": "settings"},
        {"event": "program", "sources": {"train.py": "1", "late.py": "2"}},
    ]
    lines = [json.dumps({"time": 1.0, **record}) for record in records]
    (paths.digests / "000001.jsonl").write_text("\n".join(lines) + "\n")
    assert _sources(paths) == {"train.py": "1", "late.py": "2"}


@pytest.mark.parametrize(
    ("status", "output", "log", "reason"),
    [
        (-9, "lockstep: 1 worker", "", "the comparison was killed by SIGKILL"),
        (1, "lockstep: worker 0 was killed by SIGKILL", "warning", "the comparison was killed by SIGKILL"),
        (2, "lockstep: worker 0 exited with status 2", "usage: t.py file", "usage: t.py file"),
        (2, "lockstep: ConfigError: no script t.py", "", "lockstep: ConfigError: no script t.py"),
        (3, "", "", "the comparison has ended with status 3"),
    ],
)
def test_a_comparison_that_ends_says_why(
    status: int, output: str, log: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "output").write_text(output)
    if log:
        (tmp_path / "log").write_text(log)
    assert _end_of(status, tmp_path / "output", tmp_path / "log") == reason


def test_a_limit_of_processor_time_is_told(tmp_path: Path) -> None:
    said = ("", "lockstep: worker 0 was killed by SIGXCPU")
    for status, text in zip((-signal.SIGXCPU, 1), said, strict=True):
        (tmp_path / "output").write_text(text)
        assert _end_of(status, tmp_path / "output", tmp_path / "log").startswith("it takes more than ")


@pytest.mark.parametrize(("servers", "replicas", "has"), [(1, 3, "parameter servers"), (0, 1, "one replica")])
def test_a_job_without_a_comparison_says_why(servers: int, replicas: int, has: str, tmp_path: Path) -> None:
    spec = SimpleNamespace(parameter_servers=servers, replicas=replicas, run_dir=tmp_path)
    with _witness(cast("JobSpec", spec), "first"):
        assert read_verdict(RunPaths(tmp_path)) == f"not compared with one process: the job has {has}"
