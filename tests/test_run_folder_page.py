"""docs/run-folder.md names every event that the code writes, with its fields, and no other."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import lockstep
from lockstep.coordinator.job_report import JobSummary
from lockstep.coordinator.provenance import provenance
from lockstep.protocol.job_spec import JobSpec
from lockstep.worker.script import Script

SOURCE = Path(lockstep.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "run-folder.md"


def described() -> dict[str, set[str]]:
    """The fields of each event, as the page's tables have them."""
    rows = re.findall(r"^\| `([a-z ]+)` \| ?([a-z_, ]*) \|", PAGE.read_text(), re.MULTILINE)
    assert len({name for name, _ in rows}) == len(rows)
    return {name: set(re.findall(r"\w+", names)) for name, names in rows}


def written() -> dict[str, set[str]]:
    """The fields of each event, as the code writes it; those of `**` apart."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            for name in names(call):
                keywords = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
                found.setdefault(name, set()).update(keywords)
    return found


def names(call: ast.Call) -> list[str]:
    """The names of the events that a call writes or reports."""
    function = ast.unparse(call.func)
    if not re.fullmatch(r"(.*\.)?report|.*\bevents\.write", function) or not call.args:
        return []
    first = call.args[0]
    values = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
    return [str(value.value) for value in values if isinstance(value, ast.Constant)]


def test_every_event_is_described_with_its_fields() -> None:
    expected = written()
    expected["job"] |= {field.name for field in fields(JobSpec)} | set(provenance(Script("a.py", False)))
    expected["finished"] |= JobSummary().fields(0.0).keys()
    expected["trained"] |= {"steps", "model", "digest"}
    page = described()
    assert page.keys() == expected.keys()
    assert page == {
        name: fields - {"worker"} if "worker" not in page[name] else fields
        for name, fields in expected.items()
    }


def test_the_format_is_the_one_that_the_page_describes() -> None:
    assert f"The format has the\nnumber {provenance(Script('a.py', False))['format']}," in PAGE.read_text()
