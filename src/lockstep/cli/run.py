"""The command `lockstep run`: its options, and how it runs the job that they describe."""

import contextlib
import importlib.util
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from lockstep.checkpoint.object_store import SHORT_RETRY_SECONDS, ObjectStore, StoreLease, folder_of, name_for
from lockstep.checkpoint.run_upload import prepare, uploaded_beside
from lockstep.checkpoint.scheduler import DEFAULT_EVERY
from lockstep.checkpoint.store import DEFAULT_KEEP
from lockstep.cli.completion import complete_script
from lockstep.cli.detached import detach
from lockstep.cli.help import GroupedCommand
from lockstep.cli.job_options import (
    WITHOUT_GPU,
    Place,
    other_processes,
    refuse_with_servers,
    resumed_spec,
    spec_of,
)
from lockstep.cli.job_restarts import (
    earlier_starts,
    events_begin,
    folder_of_job,
    start_again,
)
from lockstep.cli.notifier import (
    JobIdentity,
    Notifier,
    Receiver,
    notifier_beside,
    parse_receiver,
)
from lockstep.cli.page import page_beside
from lockstep.cli.parameter_types import (
    LARGEST_LIMIT,
    MOST_PARTS,
    PARTS,
    SEEDS,
    Folder,
    FolderOrUrl,
    RealNumber,
    Tag,
)
from lockstep.cli.task_role import as_before, destination_of, script_name, take_variables
from lockstep.cli.witness import Calls, witness_beside
from lockstep.coordinator.comparison import NOT_COMPARED, save_verdict
from lockstep.errors import ConfigError, UnfitError
from lockstep.hosts.where import PLACING, SCHEDULERS, Here, Hosts, Listen, parse_where
from lockstep.launcher.backend import BACKENDS, RULE
from lockstep.launcher.gpu_assignment import describe_sharing
from lockstep.observability.console import Tee
from lockstep.observability.exports import Exports
from lockstep.protocol.job_spec import GRACE, LARGEST_EXCHANGE, MAX_RESTARTS, TIMEOUT, InputReading, JobSpec
from lockstep.system.environment import (
    WITNESS,
    cache_folder,
    replaced_hash_seed,
    switched_off,
)
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.prose import install_command
from lockstep.system.run_folder import (
    RUNS,
    check_writable,
    claim_folder,
    claim_when_free,
    empty_folder,
    fresh_folder,
    gone_if_refused,
    leave_folder,
    remove_unused,
    remove_unused_claim,
)
from lockstep.system.standard_streams import fill_standard_descriptors
from lockstep.worker.script import Script, refuse_undecodable

if TYPE_CHECKING:
    from lockstep.protocol.admin import StopChannel

Command = TypeVar("Command", bound=Callable[..., Any])

_OF_CHECKPOINTS = ("the folder of checkpoints", "--checkpoint")
_ENDS_WITHIN = 2.0
"""Seconds in which the processes of a run end whose command was killed."""


def _of_schedulers(command: Command) -> Command:
    for name, scheduler in reversed(SCHEDULERS.items()):
        option = click.option(f"--{name.replace('_', '-')}", name, is_flag=True, help=scheduler.help)
        command = option(command)
    return command


_GROUPS = {
    "Options": (
        *("-n", "--replicas", "--backend", "--hosts", "--seed", "--checkpoint", "--run-dir", "--env"),
        *("--tensorboard", "--ui", "-m"),
    ),
    "Several hosts": (
        *("--listen", "--workers-here", "--standby", *(f"--{name.replace('_', '-')}" for name in SCHEDULERS)),
        *("--plain", "--allow-unlike"),
    ),
    "Ray": ("--on", "--cpus-per-worker", "--gpus-per-worker", "--resource-per-worker"),
    "Computation": (
        *(
            "--threads-per-worker",
            "--devices",
            "--input",
            "--update",
            "--local-steps",
            "--ps",
            "--tf-distribute",
            "--no-adopt",
            "--exact-batch",
        ),
        *("--verify-every", "--verify-replicas", "--avoid-host-after", "--witness"),
    ),
    "Checkpoints": ("--checkpoint-every", "--keep", "--one-writer", "--accept-changes"),
    "Losses and ends": ("--timeout", "--min-workers", "--max-restarts", "--restart-job", "--grace"),
    "Output": ("--detach", "--tee", "--tag", "--metrics-port", "--notify"),
}
"""The groups of options in the help; the first is what people need. Others belong to the last one."""


