"""Hides packages that Keras and the backends import only because they are installed, which takes seconds.

For processes of tests: `HIDDEN_PACKAGES` names the packages, with commas between them. They are not found, as
on the machine of a user who has not installed them.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split(","))


class Finder:
    """Finds what Python finds, but for what is hidden."""

    @staticmethod
    def find_spec(name: str, *details: Any) -> ModuleSpec | None:
        return None if name in HIDDEN else PathFinder.find_spec(name, *details)

    invalidate_caches = PathFinder.invalidate_caches
    find_distributions = PathFinder.find_distributions


sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
