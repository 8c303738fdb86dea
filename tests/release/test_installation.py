"""What README.md promises holds for the wheel in an empty environment, outside of the checkout."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ASKED = os.environ.get("BACKENDS", "all" if find_spec("torch") else "jax tensorflow")
BACKENDS = ["jax", "tensorflow", "torch"] if ASKED == "all" else ASKED.split()
INSTALLING, RUNNING = 1800.0, 600.0
"""Time limits, in seconds."""

RUN = "lockstep run -n 2"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "jax": (
        f"{RUN} augmentation.py",
        f"{RUN} autoencoder.py",
        f"{RUN} custom_loop_jax.py",
        "python demo.py",
        f"{RUN} digits.py --epochs 2",
        f"{RUN} evaluator.py evaluated --epochs 1",
        f"{RUN} forecast.py",
        f"{RUN} gan.py",
        f"{RUN} k_fold.py",
        f"{RUN} plain.py",
        f"{RUN} text.py",
        f"{RUN} two_hosts.py",
    ),
    "tensorflow": (
        f"{RUN} custom_loop_tensorflow.py saved",
        f"{RUN} hot_loop.py",
        f"{RUN} image_folder.py",
        f"{RUN} input_fn.py",
        "lockstep run --ps 2 -n 3 parameter_server.py",
        "lockstep run --ps 2 -n 3 parameter_server_loop.py",
        "python ray_autoencoder.py --epochs 1",
        "python ray_mnist.py --smoke-test",
        "python ray_regression.py",
    ),
    "torch": (f"{RUN} custom_loop_torch.py", f"{RUN} digits.py --epochs 2"),
}
"""Each example on one backend that it supports, as quickly as it can run."""
ELSEWHERE = {
    "lora.py": "needs KerasHub: tests/docs/test_gallery.py",
    "multi_worker.ipynb": "needs Jupyter: tests/notebook/test_notebook.py",
    "tutorial/main.py": "downloads MNIST",
    "tutorial/mnist.py": "downloads MNIST",
}


@dataclass(frozen=True)
class Installation:
    """An environment that has the wheel and one backend.

    Attributes:
        backend: its name.
        programs: the folder of its commands.
        place: the folder in which commands run; it has the examples.
    """

    backend: str
    programs: Path
    place: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment of commands, without anything of the checkout and of the tests."""
        return {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(self.place), "LANG": "C.UTF-8"}

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(self.programs / command[0]), *command[1:]],
            cwd=self.place,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=RUNNING,
        )


def install(programs: Path, *packages: str) -> None:
    """Install packages as this user's pip is configured, but without the checkout."""
    variables = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    command = [str(programs / "python"), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=INSTALLING)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=BACKENDS)
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Install the wheel with a backend as README.md says, where that says `.` for the checkout."""
    backend: str = request.param
    folder, place = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("place")
    shutil.copytree(
        ROOT / "examples", place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    extras = re.findall(rf"'\.(\[{backend},demo\])'", README)
    assert len(extras) == 1
    given = [f"{wheel}{extras[0]}"]
    if backend == "tensorflow":
        # The smaller distribution of README.md.
        assert "`pip install '.[demo]' tensorflow-cpu`" in README
        given = [f"{wheel}[demo]", "tensorflow-cpu"]
    elif backend == "torch" and find_spec("torch"):
        # The build of the tests, which may be for CPUs alone: others are larger by gigabytes.
        given.append(f"torch=={Version(version('torch')).public}")
    install(folder / "bin", *given)
    # An installed Lockstep gets more extras by its name.
    install(folder / "bin", *(f"keras-lockstep[{extra}]" for extra in ("hosts", "notebook")))
    if backend == "tensorflow":
        install(folder / "bin", "keras-lockstep[ray]")
    yield Installation(backend, folder / "bin", place)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def trained(installed: Installation) -> str:
    """Run the program of README.md with two workers, with its run folder `runs/two`; return the last line."""
    (program,) = re.findall(r"^```python\n(import keras\n.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (installed.place / "train.py").write_text(program)
    command = ["run", "--backend", installed.backend, "-n", "2", "--run-dir", "runs/two", "train.py"]
    run = installed.run("lockstep", *command)
    assert run.returncode == 0, run.stderr
    assert f"$ lockstep run --backend jax --replicas 2 -n 2 {command[-1]}" in README
    return run.stderr.splitlines()[-1]


def digest(last_line: str) -> str:
    (found,) = re.findall(r"digest ([0-9a-f]{64}) of model 'sequential'$", last_line)
    return str(found)


@pytest.mark.slow
def test_the_program_of_the_readme_computes_equal_bits(installed: Installation, trained: str) -> None:
    run = installed.run(*f"lockstep run --backend {installed.backend} --replicas 2 -n 1 train.py".split())
    assert run.returncode == 0, run.stderr
    assert ": 45 steps on 2 workers; " in trained
    assert ": 45 steps on 1 worker; " in run.stderr.splitlines()[-1]
    assert digest(run.stderr.splitlines()[-1]) == digest(trained)


@pytest.mark.slow
def test_the_package_is_the_installed_one(installed: Installation) -> None:
    run = installed.run("python", "-c", "import lockstep; print(lockstep.__file__)")
    assert Path(run.stdout.strip()).is_relative_to(installed.programs.parent), run.stderr


@pytest.mark.slow
def test_the_doctor_finds_everything_installed(installed: Installation) -> None:
    run = installed.run("lockstep", "doctor", "--json")
    found = json.loads(run.stdout)["findings"]
    # A busy machine may be slow, which is a warning.
    faults = [
        each
        for each in found
        if each["verdict"] == "failure" or (each["section"] == "versions" and each["verdict"] != "fine")
    ]
    assert not faults, json.dumps(faults, indent=1)
    (chosen,) = (each for each in found if each["name"] == "chosen backend")
    assert chosen["facts"]["backend"] == installed.backend
    assert any(each["section"] == "training" and "images/s" in each["reason"] for each in found)


@pytest.mark.slow
def test_a_program_launches_a_function_on_two_workers(installed: Installation) -> None:
    text = (ROOT / "docs" / "notebooks.md").read_text()
    (block,) = re.findall(r"^```python\n(def train.*?)^```$", text, re.DOTALL | re.MULTILINE)
    program = f"""\
