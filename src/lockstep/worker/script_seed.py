"""The seed that the script passes to `keras.utils.set_random_seed`, even after `keras.utils.clear_session`.

Keras then forgets the number, but keeps the random states that it has seeded.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from lockstep.worker.import_hooks import when_imported
from lockstep.worker.patch_registry import PATCHES
from lockstep.worker.private_modules import KERAS_GLOBAL_STATE, KERAS_SCRIPT_SEED

_noted: list[int] = []
"""The last seed, if there is one."""


def note_script_seed() -> None:
    """Note the seed of the script that is about to run, in this process or a forked one."""
    forget_script_seed()
    when_imported({KERAS_GLOBAL_STATE: _observe})


def forget_script_seed() -> None:
    """Forget the seed, as in a process whose script has not set one."""
    _noted.clear()


def noted_script_seed() -> int | None:
    """Return the last seed that the script has set, or None if it has not set one."""
    return _noted[-1] if _noted else None


def _observe(module: ModuleType) -> None:
    if not PATCHES.has(__name__):
        PATCHES.wrap(__name__, module, "set_global_attribute", _note)


def _note(original: Callable[..., Any], name: str, value: Any) -> Any:
    if name == KERAS_SCRIPT_SEED and value is not None:
        _noted[:] = [value]
    return original(name, value)
