"""Calls with many arguments name them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
MOST = 6


def calls_without_names(path: Path) -> Iterator[str]:
    """Yield calls with more than `MOST` arguments by position; packed fields and words have no names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and len(node.args) > MOST:
            function = ast.unparse(node.func)
            if not function.endswith((".pack", "command_of")):
                yield f"{path.relative_to(ROOT)}, line {node.lineno}: {function}"


def test_calls_with_many_arguments_use_keywords() -> None:
    assert [call for path in sorted(ROOT.rglob("*.py")) for call in calls_without_names(path)] == []
