"""The gallery shows what its programs print: each session and picture belongs to the programs as they are."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FIGURE = re.compile(
    r"^(?!lockstep|\d)(.*?(?:accuracy|loss|likeness|error)[^:\n]*): (\d+\.\d+)$", re.MULTILINE
)


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "site" / "gallery.py")
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = load_tool()
SHOWN_ONCE = ("an-evaluator-beside-a-job",)
"""Entries that show a digest without a second one to compare it with."""
ENTRIES: dict[str, str] = TOOL.entries(TOOL.PAGE.read_text())
RECORDS = json.loads(TOOL.RECORDS.read_text())


def digests(session: str) -> list[tuple[str, str]]:
    """Return each digest with the program whose command shows it, or the last one that a command names."""
    found, program = [], ""
    for line in session.splitlines():
        if line.startswith("$ "):
            program = next(iter(re.findall(r"\w+\.py\b", line)), program)
        found += [(program, digest) for digest in re.findall(r"digest:? (\w{64})", line)]
    return found


def test_the_page_has_twelve_entries_with_records() -> None:
    assert len(ENTRIES) == 12
    assert list(RECORDS) == list(ENTRIES)
    assert {f"{name}.svg" for name in ENTRIES} == {file.name for file in TOOL.PICTURES.iterdir()}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_session_is_that_of_the_programs_as_they_are(entry: str) -> None:
    """Run `make gallery ENTRIES=...` if this fails: a program or a command has changed."""
    section, record = ENTRIES[entry], RECORDS[entry]
    session = TOOL.session_of(section)
    assert TOOL.programs_of(section) == record["programs"]
    assert TOOL.digest(session) == record["session"]
    assert "Traceback" not in session
    commands = " ".join(TOOL.commands_of(session))
    for name in re.findall(r"^Program: \[(\S+)\]\(\.\./examples/\1\)$", section, re.MULTILINE):
        assert name in commands
    assert set(re.findall(r"\S+\.py\b", commands)) <= set(record["programs"])


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_picture_is_that_of_the_recorded_curves(entry: str) -> None:
    (picture,) = re.findall(r"^!\[[^\]]+\]\((images/gallery/\S+)\)$", ENTRIES[entry], re.MULTILINE)
    file = TOOL.PAGE.parent / picture
    assert file == TOOL.PICTURES / f"{entry}.svg"
    assert file.read_text() == TOOL.draw(RECORDS[entry]["curves"], f"Curves of the example: {entry}")


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_digests_of_an_entry_are_equal(entry: str) -> None:
    found = digests(TOOL.session_of(ENTRIES[entry]))
    for program in dict.fromkeys(program for program, _ in found):
        shown = [digest for name, digest in found if name == program]
        assert len(shown) >= 2 or entry in SHOWN_ONCE
        assert len(set(shown)) == 1
    assert found


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_session_gives_what_the_page_shows(
    entry: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On any machine the digests of an entry are equal, and its metrics close to those of the page."""
    for package, program in (("keras_hub", "lora.py"), ("torch", "custom_loop_torch.py")):
        if program in ENTRIES[entry]:
            pytest.importorskip(package)
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    shown = TOOL.session_of(ENTRIES[entry])
    session = TOOL.play(TOOL.commands_of(shown), tmp_path / "examples")
    found = digests(session)
    assert [program for program, _ in found] == [program for program, _ in digests(shown)], session
    assert len(set(found)) == len({program for program, _ in found}), session
    figures, wanted = dict(FIGURE.findall(session)), dict(FIGURE.findall(shown))
    assert list(figures) == list(wanted), session
    for name, value in figures.items():
        assert float(value) == pytest.approx(float(wanted[name]), abs=0.1), name
    assert (
        TOOL.curves(tmp_path / "examples", session)["panels"].keys()
        == RECORDS[entry]["curves"]["panels"].keys()
    )
