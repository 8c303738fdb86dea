"""Seeds everything that a script may draw random numbers from, before the script makes anything."""

import random
import sys
from functools import partial
from types import ModuleType

from lockstep.worker.import_hooks import Action, when_imported, whenever_executed

_DRAW = ("keras", "jax", "tensorflow", "torch")
"""Modules that draw random numbers while they are imported, or import others that do."""


def seed_everything(seed: int) -> None:
    """Seed `random` now, and NumPy, TensorFlow and PyTorch now or when they are imported.

    A framework cannot be seeded from outside, and importing one to seed it would cost a script that does
    not use it seconds. Nothing that is seeded later by the script itself is touched again.

    What the modules of a framework draw while they are imported does not count: a script finds the same
    numbers whether it is the first to import them or not.
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
    """Return what brings the random states of this moment back."""
    numpy = sys.modules.get("numpy")
    plain, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None

    def bring_back(module: ModuleType) -> None:
        random.setstate(plain)
        if arrays is not None:
            sys.modules["numpy"].random.set_state(arrays)
        elif "numpy" in sys.modules:
            _seed_numpy(seed, sys.modules["numpy"])

    return bring_back
