"""The private parts of Keras's trainer on JAX: only this file changes when Keras changes one.

Docstrings say what Lockstep relies on, in all versions of `docs/versions.md`. The private part of JAX itself
is in `lockstep.worker.private_modules`, because it is replaced before JAX is imported.
"""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src.backend.jax.trainer import JAXEpochIterator

from lockstep.keras.private.common import DataAdapter
from lockstep.worker.patch_registry import Part

TRAINING_STATE = "_jax_state"
"""The attribute of a model to which the trainer assigns the state of a training, a dict, after each step."""

SETATTR_HOOK: Part = keras.Model, "_setattr_hook"
"""Called as `hook(model, name, value)` for each attribute that is set; returns the pair that is set.

Keras searches a dict that is set for layers and variables, but not other mappings.
"""


def set_synced(model: Any, synced: bool) -> None:
    """Tell the trainer whether the variables of `model` have the values of training's state.

    If so, the next step takes its state from the variables, and `jax_state_sync` does not assign to them.
    """
    model._jax_state_synced = synced


def batches_read_for_the_first() -> int:
    """Return the number of batches that the trainer reads from an adapter to get the first one.

    It reads one batch ahead on GPUs, and up to Keras 3.14 also on CPUs.
    """
    counted = _Counted()
    next(iter(JAXEpochIterator(counted)._get_iterator()))
    return counted.read


class _Counted(DataAdapter):  # type: ignore[misc]
    """Counts the batches that are read from it."""

    num_batches = 3
    read = 0

    def get_jax_iterator(self) -> Iterator[Any]:
        """Yield batches."""
        for _ in range(self.num_batches):
            self.read += 1
            yield np.zeros(1)
