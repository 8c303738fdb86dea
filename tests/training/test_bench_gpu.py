"""The script of `make bench-gpu`, with tiny models and without a GPU: every row is measured, and once."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = (
    "transformer bfloat16 alone",
    "transformer bfloat16 replicas",
    "classes float32",
    "kill",
    "checkpoint",
)


def measure(folder: Path, backend: str, only: str) -> str:
    words = ["--tiny", "--backends", backend, "--turns", "2", "--seconds", "1200", "--only", only]
    command = [
        sys.executable,
        str(ROOT / "bench" / "gpu.py"),
        *words,
        "--results",
        str(folder / "rows.jsonl"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_measured_once(row: str, quicker_backend: str, tmp_path: Path) -> None:
    """The digests that must be equal are equal; the second call reads the results."""
    name = f"{quicker_backend} {row}"
    first = measure(tmp_path, quicker_backend, name)
    assert f"{name} ..." in first
    (entry,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert entry["row"] == name
    assert all(figure["values"] for figure in entry["figures"])
    second = measure(tmp_path, quicker_backend, name)
    assert f"{name} ..." not in second
    tables = [re.findall(r"^\|.*", printed, re.MULTILINE) for printed in (first, second)]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 2 + len(entry["figures"])
