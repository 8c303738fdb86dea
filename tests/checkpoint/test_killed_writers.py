"""A killed writer leaves older checkpoints complete, and the new one complete or absent."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("checkpoint_kills.py")


@pytest.mark.parametrize(
    ("where", "least"), [("calls", 30), ("room", 25), ("bytes", 9), ("anywhere", 3), ("end", 5)]
)
def test_killed_writers_leave_complete_checkpoints(where: str, least: int, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least
