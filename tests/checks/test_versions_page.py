"""docs/versions.md has the versions of `pyproject.toml`, and the corners of `tests/matrix.py`."""

import re
import runpy
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {"Keras": "keras", "JAX": "jax", "TensorFlow": "tensorflow", "PyTorch": "torch", "NumPy": "numpy"}


def test_the_page_has_the_oldest_versions() -> None:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    bounds = {text.partition(">=")[0]: text.partition(">=")[2] for texts in lists for text in texts}
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", PAGE, re.MULTILINE))
    assert rows == {title: bounds[name] for title, name in NAMES.items()} | {
        "Python": PROJECT["requires-python"].removeprefix(">=")
    }


def test_the_page_has_the_corners() -> None:
    corners = runpy.run_path(str(ROOT / "tests" / "matrix.py"))["CORNERS"]
    assert re.findall(r"^\| `([\w.-]+)` \|", PAGE, re.MULTILINE) == [*corners]


def table(title: str) -> list[list[str]]:
    """The cells of the rows below the header whose first cell is `title`; the first row is the header."""
    lines = PAGE[PAGE.index(f"| {title} |") :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


def test_the_tested_versions_are_those_of_corners_that_passed() -> None:
    (_, *columns, _), *corners = table("corner")
    for title, oldest, newest, between in table("library")[1:]:
        tested = {Version(corner[1 + columns.index(title)]) for corner in corners if corner[-1] == "passed"}
        if title == "Python":
            tested = {Version(f"{version.major}.{version.minor}") for version in tested}
        assert tested == {Version(one) for one in (oldest, newest, *filter(None, between.split(", ")))}
        assert max(tested) == Version(newest)


def test_the_classifiers_are_the_tested_versions_of_python() -> None:
    ((oldest, newest, between),) = (row[1:] for row in table("library") if row[0] == "Python")
    marks = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert marks == sorted({oldest, newest, *filter(None, between.split(", "))}, key=Version)
