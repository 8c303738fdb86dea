"""The settings of training, recorded in its checkpoints and compared with those of a script that resumes.

Settings are compared as texts by name, such as `layer dropout: rate`. Values that change in training are not
settings, such as the learning rate of an optimizer that has trained, and counters of callbacks. Paths and
verbosity do not count either.
"""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import keras
import numpy as np

from lockstep.data.digest import digest_arrays
from lockstep.keras.private.common import layers_of, tensorflow_not_imported
from lockstep.keras.python_values import is_of_keras
from lockstep.worker.program_sources import is_own

Settings = Mapping[str, str]

_NUMBER = re.compile(r"_\d+$")
_RATE = "learning_rate"
_LONGEST = 200
_SHOWN = 5
_NOT_COMPARED = {
    *("name", "build_input_shape", "registered_name", "module"),
    *("filepath", "filename", "backup_dir", "log_dir", "directory", "path", "root", "verbose"),
}
_BEHAVES_AS_WRITTEN = f"Python {sys.version_info.major}.{sys.version_info.minor}"
"""The Python version: compiled code can only be compared with code of the same version."""


def settings_of_call(model: Any, callbacks: Sequence[Any], *, first: bool) -> Settings:
    """Return the settings of a call: of the model's optimizer and loss, and of callbacks.

    Args:
        model: the model at the beginning of the call.
        callbacks: the callbacks of the call.
        first: whether no earlier call has trained; then the learning rate is a setting.
    """
    settings: dict[str, str] = {}
    if (optimizer := getattr(model, "optimizer", None)) is not None:
        settings |= _named("optimizer", optimizer, _without_rate(_config(optimizer), keep=first))
    settings |= _flat("loss", _plain(getattr(model, "loss", None)))
    settings |= _flat("loss_weights", _plain(getattr(model, "loss_weights", None)))
    for number, callback in enumerate(callbacks):
        if not isinstance(callback, keras.callbacks.ProgbarLogger | keras.callbacks.LambdaCallback):
            class_name = type(callback).__name__.removeprefix("Chief")
            settings |= _named(
                f"callback {number} ({class_name})", callback, _parameters(callback), code=False
            )
    return settings


def settings_of_model(model: Any) -> Settings:
    """Return the settings of a built model: its layers, their connections, and their code.

    Of the numbers that Keras puts into names, only the order counts.
    """
    settings: dict[str, str] = {}
    counts: dict[str, int] = {}
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.InputLayer):
            # Keras creates it from the first batch.
            continue
        base = _NUMBER.sub("", layer.name)
        counts[base] = counts.get(base, 0) + 1
        name = f"layer {base}" + (f" {counts[base]}" if counts[base] > 1 else "")
        config = _connections(layer) if isinstance(layer, keras.Model) else _config(layer)
        settings |= _named(name, layer, config)
    return settings


def settings_of_parts(parts: Mapping[str, Any]) -> Settings:
    """Return the settings of the parts of a custom loop, by their names."""
    settings: dict[str, str] = {}
    for name, part in parts.items():
        if isinstance(part, keras.Layer):
            settings |= {f"{name}, {key}": text for key, text in settings_of_model(part).items()}
        elif isinstance(part, keras.optimizers.Optimizer):
            settings |= _named(name, part, _without_rate(_config(part), keep=False))
    return settings


def differences(before: Settings, now: Settings) -> str:
    """Return a text on the settings that differ, or an empty string if they are equal."""
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    names = [name for name in names if not _is_incomparable(name, before, now)]
    texts = [f"{name} was {before.get(name, 'absent')}, and is {now.get(name, 'absent')}" for name in names]
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return "; ".join([*texts[:_SHOWN], *more])


def _is_incomparable(name: str, before: Settings, now: Settings) -> bool:
    """Whether a setting that only one side has is not a difference, or follows from another one."""
    if name in before and name in now:
        return False
    class_setting = f"{name.partition(': ')[0]}: class"
    only_here = name != class_setting and before.get(class_setting) != now.get(class_setting)
    return only_here or name.endswith(f": {_RATE}") or ": code (" in name


def _named(name: str, thing: Any, config: Any, *, code: bool = True) -> dict[str, str]:
    settings = {f"{name}: class": type(thing).__qualname__, **_flat(f"{name}", config)}
    if code and (code_hash := _own_code(type(thing))):
        settings[f"{name}: code ({_BEHAVES_AS_WRITTEN})"] = code_hash
    return settings


