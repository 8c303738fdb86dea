"""Snapshots of a program's own source files: all workers of a job run the version that the first worker read.

Users may edit a script while it runs. A replacement worker that starts later runs the same version as the
others, and tracebacks show it.
"""

import contextlib
import hashlib
import importlib.util
import linecache
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from lockstep.system.paths import kept_source

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = {
    Path(sysconfig.get_path("stdlib")),
    Path(sysconfig.get_path("platstdlib")),
    Path(__file__).parents[1],
}
_GENERATED = "__autograph_generated_file"
"""The prefix of the files that TensorFlow writes and imports, different ones in each process."""
_NOTEBOOK = "<ipython-input"

_VARIABLE = re.compile(r"""environ(?:\.\w+)?\s*[\[(]\s*["'](\w+)["']|getenv\(\s*["'](\w+)["']""")
"""An environment variable that a source file names, such as `os.environ["DATA"]` or `os.getenv("DATA")`."""
_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)
"""The package of an import, such as `sklearn` in `from sklearn.datasets import load_digits`."""

_read: dict[str, str] = {}
"""Hashes of the source files that this process has read, by path."""

Changed = Callable[[str, str], object]
"""Takes the path of a file, and its problem."""


def keep_sources(folder: Path, changed: Changed) -> None:
    """Let this process import, from now on, the source files saved in a folder, and save missing ones there.

    This applies to the script and to the program's own modules, however and whenever they are imported, but
    not to installed libraries. `__file__` and tracebacks have the path of the original.

    Args:
        folder: the existing folder of the job, accessible only to its user.
        changed: called for a file that has changed since then, or cannot be saved.
    """
    kept = SavedSources(folder, changed)
    get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def read_kept(self: SourceFileLoader, path: str) -> bytes:
        if path != self.path or not is_own(path):
            return get_data(self, path)
        text = kept.read(path)
        _show(path, text)
        return text

    def stats(self: SourceFileLoader, path: str) -> object:
        if is_own(path):
            # Python's cached bytecode may be of another version of the file.
            raise OSError(f"{path}: the version that the job saved takes precedence")
        return path_stats(self, path)

    SourceFileLoader.get_data = read_kept  # type: ignore[method-assign, assignment]
    SourceFileLoader.path_stats = stats  # type: ignore[method-assign, assignment]
    sys.meta_path.append(_RemovedModuleFinder(kept))


def is_own(path: str) -> bool:
    """Whether the module at a path is the program's own, not of an installed library."""
    file = Path(path)
    installed = not _LIBRARIES.isdisjoint(file.parents) or not _INSTALLED.isdisjoint(file.parts)
    # Frames of Cython have the path of a source file that is not installed.
    return not installed and not file.name.startswith(_GENERATED) and file.suffix != ".pyx"


@cache
def library_name(file: str) -> str:
    """Return the name of the installed library of a source file, or an empty string for other files."""
    parts = Path(file).parts
    at = max((number for number, part in enumerate(parts) if part in _INSTALLED), default=None)
    return "" if at is None or at + 1 == len(parts) else parts[at + 1].removesuffix(".py")


@cache
def is_program(file: str) -> bool:
    """Whether code from a file is the program's own: of its script, a module, or a cell of a notebook."""
    return (file.startswith(_NOTEBOOK) or not file.startswith("<")) and is_own(file)


def own_sources() -> dict[str, str]:
    """Return the hashes of the program's own source files that this process has imported, by path.

    Paths below the script's folder are relative to it.
    """
    script = _file(sys.modules["__main__"])
    hashes = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        path = _own_file(name) if isinstance(name, str) else None
        if path is None:
            continue
        # The hash at the first request counts, because the file may change later.
        text = _read.get(str(path)) or _read.setdefault(str(path), file_hash(path) or "")
        below = script is not None and path.is_relative_to(script.parent)
        hashes[str(path.relative_to(script.parent) if script and below else path)] = text
    return hashes


