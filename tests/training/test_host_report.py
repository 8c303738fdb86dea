"""Hosts that cannot compute equal bits are named in the first call; nothing else is compared."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import keras
import msgspec
import numpy as np
import pytest

from lockstep.collectives.plan import ReducePlan
from lockstep.errors import DisagreementError
from lockstep.keras import host_report
from lockstep.keras.host_report import (
    HostReport,
    compare_reports,
    compare_with_member,
    report_for_joiners,
)
from lockstep.keras.small_program import computed_bits, cost_of_limit
from lockstep.keras.worker_exchange import agree, texts_of_all
from lockstep.observability.bus import Bus
from lockstep.observability.events import HostsDiffer
from lockstep.protocol.job_spec import TIMEOUT, JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place_on_hosts
from lockstep.worker.job import GRACE_FOR_AGENT, Job, JobContext
from thread_hub import Hub

HOSTS = ((0, 1), (2,))


def report(worker: int, host: str, **facts: object) -> HostReport:
    usual = HostReport(
        *(worker, host, "Some Processor", "AVX2", {}, "jax", "a1"), {"jax": "1.0"}, {"model.py": "11"}
    )
    return msgspec.structs.replace(usual, **facts)


FLAGS = "XLA_FLAGS is not set and --xla_cpu_max_isa=AVX"
ONE_KIND = "run on hosts with the same kind of processor"
DIFFER = "node1 and node2 compute different bits in a fixed small program with JAX"
ALLOW = "; --allow-unlike accepts a result that depends on which host computes which replica"


def own_job(**options: bool) -> Job:
    view = place_on_hosts(4, HOSTS)
    return Job(
        JobContext(0, Bus(SystemClock(), 0), JobSettings(threads=1, **options)),
        (view, Hub(ReducePlan.of(view)).member(0)),
    )


def not_shared(text: str) -> list[str]:
    pytest.fail("nothing is measured")


DIFFERENCES = {
    "library": (
        {"libraries": {"jax": "1.1"}},
        "fit 1: node1 has jax 1.0, and node2 has 1.1; install the same version on all hosts",
    ),
    "source": (
        {"sources": {"model.py": "12"}, "bits": "b2"},
        "fit 1: model.py differs between node1 and node2; copy the same file to all hosts",
    ),
    "bits": (
        {"bits": "b2", "processor": "Other Processor", "instructions": "AVX512"},
        f"fit 1: {DIFFER} (Some Processor with AVX2 and Other Processor with AVX512); "
        "run on hosts with the same kind of processor, or set "
        "XLA_FLAGS=--xla_cpu_max_isa=AVX2 (on node2, a small program takes about 1.3 times as long with it)"
        + ALLOW,
    ),
    "variable": (
        {"bits": "b2", "flags": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"}},
        f"fit 1: {DIFFER} ({FLAGS}); {ONE_KIND} and with one environment{ALLOW}",
    ),
    "kind": (
        {"bits": "b2", "processor": "Arm", "instructions": ""},
        f"fit 1: {DIFFER} (Some Processor with AVX2 and Arm); run on hosts with the same kind of processor"
        + ALLOW,
    ),
}


@pytest.mark.parametrize("differs", DIFFERENCES)
def test_a_difference_names_the_hosts_and_the_workers(differs: str) -> None:
    facts, message = DIFFERENCES[differs]
    reports = [report(0, "node1"), report(1, "node1"), report(2, "node2", **facts)]

    def share(text: str) -> list[str]:
        """Worker 0, on the smaller processor, has measured nothing; worker 2 has."""
        assert text == ""
        return ["", "", "on node2, a small program takes about 1.3 times as long with it"]

    with pytest.raises(DisagreementError) as raised:
        compare_reports(own_job(), "fit 1", [msgspec.msgpack.encode(own) for own in reports], share)
    assert str(raised.value) == message
    assert raised.value.workers == (2,)


def test_what_only_some_workers_import_is_no_difference() -> None:
    more = report(2, "node2", sources={"model.py": "11", "logs.py": "3"}, libraries={"keras": "3"})
    packed = [msgspec.msgpack.encode(own) for own in (report(0, "node1"), more)]
    compare_reports(own_job(), "fit 1", packed, not_shared)


def test_allowed_hosts_are_noted_by_the_chief() -> None:
    noted: list[HostsDiffer] = []
    own = own_job(allow_unlike=True)
    own.events.subscribe(lambda published: noted.append(published.event), HostsDiffer)
    packed = [msgspec.msgpack.encode(one) for one in (report(0, "node1"), report(2, "node2", bits="b2"))]
    compare_reports(own, "fit 1", packed, not_shared)
    (event,) = noted
    assert event.what == f"{DIFFER}; the result depends on which host computes which replica"


def in_all(view: View, act: Callable[[Job], None]) -> list[str]:
    """Call a function as each worker of a view; return the errors."""
    hub = Hub(ReducePlan.of(view))

    def run(position: int, worker: int) -> str:
        host = next(name for name, ids in zip(("node1", "node2"), HOSTS, strict=True) if worker in ids)
        context = JobContext(worker, Bus(SystemClock(), worker), JobSettings(workers=4, threads=1), host=host)
        try:
            act(Job(context, (view, hub.member(position))))
        except DisagreementError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(view.workers)) as threads:
        runs = [threads.submit(run, *one) for one in enumerate(view.workers)]
        return [one.result() for one in runs]


def test_workers_of_several_hosts_compare_them_in_any_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    several, one = place_on_hosts(4, HOSTS), place_on_hosts(4, ((0, 1, 2),))

    def act(job: Job) -> None:
        agree(job, "fit 1", {"setting": "x"})

    assert in_all(several, act) == ["", "", ""]
    kinds = iter(("a", "a", "b"))
    monkeypatch.setattr(host_report, "computed_bits", lambda: next(kinds))
    (error,) = set(in_all(several, act))
    assert "compute different bits in a fixed small program with" in error
    monkeypatch.setattr(host_report, "computed_bits", lambda: pytest.fail("not needed on one host"))
    assert in_all(one, act) == ["", "", ""]


def test_a_joiner_compares_its_host_with_that_of_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    view, bus = place_on_hosts(4, HOSTS), Bus(SystemClock(), 0)

    def at(worker: int, host: str, *, over_hosts: bool = True) -> Job:
        context = JobContext(worker, bus, JobSettings(workers=3, threads=1), host=host, over_hosts=over_hosts)
        return Job(context, (view, Hub(ReducePlan.of(view)).member(0)))

    member = report_for_joiners(at(0, "node1"))
    compare_with_member(at(3, "node3"), member)
    compare_with_member(at(3, "node3"), report_for_joiners(at(0, "node1", over_hosts=False)))
    monkeypatch.setattr(host_report, "computed_bits", lambda: "b")
    with pytest.raises(DisagreementError, match="joining: node1 and node3 compute different bits"):
        compare_with_member(at(3, "node3"), member)


def test_the_program_leaves_the_program_alone() -> None:
    number = int(keras.layers.Dense(1).name.partition("_")[2] or 0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    bits = computed_bits.__wrapped__()
    assert computed_bits.__wrapped__() == bits
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert keras.layers.Dense(1).name == f"dense_{number + 1}"


def test_the_first_worker_of_each_larger_host_measures_what_a_limit_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[tuple[str, float]] = []

    def cost(limit: str, patience: float) -> float:
        measured.append((limit, patience))
        return 1.5

    monkeypatch.setattr(host_report, "cost_of_limit", cost)
    view = place_on_hosts(4, HOSTS)

    def act(job: Job) -> None:
        packed = [
            msgspec.msgpack.encode(report(one, host, instructions=kind, bits=kind))
            for one, host, kind in ((0, "node1", "AVX512"), (1, "node1", "AVX512"), (2, "node2", "AVX2"))
        ]
        job.exchange(
            lambda _, communicator: compare_reports(job, "fit 1", packed, texts_of_all(communicator, "fit 1"))
        )

    (error,) = set(in_all(view, act))
    assert (
        "or set XLA_FLAGS=--xla_cpu_max_isa=AVX2 (on node1, a small program takes about 1.5 times as long"
        in error
    )
    assert measured == [("XLA_FLAGS=--xla_cpu_max_isa=AVX2", (TIMEOUT + GRACE_FOR_AGENT) / 2)]


@pytest.mark.slow
def test_the_cost_of_a_limit_is_measured() -> None:
    cost = cost_of_limit("XLA_FLAGS=--xla_cpu_max_isa=SSE4_2")
    assert cost is not None
    assert 0.1 < cost < 100
    assert cost_of_limit("XLA_FLAGS=--no_such_flag") is None
