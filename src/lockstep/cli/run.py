"""The command `lockstep run`: turns options into the specification of a job, and runs the job."""

import contextlib
import importlib.util
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import click

from lockstep.cli.completion import complete_script
from lockstep.cli.job_restarts import folder_of_job, start_again
from lockstep.cli.page import page_beside
from lockstep.cli.witness import Calls, witness_beside
from lockstep.errors import ConfigError, UnfitError
from lockstep.hosts.host_list import parse_hosts
from lockstep.launcher.backend import (
    BACKENDS,
    RULE,
    Choice,
    Wishes,
    choose_backend,
    refuse_legacy_keras,
    require_tensorflow,
)
from lockstep.launcher.gpu_assignment import assign, parse_devices, spread
from lockstep.launcher.import_scan import setting_of
from lockstep.observability.console import Tee
from lockstep.observability.exports import Exports
from lockstep.protocol.job_spec import GRACE, Devices, InputReading, JobHost, JobSpec
from lockstep.system.clock import parse_seconds
from lockstep.system.environment import (
    LEGACY_KERAS,
    ONE_PROCESS,
    ORDER,
    Checkpoints,
    is_checking,
    is_repeating,
    keras_backend,
    legacy_keras,
    replaced_hash_seed,
    switched_off,
    take_environment,
    tf_config_given,
    usable_cores,
    visible_gpus,
)
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.process_limits import check_limits
from lockstep.system.prose import count
from lockstep.system.run_folder import (
    check_writable,
    claim_folder,
    claim_when_free,
    empty_folder,
    fresh_folder,
    gone_if_refused,
    leave_folder,
    remove_abandoned,
    remove_unused,
    remove_unused_claim,
)
from lockstep.system.standard_streams import fill_standard_descriptors
from lockstep.topology import place
from lockstep.transport.addresses import split_address, with_port
from lockstep.worker.script import Script, refuse_undecodable

if TYPE_CHECKING:
    from lockstep.checkpoint.held import HeldCheckpoint
    from lockstep.hosts.engine_link import EngineLink
    from lockstep.hosts.job_on_hosts import Resumed
    from lockstep.protocol.channel import Channel
    from lockstep.protocol.host import Stop

_ENGINE = re.compile(r"ray|ray://\S+:[0-9]+")
_WITHOUT_GPU = 2
_OF_CHECKPOINTS = ("the folder of checkpoints", "--checkpoint")
_ENDS_WITHIN = 2.0
"""Seconds in which the processes of a run end whose command was killed."""
PARTS = click.IntRange(min=1, max=4096)
"""The range of the number of workers or replicas."""
PLACING = (
    *("workers", "hosts", "listen", "here", "tf_config", "slurm", "devices"),
    *("engine", "cpus", "gpus", "resources", "detached"),
    "ui",
)
"""The parameters of `run` that say where workers run, and `--ui`; `lockstep export` sets them itself."""
_TIMES = 10**9
_SEEDS = click.IntRange(min=0, max=2**63 - 1)


class _Seconds(click.FloatRange):
    """A time; rejects `nan`, which click accepts in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number of seconds, or fail."""
        seconds = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds


