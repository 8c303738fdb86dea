"""The folder that processes of a job share on a host vanishes with them, however they end."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lockstep.system.run_folder import remove_abandoned, temporary_folder

HOLDER = """
import os, sys
from lockstep.system.run_folder import temporary_folder

with temporary_folder() as folder:
    (folder / "something").touch()
    if os.fork() == 0:
        # The process that is watched.
        print(folder, os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_it_is_removed_at_the_end(tmp_path: Path) -> None:
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        with temporary_folder() as other:
            assert folder != other
        remove_abandoned()
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_once_all_its_processes_were_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLDER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        name, child = holder.stdout.readline().split()
        holder.kill()
        holder.wait()
        remove_abandoned()
        assert (Path(name) / "something").exists()
        watched = os.pidfd_open(int(child))
        os.kill(int(child), signal.SIGKILL)
        ended, _, _ = select.select([watched], [], [], 120.0)
        os.close(watched)
        assert ended
    remove_abandoned()
    assert list(tmp_path.iterdir()) == []


def test_other_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "lockstep-agent-mine").mkdir()
    (tmp_path / "lockstep-agent-link").symlink_to(tmp_path)
    (tmp_path / "lock").touch()
    before = set(tmp_path.iterdir())
    remove_abandoned()
    assert set(tmp_path.iterdir()) == before
