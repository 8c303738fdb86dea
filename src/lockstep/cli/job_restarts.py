"""Starts a failed job again: the command becomes the same command, with the same run folder.

A job survives the loss of workers by itself. It ends if all workers are lost, or the coordinator is, or the
chief or the only server of an asynchronous `fit`. Then it can continue from its checkpoint.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.observability.run_lines import happenings
from lockstep.protocol.job_spec import JobHost
from lockstep.system.environment import ATTEMPT, attempt, take_environment
from lockstep.system.exit_status import STOP_SIGNALS, STOPPED, WRONG_STATE
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.prose import count
from lockstep.system.standard_streams import flush_streams

_STEADY = 60.0
"""Seconds after which the failure of a job does not delay the next start."""

_LONGEST_PAUSE = 60
"""The most seconds before a start; the pauses double from one second on."""

_ROLL_BACKS = 3
"""How often a job whose state was wrong starts again, even if no restart was asked for."""

_FINAL = (0, 2, *STOPPED)
"""The exit statuses of a job that has succeeded, was refused, or was stopped."""


def folder_of_job() -> Path | None:
    """Return the run folder of the job that this command starts again, or None if it starts one."""
    _, _, folder = attempt()
    return Path(folder) if folder else None


def events_begin(run_dir: Path) -> int:
    """Return the size of the log of events before the first start of the job, in bytes."""
    _, size, folder = attempt()
    if folder:
        return size
    with contextlib.suppress(OSError):
        return RunPaths(run_dir).events.stat().st_size
    return 0


class EarlierStarts(NamedTuple):
    """The records of a job's earlier starts.

    Attributes:
        replicas: R of the last start; None if it has not recorded anything.
        threads: the threads that computed a replica in the last start, likewise.
        named_hosts: the hosts whose workers verifications have named, once for each verdict.
    """

    replicas: int | None = None
    threads: int | None = None
    named_hosts: tuple[str, ...] = ()


def earlier_starts(run_dir: Path, events_at: int) -> EarlierStarts:
    """Read the records of a job's earlier starts from its event log.

    Args:
        run_dir: the folder.
        events_at: the position at which the events of the job begin; see `events_begin`. Earlier events
            belong to other runs.
    """
    try:
        with RunPaths(run_dir).events.open("rb") as file:
            file.seek(events_at)
            lines = file.read()
    except OSError:
        return EarlierStarts()
    starts, told = EarlierStarts(), set[str]()
    for each in happenings(lines):
        fields = each.fields
        if each.event == "job":
            starts = starts._replace(replicas=_number(fields, "replicas"), threads=_number(fields, "threads"))
            told.clear()
        is_new = each.event == "verification failed" and str(fields) not in told
        if is_new and fields.get("verdict") == "worker":
            # A named worker ends, so an equal event is the same one, after a takeover.
            told.add(str(fields))
            starts = starts._replace(named_hosts=(*starts.named_hosts, *fields.get("hosts", ())))
    return starts


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and value > 0 else None


def trusted_hosts(
    hosts: Sequence[JobHost], named: Sequence[str], most: int, min_workers: int, *, in_store: bool
) -> tuple[JobHost, ...]:
    """Return the hosts that were named fewer than `most` times, or more if otherwise too few remain.

    All hosts remain if one of them may have the only checkpoint.

    Args:
        hosts: the hosts that the user has named.
        named: see `EarlierStarts`.
        most: the value of `--avoid-host-after`.
        min_workers: the least number of workers that must remain.
        in_store: whether the checkpoints are in an object store, so that each host can resume from them.
    """
    trusted = list(hosts)
    for host in sorted(hosts, key=lambda host: -named.count(host.name)):
        rest = [other for other in trusted if other != host]
        if named.count(host.name) < most or not rest or sum(other.workers for other in rest) < min_workers:
            break
        trusted = rest
    texts = [
        f"workers of host {host.name} were found at fault {count(named.count(host.name), 'time')}"
        for host in hosts
        if host not in trusted
    ]
    if texts and not in_store:
        note(
            f"{' and '.join(texts)}, but the job starts with all hosts, because one of them may have the "
            f"only checkpoint; --avoid-host-after {most} leaves a host out if --checkpoint is a URL"
        )
        return tuple(hosts)
    for text in texts:
        note(f"{text}: the job starts without it (--avoid-host-after {most})")
    return tuple(trusted)


def start_again(
    restarts: int, status: int, run_dir: Path, seconds: float, *, events_at: int, rolls_back: bool
) -> None:
    """Start the job again, if it has failed and a restart is left; otherwise return.

    Args:
        restarts: the total number of restarts of the job.
        status: the exit status of the job.
        run_dir: its folder.
        seconds: the duration of the job.
        events_at: see `events_begin`.
        rolls_back: whether a job with the status of `WrongStateError` starts again in any case.
    """
    number, _, _ = attempt()
    requested = restarts
    if rolls_back and status == WRONG_STATE:
        restarts = max(restarts, _ROLL_BACKS)
    if status in _FINAL or not restarts:
        return
    if number >= restarts:
        limit = f"--restart-job {restarts}" if restarts == requested else f"{restarts} were made"
        note(f"no restart of the job is left ({limit})")
        return
    pause = 0 if seconds >= _STEADY else min(2**number, _LONGEST_PAUSE)
    when = f" in {pause} s" if pause else ""
    which = f"restart {number + 1} of {restarts}"
    note(
        f"the job has ended with status {status}, and starts again{when} from its last checkpoint, if any "
        f"({which})"
    )
    for signal_number in STOP_SIGNALS:
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, signal.SIG_DFL)
    time.sleep(pause)
    flush_streams()
    take_environment({ATTEMPT: f"{number + 1}:{events_at}:{run_dir}"})
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
