"""Calls with many arguments name them; one module makes the commands of child processes."""

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


def test_one_module_makes_the_commands() -> None:
    """A module that is executed without -P could be replaced by a file in the user's current folder."""
    others = ("system/child_process.py", "rendezvous/take_part.py")
    makers = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple)
        and any(ast.unparse(one) == "sys.executable" for one in node.elts)
        and any(isinstance(one, ast.Constant) and one.value == "-m" for one in node.elts)
    ]
    assert set(makers) <= set(others)
