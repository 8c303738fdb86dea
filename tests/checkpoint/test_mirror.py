"""Checkpoints in an object store: complete or absent, one writer, and the same on every machine."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.checkpoint.checkpoint_files import MANIFEST, STATE, Contents, load
from lockstep.checkpoint.mirror import Head, Mirror, fault_of, fetch, read_head, take_lease
from lockstep.checkpoint.object_store import Conflict, ObjectStore, StoreLease, _reason, folder_of, parse_url
from lockstep.checkpoint.scheduler import Every, open_scheduler
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError, ConfigError, SupersededError

obstore = pytest.importorskip("obstore", reason="obstore is not installed")

JOB = {"replicas": 2, "seed": 3, "threads": 1, "input": "divided"}
PATIENCE = 300.0
URL = "memory:///"


def write(folder: Path, step: int, history: str = "", verified: int | None = None) -> Path:
    manifest = {"job": JOB, "history": history} | ({} if verified is None else {"verified": verified})
    arrays = {"weights": np.full(100, step, np.float32), "history": np.frombuffer(history.encode(), np.uint8)}
    return Store(folder, 2).write(Contents(step, manifest, arrays))


class Requests(ObjectStore):
    """A store that fails at one of its requests, before or after the request has its effect."""

    def __init__(self, backing: Any, fails_at: int = -1, *, after: bool = False, times: int = 1) -> None:
        super().__init__(URL, backing=backing)
        self.left, self.after, self.times, self.asked = fails_at, after, times, 0

    def _request(self, act: Callable[[], Any]) -> Any:
        self.asked += 1
        fails = 0 <= self.left < self.asked <= self.left + self.times
        if fails and not self.after:
            raise CheckpointError("the store is cut off")
        result = act()
        if fails:
            raise CheckpointError("the answer is lost")
        return result

    def read(self, name: str) -> Any:
        return self._request(lambda: super(Requests, self).read(name))

    def replace(self, name: str, data: bytes, tag: str | None) -> Any:
        return self._request(lambda: super(Requests, self).replace(name, data, tag))

    def put(self, name: str, file: Path, size: int) -> None:
        self._request(lambda: super(Requests, self).put(name, file, size))

    def delete(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._request(lambda name=name: super(Requests, self).delete([name]))

    def names(self) -> list[str]:
        return self._request(lambda: super(Requests, self).names())


@dataclass
class Chief:
    """A chief of a job on a machine."""

    folder: Path
    store: ObjectStore
    lease: StoreLease
    done: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    not_removed: list[str] = field(default_factory=list)
    removed_late: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mirror = Mirror(
            self.lease,
            Store(self.folder, 2),
            lambda url, step, seconds: self.done.append(step),
            self.failed.append,
            lambda lease: self.store,
            lambda seconds: None,
            self.removed_late.append,
            lambda url, why: self.not_removed.append(url),
        )

    def upload(self, step: int, history: str = "", verified: int | None = None) -> None:
        write(self.folder, step, history, verified)
        self.mirror.upload(step)
        assert self.mirror.close(PATIENCE)


def begin(folder: Path, store: ObjectStore, job: str) -> Chief:
    """Begin a job on a machine, as the command does."""
    notes: list[str] = []
    base = fetch(store, folder, 2, notes.append)
    newest = Store(folder).newest(notes.append)
    lease = StoreLease(URL, job, base)
    take_lease(folder, lease, newest[0] if newest else None)
    return Chief(folder, store, lease)


def complete(store: ObjectStore) -> list[int]:
    """Return the steps in the store, all of which must be complete."""
    head, _ = read_head(store)
    for stored in head.checkpoints if head else ():
        assert fault_of(store, stored) is None
    return [stored.step for stored in head.checkpoints] if head else []


def test_uploads_that_failed_are_no_old_checkpoints_and_go_with_the_next_commit(
    tmp_path: Path, backing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials expire between the files of an upload, and are renewed."""
    store = ObjectStore(URL, backing=backing)
    chief, put = begin(tmp_path, store, "job"), ObjectStore.put

    def put_state(store: ObjectStore, name: str, path: Path, size: int) -> None:
        if name.endswith(MANIFEST):
            raise CheckpointError("ExpiredToken")
        put(store, name, path, size)

    def refuse(store: ObjectStore, names: Iterable[str]) -> None:
        raise CheckpointError("ExpiredToken")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", put_state)
        patch.setattr(ObjectStore, "delete", refuse)
        chief.upload(1)
    assert (chief.failed, chief.not_removed) == (
        ["the checkpoint of step 1 is not in the store: ExpiredToken"],
        [],
    )
    assert len(store.names()) > 3
    chief.upload(2)
    assert (complete(store), len(store.names()), chief.not_removed) == ([2], 3, [])


