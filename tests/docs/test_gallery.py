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
ENTRIES: dict[str, str] = TOOL.entries(TOOL.PAGE.read_text())
RECORDS = json.loads(TOOL.RECORDS.read_text())


def digests(session: str) -> list[str]:
    return re.findall(r"digest:? (\w{64})", session)


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
    assert found or "equal" not in ENTRIES[entry]
    assert len(set(found)) <= 1 or entry == "custom-loops"


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_session_gives_what_the_page_shows(entry: str, tmp_path: Path) -> None:
    """On any machine the digests of an entry are equal, and its metrics close to those of the page."""
    for package, program in (("keras_hub", "lora.py"), ("torch", "custom_loop_torch.py")):
        if program in ENTRIES[entry]:
            pytest.importorskip(package)
    shown = TOOL.session_of(ENTRIES[entry])
    session = TOOL.play(TOOL.commands_of(shown), tmp_path / "examples")
    assert len(digests(session)) == len(digests(shown)), session
    assert [a == b for a in digests(session) for b in digests(session)] == [
        a == b for a in digests(shown) for b in digests(shown)
    ]
    figures, wanted = dict(FIGURE.findall(session)), dict(FIGURE.findall(shown))
    assert list(figures) == list(wanted), session
    for name, value in figures.items():
        assert float(value) == pytest.approx(float(wanted[name]), abs=0.1), name
    assert (
        TOOL.curves(tmp_path / "examples", session)["panels"].keys()
        == RECORDS[entry]["curves"]["panels"].keys()
    )
