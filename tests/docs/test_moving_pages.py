"""The programs of the pages about moving from other libraries run, on both sides."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LOCKSTEP = ("-m", "lockstep", "run")
DIGEST = re.compile(r"digest:? (\w{64})")
Run = Callable[..., str]

pytestmark = pytest.mark.slow


def program(page: str, number: int) -> str:
    """Return a whole program of a page, counted from 0."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    found: str = blocks[number]
    return found


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run Python with a program in the current folder; return its output."""

    def run(name: str, text: str, *command: str) -> str:
        (tmp_path / name).write_text(text)
        result = subprocess.run(
            [sys.executable, *command, name],
            env=environment | {"OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert not result.returncode, result.stderr
        return result.stdout + result.stderr

    return run


def digest(output: str) -> str:
    found = DIGEST.findall(output)
    assert found
    return str(found[-1])


def test_torchrun(run: Run) -> None:
    pytest.importorskip("torch")
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "epoch 3: accuracy" in run("ddp.py", program("from-torchrun.md", 0), *command)
    text = program("from-torchrun.md", 1)
    options = (*LOCKSTEP, "--backend", "torch")
    two = digest(run("train.py", text, *options, "-n", "2"))
    assert digest(run("train.py", text, *options, "-n", "1", "--replicas", "2")) == two
    start, end = text.index("model = "), text.index("model.compile")
    with_module = text[:start] + program("from-torchrun.md", 2) + text[end:]
    assert digest(run("module.py", with_module, *options, "-n", "2")) != two


def test_horovod(run: Run) -> None:
    text = program("from-horovod.md", 1)
    two = digest(run("tf_train.py", text, *LOCKSTEP, "--backend", "tensorflow", "-n", "2"))
    one = run("tf_train.py", text, *LOCKSTEP, "--backend", "tensorflow", "-n", "1", "--replicas", "2")
    assert digest(one) == two


def test_ray_train(run: Run) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pandas")
    assert "training result 3" in run("ray_train.py", program("from-ray-train.md", 0))
    found = run("ray_lockstep.py", program("from-ray-train.md", 1))
    text = program("from-torchrun.md", 1)
    assert digest(found) == digest(run("train.py", text, *LOCKSTEP, "--backend", "torch", "-n", "2"))