import json
import os

os.environ["KERAS_BACKEND"] = {installed.backend!r}

import lockstep
from digits import build_and_compile_cnn_model, load_digits

(x, y), _ = load_digits()
{block}
print(json.dumps(result["loss"]), len(result["weights"]))
"""
    (installed.place / "launching.py").write_text(program)
    run = installed.run("python", "launching.py")
    assert run.returncode == 0, run.stderr
    (shown,) = re.findall(r"^(\[.*\]) (\d+)$", run.stdout, re.MULTILINE)
    losses = json.loads(shown[0])
    assert losses == sorted(losses, reverse=True)
    assert (len(losses), shown[1]) == (3, "6")


@pytest.mark.slow
@pytest.mark.usefixtures("trained")
def test_the_page_shows_the_run(installed: Installation) -> None:
    command = [str(installed.programs / "lockstep"), "ui", "runs"]
    process = subprocess.Popen(
        command, cwd=installed.place, env=installed.variables, stderr=subprocess.PIPE, text=True
    )
    with process, ExitStack() as stack:
        stack.callback(process.send_signal, signal.SIGINT)
        assert process.stderr is not None
        (address,) = re.findall(r"the page is at (\S+)", process.stderr.readline())
        parts = urlsplit(address)
        connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        stack.callback(connection.close)
        connection.request("GET", f"{parts.path}?{parts.query}")
        opened = connection.getresponse()
        opened.read()
        cookie = opened.headers["Set-Cookie"].partition(";")[0]

        def get(path: str) -> bytes:
            connection.request("GET", path, headers={"Cookie": cookie})
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            return body

        static = ROOT / "src" / "lockstep" / "monitoring" / "static"
        files = {path.name: path.read_bytes() for path in static.iterdir()}
        assert {name: get("/" if name == "index.html" else f"/{name}") for name in files} == files
        runs = json.loads(get("/api/runs"))["runs"]
        assert "two" in {run["id"] for run in runs}
        assert "summary" in json.loads(get("/api/run?run=two"))["parts"]
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("trained")
def test_other_commands_find_their_files(installed: Installation) -> None:
    for command in ("report runs/two", "trace runs/two --steps 1", "key job.key", "--version"):
        run = installed.run("lockstep", *command.split())
        assert run.returncode == 0, run.stderr
    assert "<script" in (installed.place / "report.html").read_text()


@pytest.mark.slow
def test_the_examples_run(installed: Installation) -> None:
    failed = {}
    for line in EXAMPLES[installed.backend]:
        run = installed.run(*line.split())
        if run.returncode:
            failed[line] = run.stderr[-3000:]
    assert not failed


def test_every_example_runs_here_or_elsewhere() -> None:
    examples = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("*.[pi]*")}
    run = {word for lines in EXAMPLES.values() for line in lines for word in line.split() if ".py" in word}
    assert {name for name in examples if "__pycache__" not in name} == run | set(ELSEWHERE)
