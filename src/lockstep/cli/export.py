"""The command `lockstep export`: writes files with which another system runs a job."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import click

from lockstep.checkpoint.run_files import LAST_SECONDS
from lockstep.cli.job_options import check_numbers
from lockstep.cli.notifier import variable_with_url
from lockstep.cli.parameter_types import PARTS
from lockstep.cli.run import refuse_without_checkpoint, run, set_options
from lockstep.cli.systemd_unit import unit
from lockstep.errors import ConfigError, UnfitError
from lockstep.hosts.indexed_job import RUNS, IndexedJob, User, Volume, name_from, parse_label
from lockstep.hosts.where import PLACING
from lockstep.system.child_process import command_of
from lockstep.system.clock import parse_seconds
from lockstep.system.environment import shared_variables
from lockstep.system.notes import note
from lockstep.system.prose import install_command
from lockstep.worker.script import Script, refuse_undecodable

_AMBIGUOUS = re.compile(r"[-+.]*\d|.$")
"""Strings such as 1e3 and y: PyYAML writes them plain, but kubectl reads a number or a truth value."""


@click.group()
def export() -> None:
    """Write the files with which another system runs a job."""


@export.command(context_settings={"allow_interspersed_args": False})
@click.option("--image", required=True, help="Image with Lockstep, its extra hosts, and SCRIPT.")
@click.option(
    "-n", "--workers", type=PARTS, required=True, metavar="N", help="Number of workers in all pods together."
)
@click.option(
    "--pods",
    type=PARTS,
    metavar="P",
    help="Number of pods, which divide the workers evenly.  [default: N, one worker in each]",
)
@click.option("--name", help="Name of the Job, the Service and the Secret.  [default: that of SCRIPT]")
@click.option(
    "--kind",
    type=click.Choice(["Job", "JobSet", "TrainJob"]),
    default="Job",
    show_default=True,
    help="Kind of the object with the pods. A JobSet needs the controller of jobset.sigs.k8s.io, a TrainJob "
    "also that of Kubeflow Trainer.",
)
@click.option("--cpu", metavar="QUANTITY", help="Cores of each pod, such as 4 or 500m.  [default: no limit]")
@click.option("--memory", metavar="QUANTITY", help="Memory of each pod, such as 8Gi.  [default: no limit]")
@click.option("--gpus", type=PARTS, metavar="N", help="NVIDIA GPUs of each pod.  [default: none]")
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="CLAIM:PATH",
    help="Give all pods the volume of a PersistentVolumeClaim at PATH. Can be repeated.",
)
@click.option(
    "--image-pull-secret",
    "pull_secrets",
    multiple=True,
    metavar="NAME",
    help="Secret with which nodes get the image. Can be repeated.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Label of all objects and pods. Can be repeated.",
)
@click.option(
    "--user",
    metavar="UID[:GID]",
    default="1000:1000",
    show_default=True,
    help="User and group of the processes.",
)
@click.pass_context
def kubernetes(context: click.Context, /, **options: Any) -> None:
    """Write the manifests of a job whose hosts are pods.

    \b
    lockstep export kubernetes --image registry/train:1 -n 4 train.py | kubectl apply -f -

    The manifests are a Secret, a Service and an indexed Job, or a Secret and a JobSet, or a Secret, a
    TrainingRuntime and a TrainJob. SCRIPT is a path in the image, or with -m the name of a module there. The
    options below --user are those of lockstep run. The output contains a new key, which is stored nowhere
    else, and expires as early as a key of lockstep key. A process that has it can join the job.
    """
    from lockstep.transport.keys import JobKey

    job = _job(context, options)
    text = _yaml(job.objects(JobKey.generate().text.strip()))
    for lack in _lacks(options, job.volumes):
        note(lack)
    sys.stdout.write(f"# Secret: a process with the key below can join the job.\n{text}")


@export.command(context_settings={"allow_interspersed_args": False})
@click.pass_context
def systemd(context: click.Context, /, **options: Any) -> None:
    """Write a systemd service that runs a job on this machine, and again after a reboot.

    \b
    lockstep export systemd -n 2 --checkpoint saved train.py > ~/.config/systemd/user/train.service
    systemctl --user enable --now train.service

    The options are those of lockstep run. The service runs as you, in the current folder, with this Python
    and the present values of the variables that change what libraries compute. It resumes from --checkpoint,
    or from files that SCRIPT saves. When the job has succeeded, the service disables itself.
    """
    script, arguments = options["script"], options["arguments"]
    Script(script, options["module"], arguments).check()
    _refuse_unfit(context, options, options["workers"])
    if options["checkpoint"] is None:
        note("without --checkpoint, the job starts over after a reboot, unless the script resumes by itself")
    lacks = _without_variable(options)
    for name, option in (("checkpoint", "--checkpoint"), ("run_dir", "--run-dir")):
        lacks += [f"{option} {url}" for url in [options[name]] if isinstance(url, str)]
    if lacks:
        note(
            f"the service does not have the variable of {' and '.join(lacks)}: add a line EnvironmentFile= "
            "to it"
        )
    command = command_of("lockstep", "run", *set_options(context, ()), "--", script, *arguments)
    refuse_undecodable(*command)
    variables = shared_variables()
    refuse_undecodable(*variables.values())
    sys.stdout.write(unit(f"lockstep run {script}", Path.cwd(), command, variables, _grace(options)))


def _without_variable(options: Mapping[str, Any]) -> list[str]:
    """Return the options that name a variable whose value is not exported."""
    names = [f"--env {name}" for name in options["env"] if "=" not in name]
    return names + [f"--notify {notify}" for notify in [options["notify"] or ""] if variable_with_url(notify)]


def _refuse_unfit(context: click.Context, options: Mapping[str, Any], workers: int | None) -> None:
    """Raise ConfigError for options that no job can have, as `lockstep run` does."""
    from lockstep.checkpoint.scheduler import parse_every

    if workers is not None:
        check_numbers(workers, options["replicas"] or workers, options["min_workers"])
    parse_every(options["every"])
    refuse_without_checkpoint(context)


def _grace(options: Mapping[str, Any]) -> float:
    """Return the seconds after SIGTERM for a checkpoint, and for the rest of a run folder in a store."""
    uploads = isinstance(options["run_dir"], str)
    return parse_seconds(options["grace"], "--grace") + (LAST_SECONDS if uploads else 0)


def _job(context: click.Context, options: dict[str, Any]) -> IndexedJob:
    """Return the job that the options describe.

    Raises:
        ConfigError: the options do not describe a job.
    """
    script, arguments = options["script"], options["arguments"]
    name, workers = options["name"], options["workers"]
    pods = options["pods"] or workers
    if workers % pods:
        raise ConfigError(f"{pods} pods cannot divide {workers} workers evenly; change --pods or -n")
    _refuse_unfit(context, options, workers)
    name = name if name is not None else name_from(script, module=options["module"])
    here = ("--workers-here", str(workers // pods)) if workers > pods else ()
    runs = ("--run-dir", f"{RUNS}/{name}") if options["run_dir"] is None else ()
    words = (*here, *runs, *set_options(context))
    command = ("lockstep", "run", "--tf-config", *words, "--", script, *arguments)
    refuse_undecodable(*command)
    job = IndexedJob(
        name=name,
        image=options["image"],
        pods=pods,
        command=command,
        grace=_grace(options),
        kind=options["kind"],
        resources={kind: options[kind] for kind in ("cpu", "memory") if options[kind] is not None},
        gpus=options["gpus"] or 0,
        volumes=tuple(map(Volume.parse, options["volumes"])),
        pull_secrets=options["pull_secrets"],
        labels=dict(map(parse_label, options["labels"])),
        user=User.parse(options["user"]),
        standby=options["standby"] or "",
    )
    in_store = isinstance(options["checkpoint"], str) and not options["one_writer"]
    return job.with_standby() if in_store and pods > 1 and not job.standby else job


def _lacks(options: Mapping[str, Any], volumes: Sequence[Volume]) -> list[str]:
    """Return notes on what the pods lack to let checkpoints and the run folder outlive them."""
    checkpoint = options["checkpoint"]
    urls = [url for url in (checkpoint, options["run_dir"]) if isinstance(url, str)]
    secret = "add envFrom: with a Secret to the container"
    account = f"give them a service account of the cloud, or {secret}"
    lacks = [f"the pods have no credentials for {' and '.join(urls)}: {account}"] if urls else []
    if names := _without_variable(options):
        lacks.append(f"the pods do not have the variable of {' and '.join(names)}: {secret}")
    if checkpoint is None:
        lacks.append("without --checkpoint, in a --volume, the job starts over if all its pods are lost")
    elif not isinstance(checkpoint, str) and not any(
        volume.contains(PurePosixPath(checkpoint)) for volume in volumes
    ):
        advice = (
            f"give a --checkpoint below {volumes[0].path}"
            if volumes
            else f"add for example --volume CLAIM:/saved --checkpoint /saved/{checkpoint.name}"
        )
        lacks.append(
            f"--checkpoint {checkpoint} is not in a --volume, so checkpoints are lost with the pods; {advice}"
        )
    return lacks


def _yaml(documents: tuple[dict[str, Any], ...]) -> str:
    """Return documents as YAML that every version of it reads in the same way.

    Raises:
        UnfitError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise UnfitError(
            f"manifests need the package PyYAML, which is not installed: {install_command('kubernetes')}"
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def represent(dumper: Dumper, text: str) -> Any:
        style = "'" if _AMBIGUOUS.match(text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, represent)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, explicit_start=True, width=110))


kubernetes.params += [param for param in run.params if param.name not in PLACING]
systemd.params += [
    param
    for param in run.params
    if param.name in ("workers", "devices")
    or param.name not in (*PLACING, "plain", "allow_unlike", "standby")
]
