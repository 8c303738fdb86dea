"""The lines and the exit status of `lockstep check` for a result."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.cli.check import check, lines, status


def step(*named: str, reason: str = "", reference: str = "") -> dict[str, Any]:
    parts = [{"part": "loss", "deviation": "double", "begins": "", "named": name} for name in named]
    fields = {"call": "fit 1", "kind": "train", "model": "m", "reason": reason, "reference": reference}
    return {**fields, "equal": ["mae"], "differences": parts}


@pytest.mark.parametrize(
    ("compared", "ended", "failed", "expected"),
    [
        ([step()], "", "", 0),
        ([step()], "t.py:1 writes a", "", 0),
        ([step("the loss f")], "", "", 0),
        ([step("")], "", "ValueError: no", 1),
        ([step(), step("", reference="jax")], "", "", 1),
        ([step()], "", "ValueError: no", 2),
        ([step(reason="it has steps")], "", "", 2),
        ([step(reason="it has steps"), step(reference="jax") | {"differences": []}], "", "", 2),
        ([], "", "", 2),
    ],
)
def test_the_status_of_a_check(compared: Any, ended: str, failed: str, expected: int) -> None:
    assert status({"compared": compared, "ended": ended, "failed": failed}) == expected


def test_the_lines_of_a_check() -> None:
    compared = [step("the loss f", ""), step("", reference="jax"), step(reason="it has steps")]
    assert list(lines({"compared": compared, "ended": "t.py:1 writes a", "failed": "ValueError: no"})) == [
        "fit 1, training step of m: 1 part equal, 2 differ",
        "  loss: double [named: the loss f]",
        "  loss: double [NOT NAMED]",
        "fit 1, training step of m, plain Keras as on jax: 1 part equal, 1 differs",
        "  loss: double",
        "fit 1, training step of m: not compared: it has steps",
        "the check ends here: t.py:1 writes a",
        "the script has failed here, perhaps because a check ends each fit early, and the rest is not "
        "compared: ValueError: no",
        "compared with one process: 1 part differs; please report it with the script. With one replica "
        "(lockstep run -n 1), nothing differs",
    ]
    *_, words = lines({"compared": [step("the loss f")], "ended": "", "failed": ""})
    assert words.startswith("compared with one process: 1 part differs, as noted at the start of ")
    *_, words = lines({"compared": [step() | {"kind": "test"}], "ended": "", "failed": ""})
    assert words == "compared with one process: equal (no training step)"


def test_a_check_that_compares_nothing_says_why() -> None:
    (line,) = lines({"compared": [], "ended": "", "failed": ""})
    assert line.startswith("not compared with one process: the script has called no fit")
    reason, line = lines({"compared": [], "ended": "t.py:1 writes a", "failed": ""})
    assert reason == "the check ends here: t.py:1 writes a"
    assert line == "not compared with one process: t.py:1 writes a"
    reason, _ = lines({"compared": [], "ended": "", "failed": "ValueError: no"})
    assert reason == "the script has failed here, and the rest is not compared: ValueError: no"


@pytest.fixture
def _keeps_the_handler_of_sigterm() -> Iterator[None]:
    """The command sets it for the rest of the process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_keeps_the_handler_of_sigterm")
@pytest.mark.parametrize("words", [["-n", "1"], ["-n", "4", "--replicas", "1"]])
def test_one_replica_is_not_compared(words: list[str]) -> None:
    done = CliRunner().invoke(check, [*words, "train.py"])
    assert done.exit_code == 2
    assert "one replica computes the same as one process; give -n 2 or more" in done.output
