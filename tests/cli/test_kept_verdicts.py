"""A kept verdict holds as long as all sources of the script are the same."""

import json
from pathlib import Path

import pytest

from lockstep.cli.witness import _hashes, _sources
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
