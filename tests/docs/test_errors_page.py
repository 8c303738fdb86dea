"""docs/errors.md has a section for each class of `lockstep.errors`, with messages that are in the source."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from lockstep import errors

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "errors.md").read_text()
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
OF_A_PROGRAM = "data.shards.MissingShard: shard 7"
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]


@pytest.fixture(scope="module")
def source() -> str:
    """The source, with messages in one piece."""
    files = (file.read_text() for file in sorted((ROOT / "src").rglob("*.py")))
    return re.sub(r"\s+", " ", re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(files)))


def test_every_class_has_a_section_in_the_order_of_the_module() -> None:
    assert re.findall(r"^## (\w+)$", TEXT, re.MULTILINE) == [*CLASSES, "Hints"]


def test_the_tree_is_that_of_the_classes() -> None:
    tree = re.findall(r"^    ((?:[|`] {0,3}|-- | {4})*)(\w+)", TEXT, re.MULTILINE)
    depths = {name: len(getattr(errors, name).__mro__) for name in CLASSES}
    assert {name: len(indent) // 4 for name, indent in ((n, i) for i, n in tree)} == {
        name: depth - depths["LockstepError"] for name, depth in depths.items()
    }


@pytest.mark.parametrize("message", [one for one in MESSAGE.findall(TEXT) if one != OF_A_PROGRAM])
def test_the_source_has_most_of_each_message(message: str, source: str) -> None:
    parts = re.split(r"\.\.\.|'[^']*'|[^\s,;:]*\d[^\s,;:]*|[^\s,;:]*/[^\s,;:]*|[,;:]", message)
    words = [part.split() for part in parts]
    pairs = [" ".join(two) for part in words for two in pairwise(part)]
    assert len(pairs) >= 2
    known = [two for two in pairs if two in source]
    assert 3 * len(known) >= 2 * len(pairs), [two for two in pairs if two not in known]
