"""The registry of what Lockstep replaces in other libraries is complete, and can restore all of it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.errors import UnfitError
from lockstep.keras import patches
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker.job import Job, JobContext, by_itself
from lockstep.worker.patch_registry import PATCHES, PatchRegistry, definer

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


@pytest.fixture
def installed(job_of_one_worker: Job) -> Iterator[None]:
    patches.install(job_of_one_worker)
    yield
    patches.uninstall()


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


def test_a_forked_process_trains_as_plain_keras(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also a model whose step the replicas of its worker have computed."""
    view = place(2, (0,))
    own = Job(JobContext(0, Bus(SystemClock(), 0), JobSettings(seed=7, threads=1)), (view, by_itself(view)))
    patches.install(own).adopt_all()
    try:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.ones((4, 2), "float32")
        model.fit(x, x[:, :1], verbose=0)
        # As in a process that the script has forked; a real one might wait for threads of JAX.
        monkeypatch.setattr(patches, "_forked", [])
        patches._note_fork()
        own.left = True
        model.fit(x, x[:, :1], verbose=0)
        assert model.predict(x, verbose=0).shape == (4, 1)
        assert not PATCHES.has("lockstep.keras.patches")
    finally:
        patches.uninstall()
    note = f"process {os.getpid()}, which the script has forked, uses models by itself"
    assert capfd.readouterr().err.count(note) == 1
