"""The backend that a job selects, and its first line, which reports the choice."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.protocol.job_spec import BACKEND_NAMES

DEFAULT = '{"floatx": "float32", "epsilon": 1e-07, "backend": "%s", "image_data_format": "channels_last"}'
SHOW = "import os; print(os.environ['KERAS_BACKEND'])\n"
FIRST = "it is the first installed of TensorFlow, JAX and PyTorch"


def run(home: Path, *arguments: str, **variables: str) -> tuple[str, str]:
    """Run a script with this home; return its output and the command's first line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KERAS_")}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "-n", "1", *arguments],
        cwd=home,
        env=environment | {"HOME": str(home)} | variables,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()[1]


@pytest.mark.ci
def test_a_fresh_home_gives_the_same_backend_again(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import keras; print(keras.backend.backend())")
    first = run(tmp_path, "--run-dir", "run", "a.py")
    assert '"backend": "tensorflow"' in (tmp_path / ".keras" / "keras.json").read_text()
    assert run(tmp_path, "--run-dir", "run", "a.py") == first
    installed = [name for name in ("tensorflow", "jax", "torch") if find_spec(name)]
    assert first[0] == installed[0]
    assert f"; on {BACKEND_NAMES[installed[0]]}, because {FIRST}" in first[1]


@pytest.mark.parametrize(
    ("options", "source", "configured", "expected"),
    [
        ((), "", "torch", "torch: on PyTorch, because keras.json selects it"),
        (
            ("--tf-distribute",),
            "",
            "tensorflow",
            "tensorflow: on TensorFlow, because --tf-distribute requires",
        ),
        (("--tf-distribute", "--backend", "jax"), "", "torch", "jax: on JAX, because --backend selects it"),
        (
            (),
            "import os\nos.environ['KERAS_BACKEND'] = 'tensorflow'\n",
            "torch",
            "tensorflow: on TensorFlow, because the script sets KERAS_BACKEND",
        ),
    ],
)
def test_the_second_line_names_the_source_of_the_choice(
    tmp_path: Path, options: tuple[str, ...], source: str, configured: str, expected: str
) -> None:
    pytest.importorskip(expected.partition(":")[0])
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text(DEFAULT % configured)
    (tmp_path / "a.py").write_text(source + SHOW)
    printed, line = run(tmp_path, *options, "a.py")
    assert expected in f"{printed}: {line.partition('sets one; ')[2]}"


def test_a_choice_at_run_time_corrects_the_second_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from lockstep.observability.events import StrategyInstalled\nfrom lockstep.worker import job\n"
        "job.current().events.publish(StrategyInstalled('torch'))"
    )
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "-n", "1", "--backend", "jax", "a.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert "lockstep: the script selects PyTorch itself, so it runs on PyTorch, not on JAX" in done.stderr


@pytest.mark.parametrize(
    ("source", "variables", "who"),
    [
        ("", {"TF_USE_LEGACY_KERAS": "1"}, "the environment"),
        ("import os\nos.environ['TF_USE_LEGACY_KERAS'] = 'True'\n", {}, "the script"),
        ("import os\nos.environ['TF_USE_LEGACY_KERAS'] = '0'\n", {"TF_USE_LEGACY_KERAS": "1"}, ""),
    ],
)
def test_keras_2_is_refused(tmp_path: Path, source: str, variables: dict[str, str], who: str) -> None:
    (tmp_path / "a.py").write_text(source + "print('ran')")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "-n", "1", "a.py"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == (2 if who else 0)
    assert (f"lockstep: ConfigError: {who} sets TF_USE_LEGACY_KERAS=" in done.stderr) == bool(who)
    assert (tmp_path / "runs").exists() != bool(who)
