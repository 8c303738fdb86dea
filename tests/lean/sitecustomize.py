"""Makes processes of tests start sooner; what they compute remains the same.

Packages that Keras and the backends import only because they are installed take seconds. `HIDDEN_PACKAGES`
names them, with commas between them: they are not found, as on the machine of a user who has not installed
them. PyTorch's compiler, which Keras and PyTorch import to exempt functions from it and to set an option, is
executed only if anything else of it is used. The search for cycles of garbage, a quarter of the time of an
import, begins less often.
"""

import gc
import importlib
import os
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split(","))
COMPILER = ("torch._dynamo", "torch._inductor")
DEFERRED = (*COMPILER, "torch._inductor.config")
OBJECTS_PER_SEARCH = 50_000


def exempt(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return a function as it is, or a decorator that does: nothing has been compiled so far."""
    return function or exempt


class Deferred(ModuleType):
    """A module that is executed when something is used that it does not have yet."""

    disable = staticmethod(exempt)
    reset = staticmethod(lambda: None)

    def __getattr__(self, name: str) -> Any:
        execute(self)
        return getattr(self, name)


def execute(module: Any) -> None:
    """Execute a deferred module, and then set again what others have set."""
    given = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    module.__class__ = ModuleType
    module.__loader__.execute(module)
    for name, value in given.items():
        setattr(module, name, value)


class DeferringLoader(Loader):
    """Defers the execution of a module."""

    def __init__(self, loader: Any) -> None:
        self.execute = loader.exec_module

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import create it."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = Deferred
        # Building a model uses it: a server imports it once for all the workers that it forks.
        importlib.import_module("torch.fx.experimental.symbolic_shapes")


class Finder:
    """Finds what Python finds, but for what is hidden."""

    @staticmethod
    def find_spec(name: str, *details: Any) -> ModuleSpec | None:
        found = None if name in HIDDEN else PathFinder.find_spec(name, *details)
        if found and name in DEFERRED:
            found.loader = DeferringLoader(found.loader)
        elif name.startswith(COMPILER) and isinstance(
            package := sys.modules[name.rpartition(".")[0]], Deferred
        ):
            execute(package)
        return found

    invalidate_caches = PathFinder.invalidate_caches
    find_distributions = PathFinder.find_distributions


sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
gc.set_threshold(OBJECTS_PER_SEARCH)
