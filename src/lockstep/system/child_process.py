"""Processes that other processes of Lockstep start: their commands, and how they end with their parents.

    python -P -m lockstep.system.child_process PID COMMAND ...

executes a program that the kernel kills when the process PID ends. A parent cannot request this between fork
and exec: a process with threads must not run code there.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence

from lockstep.system.prctl import die_with


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that executes a module of Lockstep with this interpreter.

    With -P, a file in the current folder, such as `types.py`, does not hide a module that Lockstep needs.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection to a process that the block starts and that inherits the second end.

    The second end is closed after the block. The first end is closed only if the block raises.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        yield ours, theirs
        undo.pop_all()


def ending_with_this_process(command: Sequence[str]) -> list[str]:
    """Return the command for a program that the kernel kills when this process ends, however it ends."""
    return command_of(__spec__.name, str(os.getpid()), *command)


def main(parent: int, command: list[str]) -> None:
    """Replace this process with `command`, which is killed when the process `parent` ends."""
    # If the kernel does not support this, the parent ends the program.
    with contextlib.suppress(OSError):
        die_with(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
