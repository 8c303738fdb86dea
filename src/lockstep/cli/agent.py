"""The command `lockstep agent`: workers on this host for a job of another host."""

import sys

import click

from lockstep.cli.parameter_types import LARGEST_LIMIT, PARTS, RealNumber
from lockstep.hosts.agent_command import AgentOptions, join_and_run, run_for_engine, run_over_pipes
from lockstep.hosts.engine_link import EngineLink
from lockstep.hosts.where import GATHERING
from lockstep.protocol.engine import StartAgent
from lockstep.system.standard_streams import fill_standard_descriptors
from lockstep.transport.addresses import split_address, with_port


@click.command()
@click.option(
    "--join",
    "coordinator",
    metavar="HOST:PORT",
    help="Where the job waits: the address of lockstep run --listen.",
)
@click.option(
    "-n",
    "--workers",
    type=PARTS,
    default=1,
    show_default=True,
    metavar="N",
    help="Number of workers that this host offers. The job may use fewer.",
)
@click.option(
    "--listen",
    metavar="ADDRESS[:PORT]",
    help="Address of this host at which workers of other hosts connect.  [default: the address from which it "
    "reaches the job, and any free port]",
)
@click.option("--plain", is_flag=True, help="Do not encrypt connections, as lockstep run --plain does.")
@click.option(
    "--timeout",
    type=RealNumber(min=0, max=LARGEST_LIMIT, min_open=True),
    default=GATHERING,
    show_default=True,
    metavar="SECONDS",
    help="Time for attempts to reach the job.",
)
@click.option("--stdio", is_flag=True, hidden=True, help="Take instructions from stdin.")
def agent(
    coordinator: str | None, workers: int, listen: str | None, plain: bool, timeout: float, stdio: bool
) -> None:
    """Run workers on this host for a job of another host.

    \b
    lockstep run --listen 10.0.0.1:7000 -n 3 train.py    # on 10.0.0.1: one worker there
    lockstep agent --join 10.0.0.1:7000 -n 2             # on another host: two workers

    Run the command in the folder of the script. Both hosts need the same key file (see lockstep key). The
    exit status is that of the job. It is 75 if this host may try again, because it was stopped, was not let
    into a running job, or has lost the coordinator.
    """
    if stdio:
        sys.exit(run_over_pipes())
    if (engine := EngineLink.inherited(StartAgent)) is not None:
        sys.exit(run_for_engine(engine))
    if coordinator is None:
        raise click.UsageError("give --join HOST:PORT, the address of lockstep run --listen")
    split_address(coordinator)
    fill_standard_descriptors()
    here = with_port(listen) if listen else ""
    sys.exit(join_and_run(AgentOptions(coordinator, workers, here, encrypted=not plain, patience=timeout)))
