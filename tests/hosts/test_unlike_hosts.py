"""Hosts that compute different bits are refused before the first step, or accepted with a note."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host, Running

PROGRAM = Path(__file__).parents[1] / "training/verified.py"
Lean = Callable[..., dict[str, str]]


def start(hosts: Sequence[Host], lean: Lean, fault: str, *options: str, where: Sequence[str] = ()) -> Running:
    for host in hosts[:3]:
        shutil.copy(PROGRAM, host.work)
    shared = ("--hosts", "node1,node2", "--backend", "jax", "--threads-per-worker", "1", "--run-dir", "run")
    return hosts[0].lockstep("run", *shared, *options, PROGRAM.name, fault, *where, **lean(PROGRAM, "jax"))


def digests(job: Running) -> list[str]:
    return [line for line in job.out.splitlines() if line.startswith("digest: ")]


def test_a_host_with_other_bits_is_refused(hosts: Sequence[Host], lean: Lean) -> None:
    job = start(hosts, lean, "unlike")
    assert job.end() == 1, job.err
    assert "compute different bits in a fixed small program with JAX (XLA_FLAGS is " in job.err
    assert (
        "; run on hosts with the same kind of processor and with one environment; --allow-unlike accepts "
        in job.err
    )


def test_the_first_step_finds_what_the_small_program_does_not(hosts: Sequence[Host], lean: Lean) -> None:
    job = start(hosts, lean, "alike-program")
    assert job.end() == 1, job.err
    assert re.search(
        "step 1 of fit 1: node1 and node2 compute different bits in sequential/.* with JAX", job.err
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--local-steps 2,int8,reset"])
def test_unlike_hosts_train_if_that_is_allowed(hosts: Sequence[Host], lean: Lean, options: str) -> None:
    """With local steps, both also have the same bits after each step: they add the same numbers."""
    job = start(hosts, lean, "unlike", "--allow-unlike", *options.split())
    assert job.end() == 0, job.err
    assert "compute different bits in a fixed small program with JAX (XLA_FLAGS is " in job.err
    assert "; the result depends on which host computes which replica" in job.err
    events = [json.loads(line) for line in (hosts[0].work / "run/events.jsonl").read_text().splitlines()]
    assert [one["what"] for one in events if one["event"] == "hosts differ"]
    assert "finished in " in job.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "what"),
    [("once", "replica "), ("update", "the state after the update"), ("memory", "the state")],
)
def test_a_wrong_bit_of_another_host_is_found(
    hosts: Sequence[Host], lean: Lean, fault: str, what: str
) -> None:
    options = ("--replicas", "4", "--verify-every", "1", "--verify-replicas", "all", "--checkpoint", "saved")
    job = start(hosts, lean, fault, *options, "--checkpoint-every", "1", where=("1", "3"))
    assert job.end() == 0, job.err
    assert f"step 3 of fit 1: {what}" in job.err
    assert ("the job continues from that of step 2" in job.err) == (fault == "memory")
    assert job.err.splitlines()[-1].startswith("lockstep: finished in ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "local", "what", "why"),
    [
        ("total", "", "the sum over all replicas", "added up twice more, it has different bits"),
        (
            "total",
            "--local-steps 2,int8",
            "the sum over all replicas",
            "added up twice more, it has different bits",
        ),
        ("rounding", "--local-steps 2,int8", "replica ", "workers 0 and 2 agree"),
    ],
)
def test_another_host_that_sums_or_rounds_wrongly_is_found(
    hosts: Sequence[Host], lean: Lean, fault: str, local: str, what: str, why: str
) -> None:
    options = ("--replicas", "4", *local.split())
    verified = (*options, "--verify-every", "1", "--verify-replicas", "all")
    job = start(hosts, lean, fault, *verified, where=("1", "3"))
    assert job.end() == 0, job.err
    assert re.search(
        f"step 3 of fit 1: {what}.*, computed on worker 1, has the wrong bits in .*: {why}", job.err
    )
    right = start(hosts, lean, "", *options)
    assert right.end() == 0, right.err
    assert digests(job) == digests(right) != []


@pytest.mark.slow
def test_a_job_that_goes_back_starts_without_the_host_that_was_named(
    hosts: Sequence[Host], lean: Lean, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    options = ("--verify-every", "2", "--verify-replicas", "all", "--checkpoint-every", "1")
    options = (*options, "--checkpoint", f"file://{tmp_path}/store", "--one-writer")
    options = (*options, "--avoid-host-after", "1", "--hosts", "node1,node2,node3")
    job = start(hosts, lean, "host", *options, where=("-1", "5"))
    assert job.end() == 0, job.err
    assert ", computed on worker 1, has the wrong bits in " in job.err
    assert "and the job continues from that of step 4" in job.err
    assert "workers of host node2 were found at fault 1 time: the job starts without it" in job.err
    assert job.err.count("starts again") == 1
    right = start(hosts, lean, "", "--replicas", "3", where=())
    assert right.end() == 0, right.err
    assert digests(job) == digests(right) != []


@pytest.mark.slow
def test_hosts_are_measured_and_compared(hosts: Sequence[Host], lean: Lean) -> None:
    variables = {"KERAS_BACKEND": "torch", **lean(PROGRAM, "torch")}
    for option, expected in (
        (("--burn-in", "1s"), {"all cores of node1", "all cores of node2"}),
        ((), {"node1 - node2"}),
    ):
        doctor = hosts[0].lockstep("doctor", "--json", "--hosts", "node1,node2", *option, **variables)
        assert doctor.end() == 0, doctor.out + doctor.err
        rows = {row["name"]: row["verdict"] for row in json.loads(doctor.out)["findings"]}
        assert rows == dict.fromkeys(expected, "fine")