class _Folder(click.Path):
    """A folder of this machine; rejects the empty path, which would mean the current one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail."""
        if not os.fspath(value):
            self.fail("the path is empty; name a folder, such as ./folder.", param, ctx)
        if "://" in os.fsdecode(value):
            self.fail(f"{os.fsdecode(value)} is no folder of this machine.", param, ctx)
        return super().convert(value, param, ctx)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--workers",
    type=PARTS,
    metavar="N",
    help="Number of worker processes; does not affect the result.  [default: one per visible GPU, else 2]",
)
@click.option(
    "--ps",
    "servers",
    type=PARTS,
    metavar="P",
    help="Number of parameter servers, for a SCRIPT with a ParameterServerStrategy; they and a chief run "
    "beside the N workers, which train asynchronously.",
)
@click.option(
    "--replicas",
    type=PARTS,
    metavar="R",
    help="Number of parts that each batch is split into; affects the result.  [default: N]",
)
@click.option(
    "--threads-per-worker",
    "threads",
    type=PARTS,
    metavar="T",
    help="Threads per replica computation; affects the result.  [default: usable cores // R, or 1]",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    help=f"Keras backend; sets KERAS_BACKEND.  [default: {RULE}]",
)
@click.option(
    "--hosts",
    metavar="LIST",
    help="Hosts to run workers on, reached with ssh: node1,node2:2 for one worker on node1 and two on "
    "node2.  [default: this machine]",
)
@click.option(
    "--listen",
    metavar="ADDRESS[:PORT]",
    help="Run one worker here, or --workers-here, and wait at ADDRESS until other hosts have joined with the "
    "rest of the N workers: run lockstep agent --join ADDRESS:PORT there. Needs a key, except on loopback: "
    "see lockstep key.  [default port: any free one]",
)
@click.option(
    "--workers-here",
    "here",
    type=click.IntRange(min=1, max=4096),
    metavar="K",
    help="With --listen or --tf-config, number of workers on this host.  [default: 1]",
)
@click.option(
    "--tf-config",
    is_flag=True,
    help="Take the place of this process in the cluster from TF_CONFIG, as a TFJob sets it in each pod: one "
    "worker per task, or --workers-here, started by this command on each host.",
)
@click.option(
    "--slurm",
    is_flag=True,
    help="Take the place of this process from the variables of Slurm: srun starts this command once on each "
    "host, and -n workers are divided among them, by default one each. Needs a key: see lockstep key.",
)
@click.option(
    "--on",
    "engine",
    metavar="ray[://HOST:PORT]",
    help="Run on a Ray cluster: the one of this machine, or that of a Ray client's address. Workers run on "
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
    help="With --on, a custom resource of Ray for each worker; can be repeated.",
)
@click.option(
    "--detach",
    "detached",
    is_flag=True,
    help="With --on, return once the job is submitted; it runs to its end without this command.",
)
@click.option(
    "--plain",
    is_flag=True,
    help="Do not encrypt connections between hosts: for a network in which every machine is trusted.",
)
@click.option(
    "--devices",
    metavar="LIST",
    help="GPUs: commas separate workers, + joins the GPUs of one worker, a single entry is for all.  "
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
    help="Whether workers divide the reading of datasets, or each reads everything; affects the result only "
    "if items draw random numbers, or with AutoShardPolicy.FILE or DATA.  [default: divided]",
)
@click.option(
    "--run-dir",
    type=_Folder(path_type=Path),
    help="Folder for logs and events of this run.  [default: runs/<script>-<time>]",
)
@click.option(
    "--tee",
    type=click.Choice(get_args(Tee)),
    default="chief",
    show_default=True,
    help="Workers whose output the terminal shows; the logs hold the output of all.",
)
@click.option(
    "--tensorboard",
    type=_Folder(path_type=Path),
    metavar="DIR",
    help="Write metrics, the times of steps, load and membership to DIR for TensorBoard.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve figures of the job as OpenMetrics at http://127.0.0.1:PORT/metrics; 0 means any free port.",
)
@click.option(
    "--timeout",
    type=_Seconds(min=0, max=_TIMES, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long other workers wait for a worker before it is killed as stuck.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0, max=_TIMES),
    default=10,
    show_default=True,
    metavar="N",
    help="How many lost workers are replaced; after that, training continues with the remaining ones.",
)
@click.option(
    "--restart-job",
    type=click.IntRange(min=0, max=_TIMES),
    default=0,
    metavar="N",
    show_default=True,
    help="How often a job that fails starts again, from --checkpoint or what the script has saved.",
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
    type=_Folder(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Save checkpoints to DIR, the last one when SCRIPT ends; resume from the newest one in DIR.",
)
@click.option(
    "--checkpoint-every",
    "every",
    metavar="N|TIME",
    default="10m",
    show_default=True,
    help="Checkpoint interval: a number of training steps, or a time such as 30s, 10m or 1h.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1, max=_TIMES),
    default=3,
    show_default=True,
    metavar="K",
    help="How many checkpoints to keep.",
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
    help="Every K training steps, let a second worker compute one replica again, and compare the bits before "
    "they are used.",
)
@click.option(
    "--verify-replicas",
    type=click.Choice(["one", "all"]),
    default="one",
    show_default=True,
    help="With --verify-every, whether to verify one replica, each in turn, or all of them.",
)
@click.option(
    "--allow-unlike",
    is_flag=True,
    help="Run on hosts whose processors compute different bits; the result then depends on which host "
    "computes which replica.",
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
    envvar="LOCKSTEP_WITNESS",
    help="Which calls of SCRIPT to compare with one process beside the training, as lockstep check does: the "
    "first fit, evaluate and predict of each model, every one, or none.",
)
@click.option(
    "--ui",
    is_flag=True,
    help="Show the run on a local web page while it lasts, as lockstep ui does; a note has the address.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.argument("script", shell_complete=complete_script)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def run(inherited: tuple[int, ...] | None, /, **options: Any) -> None:
    """Run SCRIPT on several workers, on this machine or on several; ARGUMENTS are passed to SCRIPT.

    \b
    lockstep run -n 2 train.py
    lockstep run -n 2 --replicas 8 train.py --epochs 3
    lockstep run -n 2 -m package.train --epochs 3
    lockstep run --listen 10.0.0.1:7000 -n 2 train.py
    srun -N 3 --ntasks-per-node=1 lockstep run --slurm -n 6 train.py

    The exit status is 0 if every worker succeeds, otherwise that of the first failure (128 + N for
    signal N), 130 after Ctrl-C, 143 after SIGTERM, 2 if nothing was started or the script's settings differ
    from its checkpoint's. After Ctrl-C or SIGTERM, the chief of a job with checkpoints first completes its
    step and writes a checkpoint, within --grace. Workers then have 3 seconds to exit before they are killed.
    A second signal kills them at once.
    """
    from lockstep.local_job.job_process import run_in_job_process

    fill_standard_descriptors()
    script = Script(options["script"], options["module"], options["arguments"])
    script.check()
    _refuse_contradictions(options)
    refuse_without_checkpoint(click.get_current_context())
    link = _engine_link(options)
    retries = options["tf_config"]
    task = _take_place(script, options) if options["tf_config"] or options["slurm"] else ""
    refuse_undecodable(options["run_dir"], options["checkpoint"], options["tensorboard"])
    folder, board = options["checkpoint"], options["tensorboard"]
    # The folder must not change while it is read; a rejected command leaves nothing behind.
    existed = folder is not None and folder.exists()
    if existed:
        claim_folder(folder, *_OF_CHECKPOINTS, patience=_ENDS_WITHIN)
    spec = replace(_spec(options), inherited=inherited or ())
    created = options["run_dir"] is None or not options["run_dir"].exists()
    new_board = board is not None and not board.exists()
    with gone_if_refused(board), gone_if_refused(folder if folder is not None and not existed else None):
        exports = _exports(options)
        if folder is not None and not existed:
            claim_folder(folder, *_OF_CHECKPOINTS, patience=_ENDS_WITHIN)
        with gone_if_refused(options["run_dir"]):
            if link is not None:
                run_dir = claim_when_free(options["run_dir"])
            else:
                run_dir = folder_of_job() or options["run_dir"] or _fresh_folder(options)
                claim_folder(run_dir, patience=_ENDS_WITHIN)
            spec = replace(spec, run_dir=run_dir)
            empty_folder(RunPaths(spec.run_dir).sources)
            # The verdict is that of an earlier run.
            RunPaths(spec.run_dir).comparison.unlink(missing_ok=True)

    def resumed(begun: JobSpec, held: "HeldCheckpoint") -> JobSpec:
        return _resumed(options, begun, held)

    if exports.metrics is not None:
        with socket.socket(fileno=os.dup(exports.metrics)) as listener:
            address, port = listener.getsockname()
        note(f"metrics at http://{address}:{port}/metrics")
    remove_abandoned()
    several = bool(spec.hosts or options["listen"])
    if not several:
        note(f"{spec.describe()}{_passed_on(options['arguments'])}")
    for variable in switched_off() if spec.devices else ():
        note(f"{variable} disables deterministic operations: equal bits are no longer guaranteed")
    if hash_seed := replaced_hash_seed(spec.seed):
        note(f"workers get PYTHONHASHSEED from the job's seed, --seed {spec.seed}, instead of {hash_seed}")
    if options["listen"]:
        from lockstep.hosts.engine_link import LIFELINE
        from lockstep.hosts.listening_job import Listening, run_listening

        address = with_port(options["listen"])
        here = 0 if link is not None else options["here"] or 1
        listening = Listening(address, here, retries=retries, task=task, engine=link)
        lifeline = LIFELINE if link is not None else None

        def serve(command: "Channel[Stop, Stop]") -> int:
            return run_listening(spec, listening, resumed, command, exports)

    else:
        lifeline = None

        def serve(command: "Channel[Stop, Stop]") -> int:
            return _serve(spec, resumed, command, exports)

    with contextlib.ExitStack() as beside:
        if options["ui"]:
            beside.enter_context(page_beside(spec.run_dir))
        if spec.replicas > 1 and not (spec.parameter_servers or is_checking() or is_repeating()):
            beside.enter_context(_witness(spec, options["witness"]))
        begun = time.monotonic()
        status = run_in_job_process(serve, spec.grace, lifeline)
    leave_folder(spec.run_dir)
    start_again(options["restart_job"], status, spec.run_dir, time.monotonic() - begun)
    if created:
        remove_unused(spec.run_dir)
    if folder is not None and not existed:
        remove_unused_claim(folder)
    if new_board:
        # Where nothing was trained, it is empty.
        with contextlib.suppress(OSError):
            board.rmdir()
    sys.exit(status)


def _witness(spec: JobSpec, calls: Calls) -> contextlib.AbstractContextManager[None]:
    """Compare the script of a job with one process beside it."""
    if calls == "off":
        return contextlib.nullcontext()
    words = ["--replicas", str(spec.replicas), "--seed", str(spec.seed)]
    words += ["--threads-per-worker", str(spec.threads)] if spec.threads else []
    words += ["--backend", spec.backend] if spec.backend is not None else []
    words += ["--tf-distribute"] if spec.tf_distribute else []
    words += [] if spec.adopts else ["--no-adopt"]
    program = [*(["-m"] if spec.module else []), "--", spec.target, *spec.arguments]
    return witness_beside(spec.run_dir, words, program, calls)


def _passed_on(arguments: Sequence[str]) -> str:
    """Say which arguments of the script look like options of `lockstep run`; empty if none does."""
    known = {name for param in run.params if isinstance(param, click.Option) for name in param.opts}
    alike = dict.fromkeys(word for one in arguments if (word := one.partition("=")[0]) in known)
    return f"; {', '.join(alike)} after the script is for the script" if alike else ""


def given(context: click.Context, *without: str) -> list[str]:
    """Return the words of the options that the user has given, except those that say where workers run.

    Args:
        context: of `run`.
        without: other parameters to leave out.
    """
    words = []
    for param in run.params:
        assert param.name is not None
        source = context.get_parameter_source(param.name)
        asked = isinstance(param, click.Option) and source is click.core.ParameterSource.COMMANDLINE
        if asked and param.name not in (*PLACING, *without):
            words.append(max(param.opts, key=len))
            words += [] if getattr(param, "is_flag", False) else [str(context.params[param.name])]
    return words


def refuse_without_checkpoint(context: click.Context) -> None:
    """Raise ConfigError if the user has given options of `run` that do nothing without `--checkpoint`."""
    for name, option in (("every", "--checkpoint-every"), ("keep", "--keep")):
        asked = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if asked and context.params["checkpoint"] is None:
            raise ConfigError(
                f"{option} needs --checkpoint DIR, without which this command saves no checkpoints; for a "
                f"script with lockstep.callbacks.Checkpoint, give {name}= to the callback"
            )


def _engine_link(options: dict[str, Any]) -> "EngineLink | None":
    """Return the link of the coordinator that an engine has started, or have an engine run the job.

    Returns:
        None if the job needs no engine.
    """
    if not options["engine"]:
        return None
    from lockstep.hosts.engine_link import EngineLink
    from lockstep.protocol.engine import StartCoordinator

    link = EngineLink.inherited(StartCoordinator)
    if link is None:
        from lockstep.ray.command import run_on_ray
        from lockstep.ray.placement import parse_resources, worker_needs

        context, workers = click.get_current_context(), options["workers"]
        # The same folder for all coordinators of the job, on whatever node.
        name = f"{_script_name(options)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        place = ("run", "--on", "ray", "-n", str(workers), "--run-dir", options["run_dir"] or f"runs/{name}")
        words = (*map(str, place), *given(context, "run_dir"), "--", options["script"], *options["arguments"])
        needs = worker_needs(
            options["cpus"] or 1, options["gpus"] or 0, parse_resources(options["resources"])
        )
        processes = workers + _others(options)
        sys.exit(run_on_ray(options["engine"], name, words, processes, needs, options["detached"]))
    assert isinstance(link.start, StartCoordinator)
    options["listen"] = link.start.address
    return link


def _refuse_contradictions(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if options cannot be combined, or name no address."""
    names = ("hosts", "listen", "tf-config", "slurm")
    ways = [f"--{name}" for name in names if options[name.replace("-", "_")]]
    ways += ["--on"] if options["engine"] else []
    if len(ways) > 1:
        raise ConfigError(f"{' and '.join(ways)} cannot be combined: each one says where the workers run")
    if options["servers"]:
        _refuse_with_servers(options)
    if options["restart_job"] and (others := [way for way in ways if way != "--hosts"]):
        raise ConfigError(
            f"--restart-job cannot be combined with {others[0]}: there, several commands or an engine start "
            "the job"
        )
    if not ways and options["plain"]:
        raise ConfigError(
            "--plain is for jobs on several hosts; give --hosts, --listen, --tf-config, --slurm or --on too"
        )
    if options["engine"] and not _ENGINE.fullmatch(options["engine"]):
        raise ConfigError(f"--on {options['engine']} is no engine: give ray, or ray://HOST:PORT")
    if options["engine"] and options["ui"]:
        raise ConfigError(
            "--ui shows the run folder, which with --on is on a node of the cluster; run lockstep ui there"
        )
    if options["engine"] and options["workers"] is None:
        raise ConfigError("--on needs the number of workers; give -n too")
    for name in ("cpus", "gpus"):
        if options[name] is not None and not options["engine"]:
            raise ConfigError(f"--{name}-per-worker is what workers need of an engine; give --on too")
    if options["resources"] and not options["engine"]:
        raise ConfigError("--resource-per-worker is what workers need of an engine; give --on too")
    if options["engine"] and options["metrics_port"] is not None:
        raise ConfigError(
            "--metrics-port cannot be combined with --on: it serves on this machine alone, and the engine "
            "chooses where the coordinator runs"
        )
    if ways and options["devices"] is not None:
        raise ConfigError(f"--devices is for one host; with {ways[0]}, set CUDA_VISIBLE_DEVICES on each")
    if options["here"] is not None and not (options["listen"] or options["tf_config"]):
        raise ConfigError(
            "--workers-here is for jobs that other hosts join; give --listen or --tf-config too"
        )
    if options["listen"]:
        with_port(options["listen"])
    if options["listen"] and options["workers"] is None:
        raise ConfigError("--listen needs the number of all workers; give -n too")
    if options["listen"] and (options["here"] or 1) > options["workers"] + _others(options):
        raise ConfigError(
            f"--workers-here {options['here']} is more than the {options['workers'] + _others(options)} "
            "workers of the job"
        )
    if options["tf_config"] and options["workers"] is not None:
        raise ConfigError(
            "-n cannot be combined with --tf-config: each task of TF_CONFIG runs one worker, or "
            "--workers-here"
        )


def _refuse_with_servers(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that jobs with parameter servers do not support."""
    names = ("replicas", "checkpoint", "devices", "verify_every")
    given = [f"--{name.replace('_', '-')}" for name in names if options[name] is not None]
    given += ["--min-workers"] if options["min_workers"] > 1 else []
    reasons = {
        "--replicas": "a step is one batch on one worker",
        "--checkpoint": "use keras.callbacks.BackupAndRestore or ModelCheckpoint",
        "--devices": "all processes share the visible GPUs; set CUDA_VISIBLE_DEVICES",
        "--verify-every": "lockstep rerun repeats the whole run",
        "--min-workers": "workers do not wait for one another",
    }
    if given:
        raise ConfigError(f"--ps cannot be combined with {given[0]}: {reasons[given[0]]}")


def _take_place(script: Script, options: dict[str, Any]) -> str:
    """Do what the task of this process is for; if it begins a job, set its options and return its name."""
    from lockstep.hosts.agent_command import AgentOptions, join_and_run
    from lockstep.hosts.slurm_role import own_place
    from lockstep.hosts.task_place import TaskRole
    from lockstep.hosts.tf_config_role import find_place

    slurm, here = options["slurm"], options["here"] or 1
    others, asked = _others(options), options["workers"]
    if slurm:
        place = own_place(asked and asked + others)
    else:
        place = find_place(tf_config_given(), here, options["servers"] or 0)
    match place.role:
        case TaskRole.IDLE_SERVER:
            note("a parameter server has nothing to do: the workers hold the whole state")
            sys.exit(0)
        case TaskRole.EVALUATOR:
            _evaluate(script, options)
        case TaskRole.AGENT:
            # Its own name may not be known in the cluster yet.
            _, port = split_address(place.address)
            joins = AgentOptions(
                place.coordinator, place.here, port=port, encrypted=not options["plain"], task=place.task
            )
            if slurm:
                # All tasks write to one terminal, and all get the signals that the coordinator gets.
                joins = replace(joins, quiet=True, grace=parse_seconds(options["grace"], "--grace"))
            else:
                joins = replace(joins, shows=True)
                note(f"{place.name} joins {place.coordinator}, which coordinates the job")
            sys.exit(join_and_run(joins))
        case TaskRole.COORDINATOR:
            options["listen"], options["here"] = place.address, place.here
    options["workers"] = _without_others(place.workers, options)
    return place.name


def _evaluate(script: Script, options: Mapping[str, Any]) -> NoReturn:
    """Run the script alone in this process, as the evaluator of its cluster."""
    choice = _backend(options, None)
    take_environment({"KERAS_BACKEND": choice.backend})
    note(f"an evaluator runs the script alone, {choice}")
    if options["tf_distribute"]:
        from lockstep.worker.tf_distribute_shim import replace_names

        replace_names()
    script.run()
    sys.exit(0)


def _exports(options: Mapping[str, Any]) -> Exports:
    """Return what the job shows of itself; raise an error in one line if it cannot."""
    folder, port, metrics = options["tensorboard"], options["metrics_port"], None
    if folder is not None:
        package = importlib.util.find_spec("tensorboard")
        # A folder of that name in the current one is no package.
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
    return fresh_folder(Path("runs"), _script_name(options), time.time())


def _script_name(options: Mapping[str, Any]) -> str:
    return options["script"] if options["module"] else Path(options["script"]).stem


def _backend(options: Mapping[str, Any], past: str | None) -> Choice:
    variable, configured = keras_backend()
    source = Script(options["script"], options["module"]).source()
    script, overrides = (source and setting_of(source, "KERAS_BACKEND")) or (None, False)
    _refuse_legacy_keras(source)
    wishes = Wishes(
        asked=options["backend"],
        script=script,
        overrides=overrides,
        variable=variable,
        checkpoint=past,
        configured=configured,
        tf_distribute=options["tf_distribute"],
    )
    if wishes.tf_distribute:
        require_tensorflow(_is_installed, sys.executable)
    return choose_backend(wishes, _is_installed, sys.executable)


def _refuse_legacy_keras(source: Path | None) -> None:
    value, always = (source and setting_of(source, LEGACY_KERAS)) or (None, False)
    if value is not None and (always or legacy_keras() is None):
        refuse_legacy_keras(value, "the script")
    else:
        refuse_legacy_keras(legacy_keras())


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _spec(options: dict[str, Any], held: "HeldCheckpoint | None" = None) -> JobSpec:
    """Return the job; it resumes from a checkpoint that another host holds, if that is given."""
    # Before the run's folder is created: a rejected command leaves nothing behind.
    checkpoints, past = _checkpoints(options, held)
    choice = _backend(options, past.get("backend"))
    entries = parse_devices(options["devices"]) if options["devices"] is not None else None
    others = _others(options)
    hosts: tuple[JobHost, ...] = ()
    if options["hosts"] is not None:
        hosts = parse_hosts(options["hosts"], options["workers"] and options["workers"] + others)
    several = bool(hosts or options["listen"])
    gpus = visible_gpus() if not several else ()
    wanted = len(entries) if entries is not None else len(gpus) or _WITHOUT_GPU
    replicas = options["replicas"] or past.get("replicas")
    workers = options["workers"] or min(wanted, replicas or wanted)
    workers = sum(host.workers for host in hosts) or workers + others
    _without_others(workers, options)
    replicas = replicas or workers
    if others and {ONE_PROCESS, ORDER} <= os.environ.keys():
        workers = 1
    check_numbers(workers, replicas, options["min_workers"])
    threads = options["threads"] or past.get("threads") or 0
    if not threads and not several:
        threads = max(1, usable_cores() // replicas)
    check_limits(workers, threads)
    devices: tuple[Devices, ...] = spread(gpus, workers) if entries is None else assign(entries, workers)
    if checkpoints is not None and checkpoints.resume is not None:
        _compare(checkpoints.resume, past, choice.backend)
    return JobSpec(
        target=options["script"],
        module=options["module"],
        arguments=options["arguments"],
        workers=workers,
        replicas=replicas,
        threads=threads,
        seed=past.get("seed", 0) if options["seed"] is None else options["seed"],
        joint_input=(options["reading"] or _past_reading(past)) == "joint" or bool(others),
        timeout=options["timeout"],
        min_workers=options["min_workers"],
        max_restarts=options["max_restarts"],
        grace=parse_seconds(options["grace"], "--grace"),
        accepts_changes=options["accept_changes"],
        tf_distribute=options["tf_distribute"],
        adopts=not options["no_adopt"],
        run_dir=Path(),
        tee=options["tee"],
        backend=choice.backend,
        chosen=str(choice),
        devices=devices,
        checkpoints=checkpoints,
        hosts=hosts,
        plain=options["plain"],
        verify_every=_verify_every(options, replicas),
        verify_all=options["verify_replicas"] == "all",
        allow_unlike=options["allow_unlike"],
        parameter_servers=options["servers"] or 0,
    )


def _others(options: Mapping[str, Any]) -> int:
    """Return how many processes of a job are no workers to the user: a chief and parameter servers.

    They are processes like the workers; outside of `fit`, each has a replica.
    """
    return options["servers"] + 1 if options["servers"] else 0


def _without_others(processes: int, options: Mapping[str, Any]) -> int:
    """Return the number of workers of a job with a number of processes; raise ConfigError if it has none."""
    workers = processes - _others(options)
    if workers < 1:
        servers = options["servers"]
        raise ConfigError(
            f"there is room for {processes}, but a job with --ps {servers} has a chief, "
            f"{count(servers, 'parameter server')} and at least one worker: {servers + 2} processes in all"
        )
    return workers


def _verify_every(options: dict[str, Any], replicas: int) -> int:
    every: int | None = options["verify_every"]
    if every is not None and replicas < 2:
        raise ConfigError("--verify-every needs at least 2 replicas: Keras itself computes the only one")
    if every is not None and options["allow_unlike"]:
        raise ConfigError("--verify-every compares the bits of workers, so it excludes --allow-unlike")
    if every is None and options["verify_replicas"] == "all":
        raise ConfigError("--verify-replicas all needs --verify-every K")
    return every or 0


def check_numbers(workers: int, replicas: int, least: int) -> None:
    """Raise ConfigError if a job with these replicas, and `least` workers, cannot start with `workers`."""
    place(replicas, tuple(range(workers)))
    if least > workers:
        raise ConfigError(f"--min-workers {least} is more than the {workers} workers to start with")


def _resumed(options: dict[str, Any], begun: JobSpec, held: "HeldCheckpoint") -> JobSpec:
    """Return the job over hosts as it resumes from the newest checkpoint of all of them."""
    own = begun.checkpoints.resume if begun.checkpoints is not None else None
    if own is not None:
        from lockstep.checkpoint.hand_over import held_of

        if held.is_same(held_of(own)):
            return begun
    spec = _spec(options, held)
    # An engine may have found fewer hosts than the job will have.
    began = replace(spec, workers=begun.workers, hosts=begun.hosts)
    return replace(began, run_dir=begun.run_dir, inherited=begun.inherited)


def _checkpoints(
    options: dict[str, Any], held: "HeldCheckpoint | None"
) -> tuple[Checkpoints | None, Mapping[str, Any]]:
    """Return the checkpoints to save, and the facts in the checkpoint that the job resumes from."""
    if options["checkpoint"] is None:
        return None, {}
    import msgspec

    from lockstep.checkpoint.resume import newest, note_on_end, refuse_another_job
    from lockstep.checkpoint.scheduler import parse_every
    from lockstep.checkpoint.store import Store

    every = parse_every(options["every"])
    folder = options["checkpoint"].absolute()
    found: tuple[Path | None, Mapping[str, Any], str]
    if held is None:
        found = newest(folder, note) or (None, {}, "")
    else:
        found = (
            Store(folder).path(held.step),
            msgspec.to_builtins(held.job),
            note_on_end(folder, held.step) if held.finished else "",
        )
    resume, past, finished = found
    if finished:
        note(finished)
    if resume is not None:
        asked = {name: options[name] for name in ("replicas", "seed", "threads")}
        refuse_another_job(resume, past, asked | {"input": options["reading"]})
    given = os.fspath(options["checkpoint"])
    return Checkpoints(folder, every.steps, every.seconds, options["keep"], resume, given), past


def _past_reading(past: Mapping[str, Any]) -> str:
    """Return how the workers of the job to resume have read input; in older checkpoints, jointly."""
    return str(past.get("input", "joint")) if past else "divided"


def _compare(resume: Path, past: Mapping[str, Any], backend: str) -> None:
    """Raise ConfigError if the backend differs from the checkpoint's; note changed library versions."""
    from lockstep.checkpoint.resume import note_on_versions, refuse_another_backend

    refuse_another_backend(resume, past, backend)
    if text := note_on_versions(resume, past):
        note(text)


def _serve(spec: JobSpec, resumed: "Resumed", command: "Channel[Stop, Stop]", exports: Exports) -> int:
    """Run the job in the process that the command has forked for it."""
    if spec.hosts:
        from lockstep.hosts.job_on_hosts import run_over_ssh

        return run_over_ssh(spec, resumed, command, exports)
    from lockstep.launcher.fork_server import ForkServerPlan
    from lockstep.launcher.launcher import LocalLauncher

    launcher = LocalLauncher(ForkServerPlan.of(spec))
    # The fork server and this process import at the same time.
    launcher.prepare()
    from lockstep.agent.starter import LocalStarter
    from lockstep.agent.worker_output import LocalOutput
    from lockstep.local_job.composition import LocalHost, run_job
    from lockstep.observability.console import Console
    from lockstep.supervisor.state import JobSize, State, TimeLimits
    from lockstep.system.descendants import LinuxDescendants
    from lockstep.system.event_loop import EventLoop
    from lockstep.system.output import Sink

    paths = RunPaths(spec.run_dir.absolute())
    console = Console(Sink(1), Sink(2), spec.tee, spec.view.chief)
    output = LocalOutput(console, paths)
    state = State.of(
        spec.view,
        TimeLimits(timeout=spec.timeout, save=spec.grace),
        JobSize.of(spec.workers, spec.min_workers, spec.max_restarts),
        keeps=spec.checkpoints is not None,
        vital=spec.vital,
        servers=spec.servers,
    )
    starter = LocalStarter(spec, paths, os.getpid(), launcher, output)
    local = LocalHost(output, starter, LinuxDescendants())
    with EventLoop() as loop:
        return run_job(spec, state, paths, command, console=console, loop=loop, local=local, exports=exports)