def _flat(name: str, config: Any) -> dict[str, str]:
    """Return the parts of a config as short texts, by name."""
    if not isinstance(config, dict):
        return {name: _short(config)}
    return {
        f"{name}: {key}": _short(value)
        for key, value in config.items()
        if key not in _NOT_COMPARED and not callable(value)
    }


def _short(value: Any) -> str:
    text = json.dumps(_plain(value), sort_keys=True)
    return text if len(text) <= _LONGEST else f"#{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _config(thing: Any) -> Any:
    try:
        with tensorflow_not_imported():
            return _plain(thing.get_config())
    except Exception:
        # A custom class may not have a config, and may raise any error. Its code is compared instead.
        return {}


def _connections(model: Any) -> Any:
    """Return the connections of the layers of a functional or sequential model."""
    config = _config(model) if isinstance(model, keras.Sequential) or hasattr(model, "operations") else {}
    layers = [layer for layer in config.get("layers", ()) if isinstance(layer, dict)]
    numbers = {str(layer.get("name")): number for number, layer in enumerate(layers)}
    connected = [(layer.get("class_name"), layer.get("inbound_nodes")) for layer in layers]
    return {
        "layers": _renamed(connected, numbers),
        "outputs": _renamed(config.get("output_layers"), numbers),
        "trainable": config.get("trainable"),
    }


def _renamed(value: Any, numbers: Mapping[str, int]) -> Any:
    """Replace the layers' names with their numbers."""
    if isinstance(value, dict):
        return {key: _renamed(item, numbers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(item, numbers) for item in value]
    return numbers.get(value, value) if isinstance(value, str) else value


def _without_rate(config: Any, *, keep: bool) -> Any:
    """Omit a learning rate that is not a schedule and may have changed in training."""
    if not isinstance(config, dict):
        return config
    return {
        key: _without_rate(value, keep=keep)
        for key, value in config.items()
        if keep or key != _RATE or isinstance(value, dict)
    }


def _parameters(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that are named like parameters of its constructor.

    Text of the program's own callbacks is omitted, because it may be a path.
    """
    of_keras = is_of_keras(type(callback).__module__)
    recorded_types = type(None) | bool | int | float | (str if of_keras else bool)
    parameters: dict[str, Any] = {}
    for base in type(callback).__mro__:
        if "__init__" not in vars(base):
            continue
        for name in inspect.signature(vars(base)["__init__"]).parameters:
            value = vars(callback).get(name)
            if isinstance(value, recorded_types) and name in vars(callback):
                # Keras changes its sign when it learns which direction is better.
                parameters[name] = abs(value) if name == "min_delta" and value else value
            elif inspect.isfunction(value) and of_keras:
                parameters[name] = _plain(value)
    return parameters


def _plain(value: Any) -> Any:
    """Return a value as JSON data: functions by their code, arrays by their bytes, others by class."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} #{digest_arrays([value]).hex()}"
    if isinstance(value, np.generic):
        return value.item()
    if inspect.isfunction(value):
        is_programs = _is_programs(value.__module__)
        return f"{value.__name__} #{_digest(value)}" if is_programs else value.__qualname__
    if hasattr(value, "get_config"):
        return {"class": type(value).__qualname__, "code": _own_code(type(value)), **_config(value)}
    return type(value).__qualname__


def _own_code(owner: type) -> str:
    """Return a hash of the code of a class and its bases, if this code is the program's own."""
    owned = [base for base in owner.__mro__ if _is_programs(base.__module__)]
    functions = [(name, part) for base in owned for name, part in sorted(vars(base).items())]
    digests = [f"{name} {_digest(part)}" for name, part in functions if inspect.isfunction(_function(part))]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16] if digests else ""


def _function(part: Any) -> Any:
    part = part.fget if isinstance(part, property) else getattr(part, "__func__", part)
    return inspect.unwrap(part) if callable(part) else part


def _digest(part: Any) -> str:
    function: Callable[..., Any] = _function(part)
    described = repr(list(_described(function.__code__, function.__doc__)))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _described(code: CodeType, documentation: str | None) -> Iterator[Any]:
    """Yield the effective parts of code, without its location and comments."""
    yield code.co_code, code.co_names, code.co_varnames, code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _described(constant, None)
        elif constant != documentation or documentation is None:
            yield repr(constant)


@lru_cache
def _is_programs(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and is_own(file)
