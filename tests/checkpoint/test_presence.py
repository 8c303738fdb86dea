"""Others see whether a job runs that keeps checkpoints in a folder, however its processes end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_samples import sample

from lockstep.checkpoint.store import Store
from lockstep.checkpoint.store_lock import FolderLock, announce, is_training, last_sign
from lockstep.errors import CheckpointError

TRAINS = r"""
import os, sys
from pathlib import Path
from lockstep.checkpoint.store_lock import announce
announce(Path(sys.argv[1]))
if sys.argv[2:] and not os.fork():
    # A process that the job has left behind: it says what its parent could, and does not end with it.
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


def test_as_long_as_one_process_lives(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert not is_training(folder)
    assert last_sign(folder) == 0
    first, second = trains(folder), trains(folder)
    assert is_training(folder)
    first.kill()
    first.communicate()
    assert is_training(folder)
    second.communicate()
    assert not is_training(folder)


def test_what_a_process_has_forked_does_not_count(tmp_path: Path) -> None:
    process = trains(tmp_path, "forks")
    process.kill()
    process.wait()
    assert not is_training(tmp_path)
    process.communicate()


def test_the_last_sign_is_a_beginning_or_a_checkpoint(tmp_path: Path) -> None:
    trains(tmp_path).communicate()
    for path in (tmp_path / ".training", tmp_path):
        os.utime(path, (5, 5))
    assert last_sign(tmp_path) == 5
    os.utime(tmp_path, (7, 7))
    assert last_sign(tmp_path) == 7
    trains(tmp_path).communicate()
    assert last_sign(tmp_path) > 7
    # Made, and not announced yet: somebody who looks now must not take it for a job that has ended.
    os.truncate(tmp_path / ".training", 0)
    assert last_sign(tmp_path) == 0


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"the folder of checkpoints .*saved cannot be used: File exists; give"
    ):
        announce(tmp_path / "file" / "saved")


@pytest.mark.parametrize("name", [".training", ".lock", "lock"])
def test_nothing_is_reached_through_a_link(tmp_path: Path, name: str) -> None:
    other, folder = tmp_path / "other", tmp_path / "saved"
    other.write_text("of somebody else")
    folder.mkdir()
    (folder / name).symlink_to(other)
    with pytest.raises(CheckpointError, match=f"{name} in it is a symbolic link"):
        use(folder)
    assert other.read_text() == "of somebody else"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        use(folder)


def test_another_name_of_the_same_file_keeps_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of somebody else")
    (tmp_path / ".training").hardlink_to(tmp_path / "other")
    trains(tmp_path).communicate()
    assert (tmp_path / "other").read_text() == "of somebody else"


def test_a_folder_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777):
        tmp_path.chmod(mode)
        message = rf"every user may write to it \(mode {mode:o}; chmod o-w prevents that\); give another one"
        with pytest.raises(CheckpointError, match=message):
            announce(tmp_path)
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o775)
    trains(tmp_path).communicate()


def test_folders_are_not_for_every_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Store(tmp_path / "a" / "b", claim=FolderLock(tmp_path / "a" / "b")).write(sample(1))
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o775


def use(folder: Path) -> None:
    """Do what a job does with a folder of checkpoints."""
    announce(folder)
    claim = FolderLock(folder)
    try:
        Store(folder, claim=claim).write(sample(1))
    finally:
        claim.leave()
