"""The files of JAX's compiled functions."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.errors import UnfitError
from lockstep.worker import jax_cache
from lockstep.worker.jax_cache import CompilationCache, processor
from lockstep.worker.private_modules import JAX_CACHE

HOLD = """
import sys
from pathlib import Path
from lockstep.worker.jax_cache import CompilationCache
files = CompilationCache.open(Path(sys.argv[1]))
files.get("step")
print("makes it", flush=True)
sys.stdin.readline()
files.put("step", b"compiled")
"""


@pytest.fixture
def files(tmp_path: Path) -> CompilationCache:
    return CompilationCache.open(tmp_path / "cache")


def other(tmp_path: Path) -> "subprocess.Popen[bytes]":
    """Start a process that has found no entry and compiles it."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "cache")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"makes it\n"
    return process


def test_another_process_finds_an_entry(files: CompilationCache, tmp_path: Path) -> None:
    assert files.get("step") is None
    files.put("step", b"compiled")
    assert CompilationCache.open(tmp_path / "cache").get("step") == b"compiled"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["step", "turns"]


@pytest.mark.parametrize("which", ["", "cache"])
def test_a_folder_that_other_users_can_write_to_is_not_used(tmp_path: Path, which: str) -> None:
    CompilationCache.open(tmp_path / "cache")
    (tmp_path / which).chmod(0o777)
    with pytest.raises(
        UnfitError, match=f"other users may write to {tmp_path / which}; run chmod go-w on it"
    ):
        CompilationCache.open(tmp_path / "cache")


def test_the_folder_that_was_checked_is_used(files: CompilationCache, tmp_path: Path) -> None:
    files.put("step", b"compiled")
    (tmp_path / "cache").rename(tmp_path / "checked")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "step").write_bytes(b"of another user")
    files.put("other", b"compiled")
    assert [files.get(name) for name in ("step", "other")] == [b"compiled"] * 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["step"]


def test_links_are_not_followed(files: CompilationCache, tmp_path: Path) -> None:
    files.put("step", b"compiled")
    (tmp_path / "cache" / "link").symlink_to("step")
    os.mkfifo(tmp_path / "cache" / "pipe")
    assert [files.get(name) for name in ("link", "pipe")] == [None, None]
    (tmp_path / "linked").symlink_to("cache")
    with pytest.raises(OSError, match="Not a directory"):
        CompilationCache.open(tmp_path / "linked")


def test_a_note_says_why_nothing_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SimpleNamespace(jax_compilation_cache_dir=None, jax_enable_compilation_cache=True)
    monkeypatch.setitem(sys.modules, JAX_CACHE, SimpleNamespace(get_file_cache=print))
    tmp_path.chmod(0o777)
    jax_cache._keep(tmp_path / "cache", SimpleNamespace(config=config))  # type: ignore[arg-type]
    expected = (
        f"lockstep: JAX compiles without its cache: other users may write to {tmp_path}; run chmod go-w on it"
    )
    assert capsys.readouterr().err.startswith(expected)
    assert list(tmp_path.iterdir()) == []


def test_without_locks_each_process_compiles_missing_entries(
    files: CompilationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert files.get("step") is None
    files.put("step", b"compiled")
    assert files.get("step") == b"compiled"


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 40])
def test_a_damaged_entry_is_replaced(files: CompilationCache, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "cache" / "step").write_bytes(damage)
    assert files.get("step") is None
    files.put("step", b"compiled")
    assert files.get("step") == b"compiled"


def test_a_process_waits_for_an_entry_that_another_one_compiles(
    files: CompilationCache, tmp_path: Path
) -> None:
    with other(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert files.get("step") == b"compiled"


def test_no_process_waits_for_one_that_has_ended(files: CompilationCache, tmp_path: Path) -> None:
    with other(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert files.get("step") is None


def test_no_process_waits_for_one_that_compiles_another_entry(
    files: CompilationCache, tmp_path: Path
) -> None:
    again = HOLD.replace('print("makes', 'files.get("other"); print("makes')
    command = [sys.executable, "-c", again, str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert files.get("step") is None
        process.kill()


def test_a_full_folder_loses_the_least_recently_used_entry(
    files: CompilationCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.worker.jax_cache._MOST_BYTES", 40)
    for age, name in enumerate(("new", "old")):
        files.put(name, b"compiled" * 2)
        os.utime(tmp_path / "cache" / name, (1000 - age, 1000 - age))
    CompilationCache.open(tmp_path / "cache").put("newest", b"compiled")
    assert files.get("old") is None
    assert files.get("new") is not None


def test_a_folder_that_is_not_writable_caches_nothing(files: CompilationCache, tmp_path: Path) -> None:
    (tmp_path / "cache" / "turns").unlink()
    (tmp_path / "cache").rmdir()
    files.put("step", b"compiled")
    assert files.get("step") is None


def test_different_processors_have_different_names(tmp_path: Path) -> None:
    text = "vendor_id\t: A\nmodel name\t: {}\ncpu MHz\t: {}\nflags\t: sse {}\n\nprocessor: 1\n"
    names = []
    for number, texts in enumerate([("one", 1, "avx"), ("one", 2, "avx"), ("two", 1, "avx"), ("one", 1, "")]):
        file = tmp_path / str(number)
        file.write_text(text.format(*texts))
        names.append(processor(file))
    assert names[0] == names[1]
    assert len(set(names)) == 3
