"""The fork server: imports the modules that a job's workers need, then forks the workers.

The agent starts it, and requests one worker at a time. A worker becomes the agent's own child: the process
between the two ends at once, and the agent adopts orphans. This process must not start a thread or initialize
a backend: a thread would not exist in a worker, and a backend would not work there.

So workers, especially replacements, need not import the modules that the script will need, if its source
shows them. If the imports cannot be predicted (a script that computes its environment or its `sys.path`, a
job with GPUs, an import that starts a thread), the worker starts as a new process. A fork server that ends is
replaced.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher import worker_main
from lockstep.protocol.fork import MAX_REQUEST, READY, ForkRequest, ForkServerSetup, decode_fork
from lockstep.system.child_process import command_of
from lockstep.system.environment import parent_told, put_control, take_environment
from lockstep.system.passed_descriptors import receive_descriptors
from lockstep.system.prctl import die_with, keep_priority
from lockstep.worker.downloads import patch_get_file

_LONGEST_IMPORT = 300
_OF_WORKERS = (
    "lockstep.transport.state_memory",
    "lockstep.worker.membership",
    "lockstep.worker.checkpoints",
    "lockstep.worker.tf_distribute_shim",
)
_DESCRIPTORS = 3


@dataclass(frozen=True)
class Forked:
    """A forked process that is about to become a worker.

    Attributes:
        request: the agent's request.
        descriptors: its stdout, stderr and control socket.
    """

    request: ForkRequest
    descriptors: tuple[int, ...]


def main(arguments: Sequence[str]) -> None:
    """Fork the workers that run the script of `arguments`; return only in the workers."""
    setup = ForkServerSetup.read(parent_told())
    die_with(setup.agent)
    keep_priority()
    connection = socket.socket(fileno=setup.connection)
    connection.set_inheritable(False)
    whole = _prepare(setup)
    connection.send(READY)
    forked = _serve(connection)
    connection.close()
    if whole:
        _become(forked)
        worker_main.main(arguments)
    else:
        _exec_worker(forked, arguments)


def _prepare(setup: ForkServerSetup) -> bool:
    """Import the modules that workers need; return whether workers can be forked with them."""
    # The default action ends this process even if an import hangs.
    signal.alarm(_LONGEST_IMPORT)
    # The objects of modules stay, and searching them for garbage would take a quarter of the time.
    gc.disable()
    try:
        _import(setup)
    except BaseException:
        # The script may never reach this import, or handle the error.
        return False
    finally:
        signal.alarm(0)
    gc.freeze()
    return _can_fork()


def _import(setup: ForkServerSetup) -> None:
    patch_get_file()
    for name in _OF_WORKERS:
        importlib.import_module(name)
    if setup.folder is not None:
        sys.path.insert(0, setup.folder)
        for name in setup.imports:
            importlib.import_module(name)
        sys.path.remove(setup.folder)


def _can_fork() -> bool:
    """Whether this process has one thread after a fork: fork handlers of libraries end their threads."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _serve(connection: socket.socket) -> Forked:
    """Fork a worker for each request; return only in the workers."""
    while True:
        packet, descriptors = receive_descriptors(connection, MAX_REQUEST, _DESCRIPTORS)
        if not packet:
            os._exit(0)
        try:
            pid = _fork_orphan(connection)
        except OSError as error:
            connection.send(f"{error.strerror}".encode())
            pid = -1
        if pid == 0:
            return Forked(decode_fork(packet), tuple(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan(connection: socket.socket) -> int:
    """Fork an orphan, and send its process id to the agent; return 0 in the orphan."""
    setup, tell = os.pipe()
    orphaned, orphan = os.pipe()
    middle = os.fork()
    if middle == 0:
        child = os.fork()
        if child:
            os.write(tell, str(child).encode())
            os._exit(0)
        for descriptor in (setup, tell, orphan):
            os.close(descriptor)
        # This returns after the process in between has been reaped. From then on, the agent is the parent of
        # this process.
        os.read(orphaned, 1)
        os.close(orphaned)
        return 0
    for descriptor in (tell, orphaned):
        os.close(descriptor)
    try:
        status = os.waitpid(middle, 0)[1]
        pid = os.read(setup, 32)
        if status or not pid:
            raise OSError(status, "cannot fork a process")
        connection.send(pid)
        return int(pid)
    finally:
        os.close(orphan)
        os.close(setup)


def _become(forked: Forked) -> None:
    """Become a worker with the modules that this process has imported."""
    output = [os.pread(standard, os.fstat(standard).st_size, 0) for standard in (1, 2)]
    _take_over(forked)
    for standard, text in zip((1, 2), output, strict=True):
        # Each worker repeats the output of the imports.
        while text:
            text = text[os.write(standard, text) :]
    gc.enable()


def _exec_worker(forked: Forked, arguments: Sequence[str]) -> None:
    """Become a worker in a fresh interpreter, without the modules that this process has imported."""
    _take_over(forked)
    os.set_inheritable(forked.descriptors[2], True)
    os.execve(sys.executable, command_of("lockstep.launcher.worker_main", *arguments), os.environ)


def _take_over(forked: Forked) -> None:
    """Start a session, with the descriptors and the environment of the worker."""
    os.setsid()
    keep_priority()
    stdout, stderr, control = forked.descriptors
    for descriptor, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    take_environment(forked.request.environment)
    put_control(control)


if __name__ == "__main__":
    main(sys.argv[1:])
