"""Becomes a program that is killed when the process that started it ends.

    python -P -m lockstep.doctor.bound PID COMMAND ...

Setting this between fork and exec would be simpler, but a process with threads must not run code there.
"""

import contextlib
import os
import sys

from lockstep.system.prctl import die_with


def main(parent: int, command: list[str]) -> None:
    """Become `command`, which is killed when the process `parent` ends."""
    # If the kernel does not support this, the process that started the program ends it.
    with contextlib.suppress(OSError):
        die_with(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
