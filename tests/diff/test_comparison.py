"""What two recordings differ in first, and what is said of it; the recordings are made by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.diff.comparison import END_OF_SCRIPT, Comparison, compare
from lockstep.diff.recording import Key, RecordedHashes, Recording
from lockstep.diff.wording import as_data, detail, lines

REPLICAS = 2
LAST = 6
NAMES, VARIABLES = ("kernel", "bias"), ("kernel", "bias", "adam/learning_rate")

Edit = Callable[[Recording], object]


def digits(*parts: object) -> str:
    """A hash by name: 16 digits for each part."""
    return "".join(f"{abs(hash(('part', part))) % 16**16:016x}" for part in parts)


def recording(steps: int = LAST, *, stride: int = 1, full: bool = True) -> Recording:
    """A run of some steps, of which every `stride`-th is recorded, by name if `full`."""
    made = Recording(Path("run"), finished={"status": 0, "steps": steps, "digest": "d"})
    made.program = {
        "replicas": REPLICAS, "seed": 0, "threads": 1, "input": "divided", "backend": "jax",
        "versions": {"numpy": "2"}, "flags": {}, "processor": "P", "features": "avx avx2",
        "sources": {"t.py": "a"}, "script": "t.py",
    }  # fmt: skip
    made.settings = {"fit 1": {"call epochs": "0 to 1", "setting optimizer: learning_rate": "0.1"}}
    for step in range(stride, steps + 1, stride):
        one = RecordedHashes(Key(step, False), "fit 1", step, NAMES, VARIABLES)
        for replica in range(REPLICAS):
            one.examples[replica] = 3
            one.inputs[replica] = f"input {step} {replica}"
            one.partials[replica] = f"partial {step} {replica}"
            if full:
                one.rows[replica] = "".join(f"{step * 100 + replica * 10 + row:08x}" for row in range(3))
                one.partial_parts[replica] = digits((step, replica, "k"), (step, replica, "b"))
        one.total, one.before, one.after = f"total {step}", f"state {step - 1}", f"state {step}"
        if full:
            one.total_parts = digits((step, "tk"), (step, "tb"))
            one.before_parts = digits((step - 1, "k"), (step - 1, "b"), "rate")
            one.after_parts = digits((step, "k"), (step, "b"), "rate")
        made.steps[one.key] = one
    return made


def at(made: Recording, step: int) -> RecordedHashes:
    return made.steps[Key(step, False)]


def found(edit: Edit, **options: Any) -> Comparison:
    """Compare a run with one that was edited."""
    other = recording(**options)
    edit(other)
    return compare(recording(**options), other)


def change(made: Recording, step: int, what: str, part: int | None = None) -> None:
    """Change a hash of the state or the total of a step, and one of its parts."""
    one = at(made, step)
    setattr(one, what, "other")
    if part is not None:
        parts = getattr(one, f"{what}_parts")
        setattr(one, f"{what}_parts", parts[: part * 16] + "f" * 16 + parts[part * 16 + 16 :])


def test_equal_runs() -> None:
    same = found(lambda made: None)
    assert (same.equal, same.step, same.cause, same.compared) == (True, None, None, LAST)
    assert detail(same) == "the runs are equal in 6 recorded training steps, the last of which is step 6"
    assert lines(same, ["a", "b"]) == [detail(same)]


def test_the_rows_that_differ_are_named() -> None:
    def other_row(made: Recording) -> None:
        at(made, 3).inputs[1] = "other"
        at(made, 3).rows[1] = at(made, 3).rows[1][:8] + "f" * 8 + at(made, 3).rows[1][16:]

    def swapped(made: Recording) -> None:
        rows = at(made, 3).rows[1]
        at(made, 3).inputs[1] = "other"
        at(made, 3).rows[1] = rows[8:16] + rows[:8] + rows[16:]

    one, both = found(other_row), found(swapped)
    assert [(each.step, each.cause, dict(each.rows)) for each in (one, both)] == [
        (3, "input", {1: [1]}),
        (3, "input", {1: [0, 1]}),
    ]
    assert "different examples are read: row 1 of replica 1" in detail(one)
    assert "in a different order: row 0 of replica 1, row 1 of replica 1" in detail(both)


def test_a_gradient_of_one_replica_is_named_with_its_variable() -> None:
    def edit(made: Recording) -> None:
        at(made, 2).partials[1] = "other"
        at(made, 2).partial_parts[1] = at(made, 2).partial_parts[1][:16] + "f" * 16

    this = found(edit)
    assert (this.step, this.cause, this.replicas, this.names) == (2, "gradient", (1,), ("bias",))
    assert (
        detail(this)
        == "the runs differ first in step 2: only replica 1 computes a different gradient, in bias"
    )


@pytest.mark.parametrize(
    ("what", "part", "cause", "step", "name"),
    [
        ("total", 0, "reduction", 4, "kernel"),
        ("after", 1, "update", 4, "bias"),
        ("before", 0, "state", 4, "kernel"),
    ],
)
def test_the_sum_the_update_and_changes_between_steps(
    what: str, part: int, cause: str, step: int, name: str
) -> None:
    this = found(lambda made: change(made, 4, what, part))
    assert (this.step, this.cause, this.names, this.missing) == (step, cause, (name,), ())


def test_weights_that_change_after_a_step_are_explained_by_averages() -> None:
    def cause(name: str) -> str | None:
        def assigned(made: Recording) -> None:
            change(made, 4, "before", 0)
            made.settings["fit 1"][f"setting optimizer: {name}"] = "1"

        return found(assigned).cause

    assert [cause(name) for name in ("use_ema", "ema_momentum", "clipnorm")] == [
        *["configuration"] * 2,
        "state",
    ]


def test_the_first_state_is_explained_by_what_can_change_it() -> None:
    def weights(made: Recording) -> None:
        change(made, 1, "before", 0)

    def rate(made: Recording) -> None:
        change(made, 1, "before", 2)
        made.settings["fit 1"]["setting optimizer: learning_rate"] = "0.2"

    def seed(made: Recording) -> None:
        weights(made)
        made.program = {**made.program, "seed": 1}

    def script(made: Recording) -> None:
        weights(made)
        made.program = {**made.program, "sources": {"t.py": "b"}}

    causes = [found(edit).cause for edit in (weights, rate, seed, script)]
    assert causes == ["state", "configuration", "seed", "script"]
    assert found(rate).names == ("adam/learning_rate",)


@pytest.mark.parametrize(
    ("head", "cause"),
    [
        ({"versions": {"numpy": "3"}}, "versions"),
        ({"features": "avx"}, "processor"),
        ({"threads": 2}, "configuration"),
        ({"flags": {"XLA_FLAGS": "x"}}, "configuration"),
        ({"sources": {"t.py": "b"}}, "script"),
    ],
)
def test_a_difference_of_the_hosts_explains_a_gradient_and_alone_is_none(
    head: dict[str, Any], cause: str
) -> None:
    def only_head(made: Recording) -> None:
        made.program = {**made.program, **head}

    def both(made: Recording) -> None:
        only_head(made)
        at(made, 5).partials[0] = "other"
        at(made, 5).partial_parts[0] = digits("x", "y")

    harmless = found(only_head)
    assert harmless.equal
    assert [each.cause for each in harmless.heads] == [cause]
    assert any("without an effect on a recorded bit" in line for line in lines(harmless, ["a", "b"]))
    assert (found(both).step, found(both).cause) == (5, cause)


def test_what_an_argument_has_changed_explains_more_than_the_argument() -> None:
    def edit(made: Recording) -> None:
        at(made, 2).inputs[0] = at(made, 2).rows[0] = "other"
        made.job = {"arguments": ("--rows", "80"), "env": {"DATA": "/data"}}

    def counted(made: Recording) -> None:
        edit(made)
        made.settings["fit 1"]["data"] = "float32[80, 4]"

    def other_version(made: Recording) -> None:
        edit(made)
        made.program = {**made.program, "versions": {"numpy": "3"}}

    this = found(edit)
    assert (this.cause, this.explained and this.explained.name) == (
        "configuration",
        "environment variable DATA",
    )
    assert found(counted).cause == "input"
    assert found(other_version).cause == "configuration"


def test_variables_that_follow_from_the_number_of_threads_are_left_out() -> None:
    def edit(made: Recording) -> None:
        made.program = {**made.program, "threads": 2, "flags": {"OMP_NUM_THREADS": "2", "XLA_FLAGS": "x"}}

    assert [head.name for head in found(edit).heads] == ["threads", "environment variable XLA_FLAGS"]


def test_threads_that_wait_in_a_replay_in_one_process_are_no_difference() -> None:
    def with_threads(workers: int, threads: str) -> Recording:
        made = recording()
        made.job = {**made.job, "parameter_servers": 2, "workers": workers}
        made.program = {**made.program, "flags": {"TF_NUM_INTEROP_THREADS": threads}}
        return made

    run = with_threads(6, "1")
    assert not compare(run, with_threads(1, "6")).heads
    assert len(compare(run, with_threads(6, "6")).heads) == 1


def test_optimizer_settings_do_not_explain_a_gradient_of_the_first_step() -> None:
    def edit(made: Recording) -> None:
        made.settings["fit 1"]["setting optimizer: learning_rate"] = "0.2"
        at(made, 1).partials[0] = "other"
        at(made, 1).partial_parts[0] = digits("x", "y")

    assert found(edit).cause == "gradient"


def test_what_was_not_recorded_is_not_claimed() -> None:
    def total_unknown(made: Recording) -> None:
        change(made, 4, "after")
        at(made, 4).total = ""

    def gap(made: Recording) -> None:
        change(made, 4, "before")
        at(made, 4).partials = {}

    this = found(total_unknown, full=False)
    assert this.cause == "update"
    assert set(this.missing) == {"the total", "the variables"}
    assert "the sum of the gradients is equal" not in detail(this)
    assert "lockstep diff --rerun a b" in lines(this, ["a", "b"])[-1]
    later = found(gap, stride=2, full=False)
    assert (later.step, later.after) == (4, 2)
    assert "the steps between" in later.missing
    assert "between the steps 2 and 4" in detail(later)
    assert "cause: not certain; perhaps state" in lines(later, ["a", "b"])


def test_values_of_keras_json_are_named_if_both_runs_have_recorded_them() -> None:
    def values(floatx: str) -> Recording:
        made = recording()
        made.program = {**made.program, "keras": {"floatx": floatx, "epsilon": f"1e-07 {floatx}"}}
        return made

    other = values("float64")
    for place in ("inputs", "rows"):
        getattr(at(other, 1), place)[0] = "other"
    other.settings["fit 1"]["data"] = "float64[6, 4]"
    single = values("float32")
    single.settings["fit 1"]["data"] = "float32[6, 4]"
    this = compare(single, other)
    assert (this.place, this.cause) == ("input", "configuration")
    cause = "cause: configuration: keras.config.floatx is float32 in the first run and float64 in the second"
    assert cause in lines(this, ["a", "b"])
    assert not compare(recording(), values("float64")).heads


@pytest.mark.parametrize(
    ("name", "first", "second", "said"),
    [
        (
            "data",
            "float32[96, 4] int64[96]",
            "float32[80, 4] int64[80]",
            "the number of examples in fit 1 is 96 in the first run and 80 in the second",
        ),
        (
            "data",
            "float32[96, 4] int64[96]",
            "float32[80, 5] int64[80]",
            "data in fit 1 is float32[96, 4] int64[96] in the first run and float32[80, 5] int64[80] in the "
            "second",
        ),
        (
            "data",
            "Letters of 6 batches",
            "Letters of 5 batches",
            "data in fit 1 is Letters of 6 batches in the first run and Letters of 5 batches in the second",
        ),
        (
            "validation data",
            "float32[6, 4]",
            "float32[9, 4]",
            "the number of validation examples in fit 1 is 6 in the first run and 9 in the second",
        ),
    ],
)
def test_other_data_is_no_configuration(name: str, first: str, second: str, said: str) -> None:
    """It explains examples that differ, and another number of steps."""
    one, other, longer = recording(), recording(), recording(LAST + 2)
    one.settings["fit 1"][name] = first
    other.settings["fit 1"][name] = longer.settings["fit 1"][name] = second
    for place in ("inputs", "rows"):
        getattr(at(other, 2), place)[0] = "other"
    for this, place in ((compare(one, other), "input"), (compare(one, longer), "length")):
        assert (this.place, this.cause) == (place, "input")
        assert f"cause: input: {said}" in lines(this, ["a", "b"])


def test_a_sum_over_unknown_partials_is_not_blamed_alone() -> None:
    def edit(made: Recording) -> None:
        change(made, 3, "total", 0)
        del at(made, 3).partials[1]

    this = found(edit)
    assert "the partials of all replicas" in this.missing
    assert "may differ: not recorded" in detail(this)


def test_runs_of_other_lengths() -> None:
    short, long = recording(4), recording(6)
    this = compare(short, long)
    assert (this.equal, this.step, this.place) == (False, 5, "length")
    long.settings["fit 1"]["call epochs"] = "0 to 2"
    assert compare(short, long).cause == "configuration"
    short.finished = {"status": 1, "steps": None}
    stopped = compare(short, long)
    assert stopped.equal
    assert "their steps so far are 4 and 6" in detail(stopped)
    short.finished = {"status": 1, "steps": 3}
    assert compare(short, long).lengths == (4, 6)


def test_models_that_differ_at_the_end_are_not_equal() -> None:
    this = found(lambda made: made.finished.update(digest="e"), stride=4)  # type: ignore[attr-defined]
    assert (this.equal, this.place, this.after, this.step) == (False, "end", 4, 5)
    assert "--rerun" in lines(this, ["a", "b"])[-1]


def test_a_digest_that_differs_only_by_metrics_is_no_difference() -> None:
    def edit(made: Recording) -> None:
        made.finished = {**made.finished, "digest": "e"}

    def ended(state: str) -> Recording:
        made = recording()
        key = Key(LAST, True, END_OF_SCRIPT, 0)
        made.steps[key] = RecordedHashes(key, key.call, variables=VARIABLES, before=state)
        return made

    same, other = ended("state"), ended("state")
    edit(other)
    assert compare(same, other).equal
    changed = ended("other")
    edit(changed)
    this = compare(same, changed)
    assert (this.equal, this.step, this.cause) == (False, LAST, "state")
    assert "at the end of the script, after training step 6" in detail(this)


def test_states_between_steps_that_are_not_recorded() -> None:
    def alone(states: list[str]) -> Recording:
        made = recording()
        made.steps.clear()
        made.program = {**made.program, "replicas": 1}
        for step, state in zip((0, 3, 6), states, strict=True):
            key = Key(step, True, f"point {step}", 0)
            made.steps[key] = RecordedHashes(key, key.call, variables=VARIABLES, before=state)
        return made

    same = compare(alone(["a", "b", "c"]), alone(["a", "b", "c"]))
    assert detail(same) == "the states of the runs are equal at 3 recorded points"
    this = compare(alone(["a", "b", "c"]), alone(["a", "b", "x"]))
    assert (this.step, this.after, this.place, this.cause) == (6, 3, "state", "state")
    assert detail(this) == ("the runs differ first at point 6, after training step 6: the state differs")
    assert "a job with one replica records only states" in lines(this, ["a", "b"])[-1]


def test_only_examples_are_compared_between_backends() -> None:
    def edit(made: Recording) -> None:
        made.program = {**made.program, "backend": "torch"}
        for one in made.steps.values():
            one.partials, one.total, one.after, one.before = {0: "x", 1: "y"}, "t", "a", "b"
        made.finished = {**made.finished, "digest": "e"}

    assert found(edit).equal


def test_another_metric_alone_is_no_difference() -> None:
    def edit(made: Recording) -> None:
        for one in made.steps.values():
            one.names = (*NAMES, "metric mae")
            for replica in range(REPLICAS):
                one.partials[replica] += " mae"
                one.partial_parts[replica] += digits("mae")
            one.total, one.total_parts = one.total + " mae", one.total_parts + digits("mae")

    assert found(edit).equal


def test_the_data_of_a_comparison() -> None:
    data = as_data(found(lambda made: change(made, 4, "total", 0)), ["a", "b"])
    assert {name: data[name] for name in ("equal", "step", "cause", "names", "compared")} == {
        "equal": False,
        "step": 4,
        "cause": "reduction",
        "names": ["kernel"],
        "compared": LAST,
    }
    assert data["detail"].startswith("the runs differ first in step 4")


def served(**changes: Any) -> Recording:
    """A run with parameter servers, which records states only."""
    made = Recording(
        Path("run"), {"parameter_servers": 1}, finished={"status": 0, "steps": 10, "digest": "d"}
    )
    made.program = {
        "replicas": 4,
        "seed": 0,
        "sources": {"t.py": "a", "m.py": "a"},
        "script": "t.py",
    } | changes
    end = RecordedHashes(Key(10, True, "the end of fit 1", 0), "fit 1", 10, (), VARIABLES)
    end.before, end.before_parts = "state", digits("k", "b", "rate")
    made.steps[end.key] = end
    return made


def changed_end(made: Recording) -> Recording:
    (end,) = made.steps.values()
    end.before, end.before_parts = "other", digits("other", "b", "rate")
    return made


def test_runs_with_parameter_servers_differ_in_the_order_of_arrivals() -> None:
    same = compare(served(), served(replicas=3))
    assert same.equal
    differs = compare(served(), changed_end(served(replicas=3)))
    assert (differs.cause, differs.explained, differs.names) == ("order", None, ("kernel",))
    *_, last = lines(differs, ["a", "b"])
    assert last.startswith("next: nothing, if the data is equal: two runs with parameter servers differ")
    assert detail(differs) == (
        "the runs differ first at the end of fit 1, after training step 10: the state has changed since step "
        "0, in kernel"
    )


def test_a_difference_of_programs_is_the_cause_with_parameter_servers() -> None:
    differs = compare(served(), changed_end(served(sources={"t.py": "a", "m.py": "b"})))
    assert differs.cause == "script"
    assert differs.explained is not None
    assert differs.explained.name == "module m.py"
