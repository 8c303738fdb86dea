"""A run folder in an object store: the same bytes at the end, whatever the store does, at a bounded rate."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.checkpoint import run_upload
from lockstep.checkpoint.object_store import ObjectStore
from lockstep.checkpoint.run_files import (
    EVERY,
    INDEX,
    LARGE,
    RATE,
    FileState,
    RunIndex,
    UploadedFile,
    changed,
    due,
    is_kept,
    read_index,
)
from lockstep.checkpoint.run_upload import RunUpload, fetch_run, files_of, prepare
from lockstep.errors import CheckpointError, ConfigError
from lockstep.system.paths import RunPaths, is_recorded

obstore = pytest.importorskip("obstore", reason="obstore is not installed")

URL = "memory:///"


# ---------------------------------------------------------------------------------------- what is uploaded


def test_a_file_that_grows_is_uploaded_at_most_every_thirty_seconds() -> None:
    files = {"new": FileState(5, 1), "same": FileState(3, 1), "grown": FileState(4, 2)}
    uploaded = {"same": UploadedFile(FileState(3, 1), 0.0), "grown": UploadedFile(FileState(3, 1), 100.0)}
    assert changed(files, uploaded) == ["grown", "new"]
    assert due(files, uploaded, 100.0 + EVERY - 1) == ["new"]
    assert due(files, uploaded, 100.0 + EVERY) == ["grown", "new"]


def test_a_file_of_the_same_size_that_was_changed_is_uploaded() -> None:
    assert changed({"a": FileState(3, 2)}, {"a": UploadedFile(FileState(3, 1), 0.0)}) == ["a"]


@pytest.mark.parametrize("logs", [1, 7])
def test_large_logs_that_grow_all_the_time_take_a_bounded_rate(logs: int) -> None:
    """Two hours, with a look every thirty seconds; each log grows by 100 kB/s, the events by 100 B/s."""
    uploaded: dict[str, UploadedFile] = {}
    sent, behind, now = 0, 0.0, 0.0
    while now < 7200:
        now += EVERY
        sizes = {f"worker-{number}.log": int(100_000 * now) for number in range(logs)}
        files = {
            name: FileState(size, int(now)) for name, size in (sizes | {"events": int(100 * now)}).items()
        }
        names = due(files, uploaded, now)
        assert "events" in names, "a large log delays no small file"
        behind = max([behind, *(now - uploaded[name].at for name in names if name in uploaded)])
        for name in names:
            uploaded[name] = UploadedFile(files[name], now)
            sent += files[name].size
    small = sum(int(100 * EVERY * number) for number in range(1, 241))
    assert sent - small <= RATE * now + sum(files[name].size for name in sizes)
    assert behind <= sum(sizes.values()) / RATE + EVERY


def test_files_that_only_a_running_job_needs_stay_here() -> None:
    transient = [
        "lock",
        "saved/0123456789abcdef0123456789abcdef",
        "saved/keras_tuner.lock",
        ".lockstep-fetched/events.jsonl",
        "comparison/lock",
        "comparison/saved/keras_tuner.lock",
        "comparison/temporary/x",
        ".lockstep-store",
        INDEX,
        "a\nb",
        "\udcff",
    ]
    assert [name for name in transient if is_kept(name)] == []
    own = [
        "events.jsonl",
        "worker-12.log",
        "worker-3.stack",
        "output.log",
        "comparison.json",
        "digests/000001.jsonl",
        "order/ps-0",
        "sources/a.py",
    ]
    assert all(is_kept(name) and is_recorded(name) for name in own)
    others = [
        "best.keras",
        "saved/best.keras",
        "logs/train/events.out.tfevents.1",
        "comparison/events.jsonl",
        "modèle.keras",
    ]
    assert [(is_kept(name), is_recorded(name)) for name in others] == [(True, False)] * 5


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a//b", "", "lock", "./a"])
def test_an_index_leads_to_no_file_outside_of_the_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match="is damaged: it names"):
        read_index(msgspec.json.encode(RunIndex(files=("events.jsonl", name))), URL)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"files": 3}', b"\xff"])
def test_a_damaged_index_is_named(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"memory:///.*is damaged"):
        read_index(data, URL)


# ------------------------------------------------------------------------------------------- with a store


class FailingStore(ObjectStore):
    """A store whose requests fail while `fails` is true; `after_put` is called after each upload.

    Attributes:
        refused: the names of files that it never takes.
    """

    def __init__(self, backing: Any) -> None:
        super().__init__(URL, backing=backing)
        self.fails = False
        self.requests: list[str] = []
        self.refused: set[str] = set()
        self.after_put: Callable[[str], object] = lambda name: None

    def _ask(self, name: str) -> None:
        self.requests.append(name)
        if self.fails or name in self.refused:
            raise CheckpointError(f"{URL} cannot be written: 503 Service Unavailable")

    def read(self, name: str) -> Any:
        self._ask(name)
        return super().read(name)

    def put(self, name: str, file: Path, size: int) -> None:
        self._ask(name)
        super().put(name, file, size)
        self.after_put(name)


class Uploads:
    """The upload of a folder by a command, with a clock of its own."""

    def __init__(self, folder: Path, backing: Any) -> None:
        self.folder, self.store, self.seconds = folder, FailingStore(backing), 0.0
        self.notes: list[str] = []
        folder.mkdir(exist_ok=True)
        prepare(URL, folder)
        (holder,) = RunPaths(folder).store_mark.read_text().split()
        self.upload = RunUpload(
            folder, URL, holder, lambda url: self.store, self.notes.append, lambda: self.seconds, self.wait
        )

    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def advance(self) -> bool:
        self.seconds += EVERY
        return self.upload.advance()

    def finish(self) -> str:
        ended = threading.Event()
        ended.set()
        self.upload.run(ended)
        return self.upload.verdict()


@pytest.fixture
def backing(backing: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the start of a job use the same store."""
    monkeypatch.setattr(run_upload, "_open", lambda url, retry_seconds=0: ObjectStore(URL, backing=backing))
    return backing


