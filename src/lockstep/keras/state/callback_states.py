"""The state of callbacks as plain values, so that callbacks in another process can continue with it.

It excludes settings and paths, which come from the script. For Keras's callbacks, it has the attributes
listed here. For other callbacks, it has the attributes that have changed since the call began, if they are
numbers, arrays, or lists and dicts of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import msgspec

from lockstep.checkpoint.values import pack
from lockstep.data.digest import digest_arrays
from lockstep.errors import CheckpointError
from lockstep.keras.private.common import CHANGED_BY_TRAINING, SET_BY_PROCESS
from lockstep.keras.python_values import is_of_keras
from lockstep.keras.state.report_callback import ReportCallback
from lockstep.system.notes import note

KEPT: Mapping[type, tuple[str, ...]] = {
    **CHANGED_BY_TRAINING,
    keras.callbacks.CSVLogger: ("rows",),
    ReportCallback: ("metrics", "report"),
}
"""The attributes of callbacks of Keras and Lockstep that training changes; `rows` is of `ChiefCSVLogger`."""

AttributeHashes = Mapping[int, Mapping[str, bytes]]
"""Hashes of the attributes of callbacks, by their ids."""


def listed(callbacks: Any) -> Sequence[Any]:
    """Return the callbacks of a `fit` as a sequence, even if they are a `CallbackList` of Keras."""
    flat: Sequence[Any] = getattr(callbacks, "callbacks", callbacks)
    return flat


def lasting(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks without those that only show progress, which are optional."""
    return [callback for callback in callbacks if not isinstance(callback, keras.callbacks.ProgbarLogger)]


def listeners(callbacks: Any, model: Any) -> list[Any]:
    """Return a call's callbacks, each once, with Keras's own `History` in a `fit` of a model."""
    listening = [*listed(callbacks), *([] if model is None else [model.history])]
    return list({id(callback): callback for callback in listening}.values())


def attribute_hashes(callbacks: Any) -> AttributeHashes:
    """Return hashes that later show which attributes of the callbacks of a `fit` have changed."""
    hashes = {}
    for callback in filter(_is_users, listed(callbacks)):
        packed = ((name, _packed(value)) for name, value in vars(callback).items())
        hashes[id(callback)] = {name: digest for name, digest in packed if digest is not None}
    return hashes


def callback_states(
    callbacks: Sequence[Any], before: Sequence[AttributeHashes]
) -> list[tuple[str, dict[str, Any], list[str]]]:
    """Return for each callback its class, its state by name, and the changed attributes that cannot be saved.

    Args:
        callbacks: the callbacks of a `fit`.
        before: their `attribute_hashes` at its beginning, before and after `on_train_begin`, whose effects
            may depend on a model that another process does not have at that point.
    """
    return [(type(callback).__name__, *_state(callback, before)) for callback in lasting(callbacks)]


def set_callback_states(callbacks: Sequence[Any], states: Sequence[Sequence[Any]]) -> None:
    """Restore the result of `callback_states` from another process, and print a note on missing attributes.

    States of earlier versions have all attributes. Settings of Keras's own callbacks, and text, are ignored.

    Raises:
        CheckpointError: the callbacks do not match.
    """
    stateful = lasting(callbacks)
    names = [type(callback).__name__ for callback in stateful]
    if names != [class_name for class_name, *_ in states]:
        raise CheckpointError(
            f"the script gives `fit` the callbacks {names}, but the checkpoint has "
            f"{[class_name for class_name, *_ in states]}: give the same ones in order, or start over in "
            "another folder"
        )
    for callback, (class_name, state, *missing) in zip(stateful, states, strict=True):
        for name, value in state.items():
            if _is_kept(callback, name) and not _has_text(value):
                vars(callback)[name] = value
        for name in missing[0] if missing else ():
            note(
                f"{class_name}.{name} changed during training, but text in attributes of callbacks is not "
                "saved: it starts with the value that the script sets; store a number instead"
            )


def _is_users(callback: Any) -> bool:
    """Whether the class of a callback is the program's own."""
    of_library = is_of_keras(type(callback).__module__)
    return not of_library or type(callback) is keras.callbacks.LambdaCallback


def _is_kept(callback: Any, name: str) -> bool:
    return _is_of(KEPT, callback, name) or (
        _is_users(callback) and not _is_of(SET_BY_PROCESS, callback, name)
    )


def _is_of(table: Mapping[type, tuple[str, ...]], callback: Any, name: str) -> bool:
    return any(
        name in names for callback_class, names in table.items() if isinstance(callback, callback_class)
    )


def _state(callback: Any, before: Sequence[AttributeHashes]) -> tuple[dict[str, Any], list[str]]:
    state, missing = {}, []
    for name, value in vars(callback).items():
        if not _is_kept(callback, name) or (digest := _packed(value)) is None:
            continue
        changed = not before or any(of.get(id(callback), {}).get(name) != digest for of in before)
        if _is_users(callback) and not changed:
            continue
        if _has_text(value):
            missing.append(name)
        else:
            state[name] = value
    return state, missing


def _packed(value: Any) -> bytes | None:
    """Return a hash of a value, or None if a checkpoint cannot hold it."""
    try:
        packed, arrays = pack(value, "")
    except TypeError:
        return None
    return msgspec.json.encode(packed) + digest_arrays(list(arrays.values()))


def _has_text(value: Any) -> bool:
    """Whether a value contains text. The keys of a dict do not count."""
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_text, value))
    return isinstance(value, str | bytes)
