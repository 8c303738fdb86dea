"""The pages for those who change Lockstep name files, functions and limits that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

import lockstep
from lockstep.cli.main import cli
from lockstep.cli.run import run
from lockstep.protocol.job_spec import TERM

ROOT = Path(lockstep.__file__).parent
REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "docs" / f"{name}.md" for name in ("design", "rooms", "asynchronous", "glossary")]
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]*\w/?)`")
LIMIT = re.compile(r"`([\w/]+\.py)` ((?:`\w+`(?:, )?)+)")
NAMED = re.compile(r"`([\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)")
WALKED = re.compile(r"^    ([\w/]+\.py) +(\w+)? ", re.MULTILINE)


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the names that a module and its classes define."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_exists(page: Path) -> None:
    files = [name for name in FILE.findall(page.read_text()) if "/" in name or name.endswith(".py")]
    missing = [name for name in files if not ((ROOT / name).exists() or (REPOSITORY / name).exists())]
    assert missing == []
    assert page.stem == "glossary" or len(files) > 10


def test_the_map_names_every_module() -> None:
    named = {name for page in PAGES for name in FILE.findall(page.read_text())}
    modules = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if not path.name.startswith("__")}
    assert modules - named == set(), "name them in the tables of docs/rooms.md or docs/asynchronous.md"


def test_texts_repeat_the_time_until_workers_are_killed() -> None:
    pages = [REPOSITORY / "docs" / f"{name}.md" for name in ("operations", "checkpoints", "running")]
    texts = {page.stem: page.read_text() for page in pages} | {"help": run.help or ""}
    repeated = re.compile(
        rf"workers (then )?have {TERM:g} seconds to exit|SIGKILL {TERM:g} seconds later", re.I
    )
    assert [name for name, text in texts.items() if not repeated.search(text)] == []


def rows_below(heading: str) -> list[str]:
    """Return the words in backticks of the first column of the table below a heading of docs/rooms.md."""
    section = (REPOSITORY / "docs" / "rooms.md").read_text().split(f"### {heading}\n")[1].split("\n###")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return [word for cell in cells for word in re.findall(r"`([\w-]+)`", cell)]


def test_each_option_of_run_has_a_row() -> None:
    options = [max(param.opts, key=len) for param in run.params if isinstance(param, click.Option)]
    assert sorted(rows_below("Each option of `lockstep run`")) == sorted(options)


def test_each_command_has_a_row() -> None:
    assert sorted(rows_below("Each command")) == sorted(cli.list_commands(click.Context(cli)))


def test_the_row_of_a_command_has_its_options() -> None:
    text, context = (REPOSITORY / "docs" / "rooms.md").read_text(), click.Context(cli)
    for name in set(cli.list_commands(context)) - {"run"}:
        command = cli.get_command(context, name)
        assert command is not None
        (row,) = re.findall(rf"^\| (?:`\w+`, )?`{name}`(?:, `\w+`)? \|.*$", text, re.MULTILINE)
        options = [max(param.opts, key=len) for param in command.params if isinstance(param, click.Option)]
        assert [option for option in options if f"`{option}`" not in row] == [], name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_is_in_its_file(page: Path) -> None:
    text = page.read_text()
    pairs = [(file, name) for file, name in WALKED.findall(text) if name]
    for file, names in NAMED.findall(text) + LIMIT.findall(text):
        pairs += [(file, name) for name in re.findall(r"\w+", names)]
    assert [(file, name) for file, name in pairs if name not in names_in(file)] == []
    if page.stem in ("design", "rooms"):
        assert len(pairs) > 10
