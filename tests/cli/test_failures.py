"""Workers that fail, exit early or hang: the job ends and names the worker and the reason."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import __version__
from lockstep.cli import main

FAIL = """
def deep():
    raise ValueError("no good")
if me == 1:
    deep()
barrier(what="the end")
"""
BLOCK = """
def blocked():
    os.read(os.pipe()[0], 1)
"""


def test_a_script_that_raises_on_one_worker_ends_the_job(lockstep: Any) -> None:
    done = lockstep.run(lockstep.script(FAIL))
    message = "worker 1 exited with status 1: ValueError: no good"
    tail = [f"  | {line}" for line in done.log(1).splitlines()]
    assert done.status == 1
    assert done.err.splitlines()[-len(tail) - 2 :] == [
        f"lockstep: {message}",
        *tail,
        "  log: run/worker-1.log",
    ]
    assert tail[0] == "  | Traceback (most recent call last):"
    assert tail[-1] == "  | ValueError: no good"
    # The chief only received the failure: its own traceback explains nothing.
    assert done.err.count("Traceback") == 1
    assert done.log(0).splitlines()[-1] == f"lockstep.errors.PeerLostError: {message}"
    assert [event["status"] for event in done.events() if event["event"] == "finished"] == [1]


def test_an_error_of_lockstep_is_one_line_with_its_traceback_in_the_log(lockstep: Any) -> None:
    text = "from lockstep.errors import ScopeError\ndef deep():\n    raise ScopeError('not in it')\ndeep()\n"
    done = lockstep.run("-n", "1", lockstep.script(text))
    raised = (
        (lockstep.folder / "script.py").read_text().split("\n").index("    raise ScopeError('not in it')")
    )
    assert (done.status, done.err.splitlines()[2:]) == (
        1,
        [
            f"lockstep: worker 0: ScopeError: not in it (script.py:{raised + 1})",
            "  log: run/worker-0.log",
            "  help: lockstep explain ScopeError",
        ],
    )
    assert "in deep\n" in done.log(0)
    assert done.log(0).endswith("\nlockstep.errors.ScopeError: not in it\n")
    hooked = lockstep.run("-n", "1", lockstep.script("sys.excepthook = lambda *_: print('hook')\n" + text))
    assert hooked.out == "hook\n"


def test_the_first_failure_decides_the_status(lockstep: Any) -> None:
    done = lockstep.run("-n", "3", lockstep.script("if me == 2: sys.exit(3)\nbarrier()"))
    assert done.status == 3
    assert done.notes == ["lockstep: worker 2 exited with status 3"]


def test_a_killed_worker_ends_the_job(lockstep: Any) -> None:
    text = "if me == 1: os.kill(os.getpid(), signal.SIGKILL)\nbarrier()"
    done = lockstep.run(lockstep.script(text))
    assert done.status == 137
    assert done.notes == ["lockstep: worker 1 was killed by SIGKILL"]


def test_the_end_of_a_long_log_is_shown(lockstep: Any) -> None:
    done = lockstep.run(lockstep.script("if me == 1:\n for n in range(100): print(n)\n sys.exit(9)"))
    shown = [line for line in done.err.splitlines() if line.startswith("  ")]
    assert shown == [*(f"  | {n}" for n in range(80, 100)), "  log: run/worker-1.log"]


def test_a_worker_that_exits_early_ends_the_job(lockstep: Any) -> None:
    done = lockstep.run(lockstep.script("if me == 1: sys.exit()\nbarrier(what='step 3')"))
    assert done.status == 1
    assert len(done.notes) == 1
    expected = r"lockstep: worker 1 exited with status 0 while worker 0 waited for it in .*step 3"
    assert re.fullmatch(expected, done.notes[0])


@pytest.mark.ci
def test_the_stack_of_a_stuck_worker_is_shown(lockstep: Any) -> None:
    # Both open this before one of them waits: the limit does not count the start of the other.
    os.mkfifo(lockstep.folder / "both")
    script = lockstep.script(
        BLOCK
        + "os.close(os.open('both', os.O_RDONLY if me == 1 else os.O_WRONLY))\n"
        + "if me == 1: blocked()\nbarrier(what='step 3')"
    )
    done = lockstep.run("--timeout", "1", script)
    assert done.status == 1
    note = r"lockstep: worker 1 did not reach .*step 3: worker 0 has waited \d+ s \(--timeout 1\)"
    assert len(done.notes) == 1
    assert re.fullmatch(note, done.notes[0])
    path = re.escape(str(lockstep.folder / "script.py"))
    shown = done.err.partition(done.notes[0] + "\n")[2]
    assert re.fullmatch(
        r"  worker 1 is here \(most recent call first\):\n"
        rf'    File "{path}", line \d+ in blocked\n'
        rf'    File "{path}", line \d+ in <module>\n'
        r"  log: run/worker-1.log\n",
        shown,
    )
    assert "in blocked" in (done.folder / "worker-1.stack").read_text()
    log = (done.folder / "worker-1.log").read_text()
    assert log.startswith("lockstep: worker 1 was here (most recent call first):\nFile ")
    assert "in blocked\n" in log
    assert "was here" not in (done.folder / "worker-0.log").read_text()
    assert not (done.folder / "worker-0.stack").exists()


@pytest.mark.ci
def test_a_stuck_worker_that_ignores_signals_is_killed(
    lockstep: Any, is_gone: Callable[[list[int], float], bool]
) -> None:
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nannounce('w')\nif me == 1: blocked()\nbarrier()"
    running = lockstep.start("--timeout", "1", lockstep.script(BLOCK + text))
    workers = running.announced(2)["w"]
    assert running.end().status == 1
    assert is_gone(workers, 0)


@pytest.mark.ci
def test_a_failure_ends_workers_that_compute_alone(lockstep: Any) -> None:
    text = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')))\nif me == 1: sys.exit(3)\nstay()"
    done = lockstep.run(lockstep.script(text))
    assert (done.status, done.out) == (3, "bye\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "ok.py"], "Invalid value for '-n' / '--workers': 0 is not in the range 1<=x<=4096."),
        (["--seed", "-1", "ok.py"], f"Invalid value for '--seed': -1 is not in the range 0<=x<={2**63 - 1}."),
        (
            ["--timeout", "0", "ok.py"],
            "Invalid value for '--timeout': 0.0 is not in the range 0<x<=1000000000.",
        ),
        (
            ["-n", "3", "--replicas", "2", "ok.py"],
            "ConfigError: 3 workers cannot share 2 replicas: a worker needs at least one; ask for 2 workers "
            "or fewer, or for 3 replicas or more",
        ),
        (["nix.py"], "ConfigError: there is no script nix.py (looked in {folder})"),
        (["-m", "nix"], "ConfigError: -m nix: there is no module 'nix' here or installed"),
        (
            ["--backend", "theano", "ok.py"],
            "Invalid value for '--backend': 'theano' is not one of 'jax', 'tensorflow', 'torch'.",
        ),
        (
            ["--devices", "0,1,2", "-n", "2", "ok.py"],
            "ConfigError: --devices has 3 entries for 2 workers: give one entry per worker, or a single one "
            "for all",
        ),
        (
            ["--devices", "gpu", "ok.py"],
            "ConfigError: --devices gpu: 'gpu' is not a GPU; give numbers or UUIDs such as 0,1 (one per "
            "worker) or 0+1,2+3 (two per worker)",
        ),
        (
            ["--run-dir", "ok.py", "ok.py"],
            "ConfigError: the run's folder ok.py cannot be used: File exists; give another --run-dir",
        ),
        ([], "Missing argument 'SCRIPT'."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_a_one_line_error(lockstep: Any, arguments: list[str], message: str) -> None:
    (lockstep.folder / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    lockstep.script("print('ran')", "ok.py")
    done = lockstep.run(*arguments, PYTHONPATH=str(lockstep.folder))
    expected = message.format(folder=lockstep.folder, python=sys.executable)
    assert (done.status, done.out, done.err) == (2, "", f"lockstep: {expected}\n")
    assert not done.folder.exists()


def test_a_refused_run_leaves_no_folder(lockstep: Any) -> None:
    command = [sys.executable, "-m", "lockstep", "run", lockstep.script("")]
    environment = {**os.environ, "KERAS_BACKEND": "theano"}
    done = subprocess.run(command, cwd=lockstep.folder, env=environment, capture_output=True, text=True)
    expected = "lockstep: ConfigError: KERAS_BACKEND=theano: expected one of jax, tensorflow, torch\n"
    assert (done.returncode, done.stderr) == (2, expected)
    assert not (lockstep.folder / "runs").exists()


def test_the_worker_module_cannot_be_started_by_hand() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    command = [sys.executable, "-m", "lockstep.launcher.worker_main", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    expected = (
        "lockstep: ConfigError: LOCKSTEP_WORKER is not set: workers are started by `lockstep run`, "
        "not by hand\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "stdout cannot be written: No space left on device",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "the system refuses an operation: Too many open files",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "bin/python"), "bin/python: Permission denied"),
    ],
)
def test_an_error_of_the_system_is_one_line_with_its_subject(
    error: OSError, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(main, "cli", fail)
    monkeypatch.setattr(main, "discard_stdout", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert capsys.readouterr().err == f"lockstep: {line}\n"


def test_a_job_whose_interpreter_cannot_be_executed_says_so_without_an_error_number(tmp_path: Path) -> None:
    (tmp_path / "main.py").touch()
    code = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "sys.executable, sys.argv = '/dev/null', ['lockstep', 'run', '-n', '1', 'main.py']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "lockstep: /dev/null: Permission denied"
    assert not (tmp_path / "runs").exists()


def test_version() -> None:
    def show(*arguments: str) -> str:
        command = [sys.executable, "-m", "lockstep", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert show("--version") == f"lockstep {__version__}\n"


def test_a_worker_may_find_a_folder_that_another_worker_created(lockstep: Any) -> None:
    making = lockstep.script(
        "if me:\n    barrier()\nos.makedirs('out')\nif me == 0:\n    barrier()\n    barrier()\n"
    )
    done = lockstep.run("-n", "2", making)
    assert done.status == 1
    failed = (
        "worker 1 exited with status 1: FileExistsError: [Errno 17] File exists: 'out'; every worker runs"
    )
    assert f"{failed} this line, and another one may have created it: pass exist_ok=True, or" in done.err
    alone = lockstep.run("-n", "1", making, run="alone")
    assert "FileExistsError: [Errno 17] File exists: 'out'" in alone.err
    assert "every worker" not in alone.err
    of_library = lockstep.script(
        "class StepExists(FileExistsError): ...\nraise StepExists('step 3 exists')\n"
    )
    done = lockstep.run("-n", "2", of_library, run="library")
    assert "StepExists: step 3 exists" in done.err
    assert "every worker" not in done.err
