"""The registry of what Lockstep replaces in other libraries is complete, and can restore all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import UnfitError
from lockstep.worker.patch_registry import PatchRegistry, definer

PROGRAM = Path(__file__).parent / "patched.py"


class Library:
    def first(self) -> str:
        return "first"


class Derived(Library):
    pass


def test_the_registry_has_all_replacements_and_restores_them(backend: str, tmp_path: Path) -> None:
    lean = Path(__file__).parents[1] / "lean"
    hidden = {"jax", "torch"} - {backend}
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": str(lean),
        "HIDDEN_PACKAGES": ",".join(sorted(hidden)),
    }
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    listed = done.stdout.splitlines()
    # Every backend has replacements: the list is not empty.
    for line in (
        "Trainer compile",
        "keras.patches CallbackList on_epoch_end",
        "keras.patches.saving keras.saving save_model",
        "Variable _direct_assign",
        "worker.downloads keras.src.utils.file_utils get_file",
    ):
        assert any(one.endswith(line) for one in listed), (line, listed)


def test_repeated_replacements_are_restored_in_turn() -> None:
    patches, original = PatchRegistry(), Library.first
    patches.replace("a", Library, "first", lambda inner: lambda self: f"a {inner(self)}")
    patches.replace("a.b", Library, "first", lambda inner: lambda self: f"b {inner(self)}")
    assert Derived().first() == "b a first"
    assert [patch.by for patch in patches] == ["a", "a.b"]
    patches.give_back("a.b")
    assert Derived().first() == "a first"
    assert not patches.has("a.b")
    patches.give_back("a")
    assert vars(Library)["first"] is original


def test_a_new_attribute_is_removed() -> None:
    patches = PatchRegistry()
    patches.put("a", Derived, "first", lambda self: "own")
    patches.put("a", sys.modules, "lockstep_of_tests", sys)
    assert Derived().first() == "own"
    patches.give_back("a")
    assert "first" not in vars(Derived)
    assert "lockstep_of_tests" not in sys.modules
    assert Derived().first() == "first"


def test_a_missing_part_of_a_library_is_named() -> None:
    patches = PatchRegistry()
    with pytest.raises(UnfitError, match=r"Library has no second, which lockstep\.x replaces: this version"):
        patches.replace("lockstep.x", Library, "second", lambda inner: inner)
    with pytest.raises(UnfitError, match="Derived has no second, which Lockstep replaces"):
        definer(Derived, "second")
    assert definer(Derived, "first") is Library
    assert [*patches] == []
