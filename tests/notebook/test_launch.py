"""The results and errors of `lockstep.launch`; no process of it remains."""

import linecache
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import lockstep
from lockstep.errors import InputError, JobError, UnfitError
from lockstep.worker import job

HERE = Path(__file__).parent
PATIENCE = 300.0


@pytest.fixture(autouse=True)
def _new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Workers cannot import the modules of tests: functions are pickled by value, as those of a notebook.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def cell(source: str) -> Any:
    """Return the function `f` of code without a file, as in a notebook's cell."""
    name = "/nowhere/cell.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), variables)
    return variables["f"]


def test_launch_returns_the_chiefs_result_and_shows_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A function cannot run once more beside its job.
    monkeypatch.setenv("LOCKSTEP_WITNESS", "first")
    monkeypatch.setenv("A_TOKEN", "unrecorded")

    def train(array: Any, *, times: int) -> Any:
        import os

        print("out", job.current().worker)
        os.write(2, "err \u00e9\n".encode())
        me, variables = job.current(), (os.environ["COLOR"], os.environ["A_TOKEN"])
        return array * times, me.worker, me.view.replicas, sys.argv[1:], Path.cwd(), variables

    array = np.arange(100_000.0)
    result, *others = lockstep.launch(
        train,
        (array,),
        {"times": 3},
        replicas=4,
        seed=7,
        input="joint",
        env={"COLOR": "light=blue", "A_TOKEN": None},
        tags=["a", "b=2"],
    )
    shown = capsys.readouterr()
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "comparison.json").exists()
    assert result.tobytes() == (array * 3).tobytes()
    assert others == [0, 4, [], tmp_path, ("light=blue", "unrecorded")]
    kept = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert any(b'"env":{"COLOR":"light=blue","A_TOKEN":null}' in text for text in kept)
    assert any(b'"tags":["a","b=2"]' in text for text in kept)
    assert not any(b"unrecorded" in text for text in kept)
    assert shown.out == "out 0\n"
    # On a busy machine, the terminal also says how far workers are.
    lines = shown.err.splitlines()
    first, second, *rest = [line for line in lines if "before the first step" not in line]
    assert first.startswith("lockstep: 2 workers, 4 replicas (")
    assert "seed 7 unless the script sets one; each worker reads all input; on JAX, because KERAS" in second
    assert first.endswith(f"; logs in runs/{run.name}")
    assert rest[0] == "err \u00e9"
    assert re.fullmatch(r"train-\d{8}-\d{6}", run.name)
    assert set((run / "worker-1.log").read_text().splitlines()) == {"out 1", "err \u00e9"}


def test_an_error_in_the_function_is_a_job_error() -> None:
    function = cell(
        "def f():\n    from lockstep.worker import job\n    return 1 / (1 - job.current().worker)\n"
    )
    with pytest.raises(JobError) as caught:
        lockstep.launch(function, run_dir="run")
    message = "worker 1 exited with status 1: ZeroDivisionError: division by zero; log: run/worker-1.log"
    assert str(caught.value) == f"{message}\n\n{caught.value.traceback}"
    assert caught.value.worker == 1
    assert re.fullmatch(
        r"Traceback \(most recent call last\):\n"
        r'  File "/nowhere/cell.py", line 3, in f\n'
        r"    return 1 / \(1 - job.current\(\).worker\)\n"
        r"[ ~^]*\n?"
        r"ZeroDivisionError: division by zero\n",
        caught.value.traceback,
    )


@pytest.mark.parametrize(
    ("body", "message", "worker"),
    [
        ("os.kill(os.getpid(), 9)", "worker 0 was killed by SIGKILL; log: run/worker-0.log", 0),
        ("os._exit(3)", "worker 0 exited with status 3; log: run/worker-0.log", 0),
        ("sys.exit()", "no worker returned a result: the function called sys.exit; logs in run", None),
    ],
)
def test_a_function_that_does_not_return_is_a_job_error(body: str, message: str, worker: int | None) -> None:
    with pytest.raises(JobError) as caught:
        lockstep.launch(cell(f"def f():\n    import os, sys\n    {body}\n"), workers=1, run_dir="run")
    assert (str(caught.value), caught.value.worker) == (message, worker)


def test_the_error_is_that_of_the_last_run_in_a_folder() -> None:
    for body in ("1 / 0", "[][1]"):
        with pytest.raises(JobError) as caught:
            lockstep.launch(cell(f"def f(): {body}\n"), workers=1, run_dir="run")
    assert "IndexError" in caught.value.traceback


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(JobError, match="InputError: the function returned generator, which cannot be"):
        lockstep.launch(cell("def f(): return (x for x in ())"), workers=1)


