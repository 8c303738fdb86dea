"""Hooks that act on a module when the program imports it, without importing it themselves."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from lockstep.protocol.job_spec import BACKEND_NAMES

FRAMEWORKS = ("keras", *BACKEND_NAMES)
"""Modules whose import may take many seconds."""

Action = Callable[[ModuleType], object]
Around = Callable[[ModuleType], AbstractContextManager[None]]
"""Surrounds the execution of a module."""


def when_imported(actions: Mapping[str, Action]) -> None:
    """Call each action with the module of its name: now, or when the module has been executed.

    A module can have several actions, from several calls; their order is undefined.
    """
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
    sys.meta_path.insert(0, _ActOnImport({name: _followed_by(action) for name, action in actions.items()}))


def whenever_executed(names: Iterable[str], around: Around) -> None:
    """Surround the execution of each module of these names, even if it raises.

    This has no effect on modules that are already imported.
    """
    sys.meta_path.insert(0, _ActOnImport(dict.fromkeys(names, around)))


class _ActOnImport(MetaPathFinder):
    """Delegates to the finders after it, and surrounds the execution of modules."""

    def __init__(self, actions: Mapping[str, Around]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader acts on the module, for the modules that have an action."""
        if fullname not in self._actions:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute, around = spec.loader.exec_module, self._actions[fullname]

        def execute_within(module: ModuleType) -> None:
            with around(module):
                execute(module)

        vars(spec.loader)["exec_module"] = execute_within
        return spec


def _followed_by(action: Action) -> Around:
    @contextmanager
    def around(module: ModuleType) -> Iterator[None]:
        yield
        action(module)

    return around
