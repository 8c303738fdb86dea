"""Starts a failed job again: the command becomes the same command, with the same run folder.

A job survives the loss of workers by itself. It ends if all workers are lost, or the coordinator, or the
chief or the only server of an asynchronous `fit`. Then it can continue from its checkpoint.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.observability.run_lines import happenings
from lockstep.protocol.job_spec import JobHost
from lockstep.system.environment import ATTEMPT, attempt, take_environment
from lockstep.system.exit_status import WRONG_STATE
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.prose import count
from lockstep.system.standard_streams import flush_streams

_STEADY = 60.0
"""Seconds after which the failure of a job does not delay the next start."""

_ROLL_BACKS = 3
"""How often a job whose state was wrong starts again, even if no restart was asked for."""

_FINAL = (0, 2, *(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)))
"""The exit statuses of a job that has succeeded, was refused, or was stopped."""


def folder_of_job() -> Path | None:
    """Return the run folder of the job that this command starts again, or None if it starts one."""
    _, folder = attempt()
    return Path(folder) if folder else None


def named_hosts(run_dir: Path) -> tuple[str, ...]:
    """Return the hosts that verifications of earlier starts of the job have named, once for each verdict."""
    try:
        lines = RunPaths(run_dir).events.read_bytes()
    except OSError:
        return ()
    verdicts = [each.fields for each in happenings(lines) if each.event == "verification failed"]
    return tuple(
        host for each in verdicts if each.get("verdict") == "worker" for host in each.get("hosts", ())
    )


def trusted_hosts(
    hosts: Sequence[JobHost], named: Sequence[str], most: int, min_workers: int
) -> tuple[JobHost, ...]:
    """Return the hosts that were named fewer than `most` times, or more if too few remain otherwise.

    Args:
        hosts: the hosts that the user has named.
        named: see `named_hosts`.
        most: the value of `--avoid-host-after`.
        min_workers: the least number of workers that must remain.
    """
    trusted = list(hosts)
    for host in sorted(hosts, key=lambda host: -named.count(host.name)):
        rest = [other for other in trusted if other != host]
        times = named.count(host.name)
        if times < most or not rest or sum(other.workers for other in rest) < min_workers:
            break
        trusted = rest
        note(
            f"workers of host {host.name} were named {count(times, 'time')} for wrong bits: the job starts "
            f"without it (--avoid-host-after {most})"
        )
    return tuple(trusted)


def start_again(restarts: int, status: int, run_dir: Path, seconds: float, *, rolls_back: bool) -> None:
    """Start the job again, if it has failed and a restart is left; otherwise return.

    Args:
        restarts: how often the job may be started again in all.
        status: the exit status of the job.
        run_dir: its folder.
        seconds: how long the job took.
        rolls_back: whether a job with the status of `WrongStateError` starts again in any case.
    """
    number, _ = attempt()
    requested = restarts
    if rolls_back and status == WRONG_STATE:
        restarts = max(restarts, _ROLL_BACKS)
    if status in _FINAL or not restarts:
        return
    if number >= restarts:
        limit = f"--restart-job {restarts}" if restarts == requested else f"{restarts} were made"
        note(f"no restart of the job is left ({limit})")
        return
    pause = 0 if seconds >= _STEADY else min(2**number, 60)
    when = f" in {pause} s" if pause else ""
    which = f"restart {number + 1} of {restarts}"
    note(
        f"the job has ended with status {status}, and starts again{when} from its last checkpoint, if any "
        f"({which})"
    )
    for signal_number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, signal.SIG_DFL)
    time.sleep(pause)
    flush_streams()
    take_environment({ATTEMPT: f"{number + 1}:{run_dir}"})
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