def test_launch_in_a_worker_is_refused() -> None:
    with pytest.raises(JobError, match=r"ConfigError: lockstep\.launch cannot be called in a worker"):
        lockstep.launch(lambda: lockstep.launch(print), workers=1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"workers": 0}, "Invalid value for '-n' / '--workers': 0 is not in the range 1<=x<=4096."),
        ({"run_dir": ""}, "Invalid value for '--run-dir': the path is empty; name a folder"),
        ({"run_dir": "s3://b/a"}, "lockstep.launch, run_dir='s3://b/a': give a folder of this machine"),
        ({"run_dir": "a\0b"}, r"lockstep.launch, '--run-dir=a\x00b': it contains a null character"),
        ({"checkpoint": "\udcff"}, r"b'\xff' is not UTF-8"),
        ({"workers": 2, "replicas": 1}, "2 workers cannot share 1 replicas: "),
        ({"input": "jointly"}, "Invalid value for '--input': 'jointly' is not one of 'divided', 'joint'."),
        ({"backend": "theano"}, "Invalid value for '--backend': 'theano' is not one of"),
        ({"env": {"A=B": "1"}}, "lockstep.launch, env: 'A=B' is not the name of a variable"),
        ({"env": {"A": 1}}, "lockstep.launch, env: the value of A is of type int; give a string, or None "),
        ({"env": {"A_TOKEN": "x"}}, "--env A_TOKEN=...: the value would be recorded, and the name says"),
        ({"env": {"UNSET": None}}, "--env UNSET: set the variable here first"),
        ({"tags": "quick"}, "lockstep.launch, tags='quick': give a list of strings"),
        ({"tags": ["a,b"]}, "Invalid value for '--tag': 'a,b': give 1 to "),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: Any, error: str) -> None:
    with pytest.raises(InputError, match=re.escape(error)):
        lockstep.launch(print, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_module_in_the_current_folder_does_not_hide_a_dependency() -> None:
    Path("msgspec.py").write_text("raise SystemExit('wrong')")
    # Only Lockstep's own command can say so.
    with pytest.raises(InputError, match="0 is not in the range"):
        lockstep.launch(print, workers=0)


lock = threading.Lock()


def uses_a_lock() -> Any:
    return lock


def uses_it_within() -> Any:
    return [uses_a_lock() for _ in range(2)]


def holds_a_lock() -> Callable[[], Any]:
    held = threading.Lock()
    return lambda: held


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (uses_a_lock, (), "lock, which uses_a_lock uses, of type lock ("),
        (uses_it_within, (), "uses_a_lock -> lock, which uses_it_within uses, of type lock ("),
        (holds_a_lock(), (), "held, which <lambda> uses, of type lock ("),
        (lambda x=lock: x, (), "a default, which <lambda> uses, of type lock ("),
        (lock.acquire, (), "acquire ("),
        (print, (1, lock), "args[1], of type lock ("),
    ],
)
def test_values_that_cannot_be_pickled_are_named(function: Any, args: tuple[Any, ...], name: str) -> None:
    expected = re.escape(f"lockstep.launch cannot send this to its workers: {name}")
    with pytest.raises(InputError, match=f"^{expected}TypeError: cannot pickle"):
        lockstep.launch(function, args)


def test_missing_cloudpickle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UnfitError, match=re.escape("pip install 'keras-lockstep[notebook]'")):
        lockstep.launch(print)


STAY = """
import os, signal, subprocess, sys
def f():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    announcements = os.open("announcements", os.O_WRONLY)
    os.write(announcements, f"{os.getpid()} {child.pid} {os.getppid()}\\n".encode())
    signal.pause()
"""


class StartedProcesses:
    """Receives from two workers that run `STAY` the process ids of each, its child and its agent."""

    def __init__(self) -> None:
        os.mkfifo("announcements")
        self._pending = os.open("announcements", os.O_RDWR)

    def wait(self) -> list[int]:
        text = b""
        while text.count(b"\n") < 2:
            assert select.select([self._pending], [], [], PATIENCE)[0]
            text += os.read(self._pending, 4096)
        os.close(self._pending)
        return [os.pidfd_open(int(pid)) for pid in text.split()]


def all_end(pidfds: list[int]) -> bool:
    return all(select.select([pidfd], [], [], PATIENCE)[0] for pidfd in pidfds)


def test_an_interrupt_ends_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    started, processes = StartedProcesses(), list[int]()

    def interrupt() -> None:
        processes.extend(started.wait())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        lockstep.launch(cell(STAY))
    thread.join()
    # The command ends last.
    assert all(select.select([pidfd], [], [], 0)[0] for pidfd in processes)
    assert "lockstep: stopped by SIGINT" in capsys.readouterr().err


def test_no_process_remains_after_a_killed_caller() -> None:
    started = StartedProcesses()
    Path("caller.py").write_text(f"import lockstep\n{STAY}\nlockstep.launch(f)\n")
    caller = subprocess.Popen([sys.executable, "caller.py"], stderr=subprocess.DEVNULL)
    processes = started.wait()
    caller.kill()
    caller.wait()
    assert all_end(processes)


@pytest.mark.ci
@pytest.mark.usefixtures("_compiled_once")
def test_the_bits_are_those_of_a_script_though_a_worker_is_lost(tmp_path: Path) -> None:
    script = str(HERE / "launched_training.py")

    def run(*command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=1200)

    alone = run(sys.executable, "-m", "lockstep", "run", "-n", "2", script)
    launched = run(sys.executable, script, "launch")
    assert (alone.returncode, launched.returncode) == (0, 0), alone.stderr + launched.stderr
    refused, figures, digest = launched.stdout.splitlines()
    assert refused.startswith(
        "lockstep.launch cannot send this to its workers: strategy, which <lambda> uses, of type "
        "MultiWorkerMirroredStrategy ("
    )
    assert figures == "1 4 ['loss']"
    assert "worker 0 was killed by SIGKILL; worker 1 continues" in launched.stderr
    assert "worker 2 joined (2 workers)" in launched.stderr
    assert [digest] == alone.stdout.splitlines()
