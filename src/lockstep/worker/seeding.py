"""Seeds every random generator that a script may use, before the script runs."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType

from lockstep.worker.import_hooks import FRAMEWORKS, when_imported, whenever_executed
from lockstep.worker.script_seed import note_script_seed


def seed_everything(seed: int) -> None:
    """Seed `random` now, and NumPy, TensorFlow and PyTorch now or when they are imported.

    A framework cannot be seeded from outside, and importing one only to seed it would take seconds in a
    script that does not use it. Seeds that the script sets later stay unchanged.

    Random numbers that a framework draws during its import have no effect on the script. It gets the same
    numbers whether or not it is the first to import the framework.
    """
    random.seed(seed)
    note_script_seed()
    # They draw random numbers during their import, or import modules that do.
    whenever_executed(FRAMEWORKS, partial(_forgetting_draws, seed))
    when_imported(
        {
            "numpy": lambda numpy: numpy.random.seed(seed % 2**32),
            "tensorflow": lambda tensorflow: tensorflow.random.set_seed(seed),
            "torch": lambda torch: torch.manual_seed(seed),
        }
    )


@contextmanager
def _forgetting_draws(seed: int, module: ModuleType) -> Iterator[None]:
    """Restore the random states after a module was imported."""
    numpy = sys.modules.get("numpy")
    plain, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None

    yield
    random.setstate(plain)
    if arrays is not None:
        sys.modules["numpy"].random.set_state(arrays)
    elif "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
