"""The imports of a script, from its source."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.launcher import import_scan
from lockstep.launcher.import_scan import NOTHING, ImportScan, scan_imports, setting_of


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def foreseen(script: Path, source: str, backend: str | None = "jax") -> ImportScan:
    script.write_text(source)
    return scan_imports(script, script.parent, {"KERAS_BACKEND": backend} if backend else {})


def test_a_script_that_imports_keras_needs_its_backend(script: Path) -> None:
    found = foreseen(script, "import numpy as np\nfrom keras import layers\n")
    assert found.imports[:3] == ("numpy", "keras", "jax")
    assert "lockstep.keras.backends.jax" in found.imports
    assert found.folder == str(script.parent)


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_the_imports_of_lockstep_exist(script: Path, backend: str) -> None:
    imports = foreseen(script, "import keras\n", backend).imports
    assert all(find_spec(name) for name in imports if name.startswith("lockstep."))


def test_imports_have_the_order_of_the_script(script: Path) -> None:
    found = foreseen(script, "import tensorflow as tf\nimport numpy\nimport tensorflow.data\n")
    assert found.imports == ("tensorflow", "numpy")


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("from lockstep.worker import job\n", False),
        ("import lockstep\nimport tensorflow as tf\n", True),
        ("import tensorflow as tf\n", False),
    ],
)
def test_only_scripts_that_train_need_keras(script: Path, source: str, needed: bool) -> None:
    assert ("keras" in foreseen(script, source).imports) is needed


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="Keras seeds TensorFlow where it is installed")
@pytest.mark.parametrize(
    ("source", "seeds"),
    [
        ("import keras\ndef main():\n    keras.utils.set_random_seed(1)\n", True),
        ("from keras.utils import set_random_seed\n", True),
        ("from keras.utils import to_categorical\n", False),
        ("import random, keras\nrandom.seed(1)\n", False),
    ],
)
def test_scripts_that_call_set_random_seed_need_tensorflow_too(
    script: Path, source: str, seeds: bool
) -> None:
    for backend in ("jax", "torch"):
        assert ("tensorflow" in foreseen(script, source, backend).imports) is seeds


def test_scripts_that_seed_need_only_installed_packages(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_scan, "find_spec", lambda name: None)
    assert "tensorflow" not in foreseen(script, "import keras\nkeras.utils.set_random_seed(1)\n").imports


def test_modules_in_the_folder_of_the_script_are_scanned_too(script: Path) -> None:
    (script.parent / "model.py").write_text("import os\nfrom helpers import thing\n")
    (script.parent / "helpers").mkdir()
    (script.parent / "helpers" / "__init__.py").write_text("from . import other\n")
    (script.parent / "helpers" / "other.py").write_text("import torch\nimport model\n")
    assert foreseen(script, "if True:\n    import model\n").imports == ("torch",)


@pytest.mark.parametrize(
    "source",
    [
        "print('keras')",
        "def main():\n    import keras\n",
        "import json, os",
        "import keras; import",
        "import os\nos.environ['KERAS_BACKEND'] = input()\nimport keras",
        "import os, numpy\nos.environ['KERAS_BACKEND'] = input()\nimport keras",
        "import os, keras\nos.environ['XLA_FLAGS'] = input()\nfrom keras import layers",
        "import os\nif 1:\n    os.environ['XLA_FLAGS'] = '--x'\n    import keras",
        "import os, lockstep, torch\nos.environ['KERAS_BACKEND'] = input()\ndef main():\n    import keras",
        "import os\nos.environ.update(A='b')\nimport keras",
        "import os\nos.environ |= {'A': 'b'}\nimport keras",
        "import os\nvariables = os.environ\nimport keras",
        "import os\ndel os.environ['A']\nimport keras",
        "import os\nos.putenv('A', 'b')\nimport keras",
        "from os import environ\nimport keras",
        "import sys\nsys.path.insert(0, '/mine')\nimport keras",
        "from __future__ import annotations\nimport keras.\n",
    ],
)
def test_sources_without_known_imports(script: Path, source: str) -> None:
    assert foreseen(script, source) == NOTHING


@pytest.mark.parametrize(
    "change",
    [
        "os.environ['A'] = input()",
        "def f():\n    os.environ.clear()",
        "sys.path.insert(0, '/mine')\nimport other",
    ],
)
def test_what_follows_the_last_import_does_not_decide(script: Path, change: str) -> None:
    (script.parent / "other.py").write_text("import os\nos.environ['A'] = input()\n")
    source = "import os, sys\nimport keras\n"
    assert foreseen(script, source + change) == foreseen(script, source)


def test_a_module_that_sets_variables_and_imports_a_framework_decides(script: Path) -> None:
    (script.parent / "other.py").write_text("import os\nos.environ['A'] = input()\nimport numpy\n")
    assert foreseen(script, "import keras\nimport other\n") == NOTHING


def test_a_module_in_the_folder_of_the_script_may_set_variables(script: Path) -> None:
    (script.parent / "settings.py").write_text("import os\nos.environ['KERAS_BACKEND'] = 'torch'\n")
    assert foreseen(script, "import settings\nimport keras\n") == NOTHING


def test_the_setting_of_a_variable_in_a_script(script: Path) -> None:
    for source, expected in (
        ("import os, keras\nos.environ['KERAS_BACKEND'] = 'torch'", ("torch", True)),
        ("import os\nos.environ.setdefault('KERAS_BACKEND', 'jax')", ("jax", False)),
        ("import os\nos.environ['KERAS_BACKEND'] = input()", None),
        ("import os\nos.environ['OTHER'] = 'jax'", None),
        ("import keras; import", None),
    ):
        script.write_text(source)
        assert setting_of(script, "KERAS_BACKEND") == expected


def test_a_setting_before_the_first_import_counts(script: Path) -> None:
    found = foreseen(
        script,
        "import os\nos.environ['KERAS_BACKEND'] = 'torch'\nimport keras\nos.environ['AFTER'] = '1'\n",
    )
    assert found.settings == {"KERAS_BACKEND": "torch"}
    assert "lockstep.keras.backends.torch" in found.imports
    assert "jax" not in found.imports


def test_setdefault_counts_only_without_another_setting(script: Path) -> None:
    source = "import os\nos.environ.setdefault('KERAS_BACKEND', 'torch')\nimport keras\n"
    assert foreseen(script, source, "jax").settings == {}
    assert foreseen(script, source, None).settings == {"KERAS_BACKEND": "torch"}


def test_reading_the_environment_is_no_setting(script: Path) -> None:
    source = "import os, keras\nprint(os.environ['HOME'], os.environ.get('RANK'), os.environ | {'A': 'b'})\n"
    assert foreseen(script, source, None).imports == ("keras",)


def test_an_unreadable_script_has_no_known_imports(script: Path) -> None:
    assert scan_imports(script, script.parent, {}) == NOTHING
    script.write_bytes(b"\xff\xfe\x00")
    assert scan_imports(script, script.parent, {}) == NOTHING
