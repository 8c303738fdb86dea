"""The registry of what Lockstep replaces in other libraries is complete, and can restore all of it."""

import functools
import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

from lockstep.errors import UnfitError
from lockstep.keras import patches
from lockstep.worker.job import Job
from lockstep.worker.patch_registry import PatchRegistry, definer

PROGRAM = Path(__file__).parent / "patched.py"


class Library:
    def first(self) -> str:
        return "first"


class Derived(Library):
    pass


@pytest.mark.ci("tensorflow", "torch")
def test_the_registry_has_all_replacements_and_restores_them(backend: str, tmp_path: Path) -> None:
    lean = Path(__file__).parents[1] / "lean"
    hidden = {"jax", "torch"} - {backend}
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(lean), os.environ.get("PYTHONPATH")))),
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
    note = r"process \d+, which the script has forked, uses models by itself"
    assert len(re.findall(note, done.stderr)) == 1


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


def test_a_class_of_the_program_is_not_kept_and_may_change() -> None:
    patches = PatchRegistry()

    def wrapped_class() -> type[Library]:
        class Own(Library):
            def first(self) -> str:
                return super().first()

        patches.wrap("a", Own, "first", lambda inner, own: f"a {inner(own)}", of_program=True)
        return Own

    first, second = wrapped_class(), wrapped_class()
    kept = weakref.ref(first)
    assert first().first() == second().first() == "a first"
    assert [patch.owner for patch in patches] == [first, second]
    del first
    gc.collect()
    assert kept() is None
    assert [patch.owner for patch in patches] == [second]
    # A decorator also copies the attributes of the function.
    second.first = functools.wraps(second.first)(lambda own: "later")  # type: ignore[method-assign]
    assert [*patches] == []
    patches.give_back("a")
    assert second().first() == "later"
    third = wrapped_class()
    patches.give_back("a")
    assert (third().first(), patches.has("a")) == ("first", False)


def test_a_missing_part_of_a_library_is_named() -> None:
    patches = PatchRegistry()
    with pytest.raises(UnfitError, match=r"Library has no second, which lockstep\.x replaces: this version"):
        patches.replace("lockstep.x", Library, "second", lambda inner: inner)
    with pytest.raises(UnfitError, match="Derived has no second, which Lockstep replaces"):
        definer(Derived, "second")
    assert definer(Derived, "first") is Library
    assert [*patches] == []


@pytest.fixture
def installed(job_of_one_worker: Job) -> None:
    patches.install(job_of_one_worker)


Calls = list[tuple[str, int, Any]]


def on_train_batches(calls: Calls) -> keras.callbacks.Callback:
    class Own(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(("train", batch, logs))

    return Own()


def on_batches(calls: Calls) -> keras.callbacks.Callback:
    class Own(keras.callbacks.Callback):  # type: ignore[misc]
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(("train", batch, logs))

    return Own()


def in_a_list(calls: Calls) -> keras.callbacks.Callback:
    return keras.callbacks.CallbackList([on_train_batches(calls)])


def by_a_function(calls: Calls) -> keras.callbacks.Callback:
    def end(batch: int, logs: Any) -> None:
        calls.append(("train", batch, logs))

    return keras.callbacks.LambdaCallback(on_train_batch_end=end)


def on_other_batches(calls: Calls) -> keras.callbacks.Callback:
    class Own(keras.callbacks.Callback):  # type: ignore[misc]
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(("test", batch, logs))

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(("predict", batch, logs))

    return Own()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("make", [on_train_batches, on_batches, in_a_list, by_a_function, on_other_batches])
def test_callbacks_process_the_ends_of_batches(make: Callable[[Calls], keras.callbacks.Callback]) -> None:
    calls: Calls = []
    listed = keras.callbacks.CallbackList([make(calls)], add_history=True)
    listed.on_train_begin()
    for kind in ("train", "test", "predict"):
        getattr(listed, f"on_{kind}_batch_end")(3, {"loss": 0.5})
    listed.on_train_end()
    kinds = ("test", "predict") if make is on_other_batches else ("train",)
    assert calls == [(kind, 3, {"loss": 0.5}) for kind in kinds]


@pytest.mark.usefixtures("installed")
def test_the_ends_of_batches_that_no_callback_processes_cost_nothing() -> None:
    class Logs:
        def __iter__(self) -> Iterator[str]:
            pytest.fail("the logs are converted")

    listed = keras.callbacks.CallbackList([keras.callbacks.EarlyStopping()], add_history=True)
    listed.on_train_begin()
    listed._async_dispatch = lambda *args: pytest.fail("a thread processes it")
    for kind in ("train", "test", "predict"):
        getattr(listed, f"on_{kind}_batch_end")(3, Logs())
    listed.on_train_end()
