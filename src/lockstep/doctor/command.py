"""The functions behind the command `lockstep doctor`: they compose the checks and the output."""

import io
import sys
import traceback
from typing import Literal

from lockstep.doctor import bug_report, report
from lockstep.doctor.burn_in import burn_in, burn_in_hosts, judge_burn_in
from lockstep.doctor.check import Finding, Sources, worst
from lockstep.doctor.checkup import examine
from lockstep.doctor.links import examine_links, measured_by_a_job
from lockstep.doctor.versions import Packages
from lockstep.errors import InternalError, LockstepError, UnfitError
from lockstep.hosts.host_list import parse_hosts
from lockstep.launcher.backend import Wishes, choose_backend
from lockstep.system.clock import parse_seconds
from lockstep.system.environment import environment_at_start, keras_backend
from lockstep.system.notes import note
from lockstep.system.programs import ending_descendants
from lockstep.system.standard_streams import discard_stdout, fill_standard_descriptors

Form = Literal["table", "json", "report"]
"""How findings are shown: for people, for programs, or for the description of a bug."""


def check(form: Form, *, train: bool) -> int:
    """Examine the machine, show the findings, and return the exit status.

    Raises:
        UnfitError: the findings cannot be written.
        InternalError: a check raised an unexpected error.
    """
    fill_standard_descriptors()
    sources = _sources()
    try:
        with ending_descendants():
            findings = examine(sources, note, train=train)
    except LockstepError:
        raise
    except Exception as error:
        # Python would exit with status 1, which means that jobs work.
        traceback.print_exception(error)
        raise InternalError(f"the check itself failed: {error}") from error
    if form == "report":
        system = {**bug_report.system_here(), "packages": bug_report.packages_of_jobs(Packages.installed())}
        _write(bug_report.markdown(findings, system, sources.environment, bug_report.identity_here()))
        return worst(findings)
    return _report(findings, as_json=form == "json")


def check_hosts(hosts: str, *, as_json: bool) -> int:
    """Measure the links between hosts, show the findings, and return the exit status.

    Raises:
        ConfigError: the list of hosts is invalid, or has fewer than two hosts.
        UnfitError: the findings cannot be written.
    """
    fill_standard_descriptors()
    names = [host.name for host in parse_hosts(hosts)]
    with ending_descendants():
        findings = examine_links(names, measured_by_a_job(environment_at_start()), note)
    return _report(findings, as_json=as_json)


def check_cores(time: str, hosts: str | None, *, as_json: bool) -> int:
    """Let all cores compute for some time, show the findings, and return the exit status.

    Args:
        time: the time, such as 10m.
        hosts: a list of hosts; None for this machine.
        as_json: whether to write JSON.

    Raises:
        ConfigError: the time or the list is invalid, or no backend is installed.
        UnfitError: the findings cannot be written.
    """
    fill_standard_descriptors()
    seconds = parse_seconds(time, "--burn-in")
    names = None if hosts is None else [host.name for host in parse_hosts(hosts)]
    sources = _sources()
    with ending_descendants():
        if names is not None:
            findings = burn_in_hosts(names, seconds, sources, note)
        else:
            backend = choose_backend(sources.wishes, sources.is_importable, sys.executable).backend
            findings = judge_burn_in({"": burn_in(backend, seconds, sources, note)})
    return _report(findings, as_json=as_json)


def _sources() -> Sources:
    variable, configured = keras_backend()
    return Sources(
        environment=environment_at_start(), wishes=Wishes(variable=variable, configured=configured)
    )


def _report(findings: list[Finding], *, as_json: bool) -> int:
    if as_json:
        _write(report.as_json(findings) + "\n")
    else:
        table = io.StringIO()
        report.show(findings, report.console(table, sys.stdout is not None and sys.stdout.isatty()))
        _write(table.getvalue())
    return worst(findings)


def _write(text: str) -> None:
    # stdout is None if the caller has closed it.
    if sys.stdout is None:
        return
    try:
        sys.stdout.buffer.write(text.encode(sys.stdout.encoding, "backslashreplace"))
        sys.stdout.flush()
    except OSError as error:
        _close_stdout(error)


def _close_stdout(error: OSError) -> None:
    discard_stdout()
    # A reader such as head closes the pipe once it has enough.
    if not isinstance(error, BrokenPipeError):
        raise UnfitError(f"cannot write the report: {error.strerror}") from None
