"""docs/api.md has every public name; each has a docstring with an example, which does what it shows."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("examples_of_docstrings.py")
ENTRY = re.compile(r"^\.\. auto\w+:: ([\w.]+)$", re.MULTILINE)
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(
    environment: dict[str, str], lean: Callable[..., dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Run the examples of one kind, with JAX; return what the script prints."""

    def run(*command: str, packages: bool = False) -> dict[str, Any]:
        variables = environment | {"KERAS_BACKEND": "jax"} | ({} if packages else lean(SCRIPT, "jax"))
        result = subprocess.run(
            [sys.executable, *command],
            env=variables,
            cwd=tmp_path_factory.mktemp("examples"),
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert not result.returncode, result.stderr
        found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        assert not found["failed"], result.stdout
        return found

    return run


@pytest.fixture(scope="module")
def found(run: Run) -> dict[str, Any]:
    return run(str(SCRIPT))


def test_the_examples_do_what_they_show(found: dict[str, Any]) -> None:
    assert found["attempted"] > 100


def test_the_reference_has_every_public_name_with_an_example(found: dict[str, Any]) -> None:
    errors = {name for name in found["documented"] if name.startswith("lockstep.errors.")}
    assert sorted(ENTRY.findall((ROOT / "docs" / "api.md").read_text())) == sorted({*found["names"]} - errors)
    assert found["documented"] == found["names"]
    assert set(found["with_examples"]) == {*found["names"]} - errors


def test_the_examples_of_two_replicas_do_what_they_show(run: Run) -> None:
    command = ("-m", "lockstep", "run", "--backend", "jax", "-n", "1", "--replicas", "2", str(SCRIPT))
    assert run(*command)["attempted"] > 40


@pytest.mark.slow
def test_the_examples_that_start_a_job_do_what_they_show(run: Run) -> None:
    assert run(str(SCRIPT), "jobs", packages=True)["attempted"] > 8
