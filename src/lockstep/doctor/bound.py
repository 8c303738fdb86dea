"""Becomes a program that is killed with the process that has started it.

    python -P -m lockstep.doctor.bound PID COMMAND ...

To ask for that between fork and exec would be less: but a process with threads must run nothing there.
"""

import contextlib
import os
import sys

from lockstep.system.prctl import die_with


def main(parent: int, command: list[str]) -> None:
    """Become `command`, which ends with the process `parent`."""
    # Where the kernel does not know that wish, the program is ended by whoever has started it.
    with contextlib.suppress(OSError):
        die_with(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
