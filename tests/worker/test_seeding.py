import subprocess
import sys

import pytest

SEEDED = "from lockstep.worker.seeding import seed_everything; seed_everything(11)"
DRAWN = {
    "random": ("import random", "random.seed(11)", "random.random()"),
    "numpy": ("import numpy", "numpy.random.seed(11)", "numpy.random.rand()"),
    "torch": ("import torch", "torch.manual_seed(11)", "torch.rand(1).item()"),
    "tensorflow": (
        "import tensorflow",
        "tensorflow.random.set_seed(11)",
        "float(tensorflow.random.uniform([1])[0])",
    ),
}


def run(*statements: str) -> list[str]:
    script = "\n".join(statements)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.split()


@pytest.mark.ci
@pytest.mark.parametrize("name", DRAWN)
def test_a_package_that_is_imported_later_is_seeded(name: str) -> None:
    pytest.importorskip(name)
    load, seed, draw = DRAWN[name]
    first, expected = run(SEEDED, load, f"print({draw})", seed, f"print({draw})")
    assert first == expected


def test_an_imported_package_is_seeded_too() -> None:
    load, seed, draw = DRAWN["numpy"]
    first, expected = run(load, SEEDED, f"print({draw})", seed, f"print({draw})")
    assert first == expected


def test_the_seed_of_the_script_takes_precedence() -> None:
    load, _, draw = DRAWN["numpy"]
    script = (load, "numpy.random.seed(5)", load, f"print({draw})")
    assert run(SEEDED, *script) == run(*script)
