"""The burn-in names the cores that compute other bits, and memory that changes."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from lockstep.doctor.burn_in import CoreResults, Hashes, burn_in, judge_burn_in
from lockstep.doctor.check import Rating, Sources, start_program
from lockstep.system.programs import ProbeProgram, ProgramResult
from lockstep.system.prose import count

RIGHT: Hashes = [{"aaaa": 10}, {"bbbb": 10}]
ONCE: Hashes = [{"aaaa": 9, "cccc": 1}, {"bbbb": 10}]
ALWAYS: Hashes = [{"aaaa": 10}, {"cccc": 10}]
PLANTED = """
import json, sys
from lockstep.keras import burn_in_program
right = burn_in_program.repeatable_bits
core = int(sys.argv[-2])
burn_in_program.repeatable_bits = lambda kind: right(kind) if kind else lambda: "0" * 32
first = burn_in_program.burn_in([core], 0.0)
burn_in_program.repeatable_bits = right
last = burn_in_program.burn_in([core], 0.0)
kinds = [*map(lambda one, other: one + other, first["cores"][core], last["cores"][core])]
print(json.dumps({"cores": {core: kinds}, "changes": 0}))
"""
"""Computes a wrong result once."""


def rows(hosts: Mapping[str, Sequence[Hashes]]) -> list[tuple[str, str]]:
    results = {
        host: CoreResults({str(core): hashes for core, hashes in enumerate(cores)})
        for host, cores in hosts.items()
    }
    return [(row.name, row.reason) for row in judge_burn_in(results) if row.rating is not Rating.FINE]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ({"": [RIGHT]}, []),
        ({"": [RIGHT, RIGHT]}, []),
        ({"": [ONCE]}, [("core 0", "1 of 20 results have different bits from the rest")]),
        ({"": [RIGHT, ONCE]}, [("core 1", "1 of 20 results have different bits from the rest")]),
        ({"": [ALWAYS, RIGHT, RIGHT]}, [("core 0", "10 of 20 results have different bits from the rest")]),
        (
            {"": [ALWAYS, RIGHT]},
            [("cores", "cores 0, 1 compute different bits, and no majority shows which of them is wrong")],
        ),
        # The cores of other hosts decide.
        (
            {"a": [ALWAYS, RIGHT], "b": [RIGHT, RIGHT]},
            [("core 0 of a", "10 of 20 results have different bits from the rest")],
        ),
        ({"a": [ALWAYS], "b": [RIGHT]}, [("hosts", "a and b compute different bits")]),
        (
            {"a": [RIGHT] * 2, "b": [ALWAYS] * 2, "c": [RIGHT] * 2},
            [("hosts", "a, c and b compute different bits")],
        ),
    ],
)
def test_wrong_cores_are_named(
    hosts: Mapping[str, Sequence[Hashes]], expected: Sequence[tuple[str, str]]
) -> None:
    assert rows(hosts) == expected


def test_memory_that_changes_and_programs_that_fail_are_named() -> None:
    results = CoreResults({"0": RIGHT}, 2, ["on core 1, a program was killed by SIGKILL"])
    reasons = [row.reason for row in judge_burn_in({"": results})]
    assert reasons == [
        "on core 1, a program was killed by SIGKILL",
        "a block of memory changed 2 times while nothing wrote to it",
    ]


@pytest.mark.parametrize("wrong", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_each_core_computes(wrong: bool, lean: Callable[..., dict[str, str]]) -> None:
    """A program on a core of its own computes a wrong result once."""
    pytest.importorskip("torch")
    cores, said = list[str](), list[str]()

    def start(
        command: Sequence[str], environment: Mapping[str, str], grace: float
    ) -> ProbeProgram | ProgramResult:
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        cores.append(command[-2])
        if wrong and len(cores) == 1:
            command = [sys.executable, "-P", "-c", PLANTED, *command[-2:]]
        return start_program(command, environment, grace)

    environment = os.environ | lean(Path(__file__), "torch")
    results = burn_in("torch", 0.0, Sources(environment=environment, start=start), said.append)
    assert sorted(results.cores, key=int) == sorted(",".join(cores).split(","), key=int)
    assert {len(hashes) for hashes in results.cores.values()} == {4}
    (row,) = judge_burn_in({"": results})
    if wrong:
        assert (row.name, row.reason) == (
            f"core {cores[0]}",
            "1 of 8 results have different bits from the rest",
        )
    else:
        assert (row.name, row.rating) == ("all cores", Rating.FINE)
    assert said == [f"{count(len(results.cores), 'core')} compute on torch for 0 s"]
