"""Local steps: with any number of workers, losses, joins and resuming, the same bits."""

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.batch import GlobalBatch, LocalBatches, LocalGrouping
from lockstep.errors import ConfigError, ModelError
from lockstep.keras.fit.local_steps import changed, outer_update, weighted_change
from lockstep.protocol.local_steps import LocalSteps

Launch = Callable[..., Any]
OPTIONS = "--replicas 4 --local-steps 5,nesterov"
SMALL = "--replicas 4 --local-steps 5,nesterov,0.7,0.9,int8,reset"
"""As much as possible is not sent, or rounded."""
ROWS = "162"
"""Ten whole batches, and one with examples for two of four replicas. So an epoch has three outer steps."""


# Pure parts.


@given(st.integers(0, 40), st.integers(1, 7), st.none() | st.integers(1, 9))
def test_outer_steps_have_all_batches_and_end_with_epochs(
    batches: int, steps: int, epoch: int | None
) -> None:
    grouping = LocalGrouping(steps, epoch, 4)
    groups = list(grouping.groups(iter(range(batches))))
    assert [batch for group in groups for batch in group] == list(range(batches))
    assert len(groups) == grouping.count(batches)
    for group in groups:
        ends = group[-1] + 1 == batches or (epoch is not None and (group[-1] + 1) % epoch == 0)
        assert len(group) == steps or (ends and len(group) < steps)
        assert epoch is None or group[0] // epoch == group[-1] // epoch


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_a_share_of_an_outer_step_has_the_rows_of_all_its_steps(sizes: list[int], replicas: int) -> None:
    rows = np.arange(sum(sizes))
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    whole = LocalBatches(
        [GlobalBatch(len(p), replicas, lambda s, p=p: p[s], p.tobytes) for p in parts], replicas
    )
    shares = [whole.share(replica) for replica in range(replicas)]
    assert sum(share.examples for share in shares) == whole.examples == len(rows)
    assert sum(Fraction(share.examples, len(rows)) for share in shares) == 1
    seen = [row for share in shares for data in share.data() if data is not None for row in data]
    assert sorted(seen) == rows.tolist()
    assert whole.is_counted(0)
    for replica, share in enumerate(shares):
        taken = sum(data is not None for data in share.data())
        assert whole.is_counted(replica) == (taken == len(sizes))


def test_changes_are_those_of_numbers_that_are_not_finite() -> None:
    before, after = np.array([1, np.inf, np.inf, 0], "float32"), np.array([3, np.inf, 1, np.nan], "float32")
    np.testing.assert_array_equal(
        weighted_change(before, after, 0.5), np.array([1, 0, -np.inf, np.nan], "float32")
    )


@pytest.mark.parametrize("replicas", [2, 3, 5, 6, 7])
def test_averages_of_squares_that_almost_vanish_are_not_negative(replicas: int) -> None:
    before = np.random.default_rng(0).uniform(0.1, 100, 1000).astype("float32")
    after = before * np.float32(1e-10)
    change = sum(weighted_change(before, after, 1 / replicas) for _ in range(replicas))
    assert np.min(before + change) < 0 or replicas == 2
    assert np.min(changed(before, change)) >= 0
    np.testing.assert_array_equal(
        changed(np.float32([1, 0, np.inf]), np.float32([-3, -1, 0])), [-2, -1, np.inf]
    )


def test_the_outer_optimizer_is_that_of_keras() -> None:
    import keras

    local, sgd = LocalSteps(2, "nesterov"), keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    weight, momentum = np.array([1, -2], "float32"), np.zeros(2, "float32")
    variable = keras.Variable(weight)
    for change in np.array([[0.5, 0.1], [-0.3, 0.2], [0.1, 0.1]], "float32"):
        weight, momentum = outer_update(weight, momentum, change, local)
        sgd.apply([keras.ops.convert_to_tensor(-change)], [variable])
        np.testing.assert_allclose(weight, keras.ops.convert_to_numpy(variable), rtol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "20",
        "20,nesterov,0.7,0.9",
        "3,nesterov,1.0,0.0",
        "5,int8",
        "5,reset",
        "5,nesterov,0.7,0.9,int8,reset",
    ],
)
def test_the_text_of_an_option_is_parsed_and_written(text: str) -> None:
    assert LocalSteps.parse(text).text == text
    assert LocalSteps.parse("20,nesterov") == LocalSteps(20, "nesterov", 0.7, 0.9)
    assert LocalSteps.parse("20,nesterov,int8") == LocalSteps(20, "nesterov", changes="int8")


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "x",
        "",
        "5,sgd",
        "5,average,1",
        "5,nesterov,nan",
        "5,nesterov,0.7,1",
        "5,nesterov,1,0,1",
        "5,int4",
        "5,reset,int8",
    ],
)
def test_wrong_options_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="local"):
        LocalSteps.parse(text)


# Jobs.


