"""Cached programs of JAX, of an earlier run or another worker, compute the bits of newly compiled ones."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program.py"

Lean = Callable[..., dict[str, str]]


def run(folder: Path, number: int, training: str = "cnn", **variables: str) -> tuple[list[str], list[str]]:
    """Train on two workers; return their results and Lockstep's notes, except those on speed."""
    where = folder / f"run-{number}"
    options = ["--backend", "jax", "-n", "2", "--replicas", "3", "--run-dir", str(where)]
    command = [sys.executable, "-m", "lockstep", "run", *options, str(PROGRAM), training]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    logs = [(where / f"worker-{worker}.log").read_text().splitlines() for worker in range(2)]
    results = [[line for line in log if line.startswith("result ")] for log in logs]
    assert results[0] == results[1]
    said = [line for line in done.stderr.splitlines()[2:] if line.startswith("lockstep: ")]
    varies = "before the first step|finished in|(examples|steps)/s with"
    return results[0], [line for line in said if not re.search(varies, line)]


def kept(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("optimized", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cached_programs_compute_the_same_bits(tmp_path: Path, lean: Lean, optimized: bool) -> None:
    variables = lean(PROGRAM, "jax", optimized=optimized)
    without = run(tmp_path, 0, **variables, JAX_ENABLE_COMPILATION_CACHE="false")
    assert not kept(tmp_path / "cache")
    assert run(tmp_path, 1, **variables) == without
    compiled = kept(tmp_path / "cache")
    assert any("train" in name or "compute" in name for name in compiled)
    assert run(tmp_path, 2, **variables) == without
    assert kept(tmp_path / "cache") == compiled


@pytest.mark.ci
def test_the_users_own_cache_folder_takes_precedence(tmp_path: Path, lean: Lean) -> None:
    run(tmp_path, 0, "tiny", **lean(PROGRAM, "jax"), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert not kept(tmp_path / "cache")
