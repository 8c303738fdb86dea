"""Workers take turns in downloads; the workers are threads with locks of their own."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import PeerStuckError
from lockstep.observability.events import DownloadAwaited
from lockstep.worker import downloads
from lockstep.worker.downloads import Turns

ORIGIN = "http://127.0.0.1/data.txt"


@pytest.fixture
def turns(tmp_path: Path) -> Callable[..., Turns]:
    def make(worker: int, job: str = "7 run", publish: Any = lambda event: None, **options: Any) -> Turns:
        return Turns((tmp_path / "locks",), tmp_path / "downloaded", job, worker, publish, **options)

    return make


def test_the_same_call_of_another_worker_downloads_nothing(
    turns: Callable[..., Turns], tmp_path: Path
) -> None:
    """A deleted file is downloaded again, and so is a file of another run."""
    file, made = tmp_path / "file", []

    def download() -> str:
        file.touch()
        made.append(1)
        return str(file)

    first, second = turns(0), turns(1)
    assert {first.take(ORIGIN, "file", "a", download), second.take(ORIGIN, "file", "a", download)} == {
        str(file)
    }
    assert len(made) == 1
    for worker in (second, first):
        worker.take(ORIGIN, "file", "a", download)
    assert len(made) == 2
    first.take(ORIGIN, "file", "another", download)
    turns(0, "8 run").take(ORIGIN, "file", "a", download)
    assert len(made) == 4
    file.unlink()
    turns(2).take(ORIGIN, "file", "a", download)
    assert len(made) == 5


def test_the_next_worker_retries_a_failed_download(turns: Callable[..., Turns], tmp_path: Path) -> None:
    def fail() -> str:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        turns(0).take(ORIGIN, "file", "a", fail)
    assert turns(1).take(ORIGIN, "file", "a", lambda: str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(("job", "of"), [("7 run", "worker 0"), ("8 run", "another job (process ")])
def test_a_waiting_worker_reports_the_worker_or_job_that_downloads(
    turns: Callable[..., Turns], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, of: str
) -> None:
    monkeypatch.setattr(downloads, "_FIRST_REPORT", 0.0)
    begun, said = threading.Event(), threading.Event()
    published = []

    def publish(event: DownloadAwaited) -> None:
        published.append(event)
        said.set()

    def slow() -> str:
        begun.set()
        assert said.wait(300)
        return str(tmp_path)

    thread = threading.Thread(target=turns(0).take, args=(ORIGIN, "file", "a", slow))
    thread.start()
    assert begun.wait(300)
    turns(1, job, publish).take(ORIGIN, "file", "a", lambda: str(tmp_path))
    thread.join()
    (event,) = published
    assert (event.file, event.seconds) == ("file", 0)
    assert event.of.startswith(of)


def test_the_wait_for_another_download_has_a_limit(turns: Callable[..., Turns], tmp_path: Path) -> None:
    def slow() -> str:
        with pytest.raises(PeerStuckError, match=r"worker 0 has not downloaded file within 0\.1 s; check"):
            turns(1, patience=0.1).take(ORIGIN, "file", "a", lambda: str(tmp_path))
        return str(tmp_path)

    assert turns(0).take(ORIGIN, "file", "a", slow) == str(tmp_path)


def test_an_unusable_folder_is_skipped(tmp_path: Path) -> None:
    """Such a folder is a home that is read-only or missing."""
    (tmp_path / "file").touch()
    folders = (tmp_path / "file" / "below", tmp_path / "run")
    made = Turns(folders, tmp_path / "downloaded", "7", 0, lambda event: None)
    assert made.take(ORIGIN, "file", "a", lambda: "path") == "path"
    assert len(list((tmp_path / "run").iterdir())) == 1
