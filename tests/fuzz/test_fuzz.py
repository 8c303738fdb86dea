"""Random programs, and the detection of faults by the fuzzer."""

import ast
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fuzz_oracle import Verdict, judge
from fuzz_rules import inexact, settled
from fuzz_specs import Loop, Output, Spec, Training, draw, simpler, size
from fuzz_text import text

from fuzz import Bench, shrink

ALL = ["jax", "tensorflow", "torch"]
ASKED = os.environ.get("BACKENDS", "")
INSTALLED = ALL if find_spec("torch") else ALL[:2]
BACKENDS = INSTALLED if not ASKED else ALL if ASKED == "all" else ASKED.split()
PROGRAMS, QUICK = 36, 12
EAGER = ("run_eagerly=True",)
WRONG = Loop(loss="replica")
"""Sums gradients of losses that are means over a replica's own rows."""


def quicker(seed: int, spec: Spec, backend: str) -> Spec:
    """Change how some programs run.

    Every other program runs eagerly on TensorFlow, where creating graphs takes most of the time. A quarter of
    the programs with eager steps remain eager on JAX, which lowers each operation separately.
    """
    if backend == "jax" and isinstance(spec, Training) and spec.compiling == EAGER and seed % 4 != 3:
        return replace(spec, compiling=())
    if backend != "tensorflow" or seed % 2:
        return spec
    return replace(spec, graph=False) if isinstance(spec, Loop) else replace(spec, compiling=EAGER)


@pytest.mark.ci
@pytest.mark.slow("tensorflow")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["quick", pytest.param("rest", marks=pytest.mark.slow)])
def test_random_programs(backend: str, part: str, tmp_path: Path) -> None:
    """The quick tests run each of the first programs on one backend; the slow tests run the rest."""
    own = range(ALL.index(backend), QUICK, len(ALL))
    seeds = [seed for seed in range(PROGRAMS) if (seed in own) == (part == "quick")]
    programs = {seed: quicker(seed, settled(draw(seed), backend), backend) for seed in seeds}
    bench = Bench(backend, tmp_path, quick=True)
    # TensorFlow's own strategy sums them too; with one pipeline per replica, one replica is the reference.
    wrong = replace(WRONG, source="function") if backend == "tensorflow" else WRONG
    verdicts = bench.run({**programs, 10**6: settled(wrong, backend)})
    assert verdicts.pop(10**6).kind == "wrong"
    faults = [
        f"--backend {backend} --seeds {seed}: {verdict}"
        for seed, verdict in verdicts.items()
        if verdict.is_fault
    ]
    assert not faults, "python tests/fuzz/fuzz.py " + "\n".join(faults)
    kinds = [verdict.kind for verdict in verdicts.values()]
    assert len(kinds) == len(seeds)
    assert kinds.count("true") > len(seeds) // 5
    assert kinds.count("invalid") + kinds.count("refused") < len(seeds) // 2


@pytest.mark.parametrize("backend", ALL)
def test_a_seed_determines_a_valid_program(backend: str) -> None:
    for seed in range(200):
        spec = settled(draw(seed), backend)
        assert spec == settled(draw(seed), backend) == settled(spec, backend)
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
