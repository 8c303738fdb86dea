"""Processes of one job read the source texts that the first of them read."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import lockstep
from lockstep.worker.program_sources import is_own

JOIN = """
import sys
from pathlib import Path
from lockstep.worker.script import Script
from lockstep.worker.program_sources import keep_sources, own_sources
keep_sources(Path(sys.argv[1]), lambda path, what: print("note", Path(path).name, what))
sys.argv[:] = sys.argv[2:]
Script.parse(sys.argv).run()
"""
TRAIN = """
import importlib, inspect, sys, traceback
from package import part
def later():
    import lazy, package.deep.inner
    return lazy.VALUE, package.deep.inner.VALUE
print("train 1", part.VALUE, part.beside(), later(), __file__)
print("config", importlib.util.spec_from_file_location("config", sys.argv[1]).loader.load_module().VALUE)
print(inspect.getsource(part.beside).strip())
try:
    part.fail()
except ZeroDivisionError:
    print(traceback.format_exc())
from lockstep.worker.program_sources import own_sources
print(sorted(own_sources().items()))
"""
PART = """
from .deep import VALUE
def beside():
    return 1
def fail():
    return 1 / 0  # the first text
"""


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", JOIN, str(folder / "kept"), *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def program(tmp_path: Path) -> Path:
    texts = {
        "train.py": TRAIN,
        "lazy.py": "VALUE = 1",
        "config.py": "VALUE = 1",
        "package/__init__.py": "",
        "package/part.py": PART,
        "package/deep/__init__.py": "VALUE = 1",
        "package/deep/inner.py": "VALUE = 1",
        "package/train.py": TRAIN,
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "kept").mkdir(mode=0o700)
    return tmp_path


@pytest.mark.parametrize("command", [("train.py", "config.py"), ("-m", "package.train", "config.py")])
def test_a_later_process_runs_the_sources_of_the_first(program: Path, command: tuple[str, ...]) -> None:
    """It also records their hashes, not those of the files that have changed since."""
    files = [path for path in program.rglob("*.py") if path.parent.name != "kept"]
    first = run(program, *command)
    assert str(program / ("package" if "-m" in command else "")) in first
    assert "line 6, in fail\n    return 1 / 0  # the first text" in first
    assert "note" not in first
    for text in (TRAIN, PART):
        assert hashlib.sha256(text.encode()).hexdigest() in first
    assert {path.stat().st_mode & 0o777 for path in (program / "kept").iterdir()} == {0o600}
    assert not list(program.rglob("__pycache__"))
    read = [path for path in files if path.stat().st_size or path.name == "__init__.py"]
    for path in read:
        path.write_text("raise AssertionError('another text')\n\n\n" + path.read_text())
    (program / "lazy.py").unlink()
    (program / "package" / "deep" / "inner.py").unlink()
    lines = run(program, *command).splitlines()
    said = [line for line in lines if line.startswith("note")]
    assert [line for line in lines if line not in said] == first.splitlines()
    assert "note train.py has changed; this worker uses the version that the job read first" in said
    assert {line.split()[1] for line in said} >= {"lazy.py", "part.py", "config.py", "inner.py"}


def test_a_source_that_cannot_be_saved_is_named_and_read(program: Path) -> None:
    (program / "train.py").write_text("print('ran')")
    (program / "kept").rmdir()
    first, *_, last = run(program, "train.py").splitlines()
    assert first.startswith("note train.py cannot be saved (No such file or directory)")
    assert last == "ran"


def test_sources_of_libraries_do_not_belong_to_the_program() -> None:
    assert not is_own(os.__file__)
    assert not is_own(pytest.__file__)
    assert not is_own(sys.modules["lockstep"].__file__ or "")
    assert not is_own("/tmp/__autograph_generated_file1.py")
    assert not is_own("h5py/h5f.pyx")
    assert is_own(__file__)


def test_the_variables_and_packages_that_sources_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "options.py").write_text(
        "import os\nfrom os import environ, getenv\n"
        "VALUES = [os.environ['A'], os.environ.get(\"B\"), getenv('C', 1), environ.setdefault( 'D', '1')]\n"
    )
    (tmp_path / "train.py").write_text(
        "import os, options\nimport numpy.linalg as la\n  # import msgspec, from a import b\n"
        "from lockstep.worker.program_sources import own_variables, package_versions\n"
        "print(sorted(own_variables()), 'E' in os.environ, package_versions())\n"
    )
    (tmp_path / "kept").mkdir()
    joined = JOIN.replace("import sys\n", "import os, sys\nos.environ['A'] = 'a'\n", 1)
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", joined, str(tmp_path / "kept"), "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    versions = {"lockstep": lockstep.__version__, "numpy": numpy.__version__}
    assert done.stdout == f"['A', 'B', 'C', 'D'] False {versions}\n"
