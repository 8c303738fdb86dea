"""Pages of logs and searches in them, against the lines of a small file."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.monitoring import run_logs
from lockstep.monitoring.run_logs import log_sizes, read_page, readable, search


def test_the_last_page_then_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_logs, "PAGE", 100)
    text = "".join(f"line {number} ä\n" for number in range(100))
    (tmp_path / "worker-3.log").write_text(text)
    page = read_page(tmp_path, 3)
    assert page.stop == page.size == len(text.encode())
    pages = [page]
    while pages[0].start:
        pages.insert(0, read_page(tmp_path, 3, before=pages[0].start))
    assert "".join(page.text for page in pages) == text
    at, forward = 0, ""
    while at < page.size:
        found = read_page(tmp_path, 3, start=at)
        assert found.start == at < found.stop <= at + 100
        at, forward = found.stop, forward + found.text
    assert forward == text


def test_a_line_that_is_longer_than_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_logs, "PAGE", 10)
    (tmp_path / "worker-0.log").write_text("x" * 25 + "\nend")
    at, found = 0, ""
    while at < 29:
        page = read_page(tmp_path, 0, start=at)
        assert page.stop > at
        at, found = page.stop, found + page.text
    assert found == "x" * 25 + "\nend"
    assert read_page(tmp_path, 0, start=1000).text == ""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    lines=st.lists(st.text("aAbBß ", max_size=12), max_size=30),
    wanted=st.text("aAbBß", min_size=1, max_size=3),
    case=st.booleans(),
    end=st.sampled_from(["", "\n"]),
)
def test_a_search_finds_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], wanted: str, case: bool, end: str
) -> None:
    monkeypatch.setattr(run_logs, "_CHUNK", 32)
    monkeypatch.setattr(run_logs, "_MOST_SEARCHED", 64)
    monkeypatch.setattr(run_logs, "MOST_FOUND", 3)
    data = "\n".join(lines) + end
    (tmp_path / "worker-0.log").write_text(data)
    found, at = [], 0
    while at is not None:
        result = search(tmp_path, 0, wanted, case=case, start=at)
        assert result.resume is None or result.resume > at
        found += result.found
        at = result.resume

    def fold(text: str) -> str:
        return text if case else "".join(one.lower() if one.isascii() else one for one in text)

    assert [one.text for one in found] == [one for one in data.split("\n") if fold(wanted) in fold(one)]
    for one in found:
        assert data.encode()[one.start :].startswith(one.text.encode())


def test_a_long_line_is_shown_around_the_text(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("first\n" + "x" * 5000 + "needle" + "y" * 5000 + "\n")
    (found,) = search(tmp_path, 0, "NEEDLE", case=False).found
    assert found.start == 6
    assert "needle" in found.text
    assert len(found.text) < 1000
    assert not search(tmp_path, 0, "NEEDLE", case=True).found


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\x1b[1m 1/2 \x1b[0m\rdone\n", "done\n"),
        (b"one\r\ntwo\r\n", "one\ntwo\n"),
        (b"a\x08b \xff\n", "ab \ufffd\n"),
        (b"\x1b]0;title\x07text", "text"),
        (b"<b>&amp;", "<b>&amp;"),
    ],
)
def test_what_a_terminal_shows(raw: bytes, shown: str) -> None:
    assert readable(raw) == shown


def test_only_logs_are_listed(tmp_path: Path) -> None:
    (tmp_path / "worker-10.log").write_text("ab")
    (tmp_path / "worker-2.log").write_text("")
    (tmp_path / "worker-x.log").write_text("ab")
    (tmp_path / "worker-1.stack").write_text("ab")
    (tmp_path / "worker-4.log").symlink_to("/etc/passwd")
    assert list(log_sizes(tmp_path).items()) == [(2, 0), (10, 2)]


def test_a_pipe_in_place_of_a_log_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "worker-0.log")
    with pytest.raises(OSError, match="not a regular file"):
        read_page(tmp_path, 0)
