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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

import click

from lockstep.checkpoint.object_store import ObjectStore, StoreLease, folder_of, name_for
from lockstep.checkpoint.run_upload import prepare, uploaded_beside
from lockstep.checkpoint.scheduler import DEFAULT_EVERY, DEFAULT_KEEP
from lockstep.cli.completion import complete_script
from lockstep.cli.detached import detach
from lockstep.cli.help import GroupedCommand
from lockstep.cli.job_options import Place, backend_of, other_processes, resumed_spec, spec_of
from lockstep.cli.job_restarts import (
    EarlierStarts,
    earlier_starts,
    events_begin,
    folder_of_job,
    start_again,
    trusted_hosts,
)
from lockstep.cli.notifier import (
    JobIdentity,
    Notifier,
    Receiver,
    notifier_beside,
    parse_receiver,
    variable_with_url,
)
from lockstep.cli.page import page_beside
from lockstep.cli.parameter_types import PARTS, Folder, FolderOrUrl, Seconds, Tag
from lockstep.cli.witness import Calls, witness_beside
from lockstep.coordinator.comparison import NOT_COMPARED, save_verdict
from lockstep.errors import ConfigError, NetworkError, UnfitError
from lockstep.hosts.task_place import TaskRole
from lockstep.hosts.where import PLACING, SCHEDULERS, Engine, Here, Hosts, Listen, ScheduledTask, parse_where
from lockstep.launcher.backend import BACKENDS, RULE
from lockstep.launcher.gpu_assignment import describe_sharing
from lockstep.observability.console import Tee
from lockstep.observability.exports import Exports
from lockstep.protocol.job_spec import GRACE, MAX_RESTARTS, TIMEOUT, InputReading, JobSpec
from lockstep.system.clock import parse_seconds
from lockstep.system.environment import (
    WITNESS,
    cache_folder,
    parse_variables,
    replaced_hash_seed,
    require_variables,
    set_recorded,
    switched_off,
    take_environment,
    unrecorded,
)
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import (
    RUNS,
    check_writable,
    claim_folder,
    claim_when_free,
    empty_folder,
    fresh_folder,
    gone_if_refused,
    leave_folder,
    name_on_any_host,
    remove_unused,
    remove_unused_claim,
)
from lockstep.system.standard_streams import fill_standard_descriptors
from lockstep.transport.addresses import is_here, resolve_host, split_address, with_port
from lockstep.worker.script import Script, refuse_undecodable

if TYPE_CHECKING:
    from lockstep.checkpoint.held import HeldCheckpoint
    from lockstep.protocol.admin import StopChannel

Command = TypeVar("Command", bound=Callable[..., Any])

