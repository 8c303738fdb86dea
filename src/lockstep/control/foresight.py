"""What a script will import, as far as its source tells: nothing is run or imported to find out."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

FRAMEWORKS = ("numpy", "jax", "tensorflow", "torch", "keras", "lockstep")
_KERAS = ("keras", "lockstep")
_OF_KERAS = ("lockstep.keras.hook", "lockstep.keras.state.digest", "lockstep.strategy.mirrored")
_DECIDING = {
    "os": ("environ", "environb", "putenv", "unsetenv"),
    "sys": ("path", "modules", "meta_path", "path_hooks"),
}
"""What can make an import give something else, in the modules that have it."""
_MOST_FILES = 100


@dataclass(frozen=True)
class Foresight:
    """What workers will need.

    Attributes:
        imports: modules that they will import, in this order.
        folder: where they will look for modules first; None where nothing is known.
        settings: variables of the environment that the script sets before it imports anything of these.
    """

    imports: tuple[str, ...] = ()
    folder: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


NOTHING = Foresight()


def foresee(script: Path, folder: Path, backend: str | None) -> Foresight:
    """Return what workers that run a script will import of the frameworks.

    Nothing, where the script decides by itself what an import gives: with variables of the environment that
    it reckons out, or with `sys.path`.

    Args:
        script: a file with Python code.
        folder: where it will look for modules first.
        backend: of Keras, if the script does not choose another; None to leave it.
    """
    found = _Found(folder)
    try:
        found.read(script)
    except (OSError, ValueError, SyntaxError, RecursionError):
        # Whoever runs the script says what is wrong with it.
        return NOTHING
    if found.decides or not found.frameworks:
        return NOTHING
    imports = list(found.frameworks)
    backend = found.settings.get("KERAS_BACKEND", backend)
    if backend is not None and any(name in imports for name in _KERAS):
        imports += ["keras", backend, *_OF_KERAS, f"lockstep.keras.backends.{backend}"]
    return Foresight(tuple(dict.fromkeys(imports)), str(folder), found.settings)


class _Found:
    """What has been found in a script, and in those of its modules that lie beside it."""

    def __init__(self, folder: Path) -> None:
        self.frameworks: dict[str, None] = {}
        self.settings: dict[str, str] = {}
        self.decides = False
        self._folder = folder
        self._files: set[Path] = set()

    def read(self, script: Path) -> None:
        for statement in ast.parse(script.read_bytes()).body:
            name, value = _setting(statement)
            if name is None:
                self._look(statement, script.parent)
            elif not self.frameworks:
                self.settings[name] = value

    def _look(self, tree: ast.AST, beside: Path) -> None:
        nodes = list(ast.walk(tree))
        read_only = {id(node.value) for node in nodes if _reads(node)}
        for node in nodes:
            self.decides = self.decides or (_decides(node) and id(node) not in read_only)
            for name, relative in _imported(node):
                if name in FRAMEWORKS and not relative:
                    self.frameworks[name] = None
                else:
                    self._follow(name, beside if relative else self._folder)

    def _follow(self, name: str, folder: Path) -> None:
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file() and file not in self._files and len(self._files) < _MOST_FILES:
                self._files.add(file)
                self._look(ast.parse(file.read_bytes()), file.parent)


def _imported(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the first part of the name of each module that is imported, and whether it is relative."""
    if isinstance(node, ast.Import):
        yield from ((alias.name.partition(".")[0], False) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.partition(".")[0], bool(node.level)
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.name, True) for alias in node.names)


def _setting(statement: ast.stmt) -> tuple[str | None, str]:
    """Return name and value, where a statement is `os.environ["NAME"] = "value"`."""
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
            return name, value
    return None, ""


def _reads(node: ast.AST) -> TypeGuard[ast.Subscript | ast.Attribute]:
    """Tell whether a part of the source only reads: `os.environ["NAME"]` or `os.environ.get`."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Load()):
            return True
        case ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"):
            return True
    return False


def _decides(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return name in _DECIDING.get(module, ())
        case ast.ImportFrom(module=str(module), names=names):
            return any(alias.name in _DECIDING.get(module, ()) for alias in names)
    return False
