"""A command without a terminal: `lockstep run --detach`, and `lockstep attach`, which shows its output.

The detached command runs in a separate process and session, and its output goes to a file in the run folder.
So closing a terminal does not affect it. Otherwise it works as with a terminal.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from lockstep.cli.completion import complete_run
from lockstep.errors import ConfigError, UnfitError
from lockstep.monitoring.worker_logs import GrowingLog, follow
from lockstep.observability.run_lines import GrowingFile, json_object
from lockstep.system.event_loop import wait_for
from lockstep.system.files import closed_after, open_own
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.standard_streams import (
    fill_standard_descriptors,
    flush_streams,
    wait_unless_closed,
    write_stdout,
)

_LOOK_EVERY = 0.1
_SHOWN = 64 * 1024
"""The bytes of earlier output that `lockstep attach` shows, at most."""


def detach(paths: RunPaths) -> None:
    """Continue in a process without a terminal; this process shows its output until the job has begun.

    This returns only in the new process. This process exits with status 0 when the job has begun, or else
    with the status of the command.

    Args:
        paths: the paths of the run, absolute; the folder is locked.

    Raises:
        ConfigError: the file for the output cannot be written.
        UnfitError: no process can be started.
    """
    try:
        output = open_own(paths.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise ConfigError(
            f"{paths.output} cannot be written: {error.strerror}; give another --run-dir"
        ) from None
    begins, recorded = os.fstat(output).st_size, _size(paths.events)
    flush_streams()
    try:
        process = os.fork()
    except OSError as error:
        raise UnfitError(f"no process can be started: {error.strerror}") from None
    if process:
        os.close(output)
        sys.exit(_until_it_has_begun(process, paths, begins, recorded))
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(output)


def _until_it_has_begun(process: int, paths: RunPaths, begins: int, recorded: int) -> int:
    """Show the output of a detached command until its job has begun or the command has ended.

    Args:
        process: the process id of the command.
        paths: the paths of the run.
        begins: the earlier size of its file of output.
        recorded: the earlier size of its event log.
    """
    from lockstep.coordinator.run_lookup import job_in

    shown, ended = GrowingLog(paths.output, write_stdout, begins), os.pidfd_open(process)
    try:
        while not wait_for([ended], _LOOK_EVERY):
            shown.advance()
            if _size(paths.events) > recorded and (name := job_in(paths.root)) is not None:
                note(
                    f"{name} runs without this terminal: lockstep attach {name} shows its output, lockstep "
                    f"stop {name} ends it"
                )
                return 0
    except (KeyboardInterrupt, BrokenPipeError):
        os.kill(process, signal.SIGINT)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        shown.finish()
    return status if status >= 0 else 128 - status


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@click.command()
@click.argument("job", shell_complete=complete_run)
def attach(job: str) -> None:
    """Show the output of JOB, which runs without a terminal, until it ends.

    This is a job of lockstep run --detach, or one of --hosts that its standby has taken over on this host.
    JOB is a name that lockstep list shows, a run folder, its name in runs/, or the beginning of a name.
    Ctrl-C ends only this command: the job continues. The exit status is that of the job, or 130 after Ctrl-C.
    The command first shows the end of the earlier output. output.log in the run folder has all output.
    """
    from lockstep.coordinator.admin_client import accepted, send
    from lockstep.coordinator.run_lookup import find_run, job_in
    from lockstep.monitoring.run_catalog import is_active
    from lockstep.protocol.admin import StatusRequest

    fill_standard_descriptors()
    run = find_run(job)
    paths, name = RunPaths(run.folder), run.job or job_in(run.folder)
    if not paths.output.is_file():
        raise ConfigError(
            f"{job} was not started with --detach on this machine; lockstep logs {job} shows the output of "
            "its workers"
        )
    size = _size(paths.output)
    shown = GrowingLog(paths.output, write_stdout, _line_after(paths.output, max(0, size - _SHOWN)))
    try:
        if name is not None:
            # The command ends after its job: it reports how the job ended, and may start it again.
            with _ended(accepted(send(name, StatusRequest())).pid) as has_ended:
                follow(shown, lambda: not has_ended(), lambda: wait_unless_closed(_LOOK_EVERY))
        else:
            # The job may run in another container.
            follow(shown, lambda: is_active(run.folder), lambda: wait_unless_closed(_LOOK_EVERY))
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        note(f"{name} continues; lockstep attach {name} shows its output again, lockstep stop {name} ends it")
        sys.exit(130)
    sys.exit(_status(run.folder))


def _line_after(path: Path, position: int) -> int:
    """Return the position of the first complete line after a position of a file."""
    if position == 0:
        return 0
    with path.open("rb") as file:
        file.seek(position - 1)
        file.readline()
        return file.tell()


@contextlib.contextmanager
def _ended(process: int) -> Iterator[Callable[[], bool]]:
    """Provide a function that returns whether a process has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        yield lambda: True
        return
    with closed_after(descriptor):
        yield lambda: bool(wait_for([descriptor], 0.0))


def _status(folder: Path) -> int:
    """Return the exit status of the last run in a folder, which has ended; note if it was killed."""
    status: int | None = None
    for line in GrowingFile(RunPaths(folder).events).lines():
        match json_object(line):
            case {"event": "job"}:
                status = None
            case {"event": "finished", "status": int(recorded)}:
                status = recorded
    if status is None:
        note(f"the end of {folder.name} is not recorded: its processes were killed")
        return 1
    return status