_STANDBY_LOST = 60.0
"""Seconds in which the first host joins the job that its standby leads."""
_OF_CHECKPOINTS = ("the folder of checkpoints", "--checkpoint")
_FIRST_RETRIES = 4
"""How often a request to an object store is repeated before a job begins: some 8 seconds in all."""
_ENDS_WITHIN = 2.0
"""Seconds in which the processes of a run end whose command was killed."""
_TIMES = 10**9
_SEEDS = click.IntRange(min=0, max=2**63 - 1)


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
    help="Number of worker processes. Does not affect the result.  [default: one per visible GPU, else 2]",
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
    type=click.IntRange(min=1, max=4096),
    metavar="K",
    help="With --listen or --tf-config, number of workers on this host.  [default: 1]",
)
@_of_schedulers
@click.option(
    "--on",
    "engine",
    metavar="ray[://HOST:PORT]",
    help="Run on a Ray cluster: that of this machine, or that of a Ray client's address. Workers run on "
    "all nodes with room for them, also on nodes that join later.",
)
@click.option(
    "--cpus-per-worker",
    "cpus",
    type=click.FloatRange(min=0, min_open=True, max=4096),
    metavar="C",
    help="With --on, CPUs of Ray for each worker.  [default: 1]",
)
@click.option(
    "--gpus-per-worker",
    "gpus",
    type=click.FloatRange(min=0, max=4096),
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
    type=_SEEDS,
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
    help="Whether each worker updates all weights, or the workers of one machine divide the update and share "
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
    "NaN or the training stalls. exec:COMMAND reads the message from stdin. env:NAME and file:PATH contain a "
    "URL that receives it by POST.",
)
@click.option(
    "--timeout",
    type=Seconds(min=0, max=_TIMES, min_open=True),
    default=TIMEOUT,
    show_default=True,
    metavar="SECONDS",
    help="Time for which other workers wait for a worker before it is killed as stuck.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0, max=_TIMES),
    default=MAX_RESTARTS,
    show_default=True,
    metavar="N",
    help="Number of lost workers that are replaced. After that, training continues with the others.",
)
@click.option(
    "--restart-job",
    type=click.IntRange(min=0, max=_TIMES),
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
    type=click.IntRange(min=1, max=_TIMES),
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
    type=click.IntRange(min=1, max=_TIMES),
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
    type=click.IntRange(min=1, max=_TIMES),
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
    "replicas have to exchange more than 16 MiB of outputs per step.",
)
@click.option(
    "--local-steps",
    default="",
    metavar="H[,nesterov[,LR,M]][,int8][,reset]",
    help="For slow links: in fit, each replica takes H steps by itself, and then the replicas are averaged. "
    "With nesterov, the mean change is the gradient of an outer optimizer of learning rate LR (0.7) and "
    "momentum M (0.9). int8 sends changes of weights in a byte each. With reset, the optimizer's slots are "
    "not sent. Affects the result.  [default: all replicas take each step together]",
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
        _refuse_with_servers(options)
    where = parse_where(options, other_processes(options))
    if options["detached"] and options["ui"]:
        raise ConfigError(
            "--ui cannot be combined with --detach: nobody would see the address of the page; run lockstep "
            "ui JOB"
        )
    refuse_without_checkpoint(click.get_current_context())
    match where:
        case Engine():
            destination: Place = _of_engine(where, options)
        case ScheduledTask():
            destination = _of_task(where, script, options)
        case Listen() if options["standby"]:
            _follow_standby(where, options)
            destination = where
        case Hosts() if options["standby"]:
            _refuse_with_led_standby(options["standby"], encrypted=not options["plain"])
            destination = where
        case _:
            destination = where
    options["named_hosts"] = ()
    if (earlier := folder_of_job()) is not None:
        destination = _as_before(options, destination, earlier_starts(earlier, events_begin(earlier)))
    engine = destination.engine if isinstance(destination, Listen) else None
    receiver = parse_receiver(options["notify"]) if options["notify"] is not None else None
    # Where an engine starts a coordinator again, hosts that run the job have the variables.
    _take_variables(options, all_set=engine is None or not getattr(engine.start, "again", False))
    refuse_undecodable(options["run_dir"], options["checkpoint"], options["tensorboard"])
    run_store = options["run_dir"] if isinstance(options["run_dir"], str) else ""
    if run_store:
        options["run_dir"] = _folder_for(run_store)
    folder, board = _folder_of(options["checkpoint"]), options["tensorboard"]
    # The folder must not change while it is read; a rejected command leaves nothing behind.
    existed = folder is not None and folder.exists()
    if folder is not None and existed:
        claim_folder(folder, *_OF_CHECKPOINTS, patience=_ENDS_WITHIN)
    options["lease"] = _fetch(options)
    spec = replace(spec_of(options, destination), inherited=inherited or ())
    created = options["run_dir"] is None or not options["run_dir"].exists()
    new_board = board is not None and not board.exists()
    with gone_if_refused(board), gone_if_refused(folder if folder is not None and not existed else None):
        exports = _exports(options)
        if folder is not None and not existed:
            claim_folder(folder, *_OF_CHECKPOINTS, patience=_ENDS_WITHIN)
        with gone_if_refused(options["run_dir"]):
            if engine is not None:
                run_dir = claim_when_free(options["run_dir"])
            else:
                run_dir = folder_of_job() or options["run_dir"] or _fresh_folder(options)
                claim_folder(run_dir, patience=_ENDS_WITHIN)
            if run_store and folder_of_job() is None:
                note(f"the run folder {run_dir} is uploaded to {run_store}")
                prepare(run_store, run_dir, _FIRST_RETRIES)
            spec = replace(spec, run_dir=run_dir, run_store=run_store)
            events_at = events_begin(run_dir)
            empty_folder(RunPaths(spec.run_dir).sources)
            # The verdict is that of an earlier run.
            RunPaths(spec.run_dir).comparison.unlink(missing_ok=True)

    def resumed(begun: JobSpec, held: "HeldCheckpoint") -> JobSpec:
        return resumed_spec(options, destination, begun, held)

    if options["detached"] and folder_of_job() is None:
        detach(RunPaths(spec.run_dir.absolute()))
    if exports.metrics is not None:
        with socket.socket(fileno=os.dup(exports.metrics)) as listener:
            address, port = listener.getsockname()
        note(f"metrics at http://{address}:{port}/metrics")
    if isinstance(destination, Here):
        first, rest = spec.describe()
        note(first)
        note(f"{rest}{_passed_on(options['arguments'])}")
    if sharing := describe_sharing(spec.devices):
        note(sharing)
    for disabling in switched_off() if spec.devices else ():
        note(f"{disabling} disables deterministic operations: equal bits are no longer guaranteed")
    if hash_seed := replaced_hash_seed(spec.seed):
        note(f"workers get PYTHONHASHSEED from the job's seed, --seed {spec.seed}, instead of {hash_seed}")

    def serve(command: "StopChannel") -> int:
        match destination:
            case Here():
                return _serve_here(spec, command, shown)
            case Hosts():
                from lockstep.hosts.job_on_hosts import run_over_ssh

                return run_over_ssh(spec, resumed, command, shown)
            case Listen():
                from lockstep.hosts.listening_job import run_listening

                return run_listening(spec, destination, resumed, command, shown)

    with contextlib.ExitStack() as beside:
        if run_store:
            # Entered first: it uploads what the others have written to the folder.
            beside.enter_context(uploaded_beside(spec.run_dir, run_store))
        notifier = beside.enter_context(_notifier(receiver, spec, engine is not None))
        shown = replace(exports, notifier=None if notifier is None else notifier.descriptor)
        if options["ui"]:
            beside.enter_context(page_beside(spec.run_dir))
        if not (spec.checks or spec.digests):
            beside.enter_context(_witness(spec, options["witness"]))
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
    if created:
        remove_unused(spec.run_dir)
    if folder is not None and not existed:
        remove_unused_claim(folder)
    if new_board:
        # Where nothing was trained, it is empty.
        with contextlib.suppress(OSError):
            board.rmdir()
    sys.exit(status)


def _as_before(options: dict[str, Any], destination: Place, starts: EarlierStarts) -> Place:
    """Set what a job that starts again keeps, and return where it runs: without hosts that are at fault."""
    if not options["servers"]:
        options["replicas"] = options["replicas"] or starts.replicas
    options["threads"] = options["threads"] or starts.threads
    most = options["avoid_host_after"]
    if not most or not isinstance(destination, Hosts):
        return destination
    options["named_hosts"] = named = starts.named_hosts
    in_store = isinstance(options["checkpoint"], str)
    hosts = trusted_hosts(destination.hosts, named, most, options["min_workers"], in_store=in_store)
    return replace(destination, hosts=hosts)


def _folder_of(location: Path | str | None) -> Path | None:
    """Return the folder of this machine for `--checkpoint`, or None if the job saves no checkpoints."""
    return folder_of(location) if isinstance(location, str) else location


def _folder_for(url: str) -> Path:
    """Return the folder of this machine for a run folder in a store: in the cache where `RUNS` cannot be."""
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
    store = ObjectStore(url, conditional=not options["one_writer"], retries=_FIRST_RETRIES)
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


def _take_variables(options: Mapping[str, Any], *, all_set: bool = True) -> None:
    """Set the variables of the script here.

    Raises:
        ConfigError: one lacks a value and `all_set`, or chooses another backend than the options.
    """
    variables = parse_variables(options["env"])
    backend = variables.get("KERAS_BACKEND")
    if backend is not None and options["backend"] not in (None, backend):
        raise ConfigError(
            f"--env KERAS_BACKEND={backend} and --backend {options['backend']} choose different backends; "
            "give one of them"
        )
    if all_set:
        require_variables(variables)
    set_recorded(variables)


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
    """Say which arguments of the script look like options of `lockstep run`, if any does."""
    shown = [param for param in run.params if isinstance(param, click.Option) and not param.hidden]
    names = {name for param in shown for name in param.opts}
    alike = dict.fromkeys(word for argument in arguments if (word := argument.partition("=")[0]) in names)
    return f"; {', '.join(alike)} after the script is for the script" if alike else ""


def set_options(context: click.Context, without: Collection[str] = PLACING) -> list[str]:
    """Return the words of the options that the user has set.

    Args:
        context: the context of `run`, or of a command that has some of its parameters.
        without: the parameters to leave out; by default, those that say where workers run.
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
    """Raise ConfigError if the user has set options of `run` that do nothing without `--checkpoint`."""
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
            "hosts do not hear each other, only the store can decide which of them leads the job"
        )


def _of_engine(engine: Engine, options: Mapping[str, Any]) -> Listen:
    """Have an engine run the job, and end this process; or return where the engine's coordinator listens."""
    from lockstep.hosts.engine_link import EngineLink
    from lockstep.protocol.engine import StartCoordinator

    link = EngineLink.inherited(StartCoordinator)
    if link is None:
        from lockstep.ray.command import run_on_ray
        from lockstep.ray.placement import parse_resources, worker_needs

        context, workers = click.get_current_context(), options["workers"]
        # The same folder for all coordinators of the job, on whatever node.
        name = name_on_any_host(_script_name(options))
        fixed = ("run", "--on", "ray", "-n", str(workers), "--run-dir", options["run_dir"] or RUNS / name)
        words = (
            *map(str, fixed),
            *set_options(context, {*PLACING, "run_dir"}),
            "--",
            options["script"],
            *options["arguments"],
        )
        needs = worker_needs(engine.cpus, engine.gpus, parse_resources(engine.resources))
        env = parse_variables(options["env"])
        require_variables(env)
        variables = unrecorded(env)
        if (url := variable_with_url(options["notify"] or "")) is not None:
            variables[url] = parse_receiver(options["notify"]).url
        status = run_on_ray(
            address=engine.address,
            name=name,
            words=words,
            workers=engine.processes,
            resources=needs,
            detached=engine.detached,
            variables=variables,
        )
        sys.exit(status)
    assert isinstance(link.start, StartCoordinator)
    return Listen(engine.processes, with_port(link.start.address), here=0, engine=link)


def _refuse_with_servers(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that jobs with parameter servers do not support."""
    names = ("replicas", "checkpoint", "devices", "verify_every")
    refused = [f"--{name.replace('_', '-')}" for name in names if options[name] is not None]
    refused += ["--min-workers"] if options["min_workers"] > 1 else []
    refused += ["--update"] if options["update"] == "divided" else []
    refused += ["--local-steps"] if options["local_steps"] else []
    reasons = {
        "--replicas": "a step is one batch on one worker",
        "--checkpoint": "use keras.callbacks.BackupAndRestore or ModelCheckpoint",
        "--devices": "all processes share the visible GPUs; set CUDA_VISIBLE_DEVICES",
        "--verify-every": "lockstep rerun repeats the whole run",
        "--min-workers": "workers do not wait for one another",
        "--update": "the servers have the optimizer's state",
        "--local-steps": "workers train asynchronously",
    }
    if refused:
        raise ConfigError(f"--ps cannot be combined with {refused[0]}: {reasons[refused[0]]}")


def _of_task(tasks: ScheduledTask, script: Script, options: dict[str, Any]) -> Here | Listen:
    """Return where the job that this process begins runs, or play another role of its task, and end."""
    from lockstep.hosts.agent_command import AgentOptions, join_and_run

    scheduler = tasks.scheduler
    task = scheduler.place(tasks.processes, tasks.here, options["servers"] or 0)
    if isinstance(options["checkpoint"], str) and not options["one_writer"]:
        options["standby"] = options["standby"] or task.standby
    match task.role:
        case TaskRole.IDLE_SERVER:
            note("a parameter server has nothing to do: the workers hold the whole state")
            sys.exit(0)
        case TaskRole.EVALUATOR:
            _evaluate(script, options)
        case TaskRole.AGENT:
            # The cluster may not know the name of this host yet.
            _, port = split_address(task.address)
            joins = AgentOptions(
                task.coordinator,
                task.here,
                port=port,
                encrypted=not options["plain"],
                tasks=task.tasks,
                task=task.task,
            )
            if scheduler.starts_all:
                # The coordinator writes to the same terminal, and gets the same signals.
                joins = replace(joins, quiet=True, grace=parse_seconds(options["grace"], "--grace"))
            else:
                joins = replace(joins, shows=True)
                note(f"{task.name} joins {task.coordinator}, which coordinates the job")
            if options["standby"]:
                joins = replace(joins, others=(options["standby"],))
            sys.exit(join_and_run(joins))
        case TaskRole.COORDINATOR:
            address, retries = with_port(task.address), not scheduler.starts_all
            where = Listen(
                task.workers, address, task.here, retries=retries, task=task.name, tasks=task.tasks
            )
            if options["standby"]:
                _follow_standby(where, options)
            return where
    return Here(task.workers)


def _follow_standby(where: Listen, options: Mapping[str, Any]) -> None:
    """Join the job, and end this process, if the standby has taken it over."""
    from lockstep.hosts.agent_command import AgentOptions, join_and_run
    from lockstep.hosts.standby import is_led_at

    standby, encrypted = options["standby"], not options["plain"]
    if standby == where.address:
        raise ConfigError(f"--standby {standby} is the address of the first host; give that of another host")
    if is_led_at(standby, encrypted=encrypted):
        note(f"the job continues at {standby}, and this host joins it")
        port, spare = split_address(where.address)[1], split_address(standby)[1]
        own = where.address if port else ""
        # Its own port is free, for a coordinator. Firewalls between the tasks of a cluster know both ports.
        joins = AgentOptions(
            standby,
            where.here,
            port=spare if where.task and spare != port else 0,
            encrypted=encrypted,
            patience=_STANDBY_LOST,
            shows=where.retries,
            others=(own,) if own else (),
            leads_at=own,
        )
        sys.exit(join_and_run(joins))


def _refuse_with_led_standby(standby: str, *, encrypted: bool) -> None:
    """Raise ConfigError if the standby has taken the job over, or cannot be on another host."""
    from lockstep.hosts.standby import is_led_at

    with contextlib.suppress(NetworkError, OSError):
        if is_here(*resolve_host(*split_address(standby))):
            raise ConfigError(f"--standby {standby} is an address of this host; give that of another host")
    if is_led_at(standby, encrypted=encrypted):
        raise ConfigError(
            f"the job continues at {standby}, without this command: lockstep list there shows it, and a host "
            f"takes part with lockstep agent --join {standby}"
        )


def _evaluate(script: Script, options: Mapping[str, Any]) -> NoReturn:
    """Run the script in this process, which is the evaluator of its cluster and has no job."""
    _take_variables(options)
    choice = backend_of(options, None)
    take_environment({"KERAS_BACKEND": choice.backend})
    note(f"an evaluator runs the script alone, {choice}")
    if options["tf_distribute"]:
        from lockstep.worker.tf_distribute_shim import replace_names

        replace_names()
    script.run()
    sys.exit(0)


def _exports(options: Mapping[str, Any]) -> Exports:
    """Return the exports of the job; raise an error in one line if one is impossible."""
    folder, port, metrics = options["tensorboard"], options["metrics_port"], None
    if folder is not None:
        package = importlib.util.find_spec("tensorboard")
        # A folder of that name in the current one is not a package.
        if package is None or package.origin is None:
            raise UnfitError(
                "--tensorboard needs the package tensorboard: pip install 'keras-lockstep[tensorboard]'"
            )
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
    return fresh_folder(RUNS, _script_name(options), time.time())


def _script_name(options: Mapping[str, Any]) -> str:
    return options["script"] if options["module"] else Path(options["script"]).stem


def _serve_here(spec: JobSpec, command: "StopChannel", exports: Exports) -> int:
    """Run a job of this machine in the process that the command has forked for it."""
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
