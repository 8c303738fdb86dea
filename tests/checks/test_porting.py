"""docs/porting.md has every name of `tf.distribute`, and every name in it exists."""

import re
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.worker import tf_distribute_shim

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([\w.]+)` \| (?:`([\w.]+)`|no) \|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
TEXT = (ROOT / "docs" / "porting.md").read_text()


def rows() -> dict[str, str]:
    """Return the replacement of each name in the table, "" for none."""
    found = ROW.findall(TEXT)
    assert len({name for name, _, _ in found}) == len(found)
    assert all(server or reason.strip() for _, server, reason in found)
    return {name: server for name, server, _ in found}


def public_names(module: ModuleType, prefix: str = "") -> set[str]:
    """All public names of a module and the modules in it."""
    names: set[str] = set()
    for name in dir(module):
        value = getattr(module, name)
        if isinstance(value, ModuleType) and not name.startswith("_"):
            names |= public_names(value, f"{prefix}{name}.")
        elif not name.startswith("_"):
            names.add(prefix + name)
    return names


def at(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.fixture(scope="module")
def tf_distribute() -> ModuleType:
    import tensorflow

    return tensorflow.distribute


def test_the_table_has_every_name_in_order(tf_distribute: ModuleType) -> None:
    assert list(rows()) == sorted(public_names(tf_distribute))


def test_the_table_agrees_with_the_option(tf_distribute: ModuleType) -> None:
    served = tf_distribute_shim.DistributeModule(tf_distribute, "")
    for name, server in rows().items():
        found = at(served, name)
        if server:
            module, _, attribute = server.rpartition(".")
            assert found is resolve_name(f"{module}:{attribute}"), name
        elif name in tf_distribute_shim.REFUSED:
            with pytest.raises(ConfigError, match=re.escape(f"tf.distribute.{name} is not supported")):
                found()
        else:
            assert found is at(tf_distribute, name), name


def test_keras_and_tensorflow_find_the_names_of_tensorflow(tf_distribute: ModuleType) -> None:
    served = tf_distribute_shim.DistributeModule(tf_distribute, "")
    for module in ("keras.src.losses.loss", "tensorflow.python.data", "lockstep.keras.backends.tensorflow"):
        ask = eval("lambda module, name: getattr(module, name)", {"__name__": module})
        for name in ("get_strategy", "MultiWorkerMirroredStrategy"):
            assert ask(served, name) is getattr(tf_distribute, name)
        options = ask(served.experimental, "CommunicationOptions")
        assert options is tf_distribute.experimental.CommunicationOptions


def test_every_trap_has_tests_that_exist() -> None:
    _, _, traps = TEXT.partition("## Known traps")
    lines = [line for line in traps.splitlines() if line.startswith("| ")][1:]
    assert len(lines) >= 7
    for line in lines:
        tests = TEST.findall(line)
        assert tests, line
        for path, name in tests:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)
