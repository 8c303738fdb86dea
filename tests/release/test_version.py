"""The version, the changelog and the tag of a release agree."""

import re
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

import lockstep

ROOT = Path(__file__).parents[2]
VERSION = Version(lockstep.__version__)


def fault(version: Version, sections: list[str], tags: list[str]) -> str:
    """Return what does not agree; empty if everything does.

    Args:
        version: of the package.
        sections: the headings of the changelog, the newest first.
        tags: of the commit.
    """
    newest = sections[0] if sections else ""
    wanted = "Unreleased" if version.is_devrelease else str(version)
    # The date of a release follows its version.
    if newest != wanted and re.fullmatch(rf"{re.escape(wanted)} \(\d{{4}}-\d\d-\d\d\)", newest) is None:
        return f"the newest section of CHANGELOG.md is {newest!r}, not {wanted!r}"
    others = [tag for tag in tags if re.match(r"v\d", tag) and tag != f"v{version}"]
    return f"this commit of version {version} has the tag {others[0]}" if others else ""


def test_this_commit() -> None:
    tags: list[str] = []
    if (ROOT / ".git").exists():
        command = ["git", "tag", "--points-at", "HEAD"]
        tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert str(VERSION) == lockstep.__version__
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert fault(VERSION, sections, tags) == ""


@pytest.mark.parametrize(
    ("version", "sections", "tags", "agree"),
    [
        ("0.1.0.dev0", ["Unreleased"], [], True),
        ("0.1.0", ["0.1.0"], ["v0.1.0", "tested"], True),
        ("0.1.0", ["0.1.0 (2026-12-01)", "0.0.9 (2026-11-01)"], [], True),
        ("0.1.0", ["Unreleased", "0.1.0"], [], False),
        ("0.1.0", ["0.1.01"], [], False),
        ("0.2.0.dev0", ["0.1.0"], [], False),
        ("0.1.0", ["0.1.0"], ["v0.1.1"], False),
        ("0.2.0.dev0", ["Unreleased"], ["v0.2.0"], False),
        ("0.1.0", [], [], False),
    ],
)
def test_what_agrees(version: str, sections: list[str], tags: list[str], agree: bool) -> None:
    assert (fault(Version(version), sections, tags) == "") == agree
