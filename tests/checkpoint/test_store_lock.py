"""Locks of a folder of checkpoints, and whether a job trains there, however its processes end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_samples import sample

from lockstep.checkpoint.store import Store
from lockstep.checkpoint.store_lock import FolderLock, announce, is_training, last_activity
from lockstep.errors import CheckpointError

TRAINS = r"""
import os, sys
from pathlib import Path
from lockstep.checkpoint.store_lock import announce
announce(Path(sys.argv[1]))
if sys.argv[2:] and not os.fork():
    # A child that outlives its parent.
    os.write(1, b"announced\n")
    sys.stdin.read()
    os._exit(0)
os.write(1, b"announced\n")
sys.stdin.read()
"""


def trains(folder: Path, *forks: str) -> "subprocess.Popen[str]":
    line = [sys.executable, "-c", TRAINS, str(folder), *forks]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(1 + len(forks))] == ["announced\n"] * (1 + len(forks))
    return process


def test_a_job_trains_while_one_of_its_processes_runs(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert not is_training(folder)
    assert last_activity(folder) == 0
    first, second = trains(folder), trains(folder)
    assert is_training(folder)
    first.kill()
    first.communicate()
    assert is_training(folder)
    second.communicate()
    assert not is_training(folder)


def test_forked_processes_do_not_count(tmp_path: Path) -> None:
    process = trains(tmp_path, "forks")
    process.kill()
    process.wait()
    assert not is_training(tmp_path)
    process.communicate()


def test_the_last_activity_is_a_start_or_a_checkpoint(tmp_path: Path) -> None:
    trains(tmp_path).communicate()
    for path in (tmp_path / ".training", tmp_path):
        os.utime(path, (5, 5))
    assert last_activity(tmp_path) == 5
    os.utime(tmp_path, (7, 7))
    assert last_activity(tmp_path) == 7
    trains(tmp_path).communicate()
    assert last_activity(tmp_path) > 7
    # Created but not announced yet: an observer must not consider the job ended.
    os.truncate(tmp_path / ".training", 0)
    assert last_activity(tmp_path) == 0


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"the folder of checkpoints .*saved cannot be used: File exists; give"
    ):
        announce(tmp_path / "file" / "saved")


@pytest.mark.parametrize("name", [".training", ".lock", "lock"])
def test_symbolic_links_and_pipes_are_refused(tmp_path: Path, name: str) -> None:
    other, folder = tmp_path / "other", tmp_path / "saved"
    other.write_text("another user's data")
    folder.mkdir()
    (folder / name).symlink_to(other)
    with pytest.raises(CheckpointError, match=f"{name} in it is a symbolic link"):
        use(folder)
    assert other.read_text() == "another user's data"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        use(folder)


def test_a_hard_link_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another user's data")
    (tmp_path / ".training").hardlink_to(tmp_path / "other")
    trains(tmp_path).communicate()
    assert (tmp_path / "other").read_text() == "another user's data"


def test_a_folder_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777):
        tmp_path.chmod(mode)
        message = rf"every user may write to it \(mode {mode:o}; chmod o-w prevents that\); give another one"
        with pytest.raises(CheckpointError, match=message):
            announce(tmp_path)
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o775)
    trains(tmp_path).communicate()


def test_new_folders_are_not_writable_for_every_user_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Store(tmp_path / "a" / "b", lock=FolderLock(tmp_path / "a" / "b")).write(sample(1))
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o775


def use(folder: Path) -> None:
    """Use a folder of checkpoints as a job does."""
    announce(folder)
    lock = FolderLock(folder)
    try:
        Store(folder, lock=lock).write(sample(1))
    finally:
        lock.release()
