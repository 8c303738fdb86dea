"""The properties that hosts must have in common so that their workers compute equal bits."""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import msgspec

from lockstep.errors import DisagreementError
from lockstep.keras.small_program import computed_bits, cost_of_limit
from lockstep.observability.events import HostsDiffer
from lockstep.protocol.job_spec import BACKEND_NAMES
from lockstep.system.processor import (
    CHOOSING_VARIABLES,
    instruction_set,
    limit_of,
    processor_features,
    processor_model,
    smallest,
)
from lockstep.worker.job import Job
from lockstep.worker.program_sources import own_sources

GatherTexts = Callable[[str], Sequence[str]]
"""Sends a text to all workers of the call, and returns the texts of all."""


class HostReport(msgspec.Struct, frozen=True):
    """The libraries and files that a worker has imported on its host, and bits that it computes there.

    Attributes:
        worker: the id of the worker.
        host: the name of the host.
        processor: the kind of its processor.
        instructions: the largest instruction set of its processor.
        flags: the environment variables with which libraries choose their code for a processor.
        backend: the Keras backend.
        bits: a hash of the results of a fixed small program.
        libraries: versions of the imported libraries.
        sources: hashes of the program's own source files that it has imported, by path.
    """

    worker: int
    host: str
    processor: str
    instructions: str
    flags: dict[str, str]
    backend: str
    bits: str
    libraries: dict[str, str]
    sources: dict[str, str]


def own_report(job: Job) -> bytes:
    """Return the packed report of this worker, or empty bytes if the view has one host."""
    return b"" if len(job.view.hosts) == 1 else msgspec.msgpack.encode(host_report(job))


def report_for_joiners(job: Job) -> dict[str, Any]:
    """Return the report of this worker as JSON data, or an empty dict if the job has one host."""
    report: dict[str, Any] = msgspec.to_builtins(host_report(job)) if job.context.over_hosts else {}
    return report


def compare_with_member(job: Job, report: Mapping[str, Any]) -> None:
    """Compare this worker, which joins, with a member that has sent `report`; do nothing if it is empty.

    Raises:
        DisagreementError: their hosts differ. It names the hosts and the difference.
    """
    if report:
        reports = [msgspec.convert(report, HostReport), host_report(job)]
        # Members do not take part.
        _compare(job, "joining", reports, lambda text: [text])


def host_report(job: Job) -> HostReport:
    """Return the report of this worker."""
    return HostReport(
        worker=job.worker,
        host=job.context.host or socket.gethostname(),
        processor=processor_model(),
        instructions=instruction_set(processor_features()),
        flags={name: os.environ[name] for name in CHOOSING_VARIABLES if name in os.environ},
        backend=keras.backend.backend(),
        bits=computed_bits(),
        libraries=libraries(),
        sources=own_sources(),
    )


def compare_reports(job: Job, label: str, packed: Sequence[bytes], gather_texts: GatherTexts) -> None:
    """Compare the reports of all workers of a view; do nothing if they are empty.

    Args:
        job: the job of this worker.
        label: names the call, for messages.
        packed: the reports.
        gather_texts: gathers a text of each worker of the view.

    Raises:
        DisagreementError: hosts differ. Every worker raises it. It names the hosts and the difference.
    """
    if not all(packed):
        return
    _compare(job, label, [msgspec.msgpack.decode(report, type=HostReport) for report in packed], gather_texts)


def hosts_of(packed: Sequence[bytes]) -> list[str]:
    """Return the names of the hosts of all workers of a view, or an empty list if the reports are empty."""
    if not all(packed):
        return []
    return [msgspec.msgpack.decode(report, type=HostReport).host for report in packed]


def _compare(job: Job, label: str, reports: Sequence[HostReport], gather_texts: GatherTexts) -> None:
    for find in (_other_library, _other_source):
        differences = {report.worker: text for report in reports if (text := find(reports[0], report))}
        if differences:
            raise DisagreementError(f"{label}: {next(iter(differences.values()))}", tuple(differences))
    first = (reports[0].backend, reports[0].bits)
    others = [report for report in reports if (report.backend, report.bits) != first]
    if others:
        refuse_unlike(job, label, "a fixed small program", (reports[0], *others), gather_texts)


