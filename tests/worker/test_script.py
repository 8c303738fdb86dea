"""Scripts are found and run as by `python`."""

import contextlib
import re
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from tests.system.fake_nvml import LOST, FakeNvml, h100

import lockstep
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DisagreementError,
    InternalError,
    LockstepError,
    ModelError,
    ScopeError,
)
from lockstep.system.cuda import Machine
from lockstep.system.nvml import Driver, Gpu, read
from lockstep.worker.script import (
    Script,
    device_memory_hint,
    gpu_hint,
    hide_internals,
    is_of_machine,
    keep_original,
    original_of,
    summarize,
    summarize_own,
)

SHOW = """
import sys
names = ["__name__", "__file__", "__package__", "__cached__", "__doc__"]
print({name: globals().get(name) for name in names}, sorted(globals()))
print(__spec__ and __spec__.name, type(__loader__).__name__, sys.argv, sys.path[0])
print(sys.modules["__main__"].__dict__ is globals())
"""
RUN = "import sys; from lockstep.worker.script import Script; Script.parse(sys.argv[1:]).run()"


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('package')\n")
    for name in ("__main__", "train"):
        (package / f"{name}.py").write_text(SHOW)
    (tmp_path / "link.py").symlink_to(package / "train.py")
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["package/train.py"],
        ["package/train.py", "-n", "3", "--", "x"],
        ["link.py"],
        ["-m", "package.train", "-m", "x"],
        ["-m", "package"],
    ],
)
def test_a_script_has_the_environment_of_python(arguments: list[str], folder: Path) -> None:
    assert run(["-P", "-c", RUN, *arguments], folder) == run(arguments, folder)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script("nix.py", False), "there is no script nix.py (looked in {cwd})"),
        (Script("data", False), "data is a folder, not a Python script"),
        (Script("nix", True), "-m nix: there is no module 'nix' here or installed"),
        (Script("package.nix", True), "-m package.nix: there is no module 'package.nix' here or installed"),
        (Script("json.tool.x", True), "-m json.tool.x: there is no module 'json.tool.x' here or installed"),
        (
            Script("email", True),
            "-m email: it is a package without a module `__main__`; name one of its modules",
        ),
        (Script("math", True), "-m math: it has no Python code to run"),
    ],
)
def test_a_missing_script_is_named(
    script: Script, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    expected = message.format(cwd=folder)
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        script.check()


def test_checking_imports_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Script("package.train", True).check()
        Script("package", True).check()
    assert capsys.readouterr().out == ""
    assert "package" not in sys.modules


def broken() -> BaseException:
    error = ValueError("no good\nat all")
    error.add_note("by the way")
    return error


OF_A_GRAPH = """Graph execution error:

Detected at node PyFunc defined at (most recent call last):
  File "script.py", line 1, in <module>

2 root error(s) found.
the innermost cause
\t [[{{node PyFunc}}]]
0 successful operations.
0 derived errors ignored. [Op:__inference_step_1]"""


OF_A_LAYER = """Exception encountered when calling Widen.call().

\x1b[1mthe shapes
do not fit\x1b[0m

Arguments received by Widen.call():
  • x=Tensor(shape=(3, 4))"""

CONVERTED = """in user code:

    File "train.py", line 3, in prepare  *
        return widen(x)

    ValueError: Exception encountered when calling Widen.call().

    \x1b[1mno tensor\x1b[0m

    Arguments received by Widen.call():
"""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (broken(), "ValueError: no good"),
        (TypeError(OF_A_LAYER), "TypeError: Exception encountered when calling Widen.call(). the shapes"),
        (ValueError(CONVERTED), "ValueError: Exception encountered when calling Widen.call(). no tensor"),
        (KeyError("k"), "KeyError: 'k'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ConfigError("x"), "lockstep.errors.ConfigError: x"),
        (SyntaxError("bad", ("f.py", 3, 1, "def (\n")), "SyntaxError: bad"),
        (RuntimeError(OF_A_GRAPH), "RuntimeError: Graph execution error: the innermost cause"),
    ],
)
def test_an_error_in_one_line(error: BaseException, text: str) -> None:
    assert summarize(error) == text


