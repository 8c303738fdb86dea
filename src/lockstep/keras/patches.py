"""Where Lockstep meets the user's program: the methods of `keras.Model` that a job distributes."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from lockstep.errors import BackendError
from lockstep.keras.backends.contract import Backend, Kind
from lockstep.keras.fit_loops import FitLoops
from lockstep.keras.shared_saves import Saves
from lockstep.keras.state.snapshots import libraries
from lockstep.observability.events import StrategyInstalled
from lockstep.worker.job import Job

_FUNCTIONS: dict[str, Kind] = {
    "make_train_function": "train",
    "make_test_function": "test",
    "make_predict_function": "predict",
}
_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")
_STEPS = ("on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end")
_DECISIONS = ("on_train_batch_end", "on_epoch_end")
_SAVES = ("save", "save_weights", "export")
_SAVING_FUNCTIONS = {"save_model": "save", "save_weights": "save_weights"}
"""What `keras.saving` and `keras.models` have for a method of models."""

_installed: list[FitLoops] = []


def install(job: Job) -> FitLoops:
    """Replace the methods of `keras.Model` that `job` distributes, once a process; return what does it.

    Raises:
        BackendError: Keras runs on a backend that Lockstep does not support.
    """
    if not _installed:
        backend = _backend()
        loops, saves = FitLoops(job, backend), Saves(job, backend)
        for name in ("compile", "fit", "evaluate", "predict", "_symbolic_build"):
            _replace(name, getattr(loops, name.lstrip("_")))
        for name in _ON_BATCH:
            _replace(name, functools.partial(loops.on_batch, name))
        for name, kind in _FUNCTIONS.items():
            _replace(name, functools.partial(loops.make_function, kind))
        for name in _SAVES:
            _replace(name, functools.partial(_save, loops, saves))
        _save_by_methods()
        for name in _STEPS:
            _silence(name, loops)
        _first("on_epoch_end", loops.steps_ended)
        _then("on_train_begin", loops.train_begun)
        for name in _DECISIONS:
            _then(name, functools.partial(loops.decide, name))
        if keras.backend.backend() == "tensorflow":
            from lockstep.keras.state.tf_checkpoints import share_checkpoints

            share_checkpoints(job, lambda: loops.behind)
        _installed.append(loops)
        job.events.publish(StrategyInstalled(keras.backend.backend(), libraries()))
    return _installed[0]


def install_at_compile(job: Job) -> None:
    """Let the first model that the script compiles install what distributes it and all that follow.

    A strategy that the script has created before, or creates later, decides by its scope instead.
    """
    # Scripts may import the functions by name before they compile a model.
    _save_by_methods()
    owner = _owner("compile")
    original = owner.compile

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _installed:
            return original(self, *args, **kwargs)
        install(job).adopts_all = True
        return owner.compile(self, *args, **kwargs)

    owner.compile = replacement


def _save(loops: FitLoops, saves: Saves, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    # What a script saved before this process began is saved; the model is not there yet.
    if not loops.behind:
        saves.save(original, *args, **kwargs)


@functools.cache
def _save_by_methods() -> None:
    """Let functions that save a model call the model's method, which is replaced."""
    for module in (keras.saving, keras.models):
        for name, method in _SAVING_FUNCTIONS.items():
            if hasattr(module, name):
                setattr(module, name, _by_method(getattr(module, name), method))


def _by_method(original: Callable[..., Any], method: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, keras.Model):
            return getattr(model, method)(*args, **kwargs)
        return original(model, *args, **kwargs)

    return replacement


def _replace(name: str, method: Callable[..., Any]) -> None:
    owner = _owner(name)
    original = vars(owner)[name]

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    setattr(owner, name, replacement)


def _owner(name: str) -> Any:
    """Return the class that defines a method: Keras asks classes whether they have one of their own."""
    return next(cls for cls in keras.Model.__mro__ if name in vars(cls))


def _silence(name: str, loops: FitLoops) -> None:
    """Let no callback hear of steps that were taken before this process began."""
    original = getattr(keras.callbacks.CallbackList, name)
    ends = name == "on_train_batch_end"

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        silent = loops.forwarding or (ends and loops.heard)
        return None if silent else original(self, *args, **kwargs)

    setattr(keras.callbacks.CallbackList, name, replacement)


def _first(name: str, act: Callable[[], None]) -> None:
    """Let `act` precede what callbacks hear of `name`."""
    original = getattr(keras.callbacks.CallbackList, name)

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        act()
        original(self, *args, **kwargs)

    setattr(keras.callbacks.CallbackList, name, replacement)


def _then(name: str, act: Callable[[], None]) -> None:
    """Let `act` follow once callbacks have heard of `name`."""
    original = getattr(keras.callbacks.CallbackList, name)

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        act()

    setattr(keras.callbacks.CallbackList, name, replacement)


def _backend() -> Backend:
    name = keras.backend.backend()
    if name == "jax":
        from lockstep.keras.backends.jax import JaxBackend

        return JaxBackend()
    if name == "tensorflow":
        from lockstep.keras.backends.tensorflow import TensorFlowBackend

        return TensorFlowBackend()
    if name == "torch":
        from lockstep.keras.backends.torch import TorchBackend

        return TorchBackend()
    raise BackendError(
        f"Keras runs on {name!r}, on which Lockstep does not train; set KERAS_BACKEND to jax, tensorflow or "
        "torch, or start the script with `lockstep run --backend`"
    )
