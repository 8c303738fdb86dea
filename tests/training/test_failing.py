"""Calls that raise errors that the script catches: another process raises the same errors again."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.values import pack, unpack
from lockstep.errors import CheckpointError
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.state.journal import FinishedCall, error_of, failure_of
from lockstep.keras.state.resumable_calls import ResumableCalls
from lockstep.worker import job


class Enough(Exception):
    """An error whose arguments are not its text."""

    def __init__(self, *, step: int) -> None:
        super().__init__("enough")
        self.step, self.what = step, object()

    def __str__(self) -> str:
        return f"{self.args[0]} at {self.step}"


@pytest.mark.ci
def test_a_job_resumes_after_calls_that_raised(launch: Callable[..., Any], tmp_path: Path) -> None:
    keeping = f"--replicas 2 --checkpoint {tmp_path / 'kept'} --checkpoint-every 5"
    lost = launch(f"-n 2 {keeping}", "failing.py")
    assert lost.status == 137, lost.stderr
    # Step 10 is always saved; the last step only if the disk is not busy when its call ends.
    newest = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "kept").glob("step-*"))
    assert newest in (10, 12)
    done = launch(f"-n 1 {keeping}", "failing.py")
    assert done.status == 0, done.stderr
    assert f"resumed after step {newest - 6} of fit 2" in done.stderr
    marked = [
        [line for mark in ("caught ", "figure ") for line in run.marked(0, mark)] for run in (lost, done)
    ]
    assert len(marked[0]) == 5
    assert marked[0] == marked[1]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("name"),
        FileNotFoundError(2, "No such file", "x.csv"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        SystemExit(3),
        Enough(step=7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_raised_again(error: BaseException) -> None:
    again = error_of(unpack(*pack(failure_of(error, "fit 1"), "error")))
    assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
    assert getattr(again, "step", None) == getattr(error, "step", None)
    assert getattr(again, "filename", None) == getattr(error, "filename", None)
    assert getattr(again, "code", None) == getattr(error, "code", None)


def test_errors_that_cannot_be_raised_again_are_named() -> None:
    class Hidden(Exception):
        pass

    class Other(Enough):
        pass

    globals()["Other"], Other.__qualname__ = Other, "Other"
    other = Other(step=1)
    other.step = object()  # type: ignore[assignment]
    for error, name in ((Hidden("no"), "Hidden: no"), (other, "Other: enough at <object")):
        with pytest.raises(CheckpointError, match=f"fit 1 of the script .*{name}"):
            error_of(failure_of(error, "fit 1"))
    failure = dict(failure_of(ValueError("no"), "fit 1"), **{"module": "os", "class": "system"})
    with pytest.raises(CheckpointError, match="cannot raise it again"):
        error_of(failure)


class TestWhereTheTrainingResumes:
    """The script repeats calls until it reaches the one in progress; otherwise, later calls are refused."""

    @pytest.fixture
    def begun(self) -> Callable[[], ResumableCalls]:
        """Return calls that resume after step 3 of the second, `fit 1`; the first, `predict 1`, raised."""

        def calls() -> ResumableCalls:
            return ResumableCalls(job.alone(), NumberedCalls())

        def begin(**changed: Any) -> ResumableCalls:
            first = calls()
            with pytest.raises(ValueError, match="no"), first.call("predict"):
                raise ValueError("no")
            facts = {"methods": {}, "inner": {}, "taken": 3, "logs": {}, "callbacks": [], "random": {}}
            position = {"journal": first.journal.packed(), "steps": 3, "call": "fit 1"}
            packed, arrays = pack(facts | position | changed, "training")
            second = calls()
            second.begin(Contents(3, {"training": packed}, arrays))
            return second

        return begin

    def test_the_error_is_raised_again(self, begun: Callable[[], ResumableCalls]) -> None:
        calls = begun()
        with pytest.raises(ValueError, match="no"), calls.call("predict"):
            assert calls.resume().result  # type: ignore[union-attr]
        with calls.call("fit") as call:
            assert calls.resume() is None
            assert call.skipped == 3
            calls.arrive()
            assert calls.resumption is None

    def test_querying_the_kind_of_a_call_changes_nothing(self, begun: Callable[[], ResumableCalls]) -> None:
        calls = begun()
        with suppress(ValueError), calls.call("predict") as call:
            before = random.getstate()
            random.seed(5)
            now = random.getstate()
            for _ in range(2):
                found = calls.next_call()
                assert isinstance(found, FinishedCall)
                assert isinstance(found.error, ValueError)
                assert random.getstate() == now
                assert calls.behind
            finished = calls.replay()
            assert random.getstate() == before
            finished.raise_error()
        with calls.call("fit") as call:
            with calls.call("evaluate"):
                assert calls.next_call() == 0
            assert [calls.next_call(), calls.next_call()] == [3, 3]
            assert call.skipped == 0
            calls.resume()
            assert call.skipped == 3
            calls.arrive()
        with calls.call("fit"):
            assert calls.next_call() == 0

    def test_another_call_is_refused(self, begun: Callable[[], ResumableCalls]) -> None:
        calls = begun()
        for method in ("evaluate", "fit"):
            with (
                pytest.raises(CheckpointError, match=r"call 1 .* is evaluate 1, but was predict 1"),
                calls.call(method),
            ):
                calls.resume()

    @pytest.mark.parametrize("raises", [False, True])
    def test_a_call_that_ends_before_the_position_is_refused(
        self, begun: Callable[[], ResumableCalls], raises: bool
    ) -> None:
        calls = begun()
        with pytest.raises(ValueError, match="no"), calls.call("predict"):
            assert calls.resume().result  # type: ignore[union-attr]
        with suppress(CheckpointError, IndexError), calls.call("fit") as call:
            assert calls.resume() is None
            call.steps = 2
            if raises:
                raise IndexError("row 9")
            calls.finish(None)
        how = r"ended with IndexError\('row 9'\)" if raises else "ended after 2"
        with (
            pytest.raises(CheckpointError, match=f"resumes after step 3 of fit 1, but .* {how}: the script"),
            calls.call("fit"),
        ):
            pass

    @pytest.mark.parametrize("part", ["journal", "steps", "methods", "inner", "taken", "logs", "callbacks"])
    def test_a_checkpoint_without_a_part_is_refused(
        self, begun: Callable[..., ResumableCalls], part: str
    ) -> None:
        with pytest.raises(CheckpointError, match=rf"the checkpoint of step 3 lacks .*: {part}, random; rem"):
            begun(**{part: None, "random": ()})
