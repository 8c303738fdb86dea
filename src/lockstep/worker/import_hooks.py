"""Hooks that act on a module when the program imports it, without importing it themselves."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], object]
Before = Callable[[], Action]
"""Called before a module is executed; returns the action to call afterwards."""


def when_imported(actions: Mapping[str, Action]) -> None:
    """Call each action with the module of its name: now, or once the module has been executed.

    A module can have several actions, from several calls; their order is undefined.
    """
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
    later = {name: partial(_nothing_before, action) for name, action in actions.items()}
    sys.meta_path.insert(0, _ActOnImport(later))


def whenever_executed(names: Iterable[str], before: Before) -> None:
    """Call `before` when a module of these names is about to be executed, and its result afterwards.

    This has no effect on modules that are already imported.
    """
    sys.meta_path.insert(0, _ActOnImport(dict.fromkeys(names, before)))


class _ActOnImport(MetaPathFinder):
    """Delegates to the finders after it, and acts before and after a module is executed."""

    def __init__(self, actions: Mapping[str, Before]) -> None:
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
        execute, before = spec.loader.exec_module, self._actions[fullname]

        def execute_and_act(module: ModuleType) -> None:
            act = before()
            execute(module)
            act(module)

        vars(spec.loader)["exec_module"] = execute_and_act
        return spec


def _nothing_before(action: Action) -> Action:
    return action
