"""Runs Keras's own tests of training under `lockstep run`: keras_suite.py [BACKEND...] [FILE...]

The tests are those in the wheel of the installed Keras: of `fit`, `evaluate` and `predict`, of callbacks, and
of the trainer on JAX. With files as arguments, the tests in these instead, such as those of custom steps,
`integration_tests/*_custom_fit_test.py`, which are only in Keras's repository. One job runs them with one
replica, another with two, on each installed backend, or on some.

Tests that fail are listed in `keras_suite.toml`, each with the reason. The status is 1 if another one fails,
or if one of these passes everywhere.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

BACKENDS = ("jax", "tensorflow", "torch")
REPLICAS = (1, 2)
PATTERNS = ("trainers/trainer_test.py", "callbacks/*_test.py", "backend/jax/trainer_test.py")
KNOWN = Path(__file__).with_suffix(".toml")
PROGRAM = """\
import sys, types
import keras, pytest

def skip_if_backend(backend, reason):
    return pytest.mark.skipif(keras.config.backend() == backend, reason=reason)

# Some files import this function from the `conftest.py` of Keras's repository.
sys.modules["conftest"] = types.SimpleNamespace(skip_if_backend=skip_if_backend)
sys.exit(pytest.main(sys.argv[1:]))
"""


def copies(files: list[Path], folder: Path) -> list[Path]:
    """Copy the files of tests, or those of Keras: its own modules do not count as parts of a program."""
    spec = importlib.util.find_spec("keras")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "src")
    names = {path: path.name for path in files}
    for pattern in () if files else PATTERNS:
        found = sorted(source.glob(pattern))
        assert found, f"this version of Keras has no {source / pattern}"
        names |= {path: "_".join(path.relative_to(source).parts) for path in found}
    return [Path(shutil.copyfile(path, folder / name)) for path, name in names.items()]


def outcomes(backend: str, replicas: int, files: list[Path], folder: Path) -> tuple[set[str], set[str]]:
    """Run the tests in one job; return those that passed and those that failed."""
    program, log = folder / "program.py", folder / f"{backend}-{replicas}.log"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "lockstep", "run", "--backend", backend, "-n", "1"]
    command += ["--replicas", str(replicas), program, "-rfEp", "--tb=short", "-p", "no:cacheprovider"]
    # Without the options of any project; Keras marks tests for its own runs.
    command += ["-c", os.devnull, "--rootdir", folder, "-W", "ignore", *files]
    with log.open("w") as file:
        status = subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT).returncode
    lines = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", log.read_text(), re.MULTILINE)
    passed = {test for result, test in lines if result == "PASSED"}
    failed = {test for result, test in lines if result != "PASSED"}
    return passed, failed or ({f"no test failed, but the status is {status}"} if status else set())


def main(*arguments: str) -> int:
    files = [Path(one).resolve() for one in arguments if one.endswith(".py")]
    backends = [one for one in arguments if not one.endswith(".py")] or [
        one for one in BACKENDS if importlib.util.find_spec(one)
    ]
    if unknown := sorted({*backends} - {*BACKENDS}):
        print(f"unknown backends: {', '.join(unknown)}; known are {', '.join(BACKENDS)}")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="keras-suite-"))
    print(f"logs in {folder}", flush=True)
    files = copies(files, folder)
    known = tomllib.loads(KNOWN.read_text())["tests"]
    done: set[int] = set()
    failing: set[int] = set()
    new = 0
    for backend in backends:
        for replicas in REPLICAS:
            passed, failed = outcomes(backend, replicas, files, folder)
            print(
                f"{backend}, {replicas} {'replica' if replicas == 1 else 'replicas'}: {len(passed)} passed, "
                f"{len(failed)} failed",
                flush=True,
            )
            for i, entry in enumerate(known):
                if backend not in entry["backends"] or replicas not in entry["replicas"]:
                    continue
                listed = {test for test in failed if fnmatchcase(test, entry["test"])}
                failed -= listed
                failing |= {i} if listed else set()
                done |= {i} if any(fnmatchcase(test, entry["test"]) for test in passed) else set()
            new += len(failed)
            for test in sorted(failed):
                print(f"FAILED {backend}, {replicas} replicas: {test}", flush=True)
    stale = sorted(done - failing)
    for i in stale:
        print(f"FAILED {known[i]['test']} passes: remove it from {KNOWN.name}", flush=True)
    if new or stale:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
