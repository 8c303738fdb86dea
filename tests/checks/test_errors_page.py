"""docs/errors.md has a section for each class of `lockstep.errors`, with messages that are in the source."""

import re
from itertools import pairwise
from pathlib import Path

from lockstep import errors

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "errors.md").read_text()
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
OF_A_PROGRAM = "data.shards.MissingShard: shard 7"
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]


def test_every_class_has_a_section_in_the_order_of_the_module() -> None:
    assert re.findall(r"^## (\w+)$", TEXT, re.MULTILINE) == [*CLASSES, "Hints"]


def test_the_tree_is_that_of_the_classes() -> None:
    tree = re.findall(r"^    ((?:[|`] {0,3}|-- | {4})*)(\w+)", TEXT, re.MULTILINE)
    depths = {name: len(getattr(errors, name).__mro__) for name in CLASSES}
    assert {name: len(indent) // 4 for name, indent in ((n, i) for i, n in tree)} == {
        name: depth - depths["LockstepError"] for name, depth in depths.items()
    }


def test_the_source_has_most_of_each_message() -> None:
    files = "\n".join(file.read_text() for file in sorted((ROOT / "src").rglob("*.py")))
    # With messages in one piece.
    source = re.sub(r"\s+", " ", re.sub(r"""["']\s*\n\s*f?["']""", "", files))
    for message in MESSAGE.findall(TEXT):
        parts = re.split(r"\.\.\.|'[^']*'|[^\s,;:]*\d[^\s,;:]*|[^\s,;:]*/[^\s,;:]*|[,;:]", message)
        pairs = [" ".join(two) for part in parts for two in pairwise(part.split())]
        unknown = [two for two in pairs if two not in source]
        assert message == OF_A_PROGRAM or len(pairs) >= 2, message
        assert message == OF_A_PROGRAM or 3 * len(unknown) <= len(pairs), (message, unknown)