def raised(raises: str, *files: str) -> LockstepError:
    """Return the error raised in line 2 of the last of these files, whose functions call each other."""
    call: Any = lambda: None  # noqa: E731
    for number, file in enumerate(reversed(files)):
        found = {"call": call, "ModelError": ModelError, "ScopeError": ScopeError}
        does = "return call()" if number else raises
        exec(compile(f"def through():\n {does}", file, "exec"), found)
        call = found["through"]
    with pytest.raises(LockstepError) as caught:
        call()
    return caught.value


LIBRARY = f"{Path(pytest.__file__).parent}/trainer.py"
AGAIN = """
 try: raise ModelError("no such step; write another")
 except ModelError as error:
  raise ModelError(f"{begins}\\n\\n    File \\"/work/loss.py\\", line 7, in fn  *\\n    ModelError: {error}")
"""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            raised("raise ScopeError('not in it;\\n  write this')", "/work/a.py", "/work/b.py", LIBRARY),
            "ScopeError: not in it; write this (b.py:2)",
        ),
        (
            raised(AGAIN.replace("{begins}", "in user code:"), "/work/a.py", LIBRARY),
            "ModelError: no such step; write another (loss.py:7)",
        ),
        (
            raised(AGAIN.replace("{begins}", "Exception encountered when calling L.call()."), "/work/a.py"),
            "ModelError: no such step; write another (loss.py:7)",
        ),
        (ModelError("never raised"), "ModelError: never raised"),
    ],
)
def test_an_error_of_lockstep_in_one_line(error: LockstepError, text: str) -> None:
    assert summarize_own(error) == text


@pytest.mark.parametrize("script", [Script("a.py", False, ("-m", "x")), Script("a.b", True, ("-m", "x"))])
def test_parse_reads_the_command_line(script: Script) -> None:
    assert Script.parse(script.command_line) == script


def test_an_error_that_a_library_wraps_is_found() -> None:
    first, last = ModelError("no such step"), ModelError("no such loss")
    keep_original(first)
    keep_original(last)
    assert original_of(ValueError("in a graph: no such loss, in loss.py")) is last
    for other in (ValueError("in a graph: no such step"), ScopeError("no such loss")):
        assert original_of(other) is other


OURS = str(Path(lockstep.__file__).parent / "keras" / "fit" / "x.py")
KERAS = "/env/lib/python3.12/site-packages/keras/src/callbacks/callback_list.py"
JAX = "/env/lib/python3.12/site-packages/jax/_src/api.py"
PROGRAM = "/home/me/train.py"


def raised_through(*files: str) -> Exception:
    """Return an error that was raised through functions of these files, the innermost last."""
    call: Any = None
    for file in reversed(files):
        names = {"call": call}
        body = "raise ValueError" if call is None else "call()"
        exec(compile(f"def outer():\n    {body}", file, "exec"), names)
        call = names["outer"]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    error = caught.value
    assert error.__traceback__ is not None
    # Without the frame of this file.
    return error.with_traceback(error.__traceback__.tb_next)


