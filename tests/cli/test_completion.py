"""Completion in a real bash, through the script that click generates."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.admin_socket import address

_ASK = """
eval "$(_LOCKSTEP_COMPLETE=bash_source lockstep)"
complete -p lockstep
ask() {
    COMP_WORDS=(lockstep "$@"); COMP_CWORD=$#; COMPREPLY=()
    # Outside of a completion, there are no options of it to change.
    compopt() { echo "compopt $1 $2"; }
    _lockstep_completion lockstep "${@: -1}"
    printf '%s\\n' "${COMPREPLY[@]}" --
}
"""
_LOADED = """
import atexit, sys
from lockstep.cli.main import main
sys.argv = ["lockstep"]
heavy = {"asyncio", "cryptography", "jax", "keras", "multiprocessing", "numpy", "rich", "tensorflow", "torch"}
atexit.register(lambda: print("loaded:", sorted(heavy & set(sys.modules))))
main()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds the command."""
    command = tmp_path / "bin" / "lockstep"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lockstep "$@"\n')
    command.chmod(0o755)
    return os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"}


def completed(folder: Path, environment: dict[str, str], *lines: str) -> list[list[str]]:
    """Return what bash completes for each line, whose last word may be empty."""
    asks = "".join(f"ask {line}\n" for line in lines)
    done = subprocess.run(
        ["bash", "--norc", "-c", _ASK + asks],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *answers = done.stdout.splitlines()
    assert first == "complete -o nosort -F _lockstep_completion lockstep"
    found: list[list[str]] = [[]]
    for line in answers:
        if line == "--":
            found.append([])
        else:
            found[-1].append(line)
    return found[:-1]


def test_commands_and_options(tmp_path: Path, environment: dict[str, str]) -> None:
    commands, option, values = completed(tmp_path, environment, "s", "run --rep", "run --backend ''")
    assert commands == ["scale", "stop"]
    assert option == ["--replicas"]
    assert values == ["jax", "tensorflow", "torch"]


def test_jobs_and_runs(lockstep: Any, environment: dict[str, str], request: pytest.FixtureRequest) -> None:
    name = f"completion-{os.getpid()}-{request.node.name}"
    (lockstep.folder / "runs" / f"{name}-ended").mkdir(parents=True)
    (lockstep.folder / "runs" / f"{name}-ended" / "events.jsonl").touch()
    (lockstep.folder / "runs" / f"{name}-other").mkdir()
    running = lockstep.start("-n", "1", lockstep.script("announce('worker'); stay()"), run=name)
    for pidfd in running.announced(1)["worker"]:
        os.close(pidfd)
    # A job that is stopped replies to no request, and another one accepts no more connections.
    os.kill(running.agent(), signal.SIGSTOP)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as full,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        full.bind(address(f"{name}-full"))
        full.listen(0)
        client.connect(address(f"{name}-full"))
        start = name[:-1]
        scale, stop, logs, folder, script, module = completed(
            lockstep.folder,
            environment,
            f"scale {start}",
            f"stop {start}",
            f"logs -f {start}",
            "logs ./none",
            "run -n 2 scr",
            "run -m scr",
        )
    os.kill(running.agent(), signal.SIGCONT)
    running.process.send_signal(signal.SIGTERM)
    assert running.end().status == 143
    jobs = [name, f"{name}-full"]
    assert scale == stop == jobs
    assert logs == [*jobs, f"{name}-ended"]
    assert folder == ["compopt -o dirnames"]
    assert script == ["compopt -o default"]
    assert module == []


def test_completing_loads_little(tmp_path: Path) -> None:
    variables = {"_LOCKSTEP_COMPLETE": "bash_complete", "COMP_WORDS": "lockstep stop ", "COMP_CWORD": "2"}
    line = [sys.executable, "-c", _LOADED]
    done = subprocess.run(
        line, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout.splitlines()[-1], done.stderr) == ("loaded: []", "")
