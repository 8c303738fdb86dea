"""A subscriber receives each step of a training, with parts that add up, and changes no bit."""

import json
import math
from collections.abc import Callable

import pytest

from lockstep.observability.measurements import StepEnded

PARTS = ("input", "compute", "wait", "exchange", "update", "other", "nested")


@pytest.mark.ci
def test_a_subscriber_receives_each_step_with_its_parts(
    launch: Callable[..., object], thorough_backend: str
) -> None:
    run = launch("-n 2 --replicas 4 --tee all", "timed_steps.py", backend=thorough_backend)
    assert run.status == 0, run.stderr
    counted = {"call", "number", "trained", "examples", "replicas"}
    others = {"seconds", "paused", "calls", "compiled", "staleness", "logs"}
    assert set(StepEnded.__struct_fields__) == {*counted, *PARTS, *others}
    steps_of = {}
    for worker in (0, 1):
        (without,), (digest,) = run.marked(worker, "without "), run.marked(worker, "with ")
        assert without.split()[1] == digest.split()[1]
        assert run.marked(worker, "lost ") == ["lost 0"]
        steps = [json.loads(line.removeprefix("step ")) for line in run.marked(worker, "step ")]
        names = [(step["call"].partition(" ")[0], step["number"]) for step in steps]
        training, validation = [("fit", n) for n in (1, 2, 3, 4)], [("validation", 1)]
        again = [("fit", n) for n in (5, 6, 7, 8)]
        assert names == [*training, *validation, *again, *validation]
        # After the 8 steps of the first fit.
        assert [step["trained"] for step in steps] == [9, 10, 11, 12, 12, 13, 14, 15, 16, 16]
        assert {(step["examples"], step["replicas"]) for step in steps} == {(8, 2)}
        for step in steps:
            assert all(step[part] >= 0 for part in PARTS), step
            assert math.isclose(sum(step[part] for part in PARTS), step["seconds"], abs_tol=1e-6), step
            assert min(step["input"], step["compute"], step["exchange"], step["update"]) > 0, step
            assert math.isfinite(step["loss"])
            # The first step of the second epoch follows the validation.
            assert (step["nested"] > 0) == ((step["call"], step["number"]) == ("fit 2", 5)), step
            # All batches have the same shape.
            first = (step["call"], step["number"]) in (("fit 2", 1), ("validation 1 within fit 2", 1))
            assert step["compiled"] == (first and thorough_backend != "torch"), step
            assert set(step["calls"]) <= {"validation"}, step
            assert step["staleness"] is None
        steps_of[worker] = steps
        # The examples of a loop get another shape in its third step.
        loop = [json.loads(step.removeprefix("loop ")) for step in run.marked(worker, "loop ")]
        assert [(step["call"], step["number"]) for step in loop] == [("steps 1", n) for n in (1, 2, 3, 4)]
        compiled = [thorough_backend != "torch", False] * 2
        assert [step["compiled"] for step in loop] == compiled, loop
    assert [step["loss"] for step in steps_of[0]] == [step["loss"] for step in steps_of[1]]
    waiting, holding = steps_of[0][2], steps_of[1][2]
    assert waiting["wait"] >= 0.2, waiting
    (held,) = run.marked(1, "held ")
    assert holding["other"] >= float(held.split()[1]) > 0, holding
