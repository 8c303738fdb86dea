"""Actions on a module when it is imported."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.worker.import_hooks import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that is not imported yet."""
    (tmp_path / "newly_found.py").write_text("steps = ['executed']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    yield "newly_found"
    sys.modules.pop("newly_found", None)


def note(text: str) -> object:
    def act(module: ModuleType) -> None:
        module.steps.append(text)

    return act


def test_all_actions_on_a_module_follow_its_import(module: str) -> None:
    when_imported({module: note("first")})
    when_imported({module: note("second"), "never_imported": note("wrong")})
    assert module not in sys.modules
    assert sorted(__import__(module).steps) == ["executed", "first", "second"]
    assert sorted(__import__(module).steps) == ["executed", "first", "second"]


def test_an_imported_module_is_acted_on_at_once_and_only_once(module: str) -> None:
    steps = __import__(module).steps
    when_imported({module: note("now")})
    assert steps == ["executed", "now"]
    assert __import__(module).steps == ["executed", "now"]


def test_a_module_that_does_not_exist_is_not_found(module: str) -> None:
    when_imported({"never_imported": note("wrong")})
    with pytest.raises(ModuleNotFoundError, match="never_imported"):
        __import__("never_imported")
