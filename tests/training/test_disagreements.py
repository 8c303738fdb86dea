"""Workers that compute different things raise an error at the first such step, and name the difference."""

import re
from collections.abc import Callable
from typing import Any

import pytest

HASH = r"#?[0-9a-f]{16,32}"

EXPECTED = {
    "models": rf"fit 1: worker 0 has variable sequential/only/kernel = float32\[4, 1\] {HASH} where worker 1 "
    rf"has float32\[4, 1\] {HASH}; the models differ: .*",
    "examples": rf"fit 2: worker 0 has data sample = {HASH} where worker 1 has {HASH}; the workers read "
    "different examples: .*",
    "batches": rf".* in reduce for step 3 of fit 3: worker 0 from {HASH} while worker 1 from {HASH}\. .*",
    "sizes": r"fit 4: worker 0 has data = float32\[16, 4\] float32\[16\] where worker 1 has "
    r"float32\[15, 4\] float32\[15\]; the workers read .*",
    "epochs": "fit 5: worker 0 has call epochs = 0 to 1 where worker 1 has 0 to 2; all workers must make the "
    "same calls .*",
    "drift": rf"after step 100 of fit 6: worker 0 has variable .*only/bias = float32\[1\] {HASH} where "
    rf"worker 1 has float32\[1\] {HASH}; the models differ: .*",
    "hyperparameters": r"fit 7: worker 0 has setting .*dropout.* rate = 0\.[12].* where worker 1 has "
    r"0\.[456].*; the workers build different models: look for hyperparameters that come from an unseeded "
    "generator, .*",
    "draws": rf"fit 9: worker 0 has order = batches of 32, shuffle True, random states {HASH} where worker 1 "
    rf"has batches of 32, shuffle True, random states {HASH}; the workers have drawn different random .*",
    "ends": rf"the end of fit 8: worker 0 has variable .*only/bias = float32\[1\] {HASH} where "
    rf"worker 1 has float32\[1\] {HASH}; the models differ: .*",
    "calls": "(fit 10|evaluate 1): worker 0 has call = fit 10 where worker 1 has evaluate 1; all workers "
    "must make the same calls .*",
}


@pytest.fixture(scope="module")
def run(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job whose workers differ."""
    return launch("-n 2", "disagreements.py", str(tmp_path_factory.mktemp("saved")))


@pytest.fixture(scope="module")
def errors(run: Any) -> list[dict[str, str]]:
    """For each worker: the error of each case."""
    lines = [run.marked(worker, "case ") for worker in range(2)]
    return [dict(line.removeprefix("case ").split(": ", 1) for line in own) for own in lines]


@pytest.mark.parametrize("case", EXPECTED)
def test_both_workers_name_the_difference(errors: list[dict[str, str]], case: str) -> None:
    for own in errors:
        assert re.fullmatch(f"DisagreementError: {EXPECTED[case]}", own[case]), own[case]


def test_a_difference_that_only_one_worker_finds_fails_the_job(run: Any) -> None:
    assert run.status == 1
    assert re.search(
        r"worker [01] saves .*unlike\.weights\.h5 with different weights, or arguments, from worker [01]",
        run.stderr,
    )