def files_of(error: BaseException | None) -> list[str]:
    assert error is not None
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ((PROGRAM, OURS, KERAS, PROGRAM), [PROGRAM, PROGRAM]),
        ((PROGRAM, OURS, contextlib.__file__, OURS, KERAS, JAX), [PROGRAM, JAX]),
        ((PROGRAM, contextlib.__file__, PROGRAM), [PROGRAM, contextlib.__file__, PROGRAM]),
        # Perhaps a bug of Lockstep.
        ((PROGRAM, KERAS, OURS), [PROGRAM, KERAS, OURS]),
        ((OURS, KERAS), [KERAS]),
    ],
)
def test_a_traceback_has_no_frames_of_lockstep_and_keras(
    files: tuple[str, ...], shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = SimpleNamespace(is_traceback_filtering_enabled=lambda: True)
    monkeypatch.setitem(sys.modules, "keras", cast(ModuleType, SimpleNamespace(config=filters)))
    error = raised_through(*files)
    error.__context__ = raised_through(*files)
    error.__context__.__cause__ = error
    hide_internals(error)
    assert files_of(error) == files_of(error.__context__) == shown


def test_frames_of_keras_stay_if_the_program_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    filters = SimpleNamespace(is_traceback_filtering_enabled=lambda: False)
    monkeypatch.setitem(sys.modules, "keras", cast(ModuleType, SimpleNamespace(config=filters)))
    error = raised_through(PROGRAM, OURS, KERAS, PROGRAM)
    hide_internals(error)
    assert files_of(error) == [PROGRAM, KERAS, PROGRAM]


JaxRuntimeError = type("JaxRuntimeError", (RuntimeError,), {"__module__": "jaxlib._jax"})


@pytest.mark.parametrize(
    ("error", "of_machine"),
    [
        (ValueError("no"), False),
        (RuntimeError("no"), False),
        (DataError("batch 3 has no rows"), False),
        (DisagreementError("they differ"), False),
        (FileNotFoundError(2, "no such file"), True),
        (MemoryError(), True),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), True),
        (CheckpointError("the disk is full"), True),
        (InternalError("a bug"), True),
        (KeyboardInterrupt(), True),
    ],
)
def test_only_some_errors_can_be_of_a_machine(error: BaseException, of_machine: bool) -> None:
    assert is_of_machine(error) == of_machine


@pytest.mark.parametrize(
    ("error", "out_of_memory"),
    [
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."), True),
        (JaxRuntimeError("INTERNAL: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"), False),
        (type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})("CUDA out of memory."), True),
        (type("ResourceExhaustedError", (Exception,), {"__module__": "tensorflow.python"})("OOM"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: of the program"), False),
        (MemoryError(), False),
    ],
)
def test_an_error_of_device_memory_names_the_gpus_of_the_worker(
    error: BaseException, out_of_memory: bool
) -> None:
    hint = "; {} has too little free memory for this worker: use smaller batches, or fewer workers"
    on_gpu, on_cpu = (hint.format("GPU 2 or MIG-x") + " per GPU (--devices)", hint.format("the device"))
    assert device_memory_hint(error, ("2", "MIG-x")) == (on_gpu if out_of_memory else "")
    assert device_memory_hint(error, ()) == (on_cpu if out_of_memory else "")
    shared = on_gpu.replace("MIG-x has", "MIG-x, which 3 workers share, has")
    assert device_memory_hint(error, ("2", "MIG-x"), 3) == (shared if out_of_memory else "")


CUDA_ERROR = JaxRuntimeError("INTERNAL: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure")


def test_an_error_on_a_lost_gpu_names_it() -> None:
    """The driver says which one, because the errors of backends do not."""
    fake = FakeNvml(h100(0), LOST)
    machine = Machine(read(fake).gpus)
    hint = "; GPU 1: it has fallen off the bus (sudo dmesg | grep -i xid shows why)"
    assert gpu_hint(CUDA_ERROR, ("1",), lambda: machine) == hint
    assert gpu_hint(RuntimeError("CUDA error: unspecified launch failure"), ("1",), lambda: machine) == hint
    assert gpu_hint(CUDA_ERROR, ("0",), lambda: machine) == ""
    assert gpu_hint(CUDA_ERROR, (), lambda: machine) == ""
    assert gpu_hint(ValueError("a shape"), ("1",), lambda: machine) == ""


def test_a_driver_that_hangs_does_not_hold_up_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.worker.script._DRIVER_PATIENCE", 0.01)
    released = threading.Event()

    def hangs() -> Machine:
        released.wait()
        return Machine(())

    assert gpu_hint(CUDA_ERROR, ("1",), hangs) == "; NVIDIA's driver has not answered within 0.01 s"
    released.set()


def test_the_first_error_with_an_old_driver_has_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    monkeypatch.setattr("lockstep.worker.script.cuda_of", lambda name: "13" if name == "jax" else None)
    driver = Driver("535.104.05", (12, 2))
    error = RuntimeError("Unable to initialize backend 'cuda'")
    assert gpu_hint(error, ("0",), lambda: Machine((Gpu(0),), driver)) == (
        "; jax is built for CUDA 13, which the driver, 535.104.05, for CUDA up to 12.2, does not support: "
        "install a driver, 580.65.06 or newer, or a jax built for CUDA 12"
    )
