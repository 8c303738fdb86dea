"""Seeds every random generator that a script may use, before the script runs."""

import random
import sys
from functools import partial
from types import ModuleType

from lockstep.worker.import_hooks import Action, when_imported, whenever_executed

_DRAW = ("keras", "jax", "tensorflow", "torch")
"""Modules that draw random numbers during their import, or import others that do."""


def seed_everything(seed: int) -> None:
    """Seed `random` now, and NumPy, TensorFlow and PyTorch now or when they are imported.

    A framework cannot be seeded from outside, and importing one only to seed it would take seconds in a
    script that does not use it. Seeds that the script sets later stay unchanged.

    Random numbers that a framework draws during its import have no effect on the script: it gets the same
    numbers whether or not it is the first to import the framework.
    """
    random.seed(seed)
    whenever_executed(_DRAW, partial(_remember, seed))
    when_imported(
        {
            "numpy": partial(_seed_numpy, seed),
            "tensorflow": partial(_seed_tensorflow, seed),
            "torch": partial(_seed_torch, seed),
        }
    )


def _seed_numpy(seed: int, numpy: ModuleType) -> None:
    numpy.random.seed(seed % 2**32)


def _seed_tensorflow(seed: int, tensorflow: ModuleType) -> None:
    tensorflow.random.set_seed(seed)


def _seed_torch(seed: int, torch: ModuleType) -> None:
    torch.manual_seed(seed)


def _remember(seed: int) -> Action:
    """Return an action that restores the current random states."""
    numpy = sys.modules.get("numpy")
    plain, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None

    def bring_back(module: ModuleType) -> None:
        random.setstate(plain)
        if arrays is not None:
            sys.modules["numpy"].random.set_state(arrays)
        elif "numpy" in sys.modules:
            _seed_numpy(seed, sys.modules["numpy"])

    return bring_back