@click.command(cls=GroupedCommand, groups=_GROUPS, context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--workers",
    type=PARTS,
    metavar="N",
    help="Number of worker processes. Does not affect the result.  [default: one per visible GPU, else "
    f"{WITHOUT_GPU}]",
)
@click.option(
    "--ps",
    "servers",
    type=PARTS,
    metavar="P",
    help="Number of parameter servers, for a SCRIPT with a ParameterServerStrategy. They and a chief run "
    "beside the N workers, which train asynchronously.",
)
@click.option(
    "--replicas",
    type=PARTS,
    metavar="R",
    help="Number of parts into which each batch is split, fixed for the job. Affects the result: with the "
    "same R, any N up to R gives the same bits.  [default: N]",
)
@click.option(
    "--threads-per-worker",
    "threads",
    type=PARTS,
    metavar="T",
    help="Threads that compute one replica. Affects the result.  [default: usable cores // R, or 1]",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    help=f"Keras backend. Sets KERAS_BACKEND.  [default: {RULE}]",
)
@click.option(
    "--hosts",
    metavar="LIST",
    help="Hosts of workers, reached with ssh: node1,node2:2 for one worker on node1 and two on node2.  "
    "[default: this machine]",
)
@click.option(
    "--listen",
    metavar="ADDRESS[:PORT]",
    help="Run one worker here, or --workers-here, and wait at ADDRESS until other hosts have joined with the "
    "rest of the N workers: run lockstep agent --join ADDRESS:PORT there. Needs a key, except on loopback: "
    "see lockstep key.  [default port: any free one]",
)
@click.option(
    "--standby",
    metavar="ADDRESS:PORT",
    help="With --hosts, --listen, --tf-config or --slurm, if the command or the first host is lost, the "
    "agent on the host with this ADDRESS takes the job over and listens there. Needs --checkpoint with the "
    "URL of a store, which decides who leads the job.  [default: with --slurm and such a --checkpoint, the "
    "second host]",
)
@click.option(
    "--workers-here",
    "here",
    type=PARTS,
    metavar="K",
    help="With --listen or --tf-config, number of workers on this host.  [default: 1]",
)
@_of_schedulers
@click.option(
    "--on",
    "engine",
    metavar="ray[://HOST:PORT]",
    help="Run on a Ray cluster: that of this machine, or that of a Ray client's address. Workers run on "
    "all nodes with room for them, including nodes that join later.",
)
@click.option(
    "--cpus-per-worker",
    "cpus",
    type=RealNumber(min=0, min_open=True, max=MOST_PARTS),
    metavar="C",
    help="With --on, CPUs of Ray for each worker.  [default: 1]",
)
@click.option(
    "--gpus-per-worker",
    "gpus",
    type=RealNumber(min=0, max=MOST_PARTS),
    metavar="G",
    help="With --on, GPUs of Ray for each worker.  [default: 0]",
)
@click.option(
    "--resource-per-worker",
    "resources",
    multiple=True,
    metavar="NAME=AMOUNT",
    help="With --on, a custom resource of Ray for each worker. Can be repeated.",
)
@click.option(
    "--detach",
    "detached",
    is_flag=True,
    help="Return once the job has begun. It runs to its end without this command and its terminal, and "
    "lockstep attach shows its output, except with --on. Not with --slurm or --tf-config.",
)
@click.option(
    "--plain",
    is_flag=True,
    help="Do not encrypt connections between hosts: for a network in which every machine is trusted.",
)
@click.option(
    "--devices",
    metavar="LIST",
    help="GPUs: commas separate workers, + joins the GPUs of one worker, and a single entry is for all.  "
    "[default: one visible GPU per worker]",
)
@click.option(
    "--seed",
    type=SEEDS,
    help="Seed of all random numbers.  [default: 0]",
)
@click.option(
    "--input",
    "reading",
    type=click.Choice(get_args(InputReading)),
    help="Whether workers divide the reading of datasets, or each reads everything. Affects the result only "
    "if items draw random numbers, or with AutoShardPolicy.FILE or DATA.  [default: divided]",
)
@click.option(
    "--update",
    type=click.Choice(["whole", "divided"]),
    default="whole",
    show_default=True,
    help="Whether each worker updates all weights, or the workers of each host divide the update and share "
    "the optimizer's state. Does not affect the result. Works on JAX, and on PyTorch without a GPU.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable of SCRIPT on all hosts. NAME=VALUE is recorded with the run. With NAME alone, the "
    "variable must be set here, and only its name is recorded. Can be repeated.",
)
@click.option(
    "--run-dir",
    type=FolderOrUrl(path_type=Path),
    metavar="DIR|URL",
    help="Folder for logs and events of this run. A URL, such as s3://bucket/job, is a place in an object "
    "store to which the folder is uploaded while it grows.  [default: runs/<script>-<time>]",
)
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="TEXT",
    type=Tag(),
    help="A word for this run, such as lr=0.1. lockstep runs shows it and selects runs by it (--where "
    "tags=TEXT). Can be repeated.",
)
@click.option(
    "--tee",
    type=click.Choice(get_args(Tee)),
    default="chief",
    show_default=True,
    help="Workers whose output the terminal shows. The logs hold the output of all.",
)
@click.option(
    "--tensorboard",
    type=Folder(path_type=Path),
    metavar="DIR",
    help="Write metrics, the times of steps, load and membership to DIR for TensorBoard.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve metrics of the job as OpenMetrics at http://127.0.0.1:PORT/metrics. 0 means any free port.",
)
@click.option(
    "--notify",
    metavar="RECEIVER",
    help="Send RECEIVER a message, in JSON, when the job ends, a lost worker is not replaced, a metric is "
    "NaN or training stalls. exec:COMMAND reads the message from stdin. env:NAME and file:PATH contain a "
    "URL that receives it by POST.",
)
@click.option(
    "--timeout",
    type=RealNumber(min=0, max=LARGEST_LIMIT, min_open=True),
    default=TIMEOUT,
    show_default=True,
    metavar="SECONDS",
    help="Time for which other workers wait for a worker before it is killed as stuck.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0, max=LARGEST_LIMIT),
    default=MAX_RESTARTS,
    show_default=True,
    metavar="N",
    help="Number of lost workers that are replaced. After that, training continues with the others.",
)
@click.option(
    "--restart-job",
    type=click.IntRange(min=0, max=LARGEST_LIMIT),
    default=0,
    metavar="N",
    show_default=True,
    help="Number of times that a failed job starts again, from --checkpoint or from files that SCRIPT saves.",
)
@click.option(
    "--min-workers",
    type=PARTS,
    default=1,
    show_default=True,
    metavar="N",
    help="Below this number, training waits for workers to join.",
)
@click.option(
    "--checkpoint",
    type=FolderOrUrl(path_type=Path, file_okay=False),
    metavar="DIR|URL",
    help="Save checkpoints to DIR, the last one when SCRIPT ends, and resume from the newest one in DIR. URL "
    "is a place in an object store, such as s3://bucket/job.",
)
@click.option(
    "--one-writer",
    is_flag=True,
    help="Save checkpoints to a URL whose store cannot keep two jobs apart. No other job may use the URL.",
)
@click.option(
    "--checkpoint-every",
    "every",
    metavar="N|TIME",
    default=DEFAULT_EVERY,
    show_default=True,
    help="Checkpoint interval: a number of training steps, or a time such as 30s, 10m or 1h.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1, max=LARGEST_LIMIT),
    default=DEFAULT_KEEP,
    show_default=True,
    metavar="K",
    help="Number of checkpoints to keep.",
)
@click.option(
    "--grace",
    metavar="TIME",
    default=f"{GRACE:g}s",
    show_default=True,
    help="Time after Ctrl-C or SIGTERM to finish the current step and save a last checkpoint, such as 30s or "
    "2m.",
)
@click.option(
    "--verify-every",
    type=click.IntRange(min=1, max=LARGEST_LIMIT),
    metavar="K",
    help="Every K training steps, let a second worker compute one replica and a part of the sum again, "
    "compare the bits before they are used, and compare the states of all workers.",
)
@click.option(
    "--verify-replicas",
    type=click.Choice(["one", "all"]),
    default="one",
    show_default=True,
    help="With --verify-every, verify one replica and its part of the sum (each replica in turn), or all.",
)
@click.option(
    "--avoid-host-after",
    type=click.IntRange(min=1, max=LARGEST_LIMIT),
    metavar="N",
    help="With --verify-every, start no more workers on a host whose workers were found at fault N times, "
    "if there is another host.  [default: never]",
)
@click.option(
    "--allow-unlike",
    is_flag=True,
    help="Run on hosts whose processors compute different bits. The result then depends on which host "
    "computes which replica.",
)
@click.option(
    "--exact-batch",
    is_flag=True,
    help="Compute losses and metrics that compare the examples of a batch as in one process, even if "
    f"replicas have to exchange more than {LARGEST_EXCHANGE >> 20} MiB of outputs per step.",
)
@click.option(
    "--local-steps",
    default="",
    metavar="H[,nesterov[,LR,M]][,int8][,reset]",
    help="For slow links: in fit, each replica takes H steps independently, and then the replicas are "
    "averaged. With nesterov, the mean change is the gradient of an outer optimizer with learning rate LR "
    "(0.7) and momentum M (0.9). int8 sends each change of a weight in one byte. With reset, the "
    "optimizer's slots are not sent. Affects the result.  [default: all replicas take each step together]",
)
@click.option(
    "--accept-changes",
    is_flag=True,
    help="Resume even if settings of the model, optimizer, loss or callbacks differ from the checkpoint's.",
)
@click.option(
    "--tf-distribute",
    is_flag=True,
    help="Replace the strategies in tf.distribute with Lockstep's, on every backend.",
)
@click.option(
    "--no-adopt",
    is_flag=True,
    help="Let each worker run a SCRIPT without a strategy independently. By default, all workers together "
    "train each model that it compiles.",
)
@click.option(
    "--witness",
    type=click.Choice(get_args(Calls)),
    default="first",
    show_default=True,
    envvar=WITNESS,
    help="Calls of SCRIPT to compare with one process during training, as lockstep check does: the first "
    "fit, evaluate and predict of each model, every call, or none.",
)
@click.option(
    "--ui",
    is_flag=True,
    help="Show the run on a local web page while it lasts, as lockstep ui does. A note has the address.",
)
@click.option("--digests", default="", hidden=True, help="Steps to record: off, all, or the last one.")
@click.option(
    "--checks", default="", hidden=True, help="Calls to compare with one process, and nothing else."
)
@click.option(
    "--kept-steps", type=Folder(path_type=Path), hidden=True, help="Steps of such jobs on other backends."
)
@click.option(
    "--order", type=Folder(path_type=Path), hidden=True, help="Run whose order of arrivals to follow."
)
@click.option("--one-process", is_flag=True, hidden=True, help="With --order, follow that of all tasks.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.argument("script", shell_complete=complete_script)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def run(inherited: tuple[int, ...] | None, /, **options: Any) -> None:
    """Run SCRIPT on several workers, on one host or several.

    \b
    lockstep run -n 2 train.py
    lockstep run -n 2 --replicas 8 train.py --epochs 3
    lockstep run -n 2 -m package.train --epochs 3
    lockstep run --listen 10.0.0.1:7000 -n 2 train.py
    srun -N 3 --ntasks-per-node=1 lockstep run --slurm -n 6 train.py

    SCRIPT gets ARGUMENTS. The exit status is 0 if every worker succeeds. Otherwise, it is that of the first
    failure (128 + N for signal N), 130 after Ctrl-C, and 143 after SIGTERM. It is 2 if nothing was started or
    the script's settings differ from its checkpoint's.

    After Ctrl-C or SIGTERM, the chief of a job with checkpoints first completes its step and writes a
    checkpoint, within --grace. Workers then have 3 seconds to exit before they are killed. A second signal
    kills them immediately.
    """
    from lockstep.local_job.job_process import run_in_job_process

    fill_standard_descriptors()
    script = Script(options["script"], options["module"], options["arguments"])
    script.check()
    if options["servers"]:
        refuse_with_servers(options)
    where = parse_where(options, other_processes(options))
    if options["detached"] and options["ui"]:
        raise ConfigError(
            "--ui cannot be combined with --detach: nobody would see the address of the page; run lockstep "
            "ui JOB"
        )
    refuse_without_checkpoint(click.get_current_context())
    set_words = set_options(click.get_current_context(), {*PLACING, "run_dir"})
    destination = destination_of(where, script, options, set_words)
    options["named_hosts"] = ()
    if (earlier := folder_of_job()) is not None:
        destination = as_before(options, destination, earlier_starts(earlier, events_begin(earlier)))
    engine = destination.engine if isinstance(destination, Listen) else None
    receiver = parse_receiver(options["notify"]) if options["notify"] is not None else None
    # If an engine starts a coordinator again, hosts that run the job already have the variables.
    take_variables(options, all_set=engine is None or not getattr(engine.start, "again", False))
    refuse_undecodable(options["run_dir"], options["checkpoint"], options["tensorboard"])
    unused = contextlib.ExitStack()
    spec, exports = _begin(options, destination, inherited or (), unused)
    events_at = events_begin(spec.run_dir)
    if options["detached"] and folder_of_job() is None:
        detach(RunPaths(spec.run_dir.absolute()))
    _describe(spec, destination, exports, options["arguments"])
    with contextlib.ExitStack() as beside:
        if spec.run_store:
            # This is entered first, because it uploads the files that the others have written to the folder.
            beside.enter_context(uploaded_beside(spec.run_dir, spec.run_store))
        notifier = beside.enter_context(_notifier(receiver, spec, engine is not None))
        shown = replace(exports, notifier=None if notifier is None else notifier.descriptor)
        if options["ui"]:
            beside.enter_context(page_beside(spec.run_dir))
        if not (spec.checks or spec.digests):
            beside.enter_context(_witness(spec, options["witness"]))
        serve = partial(_serve, spec, destination, options, shown)
        begun = time.monotonic()
        status = run_in_job_process(serve, spec.limits.grace, None if engine is None else engine.LIFELINE)
        seconds = time.monotonic() - begun
        if notifier is not None and engine is None:
            notifier.end(status)
    leave_folder(spec.run_dir)
    start_again(
        options["restart_job"],
        status,
        spec.run_dir,
        seconds,
        events_at=events_at,
        rolls_back=bool(spec.verification.every) and isinstance(destination, Here | Hosts),
    )
    unused.close()
    sys.exit(status)


def _begin(
    options: dict[str, Any], destination: Place, inherited: tuple[int, ...], unused: contextlib.ExitStack
) -> tuple[JobSpec, Exports]:
    """Claim the folders of the job, and return the job and its exports.

    A rejected command leaves no trace.

    Args:
        options: the values of the options; those of folders become paths of this machine.
        destination: the place in which the job runs.
        inherited: the descriptors that the job's processes inherit.
        unused: removes what is new and was not used, when it is closed.
    """
    run_store = options["run_dir"] if isinstance(options["run_dir"], str) else ""
    if run_store:
        options["run_dir"] = _folder_for(run_store)
    folder, board = _folder_of(options["checkpoint"]), options["tensorboard"]
    new_folder = folder if folder is not None and not folder.exists() else None
    if folder is not None and new_folder is None:
        # The folder must not change while it is read.
        claim_folder(folder, *_OF_CHECKPOINTS, patience=_ENDS_WITHIN)
    options["lease"] = _fetch(options)
    spec = replace(spec_of(options, destination), inherited=inherited)
    is_new = options["run_dir"] is None or not options["run_dir"].exists()
    if board is not None and not board.exists():
        unused.callback(_remove_empty, board)
    with gone_if_refused(board), gone_if_refused(new_folder):
        exports = _exports(options)
        if new_folder is not None:
            claim_folder(new_folder, *_OF_CHECKPOINTS, patience=_ENDS_WITHIN)
            unused.callback(remove_unused_claim, new_folder)
        with gone_if_refused(options["run_dir"]):
            if isinstance(destination, Listen) and destination.engine is not None:
                run_dir = claim_when_free(options["run_dir"])
            else:
                run_dir = folder_of_job() or options["run_dir"] or _fresh_folder(options)
                claim_folder(run_dir, patience=_ENDS_WITHIN)
            if is_new:
                unused.callback(remove_unused, run_dir)
            if run_store and folder_of_job() is None:
                note(f"the run folder {run_dir} is uploaded to {run_store}")
                prepare(run_store, run_dir)
            empty_folder(RunPaths(run_dir).sources)
            # The verdict comes from an earlier run.
            RunPaths(run_dir).comparison.unlink(missing_ok=True)
    return replace(spec, run_dir=run_dir, run_store=run_store), exports


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _describe(spec: JobSpec, destination: Place, exports: Exports, arguments: Sequence[str]) -> None:
    """Describe the job, and what affects its bits."""
    if exports.metrics is not None:
        with socket.socket(fileno=os.dup(exports.metrics)) as listener:
            address, port = listener.getsockname()
        note(f"metrics at http://{address}:{port}/metrics")
    if isinstance(destination, Here):
        first, rest = spec.describe()
        note(first)
        note(f"{rest}{_passed_on(arguments)}")
    if sharing := describe_sharing(spec.devices):
        note(sharing)
    for disabling in switched_off() if spec.devices else ():
        note(f"{disabling} disables deterministic operations: equal bits are no longer guaranteed")
    if hash_seed := replaced_hash_seed(spec.seed):
        note(f"workers get PYTHONHASHSEED from the job's seed, --seed {spec.seed}, instead of {hash_seed}")


def _serve(
    spec: JobSpec, destination: Place, options: dict[str, Any], exports: Exports, command: "StopChannel"
) -> int:
    """Run the job in the process that the command has forked for it, and return its exit status."""
    resumed = partial(resumed_spec, options, destination)
    match destination:
        case Here():
            return _serve_here(spec, command, exports)
        case Hosts():
            from lockstep.hosts.job_on_hosts import run_over_ssh

            return run_over_ssh(spec, resumed, command, exports)
        case Listen():
            from lockstep.hosts.listening_job import run_listening

            return run_listening(spec, destination, resumed, command, exports)


def _folder_of(location: Path | str | None) -> Path | None:
    """Return the folder of this machine for `--checkpoint`, or None if the job saves no checkpoints."""
    return folder_of(location) if isinstance(location, str) else location


def _folder_for(url: str) -> Path:
    """Return the local folder for a run folder in a store: in the cache if `RUNS` cannot be used."""
    try:
        check_writable(RUNS if RUNS.exists() else Path(), "the run's folder", "--run-dir")
    except ConfigError:
        return cache_folder() / RUNS / name_for(url)
    return RUNS / name_for(url)


def _fetch(options: Mapping[str, Any]) -> StoreLease | None:
    """Bring the newest checkpoint of the store to this machine; return the right to write there, if any.

    The lease is that of a new job. A coordinator that takes a job over keeps the job's.
    """
    url = options["checkpoint"]
    if not isinstance(url, str):
        return None
    from lockstep.checkpoint.mirror import fetch

    note(f"looking for checkpoints in {url}")
    store = ObjectStore(url, conditional=not options["one_writer"], retry_seconds=SHORT_RETRY_SECONDS)
    store.check_conditions()
    base = fetch(store, folder_of(url), options["keep"], note)
    return StoreLease(url, secrets.token_hex(8), base, options["one_writer"])


def _notifier(
    receiver: Receiver | None, spec: JobSpec, is_continued: bool
) -> contextlib.AbstractContextManager[Notifier | None]:
    """Deliver messages about a job to a receiver, if the user has named one."""
    if receiver is None:
        return contextlib.nullcontext()
    folder = spec.run_dir.absolute()
    identity = JobIdentity(folder.name, spec.target, str(folder), socket.gethostname())
    return notifier_beside(receiver, identity, is_continued=is_continued)


def _witness(spec: JobSpec, calls: Calls) -> contextlib.AbstractContextManager[None]:
    """Compare the script of a job with one process, which runs beside the job."""
    if calls == "off":
        return contextlib.nullcontext()
    if spec.parameter_servers or spec.replicas == 1:
        has = "parameter servers" if spec.parameter_servers else "one replica"
        save_verdict(RunPaths(spec.run_dir), f"{NOT_COMPARED}: the job has {has}")
        return contextlib.nullcontext()
    words = ["--replicas", str(spec.replicas), "--seed", str(spec.seed)]
    words += ["--threads-per-worker", str(spec.threads)] if spec.threads else []
    words += ["--backend", spec.backend] if spec.backend is not None else []
    words += ["--tf-distribute"] if spec.tf_distribute else []
    words += ["--exact-batch"] if spec.exact_batch else []
    words += [] if spec.adopts else ["--no-adopt"]
    program = [*(["-m"] if spec.module else []), "--", spec.target, *spec.arguments]
    mode = "--local-steps" if spec.local_steps else ""
    return witness_beside(spec.run_dir, words, program, calls, mode)


def _passed_on(arguments: Sequence[str]) -> str:
    """Name the arguments of the script that look like options of `lockstep run`, if any do."""
    shown = [param for param in run.params if isinstance(param, click.Option) and not param.hidden]
    names = {name for param in shown for name in param.opts}
    alike = dict.fromkeys(word for argument in arguments if (word := argument.partition("=")[0]) in names)
    return f"; {', '.join(alike)} after the script is for the script" if alike else ""


def set_options(context: click.Context, without: Collection[str] = PLACING) -> list[str]:
    """Return the command-line words of the options that the user has set.

    Args:
        context: the context of `run`, or of a command that has some of its parameters.
        without: the parameters to omit; by default, those that determine where workers run.
    """
    words = []
    for param in run.params:
        assert param.name is not None
        source = context.get_parameter_source(param.name)
        is_set = isinstance(param, click.Option) and source is click.core.ParameterSource.COMMANDLINE
        if is_set and param.name not in without:
            option, value = max(param.opts, key=len), context.params[param.name]
            for each in value if param.multiple else (value,):
                words += [option] if getattr(param, "is_flag", False) else [option, str(each)]
    return words


def refuse_without_checkpoint(context: click.Context) -> None:
    """Raise ConfigError if the user has set options of `run` that have no effect without `--checkpoint`."""
    for name, option in (("every", "--checkpoint-every"), ("keep", "--keep")):
        is_set = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_set and context.params["checkpoint"] is None:
            raise ConfigError(
                f"{option} needs --checkpoint DIR, without which this command saves no checkpoints; for a "
                f"script with lockstep.callbacks.Checkpoint, give {name}= to the callback"
            )
    in_store = isinstance(context.params["checkpoint"], str)
    if context.params["one_writer"] and not in_store:
        raise ConfigError("--one-writer needs --checkpoint with a URL, such as s3://bucket/job")
    if context.params.get("standby") and (not in_store or context.params["one_writer"]):
        raise ConfigError(
            "--standby needs --checkpoint with a URL, such as s3://bucket/job, without --one-writer: if two "
            "hosts cannot reach each other, only the store can decide which of them leads the job"
        )


def _exports(options: Mapping[str, Any]) -> Exports:
    """Return the exports of the job; raise an error in one line if one is impossible."""
    folder, port, metrics = options["tensorboard"], options["metrics_port"], None
    if folder is not None:
        package = importlib.util.find_spec("tensorboard")
        # A folder of that name in the current folder is not a package.
        if package is None or package.origin is None:
            raise UnfitError(f"--tensorboard needs the package tensorboard: {install_command('tensorboard')}")
        check_writable(folder, "the folder for TensorBoard", "--tensorboard")
        folder = folder.absolute()
    if port is not None:
        from lockstep.observability.metrics_server import listen

        try:
            metrics = listen(port).detach()
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port} cannot be used: {error.strerror}; give another port, or 0 for any "
                "free one"
            ) from None
    return Exports(folder, metrics)


