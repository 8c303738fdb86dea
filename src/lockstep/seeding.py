"""Seeds everything that a script may draw random numbers from, before the script makes anything."""

import random
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_Seed = Callable[[Any, int], object]

_ON_IMPORT: dict[str, _Seed] = {
    "numpy": lambda numpy, seed: numpy.random.seed(seed % 2**32),
    "tensorflow": lambda tensorflow, seed: tensorflow.random.set_seed(seed),
    "torch": lambda torch, seed: torch.manual_seed(seed),
}


def seed_everything(seed: int) -> None:
    """Seed `random` now, and NumPy, TensorFlow and PyTorch now or when they are imported.

    A framework cannot be seeded from outside, and importing one to seed it would cost a script that does
    not use it seconds. Nothing that is seeded later by the script itself is touched again.
    """
    random.seed(seed)
    for name, apply in _ON_IMPORT.items():
        if name in sys.modules:
            apply(sys.modules[name], seed)
    sys.meta_path.insert(0, _SeedOnImport(seed))


class _SeedOnImport(MetaPathFinder):
    """Finds what the path has, and seeds it once it has been executed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader seeds the module, for the modules that need it."""
        if fullname not in _ON_IMPORT:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute, seed, apply = spec.loader.exec_module, self._seed, _ON_IMPORT[fullname]

        def execute_and_seed(module: ModuleType) -> None:
            execute(module)
            apply(module, seed)

        vars(spec.loader)["exec_module"] = execute_and_seed
        return spec
