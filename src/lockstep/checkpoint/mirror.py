"""Checkpoints in an object store: a job uploads those of its local folder, and fetches them to resume.

A prefix of the store has one object `head.json`, and two objects for each checkpoint:

    head.json the list of checkpoints, and the process that may change it
    step-000000001200-0123abcd/state.safetensors, manifest.json

Only the head says which checkpoints exist. The files of a checkpoint are uploaded first, under a name that no
other upload uses. Then the head is replaced by one that lists them, with their sizes and SHA-256. Old
checkpoints leave the head before their objects are deleted. So a checkpoint in the store is complete or
absent, wherever an upload ends, and no listing is needed to find one.

Each write of the head is conditional: the store refuses it if the head is not the one that the writer last
read. A *lease* names the head from which a job began; the job's first writer may replace only that head. Each
chief replaces the head once before its first upload. From then on, an earlier chief or job cannot change
anything: its next write is refused. With an expiring lock, a holder that was asleep for too long could write
once more. A job that another one has replaced ends (`SupersededError`), because only one may continue.

The folder of this machine is a copy, and the store decides: local checkpoints that are newer than those in
the store count only if no other job has written to the store since. A file in the folder, the mark, says so.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lockstep.checkpoint.checkpoint_files import FILES, read_outline
from lockstep.checkpoint.durable import is_full, make_folder, reason
from lockstep.checkpoint.hand_over import ArrivingCheckpoint, held_of
from lockstep.checkpoint.held import HeldCheckpoint
from lockstep.checkpoint.latest import Latest
from lockstep.checkpoint.object_store import RETRY_SECONDS, Conflict, ObjectStore, StoreLease
from lockstep.checkpoint.store import FOLDER_PREFIX, Store, is_among_kept
from lockstep.errors import CheckpointError, SupersededError, UnknownFormatError
from lockstep.system.clock import SystemClock
from lockstep.system.prose import size_text

_HEAD = "head.json"
_FORMAT = 1
_MARK = ".store.json"
_TRIES = (2.0, 10.0)
"""Seconds before a failed upload is tried again; its request has been repeated for `RETRY_SECONDS`."""
_CONFLICTS = 3
_IDLE_SECONDS = 60.0


class StoredFile(msgspec.Struct, frozen=True):
    """The size and the hash of a file in the store."""

    bytes: int
    sha256: str


class StoredCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in the store.

    Attributes:
        folder: the beginning of its objects' names.
        held: its step, and the facts that it records about its job.
        time: the time at which it was uploaded, in seconds since 1970.
        files: its files by name.
        verified: the step up to which it is verified; -1 without verification.
    """

    folder: str
    held: HeldCheckpoint
    time: float
    files: dict[str, StoredFile]
    verified: int = -1

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.held.step

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def objects(self) -> list[str]:
        """The names of its objects; the manifest first."""
        return [f"{self.folder}/{name}" for name in reversed(FILES)]


class Head(msgspec.Struct, frozen=True):
    """The object that lists the checkpoints of a prefix.

    Attributes:
        format: the version of these fields.
        job: the job that has written it.
        holder: the process that has written it.
        commits: the number of times that it has been written, so that no two heads are equal.
        checkpoints: the checkpoints in the store, the oldest first.
        finished: the step of the checkpoint with which the job finished; None if it has not finished.
    """

    format: int = _FORMAT
    job: str = ""
    holder: str = ""
    commits: int = 0
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    finished: int | None = None

    def with_checkpoint(self, added: StoredCheckpoint, keep: int) -> "Head":
        """Return this head with a checkpoint, and without older ones except the newest verified one."""
        every = [each for each in self.checkpoints if each.step != added.step] + [added]
        every.sort(key=lambda each: each.step)
        steps, verified = [each.step for each in every], added.verified
        kept = tuple(
            each
            for each in every
            if is_among_kept(each.step, steps, added.step, keep=keep, verified=verified)
        )
        return msgspec.structs.replace(self, checkpoints=kept)

    def up_to(self, step: int) -> "Head":
        """Return this head without the checkpoints of later steps."""
        kept = tuple(each for each in self.checkpoints if each.step <= step)
        return msgspec.structs.replace(self, checkpoints=kept)

    def newest(self) -> int:
        """Return the step of the newest checkpoint; -1 if there is none."""
        return max((each.step for each in self.checkpoints), default=-1)


