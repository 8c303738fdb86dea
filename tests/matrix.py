"""Runs the core tests with other versions of Python and the libraries: matrix.py [CORNER...]

A corner is a name in CORNERS, or pins with commas between them, such as `keras==3.16.0,jax==0.10.2`; what
is not pinned is the newest that pip finds. `python==3.12` runs the corner on the first `python3.12` of PATH,
and other corners run on the Python of this process. Each corner is installed into its own environment in
`.matrix`, which is deleted if its tests pass. Without arguments, all of CORNERS. The status is 1 if a corner
fails. In "newest", Keras's own tests run too (`keras_suite.py`).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
FOLDER = HERE / ".matrix"
CORNERS = {
    "oldest": "",
    "keras-3.12": "keras==3.12.*,torch==2.13.*",
    "keras-3.13": "keras==3.13.*,jax==0.8.*,tensorflow-cpu==2.20.*,torch==2.8.*,numpy==2.0.*",
    "keras-3.14": "keras==3.14.*,jax==0.9.*,tensorflow-cpu==2.20.*,torch==2.10.*,numpy==2.2.*",
    "old-backends": "jax==0.7.0,tensorflow-cpu==2.19.0,torch==2.6.0",
    "newest": "",
    "python-3.12": "python==3.12,torch==2.13.*",
    "python-3.13": "python==3.13,torch==2.13.*",
}
"""Pins of each corner. Those of "oldest" are all lower bounds in `pyproject.toml`."""
CORE = ["invariance", "tensorflow", "torch", "fused", "patches", "private_parts", "jax", "visits"]
"""Files of `tests/training`: equal bits, the bits of plain Keras, and the private parts of all libraries."""
REST = ["cli", "protocol", "transport", "checkpoint", "hosts"]
"""Folders with tests of the other dependencies, and of processes and connections.

For "oldest", and for corners with another Python; `make test` has the newest versions.
"""
EXTRAS = "jax,torch,demo,test,tensorboard,kubernetes,hosts,ray,notebook"
SHOWN = ("keras", "jax", "tensorflow-cpu", "torch", "numpy")
UNSET = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""Variables that tests of a corner do not get: other packages, and that no compiled modules are kept."""
VERSIONS = (
    "import json, platform, importlib.metadata as m; "
    f"print(json.dumps([platform.python_version()] + [m.version(name) for name in {SHOWN}]))"
)


class Outcome(NamedTuple):
    """The versions of a corner, Python's first, and its failed tests, or why there are none."""

    versions: list[str]
    faults: list[str]
    minutes: float


def lower_bounds() -> list[str]:
    """The oldest version of each dependency, and of each extra but those of developers."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in EXTRAS.split(","))]
    return sorted({one.replace(">=", "==") for requirements in lists for one in requirements})


def interpreter(version: str) -> str | None:
    """Return the first interpreter of a version, such as "3.12", on PATH; None if there is none."""
    shown = "import sys; print('%d.%d' % sys.version_info[:2])"
    for folder in os.get_exec_path():
        python = Path(folder, f"python{version}")
        # There may be commands that only choose an interpreter, and fail if it is not installed.
        if os.access(python, os.X_OK):
            done = subprocess.run([python, "-c", shown], capture_output=True, text=True)
            if done.stdout.strip() == version:
                return str(python)
    return None


def install(python: str, folder: Path, pins: list[str], log: Path) -> str | None:
    """Create the environment of a corner, or update that of a failed one; return why that is impossible."""
    constraints = log.with_name(f"{folder.name}.txt")
    constraints.write_text("".join(f"{pin}\n" for pin in pins))
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--upgrade", "--upgrade-strategy", "eager", "--constraint", constraints]
    with log.open("w") as file:
        for command in ([python, "-m", "venv", folder], [*pip, "--editable", f".[{EXTRAS}]"]):
            if subprocess.run(command, cwd=HERE, stdout=file, stderr=subprocess.STDOUT).returncode:
                errors = [line for line in log.read_text().splitlines() if line.startswith("ERROR")]
                return errors[0] if errors else "cannot be installed"
    return None


def tested(name: str, pins: list[str]) -> Outcome:
    """Install a corner and run its tests."""
    began, folder, log = time.monotonic(), FOLDER / name, FOLDER / f"{name}.log"
    version = next((pin.removeprefix("python==") for pin in pins if pin.startswith("python==")), "")
    chosen = interpreter(version) if version else sys.executable
    pins = [pin for pin in pins if not pin.startswith("python==")]
    fault = install(chosen, folder, pins, log) if chosen else f"there is no python{version} on PATH"
    if fault:
        return Outcome([""] * (1 + len(SHOWN)), [fault], (time.monotonic() - began) / 60)
    python = folder / "bin/python"
    versions = json.loads(subprocess.check_output([python, "-c", VERSIONS]))
    files = [f"tests/training/test_{one}.py" for one in CORE]
    files += [f"tests/{one}" for one in REST if name == "oldest" or version]
    command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    command += ["--max-worker-restart", "0", "-p", "no:cacheprovider", "-m", "not slow", *files]
    variables = {name: value for name, value in os.environ.items() if name not in UNSET}
    variables |= {"BACKENDS": "all", "PATH": f"{python.parent}:{variables['PATH']}"}
    commands = [command, [python, "tests/keras_suite.py"]] if name == "newest" else [command]
    with log.open("a") as file:
        statuses = [
            subprocess.run(one, cwd=HERE, env=variables, stdout=file, stderr=subprocess.STDOUT).returncode
            for one in commands
        ]
    found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read_text(), re.MULTILINE)
    faults = found if found or not any(statuses) else [f"the tests ended with status {statuses}"]
    if not faults:
        shutil.rmtree(folder)
    return Outcome(versions, faults, (time.monotonic() - began) / 60)


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(*names: str) -> int:
    unknown = [name for name in names if name not in CORNERS and "==" not in name]
    if unknown:
        print(f"unknown corners: {', '.join(unknown)}; known are {', '.join(CORNERS)}, and pins with commas")
        return 2
    FOLDER.mkdir(exist_ok=True)
    outcomes = {}
    for name in names or tuple(CORNERS):
        pins = lower_bounds() if name == "oldest" else CORNERS.get(name, name).split(",")
        print(f"{name} ...", flush=True)
        outcomes[name] = outcome = tested(name, [pin for pin in pins if pin])
        for fault in outcome.faults:
            print(f"  {fault}", flush=True)
    print()
    print(row(["corner", "Python", *SHOWN, "result", "minutes"]))
    print(row(["---"] * (4 + len(SHOWN))))
    for name, (versions, faults, minutes) in outcomes.items():
        result = f"{len(faults)} failed, see .matrix/{name}.log" if faults else "passed"
        if not versions[0]:
            result = f"not installed: {faults[0]}"
        print(row([name, *versions, result, f"{minutes:.1f}"]))
    return 1 if any(outcome.faults for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
