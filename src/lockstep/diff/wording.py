"""The result of a comparison as a text: the first difference, and advice on the next step."""

import re
from collections.abc import Sequence
from typing import Any

from lockstep.diff.comparison import Comparison, Place
from lockstep.diff.heads import ABSENT, Cause, HeadDifference
from lockstep.system.prose import count, first_of, shortened

_SHOWN = 4
_LONGEST = 160
_BEFORE = 20
_SEEDS = "the seeds of the script"
_PLURAL = ("arguments ", "callbacks ", "replicas", "threads")
_HASH = re.compile(r"#?[0-9a-f]{16}|[0-9a-f]{64}")
"""A value of which only a hash is recorded."""
_UNSURE = {"the state after the step before", "the steps between", "the steps after"}
"""The cause is not certain without these records."""
_OTHERS = "also different between the runs:"
_OTHERS_EQUAL = "different between the runs, without an effect on a recorded bit:"

_NEXT: dict[Cause, str] = {
    "configuration": "give both runs the same settings, or expect different bits",
    "versions": "install the same versions for both runs; each run's versions are in its digest log",
    "processor": "run both on the same kind of processor: different instruction sets round differently",
    "script": "compare the scripts (git diff); the version that a run used is in its folder sources/",
    "seed": "give both runs the same --seed, and the same seeds in the script",
    "input": (
        "check how these examples are read: look for changed data, scripts or modules, a shuffle or "
        "generator without a seed, a clock, or the order of files in a folder"
    ),
    "gradient": (
        "look at the layers of these variables and at train_step for random numbers without a seed, the "
        "time, or operations that are not deterministic; if each lockstep rerun gives different bits, "
        "suspect the memory or the processor of the host"
    ),
    "reduction": "suspect the memory of the hosts: the same sums have the same bits everywhere",
    "update": (
        "look at the optimizer, and at constraints of layers; if each lockstep rerun gives other bits, "
        "suspect the memory or the processor of the host"
    ),
    "state": (
        "look for code that changes weights outside of steps: a file that the script loads, a callback, "
        "set_weights or assign"
    ),
    "order": (
        "nothing, if the data is equal: two runs with parameter servers differ in the order of arrivals, "
        "unless max_staleness is 0; lockstep rerun RUN repeats one, unless the script depends on state "
        "that a run does not record, such as a Python object that scheduled functions change"
    ),
}


def as_data(comparison: Comparison, names: Sequence[str]) -> dict[str, Any]:
    """Return a comparison of the runs with these names as JSON data."""
    return {
        "equal": comparison.equal,
        "step": comparison.step,
        "cause": comparison.cause,
        "detail": detail(comparison),
        "place": comparison.place,
        "after": comparison.after,
        "replicas": list(comparison.replicas),
        "rows": {str(replica): list(rows) for replica, rows in comparison.rows.items()},
        "names": list(comparison.names),
        "not_recorded": list(comparison.missing),
        "heads": [
            {
                "cause": head.cause,
                "name": head.name,
                "values": [head.first, head.second],
                "lines": list(head.lines),
            }
            for head in comparison.heads
        ],
        "compared": comparison.compared,
        "steps": list(comparison.lengths),
        "runs": list(names),
    }


