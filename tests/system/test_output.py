"""Logs, lines with prefixes, and sinks that may be slow."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.console import Console
from lockstep.observability.event_log import EventLog
from lockstep.observability.events import DistributionBegan
from lockstep.system.output import LinePrefixer, Log, Sink

F_SETPIPE_SZ = 1031


@pytest.fixture
def pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, F_SETPIPE_SZ, 4096)
    return reading, writing


def test_a_sink_never_blocks_and_loses_nothing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    sink, sent, got = Sink(writing), os.urandom(50_001), b""
    sink.write(sent[:20_000])
    sink.write(sent[20_000:])
    assert sink.pending == 50_001 - 4096
    while len(got) < len(sent):
        got += os.read(reading, 1000)
        sink.flush()
    assert got == sent
    assert sink.pending == 0
    os.close(reading)
    os.close(writing)


def test_a_sink_without_a_reader_discards_its_data(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    sink = Sink(writing)
    sink.write(b"x" * 10_000)
    os.close(reading)
    sink.flush()
    sink.write(b"more")
    assert sink.pending == 0
    os.close(writing)


ERRORS = ("ECONNRESET", "EDQUOT", "EFBIG", "EIO", "ENOSPC", "EPIPE", "ESTALE", "ETIMEDOUT", "ENODEV")


@pytest.mark.parametrize("name", ERRORS)
def test_output_that_fails_is_reported_once_and_discarded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = getattr(errno, name)
    with (tmp_path / "out").open("wb", 0) as out, (tmp_path / "err").open("wb", 0) as err:
        console = Console(Sink(out.fileno()), Sink(err.fileno()), "chief", chief=0)
        log = Log.open(tmp_path / "log", console.say)
        write, broken = os.write, {out.fileno(), log._file.descriptor}

        def fail(descriptor: int, data: bytes) -> int:
            if descriptor in broken:
                raise OSError(number, os.strerror(number))
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", fail)
        for _ in range(2):
            console.outlets(0)[0](b"text")
            log.write(b"text")
        notes = [*console.lost(), *console.lost()]
        broken.add(err.fileno())
        console.say("this, too")
        assert [text.partition(" (")[0] for text in console.lost()] == ["cannot write to stderr"]
        assert console.pending == 0
        monkeypatch.undo()
        log.close()
    why = os.strerror(number)
    assert notes == [
        f"cannot write to stdout ({why}); training continues, and the logs keep the workers' output"
    ]
    lost = f"lockstep: cannot write {tmp_path / 'log'}: {why}; data that cannot be written is lost\n"
    assert (tmp_path / "err").read_text() == lost


def test_a_log_that_cannot_be_opened_is_reported_and_empty(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    notes: list[str] = []
    log = Log.open(tmp_path / "log", notes.append)
    log.write(b"text")
    assert log.tail(3) == []
    log.close()
    with EventLog.open(tmp_path / "log", notes.append) as events:
        events.append(PublishedEvent(0.0, 1, DistributionBegan()))
    assert (
        notes == [f"cannot write {tmp_path / 'log'}: Is a directory; data that cannot be written is lost"] * 2
    )


@given(st.lists(st.binary(max_size=8).map(lambda data: data.replace(b"[", b"\n"))))
def test_prefixes_do_not_depend_on_the_pieces_of_the_text(pieces: list[bytes]) -> None:
    got: list[bytes] = []
    prefixer = LinePrefixer(b"> ", got.append)
    for piece in pieces:
        prefixer.write(piece)
    prefixer.close()
    text = b"".join(pieces)
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    assert b"".join(got) == b"".join(b"> " + line + b"\n" for line in lines)


def test_a_long_line_is_written_in_pieces() -> None:
    got: list[bytes] = []
    prefixer = LinePrefixer(b"> ", got.append)
    for _ in range(3):
        prefixer.write(b"x" * 40_000)
    assert b"".join(got) == b"> " + b"x" * 80_000 + b"\n"


def test_a_log_appends_to_that_of_an_earlier_run_and_shows_only_new_lines(tmp_path: Path) -> None:
    first = Log.open(tmp_path / "log", pytest.fail)
    first.write(b"old\n")
    first.close()
    log = Log.open(tmp_path / "log", pytest.fail)
    assert log.tail(2) == []
    log.write(b"1\n2\n3\n")
    assert log.tail(2) == ["2", "3"]
    assert log.tail(9) == ["1", "2", "3"]
    log.close()
    assert (tmp_path / "log").read_bytes() == b"old\n1\n2\n3\n"


def test_a_tail_has_no_control_characters(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "log", pytest.fail)
    log.write(b"1/9\r2/9\r9/9\n\x1b[31mred\x1b[0m\x07\r\n\xff\n")
    assert log.tail(5) == ["9/9", "red", "\ufffd"]
    log.close()


def test_the_tail_of_a_huge_log_reads_its_end_only(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "log", pytest.fail)
    log.write(b"x" * 200_000 + b"\nend\n")
    assert [len(line) for line in log.tail(20)] == [64 * 1024 - 5, 3]
    log.close()


def outputs(tee: str, tmp_path: Path) -> tuple[bytes, bytes]:
    """Return the terminal's output of two workers that write three pieces each."""
    with (tmp_path / "out").open("w+b", 0) as out, (tmp_path / "err").open("w+b", 0) as err:
        console = Console(Sink(out.fileno()), Sink(err.fileno()), tee, chief=0)  # type: ignore[arg-type]
        outlets = [console.outlets(worker) for worker in (0, 1)]
        for piece in (b"a", b"b\nc", b"d"):
            for worker in (0, 1):
                outlets[worker][0](piece)
                outlets[worker][1](piece.upper())
        console.end_lines()
        console.say("note")
        return (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()


def test_the_console_shows_the_output_of_the_chief_unchanged(tmp_path: Path) -> None:
    assert outputs("chief", tmp_path) == (b"ab\ncd", b"AB\nCDlockstep: note\n")


def test_the_console_shows_the_lines_of_all_workers_with_prefixes(tmp_path: Path) -> None:
    out = b"[worker 0] ab\n[worker 1] ab\n[worker 0] cd\n[worker 1] cd\n"
    err = b"[worker 0] AB\n[worker 1] AB\n[worker 0] CD\n[worker 1] CD\nlockstep: note\n"
    assert outputs("all", tmp_path) == (out, err)