def results(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    return [line for mark in ("logs ", "steps ", "result ") for line in run.marked(worker, mark)]


@pytest.fixture
def undisturbed(undisturbed_run: Launch) -> Callable[[str, str], Any]:
    """An undisturbed run with options of a backend, on one worker."""
    return lambda options, backend: undisturbed_run(f"-n 1 {options}", "local.py", ROWS, backend=backend)


some_backend = pytest.mark.parametrize(
    "backend",
    ["jax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "tensorflow"))],
    indirect=True,
)


@some_backend
def test_a_worker_is_killed_within_inner_steps(
    launch: Launch, backend: str, undisturbed: Callable[[str, str], Any]
) -> None:
    """Its replacement joins. The result is that of one worker, with as many inner steps."""
    run = launch(f"-n 2 --min-workers 2 {OPTIONS}", "local.py", ROWS, "lost", "1", "13", backend=backend)
    assert "worker 1 was killed by SIGKILL" in run.stderr
    assert "worker 2 joined (2 workers)" in run.stderr
    expected = results(undisturbed(OPTIONS, backend), 0)
    assert "steps 51" in expected
    assert results(run, 0) == results(run, 2) == expected


# A worker is lost on JAX above.
@pytest.mark.ci
@pytest.mark.parametrize(
    "backend",
    ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "tensorflow"))],
    indirect=True,
)
def test_a_failed_job_resumes_with_other_workers(
    launch: Launch, backend: str, undisturbed: Callable[[str, str], Any], tmp_path: Path
) -> None:
    """It resumes within a fit: the state of the outer optimizer is in the checkpoint.

    Changes are sent as small integers, and slots are not sent.
    """
    keeping = f"--checkpoint {tmp_path / 'kept'} --checkpoint-every 1"
    failed = launch(f"-n 2 {SMALL} {keeping}", "local.py", ROWS, "fails", "0", "4", backend=backend)
    assert "the script fails" in failed.stderr
    run = launch(f"-n 4 {SMALL} {keeping}", "local.py", ROWS, backend=backend)
    assert "resuming from" in run.stderr
    for worker in (0, 3):
        assert results(run, worker) == results(undisturbed(SMALL, backend), 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow"], indirect=True)
def test_a_step_may_have_several_updates(launch: Launch, undisturbed_run: Launch, backend: str) -> None:
    options = "--replicas 4 --local-steps 3,int8"
    run = launch(f"-n 2 {options}", "local_two.py", backend=backend)
    alone = undisturbed_run(f"-n 1 {options}", "local_two.py", backend=backend)
    assert results(run, 0) == results(run, 1) == results(alone, 0)
    assert len(results(run, 0)) == 1


def numbers(text: str) -> Any:
    (line,) = (line for line in text.splitlines() if line.startswith("numbers "))
    return np.array(line.split()[1:], "float64")


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("jax", marks=pytest.mark.ci),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "tensorflow")),
    ],
    indirect=True,
)
def test_one_local_step_of_sgd_is_a_synchronous_step(launch: Launch, plain: Launch, backend: str) -> None:
    """One replica, whose steps are Keras's own, has the same bits with any number of local steps."""

    run = launch("-n 1 --replicas 4", "local_one.py", "1", backend=backend)
    assert run.status == 0, run.stderr
    wanted = numbers(plain("local_one.py", backend=backend))
    np.testing.assert_allclose(numbers("\n".join(run.log(0))), wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(numbers(plain("local_one.py", "5", backend=backend)), wanted)


@pytest.mark.ci
@some_backend
def test_slots_that_are_reset_are_those_of_another_optimizer(
    launch: Launch, plain: Launch, backend: str
) -> None:
    """The twin compiles a model anew for each replica and outer step; rounded changes are close to it."""
    wanted = numbers(plain("local_twin.py", "by-hand", backend=backend))
    means = []
    for words in ("reset", "int8,reset"):
        run = launch(f"-n 2 --replicas 4 --local-steps 3,{words}", "local_twin.py", backend=backend)
        assert run.status == 0, run.stderr
        means.append(np.mean(np.abs(numbers("\n".join(run.log(1))) - wanted)))
    # The optimizer moves a weight by up to 0.01 in a step.
    assert means[0] < 1e-6 < means[1] < 1e-3


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ({"learning_rate": "schedule"}, "has a LearningRateSchedule"),
        ({"use_ema": True}, "averages weights"),
        ({"gradient_accumulation_steps": 2}, "accumulates gradients"),
    ],
)
def test_optimizers_that_cannot_begin_again_are_refused(optimizer: dict[str, Any], reason: str) -> None:
    import keras

    from lockstep.keras.fit.local_steps import initial_slots

    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    options = optimizer | ({"learning_rate": rate} if "learning_rate" in optimizer else {})
    adam = keras.optimizers.Adam(**options)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    adam.build(model.trainable_variables)
    with pytest.raises(ModelError, match=re.escape(reason)):
        initial_slots(model, adam)


def test_initial_slots_are_those_before_training() -> None:
    import keras

    from lockstep.keras.fit.local_steps import initial_slots

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25)
    optimizer.build(model.trainable_variables)
    optimizer.apply([keras.ops.ones(weight.shape) for weight in model.trainable_variables])
    slots = initial_slots(model, optimizer)
    assert [slot.shape for slot, _ in slots] == [(2, 1), (1,)]
    assert all(np.all(keras.ops.convert_to_numpy(value) == 0.25) for _, value in slots)
