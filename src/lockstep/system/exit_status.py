"""How a process ended: exit statuses, and their texts in messages."""

import os
import signal

WRONG_STATE = os.EX_SOFTWARE
"""The exit status of a job whose state was wrong, and which a checkpoint continues."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals with which a user, a service manager or a closed terminal stops a command."""
STOPPED = tuple(128 + number for number in STOP_SIGNALS)
"""The exit statuses of a job that such a signal has stopped."""
UNKNOWN_STATUS = -(2**16)
"""The exit status of a process whose exit status is unknown; like a signal, it carries no report."""


def shell_status(status: int) -> int:
    """Return the exit status a shell shows: 128 + N for signal N."""
    if status == UNKNOWN_STATUS:
        return 1
    return 128 - status if status < 0 else status


def describe_exit(status: int) -> str:
    """Describe how a process ended; `status` is negative for a signal."""
    if status == UNKNOWN_STATUS:
        return "ended (exit status unknown)"
    return f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"


def signal_name(number: int) -> str:
    """Return a name such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def unkillable(left: tuple[int, ...]) -> str:
    """Name the processes that SIGKILL did not end."""
    return f"these processes could not be killed: {', '.join(map(str, left))}"
