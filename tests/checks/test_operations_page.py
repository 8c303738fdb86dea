"""docs/operations.md: its commands exist with these options, its notes are real.

The commands of some other pages exist, too.
"""

import re
import shlex
from itertools import takewhile
from pathlib import Path

import click

from lockstep.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "operations.md"
OTHERS = [
    DOCS / f"{name}.md"
    for name in ("start", "overnight", "errors", "from-horovod", "from-torchrun", "from-ray-train")
]
PROSE_COMMAND = re.compile(r"`(lockstep [^`]+)`")
SHELL_LINE = re.compile(r"^\$ (.*)$", re.MULTILINE)
NOTE = re.compile(r"^lockstep: (.*)$", re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Return the calls of `lockstep` in prose and in shell lines, as words without the name."""
    found = []
    for line in (*SHELL_LINE.findall(text), *PROSE_COMMAND.findall(text)):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        if "lockstep" in words:
            rest = words[words.index("lockstep") + 1 :]
            found.append(list(takewhile(lambda word: word not in {";", "|"}, rest)))
    return found


def anchors(file: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def phrases(note: str) -> set[str]:
    """Return the sequences of three words in a note; numbers, paths, signals and punctuation end them."""
    words = re.findall(r"[A-Za-z']+|[^A-Za-z'\s]+", note)
    found = [words[start : start + 3] for start in range(len(words) - 2)]
    return {" ".join(three) for three in found if all(w[0].isalpha() and not w.isupper() for w in three)}


def test_every_command_and_its_options_exist() -> None:
    called = [words for page in (PAGE, *OTHERS) for words in commands(page.read_text())]
    assert len(called) > 100
    for name, *rest in called:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        known = {option for parameter in command.params for option in parameter.opts}
        used = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert used <= known, (name, *rest)


def test_every_section_is_in_the_table_of_symptoms() -> None:
    text = PAGE.read_text()
    table = text.partition("\n## ")[0]
    linked = set(re.findall(r"\]\(#([^)]*)\)", table))
    assert linked == anchors(PAGE) - {"operations-from-symptom-to-command"}


def test_most_phrases_of_each_note_are_in_the_source() -> None:
    files = "\n".join(file.read_text() for file in sorted((ROOT / "src").rglob("*.py")))
    source = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", files))
    notes = NOTE.findall(PAGE.read_text())
    assert notes
    for note in notes:
        unknown = {phrase for phrase in phrases(note) if phrase not in source}
        assert 2 * len(unknown) <= len(phrases(note)), (note, unknown)
