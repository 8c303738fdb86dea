"""The command `lockstep logs`: shows the output of the workers of a run."""

import contextlib
import re
import warnings

import click

from lockstep.cli.completion import complete_run
from lockstep.cli.parameter_types import Run

_LOOK_EVERY = 0.2


def _compile(context: click.Context, param: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    if value is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise click.BadParameter(f"'{value}' is not a regular expression: {error}") from None


@click.command()
@click.argument("job", type=Run(), shell_complete=complete_run)
@click.option("-f", "--follow", is_flag=True, help="Continue with new output until the job ends.")
@click.option(
    "--worker",
    "workers",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="ID",
    help="Show only the log of this worker. Can be repeated.  [default: those of all workers]",
)
@click.option(
    "--grep",
    "pattern",
    callback=_compile,
    metavar="PATTERN",
    help="Show only lines that match this regular expression of Python.",
)
def logs(job: str, follow: bool, workers: tuple[int, ...], pattern: re.Pattern[str] | None) -> None:
    """Show the output of the workers of JOB.

    JOB is a name that lockstep list shows, a run folder, its name in runs/, the beginning of a name, or the
    URL of a run in an object store. The run may have ended. If there may be several workers, each line begins
    with its worker.
    """
    from lockstep.coordinator.admin_client import JobWatch
    from lockstep.coordinator.run_lookup import find_run, job_in
    from lockstep.errors import ConfigError
    from lockstep.monitoring import worker_logs
    from lockstep.monitoring.run_catalog import is_active
    from lockstep.system.prose import name_workers
    from lockstep.system.standard_streams import (
        fill_standard_descriptors,
        wait_unless_closed,
        write_stdout,
    )

    fill_standard_descriptors()
    run = find_run(job)
    name = (run.job or job_in(run.folder)) if follow else None
    # A job that runs in another container is not in the list of jobs here.
    grows = follow and (name is not None or is_active(run.folder))
    there = worker_logs.list_logs(run.folder)
    shown = worker_logs.WorkerLogs(
        run.folder,
        workers,
        prefixed=len(set(workers) or there) > 1 or (grows and not workers),
        pattern=pattern,
        write=write_stdout,
    )
    # A reader such as head closes the pipe once it has enough.
    with contextlib.suppress(BrokenPipeError):
        if not grows:
            shown.finish()
        else:
            is_running = JobWatch(name).is_running if name is not None else lambda: is_active(run.folder)
            worker_logs.follow(shown, is_running, lambda: wait_unless_closed(_LOOK_EVERY))
            there = worker_logs.list_logs(run.folder)
        if not there:
            raise ConfigError(f"{run.folder} has no logs of workers")
        if missing := sorted(set(workers) - there.keys()):
            has = name_workers(tuple(there))
            raise ConfigError(f"{run.folder} has no log of {name_workers(missing)}; it has those of {has}")
