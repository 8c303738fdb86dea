"""The command `lockstep`, with its subcommands except `run`."""

import contextlib
import errno
import sys
import time
from pathlib import Path
from typing import Literal, NoReturn

import click

from lockstep.cli.completion import complete_job, complete_run
from lockstep.cli.help import LazyGroup
from lockstep.cli.parameter_types import PARTS, FolderOrUrl, Run
from lockstep.errors import LockstepError, with_code
from lockstep.system.notes import note
from lockstep.system.prose import count, date_text, os_error, printable, size_text
from lockstep.system.standard_streams import (
    discard_stdout,
    fill_standard_descriptors,
)
from lockstep.version import __version__

_ELSEWHERE = {
    "agent": ("lockstep.cli.agent", "Run workers on this host for a job of another host."),
    "attach": (
        "lockstep.cli.detached",
        "Show the output of JOB, which runs without a terminal, until it ends.",
    ),
    "check": ("lockstep.cli.check", "Compare SCRIPT on several replicas with one process."),
    "diff": ("lockstep.cli.diff", "Find the first step at which two runs differ, and why."),
    "explain": ("lockstep.cli.explain", "Explain an error, and say what to do."),
    "export": ("lockstep.cli.export", "Write the files with which another system runs a job."),
    "key": ("lockstep.cli.key", "Write a new key to FILE, for jobs on several hosts."),
    "logs": ("lockstep.cli.logs", "Show the output of the workers of JOB."),
    "report": ("lockstep.cli.page", "Write the page of RUN to one HTML file."),
    "rerun": ("lockstep.cli.rerun", "Repeat RUN, and say whether the bits are equal."),
    "run": ("lockstep.cli.run", "Run SCRIPT on several workers, on one host or several."),
    "ui": ("lockstep.cli.page", "Show runs on a local web page."),
}
"""For each command that is not in this file its module, and the first sentence of its help."""

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""The errors of a write. Without the name of a file, they are those of stdout."""


def main() -> None:
    """Run the command line of this process, and exit."""
    try:
        cli(prog_name="lockstep", standalone_mode=False)
    except click.ClickException as error:
        _refuse(error.format_message())
    except click.Abort:
        sys.exit(130)
    except LockstepError as error:
        _refuse(with_code(error))
    except OSError as error:
        discard_stdout()
        # A reader such as head closes the pipe once it has enough.
        if not isinstance(error, BrokenPipeError):
            of_stdout = error.errno in _WRITE_ERRORS
            failed = "stdout cannot be written" if of_stdout else "the system refuses an operation"
            _refuse(os_error(error) if error.filename else f"{failed}: {os_error(error)}")


def _refuse(message: str) -> None:
    note(message)
    sys.exit(2)


def _show_version(context: click.Context, _option: click.Parameter, is_set: bool) -> None:
    if not is_set or context.resilient_parsing:
        return
    if context.params["verbose"]:
        from lockstep.doctor.bug_report import versions_here

        click.echo(versions_here(__version__), nl=False)
    else:
        click.echo(f"lockstep {__version__}")
    context.exit()


@click.group(cls=LazyGroup, elsewhere=_ELSEWHERE, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
# This option is eager: its value is known when --version is processed.
@click.option(
    "--verbose",
    is_flag=True,
    is_eager=True,
    help="With --version: also show other versions, the machine and the extras, for a bug report.",
)
def cli(verbose: bool) -> None:
    """Train a single-process Keras program on any number of workers, with the same result to the last bit."""
    if verbose:
        raise click.UsageError("--verbose belongs to --version")
    from lockstep.system.run_folder import remove_abandoned

    remove_abandoned()


@cli.command()
@click.argument("folder", type=FolderOrUrl(path_type=Path, exists=True, file_okay=False))
def checkpoints(folder: Path | str) -> None:
    """List and verify the checkpoints in FOLDER, or in an object store, such as s3://bucket/job.

    The exit status is 1 if any checkpoint is damaged.
    """
    from lockstep.checkpoint.store import Store

    if isinstance(folder, str):
        _list_stored(folder)
    store = Store(folder)
    entries = store.entries()
    for entry in entries:
        when = date_text(entry.time)
        verified = "" if entry.verified is None else f", verified up to step {entry.verified}"
        fault = entry.fault or f"complete{verified}"
        click.echo(printable(f"{entry.path.name}  {when}  {size_text(entry.bytes):>13}  {fault}"))
    if not entries:
        click.echo(printable(f"there is no checkpoint in {folder}"))
    elif entries[-1].step == store.finished():
        click.echo(f"the job is finished after {count(entries[-1].step, 'step')}")
    sys.exit(any(entry.fault for entry in entries))


def _list_stored(url: str) -> NoReturn:
    from lockstep.checkpoint.mirror import fault_of, read_head
    from lockstep.checkpoint.object_store import SHORT_RETRY_SECONDS, ObjectStore

    store, damaged = ObjectStore(url, retry_seconds=SHORT_RETRY_SECONDS), False
    head, _ = read_head(store)
    for stored in head.checkpoints if head is not None else ():
        when = date_text(stored.time)
        fault = fault_of(store, stored)
        damaged = damaged or fault is not None
        text = fault or "complete" + (
            f", verified up to step {stored.verified}" if stored.verified >= 0 else ""
        )
        click.echo(printable(f"{stored.folder}  {when}  {size_text(stored.bytes):>13}  {text}"))
    if head is None or not head.checkpoints:
        click.echo(printable(f"there is no checkpoint in {url}"))
    elif head.finished == head.newest():
        click.echo(f"the job is finished after {count(head.newest(), 'step')}")
    sys.exit(damaged)


@cli.command("list")
def list_jobs() -> None:
    """List your running jobs on this machine."""
    from lockstep.coordinator.admin_client import running_jobs, table

    running, silent = running_jobs()
    for line in table(running, time.time()) if running else ():
        click.echo(line)
    for name in silent:
        note(f"{name} does not respond; it may be paused or about to end")
    if not running and not silent:
        click.echo("no job is running")


@cli.command()
@click.argument("folders", metavar="[FOLDER]...", type=Run(), nargs=-1, shell_complete=complete_run)
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Only list runs with this value; also != < >, and patterns such as script=train*. Can be repeated.",
)
@click.option(
    "--sort",
    "order",
    default="",
    metavar="COLUMN",
    help="Sort by a column; -COLUMN lists the largest value first.  [default: -started]",
)
@click.option("--csv", "as_csv", is_flag=True, help="Write a line of CSV per run, with all columns.")
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object per run, with all columns.")
def runs(
    folders: tuple[str, ...], conditions: tuple[str, ...], order: str, as_csv: bool, as_json: bool
) -> None:
    """List the runs in FOLDER, by default ./runs, the newest first.

    \b
    lockstep runs --where tags=lr --where state=finished --sort val_loss
    lockstep runs --where "lost>0" --json

    The list includes runs that have ended. FOLDER is the folder of a run, one that contains such folders, or
    the URL of a run in an object store. A line has the start in local time, the duration, the numbers of
    workers, replicas, hosts and training steps, the effective training time, lost workers, warnings, the
    metrics of the last epoch, tags, the run from which it resumed, the beginning of the digest, how the run
    ended, and its problems. Columns without values are omitted. If a folder has several runs, the line
    describes the last one.
    """
    from lockstep.monitoring import past_runs
    from lockstep.monitoring.run_catalog import resolve

    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    listed = past_runs.select(past_runs.past_runs(resolve(folders), time.time()), conditions, order)
    if as_csv or as_json:
        click.echo(past_runs.as_csv(listed) if as_csv else past_runs.as_json(listed), nl=False)
        return
    none = "no run here meets these conditions" if conditions else "there is no run here"
    for line in past_runs.table(listed) if listed else [none]:
        click.echo(line)


@cli.command()
@click.argument("job", shell_complete=complete_job)
@click.argument("workers", metavar="N", type=PARTS)
def scale(job: str, workers: int) -> None:
    """Change the number of workers of JOB to N. The result stays the same.

    JOB is a name that lockstep list shows, or the beginning of one.
    """
    from lockstep.coordinator.admin_client import accepted, send
    from lockstep.protocol.admin import ScaleRequest

    status = accepted(send(job, ScaleRequest(workers)))
    click.echo(
        f"{status.job}: workers now {len(status.workers)}, wanted {status.wanted}; "
        "run lockstep list to see its progress"
    )


@cli.command()
@click.argument("run", shell_complete=complete_run)
@click.option(
    "--steps",
    metavar="FIRST:LAST",
    required=True,
    help="First and last training step, counted from 1, or a single step.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="File to write; - is stdout.  [default: trace.json in the run folder]",
)
def trace(run: str, steps: str, output: Path | None) -> None:
    """Write single steps of RUN for Perfetto or Chrome.

    Open the file with https://ui.perfetto.dev or chrome://tracing. RUN is the name of a running job, or a run
    folder. The file has a slice for each step of each worker and for each part of the step: input, compute,
    wait, exchange, update, other, nested. Each of the first 1024 steps of a call is recorded. After that,
    groups of 16 steps are recorded, at growing distances.
    """
    import msgspec

    from lockstep.coordinator.run_lookup import find_run
    from lockstep.monitoring.trace import parse_steps, slowest, trace_of

    wanted, folder = parse_steps(steps), find_run(run).folder
    # There is one event per line.
    events = trace_of(folder, wanted)
    lines = [msgspec.json.encode(event) for event in events]
    text = b"[\n" + b",\n".join(lines) + b"\n]\n"
    output = output or folder / "trace.json"
    if str(output) == "-":
        click.echo(text, nl=False)
    else:
        output.write_bytes(text)
        note(f"{click.format_filename(output)} shows {count(len(wanted), 'step')}; {slowest(events)}")


@cli.command()
@click.argument("job", shell_complete=complete_job)
def stop(job: str) -> None:
    """Stop JOB, after a last checkpoint if it saves checkpoints.

    The command has the effect of SIGTERM. JOB is a name that lockstep list shows, or the beginning of one.
    """
    from lockstep.coordinator.admin_client import accepted, send, wait_until_gone
    from lockstep.protocol.admin import StopRequest

    status = accepted(send(job, StopRequest()))
    click.echo(f"stopping {status.job}; Ctrl-C stops only this wait")
    wait_until_gone(status.job)
    click.echo(f"{status.job} has ended")


@cli.command()
@click.argument("job", required=False, shell_complete=complete_run)
@click.option(
    "-i",
    "--interval",
    type=float,
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@click.option("--once", is_flag=True, help="Show the table once, and exit.")
@click.option("--csv", "as_csv", is_flag=True, help="Write a line of CSV per worker and interval.")
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object per interval.")
def top(job: str | None, interval: float, once: bool, as_csv: bool, as_json: bool) -> None:
    """Show what workers do, and why slow ones are slow.

    JOB is a name that lockstep list shows, a run folder, its name in runs/, or the beginning of a name.
    The run may have ended. On a terminal, keys stop and scale the job, and show the Python stack of a worker.
    Elsewhere, the table is printed once. Without JOB, the command shows the GPUs of this machine and your
    jobs.
    """
    from lockstep.monitoring.top import show_job, show_machine

    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    fill_standard_descriptors()
    form: Literal["text", "csv", "json"] = "csv" if as_csv else "json" if as_json else "text"
    status = 0
    # A reader such as head closes the pipe once it has enough.
    with contextlib.suppress(BrokenPipeError):
        if job is None:
            status = show_machine(interval, form, once=once)
        else:
            status = show_job(job, interval, form, once=once)
    sys.exit(status)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Write the findings as JSON.")
@click.option(
    "--report",
    "as_report",
    is_flag=True,
    help="Write a block of Markdown for a bug report, without secrets or names of users and hosts.",
)
@click.option("--no-train", is_flag=True, help="Skip the training test at the end.")
@click.option(
    "--hosts",
    metavar="LIST",
    help="Only measure the links between these hosts, reached with ssh: node1,node2,node3.",
)
@click.option(
    "--burn-in",
    metavar="TIME",
    help="Only compute the same results on all cores for this time, such as 10m, and compare their bits; "
    "with --hosts, on those hosts.",
)
def doctor(as_json: bool, as_report: bool, no_train: bool, hosts: str | None, burn_in: str | None) -> None:
    """Check whether this machine is ready for training.

    The command checks versions, GPUs, backends, the machine and the environment, and trains for a second with
    two workers. It suggests a fix for each problem. The exit status is 0 if no check fails, 1 if jobs work
    with warnings, and 2 if they do not work.
    """
    from lockstep.doctor.command import Form, check, check_cores, check_hosts

    if as_report and (as_json or hosts is not None or burn_in is not None):
        raise click.UsageError("--report cannot be combined with --json, --hosts or --burn-in")
    if burn_in is not None:
        if no_train:
            raise click.UsageError("--burn-in cannot be combined with --no-train")
        sys.exit(check_cores(burn_in, hosts, as_json=as_json))
    if hosts is not None:
        if no_train:
            raise click.UsageError("--hosts cannot be combined with --no-train")
        sys.exit(check_hosts(hosts, as_json=as_json))
    form: Form = "json" if as_json else "report" if as_report else "table"
    sys.exit(check(form, train=not no_train))