def test_the_next_chief_deletes_what_the_last_one_could_not(
    tmp_path: Path, backing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: ObjectStore, names: Iterable[str]) -> None:
        raise CheckpointError("forbidden")

    store = ObjectStore(URL, backing=backing)
    first = begin(tmp_path, store, "job")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "delete", refuse)
        for step in (1, 2, 3):
            first.upload(step)
    assert (len(first.not_removed), len(store.names())) == (1, 7)
    second = Chief(tmp_path, store, first.lease)
    second.upload(4)
    assert (second.removed_late, second.not_removed, complete(store)) == (first.not_removed, [], [3, 4])
    assert len(store.names()) == 5


def test_another_machine_gets_the_newest_checkpoint(tmp_path: Path, backing: Any) -> None:
    store = ObjectStore(URL, backing=backing)
    store.check_conditions()
    first = begin(tmp_path / "a", store, "first")
    for step in (1, 2, 3):
        first.upload(step)
    first.mirror.finish(3)
    assert first.mirror.close(PATIENCE)
    assert (first.done, first.failed, complete(store)) == ([1, 2, 3], [], [2, 3])
    assert len(store.names()) == 5
    fetch(store, tmp_path / "b", 2, print)
    newest = Store(tmp_path / "b").newest(print)
    assert newest is not None
    assert newest[1].step == 3 == Store(tmp_path / "b").finished()
    there, here = load(tmp_path / "a" / "step-000000000003"), newest[1]
    assert there.manifest == here.manifest
    assert all(there.arrays[name].tobytes() == here.arrays[name].tobytes() for name in there.arrays)
    # The local copy is used where it is the same.
    notes: list[str] = []
    fetch(store, tmp_path / "b", 2, notes.append)
    assert notes == []


def test_a_verified_checkpoint_stays(tmp_path: Path, backing: Any) -> None:
    chief = begin(tmp_path, ObjectStore(URL, backing=backing), "job")
    for step in (1, 2, 3, 4, 5):
        chief.upload(step, verified=2)
    assert complete(chief.store) == [2, 4, 5]
    assert chief.mirror.remove_after(3) == 2
    assert complete(chief.store) == [2]
    assert chief.mirror.remove_after(1) == -1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("times", [1, 1000], ids=["once", "for good"])
def test_an_upload_that_is_cut_leaves_the_old_or_the_new_one(tmp_path: Path, after: bool, times: int) -> None:
    for cut in range(40):
        backing, folder = obstore.store.MemoryStore(), tmp_path / str(cut)
        clean = ObjectStore(URL, backing=backing)
        first = begin(folder / "a", clean, "first")
        for step in (1, 2):
            first.upload(step)
        second = begin(folder / "a", clean, "second")
        second.store = store = Requests(backing, cut, after=after, times=times)
        second.upload(3)
        assert not second.mirror.taken_over
        steps = complete(clean)
        assert steps in ([1, 2], [2, 3])
        assert steps == [2, 3] or (second.failed and times > 1)
        third = begin(folder / "b", clean, "third")
        third.upload(4)
        assert complete(clean) == [steps[1], 4]
        assert len(clean.names()) == 5
        if store.asked <= cut:
            assert cut >= 8
            return
    raise AssertionError("no upload was complete")