def refuse_unlike(
    job: Job, label: str, program: str, reports: Sequence[HostReport], gather_texts: GatherTexts
) -> None:
    """Refuse hosts whose bits differ from those of the first, or publish a note if the user allows them.

    Args:
        job: the job of this worker.
        label: names the call.
        program: the name of the program whose results differ.
        reports: the reports of a worker, and of the workers whose bits differ from its bits.
        gather_texts: gathers a text of each worker of the call.

    Raises:
        DisagreementError: it names the hosts, and how to make them equal.
    """
    first, other, *_ = reports
    backend = BACKEND_NAMES.get(other.backend, other.backend)
    differs = (
        f"{first.host} and {other.host} compute different bits in {program} with {backend}"
        f"{_why_other_bits(first, other)}"
    )
    if not job.settings.allow_unlike:
        remedy = "run on hosts with the same kind of processor" + _limits(job, reports, gather_texts)
        allow = "--allow-unlike accepts a result that depends on which host computes which replica"
        raise DisagreementError(
            f"{label}: {differs}; {remedy}; {allow}", tuple(report.worker for report in reports[1:])
        )
    if job.is_chief:
        job.events.publish(HostsDiffer(f"{differs}; the result depends on which host computes which replica"))


def _why_other_bits(first: HostReport, other: HostReport) -> str:
    for name in CHOOSING_VARIABLES:
        ours, theirs = first.flags.get(name, "not set"), other.flags.get(name, "not set")
        if ours != theirs:
            return f" ({name} is {ours} and {theirs})"
    ours, theirs = (
        (f"{report.processor} with {report.instructions}".removesuffix(" with ")) for report in (first, other)
    )
    return f" ({ours} and {theirs})" if ours != theirs else ""


def _limits(job: Job, reports: Sequence[HostReport], gather_texts: GatherTexts) -> str:
    """Return how to limit hosts to the instructions that all have, with the cost, if that is known."""
    first = reports[0]
    if any(report.flags != first.flags for report in reports):
        return " and with one environment"
    common = smallest(tuple(report.instructions for report in reports))
    if not common or any(report.backend != first.backend for report in reports):
        return ""
    limit = limit_of(first.backend, common)
    # The first worker of each host with a larger set measures.
    firsts = {report.host: report for report in reversed(reports)}
    measuring = [r for r in firsts.values() if r.worker == job.worker and r.instructions != common]
    costs = "; ".join(filter(None, gather_texts(_cost(job, measuring[0].host, limit) if measuring else "")))
    return f", or set {limit}" + f" ({costs})" * bool(costs)


def _cost(job: Job, host: str, limit: str) -> str:
    # It takes less time than the limit after which the waiting workers would count this one as stuck.
    cost = cost_of_limit(limit, job.policy.timeout / 2)
    return "" if cost is None else f"on {host}, a small program takes about {cost:.1f} times as long with it"


def _other_library(first: HostReport, other: HostReport) -> str:
    for name, version in first.libraries.items():
        if other.libraries.get(name, version) != version:
            return (
                f"{first.host} has {name} {version}, and {other.host} has {other.libraries[name]}; install "
                "the same version on all hosts"
            )
    return ""


def _other_source(first: HostReport, other: HostReport) -> str:
    # A worker may import more files than others, such as those that only the chief needs.
    for path, text in first.sources.items():
        if other.sources.get(path, text) != text:
            return f"{path} differs between {first.host} and {other.host}; copy the same file to all hosts"
    return ""


def libraries() -> dict[str, str]:
    """Return the versions of the imported libraries that affect training."""
    names = ("keras", keras.backend.backend(), "jaxlib", "numpy", "lockstep")
    modules = [sys.modules[name] for name in names if name in sys.modules]
    # PyTorch's version is an instance of a subclass of str.
    return {module.__name__: str(module.__version__) for module in modules}
