import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports Keras.
os.environ.setdefault("KERAS_BACKEND", "jax")
# What TensorFlow writes when it is imported has times and process numbers.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_LONG = ("training", "byhand", "notebook", "fuzz")
"""Folders whose files take minutes: processes that share the tests begin with them, and end together."""

_HERE = Path(__file__).parent
_OPTIONAL = ("sklearn", "IPython", "jax", "tensorflow", "torch")
"""Packages that Keras or a backend imports where they are installed, whether they are needed or not."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in _LONG)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run have."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def lean() -> Callable[[Path, str], dict[str, str]]:
    """Variables for a script of the tests: it finds only those optional packages that its text imports.

    The others cost seconds in each process.
    """

    def variables(script: Path, backend: str) -> dict[str, str]:
        if _HERE not in script.parents:
            return {}
        named = set(re.findall(r"^ *(?:from|import) (\w+)", script.read_text(), re.MULTILINE))
        path = [str(_HERE / "lean"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        hidden = [name for name in _OPTIONAL if name not in {*named, backend}]
        return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HIDDEN_PACKAGES": ",".join(hidden)}

    return variables
