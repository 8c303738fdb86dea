"""A server that has imported Keras and a backend, and forks the commands of tests.

Importing takes as long as a small training, and each job imports again: its fork server does.
Here, one process imports for all commands of a test process. It forks each command, `python -m lockstep ...`
or `python script.py`, and in the process of a job, the fork server is one more fork, not a new interpreter:

    tests --- command server --- lockstep run --- process of the job --- fork server --- workers

A fork server is started as usual if its environment changes what imports do, compared with that of the
command server, or if its imports cannot be foreseen. All other processes are those of the product, with the
same parents, sessions and descriptors. `tests/launcher` and `tests/cli` test the usual start.
"""

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.launcher import fork_server, fork_server_main
from lockstep.protocol.fork import ForkServerSetup
from lockstep.system.environment import parent_told
from lockstep.worker.downloads import patch_get_file

IMPORTED_WITH = (
    *("CUBLAS_", "HIDDEN_PACKAGES", "JAX_", "JE_ARROW", "KERAS_BACKEND", "MALLOC_", "MKL_", "NPROC", "OMP_"),
    *("OPENBLAS_", "PYTHONHASHSEED", "PYTHONPATH", "PYTORCH_", "TF_", "TORCH_"),
)
"""Prefixes of the variables that can change what an import does. XLA's flags are read later."""
IMPORTS_OF_JOBS = (
    "lockstep.cli.main",
    "lockstep.launcher.fork_server_main",
    "lockstep.local_job.composition",
)
"""Modules that `lockstep run` imports, and the processes of a job."""
_LATER = ("TF_CONFIG",)
_PACKET = 1 << 20
_DESCRIPTORS = 1 << 16


def imported_with(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that can change what an import does."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(IMPORTED_WITH) and name not in _LATER
    }