def own_variables() -> set[str]:
    """Return the names of environment variables that the program's own source files name."""
    return {name for path in _own_files() for name in _named_in(path, _VARIABLE)}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that the program's own source files import, by the import's name.

    Packages without `__version__` are left out.
    """
    names = {name for path in _own_files() for name in _named_in(path, _IMPORT)}
    versions = {
        name: getattr(sys.modules.get(name), "__dict__", {}).get("__version__") for name in sorted(names)
    }
    return {name: str(version) for name, version in versions.items() if isinstance(version, str)}


def _own_files() -> set[Path]:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {path for file in files if isinstance(file, str) and (path := _own_file(file)) is not None}


@cache
def _named_in(path: Path, pattern: re.Pattern[str]) -> frozenset[str]:
    with contextlib.suppress(OSError):
        text = path.read_text(errors="replace")
        return frozenset(next(filter(None, match.groups())) for match in pattern.finditer(text))
    return frozenset()


def script_source() -> str:
    """Return the name of the script's file in `own_sources`, or an empty string if it has none."""
    script = _file(sys.modules["__main__"])
    return script.name if script is not None and is_own(str(script)) else ""


def file_hash(path: Path) -> str | None:
    """Return the hash of a file's contents, or None if there is no file."""
    try:
        return _hash(path.read_bytes())
    except OSError:
        return None


class SavedSources:
    """The source files saved in a folder, each named after the path of the original."""

    def __init__(self, folder: Path, changed: Changed) -> None:
        self._folder = folder
        self._changed = changed

    def has(self, path: Path) -> bool:
        """Whether the file at a path is saved."""
        return self._snapshot(path).exists()

    def read(self, path: str) -> bytes:
        """Return the saved version of the file at a path; save the current one if there is none.

        Raises:
            OSError: no version is saved, and there is no file.
        """
        file = Path(path).absolute()
        try:
            text = self._snapshot(file).read_bytes()
        except FileNotFoundError:
            text = self._keep(file, file.read_bytes())
        saved = _read[str(file)] = _hash(text)
        if file_hash(file) != saved:
            self._changed(path, "has changed; this worker uses the version that the job read first")
        return text

    def _snapshot(self, file: Path) -> Path:
        return kept_source(self._folder, file)

    def _keep(self, file: Path, text: bytes) -> bytes:
        """Save a version atomically; return the saved one, which may be another worker's."""
        snapshot = self._snapshot(file)
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder) as new:
                new.write(text)
                new.flush()
                snapshot.hardlink_to(new.name)
        except FileExistsError:
            return snapshot.read_bytes()
        except OSError as error:
            self._changed(
                str(file),
                f"cannot be saved ({error.strerror}); workers that start later read its current version",
            )
        return text


class _RemovedModuleFinder(MetaPathFinder):
    """Finds modules whose files were removed but are saved."""

    def __init__(self, kept: SavedSources) -> None:
        self._kept = kept

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Search the folders where the file would be."""
        name = fullname.rpartition(".")[2]
        for entry in sys.path if path is None else path:
            package = Path(entry).absolute() / name
            for file, folders in (
                (package / "__init__.py", [str(package)]),
                (package.with_name(f"{name}.py"), None),
            ):
                if self._kept.has(file):
                    return importlib.util.spec_from_file_location(
                        fullname, file, submodule_search_locations=folders
                    )
        return None


def _show(path: str, text: bytes) -> None:
    """Make `linecache`, and so tracebacks, show this text for the path."""
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):
        lines = importlib.util.decode_source(text).splitlines(keepends=True)
        # Without a modification time, linecache does not check the file.
        linecache.cache[path] = (len(text), None, lines, path)


def _file(module: ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path).absolute() if isinstance(path, str) and path.endswith(".py") else None


@cache
def _own_file(name: str) -> Path | None:
    """Return the path of one of the program's own files, or None for others. Cached: modules are many."""
    path = Path(name).absolute() if name.endswith(".py") else None
    return path if path is not None and is_own(str(path)) else None


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
