"""What workers on different hosts must have in common to compute equal bits from the same program."""

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

Share = Callable[[str], Sequence[str]]
"""Gives a text to all workers of the call, and returns theirs."""

_NAMES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}


class HostReport(msgspec.Struct, frozen=True):
    """What a worker has imported on its host, and what it computes there.

    Attributes:
        worker: its id.
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
    """Return the packed report of this worker; empty if the view has one host."""
    return b"" if len(job.view.hosts) == 1 else msgspec.msgpack.encode(host_report(job))


def report_for_joiners(job: Job) -> dict[str, Any]:
    """Return the report of this worker as JSON data; empty if the job has one host."""
    found: dict[str, Any] = msgspec.to_builtins(host_report(job)) if job.context.over_hosts else {}
    return found


def compare_with_member(job: Job, report: Mapping[str, Any]) -> None:
    """Compare this worker, which joins, with a member that has sent `report`; do nothing if it is empty.

    Raises:
        DisagreementError: their hosts differ; names them and what differs.
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


def compare_reports(job: Job, what: str, packed: Sequence[bytes], share: Share) -> None:
    """Compare the reports of all workers of a view; do nothing if they are empty.

    Args:
        job: of this worker.
        what: names the call, for messages.
        packed: the reports.
        share: for all workers of the view.

    Raises:
        DisagreementError: hosts differ; raised on every worker, names the hosts and what differs.
    """
    if not all(packed):
        return
    _compare(job, what, [msgspec.msgpack.decode(report, type=HostReport) for report in packed], share)


def hosts_of(packed: Sequence[bytes]) -> list[str]:
    """Return the names of the hosts of all workers of a view; none if the reports are empty."""
    if not all(packed):
        return []
    return [msgspec.msgpack.decode(report, type=HostReport).host for report in packed]


def _compare(job: Job, what: str, reports: Sequence[HostReport], share: Share) -> None:
    for look in (_other_library, _other_source):
        found = {own.worker: text for own in reports if (text := look(reports[0], own))}
        if found:
            raise DisagreementError(f"{what}: {next(iter(found.values()))}", tuple(found))
    first = (reports[0].backend, reports[0].bits)
    others = [own for own in reports if (own.backend, own.bits) != first]
    if others:
        refuse_unlike(job, what, "a fixed small program", (reports[0], *others), share)


def refuse_unlike(job: Job, what: str, program: str, reports: Sequence[HostReport], share: Share) -> None:
    """Refuse hosts that compute other bits than the first, or publish a note if the user allows them.

    Args:
        job: of this worker.
        what: names the call.
        program: whose results differ, for people.
        reports: of a worker, and of those whose bits differ from its bits.
        share: for all workers of the call.

    Raises:
        DisagreementError: names the hosts, and what makes them equal.
    """
    first, other, *_ = reports
    backend = _NAMES.get(other.backend, other.backend)
    differs = (
        f"{first.host} and {other.host} compute different bits in {program} with {backend}"
        f"{_why_other_bits(first, other)}"
    )
    if not job.settings.allow_unlike:
        remedy = "run on hosts of one kind" + _limits(job, reports, share)
        allow = "--allow-unlike accepts a result that depends on which host computes which replica"
        raise DisagreementError(
            f"{what}: {differs}; {remedy}; {allow}", tuple(one.worker for one in reports[1:])
        )
    if job.is_chief:
        job.events.publish(HostsDiffer(f"{differs}; the result depends on which host computes which replica"))


def _why_other_bits(first: HostReport, other: HostReport) -> str:
    for name in CHOOSING_VARIABLES:
        ours, theirs = first.flags.get(name, "not set"), other.flags.get(name, "not set")
        if ours != theirs:
            return f" ({name} is {ours} and {theirs})"
    ours, theirs = (
        (f"{one.processor} with {one.instructions}".removesuffix(" with ")) for one in (first, other)
    )
    return f" ({ours} and {theirs})" if ours != theirs else ""


def _limits(job: Job, reports: Sequence[HostReport], share: Share) -> str:
    """Return how to limit hosts to the instructions that all have, and what it costs; empty if unknown."""
    first = reports[0]
    if any(one.flags != first.flags for one in reports):
        return " and with one environment"
    common = smallest(tuple(one.instructions for one in reports))
    if not common or any(one.backend != first.backend for one in reports):
        return ""
    limit = limit_of(first.backend, common)
    # The first worker of each host with a larger set measures.
    firsts = {one.host: one for one in reversed(reports)}
    own = [one for one in firsts.values() if one.worker == job.worker and one.instructions != common]
    costs = "; ".join(filter(None, share(_cost(job, own[0].host, limit) if own else "")))
    return f", or set {limit}" + f" ({costs})" * bool(costs)


def _cost(job: Job, host: str, limit: str) -> str:
    # Within the time after which the others, who wait, would take this worker for stuck.
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
    # A worker may import more than others, such as what only the chief needs.
    for path, text in first.sources.items():
        if other.sources.get(path, text) != text:
            return f"{path} differs between {first.host} and {other.host}; copy the same file to all hosts"
    return ""


def libraries() -> dict[str, str]:
    """Return the versions of the imported libraries that affect training."""
    names = ("keras", keras.backend.backend(), "jaxlib", "numpy", "lockstep")
    modules = [sys.modules[name] for name in names if name in sys.modules]
    # PyTorch's version is of a subclass of str.
    return {module.__name__: str(module.__version__) for module in modules}
