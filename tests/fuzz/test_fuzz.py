"""Random programs, and the detection of faults by the fuzzer."""

import ast
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fuzz_oracle import Verdict, judge
from fuzz_rules import features, inexact, quicker, settled
from fuzz_specs import KINDS, Loop, Output, Spec, Training, draw, simpler, size
from fuzz_text import text

from command_server import IMPORTS_OF_JOBS, CommandServers
from fuzz import WORKER, Bench, shrink
from lockstep.launcher.import_scan import imports_for_training
from lockstep.system.environment import job_environment

ALL = ["jax", "tensorflow", "torch"]
ASKED = os.environ.get("BACKENDS", "")
INSTALLED = ALL if find_spec("torch") else ALL[:2]
BACKENDS = INSTALLED if not ASKED else ALL if ASKED == "all" else ASKED.split()
FIRST = {"jax": range(2), "tensorflow": range(2), "torch": range(2, 6)}
"""Programs in `make test-ci`: JAX takes four times as long as PyTorch, and TensorFlow three times."""

PROGRAMS = 80
PATIENCE = 1200.0
WRONG = Loop(loss="replica")
"""Sums gradients of losses that are means over a replica's own rows."""


@pytest.fixture
def bench(
    commands: CommandServers,
    lean: Callable[..., dict[str, str]],
    keeps_code: dict[str, str],
    tmp_path: Path,
) -> Callable[..., Bench]:
    """Runs programs in processes that have imported Keras and a backend already.

    If they use no other backend, the tests of trainings have started the servers of these processes, too.
    """

    def bench_of(backend: str, *, only_backend: bool) -> Bench:
        hidden = lean(WORKER, backend) if only_backend else {}

        def call(command: Sequence[str], environment: Mapping[str, str]) -> str:
            variables = {**environment, **hidden}
            if command[0] == "-m":
                importing = job_environment(0, 1, variables, backend=backend)
                imports = (*IMPORTS_OF_JOBS, *imports_for_training(backend))
            else:
                variables |= keeps_code
                importing, imports = variables, ("keras", backend)
            return commands.run(command, variables, PATIENCE, imports, importing).stdout

        # A server runs one command at a time.
        return Bench(backend, tmp_path, quick=True, processes=1, call=call)

    return bench_of


@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["first", pytest.param("rest", marks=pytest.mark.slow)])
def test_random_programs(backend: str, part: str, bench: Callable[..., Bench]) -> None:
    first = FIRST[backend]
    seeds = first if part == "first" else [seed for seed in range(PROGRAMS) if seed not in first]
    programs = {seed: quicker(seed, settled(draw(seed), backend), backend) for seed in seeds}
    # TensorFlow's own strategy sums them too; with one pipeline per replica, one replica is the reference.
    wrong = replace(WRONG, source="function") if backend == "tensorflow" else WRONG
    found = bench(backend, only_backend=part == "first")
    verdicts = found.run({**programs, 10**6: settled(wrong, backend)})
    assert verdicts.pop(10**6).kind == "wrong"
    faults = [
        f"--backend {backend} --quick --seeds {seed}: {verdict}"
        for seed, verdict in verdicts.items()
        if verdict.is_fault
    ]
    assert not faults, "python tests/fuzz/fuzz.py " + "\n".join(faults)
    kinds = [verdict.kind for verdict in verdicts.values()]
    assert len(kinds) == len(seeds)
    assert kinds.count("true") >= len(seeds) // 4
    assert kinds.count("invalid") + kinds.count("refused") <= len(seeds) // 3


def test_the_first_programs_have_parts_of_each_kind() -> None:
    counts = Counter[str]()
    for backend, seeds in FIRST.items():
        for seed in seeds:
            spec = quicker(seed, settled(draw(seed), backend), backend)
            counts.update(features(spec))
            programs = "".join(text(spec, backend, plain=plain) for plain in (False, True))
            imported = set(re.findall(r"^\s*(?:import|from) (\w+)", programs, re.MULTILINE))
            # Where they run, other backends are hidden.
            assert not imported & {*ALL} - {backend}
    assert {kind for kind in KINDS if not counts[kind]} == {"any", "own"}


@pytest.mark.parametrize("backend", ALL)
def test_a_seed_determines_a_valid_program(backend: str) -> None:
    for seed in range(200):
        spec = settled(draw(seed), backend)
        assert spec == settled(draw(seed), backend) == settled(spec, backend)
        quick = quicker(seed, spec, backend)
        assert quick == settled(quick, backend)
        for plain in (False, True):
            ast.parse(text(spec, backend, plain=plain))


def test_simplification_ends_at_the_simplest_program() -> None:
    for seed in range(50):
        spec: Spec = draw(seed)
        while smaller := [other for other in simpler(spec) if size(other) < size(spec)]:
            spec = smaller[-1]
        assert (
            spec in (replace(Training(), calls=spec.calls), Loop())
            if isinstance(spec, Training)
            else spec == Loop()
        )


class FakeBench(Bench):
    """Finds a fault in every program that has a sum for a loss."""

    def run(self, specs: Mapping[int, Spec]) -> dict[int, Verdict]:
        def verdict(spec: Spec) -> Verdict:
            assert isinstance(spec, Training)
            return Verdict("wrong" if any(output.reduction == "sum" for output in spec.outputs) else "true")

        return {number: verdict(spec) for number, spec in specs.items()}


def test_a_program_with_a_fault_shrinks(tmp_path: Path) -> None:
    given = next(
        spec
        for spec in (settled(draw(seed), "jax") for seed in range(1000))
        if isinstance(spec, Training) and len(spec.outputs) > 2 and spec.outputs[1].reduction == "sum"
    )
    found, verdict = shrink(FakeBench("jax", tmp_path), given, "wrong")
    assert found == Training(outputs=(Output(reduction="sum"),))
    assert verdict.kind == "wrong"


def test_verdicts_distinguish_faults(tmp_path: Path) -> None:
    files = []
    for name, value in (("one", 1.0), ("near", 1.00001), ("far", 1.01)):
        files.append(tmp_path / f"{name}.npz")
        np.savez(files[-1], weights=np.full(3, value))
    one, near, far = files
    found, other = {"found": {"weights": "a"}}, {"found": {"weights": "b"}}
    refused, fails = {"refused": "ModelError", "says": "no"}, {"error": "TypeError", "says": "no"}

    def kind(lines: list[object], plain: object = found, arrays: tuple[Path, Path] | None = None) -> str:
        return judge({"W = 1": lines[:1], "W = 2": lines[1:]}, plain, arrays, 1e-4).kind  # type: ignore[arg-type]

    assert kind([found, found, found]) == "same"
    assert kind([found, found, found], arrays=(one, near)) == "true"
    assert kind([found, found, found], arrays=(one, far)) == "wrong"
    assert kind([{**found, "named": "a"}, {**found, "named": "a"}, found], arrays=(one, far)) == "named"
    assert kind([{**found, "named": ""}, {**found, "named": ""}, found], arrays=(one, far)) == "wrong"
    assert kind([{**found, "named": "a"}, {**found, "named": ""}, found], arrays=(one, near)) == "differs"
    assert kind([found, found, other]) == "differs"
    assert kind([found, refused, refused]) == "differs"
    assert kind([refused, refused, refused]) == "refused"
    assert kind([fails, fails, fails], fails) == "invalid"
    assert kind([fails, fails, fails]) == "fails"
    assert kind([found, None, found]) == "lost"


def test_many_programs_have_a_reference() -> None:
    for backend in ALL:
        exact = [inexact(settled(draw(seed), backend), backend) is None for seed in range(500)]
        assert sum(exact) > 150