def test_a_killed_upload_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("store_kills.py")
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8


def test_of_two_jobs_that_begin_at_once_one_ends(tmp_path: Path, backing: Any) -> None:
    store = ObjectStore(URL, backing=backing)
    first, second = (begin(tmp_path / name, store, name) for name in ("a", "b"))
    second.upload(2)
    first.upload(1)
    first.upload(3)
    assert complete(store) == [2]
    assert (first.done, len(first.failed)) == ([], 2)
    assert "another job saves its checkpoints" in first.mirror.taken_over
    assert not second.mirror.taken_over


def test_a_job_that_slept_changes_nothing(tmp_path: Path, backing: Any) -> None:
    store = ObjectStore(URL, backing=backing)
    slept = begin(tmp_path / "a", store, "first")
    slept.upload(1)
    later = begin(tmp_path / "b", store, "second")
    later.mirror.begin()
    assert later.mirror.close(PATIENCE)
    slept.upload(2)
    with pytest.raises(CheckpointError, match="another job saves its checkpoints"):
        slept.mirror.remove_after(0)
    assert slept.mirror.taken_over
    later.upload(2, "later")
    assert complete(store) == [1, 2]
    assert later.failed == []
    # What the first job has written on its machine does not count there any more.
    again = begin(tmp_path / "a", store, "third")
    newest = Store(again.folder).newest(print)
    assert newest is not None
    assert newest[1].manifest["history"] == "later"


def test_a_chief_that_was_replaced_changes_nothing(tmp_path: Path, backing: Any) -> None:
    store = ObjectStore(URL, backing=backing)
    chief = begin(tmp_path / "a", store, "job")
    chief.upload(1)
    successor = Chief(tmp_path / "b", store, chief.lease)
    successor.upload(2)
    chief.upload(3)
    assert "another worker of this job" in chief.failed[0]
    assert not chief.mirror.taken_over
    successor.upload(3)
    assert (complete(store), successor.failed) == ([2, 3], [])
    assert len(store.names()) == 5


