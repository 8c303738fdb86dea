"""The command `lockstep export`: writes what another system needs to run a job."""

import re
import sys
from typing import Any

import click

from lockstep.cli.parameter_types import PARTS
from lockstep.cli.run import check_numbers, given, refuse_without_checkpoint, run
from lockstep.errors import ConfigError, UnfitError
from lockstep.hosts.indexed_job import IndexedJob, name_from
from lockstep.hosts.where import PLACING
from lockstep.system.clock import parse_seconds
from lockstep.worker.script import refuse_undecodable

_AMBIGUOUS = re.compile(r"[-+.]*\d|.$")
"""Strings such as 1e3 and y: PyYAML writes them plain, but kubectl reads a number or a truth value."""


@click.group()
def export() -> None:
    """Write a job as another system runs it."""


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
@click.option("--cpu", metavar="QUANTITY", help="Cores of each pod, such as 4 or 500m.  [default: no limit]")
@click.option("--memory", metavar="QUANTITY", help="Memory of each pod, such as 8Gi.  [default: no limit]")
@click.pass_context
def kubernetes(context: click.Context, /, **options: Any) -> None:
    """Write the manifests of a job whose hosts are pods.

    \b
    lockstep export kubernetes --image registry/train:1 -n 4 train.py | kubectl apply -f -

    The manifests are a Secret, a Service and an indexed Job. SCRIPT is a path in the image, or with -m the
    name of a module there. The options below --memory are those of lockstep run. The output contains a new
    key, which is nowhere else and expires after 30 days. A process that has it can join the job.
    """
    from lockstep.transport.keys import JobKey

    job = _job(context, options)
    text = _yaml(job.objects(JobKey.generate().text.strip()))
    sys.stdout.write(f"# Secret: a process with the key below can join the job.\n{text}")


def _job(context: click.Context, options: dict[str, Any]) -> IndexedJob:
    """Return the job that the options describe.

    Raises:
        ConfigError: they describe none.
    """
    from lockstep.checkpoint.scheduler import parse_every

    script, arguments = options["script"], options["arguments"]
    name, workers = options["name"], options["workers"]
    pods = options["pods"] or workers
    if workers % pods:
        raise ConfigError(f"{pods} pods cannot divide {workers} workers evenly; change --pods or -n")
    check_numbers(workers, options["replicas"] or workers, options["min_workers"])
    parse_every(options["every"])
    refuse_without_checkpoint(context)
    here = ("--workers-here", str(workers // pods)) if workers > pods else ()
    command = ("lockstep", "run", "--tf-config", *here, *given(context), "--", script, *arguments)
    refuse_undecodable(*command)
    return IndexedJob(
        name if name is not None else name_from(script, module=options["module"]),
        options["image"],
        pods,
        command,
        parse_seconds(options["grace"], "--grace"),
        {f"--{kind}": options[kind] for kind in ("cpu", "memory") if options[kind] is not None},
    )


def _yaml(documents: tuple[dict[str, Any], ...]) -> str:
    """Return documents as YAML that every version of it reads alike.

    Raises:
        UnfitError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise UnfitError(
            "manifests need the package PyYAML, which is not installed: pip install "
            "'keras-lockstep[kubernetes]'"
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def represent(dumper: Dumper, text: str) -> Any:
        style = "'" if _AMBIGUOUS.match(text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, represent)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, explicit_start=True, width=110))


kubernetes.params += [param for param in run.params if param.name not in PLACING]