class _Mark(msgspec.Struct, frozen=True):
    """The mark of the job that has written the checkpoints of a local folder.

    Attributes:
        job: the job.
        base: the tag of the head from which it began.
        committed: whether the job has written a head.
    """

    job: str
    base: str | None
    committed: bool = False

    def continues(self, head: Head | None, tag: str | None) -> bool:
        """Whether no other job has written to the store since then."""
        if head is None:
            return self.base is None and not self.committed
        return head.job == self.job or (not self.committed and tag == self.base)


def read_head(store: ObjectStore) -> tuple[Head | None, str | None]:
    """Return the head of a prefix and its tag, or None twice if there is none.

    Raises:
        CheckpointError: it cannot be read, or is damaged; `UnknownFormatError` if another version wrote it.
    """
    content = store.read(_HEAD)
    if content is None:
        return None, None
    return _decoded(content[0], store.url), content[1]


def _decoded(data: bytes, url: str) -> Head:
    where = f"{url}/{_HEAD}"
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version != _FORMAT:
            raise UnknownFormatError.of(where, version, _FORMAT)
        return msgspec.json.decode(data, type=Head)
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: {error}; give another URL, or restore it") from None


class _Version(msgspec.Struct):
    format: int


class _Damaged(Exception):
    """A checkpoint in the store differs from its head's description."""


# ------------------------------------------------------------------------------------------- at the start


def fetch(store: ObjectStore, folder: Path, keep: int, report: Callable[[str], None]) -> str | None:
    """Copy the newest checkpoint of the store to a folder, unless the folder has a newer one that counts.

    Args:
        store: the store.
        folder: the folder of this machine, which may not exist.
        keep: the number of checkpoints to keep there.
        report: called with a message for each checkpoint that is damaged, or set aside.

    Returns:
        The tag of the head, for the lease of the job.

    Raises:
        CheckpointError: the store cannot be read, nothing can be written to the folder, or no checkpoint of
            the store is complete.
    """
    head, tag = read_head(store)
    local, mark = Store(folder), _read_mark(folder)
    if mark is None or not mark.continues(head, tag):
        _discard(folder, head, report)
    newest = local.newest(report)
    local_step = newest[1].step if newest is not None else -1
    del newest
    if head is None:
        return None
    failure: CheckpointError | None = None
    for stored in reversed(head.checkpoints):
        if stored.step <= local_step:
            failure = None
            break
        try:
            _download(store, stored, folder, keep, report)
        except UnknownFormatError:
            raise
        except _Damaged as error:
            report(f"{error}; skipping this checkpoint")
            failure = CheckpointError(
                f"no checkpoint in {store.url} is complete; to start over, give another --checkpoint URL"
            )
        else:
            failure, local_step = None, stored.step
            break
    if failure is not None:
        raise failure
    if head.finished is not None and head.finished == local_step != local.finished():
        local.finish(local_step)
    return tag


def _discard(folder: Path, head: Head | None, report: Callable[[str], None]) -> None:
    """Remove local checkpoints that are not in the store; without a head, only give them other names."""
    held = [stored.held for stored in head.checkpoints] if head is not None else []
    (folder / "finished.json").unlink(missing_ok=True)
    for path in Store(folder).steps().values():
        try:
            here: HeldCheckpoint | None = held_of(path)
        except CheckpointError:
            here = None
        if any(each.is_same(here) for each in held):
            continue
        if head is not None or here is None:
            shutil.rmtree(path, ignore_errors=True)
            continue
        suspect = path.with_name(f"suspect-{path.name}")
        shutil.rmtree(suspect, ignore_errors=True)
        path.rename(suspect)
        report(f"the store no longer has checkpoints, so those of this machine are set aside: {suspect}")


def _download(
    store: ObjectStore, stored: StoredCheckpoint, folder: Path, keep: int, report: Callable[[str], None]
) -> None:
    report(f"fetching {store.url}/{stored.folder}, {size_text(stored.bytes)}")
    arriving = ArrivingCheckpoint(folder, stored.held, keep)
    try:
        for number, part in _complete_parts(store, stored):
            arriving.add(number, part)
        arriving.complete()
    finally:
        arriving.discard()


