"""The log of function calls, with which workers that join repeat them."""

import ml_dtypes
import msgspec
import numpy as np
import pytest

from lockstep.checkpoint.values import pack, unpack
from lockstep.keras.parameter_server import function_log
from lockstep.keras.parameter_server.function_log import AT_BEGIN, CallOutcome, FunctionLog, limit
from lockstep.protocol.parameter_server import FunctionResult, Passed

SHOWS = Passed(1, "join", True)


def shown(**values: float) -> CallOutcome:
    return CallOutcome(SHOWS, (), {key: np.array(value) for key, value in values.items()})


def kept(log: FunctionLog) -> dict[int, list[str]]:
    found = {number: log.outcome_of(number) for number in range(AT_BEGIN, log.count)}
    return {number: list(one.values) for number, one in found.items() if one is not None}


def outcome_of(log: FunctionLog, number: int) -> CallOutcome:
    found = log.outcome_of(number)
    assert found is not None
    return found


def restored(log: FunctionLog) -> FunctionLog:
    packed, arrays = pack(log.packed(), "log")
    return FunctionLog.unpacked(unpack(msgspec.json.decode(msgspec.json.encode(packed)), arrays))


def test_of_earlier_calls_what_the_script_has_read_is_kept() -> None:
    log = FunctionLog()
    log.begin({0: np.array(0.5), 1: np.array(0.0)}, {"model 0/a": np.array(2.0)})
    large = np.arange(2000.0).astype(ml_dtypes.bfloat16).reshape(4, -1)
    log.note_read("o1")
    log.add("schedule of train")
    log.add("join", shown(s0=1.0, o1=2.0))
    log.note_read("s0")
    log.add("done", CallOutcome(Passed(3, "done", done=False)))
    log.add("fetch", CallOutcome(SHOWS, [large, large[0, :3]], {"s0": np.array(3.0), "o1": np.array(4)}))
    assert kept(log) == {AT_BEGIN: ["o1"], 1: ["s0"], 2: [], 3: ["s0", "o1"]}
    log.below = 1
    again = restored(log)
    assert kept(again) == kept(log)
    assert (again.count, again.below, again.models) == (4, 1, {"model 0/a": 2.0})
    assert outcome_of(again, 1).passed == SHOWS
    assert outcome_of(again, 1).values["s0"] == 1.0
    for found, expected in zip(outcome_of(again, 3).results, (large, large[0, :3]), strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (
            expected.dtype,
            expected.shape,
            expected.tobytes(),
        )


def test_calls_have_names() -> None:
    log = FunctionLog()
    for _ in range(3):
        log.add("schedule of train")
    log.add("join", shown(s0=1.0))
    log.add("schedule of test")
    again = restored(log)
    labels = [*["schedule of train"] * 3, "join", "schedule of test"]
    assert [again.label(number) for number in range(5)] == labels


def test_the_oldest_variables_are_dropped_and_many_results_are_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(function_log, "MOST_BYTES", 16)
    monkeypatch.setattr(function_log, "MOST_LASTING_BYTES", 7000)
    first, second = FunctionLog(), FunctionLog()
    for log in (first, second):
        for _ in range(3):
            log.add("join", shown(s0=1.0))
            log.note_read("s0")
    assert not limit([first, second])
    assert kept(first) == {0: [], 1: [], 2: ["s0"]}
    assert kept(second) == {0: ["s0"], 1: ["s0"], 2: ["s0"]}
    found = CallOutcome(Passed(4, "fetch", results=(FunctionResult(b"{}", ("a",)),)), [np.zeros(200)])
    second.add("fetch", found)
    assert limit([first, second])
