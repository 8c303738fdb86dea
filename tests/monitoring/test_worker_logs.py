"""Logs are shown as they are or line by line, and followed through all that can happen to a file."""

import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.monitoring.worker_logs import WorkerLogs, follow, list_logs


def append(folder: Path, worker: int, data: bytes) -> None:
    with (folder / f"worker-{worker}.log").open("ab") as log:
        log.write(data)


class Shown:
    """What `WorkerLogs` writes."""

    def __init__(self, folder: Path, *workers: int, prefixed: bool = False, grep: str | None = None) -> None:
        self._written: list[bytes] = []
        pattern = None if grep is None else re.compile(grep)
        self.logs = WorkerLogs(
            folder, workers, prefixed=prefixed, pattern=pattern, write=self._written.append
        )

    def gained(self) -> bytes:
        self.logs.advance()
        return self.taken()

    def taken(self) -> bytes:
        written = b"".join(self._written)
        self._written.clear()
        return written

    def rest(self) -> bytes:
        self.logs.finish()
        return self.taken()


def test_only_logs_of_workers_are_listed_in_the_order_of_their_ids(tmp_path: Path) -> None:
    for name in (
        "worker-10.log",
        "worker-2.log",
        "worker-02.log",
        "worker-1.stack",
        "events.jsonl",
        "worker-.log",
    ):
        (tmp_path / name).touch()
    (tmp_path / "worker-3.log").mkdir()
    (tmp_path / "worker-4.log").symlink_to("nowhere")
    assert list(list_logs(tmp_path)) == [2, 10]


def test_a_log_alone_is_shown_byte_for_byte_also_an_open_line(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    append(tmp_path, 0, b"\x1b[1mone\r\ntwo\xff\0 50%\r")
    assert shown.gained() == b"\x1b[1mone\r\ntwo\xff\0 50%\r"
    append(tmp_path, 0, b"99%")
    assert (shown.gained(), shown.gained(), shown.rest()) == (b"99%", b"", b"")


def test_lines_of_several_workers_begin_with_their_worker_and_do_not_mix(tmp_path: Path) -> None:
    shown = Shown(tmp_path, prefixed=True)
    append(tmp_path, 0, b"a\nb")
    append(tmp_path, 10, b"x\n")
    append(tmp_path, 2, b"y\n\n")
    assert shown.gained() == b"[worker 0] a\n[worker 2] y\n[worker 2] \n[worker 10] x\n"
    append(tmp_path, 10, b"z\n")
    append(tmp_path, 0, b"c\nd")
    assert shown.gained() == b"[worker 0] bc\n[worker 10] z\n"
    assert shown.rest() == b"[worker 0] d\n"


def test_a_worker_that_starts_later_is_shown_and_one_that_is_not_chosen_never(tmp_path: Path) -> None:
    everyone, second = Shown(tmp_path, prefixed=True), Shown(tmp_path, 1)
    append(tmp_path, 0, b"a\n")
    assert (everyone.gained(), second.gained()) == (b"[worker 0] a\n", b"")
    append(tmp_path, 1, b"b\n")
    assert (everyone.gained(), second.gained()) == (b"[worker 1] b\n", b"b\n")


def test_only_lines_with_the_pattern_are_shown(tmp_path: Path) -> None:
    shown = Shown(tmp_path, grep=r"loss: 0\.[0-9]+$|\ufffd")
    append(tmp_path, 0, b"loss: 0.5\nloss: 1.5\n\xff\nloss: 0.")
    assert shown.gained() == b"loss: 0.5\n\xff\n"
    append(tmp_path, 0, b"25\nloss: 0.1 of")
    assert (shown.gained(), shown.rest()) == (b"loss: 0.25\n", b"")


def test_a_truncated_or_replaced_log_is_shown_from_its_start(tmp_path: Path) -> None:
    shown = Shown(tmp_path, prefixed=True)
    log = tmp_path / "worker-0.log"
    log.write_bytes(b"one\ntwo")
    assert shown.gained() == b"[worker 0] one\n"
    log.write_bytes(b"1\n")
    assert shown.gained() == b"[worker 0] two\n[worker 0] 1\n"
    other = tmp_path / "other"
    other.write_bytes(b"another\n")
    other.rename(log)
    assert shown.gained() == b"[worker 0] another\n"


def test_a_log_that_is_missing_for_a_while_is_skipped(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    log = tmp_path / "worker-0.log"
    log.write_bytes(b"one\n")
    assert shown.gained() == b"one\n"
    log.rename(tmp_path / "away")
    assert shown.gained() == b""
    append(tmp_path, 0, b"new\n")
    assert shown.gained() == b"new\n"


def test_following_ends_with_the_job_and_shows_what_it_wrote_last(tmp_path: Path) -> None:
    append(tmp_path, 0, b"a\n")
    shown = Shown(tmp_path, prefixed=True)
    seen: list[bytes] = []

    def job() -> Iterator[bool]:
        yield True
        append(tmp_path, 1, b"b\n")
        yield True
        append(tmp_path, 0, b"last")
        yield False

    runs = job()
    follow(shown.logs, lambda: next(runs), lambda: seen.append(shown.taken()))
    assert (seen, shown.taken()) == ([b"[worker 0] a\n", b"[worker 1] b\n"], b"[worker 0] last\n")


@pytest.mark.parametrize("grep", [None, "^never$"])
def test_a_large_log_takes_little_memory(tmp_path: Path, grep: str | None) -> None:
    size = 64 * 1024 * 1024
    with (tmp_path / "worker-0.log").open("wb") as log:
        log.write(b"a line\n")
        # The rest is one line, and takes no space.
        log.truncate(size)
    written = 0

    def write(data: bytes) -> None:
        nonlocal written
        written += len(data)

    pattern = None if grep is None else re.compile(grep)
    logs = WorkerLogs(tmp_path, (), prefixed=False, pattern=pattern, write=write)
    tracemalloc.start()
    try:
        logs.advance()
        logs.finish()
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert written == (size if grep is None else 0)


def test_a_log_that_grows_all_the_time_does_not_hold_up_the_others(tmp_path: Path) -> None:
    append(tmp_path, 0, b"x" * 300_000)
    append(tmp_path, 1, b"y\n")
    written: list[bytes] = []

    def write(data: bytes) -> None:
        written.append(data)
        if data.startswith(b"x"):
            append(tmp_path, 0, data)

    grows: Callable[[], None] = WorkerLogs(tmp_path, (), prefixed=False, pattern=None, write=write).advance
    grows()
    assert written[-1] == b"y\n"
