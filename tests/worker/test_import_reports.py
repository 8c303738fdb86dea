"""A worker reports which framework its script imports."""

import importlib
import sys
from pathlib import Path

import pytest

from lockstep.worker.import_reports import report_imports

NAMES = ("outer_one", "inner_one", "broken_one")


def test_nested_and_failing_imports_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer_one.py").write_text(
        "import inner_one\ntry:\n    import broken_one\nexcept OSError:\n    pass\nimport inner_one\n"
    )
    (tmp_path / "inner_one.py").touch()
    (tmp_path / "broken_one.py").write_text("raise OSError\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    seen: list[str] = []
    report_imports(lambda event: seen.append(event.module), NAMES)
    for name in ("outer_one", "inner_one"):
        importlib.import_module(name)
    for name in NAMES:
        sys.modules.pop(name, None)
    assert seen == ["outer_one", "inner_one", "outer_one", "broken_one", "outer_one", ""]
