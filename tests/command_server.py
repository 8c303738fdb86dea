"""A server that has imported Keras and a backend, and forks the commands of tests.

Importing takes as long as a small training, and each job imports again: its fork server does.
Here, one process imports for all commands of a test run. It forks each command, `python -m lockstep ...`,
`python script.py` or `python -c ...`, and in the process of a job, the fork server is one more fork, not a
new interpreter:

    tests === command server --- lockstep run --- process of the job --- fork server --- workers

The processes of a test run share the servers (===: a socket), and a server ends with that run. The processes
of pytest-xdist are such commands, too: `tests/conftest.py` starts them by `command_server.py SOCKET ...`.

A fork server is started as usual if its environment changes what imports do, compared with that of the
command server, or if its imports cannot be foreseen. All other processes are those of the product, with the
same parents, sessions and descriptors. `tests/launcher` and `tests/cli` test the usual start.
"""

import atexit
import contextlib
import fcntl
import gc
import hashlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
_BACKLOG = 64
_NAME_LENGTH = 16
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

    def wait(self, timeout: float | None) -> int:
        """Return the exit status, negative for a signal.

        Raises:
            TimeoutError: the command still runs after `timeout` seconds; never if that is None.
        """
        if self.returncode is None:
            self.returncode = self._server.status(self.pid, timeout)
        return self.returncode


