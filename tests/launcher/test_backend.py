import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, UnfitError
from lockstep.launcher.backend import Choice, Wishes, choose_backend, require_tensorflow
from lockstep.system.environment import keras_backend

ALL = ("jax", "tensorflow", "torch")


def choose(*installed: str, **wishes: Any) -> Choice:
    return choose_backend(Wishes(**wishes), installed.__contains__, "/bin/python")


def test_the_first_source_with_a_backend_decides() -> None:
    says = {
        "script": "torch",
        "overrides": True,
        "variable": "tensorflow",
        "checkpoint": "torch",
        "configured": "torch",
        "tf_distribute": True,
    }
    assert choose(*ALL, option="torch", **says) == Choice("torch", "--backend selects it")
    assert choose(*ALL, **says) == Choice("torch", "the script sets KERAS_BACKEND")
    says["overrides"] = False
    assert choose(*ALL, **says) == Choice("tensorflow", "KERAS_BACKEND selects it")
    says["variable"] = ""
    assert choose(*ALL, **says) == Choice("torch", "the script sets KERAS_BACKEND")
    says["script"] = None
    assert choose(*ALL, **says) == Choice("torch", "the checkpoint uses it")
    says["checkpoint"] = None
    assert choose(*ALL, **says) == Choice("torch", "keras.json selects it")
    says["configured"] = None
    assert choose(*ALL, **says) == Choice("tensorflow", "--tf-distribute requires it")
    says["tf_distribute"] = False
    first = "it is the first installed of TensorFlow, JAX and PyTorch"
    assert choose(*ALL, **says) == Choice("tensorflow", first)
    assert choose("torch", "jax") == Choice("jax", first)
    assert str(choose("torch")) == f"on PyTorch, because {first}"


def test_the_default_keras_json_does_not_count() -> None:
    assert choose(*ALL, configured="tensorflow") == choose(*ALL)
    assert choose("torch", configured="tensorflow").backend == "torch"
    assert choose("jax", configured="torch") == choose("jax") == choose("jax", configured="nonsense")


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"option": "torch"}, "--backend torch: not installed for /bin/python; install it there"),
        ({"variable": "torch"}, "KERAS_BACKEND=torch: not installed for /bin/python; install it there"),
        ({"variable": "theano"}, "KERAS_BACKEND=theano: expected one of jax, tensorflow, torch"),
        ({"script": "theano"}, "the script's KERAS_BACKEND=theano: expected one of jax"),
        ({"checkpoint": "torch"}, "checkpoint of torch: not installed for /bin/python"),
        (
            {"option": "jax", "script": "torch", "overrides": True},
            "--backend jax, but the script sets KERAS_BACKEND to torch, which takes precedence",
        ),
    ],
)
def test_a_requested_backend_must_be_installed(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose("jax", **wishes)


def test_the_error_without_a_backend_says_how_to_install_one() -> None:
    with pytest.raises(ConfigError, match=r"no Keras backend is installed.*keras-lockstep\[jax\]"):
        choose(configured="tensorflow")


def test_tf_distribute_requires_tensorflow_on_every_backend() -> None:
    require_tensorflow(("jax", "tensorflow").__contains__, "/bin/python")
    with pytest.raises(UnfitError, match=r"--tf-distribute: TensorFlow is not installed for /bin/python"):
        require_tensorflow(("jax",).__contains__, "/bin/python")


def test_the_configuration_is_keras_json(tmp_path: Path) -> None:
    environ = {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": "torch"}
    assert keras_backend(environ) == ("torch", None)
    (tmp_path / "keras.json").write_text("not JSON")
    assert keras_backend(environ) == ("torch", None)
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    assert keras_backend({"KERAS_HOME": str(tmp_path)}) == (None, "jax")
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text(json.dumps({"backend": "torch"}))
    assert keras_backend({"HOME": str(tmp_path)}) == (None, "torch")