class Command:
    """A command that a server has forked; like `subprocess.Popen` as far as tests need it."""

    def __init__(self, server: "CommandServer", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def wait(self, timeout: float) -> int:
        """Return the exit status, negative for a signal.

        Raises:
            TimeoutError: the command still runs after `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._server.status(self.pid, timeout)
        return self.returncode


class CommandServers:
    """One server for each environment and set of imports, started when it is first needed.

    Args:
        folder: for the output of commands.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[tuple[object, ...], CommandServer] = {}

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout: float,
        imports: Sequence[str],
        importing: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python command...` to its end.

        Args:
            command: the arguments of the interpreter.
            environment: the command's environment.
            timeout: in seconds.
            imports: modules that the server imports first.
            importing: the environment of these imports; by default that of the command.
        """
        importing = environment if importing is None else importing
        key = (*imports, *imported_with(importing).items())
        if key not in self._servers:
            self._servers[key] = CommandServer(importing, imports)
        with (
            tempfile.TemporaryFile("w+", dir=self._folder) as stdout,
            tempfile.TemporaryFile("w+", dir=self._folder) as stderr,
        ):
            server = self._servers[key]
            started = server.start(command, environment, Path.cwd(), stdout.fileno(), stderr.fileno())
            try:
                status = started.wait(timeout)
            except TimeoutError:
                os.kill(started.pid, signal.SIGKILL)
                raise
            for output in (stdout, stderr):
                output.seek(0)
            return subprocess.CompletedProcess(list(command), status, stdout.read(), stderr.read())

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.close()


class CommandServer:
    """The tests' side: starts the server, and has it fork commands.

    Args:
        environment: the server's environment; it and that of its commands have the same `imported_with`.
        imports: modules that it imports.
    """

    def __init__(self, environment: Mapping[str, str], imports: Sequence[str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._statuses: dict[int, int] = {}
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), *imports]
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, stdout: int, stderr: int
    ) -> Command:
        """Start `python command...` in a folder, with descriptors for its output."""
        request = json.dumps({"command": command, "environment": dict(environment), "folder": str(folder)})
        socket.send_fds(self._connection, [request.encode()], [stdout, stderr])
        return Command(self, self._read("pid"))

    def status(self, pid: int, timeout: float) -> int:
        """Wait for the exit status of a command."""
        while pid not in self._statuses:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise TimeoutError(f"process {pid} still runs after {timeout:g} s")
            self._read("ended")
        return self._statuses.pop(pid)

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        self._process.wait()

    def _read(self, kind: str) -> int:
        """Read up to a message of a kind; keep the statuses that come with it."""
        while True:
            message = json.loads(self._connection.recv(_PACKET) or b"{}")
            if not message:
                raise RuntimeError(f"the command server has ended with status {self._process.wait()}")
            if "ended" in message:
                self._statuses[message["ended"]] = message["status"]
            if kind in message:
                number: int = message[kind]
                return number


def main(number: int, imports: Sequence[str]) -> None:
    """Import modules, and fork commands; return only in the commands."""
    gc.disable()
    runs_jobs = set(IMPORTS_OF_JOBS) <= set(imports)
    if runs_jobs:
        # As a fork server does, before Keras is imported.
        patch_get_file()
        _fork_in_jobs()
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    request, descriptors = _serve(socket.socket(fileno=number))
    for standard, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # As in a new interpreter: without this, commands that fail to seed would draw the same numbers.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    _run(request["command"])


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request; return in these processes only."""
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([connection, *running], [], [])
        for pidfd in set(ready) & running.keys():
            pid = running.pop(pidfd)
            os.close(pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            connection.send(json.dumps({"ended": pid, "status": status}).encode())
        if connection not in ready:
            continue
        packet, descriptors, _, _ = socket.recv_fds(connection, _PACKET, 2, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            connection.close()
            for pidfd in running:
                os.close(pidfd)
            return json.loads(packet), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        running[os.pidfd_open(pid)] = pid
        connection.send(json.dumps({"pid": pid}).encode())


def _run(command: Sequence[str]) -> None:
    """Run what `python command...` runs."""
    # With these, a command starts a job again.
    sys.orig_argv[:] = [sys.executable, *command]
    if command[:2] == ["-m", "lockstep"]:
        sys.argv[:] = ["lockstep", *command[2:]]
        importlib.import_module("lockstep.cli.main").main()
    else:
        sys.argv[:] = list(command)
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def _fork_in_jobs() -> None:
    """Let the processes of jobs fork their fork servers, where they would import what this process has."""
    here = imported_with(os.environ)

    def start(command: Sequence[str], **options: Any) -> Any:
        foreseen = ForkServerSetup.read(parent_told(options["env"])).imports
        # The threads of that library survive no fork, so that its calls would wait for ever.
        has_threads = "obstore" in sys.modules
        if foreseen and not has_threads and imported_with(options["env"]) == here:
            return ForkServer(command, **options)
        return subprocess.Popen(command, **options)

    fork_server.subprocess = SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=start)  # type: ignore[assignment]


class ForkServer:
    """The fork server of a job, forked from the process of the job; like `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        assert options.pop("stdin") == subprocess.DEVNULL
        assert options.pop("start_new_session")
        arguments = command[command.index(fork_server_main.__name__) + 1 :]
        self.pid = os.fork()
        if self.pid == 0:
            end_with(lambda: _become_fork_server(arguments, **options))

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Reap it."""
        os.waitpid(self.pid, 0)


def _become_fork_server(
    arguments: Sequence[str], stdout: int, stderr: int, env: Mapping[str, str], pass_fds: Sequence[int]
) -> None:
    """Change what a new process has of its own: the session, descriptors, signals and variables."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for standard, descriptor in enumerate((null, stdout, stderr)):
        os.dup2(descriptor, standard)
    kept = sorted({0, 1, 2, *pass_fds})
    for before, after in pairwise([*kept, _DESCRIPTORS]):
        os.closerange(before + 1, after)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = ["-c", *arguments]
    fork_server_main.main(arguments)


def end_with(program: Callable[[], None]) -> None:
    """Run a program, and end this process as an interpreter would after it."""
    status = 0
    try:
        program()
    except SystemExit as leaving:
        if leaving.code is not None and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
