"""The examples work as described on two workers, which agree to the last bit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
WANTED = {
    "augmentation": ("accuracy", 0.95),
    "text": ("accuracy", 0.85),
    "gan": ("likeness", 0.85),
    "image_folder": ("accuracy", 0.94),
    "input_fn": ("accuracy", 0.93),
}
# Pipelines of TensorFlow on every backend: test_distribution.py and test_tf_reading.py.
LONG = ("augmentation", "gan", "image_folder")


@pytest.mark.slow("input_fn")
@pytest.mark.slow("text")
@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in WANTED]
)
def test_an_example_reaches_its_result(launch: Callable[..., Any], thorough_backend: str, name: str) -> None:
    run = launch("-n 2", str(EXAMPLES / f"{name}.py"), backend=thorough_backend)
    assert run.status == 0, run.stderr
    label, least = WANTED[name]
    digests = []
    for worker in range(2):
        (figure,) = run.marked(worker, label)
        assert float(re.split(r": ", figure)[1]) >= least
        digests += run.marked(worker, "digest: ")
    assert len(digests) == 2
    assert len(set(digests)) == 1


@pytest.mark.slow
# tests/byhand/test_custom_loop.py also trains with the first.
@pytest.mark.parametrize("name", [pytest.param("custom_loop_tensorflow", marks=pytest.mark.slow), "hot_loop"])
def test_a_loop_on_tensorflow_learns(launch: Callable[..., Any], tmp_path: Path, name: str) -> None:
    run = launch("-n 2", str(EXAMPLES / f"{name}.py"), str(tmp_path / "saved"), backend="tensorflow")
    assert run.status == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss:? (\d\.\d+)", run.stdout)]
    assert len(losses) >= 3
    assert min(losses) < losses[0] / 2
    assert run.marked(0, "digest: ") == run.marked(1, "digest: ") != []


@pytest.mark.slow
def test_the_demo_shows_equal_digests(plain: Callable[..., str]) -> None:
    assert plain(str(EXAMPLES / "demo.py")).splitlines()[-1] == "equal to the last bit"
