"""The modules that a script will import, judging by its source, without running or importing it."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lockstep.protocol.job_spec import BACKEND_NAMES

FRAMEWORKS = ("numpy", *BACKEND_NAMES, "keras", "lockstep")
_OF_KERAS = (
    "lockstep.keras.patches",
    "lockstep.keras.model_digest",
    "lockstep.strategy.mirrored",
)
_OF_BACKEND = {
    "jax": ("lockstep.keras.backends.jax", "lockstep.keras.replica_run.eager_runner"),
    "tensorflow": ("lockstep.keras.backends.tensorflow", "lockstep.keras.replica_run.tf_runner"),
    "torch": (
        "lockstep.keras.backends.torch",
        "lockstep.keras.backends.torch_eager",
        "lockstep.keras.replica_run.eager_runner",
    ),
}
_DECIDING = {"os": ("putenv", "unsetenv", "environb"), "sys": ("path", "modules", "meta_path", "path_hooks")}
"""Names that can change what an import returns, by their module."""
_SEEDS = "set_random_seed"
"""The function of Keras that also seeds TensorFlow, and imports it for that if it is installed."""
_CHANGES = ("clear", "pop", "popitem", "setdefault", "update")
_MOST_FILES = 100


@dataclass(frozen=True)
class ImportScan:
    """The result of a scan.

    Attributes:
        imports: modules that workers will import, in this order.
        folder: the folder in which they search for modules first; None if unknown.
        settings: environment variables that the script sets before it imports any of these.
    """

    imports: tuple[str, ...] = ()
    folder: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


NOTHING = ImportScan()


def scan_imports(script: Path, folder: Path, environment: Mapping[str, str]) -> ImportScan:
    """Return the frameworks that workers will import when they run a script.

    The result is empty if the script affects these imports in ways that its source does not show: with
    computed environment variables, or with `sys.path`. If the script imports Keras, what follows its last
    import of a framework cannot affect them. Otherwise, a function may import Keras later.

    Args:
        script: a file with Python code.
        folder: the folder in which it searches for modules first.
        environment: the environment of the script.
    """
    source = _SourceScan(folder, environment)
    try:
        source.read(script)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        # Running the script reports the error.
        return NOTHING
    if source.decides or not source.frameworks:
        return NOTHING
    imports = list(source.frameworks)
    backend = {**environment, **source.settings}.get("KERAS_BACKEND")
    trains = "keras" in imports or ("lockstep" in imports and any(name in imports for name in BACKEND_NAMES))
    if backend is not None and trains:
        imports += imports_for_training(backend)
        if source.seeds and find_spec("tensorflow") is not None:
            imports.append("tensorflow")
    return ImportScan(tuple(dict.fromkeys(imports)), str(folder), source.settings)


def imports_for_training(backend: str) -> tuple[str, ...]:
    """Return the modules that a worker imports to train with Keras on a backend."""
    return ("keras", backend, *_OF_KERAS, *_OF_BACKEND.get(backend, ()))


def setting_of(script: Path, name: str) -> tuple[str, bool] | None:
    """Return the value to which a script sets a variable, and whether it overrides the environment.

    None if, according to its source, it does not set the variable or computes the value.
    """
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    settings = [
        setting for statement in statements if (setting := _setting(statement)) and setting.name == name
    ]
    return (settings[-1].value, any(setting.always for setting in settings)) if settings else None


class _SourceScan:
    """The imports and settings of a script, and of its modules in the same folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.frameworks: dict[str, None] = {}
        self.settings: dict[str, str] = {}
        self.decides = False
        self.seeds = False
        self._imports = 0
        self._folder = folder
        self._environment = environment
        self._files: set[Path] = set()

    def read(self, script: Path) -> None:
        decides = False
        for statement in ast.parse(script.read_bytes()).body:
            if (setting := _setting(statement)) is None:
                imports = self._imports
                decides = self._look(statement, script.parent) or decides
                self.decides = decides if self._imports > imports else self.decides
            elif not self.frameworks and (setting.always or setting.name not in self._environment):
                self.settings[setting.name] = setting.value
        if "keras" not in self.frameworks:
            self.decides = decides

    def _look(self, tree: ast.AST, beside: Path) -> bool:
        """Note imports of a tree and of the modules that it imports; return whether any of them decides."""
        decides = any(map(_decides, ast.walk(tree)))
        self.seeds = self.seeds or any(map(_seeds, ast.walk(tree)))
        for node in _at_once(tree):
            for name, relative in _imported(node):
                if name in FRAMEWORKS and not relative:
                    self.frameworks[name] = None
                    self._imports += 1
                elif self._follow(name, beside if relative else self._folder):
                    decides = True
        return decides

    def _follow(self, name: str, folder: Path) -> bool:
        decides = False
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file() and file not in self._files and len(self._files) < _MOST_FILES:
                self._files.add(file)
                decides = self._look(ast.parse(file.read_bytes()), file.parent) or decides
        return decides


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, except function bodies."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _at_once(child)


def _imported(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the first part of the name of each imported module, and whether the import is relative."""
    if isinstance(node, ast.Import):
        yield from ((alias.name.partition(".")[0], False) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.partition(".")[0], bool(node.level)
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.name, True) for alias in node.names)


class _Setting(NamedTuple):
    """A variable that a script sets, always or only if it is not set."""

    name: str
    value: str
    always: bool


def _setting(statement: ast.stmt) -> _Setting | None:
    """Return the setting of a statement: `os.environ["NAME"] = "value"`, or the same with `setdefault`."""
    match statement:
        case ast.Assign(
            targets=[
                ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id="os"), attr="environ"),
                    slice=ast.Constant(value=str(name)),
                )
            ],
            value=ast.Constant(value=str(value)),
        ):
            return _Setting(name, value, always=True)
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(value=ast.Name(id="os"), attr="environ"), attr="setdefault"
                ),
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
            )
        ):
            return _Setting(name, value, always=False)
    return None


def _decides(node: ast.AST) -> bool:
    """Whether a node changes the environment, or accesses the module search path."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Store() | ast.Del()):
            return True
        case ast.Attribute(value=ast.Attribute(attr="environ"), attr=name):
            return name in _CHANGES
        case ast.Assign(value=ast.Attribute(attr="environ")):
            return True
        case ast.AugAssign(target=ast.Attribute(attr="environ")):
            return True
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return name in _DECIDING.get(module, ())
        case ast.ImportFrom(module=str(module), names=names):
            return any(alias.name in ("environ", *_DECIDING.get(module, ())) for alias in names)
    return False


def _seeds(node: ast.AST) -> bool:
    """Whether a node names Keras's function that seeds all random generators."""
    match node:
        case ast.Attribute(attr=name):
            return name == _SEEDS
        case ast.ImportFrom(names=names):
            return any(alias.name == _SEEDS for alias in names)
    return False
