"""docs/versions.md has the oldest versions of `pyproject.toml`, and the corners of `tests/matrix.py`."""

import re
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "versions.md").read_text()
NAMES = {"Keras": "keras", "JAX": "jax", "TensorFlow": "tensorflow", "PyTorch": "torch", "NumPy": "numpy"}


def test_the_page_has_the_oldest_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds = {text.partition(">=")[0]: text.partition(">=")[2] for texts in lists for text in texts}
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", PAGE, re.MULTILINE))
    assert rows == {title: bounds[name] for title, name in NAMES.items()} | {
        "Python": project["requires-python"].removeprefix(">=")
    }


def test_the_page_has_the_corners() -> None:
    corners = runpy.run_path(str(ROOT / "tests" / "matrix.py"))["CORNERS"]
    assert re.findall(r"^\| `([\w.-]+)` \|", PAGE, re.MULTILINE) == [*corners]
