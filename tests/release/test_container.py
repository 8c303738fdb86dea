"""The image of Containerfile runs the program of README.md, where a builder of images works."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 1800.0
"""The time limit of a command, in seconds."""
IMAGE = "lockstep-test"


def call(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def builder() -> str:
    """A command that builds and runs images here."""
    (base,) = re.findall(r"^FROM (\S+)$", (ROOT / "Containerfile").read_text(), re.MULTILINE)
    reasons = []
    for name in ("docker", "podman"):
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        for command in (("info",), ("pull", base)):
            tried = call(name, *command)
            if tried.returncode:
                lines = tried.stderr.strip().splitlines() or ["without a message"]
                reasons.append(f"{name} {command[0]} fails: {lines[-1]}")
                break
        else:
            return name
    pytest.skip("; ".join(reasons))


@pytest.mark.slow
def test_the_image_trains_with_two_workers(builder: str, distributions: Path, tmp_path: Path) -> None:
    built = call(
        *(builder, "build", "-f", str(ROOT / "Containerfile"), "--build-arg", "EXTRAS=jax,demo,hosts"),
        *("-t", IMAGE, str(distributions)),
    )
    assert built.returncode == 0, built.stderr
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(import keras\n.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(program)
    digests = set[str]()
    for options in (["-n", "2"], ["-n", "1", "--replicas", "2"]):
        run = call(builder, "run", "--rm", "-v", f"{tmp_path}:/work", IMAGE, "run", *options, "train.py")
        assert run.returncode == 0, run.stderr
        digests.update(re.findall(r"digest ([0-9a-f]{64}) of model", run.stderr))
    assert len(digests) == 1
