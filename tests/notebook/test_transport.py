"""A function on its way to a worker, in one process that plays both its caller and the worker."""

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from lockstep.functions.transport import pack, unpack


def test_a_package_may_lie_elsewhere_on_the_host_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both hosts have a folder of the caller, it comes first."""
    there, here, both = tmp_path / "there", tmp_path / "here", tmp_path / "both"
    for folder, name in ((there, "moved_package"), (both, "package_of_both"), (here, "package_of_both")):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text("def where():\n    return __file__\n")
    usual = sys.path[:]
    monkeypatch.setattr(sys, "path", [str(there), str(both), *usual])
    names = ("moved_package", "package_of_both")
    calls = [pack("a test", importlib.import_module(name).where, (), {}, {}) for name in names]
    for name in names:
        del sys.modules[name]
    (there / "moved_package.py").rename(here / "moved_package.py")
    shutil.rmtree(there)
    monkeypatch.setattr(sys, "path", ["the folder of the job", str(here), *usual])
    try:
        assert [unpack(call)() for call in calls] == [
            str(here / "moved_package.py"),
            str(both / "package_of_both.py"),
        ]
    finally:
        for name, call in zip(names, calls, strict=True):
            sys.modules.pop(name, None)
            os.close(call)
