"""Workers that save the same state to the same path share the work; waits are reported and limited."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.errors import DisagreementError, PeerStuckError
from lockstep.keras import shared_saves
from lockstep.keras.shared_saves import Occasion, write_once


def save(folder: Path, state: bytes, text: str, occasion: Occasion | None = None) -> list[str]:
    """Save `text` as a worker with `state` does; return the written paths."""
    written: list[str] = []

    def write(path: str) -> None:
        written.append(path)
        Path(path).write_text(text)

    write_once(folder / "notes", folder / "file.txt", state, write, rename=True, occasion=occasion)
    return written


def test_the_first_worker_writes_and_the_others_find_the_file(tmp_path: Path) -> None:
    (temporary,) = save(tmp_path, b"one", "first")
    assert Path(temporary).parent.parent == tmp_path
    assert Path(temporary).name == "file.txt"
    assert not Path(temporary).parent.exists()
    assert save(tmp_path, b"one", "second") == []
    assert (tmp_path / "file.txt").read_text() == "first"


def test_another_state_and_a_deleted_file_are_written(tmp_path: Path) -> None:
    save(tmp_path, b"one", "first")
    assert len(save(tmp_path, b"two", "second")) == 1
    assert (tmp_path / "file.txt").read_text() == "second"
    (tmp_path / "file.txt").unlink()
    assert len(save(tmp_path, b"two", "third")) == 1


def test_another_state_at_the_same_place_is_refused(tmp_path: Path) -> None:
    save(tmp_path, b"one", "first", Occasion("step 1", 0))
    assert len(save(tmp_path, b"two", "second", Occasion("step 2", 0))) == 1
    assert len(save(tmp_path, b"one", "third", Occasion("step 1", 1))) == 1
    with pytest.raises(
        DisagreementError, match=r"worker 1 saves .*file\.txt with different weights.* worker 0 "
    ):
        save(tmp_path, b"three", "fourth", Occasion("step 2", 1))
    assert (tmp_path / "file.txt").read_text() == "third"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, b"one", "first")

    def fail(path: str) -> None:
        Path(path).write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match=r"cannot write .*file.txt: No space left"):
        write_once(tmp_path / "notes", tmp_path / "file.txt", b"two", fail, rename=True)
    assert (tmp_path / "file.txt").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "notes"]
    assert len(save(tmp_path, b"two", "second")) == 1


def test_a_link_with_a_predictable_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of another user")
    for name in (f".{os.getpid()}-file.txt", ".file.txt"):
        (tmp_path / name).symlink_to("other")
    save(tmp_path, b"one", "first")
    assert (tmp_path / "other").read_text() == "of another user"
    assert (tmp_path / "file.txt").read_text() == "first"


def test_parent_folders_are_created_by_the_writer(tmp_path: Path) -> None:
    def write(path: str) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "file.txt").write_text("first")

    for state in (b"one", b"two"):
        write_once(tmp_path / "notes", tmp_path / "a" / "b" / "model", state, write, rename=True)
        assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["model"]
        assert (tmp_path / "a" / "b" / "model" / "file.txt").read_text() == "first"


def test_the_wait_for_a_writer_is_reported_and_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, b"one", "first")
    (note,) = (tmp_path / "notes").iterdir()
    monkeypatch.setattr(shared_saves, "NOTE_EVERY", 0.0)
    monkeypatch.setattr(shared_saves, "_PATIENCE_SECONDS", 0.05)
    with note.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PeerStuckError, match=r"another worker has been writing .*file.txt"):
            save(tmp_path, b"two", "second")
    assert "for another worker that writes" in capsys.readouterr().err
    assert (tmp_path / "file.txt").read_text() == "first"


def test_hosts_that_share_a_disk_but_no_notes_end_with_whole_files(tmp_path: Path) -> None:
    """Two hosts write the same files at the same time; each host has notes of its own."""
    both = threading.Barrier(2, timeout=60.0)

    def write_model(path: str) -> None:
        both.wait()
        Path(path).mkdir(parents=True)
        (Path(path) / "weights").write_text("weights")
        both.wait()

    def write_shards(path: str) -> None:
        both.wait()
        Path(path).with_name("shard-1").write_text("numbers")
        Path(path).write_text("refers to shard-1")
        both.wait()

    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "model").mkdir()
    (shared / "model" / "old").touch()
    (shared / "shard-1").write_text("old")

    def host(name: str) -> None:
        for file, write in (("model", write_model), ("file", write_shards), ("new/a/model", write_model)):
            write_once(tmp_path / name, shared / file, b"state", write, rename=True)

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(host, name) for name in ("one", "two")]:
            done.result()
    for model in (shared / "model", shared / "new" / "a" / "model"):
        assert [file.read_text() for file in model.iterdir()] == ["weights"]
        assert [file.name for file in model.parent.iterdir() if file.name.startswith(".")] == []
    assert (shared / "file").read_text() == "refers to shard-1"
    assert (shared / "shard-1").read_text() == "numbers"
