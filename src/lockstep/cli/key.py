"""The command `lockstep key`: writes the key of jobs on several hosts."""

from pathlib import Path

import click

from lockstep.system.environment import KEY_FILE
from lockstep.transport.keys import DEFAULT_DAYS, JobKey


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=DEFAULT_DAYS,
    show_default=True,
    help="Number of days until the key expires.",
)
def key(file: Path, days: int) -> None:
    """Write a new key to FILE, for jobs on several hosts.

    Jobs over hosts need a key, except over ssh. Copy FILE to each host. Only processes that have the key can
    join a job that uses it.
    """
    made = JobKey.generate(days)
    made.write(file)
    click.echo(
        f"{click.format_filename(file)} contains a key that expires on {made.expiry}; copy it to each host, "
        f"readable only for you (mode 600), and set {KEY_FILE} to its path there"
    )
