"""Executes a program that the kernel kills when the process that started it ends.

    python -P -m lockstep.doctor.child_wrapper PID COMMAND ...

The parent cannot request this between fork and exec: a process with threads must not run code there.
"""

import contextlib
import os
import sys

from lockstep.system.prctl import die_with


def main(parent: int, command: list[str]) -> None:
    """Replace this process by `command`, which is killed when the process `parent` ends."""
    # If the kernel does not support this, the parent ends the program.
    with contextlib.suppress(OSError):
        die_with(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
