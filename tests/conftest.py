import os
from pathlib import Path

import pytest

# Before anything imports Keras.
os.environ.setdefault("KERAS_BACKEND", "jax")
# What TensorFlow writes when it is imported has times and process numbers.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_LONG = ("training", "byhand", "notebook", "fuzz")
"""Folders whose files take minutes: processes that share the tests begin with them, and end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in _LONG)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run have."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
