"""Errors of Lockstep in layers that load saved weights. Keras would raise another error, which hides them.

Keras collects the errors of layers while it loads a model or its weights, and then raises a `ValueError`
about all of them, with the text of the first one in the middle.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import InputError, LockstepError
from lockstep.keras.private.common import RAISE_LOADING_FAILURE
from lockstep.worker.patch_registry import PATCHES

_lock = threading.Lock()


def show_refusals() -> None:
    """Let Keras raise an error of Lockstep unchanged if a layer raises one.

    With `skip_mismatch=True`, Keras warns about an `InputError`, as it does about weights of other shapes.
    """
    with _lock:
        if not PATCHES.has(__name__):
            PATCHES.wrap(__name__, *RAISE_LOADING_FAILURE, _raise_refusal_first)


def _raise_refusal_first(
    original: Callable[..., Any], error_msgs: Mapping[int, tuple[Any, Exception]], warn_only: bool = False
) -> None:
    for _, error in error_msgs.values():
        if isinstance(error, LockstepError) and not (warn_only and isinstance(error, InputError)):
            raise error
    original(error_msgs, warn_only=warn_only)
