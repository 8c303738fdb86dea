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
POLICY = re.compile(
    "ATTEMPT|EVERY|FAREWELL|GRACE|KEPT|LIMIT|LONGEST|MAX|MOST|NAMED|NICE|PATIENCE|PAUSE|QUIET|REPORT|RETRY|"
    "SECONDS|SHOWN|SILENCE|STALL|TRIES|WITHIN"
)
"""The names of constants that say how long, how often or how many."""
NOT_POLICY = {
    "hosts/indexed_job.py": {"_LONGEST_NAME"},
    "launcher/fork_server.py": {"_MOST_ANSWER"},
    "protocol/admin.py": {"_MOST_SIGNAL", "_MOST_WORKERS"},
    "system/load.py": {"_MOST_BYTES"},
    "system/prctl.py": {"_ATTEMPTS", "_PAUSE"},
    "transport/keys.py": {"_MOST_TEXT"},
    "worker/downloads.py": {"_MOST_HOLDER"},
}
"""Such constants that a format, a protocol or a system fixes."""
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


def names_of_files(text: str) -> list[tuple[str, str]]:
    """Return the names that a page says are in a file, with the file."""
    pairs = [(file, name) for file, name in WALKED.findall(text) if name]
    for file, names in NAMED.findall(text) + LIMIT.findall(text):
        pairs += [(file, name) for name in re.findall(r"\w+", names)]
    return pairs


def policies(file: str) -> set[str]:
    """Return the constants of a module that are a number of seconds, times, bytes or the like."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, numbers = (
                node.targets[0].id,
                [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)],
            )
            if POLICY.search(name) and any(isinstance(each.value, int | float) for each in numbers):
                names.add(name)
    return names - NOT_POLICY.get(file, set())


def test_the_map_names_every_limit() -> None:
    named = {pair for page in PAGES for pair in names_of_files(page.read_text())}
    modules = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")]
    limits = {(file, name) for file in modules for name in policies(file)}
    assert sorted(limits - named) == [], "name them in a table of limits in docs/rooms.md"


def test_the_map_names_every_event_and_message() -> None:
    """The parts and answers of messages, which stand beside their messages, have no rows."""
    text = "".join(page.read_text() for page in PAGES)
    files = ["observability/events.py", "observability/measurements.py"]
    files += [f"protocol/{name}.py" for name in ("host", "worker", "coordinator", "admin", "engine")]
    classes = {
        (file, node.name)
        for file in files
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "tag" for keyword in node.keywords)
    }
    assert len(classes) > 100
    lacking = sorted((file, name) for file, name in classes if f"`{name}`" not in text)
    assert lacking == [], "name them in the tables of events and messages in docs/rooms.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_is_in_its_file(page: Path) -> None:
    pairs = names_of_files(page.read_text())
    assert [(file, name) for file, name in pairs if name not in names_in(file)] == []
    if page.stem in ("design", "rooms"):
        assert len(pairs) > 10
