import os

import pytest

# Before anything imports Keras.
os.environ.setdefault("KERAS_BACKEND", "jax")
# What TensorFlow writes when it is imported has times and process numbers.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_LONG = ("training", "byhand", "notebook", "fuzz")
"""Folders whose files take minutes: processes that share the tests begin with them, and end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in _LONG)
