"""What a visitor of the repository finds: valid forms, links that lead somewhere, commands that exist."""

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import lockstep
from lockstep.cli.main import cli

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = ("README.md", "SECURITY.md", "docs/versioning.md", "docs/doctor.md")
CITATION_KEYS = {
    *("abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi", "identifiers"),
    *("keywords", "license", "license-url", "message", "preferred-citation", "references", "repository"),
    *("repository-artifact", "repository-code", "title", "type", "url", "version"),
}
"""The keys of the Citation File Format 1.2.0."""


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_citation_is_of_this_version() -> None:
    citation = load(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(citation) <= CITATION_KEYS
    assert {"authors", "cff-version", "message", "title"} <= set(citation)
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert citation["version"] == lockstep.__version__
    assert citation["license"] == project["license"]
    assert citation["abstract"] == project["description"]
    assert citation["authors"] == [{"name": "Lockstep contributors"}]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_valid_and_asks_for_the_report(path: Path) -> None:
    form = load(path)
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in form["body"]} <= {"markdown", "textarea"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    (report,) = (field for field in fields if field["id"] == "report")
    assert "lockstep doctor --report" in report["attributes"]["label"]


def test_a_bug_cannot_be_reported_without_the_report() -> None:
    required = {
        field["id"]
        for field in load(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")["body"]
        if field.get("validations", {}).get("required")
    }
    assert required == {"happened", "program", "output", "report"}


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = load(ROOT / ".github" / "workflows" / "ci.yml")
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text)
    assert links
    for file, anchor in links:
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), f"{page}: {file}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            known = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in known, f"{page}: {file}#{anchor}"


def used_commands() -> list[str]:
    files = [*(ROOT / page for page in PAGES), *FORMS, ROOT / "Containerfile"]
    found = {one for file in files for one in re.findall(r"`(lockstep [^`]+)`", file.read_text())}
    # The first line of a file is no command.
    return sorted({" ".join(command.split()) for command in found} - {"lockstep order 1"})


@pytest.mark.parametrize("command", used_commands())
def test_commands_exist_with_their_options(command: str) -> None:
    words = shlex.split(command.rstrip("."))[1:]
    context = click.Context(cli)
    known: click.Command = cli
    while words and isinstance(known, click.Group) and not words[0].startswith("-"):
        found = known.get_command(context, words.pop(0))
        assert found is not None, command
        known = found
    options = {option for parameter in known.params for option in parameter.opts}
    used = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    assert set(used) <= options