@pytest.fixture
def uploads(tmp_path: Path, backing: Any) -> Uploads:
    begun = Uploads(tmp_path / "run", backing)
    begun.write("events.jsonl", '{"event": "job"}\n')
    return begun


def stored(backing: Any) -> dict[str, bytes]:
    names = [entry["path"] for page in obstore.list(backing) for entry in page if entry["path"] != INDEX]
    return {name: bytes(obstore.get(backing, name).bytes()) for name in names}


def local(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def test_the_store_has_the_bytes_of_the_folder(uploads: Uploads, backing: Any) -> None:
    uploads.write("digests/000001.jsonl", "{}\n")
    uploads.write("lock", "")
    assert uploads.advance()
    assert stored(backing) == local(uploads.folder)
    uploads.write("worker-0.log", "Epoch 1\n")
    (uploads.folder / "digests/000001.jsonl").rename(uploads.folder / "digests/000002.jsonl")
    (uploads.folder / "link").symlink_to("/etc/hostname")
    assert uploads.finish() == ""
    assert stored(backing) == local(uploads.folder)
    assert sorted(stored(backing)) == ["digests/000002.jsonl", "events.jsonl", "worker-0.log"]
    assert uploads.notes == []


def test_a_folder_in_which_nothing_changes_costs_no_request(uploads: Uploads) -> None:
    uploads.advance()
    uploads.store.requests.clear()
    assert uploads.advance()
    assert uploads.store.requests == []


def test_a_job_that_never_began_leaves_nothing(tmp_path: Path, backing: Any) -> None:
    refused = Uploads(tmp_path / "run", backing)
    refused.write("sources/a.py", "")
    assert refused.finish() == ""
    assert list(obstore.list(backing)) == []
    assert list(files_of(refused.folder)) == ["sources/a.py"]
    assert not RunPaths(refused.folder).store_mark.exists()


def test_a_file_that_grows_during_its_upload_is_uploaded_again(uploads: Uploads, backing: Any) -> None:
    uploads.store.after_put = lambda name: uploads.write(name, "more\n") if uploads.seconds < 40 else None
    assert uploads.advance()
    uploads.seconds = 50
    assert uploads.finish() == ""
    assert stored(backing) == local(uploads.folder)


def test_a_store_that_fails_for_a_while_is_named_once_and_counted(uploads: Uploads, backing: Any) -> None:
    uploads.store.fails = True
    assert not uploads.advance()
    assert not uploads.advance()
    assert not uploads.advance()
    assert uploads.notes == [
        f"the run folder cannot be uploaded now: {URL} cannot be written: 503 Service Unavailable; the job "
        "continues, and the upload is tried again every 30 s"
    ]
    assert uploads.upload.verdict() == (
        f"{URL} lacks 1 file of the run, or their ends: {URL} cannot be written: 503 Service Unavailable; "
        f"{uploads.folder} has everything"
    )
    uploads.store.fails = False
    assert uploads.finish() == f"the run folder is complete in {URL}; 3 uploads failed before"
    assert stored(backing) == local(uploads.folder)


def test_the_end_is_tried_again(uploads: Uploads, backing: Any) -> None:
    tries = []

    def wait(seconds: float) -> None:
        tries.append(seconds)
        uploads.store.fails = len(tries) < 4

    uploads.upload._wait = wait
    uploads.store.fails = True
    # The first failure is that of a round during the job.
    assert uploads.finish() == f"the run folder is complete in {URL}; 5 uploads failed before"
    assert stored(backing) == local(uploads.folder)


def test_a_file_that_cannot_be_read_does_not_keep_others_back(
    uploads: Uploads, backing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> int:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied")
        return os.open(path, os.O_RDONLY)

    monkeypatch.setattr(run_upload, "open_regular", refuse)
    uploads.write("secret", "")
    assert "lacks 1 file of the run, or their ends: secret cannot be read" in uploads.finish()
    assert list(stored(backing)) == ["events.jsonl"]


def test_files_that_the_store_refuses_keep_no_others_back(uploads: Uploads, backing: Any) -> None:
    uploads.store.refused = {f"bad-{number}" for number in range(5)}
    for name in uploads.store.refused:
        uploads.write(name, "")
    for _ in range(4):
        assert not uploads.advance()
    assert list(stored(backing)) == ["events.jsonl"]
    assert "lacks 5 files of the run" in uploads.upload.verdict()
    assert uploads.notes[0].startswith("the run folder cannot be uploaded now: bad-0: ")
    uploads.store.refused = set()
    assert uploads.finish() == f"the run folder is complete in {URL}; 8 uploads failed before"
    assert stored(backing) == local(uploads.folder)


def test_an_earlier_run_that_still_exists_changes_nothing(
    uploads: Uploads, tmp_path: Path, backing: Any
) -> None:
    uploads.advance()
    later = Uploads(tmp_path / "later", backing)
    assert local(later.folder) == stored(backing)
    later.write("events.jsonl", '{"event": "job", "seed": 1}\n')
    assert later.advance()
    uploads.write("events.jsonl", '{"event": "view"}\n')
    uploads.write("worker-0.log", "Epoch 1\n")
    assert not uploads.advance()
    assert uploads.finish() == (
        f"{URL} lacks 2 files of the run, or their ends: another run uploads there; {uploads.folder} has "
        "everything"
    )
    assert uploads.notes == [
        f"another run uploads to {URL}, so this one has stopped; {uploads.folder} has everything"
    ]
    assert later.finish() == ""
    assert stored(backing) == local(later.folder)


@pytest.mark.parametrize("emptied", [False, True])
def test_an_earlier_run_that_could_not_upload_takes_no_place(
    uploads: Uploads, tmp_path: Path, backing: Any, *, emptied: bool
) -> None:
    if emptied:
        uploads.advance()
        obstore.delete(backing, [*stored(backing), INDEX])
        uploads.write("worker-0.log", "Epoch 1\n")
    uploads.store.fails = True
    assert not uploads.advance()
    later = Uploads(tmp_path / "later", backing)
    later.write("events.jsonl", '{"event": "job", "seed": 1}\n')
    assert later.advance()
    uploads.store.fails = False
    assert not uploads.advance()
    assert "another run uploads" in uploads.finish()
    later.write("events.jsonl", '{"event": "view"}\n')
    assert later.finish() == ""
    assert stored(backing) == local(later.folder)


def test_a_prefix_that_is_emptied_gets_everything_again(uploads: Uploads, backing: Any) -> None:
    uploads.write("worker-0.log", "Epoch 1\n")
    uploads.advance()
    obstore.delete(backing, [*stored(backing), INDEX])
    uploads.write("events.jsonl", '{"event": "view"}\n')
    assert f"{URL}/{INDEX}" not in uploads.finish()
    assert stored(backing) == local(uploads.folder)


def test_files_of_an_earlier_run_that_the_job_removes_leave_the_store(
    uploads: Uploads, tmp_path: Path, backing: Any
) -> None:
    uploads.write("sources/old.py", "")
    uploads.finish()
    later = Uploads(tmp_path / "later", backing)
    (later.folder / "sources/old.py").unlink()
    assert later.finish() == ""
    assert list(stored(backing)) == ["events.jsonl"]


# ------------------------------------------------------------------------------------- the next run there


def test_the_next_run_on_another_machine_continues_the_files(
    uploads: Uploads, tmp_path: Path, backing: Any
) -> None:
    uploads.write("worker-0.log", "x" * (LARGE + 1))
    uploads.finish()
    obstore.put(backing, "head.json", b"of checkpoints with the same URL")
    obstore.put(backing, "node2-20260102/events.jsonl", b"of a standby")
    there = tmp_path / "there"
    there.mkdir()
    prepare(URL, there)
    assert local(there) == local(uploads.folder)


def test_the_next_run_on_the_same_machine_keeps_what_was_not_uploaded(uploads: Uploads) -> None:
    uploads.advance()
    uploads.write("events.jsonl", '{"event": "view"}\n')
    before = local(uploads.folder)
    prepare(URL, uploads.folder)
    assert local(uploads.folder) == before


def test_a_run_that_another_one_has_replaced_stays_on_its_machine(
    uploads: Uploads, tmp_path: Path, backing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    uploads.advance()
    other = Uploads(tmp_path / "other", backing)
    other.write("events.jsonl", '{"event": "job", "seed": 2}\n')
    assert other.finish() == ""
    uploads.write("events.jsonl", '{"event": "view"}\n')
    uploads.write("worker-3.log", "Epoch 1\n")
    before = local(uploads.folder)
    assert "another run uploads" in uploads.finish()
    for number in (2, 3):
        prepare(URL, uploads.folder)
        assert local(uploads.folder) == local(other.folder), "the files of two runs do not mix"
        assert local(tmp_path / "run-2") == before
        assert (tmp_path / f"run-{number}").exists() == (number == 2), "its own run stays in place"
    assert f"{uploads.folder} had files of another run, which are in {tmp_path}/run-2 now" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("grows", ["worker-0.log", "mine", "comparison.json"])
def test_a_folder_that_a_later_run_has_continued_leaves_no_copy(
    uploads: Uploads, tmp_path: Path, backing: Any, grows: str
) -> None:
    for name in ("worker-0.log", "mine", "comparison.json"):
        uploads.write(name, "x" * (LARGE + 1))
    uploads.finish()
    other = Uploads(tmp_path / "other", backing)
    other.write("events.jsonl", '{"event": "job", "seed": 2}\n')
    other.write(grows, "more")
    other.finish()
    if grows == "comparison.json":
        (uploads.folder / grows).write_text("the verdict of this run")
    prepare(URL, uploads.folder)
    assert local(uploads.folder) == local(other.folder)
    assert not (tmp_path / "run-2").exists()


@pytest.mark.parametrize("name", ["worker-0.log", "mine", "a\nb"])
def test_what_no_later_run_has_stays_on_its_machine(
    uploads: Uploads, tmp_path: Path, backing: Any, name: str
) -> None:
    uploads.write("worker-0.log", "Epoch 1\n")
    uploads.finish()
    other = Uploads(tmp_path / "other", backing)
    other.write("events.jsonl", '{"event": "job", "seed": 2}\n')
    other.finish()
    uploads.write(name, "not uploaded")
    before = local(uploads.folder)
    prepare(URL, uploads.folder)
    assert local(uploads.folder) == local(other.folder)
    assert local(tmp_path / "run-2") == before


def test_a_run_whose_uploads_all_fail_continues_on_its_machine(
    uploads: Uploads, tmp_path: Path, backing: Any
) -> None:
    uploads.finish()
    other = Uploads(tmp_path / "other", backing)
    other.write("events.jsonl", '{"event": "view"}\n')
    other.store.fails = True
    assert not other.advance()
    before = local(other.folder)
    prepare(URL, other.folder)
    assert local(other.folder) == before


def test_a_store_that_fails_during_the_download_changes_no_folder(
    uploads: Uploads, tmp_path: Path, backing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads.write("worker-0.log", "Epoch 1\n")
    uploads.finish()
    there = tmp_path / "there"
    there.mkdir()
    (there / "events.jsonl").write_text('{"event": "job", "seed": 3}\n')

    def fail(store: ObjectStore, name: str, size: int) -> Any:
        raise CheckpointError("503 Service Unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "parts", fail)
        with pytest.raises(CheckpointError):
            prepare(URL, there)
    assert [path.name for path in there.iterdir()] == ["events.jsonl"]
    prepare(URL, there)
    assert local(there) == local(uploads.folder)
    assert list(local(tmp_path / "there-2")) == ["events.jsonl"]


def test_a_run_is_fetched_without_the_files_of_its_script(
    uploads: Uploads, tmp_path: Path, backing: Any
) -> None:
    uploads.write("best.keras", "weights")
    uploads.write("worker-0.log", "Epoch 1\n")
    uploads.finish()
    # It was listed, but the job was killed first.
    obstore.delete(backing, ["worker-0.log"])
    shown = tmp_path / "shown"
    shown.mkdir()
    fetch_run(URL, shown, is_recorded)
    assert sorted(path.name for path in shown.iterdir()) == ["events.jsonl"]


def test_a_place_without_a_run_is_named(tmp_path: Path, backing: Any) -> None:
    with pytest.raises(ConfigError, match=f"there is no run in {URL}"):
        fetch_run(URL, tmp_path, is_recorded)
    # Its events were to be uploaded next.
    obstore.put(backing, INDEX, msgspec.json.encode(RunIndex(files=("events.jsonl",))))
    with pytest.raises(ConfigError, match=f"there is no run in {URL}"):
        fetch_run(URL, tmp_path, is_recorded)


def test_a_store_without_conditional_writes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: ObjectStore, name: str, data: bytes, tag: str | None) -> str:
        raise NotImplementedError

    monkeypatch.setattr(ObjectStore, "replace", refuse)
    with pytest.raises(ConfigError, match=f"{URL} does not support conditional writes"):
        prepare(URL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_long_download_says_what_is_left(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (uploads.folder / "events.jsonl").write_bytes(b"x" * 2_000_000)
    uploads.finish()
    seconds = itertools.count(0, 6)
    monkeypatch.setattr(run_upload.time, "monotonic", lambda: float(next(seconds)))

    def in_pieces(store: ObjectStore, name: str, size: int) -> Iterator[bytes]:
        yield from (b"x" * 500_000 for _ in range(4))

    monkeypatch.setattr(ObjectStore, "parts", in_pieces)
    there = tmp_path / "there"
    there.mkdir()
    prepare(URL, there)
    lines = [line for line in capsys.readouterr().err.splitlines() if " MB " in line]
    assert lines == [f"lockstep: fetching {left} MB more of the run from {URL}" for left in ("1.0", "0.0")]