def _complete_parts(store: ObjectStore, stored: StoredCheckpoint) -> Iterator[tuple[int, bytes]]:
    """Yield the files of a checkpoint in parts, each with the number of its file; then compare the hashes."""
    for number, name in enumerate(FILES):
        where, hashed = f"{stored.folder}/{name}", hashlib.sha256()
        file = stored.files.get(name)
        if file is None:
            raise _Damaged(f"{store.url}/{where} is missing in {_HEAD}")
        try:
            for part in store.parts(where, file.bytes):
                hashed.update(part)
                yield number, part
        except FileNotFoundError:
            raise _Damaged(f"{store.url}/{where} is damaged: it is missing, or too short") from None
        if hashed.hexdigest() != file.sha256:
            raise _Damaged(f"{store.url}/{where} is damaged: its content does not match its SHA-256")


def fault_of(store: ObjectStore, stored: StoredCheckpoint) -> str | None:
    """Read a checkpoint of the store, and return why it is damaged, or None if it is complete.

    Raises:
        CheckpointError: the store cannot be read.
    """
    try:
        for _ in _complete_parts(store, stored):
            pass
    except _Damaged as error:
        return str(error).removeprefix(f"{store.url}/{stored.folder}/")
    return None


def take_lease(folder: Path, lease: StoreLease, resume: Path | None) -> None:
    """Assign a local folder to a job that begins, or to one that already runs here.

    Args:
        folder: the folder; a job over hosts calls this on each.
        lease: the lease of the job.
        resume: the checkpoint from which it begins. Other checkpoints of an earlier job are removed.

    Raises:
        CheckpointError: the folder cannot be written to.
    """
    mark = _read_mark(folder)
    if mark is not None and mark.job == lease.job:
        return
    try:
        make_folder(folder)
        for path in Store(folder).steps().values():
            if resume is None or path.name != resume.name:
                shutil.rmtree(path)
        _write_mark(folder, _Mark(lease.job, lease.base))
    except OSError as error:
        advice = "; free space there" if is_full(error) else ""
        raise CheckpointError(
            f"the folder of checkpoints {folder} cannot be used: {reason(error)}{advice}"
        ) from None


def _read_mark(folder: Path) -> _Mark | None:
    try:
        return msgspec.json.decode((folder / _MARK).read_bytes(), type=_Mark)
    except (OSError, ValueError):
        return None


def _write_mark(folder: Path, mark: _Mark) -> None:
    temporary = folder / f"{_MARK}.{secrets.token_hex(4)}"
    temporary.write_bytes(msgspec.json.encode(mark))
    temporary.replace(folder / _MARK)


# ------------------------------------------------------------------------------------- while a job trains


@dataclass(frozen=True)
class _Upload:
    """What to bring to the store: only the claim, a checkpoint, or the end of the job."""

    step: int | None = None
    seconds: float = 0.0
    finished: bool = False


