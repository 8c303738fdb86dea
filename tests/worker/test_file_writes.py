"""The files that are results of the program, and the lines that write them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lockstep
from lockstep.worker.file_writes import LibraryFolders, library_of, line_of_program

EFFECTS = """
import os, socket, subprocess, sys, tempfile
from pathlib import Path
from lockstep.worker.file_writes import LibraryFolders, refuse_effects

class Refused(Exception):
    pass

def refuse(what):
    raise Refused(what)

Path("old.csv").touch()
refuse_effects(LibraryFolders([Path("run").absolute()], Path("/nowhere"), Path.cwd()), refuse)

def with_temporary_folder():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "inner").mkdir()
        Path(folder, "inner", "old.csv").touch()
        os.rename(Path(folder, "inner", "old.csv"), Path(folder, "new.csv"))

acts = [
    lambda: open("out.csv", "w"),
    lambda: open("old.csv", "r+"),
    lambda: os.remove("old.csv"),
    lambda: os.rename("old.csv", "new.csv"),
    lambda: subprocess.run(["true"]),
    lambda: os.system("true"),
    lambda: socket.socket().connect(("192.0.2.1", 9)),
    lambda: socket.socket().connect(("127.0.0.1", 9)),
    lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9)),
    lambda: socket.socket(socket.AF_UNIX).connect("/nowhere/service"),
    lambda: os.posix_spawn("/bin/true", ["true"], {}),
    lambda: open("old.csv").close(),
    lambda: open("run/log", "w").close(),
    lambda: tempfile.TemporaryFile(dir="/tmp").close(),
    with_temporary_folder,
    lambda: os.makedirs("made", exist_ok=True),
]
for act in acts:
    try:
        act()
    except Refused as refused:
        print(str(refused).partition(" ")[2])
    else:
        print("allowed")
print(sorted(os.listdir(".")))
"""


def test_a_checked_program_changes_nothing_outside_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "program.py").write_text(EFFECTS)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines() == [
        "writes out.csv",
        "writes old.csv",
        "deletes old.csv",
        "renames old.csv",
        "starts a program",
        "starts a program",
        "connects to 192.0.2.1",
        "connects to 127.0.0.1",
        "connects to 127.0.0.1",
        "connects to /nowhere/service",
        "starts a program",
        *["allowed"] * 5,
        "['made', 'old.csv', 'program.py', 'run']",
    ], done.stderr


ERRORS = """
import errno, os, sqlite3
from pathlib import Path
from lockstep.worker import file_writes

os.access = lambda path, mode: not str(path).endswith("secret.npy")
can_restrict = {landlock}
file_writes.can_restrict = lambda: can_restrict
file_writes.refuse_effects(file_writes.LibraryFolders([], Path("/nowhere"), Path.cwd()), print)
Path("secret.npy").touch()
Path("old.csv").touch()

def denied(*path):
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), *path)

def connect(path, **options):
    try:
        sqlite3.connect(path, **options)
    except sqlite3.Error as error:
        return error

errors = [denied(), denied("old.csv"), denied("new.csv"), OSError("h5: Permission denied")]
print([file_writes.is_refused_write(error) for error in errors])
print([file_writes.is_refused_write(denied("secret.npy")), file_writes.is_refused_write(ValueError("no"))])
# Connecting to a folder fails as a refused creation does.
for path in ("missing/x.db", "file:missing/x.db?mode=rw", "."):
    print(file_writes.is_refused_write(connect(path, uri=True)))
"""


@pytest.mark.parametrize("landlock", [True, False])
def test_an_error_of_reading_is_not_a_refused_write(tmp_path: Path, landlock: bool) -> None:
    text = ERRORS.replace("{landlock}", str(landlock))
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    expected = [str([landlock] * 4), "[False, False]", "False", "False", str(landlock)]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.fixture
def places(tmp_path: Path) -> LibraryFolders:
    return LibraryFolders([tmp_path / "run"], tmp_path / "home", tmp_path / "home/.hidden/work")


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("results.csv", True),
        ("home/results.csv", True),
        ("home/.hidden/work/results.csv", True),
        ("home/.bashrc", True),
        ("home/.keras/datasets/mnist.npz", False),
        ("home/.other/a.csv", False),
        ("run/note", False),
        ("work/__pycache__/a.cpython-311.pyc", False),
        ("work/data.lock", False),
    ],
)
def test_files_of_the_program_and_of_libraries_are_distinguished(
    places: LibraryFolders, tmp_path: Path, path: str, own: bool
) -> None:
    assert places.are_not_the_program_s(str(tmp_path / path)) is not own


def test_the_home_of_a_container_may_be_the_root() -> None:
    places = LibraryFolders([], Path("/"), Path("/work"))
    assert places.are_not_the_program_s("/.cache/fonts.json")
    assert not places.are_not_the_program_s("/work/results.csv")


def test_only_regular_files_are_results(places: LibraryFolders, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (f"{tmp_path}/pipe", str(tmp_path), "/dev/null", "/proc/self/comm"):
        assert places.are_not_the_program_s(path)
    (tmp_path / "file").touch()
    assert not places.are_not_the_program_s(f"{tmp_path}/file")


def called_through(*files: str) -> FrameType:
    """Return the frame in line 2 of the last of these files, whose functions call each other in turn."""
    call: Callable[[], Any] = lambda: sys._getframe(1)  # noqa: E731
    for file in reversed(files):
        found: dict[str, Any] = {"call": call}
        exec(compile("def through():\n return call()", file, "exec"), found)
        call = found["through"]
    return call()  # type: ignore[no-any-return]


SCRIPT, HELPER = "/work/train.py", "/work/helper.py"
LIBRARY = f"{Path(pytest.__file__).parent}/image.py"
OURS = f"{Path(lockstep.__file__).parent}/keras/fit/callbacks.py"
IMPORT = "<frozen importlib._bootstrap>"


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ([SCRIPT], "train.py:2"),
        ([SCRIPT, LIBRARY, os.__file__], "train.py:2"),
        ([SCRIPT, HELPER, "<string>", LIBRARY], "helper.py:2"),
        # A callback of the program, and one of Keras, which Lockstep calls on one worker only.
        ([SCRIPT, OURS, HELPER], "helper.py:2"),
        ([SCRIPT, OURS, LIBRARY], None),
        # A library that writes a cache during its import, and a module of the program that writes.
        ([SCRIPT, IMPORT, LIBRARY], None),
        ([SCRIPT, IMPORT, HELPER], "helper.py:2"),
        (["<ipython-input-1-abc>", LIBRARY], "<ipython-input-1-abc>:2"),
    ],
)
def test_the_line_of_the_program_that_writes_is_found(files: list[str], line: str | None) -> None:
    assert line_of_program(called_through(*files)) == line


@pytest.mark.parametrize(
    ("files", "library"),
    [
        (("/work/train.py",), ""),
        (("/work/train.py", "/env/site-packages/tuner/engine.py"), "tuner"),
        (
            ("/work/train.py", "/env/site-packages/tuner.py", f"{Path(os.__file__).parent}/pathlib.py"),
            "tuner",
        ),
        (("/env/site-packages/tuner/engine.py", "/work/train.py"), ""),
    ],
)
def test_the_library_that_opens_a_file_for_a_line_is_found(files: tuple[str, ...], library: str) -> None:
    assert library_of(called_through(*files)) == library
