"""The run's folder: names, locks, events, stacks."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.system.files import AppendFile
from lockstep.system.locks import try_lock
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import claim_folder, fresh_folder, leave_folder
from lockstep.worker.stack_dump import STACK_SIGNAL, innermost, write_when_asked

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f02 (most recent call first):
  File "train.py", line 6 in blocked
  File "train.py", line 7 in <module>
  File "/x/lockstep/worker/script.py", line 65 in run
  File "/x/lockstep/launcher/worker_main.py", line 37 in main
  File "<frozen runpy>", line 88 in _run_code
"""


def test_fresh_folders_are_unique(tmp_path: Path) -> None:
    folders = [fresh_folder(tmp_path / "runs", "train", 0.0) for _ in range(3)]
    assert [folder.is_dir() for folder in folders] == [True] * 3
    names = [folder.name for folder in folders]
    assert re.fullmatch(r"train-19(69|70)\d{4}-\d{6}", names[0])
    assert names[1:] == [f"{names[0]}-2", f"{names[0]}-3"]


def test_a_failure_to_create_a_folder_leaves_no_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.mkdir

    def mkdir(path: Path, *arguments: Any) -> None:
        if Path(path).name.startswith("train"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, *arguments)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(ConfigError, match="No space left on device; give another --run-dir"):
        fresh_folder(tmp_path / "runs", "train", 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    lock = claim_folder(tmp_path / "a" / "b")
    with pytest.raises(
        ConfigError, match=r"^another run uses .*/a/b; wait for it to end, or give another --run-dir$"
    ):
        claim_folder(tmp_path / "a" / "b")
    os.close(lock)
    os.close(claim_folder(tmp_path / "a" / "b"))


def test_the_end_of_a_run_removes_only_its_lock_and_its_markers(tmp_path: Path) -> None:
    note, own = tmp_path / "saved" / ("0" * 32), tmp_path / "saved" / "step-000000000003"
    tuner_lock = RunPaths(tmp_path).tuner_lock
    for path in (tmp_path / "events.jsonl", note, tuner_lock, own):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    os.close(claim_folder(tmp_path))
    leave_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "saved"]
    assert not note.exists()
    assert not tuner_lock.exists()
    own.unlink()
    (tmp_path / "lock").write_text("of the user")
    leave_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "lock"]


def test_a_lock_that_is_removed_while_it_is_acquired_is_acquired_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        original(descriptor, operation)
        monkeypatch.setattr(fcntl, "flock", original)
        path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = try_lock(path)
    assert lock is not None
    assert os.fstat(lock).st_ino == path.stat().st_ino
    assert try_lock(path) is None
    os.close(lock)


def test_files_of_a_run_are_neither_links_nor_pipes(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of another user")
    for name in ("lock", "events.jsonl", "worker-0.log", "worker-0.stack"):
        file = tmp_path / name
        file.symlink_to("other")
        assert opened(file) in ("", f"{name} in it is a symbolic link")
        file.unlink()
        os.mkfifo(file)
        assert opened(file) in ("", f"{name} is not a regular file")
    assert (tmp_path / "other").read_text() == "of another user"


def opened(file: Path) -> str:
    """Open and use a file as a run does; return the reported reason why that failed."""
    said: list[str] = []
    if file.name == "lock":
        with pytest.raises(OSError, match=r"lock") as raised:
            try_lock(file)
        return raised.value.strerror
    if file.suffix == ".stack":
        # A request for the stack must not end the worker; the stack is lost.
        write_when_asked(file)
        signal.raise_signal(STACK_SIGNAL)
        return ""
    appended = AppendFile.open(file, said.append)
    appended.write(b"lost")
    appended.close()
    (reason,) = said
    return reason.removeprefix(f"cannot write {file}: ").removesuffix("; data that cannot be written is lost")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_every_user_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    message = (
        f"^the run's folder {tmp_path} cannot be used: every user may write to it .*; give another --run"
    )
    with pytest.raises(ConfigError, match=message):
        claim_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_an_unusable_folder_is_named(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^the run's folder {tmp_path / folder} cannot be used: "):
        claim_folder(tmp_path / folder)
    with pytest.raises(ConfigError, match=f"^the run's folder {tmp_path / folder} cannot be used: "):
        fresh_folder(tmp_path / folder, "x", 0.0)


def test_the_innermost_frames_are_those_of_the_script() -> None:
    frames = ['File "train.py", line 6 in blocked', 'File "train.py", line 7 in <module>']
    assert innermost(DUMP, 9) == frames
    assert innermost(DUMP, 1) == frames[:1]
    assert innermost("", 9) == []
    assert innermost(DUMP.replace("Current thread", "Thread"), 9) == frames


def test_a_process_that_blocks_in_a_call_writes_its_stack(tmp_path: Path) -> None:
    program = """
import os, pathlib, sys
from lockstep.worker.stack_dump import STACK_SIGNAL, write_when_asked
def blocked():
    os.write(1, b"x")
    os.read(0, 1)
write_when_asked(pathlib.Path(sys.argv[1]))
blocked()
"""
    from lockstep.worker.stack_dump import STACK_SIGNAL

    path = tmp_path / "stack"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"
        process.send_signal(STACK_SIGNAL)
        process.communicate(b"x", timeout=300)
    assert process.returncode == 0
    assert innermost(path.read_text(), 1)[0].endswith(" in blocked")


def test_a_full_disk_is_reported_once_and_raises_nothing() -> None:
    said: list[str] = []
    file = AppendFile(Path("/dev/full"), os.open("/dev/full", os.O_WRONLY), said.append)
    file.write(b"first")
    file.write(b"second")
    file.close()
    assert said == ["cannot write /dev/full: No space left on device; data that cannot be written is lost"]


def test_a_file_goes_on_with_a_whole_line_once_the_disk_has_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    file = AppendFile.open(tmp_path / "log", said.append)
    room, write = 9, os.write

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    writes = [(9, b"first\n"), (3, b"torn\n"), (0, b"lost\n"), (4, b"a\nb"), (0, b"c\n"), (9, b"d\n")]
    for room_left, text in writes:
        room = room_left
        file.write(text)
    file.close()
    assert (tmp_path / "log").read_bytes() == b"first\ntor\na\nb\nd\n"
    assert len(said) == 1
