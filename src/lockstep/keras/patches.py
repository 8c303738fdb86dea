"""Installs Lockstep in Keras: replaces methods of `keras.Model` and of its list of callbacks.

Each replacement is an entry of the registry in `lockstep.worker.patch_registry`.

Keras passes the end of each batch to its list of callbacks, on JAX and TensorFlow in another thread. The
replaced method returns at once if no callback processes it. On JAX, Keras's trainer stores the state in an
attribute of the model after each step, and the model searches such an attribute for layers, array by array.
The model does not search a mapping that is not a `dict`.
"""

import functools
import os
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import keras

from lockstep.keras.backends.adapter import adapter
from lockstep.keras.backends.contract import StepKind
from lockstep.keras.fit.model_methods import ModelMethods
from lockstep.keras.host_report import libraries
from lockstep.keras.kept_saves import KeptSaves
from lockstep.keras.load_failures import show_refusals
from lockstep.keras.private.common import SYMBOLIC_BUILD
from lockstep.observability.events import StrategyInstalled
from lockstep.system.notes import note
from lockstep.worker.job import Job
from lockstep.worker.patch_registry import PATCHES, definer
from lockstep.worker.tf_distribute_shim import is_library

_FUNCTIONS: dict[str, StepKind] = {
    "make_train_function": "train",
    "make_test_function": "test",
    "make_predict_function": "predict",
}
_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_STEPS = (
    *("on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end"),
    *("on_test_batch_begin", "on_test_batch_end", "on_predict_batch_begin", "on_predict_batch_end"),
)
_BATCH_ENDS = {
    "on_train_batch_end": ("on_train_batch_end", "on_batch_end"),
    "on_test_batch_end": ("on_test_batch_end",),
    "on_predict_batch_end": ("on_predict_batch_end",),
}
"""Events at the end of a batch, and the methods of a callback that handle each."""
_DECISIONS = ("on_train_batch_end", "on_epoch_end")
_SAVES = ("save", "save_weights", "export")
_SAVING_FUNCTIONS = {"save_model": "save", "save_weights": "save_weights"}
"""The functions of `keras.saving` and `keras.models`, and the methods of models that do the same."""

_AT_COMPILE, _SAVING = f"{__name__}.compile", f"{__name__}.saving"