def lines(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Return the lines of a report on the runs with these names."""
    report = [detail(comparison)]
    unsure = not _UNSURE.isdisjoint(comparison.missing)
    if comparison.cause is not None:
        why = "" if comparison.explained is None else f": {described(comparison.explained)}"
        report.append(f"cause: {'not certain; perhaps ' if unsure else ''}{comparison.cause}{why}")
        report += [f"  {line}" for line in comparison.explained.lines] if comparison.explained else []
    if others := [head for head in comparison.heads if head is not comparison.explained]:
        report.append(_OTHERS_EQUAL if comparison.equal else _OTHERS)
        for head in others[:_SHOWN]:
            report += [f"  {described(head)}", *(f"    {line}" for line in head.lines)]
        if len(others) > _SHOWN:
            report.append(f"  and {len(others) - _SHOWN} more; --json lists all")
    if comparison.cause is not None and not unsure:
        report.append(f"next: {_NEXT[comparison.cause]}")
    if comparison.missing and comparison.job_replicas == 1:
        report.append(
            "a job with one replica records only states: run it with more replicas to compare steps"
        )
    elif comparison.missing:
        report.append(
            f"not recorded: {', '.join(comparison.missing)}; lockstep diff --rerun {' '.join(names)} repeats "
            "both runs and records everything up to this step"
        )
    return report


def detail(comparison: Comparison) -> str:
    """Return the result in one line."""
    if comparison.equal:
        return _equal(comparison)
    assert comparison.place is not None
    assert comparison.step is not None
    where = f"in step {comparison.step}"
    if comparison.place == "length":
        return (
            f"the runs are equal up to step {comparison.after}, and differ in the number of their steps: "
            f"{comparison.lengths[0]} and {comparison.lengths[1]}"
        )
    if comparison.place == "end":
        return (
            f"the models at the end differ, although all steps that both runs have recorded are equal, up to "
            f"step {comparison.after} of {comparison.lengths[0]}"
        )
    key = comparison.key
    at_point = key is not None and key.tests and not key.number
    if "the steps between" in comparison.missing and not at_point:
        where = f"between the steps {comparison.after} and {comparison.step}, or in step {comparison.step}"
    elif key is not None and key.tests:
        where = f"in step {key.number} of {key.call}" if key.number else f"at {key.call}"
        where += f", after training step {key.step}"
    return f"the runs differ first {where}: {_happened(comparison.place, comparison)}"


def _equal(comparison: Comparison) -> str:
    if not comparison.compared:
        return f"the states of the runs are equal at {count(comparison.points, 'recorded point')}"
    text = (
        f"the runs are equal in {count(comparison.compared, 'recorded training step')}, the last of which is "
        f"step {comparison.after}"
    )
    if comparison.lengths[0] != comparison.lengths[1]:
        text += f"; their steps so far are {comparison.lengths[0]} and {comparison.lengths[1]}"
    return text


def _happened(place: Place, comparison: Comparison) -> str:
    which = first_of(comparison.names, _SHOWN)
    several = len(comparison.names) > 1
    match place:
        case "first state":
            return f"the weights and variables differ before the first step{_in(which)}"
        case "state":
            if not _UNSURE.isdisjoint(comparison.missing):
                return f"the state {_before_step(comparison)}differs{_in(which)}"
            if comparison.key is not None and comparison.key.tests:
                return f"the state has changed since step {comparison.after}{_in(which)}"
            return (
                f"the state changes after step {(comparison.step or 1) - 1}, which is equal, and before this "
                f"step{_in(which)}"
            )
        case "input":
            return _examples(comparison)
        case "gradient":
            doubt = _doubt(comparison, "the state before the step", "the examples")
            return f"{_whose(comparison)} computes a different gradient{doubt}{_in(which)}"
        case "result":
            return f"{_whose(comparison)} computes different results of the evaluation{_in(which)}"
        case "reduction":
            doubt = _doubt(comparison, "the partials of all replicas")
            return (
                f"the recorded gradients of the replicas are equal, and their sum differs{doubt}{_in(which)}"
            )
        case "update":
            if "the total" in comparison.missing:
                return f"the recorded gradients are equal, and the state after the step differs{_in(which)}"
            verb = "are" if several else "is"
            subject = which or "the state"
            return f"the sum of the gradients is equal, and {subject} {verb} different after the update"
        case "length" | "end":
            return ""


def _before_step(comparison: Comparison) -> str:
    return "before the step " if comparison.key is not None and not comparison.key.tests else ""


def _examples(comparison: Comparison) -> str:
    rows = [f"row {row} of replica {replica}" for replica, some in comparison.rows.items() for row in some]
    if comparison.swapped:
        return f"the same examples are read in a different order: {first_of(rows, _SHOWN)}"
    if rows and not comparison.missing:
        return f"different examples are read: {first_of(rows, _SHOWN)}"
    return f"different examples are read by {_replicas(comparison.replicas)}"


def _whose(comparison: Comparison) -> str:
    if len(comparison.replicas) == comparison.of > 1:
        return "each replica"
    return f"only {_replicas(comparison.replicas)}" if comparison.of > 1 else _replicas(comparison.replicas)


def _replicas(numbers: Sequence[int]) -> str:
    return f"replica{'s' if len(numbers) > 1 else ''} {first_of([str(number) for number in numbers], _SHOWN)}"


def _doubt(comparison: Comparison, *facts: str) -> str:
    unknown = [fact for fact in facts if fact in comparison.missing]
    return f" ({' and '.join(unknown)} may differ: not recorded)" if unknown else ""


def _in(which: str) -> str:
    return f", in {which}" if which else ""


def described(head: HeadDifference) -> str:
    """Describe a difference of the programs or hosts in one line."""
    values = head.first, head.second
    hashes = head.cause == "script" or head.name.startswith(_SEEDS) or all(map(_HASH.fullmatch, values))
    if hashes and ABSENT not in values:
        return f"{head.name} differ{'' if head.name.startswith(_SEEDS) else 's'}"
    start = 0
    if max(map(len, values)) > _LONGEST:
        # This is the part in which they differ.
        same = next((at for at, (a, b) in enumerate(zip(*values, strict=False)) if a != b), 0)
        start = max(0, same - _BEFORE)
    first, second = (f"{'...' * (start > 0)}{shortened(text[start:], _LONGEST)}" for text in values)
    verb = "are" if head.name.startswith(_PLURAL) else "is"
    return f"{head.name} {verb} {first} in the first run and {second} in the second"