def test_no_listing_is_needed(tmp_path: Path, backing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = ObjectStore(URL, backing=backing), list[str]()
    begin(tmp_path / "a", store, "first").upload(1)
    seen += store.names()
    for job, listed in enumerate(([], seen, ["step-000000000009-none/state.safetensors"])):
        monkeypatch.setattr(store, "names", lambda listed=listed: listed)
        begin(tmp_path / f"b{job}", store, f"job {job}").upload(job + 2)
        assert complete(store) == [job + 1, job + 2]


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_a_damaged_checkpoint_is_skipped_by_name(tmp_path: Path, backing: Any, damage: str) -> None:
    store = ObjectStore(URL, backing=backing)
    chief = begin(tmp_path / "a", store, "job")
    for step in (1, 2):
        chief.upload(step)
    notes: list[str] = []
    for step in (2, 1):
        (name,) = (name for name in store.names() if name.startswith(f"step-{step:012}") and STATE in name)
        content = bytearray(obstore.get(backing, name).bytes())
        content[-1] ^= 1
        obstore.delete(backing, name)
        if damage != "missing":
            obstore.put(backing, name, bytes(content[: -1 if damage == "short" else None]))
        folder = tmp_path / str(step)
        if step == 2:
            fetch(store, folder, 2, notes.append)
            assert Store(folder).steps().keys() == {1}
            assert any(name in text and text.endswith("skipping this checkpoint") for text in notes)
        else:
            with pytest.raises(CheckpointError, match="is complete; to start over"):
                fetch(store, folder, 2, notes.append)


def test_local_checkpoints_count_until_another_job_writes(tmp_path: Path, backing: Any) -> None:
    store = ObjectStore(URL, backing=backing)
    cut = Requests(backing, 0, times=1000)
    offline = begin(tmp_path / "a", store, "offline")
    offline.store = cut
    offline.upload(1)
    assert complete(store) == []
    assert "not in the store" in offline.failed[0]
    # The store has nothing, and nobody else has written.
    again = begin(tmp_path / "a", store, "again")
    assert Store(again.folder).steps().keys() == {1}
    again.upload(2)
    # The user has emptied the store.
    store.delete(store.names())
    notes: list[str] = []
    assert fetch(store, tmp_path / "a", 2, notes.append) is None
    assert Store(tmp_path / "a").steps() == {}
    assert "set aside" in notes[0]
    assert (tmp_path / "a" / "suspect-step-000000000002").is_dir()


def test_histories_never_mix(tmp_path: Path) -> None:
    """Jobs begin on any machine, lose the store, and stop anywhere: each continues the store's history."""
    chance = random.Random(5)
    for number in range(40):
        backing = obstore.store.MemoryStore()
        clean = ObjectStore(URL, backing=backing)
        chief, history = None, ""
        for action in range(8):
            if chief is None or chance.random() < 0.3:
                folder = tmp_path / str(number) / chance.choice("abc")
                chief = begin(folder, clean, f"{action}")
                newest = Store(folder).newest(print)
                history = newest[1].manifest["history"] if newest else ""
                head, _ = read_head(clean)
                if head is not None and head.checkpoints:
                    fetch(clean, tmp_path / str(number) / f"seen {action}", 2, lambda text: None)
                    stored = Store(tmp_path / str(number) / f"seen {action}").newest(print)
                    assert stored is not None
                    assert history.startswith(stored[1].manifest["history"])
                cut, after = chance.choice([-1, chance.randrange(12)]), chance.random() < 0.5
                chief.store = Requests(backing, cut, after=after, times=1000)
            else:
                history += f"{chief.lease.job},"
                chief.upload(history.count(","), history)
                complete(clean)


def test_a_store_without_conditions_is_refused(tmp_path: Path, backing: Any) -> None:
    url = f"file://{tmp_path / 'store'}"
    with pytest.raises(ConfigError, match="give --one-writer"):
        ObjectStore(url).check_conditions()

    class Ignoring(ObjectStore):
        def replace(self, name: str, data: bytes, tag: str | None) -> str:
            return str(obstore.put(backing, name, data))

    class IgnoringExistence(ObjectStore):
        def replace(self, name: str, data: bytes, tag: str | None) -> str:
            if tag is None:
                self.delete([name])
            return super().replace(name, data, tag)

    for ignoring in (Ignoring, IgnoringExistence):
        with pytest.raises(ConfigError, match="give --one-writer"):
            ignoring(URL, backing=backing).check_conditions()
    assert ObjectStore(URL, backing=backing).names() == []
    store = ObjectStore(url, conditional=False)
    store.check_conditions()
    assert store.names() == []
    # One that has slept is at least noticed.
    first = Chief(tmp_path / "a", store, StoreLease(url, "first", None, True))
    first.upload(1)
    base = fetch(store, tmp_path / "b", 2, print)
    second = Chief(tmp_path / "b", store, StoreLease(url, "second", base, True))
    second.upload(2)
    first.upload(3)
    assert complete(store) == [1, 2]
    assert first.mirror.taken_over


def test_a_checkpoint_is_written_once_it_is_in_the_store(
    tmp_path: Path, backing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, events = ObjectStore(URL, backing=backing), list[Any]()
    monkeypatch.setattr("lockstep.checkpoint.mirror.open_leased", lambda lease: store)
    lease = StoreLease(URL, "job")
    scheduler = open_scheduler(Store(tmp_path / "a"), Every(steps=2), events.append, lease)
    for step in (1, 2, 3):
        scheduler.after_step(step, lambda step=step: Contents(step, {"job": JOB}, {}))
        assert scheduler.close(PATIENCE)
    scheduler.hold(3, lambda: Contents(3, {"job": JOB}, {}))
    scheduler.finish()
    assert [(event.step, event.path[: len(URL) + 6]) for event in events] == [
        (2, "memory:////step-"[: len(URL) + 6]),
        (3, "memory:////step-"[: len(URL) + 6]),
    ]
    head, tag = read_head(store)
    assert head is not None
    assert head.finished == 3
    other = Chief(tmp_path / "b", store, StoreLease(URL, "other", tag))
    other.mirror.begin()
    assert other.mirror.close(PATIENCE)
    scheduler.after_step(4, lambda: Contents(4, {"job": JOB}, {}))
    assert scheduler.close(PATIENCE)
    with pytest.raises(SupersededError, match="another job saves its checkpoints"):
        scheduler.after_step(5, lambda: Contents(5, {"job": JOB}, {}))


def test_an_unknown_head_is_refused(tmp_path: Path, backing: Any) -> None:
    store = ObjectStore(URL, backing=backing)
    obstore.put(backing, "head.json", msgspec.json.encode(Head(format=2)))
    with pytest.raises(CheckpointError, match="the format 2"):
        fetch(store, tmp_path, 2, print)
    obstore.put(backing, "head.json", b"{")
    with pytest.raises(CheckpointError, match="is damaged"):
        fetch(store, tmp_path, 2, print)


def test_conditions(backing: Any) -> None:
    store = ObjectStore(URL, backing=backing)
    first = store.replace("head.json", b"1", None)
    with pytest.raises(Conflict):
        store.replace("head.json", b"2", None)
    store.replace("head.json", b"2", first)
    with pytest.raises(Conflict):
        store.replace("head.json", b"3", first)
    content = store.read("head.json")
    assert content is not None
    assert content[0] == b"2"


@pytest.mark.parametrize(
    "url",
    [
        "http://host/x",
        "s3://",
        "s3://key:secret@bucket/job",
        "s3://key@bucket/job",
        "az://container/job?sig=secret",
        "s3://bucket/job#x",
    ],
)
def test_urls_that_name_no_store_or_hold_a_secret_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_url(url)
    assert "secret" not in str(refused.value)


def test_urls_name_folders() -> None:
    assert parse_url("s3://bucket/job//") == "s3://bucket/job"
    assert parse_url("abfs://container@account/job") == "abfs://container@account/job"
    names = {folder_of(url).name for url in ("s3://a/job", "s3://b/job", "gs://a/job")}
    assert len(names) == 3
    assert all(name.startswith("job-") for name in names)
    assert folder_of("saved") == Path("saved").absolute()


def test_the_reason_has_the_seconds_without_an_answer() -> None:
    """A request that cannot connect has fewer than one that is answered slowly."""
    error = (
        "Error performing GET http://h/b/j in 37.6s, after 2 retries - HTTP error\n\nDebug source: {elapsed: "
    )
    kind = ", inner: HttpError {kind: Timeout}}"
    assert _reason(f"{error}37.601s{kind}") == "no answer within 38 s"
    assert _reason(f"{error}120.3s{kind}") == "no answer within 120 s"


def test_reasons_hold_no_secrets() -> None:
    body = (
        "Generic S3 error: Error performing PUT https://b.s3.amazonaws.com/x?X-Amz-Signature=secret in 5ms - "
        "Server returned non-2xx status code: 400 Bad Request: <Error><Code>ExpiredToken</Code>"
        "<Message>The token has expired.</Message><Token-0>secret</Token-0></Error>\n\nDebug source: secret"
    )
    assert _reason(body) == "ExpiredToken: The token has expired."
    sas = "Error performing PUT https://a.blob/x?sig=secret in 5ms - HTTP error: https://a.blob/x?sig=secret"
    assert "secret" not in _reason(sas)
    token = (
        "Generic GCS error: Error performing token request: Error performing POST https://oauth2 in 9ms - "
        'Server returned non-2xx status code: 400 Bad Request: {"error": "invalid_grant", '
        '"error_description": "Token has been expired or revoked.", "x": "secret"}\n\nDebug source: secret'
    )
    assert _reason(token) == "invalid_grant: Token has been expired or revoked."


def test_missing_credentials_are_named_as_their_store_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        CheckpointError, match="such as AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
    ):
        ObjectStore("az://container/job")