class Mirror:
    """Uploads the checkpoints that the chief of a job has written, on a thread; the newest one counts.

    That thread calls `done(url, step, seconds)` for each checkpoint that is in the store, `failed(message)`
    for each that could not be uploaded, `not_removed(url, why)` for each old one that could not be deleted,
    and `removed_late(url)` for each that an earlier chief has left; these functions must not raise.

    Args:
        lease: the right to write to the store.
        local: the checkpoints of this machine; the store keeps as many.
        done: see above.
        failed: see above.
        connect: opens the store, on the thread.
        wait: waits for some seconds, on the thread.
        removed_late: see above.
        not_removed: see above.

    Attributes:
        taken_over: why this job may no longer write to the store; empty if it may.
    """

    def __init__(
        self,
        lease: StoreLease,
        local: Store,
        done: Callable[[str, int, float], None],
        failed: Callable[[str], None],
        connect: Callable[[StoreLease], ObjectStore] | None = None,
        wait: Callable[[float], object] = time.sleep,
        removed_late: Callable[[str], None] = lambda url: None,
        not_removed: Callable[[str, str], None] = lambda url, why: None,
    ) -> None:
        self._lease = lease
        self._local = local
        self._done = done
        self._failed = failed
        self._removed_late = removed_late
        self._not_removed = not_removed
        self._connect = connect or open_leased
        self._work = Latest(self._act, "uploads")
        self._wait = wait
        self._store: ObjectStore | None = None
        self._holder = secrets.token_hex(8)
        self._head: Head | None = None
        self._tag: str | None = None
        self._fenced = False
        self._unlisted: list[StoredCheckpoint] = []
        self.taken_over = ""

    def begin(self) -> None:
        """Begin to take over the prefix from earlier writers."""
        self._work.give(_Upload())

    def upload(self, step: int, seconds: float = 0.0) -> None:
        """Request the upload of a checkpoint that is on the disk, which took `seconds`; return at once.

        While another one is uploaded, this one waits; it replaces one that already waits.
        """
        self._work.give(_Upload(step, seconds))

    def finish(self, step: int) -> None:
        """Request that the store has the checkpoint of `step`, with which the job has finished."""
        self._work.give(_Upload(step, finished=True))

    def close(self, seconds: float) -> bool:
        """Wait until everything that was requested is done or has failed; return False on timeout."""
        return self._work.close(seconds)

    def remove_after(self, step: int) -> int:
        """Remove the checkpoints of later steps than `step`; return that of the newest one left, or -1.

        Raises:
            CheckpointError: they cannot be removed.
        """
        idle = self._work.close(_IDLE_SECONDS)
        try:
            if not idle:
                raise CheckpointError(f"an upload has not ended within {_IDLE_SECONDS:.0f} s")
            store = self._claimed()
            assert self._head is not None
            if self._head.newest() > step:
                self._commit(store, lambda head: head.up_to(step))
            return self._head.newest()
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot remove the checkpoints of steps after {step} in {self._lease.url}: {error}; remove "
                "them before you resume the job"
            ) from None

    def _act(self, upload: _Upload) -> None:
        clock = SystemClock()
        begun = clock.now()
        for pause in (*_TRIES, None):
            try:
                url = self._bring(upload)
            except SupersededError as error:
                self.taken_over = str(error)
                self._failed(str(error))
                return
            except Exception as error:
                text = str(error) if isinstance(error, CheckpointError) else repr(error)
                if pause is not None and not self._work.has_next():
                    self._wait(pause)
                    continue
                if upload.step is not None:
                    self._failed(f"the checkpoint of step {upload.step} is not in the store: {text}")
                return
            else:
                if url and upload.step is not None:
                    self._done(url, upload.step, upload.seconds + clock.now() - begun)
                return

    def _bring(self, upload: _Upload) -> str:
        """Do the requested work; return the URL of a checkpoint that was uploaded."""
        if self.taken_over:
            raise SupersededError(self.taken_over)
        store, url = self._claimed(), ""
        assert self._head is not None
        if upload.step is not None:
            try:
                url = self._put(store, self._local.path(upload.step))
            except FileNotFoundError:
                # A newer checkpoint has replaced it, and is uploaded next.
                return ""
        if upload.finished and self._head.finished != upload.step:
            self._commit(store, lambda head: msgspec.structs.replace(head, finished=upload.step))
        return url

    def _put(self, store: ObjectStore, path: Path) -> str:
        """Upload a checkpoint, unless the store has it; return its URL, or an empty text."""
        assert self._head is not None
        with ExitStack() as opened:
            # Their content remains if the checkpoint is removed here meanwhile.
            files = {name: opened.enter_context((path / name).open("rb")) for name in FILES}
            held = msgspec.structs.replace(held_of(path), finished=False)
            if any(stored.held.is_same(held) for stored in self._head.checkpoints):
                return ""
            verified = read_outline(path).manifest.get("verified")
            stored = StoredCheckpoint(
                f"{path.name}-{secrets.token_hex(4)}",
                held,
                SystemClock().wall(),
                {
                    name: StoredFile(
                        os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
                    )
                    for name, file in files.items()
                },
                verified if isinstance(verified, int) else -1,
            )
            try:
                for name in FILES:
                    opened_file = Path(f"/proc/self/fd/{files[name].fileno()}")
                    store.put(f"{stored.folder}/{name}", opened_file, stored.files[name].bytes)
            except CheckpointError:
                self._discard(store, stored)
                raise
            try:
                self._commit(store, lambda head: head.with_checkpoint(stored, self._local.keep))
            except CheckpointError:
                if self._fenced:
                    self._discard(store, stored)
                else:
                    # The store may have the head: perhaps only the answer was lost.
                    self._unlisted.append(stored)
                raise
        return f"{store.url}/{stored.folder}"

    def _claimed(self) -> ObjectStore:
        """Return the store, after writing its head if this process has not done so."""
        if self._store is None:
            self._store = self._connect(self._lease)
        if self._head is None:
            head, tag = read_head(self._store)
            if not (head is not None and head.job == self._lease.job) and tag != self._lease.base:
                raise self._lost(head)
            self._tag = tag
            self._commit(self._store, lambda _: head or Head())
            self._remove_leftovers(self._store)
        return self._store

    def _commit(self, store: ObjectStore, change: Callable[[Head], Head]) -> None:
        """Replace the head; then delete the objects of the checkpoints that are no longer in it.

        Raises:
            SupersededError: another job has written it.
            CheckpointError: it cannot be written, or another worker of this job has written it.
        """
        for _ in range(_CONFLICTS):
            before = self._head or Head()
            after = change(before)
            after = msgspec.structs.replace(
                after, job=self._lease.job, holder=self._holder, commits=after.commits + 1
            )
            if self._lease.one_writer:
                self._check_writer(store)
            try:
                tag = store.replace(_HEAD, msgspec.json.encode(after), self._tag)
            except Conflict:
                # The answer to an earlier attempt of this process may have been lost.
                head, tag_there = read_head(store)
                if head is None or head.holder != self._holder:
                    raise self._lost(head) from None
                self._head, self._tag = head, tag_there
                continue
            self._head, self._tag = after, tag
            self._note_commit()
            kept = {stored.folder for stored in after.checkpoints}
            earlier = (*before.checkpoints, *self._unlisted)
            self._delete(store, [stored for stored in earlier if stored.folder not in kept])
            self._unlisted.clear()
            return
        raise CheckpointError(f"{store.url}/{_HEAD} changes while it is written")

    def _discard(self, store: ObjectStore, stored: StoredCheckpoint) -> None:
        """Delete the objects of a checkpoint that could not be uploaded, now or after the next commit."""
        try:
            store.delete(stored.objects)
        except CheckpointError:
            # The upload says why it failed, which is probably the same reason.
            self._unlisted.append(stored)

    def _delete(self, store: ObjectStore, checkpoints: Iterable[StoredCheckpoint]) -> None:
        for stored in checkpoints:
            try:
                store.delete(stored.objects)
            except CheckpointError as error:
                # The next chief deletes them.
                self._not_removed(f"{store.url}/{stored.folder}", str(error))

    def _check_writer(self, store: ObjectStore) -> None:
        """Without conditional writes, at least detect another writer that is not writing at this moment."""
        head, _ = read_head(store)
        if self._head is not None and (head is None or head.holder != self._holder):
            raise self._lost(head)

    def _lost(self, head: Head | None) -> CheckpointError:
        url, self._fenced = self._lease.url, True
        if head is not None and head.job == self._lease.job:
            return CheckpointError(f"another worker of this job has become the chief, and writes to {url}")
        if head is None:
            return SupersededError(f"{url}/{_HEAD} was removed while this job used it; give each job its URL")
        return SupersededError(
            f"another job saves its checkpoints in {url}, so this one ends: only one of them can continue; "
            "to continue this one, stop the other one and start this one again; to run both, give each a URL"
        )

    def _note_commit(self) -> None:
        mark = _Mark(self._lease.job, self._lease.base, committed=True)
        if _read_mark(self._local.folder) != mark:
            with contextlib.suppress(OSError):
                _write_mark(self._local.folder, mark)

    def _remove_leftovers(self, store: ObjectStore) -> None:
        """Delete what earlier chiefs have left, including aborted uploads, which cannot change the head."""
        assert self._head is not None
        kept = {stored.folder for stored in self._head.checkpoints}
        left: dict[str, list[str]] = {}
        with contextlib.suppress(CheckpointError):
            for name in store.names():
                folder, _, _ = name.partition("/")
                if name.startswith(FOLDER_PREFIX) and folder not in kept:
                    left.setdefault(folder, []).append(name)
            for folder, names in left.items():
                store.delete(names)
                self._removed_late(f"{store.url}/{folder}")


def open_leased(lease: StoreLease, retry_seconds: float = RETRY_SECONDS) -> ObjectStore:
    """Open the store of a lease.

    Args:
        lease: the lease.
        retry_seconds: see `ObjectStore`.

    Raises:
        CheckpointError, UnfitError: see `ObjectStore`.
    """
    return ObjectStore(lease.url, conditional=not lease.one_writer, retry_seconds=retry_seconds)
