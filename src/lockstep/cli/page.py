"""The commands `lockstep ui` and `lockstep report`: the page of runs, and a run in one file."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.completion import complete_run
from lockstep.cli.parameter_types import Run
from lockstep.coordinator.run_lookup import find_run
from lockstep.errors import ConfigError
from lockstep.system.child_process import command_of
from lockstep.system.environment import KEY_FILE, key_file
from lockstep.system.notes import note
from lockstep.system.prctl import die_with
from lockstep.system.prose import printable, size_text
from lockstep.transport.addresses import is_loopback, resolve_host

if TYPE_CHECKING:
    import ssl


@click.command()
@click.argument("runs", metavar="[RUN]...", type=Run(), nargs=-1, shell_complete=complete_run)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the page.  [default: any free one]"
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address of this machine at which browsers connect. Outside of loopback, the page is encrypted and "
    "needs a key: see lockstep key.",
)
@click.option("--ends-with", "parent", type=int, hidden=True, help="Process with which this one ends.")
def ui(runs: tuple[str, ...], port: int, host: str, parent: int | None) -> None:
    """Show runs on a local web page.

    \b
    lockstep ui                      # all runs in ./runs
    lockstep ui runs/train-20260102-150405 another/folder
    lockstep ui train                # the running job of this name

    The page also shows runs that are training. Ctrl-C ends it. RUN is the folder of a run, a folder that
    contains such folders, the name of a running job, or the URL of a run in an object store, as it was
    uploaded last. The printed address opens the page in one browser, once.
    """
    from lockstep.monitoring.page_server import PageServer, RunsView
    from lockstep.monitoring.run_catalog import Catalog, resolve

    if parent is not None:
        die_with(parent)
    folders = resolve(runs)
    family, socket_address = resolve_host(host.removeprefix("[").removesuffix("]"), port)
    loopback = is_loopback(str(socket_address[0]))
    context, fingerprint = (None, "") if loopback else _encryption(host, str(socket_address[0]))
    try:
        server = PageServer(socket_address, family, RunsView(Catalog(folders)), context, host)
    except OSError as error:
        at = f"port {port} of {host}" if port else host
        raise ConfigError(
            f"the page cannot use {at}: {error.strerror}; give another --port or --host"
        ) from None
    with server:
        note(f"the page is at {server.address}")
        if fingerprint:
            note(f"its certificate has the SHA-256 fingerprint {fingerprint}")
        if parent is None:
            note("Ctrl-C ends the page")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("the page has ended")


@contextlib.contextmanager
def page_beside(folder: Path) -> Iterator[None]:
    """Show the page of a run in a separate process, which ends with the block, or with this process.

    It prints the address of the page, or why there is none. The block does not notice if it fails or hangs.

    Args:
        folder: the folder of the run, which may not have begun.
    """
    words = (ui.name or "", "--ends-with", str(os.getpid()), "--", os.fspath(folder.absolute()))
    command = command_of("lockstep", *words)
    # In a new session, Ctrl-C reaches only the command.
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=null, stdout=null, start_new_session=True)
    except OSError as error:
        note(f"the page cannot be started: {error.strerror}")
        yield
        return
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _encryption(host: str, number: str) -> "tuple[ssl.SSLContext, str]":
    """Return the context that encrypts the page, and the fingerprint of its certificate.

    Raises:
        ConfigError, UnfitError: there is no key, or it cannot be used.
    """
    from lockstep.transport.keys import JobKey
    from lockstep.transport.page_certificate import page_certificate

    path = key_file()
    if path is None:
        raise ConfigError(
            f"other machines can reach {host}, so the page needs a key: make one with lockstep key FILE, and "
            f"set {KEY_FILE} to its path"
        )
    certificate = page_certificate(JobKey.read(path), host, number)
    return certificate.server_context(), certificate.fingerprint


@click.command()
@click.argument("run", type=Run(), shell_complete=complete_run)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="File to write. An existing file is replaced only if it is a report.",
)
def report(run: str, output: Path) -> None:
    """Write the page of RUN to one HTML file.

    The file shows the page of lockstep ui without a network. RUN is the folder of a run, the name of a
    running job, or the URL of a run in an object store, such as s3://bucket/job.
    """
    from lockstep.monitoring.report import build_report, write_report

    folder = find_run(run).folder.absolute()
    built = build_report(folder)
    size = write_report(output, built.html)
    name = click.format_filename(output)
    click.echo(printable(f"{folder.name}: {built.headline}; {name} shows it ({size_text(size)})"))
