"""How workers and their ends are named in messages."""

import signal


def shell_status(status: int) -> int:
    """Return the exit status a shell shows: 128 + N for signal N."""
    return 128 - status if status < 0 else status


def describe_exit(status: int) -> str:
    """Say how a process ended; `status` is negative for a signal."""
    return f"was ended by {signal_name(-status)}" if status < 0 else f"ended with status {status}"


def signal_name(number: int) -> str:
    """Return a name such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name_workers(workers: tuple[int, ...]) -> str:
    """Return "worker 3", "workers 1 and 2", "workers 0, 1 and 2"."""
    names = [str(worker) for worker in workers]
    if len(names) == 1:
        return f"worker {names[0]}"
    return f"workers {', '.join(names[:-1])} and {names[-1]}"


def count(number: int, noun: str) -> str:
    """Return "1 worker", "2 workers"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
