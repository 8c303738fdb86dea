"""Modules that hide those that are installed, found without importing any."""

from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

NAMES = ("keras", "jax", "tensorflow", "torch", "numpy")
_METADATA = (".dist-info", ".egg-info")


def hidden_modules(folder: Path, installed: Sequence[Path]) -> tuple[str, ...]:
    """Return which of `NAMES` a program finds in a folder that comes before those of installed packages.

    A folder where packages are installed hides nothing unless the same is installed elsewhere.

    Args:
        folder: to look in.
        installed: where packages are installed.
    """
    try:
        folder = folder.resolve()
        if any(folder == each.resolve() for each in installed):
            return ()
    except OSError:
        # The current folder may be gone.
        return ()
    found = [name for name in NAMES if _finds(name, folder)]
    return tuple(
        name
        for name in found
        if not _is_installed(name, folder) or any(_finds(name, each) for each in installed)
    )


def _finds(name: str, folder: Path) -> bool:
    spec = PathFinder.find_spec(name, [str(folder)])
    # A folder without __init__.py has no origin; it hides nothing.
    return spec is not None and spec.origin is not None


def _is_installed(name: str, folder: Path) -> bool:
    return any(entry.name.endswith(_METADATA) for entry in folder.glob(f"{name}[-_]*"))