class CommandServers:
    """One server for each environment and set of imports, started when it is first needed.

    Args:
        folder: for the output of commands.
        shared: a folder of all processes of the test run.
    """

    def __init__(self, folder: Path, shared: Path) -> None:
        self._folder = folder
        self._shared = shared
        self._servers: dict[tuple[object, ...], CommandServer] = {}

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout: float,
        imports: Sequence[str],
        importing: Mapping[str, str] | None = None,
        *,
        folder: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python command...` to its end.

        Args:
            command: the arguments of the interpreter.
            environment: the command's environment.
            timeout: in seconds.
            imports: modules that the server imports first.
            importing: the environment of these imports; by default that of the command.
            folder: where it runs; by default in that of this process.
        """
        importing = environment if importing is None else importing
        key = (*imports, *imported_with(importing).items())
        if key not in self._servers:
            name = hashlib.sha256(repr(key).encode()).hexdigest()[:_NAME_LENGTH]
            self._servers[key] = CommandServer.shared(self._shared / name, importing, imports)
        with (
            tempfile.TemporaryFile("w+", dir=self._folder) as stdout,
            tempfile.TemporaryFile("w+", dir=self._folder) as stderr,
        ):
            server = self._servers[key]
            with Path(os.devnull).open() as stdin:
                standard = [file.fileno() for file in (stdin, stdout, stderr)]
                started = server.start(command, environment, folder or Path.cwd(), standard)
            try:
                status = started.wait(timeout)
            except TimeoutError:
                os.kill(started.pid, signal.SIGKILL)
                raise
            for output in (stdout, stderr):
                output.seek(0)
            return subprocess.CompletedProcess(list(command), status, stdout.read(), stderr.read())

    def close(self) -> None:
        """Leave the servers, which end with the test run."""
        for server in self._servers.values():
            server.close()


class CommandServer:
    """The tests' side: has a server fork commands.

    Args:
        connection: to the server.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._statuses: dict[int, int] = {}

    @classmethod
    def shared(cls, path: Path, environment: Mapping[str, str], imports: Sequence[str]) -> "CommandServer":
        """Connect to the server of a path; start it if this is the first process of the test run that does.

        Args:
            path: for the server's socket.
            environment: the server's environment; it and that of its commands have the same `imported_with`.
            imports: modules that it imports.
        """
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                start_server(path, environment, imports)
        return cls.connected(path)

    @classmethod
    def connected(cls, path: Path) -> "CommandServer":
        """Connect to the server of a path."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short(path) as address:
            connection.connect(address)
        return cls(connection)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, standard: Sequence[int]
    ) -> Command:
        """Start `python command...` in a folder, with descriptors for its standard streams."""
        request = json.dumps({"command": command, "environment": dict(environment), "folder": str(folder)})
        socket.send_fds(self._connection, [request.encode()], standard)
        return Command(self, self._read("pid"))

    def status(self, pid: int, timeout: float | None) -> int:
        """Wait for the exit status of a command."""
        while pid not in self._statuses:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise TimeoutError(f"process {pid} still runs after {timeout} s")
            self._read("ended")
        return self._statuses.pop(pid)

    def close(self) -> None:
        """Leave the server."""
        self._connection.close()

    def _read(self, kind: str) -> int:
        """Read up to a message of a kind; keep the statuses that come with it."""
        while True:
            message = json.loads(self._connection.recv(_PACKET) or b"{}")
            if not message:
                raise RuntimeError("the command server has ended")
            if "ended" in message:
                self._statuses[message["ended"]] = message["status"]
            if kind in message:
                number: int = message[kind]
                return number


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """Another path of the same file, for sockets: their paths have at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def start_server(path: Path, environment: Mapping[str, str], imports: Sequence[str]) -> None:
    """Start a server that listens at a path, and ends with the main process of the test run."""
    in_process_of_xdist = "PYTEST_XDIST_WORKER" in os.environ
    owner = os.pidfd_open(os.getppid() if in_process_of_xdist else os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with short(path) as address:
            listener.bind(address)
        listener.listen(_BACKLOG)
        numbers = [listener.fileno(), owner]
        for number in numbers:
            os.set_inheritable(number, True)
        command = [sys.executable, "-P", __file__, *map(str, numbers), *imports]
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        os.posix_spawn(sys.executable, command, environment, file_actions=[nothing])
    os.close(owner)


def serve(listener: socket.socket, owner: int, imports: Sequence[str]) -> None:
    """Import modules, and fork commands; return only in the commands."""
    gc.disable()
    # Ctrl-C is for the test run, with which the server ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    request, descriptors = _serve(listener, owner)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, descriptor in enumerate(descriptors):
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


def _serve(listener: socket.socket, owner: int) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request; return in these processes only."""
    connections: set[socket.socket] = set()
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([listener, owner, *connections, *running], [], [])
        if owner in ready:
            os._exit(0)
        for pidfd in running.keys() & set(ready):
            pid, connection = running.pop(pidfd)
            os.close(pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            # The process that has requested it may have ended.
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"ended": pid, "status": status}).encode())
        if listener in ready:
            connections.add(listener.accept()[0])
        for connection in connections & set(ready):
            packet, descriptors, _, _ = socket.recv_fds(connection, _PACKET, 3, socket.MSG_CMSG_CLOEXEC)
            if not packet:
                connections.remove(connection)
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                for other in (listener, *connections):
                    other.close()
                for number in (owner, *running):
                    os.close(number)
                return json.loads(packet), descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = pid, connection
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"pid": pid}).encode())


def _run(command: Sequence[str]) -> None:
    """Run what `python command...` runs."""
    # With these, a command starts a job again.
    sys.orig_argv[:] = [sys.executable, *command]
    if command[:2] == ["-m", "lockstep"]:
        sys.argv[:] = ["lockstep", *command[2:]]
        importlib.import_module("lockstep.cli.main").main()
    elif command[0] == "-c":
        sys.argv[:] = ["-c"]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(command[1], main.__dict__)
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


def forward(path: Path, command: Sequence[str]) -> int:
    """Run `python command...` by the server of a path, with this process's streams; return the status."""
    standard = (0, 1, 2)
    started = CommandServer.connected(path).start(command, os.environ, Path.cwd(), standard)
    # Whoever reads the output of the command sees its end.
    for number in standard:
        os.close(number)
    return started.wait(None)


def main() -> None:
    """Serve commands, or run one: arguments LISTENER OWNER IMPORT..., or SOCKET [-u] -c PROGRAM."""
    first, second, *others = sys.argv[1:]
    if first.isdecimal():
        serve(socket.socket(fileno=int(first)), int(second), others)
    else:
        sys.exit(forward(Path(first), [word for word in (second, *others) if word != "-u"]))


if __name__ == "__main__":
    main()
