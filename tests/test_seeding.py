import subprocess
import sys

import pytest

DRAWS = {
    "random": "import random; print(random.random())",
    "numpy": "import numpy; print(numpy.random.rand())",
    "torch": "import torch; print(torch.rand(1).item())",
    "tensorflow": "import tensorflow as tf; print(tf.random.uniform([1])[0].numpy())",
}


def draw(seed: int, name: str, before: str = "pass") -> str:
    script = f"from lockstep.seeding import seed_everything; {before}; seed_everything({seed}); {DRAWS[name]}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_imported_later_is_seeded(name: str) -> None:
    pytest.importorskip(name)
    first = draw(1, name)
    assert draw(1, name) == first
    assert draw(2, name) != first


def test_what_is_imported_already_is_seeded_too() -> None:
    assert draw(1, "numpy", "import numpy") == draw(1, "numpy")


def test_the_scripts_own_seed_stays() -> None:
    script = (
        "from lockstep.seeding import seed_everything; seed_everything(1); "
        "import numpy; numpy.random.seed(5); import numpy; print(numpy.random.rand())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    alone = subprocess.run(
        [sys.executable, "-c", "import numpy; numpy.random.seed(5); print(numpy.random.rand())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == alone.stdout