def _fresh_folder(options: Mapping[str, Any]) -> Path:
    return fresh_folder(RUNS, script_name(options), time.time())


def _serve_here(spec: JobSpec, command: "StopChannel", exports: Exports) -> int:
    """Run a job of this machine."""
    if (saved := spec.checkpoints) is not None and saved.store is not None:
        from lockstep.checkpoint.mirror import take_lease

        take_lease(saved.folder, saved.store, saved.resume)
    from lockstep.launcher.fork_server import ForkServerPlan
    from lockstep.launcher.launcher import LocalLauncher

    launcher = LocalLauncher(ForkServerPlan.of(spec))
    # The fork server and this process import at the same time.
    launcher.prepare()
    from lockstep.agent.starter import LocalStarter
    from lockstep.agent.worker_output import LocalOutput
    from lockstep.local_job.composition import LocalHost, run_job
    from lockstep.observability.console import Console
    from lockstep.supervisor.state import State
    from lockstep.system.descendants import LinuxDescendants
    from lockstep.system.event_loop import EventLoop
    from lockstep.system.output import Sink

    paths = RunPaths(spec.run_dir.absolute())
    console = Console(Sink(1), Sink(2), spec.tee, spec.view.chief)
    output = LocalOutput(console, paths)
    starter = LocalStarter(spec, paths, os.getpid(), launcher, output)
    local = LocalHost(output, starter, LinuxDescendants())
    with EventLoop() as loop:
        return run_job(
            spec,
            State.begin(spec),
            paths,
            command,
            pid=os.getppid(),
            console=console,
            loop=loop,
            local=local,
            exports=exports,
        )