_installed: list[ModelMethods] = []
_installing = threading.Lock()
_forked: list[bool] = []
"""In a process that the script has forked since the installation: whether by the chief itself."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _never() -> bool:
    return False


def install(job: Job) -> ModelMethods:
    """Replace the methods of `keras.Model` that `job` distributes, once per process; return the replacements.

    Raises:
        BackendError: Keras runs on a backend that Lockstep does not support.
        UnfitError: this version of Keras lacks a method that Lockstep replaces.
    """
    if not _installed:
        backend = adapter().steps()
        methods = ModelMethods(job, backend)
        _replace("compile", methods.compile)
        for name in _CALLS:
            _replace(name, functools.partial(methods.call, name))
        PATCHES.replace(__name__, threading.Thread, "start", methods.turns.started)
        _replace(SYMBOLIC_BUILD, methods.symbolic_build)
        for name, kind in _FUNCTIONS.items():
            _replace(name, functools.partial(methods.make_function, kind))
        for name in _SAVES:
            _replace(name, methods.save)
        _save_by_methods(job)
        show_refusals()
        for name, handlers in _BATCH_ENDS.items():
            _only_handled(name, handlers)
        for name in _STEPS:
            _around(name, silent=functools.partial(_is_silent, name, methods))
        _around("on_epoch_end", before=methods.steps_ended)
        _around("on_train_begin", after=methods.train_begun)
        _around("on_epoch_end", after=methods.epoch_ended)
        for name in _DECISIONS:
            _around(name, after=functools.partial(methods.decide, name))
        if keras.backend.backend() == "jax":
            from lockstep.keras.private.jax import SETATTR_HOOK, TRAINING_STATE

            PATCHES.wrap(__name__, *SETATTR_HOOK, functools.partial(_untracked, TRAINING_STATE))
        if keras.backend.backend() == "tensorflow":
            from lockstep.keras.tf_checkpoints import share_checkpoints

            share_checkpoints(job, lambda: methods.behind)
            owner = definer(keras.Model, "distribute_strategy")
            property_for_scripts = functools.partial(_strategy_for_scripts, methods)
            PATCHES.replace(__name__, owner, "distribute_strategy", property_for_scripts)
        _installed.append(methods)
        os.register_at_fork(after_in_child=_note_fork)
        job.events.publish(StrategyInstalled(keras.backend.backend(), libraries()))
    return _installed[0]


def install_at_compile(job: Job) -> None:
    """Install Lockstep when the script compiles its first model, to distribute it and all later models.

    If the script creates a strategy, earlier or later, the scope of the strategy decides instead.
    """
    # Scripts may import the functions by name before they compile a model.
    _save_by_methods(job)
    owner: Any = definer(keras.Model, "compile")

    def compile(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if _in_child():
            return original(model, *args, **kwargs)
        # Several threads of the script may compile their first models at the same time.
        with _installing:
            begins = not _installed
            if begins:
                install(job).adopt_all()
        if begins:
            return owner.compile(model, *args, **kwargs)
        result = original(model, *args, **kwargs)
        _installed[0].adopt(model)
        return result

    if not PATCHES.has(_AT_COMPILE):
        PATCHES.wrap(_AT_COMPILE, owner, "compile", compile)


def _strategy_for_scripts(methods: ModelMethods, original: property) -> property:
    """Let scripts read a model's strategy. Keras, which would distribute by it, reads TensorFlow's."""

    def strategy(model: Any) -> Any:
        strategy_of_model = None
        if not is_library(sys._getframe(1).f_globals) and not _in_child():
            strategy_of_model = methods.strategy_of(model)
        return original.__get__(model) if strategy_of_model is None else strategy_of_model

    return property(strategy)


def _in_child() -> bool:
    """Whether the script has forked this process, which then trains by itself, as plain Keras does."""
    if not _forked:
        return False
    if _installed:
        (methods,) = _installed
        uninstall()
        methods.release_models()
        if _forked[0]:
            note(
                f"process {os.getpid()}, which the script has forked, uses models by itself: processes of "
                "the script are not distributed, and every worker starts its own"
            )
    return True


def _note_fork() -> None:
    """In a forked child, leave the job when the child uses a model."""
    if _installed:
        _forked[:] = [_installed[0].is_chief and not _forked]


def uninstall() -> None:
    """Restore all parts of Keras and its backend that Lockstep has replaced. Call it outside of any step.

    Afterwards, existing strategies do not distribute anything.
    """
    PATCHES.give_back("lockstep.keras")
    _installed.clear()


def _save_by_methods(job: Job) -> None:
    """Make the functions that save a model call the model's method, which is replaced.

    In a job that checks its script, the functions that load a model find the models that it has saved.
    """
    if (kept := KeptSaves.of(job)) is not None:
        kept.load_from_here()
    if PATCHES.has(_SAVING):
        return
    for module in (keras.saving, keras.models):
        for name, method in _SAVING_FUNCTIONS.items():
            if hasattr(module, name):
                PATCHES.wrap(_SAVING, module, name, functools.partial(_save_by_method, method))


def _save_by_method(method: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    save = getattr(model, method) if isinstance(model, keras.Model) else functools.partial(original, model)
    return save(*args, **kwargs)


def _replace(name: str, method: Callable[..., Any]) -> None:
    """Replace a method of models with `method`, in the class that defines it.

    Keras checks whether a class overrides a method.
    """

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _in_child() else method(original, *args, **kwargs)

    PATCHES.wrap(__name__, definer(keras.Model, name), name, call)


def _around(
    name: str,
    *,
    before: Callable[[], None] = _nothing,
    after: Callable[..., None] = _nothing,
    silent: Callable[[], bool] = _never,
) -> None:
    """Call `before` and `after` around the callbacks' processing of an event, which `silent` suppresses.

    `after` gets the arguments of the event.
    """

    def call(original: Callable[..., Any], callbacks: Any, *args: Any, **kwargs: Any) -> None:
        if _in_child():
            original(callbacks, *args, **kwargs)
            return
        before()
        if not silent():
            original(callbacks, *args, **kwargs)
        after(*args, **kwargs)

    PATCHES.wrap(__name__, keras.callbacks.CallbackList, name, call)


def _only_handled(name: str, handlers: Sequence[str]) -> None:
    """Let callbacks process an event only if one of them has a method for it.

    Otherwise, Keras converts the logs in each step, and on some backends wakes a thread for that.
    """
    defaults = [(handler, getattr(keras.callbacks.Callback, handler)) for handler in handlers]

    def call(original: Callable[..., Any], callbacks: Any, *args: Any, **kwargs: Any) -> None:
        for callback in callbacks.callbacks:
            for handler, default in defaults:
                if getattr(getattr(callback, handler, None), "__func__", None) is not default:
                    original(callbacks, *args, **kwargs)
                    return

    PATCHES.wrap(__name__, keras.callbacks.CallbackList, name, call)


def _untracked(
    attribute: str, original: Callable[..., Any], model: Any, name: str, value: Any
) -> tuple[str, Any]:
    """Keep Keras from searching the state of its trainer, in `attribute`, for layers, array by array.

    A `UserDict` is not a `dict`, but programs can read and change it in the same way.
    """
    name, value = original(model, name, value)
    return name, UserDict(value) if name == attribute and type(value) is dict else value


def _is_silent(name: str, methods: ModelMethods) -> bool:
    """Whether callbacks processed this step, or its end, before this process began."""
    return methods.forwarding or (name == "on_train_batch_end" and methods.step_end_processed)
