"""Measurements of a worker's steps, on a clock that the test moves."""

import math
from typing import Any

import pytest

from lockstep.observability.bus import Bus
from lockstep.observability.events import CallEnded, Event
from lockstep.observability.measurements import (
    STEP_PARTS,
    WORKER_MEASUREMENTS,
    MetricsRecorded,
    RestEnded,
    StepEnded,
    StepsMeasured,
)
from lockstep.observability.step_recorder import StepRecorder, finite_values, is_single
from virtual_clock import VirtualClock


class Recorded:
    """A recorder, and what it publishes."""

    def __init__(self, chief: bool = True) -> None:
        self.clock = VirtualClock(1000.0)
        self.bus = Bus(self.clock, worker=0)
        self.events: list[Event] = []
        self.recorder = StepRecorder(self.bus, self.clock, lambda: chief)
        self.bus.subscribe(lambda entry: self.events.append(entry.event), *WORKER_MEASUREMENTS)
        self.trained = 0

    def step(
        self,
        call: str,
        number: int,
        seconds: float = 0.25,
        compiled: bool = False,
        staleness: int | None = None,
        trained: int | None = None,
        **logs: Any,
    ) -> None:
        """Take a step whose time is all for reading and, a quarter of it, for computing."""
        self.clock.advance(seconds)
        self.trained += call.startswith(("fit", "train"))
        parts = dict.fromkeys(STEP_PARTS, 0.0) | {"input": seconds * 0.75, "compute": seconds * 0.25}
        self.bus.publish(
            StepEnded(
                call=call,
                number=number,
                trained=self.trained if trained is None else trained,
                examples=64,
                replicas=2,
                seconds=seconds,
                logs=logs or None,
                compiled=compiled,
                staleness=staleness,
                **parts,
            )
        )

    def rest(self, call: str, seconds: float, paused: float = 0.0) -> None:
        """End a call with a validation of this time, in which training paused."""
        self.clock.advance(seconds)
        parts = dict.fromkeys(STEP_PARTS, 0.0) | {"nested": seconds}
        self.bus.publish(RestEnded(call=call, calls={"validation": seconds}, paused=paused, **parts))
        self.bus.publish(CallEnded(call))

    @property
    def steps(self) -> list[StepsMeasured]:
        return [event for event in self.events if isinstance(event, StepsMeasured)]

    @property
    def metrics(self) -> list[MetricsRecorded]:
        return [event for event in self.events if isinstance(event, MetricsRecorded)]


def test_the_first_step_of_a_call_is_measured_alone_and_later_ones_once_a_second() -> None:
    recorded = Recorded()
    for number in range(1, 11):
        recorded.step("fit 1", number)
    assert [(one.number, one.count) for one in recorded.steps] == [(1, 1), (5, 4), (9, 4)]
    second = recorded.steps[1]
    assert (second.began, second.seconds, second.input, second.compute) == (1000.25, 1.0, 0.75, 0.25)
    assert (second.examples, second.replicas, second.trained) == (256, 2, 5)
    assert second.singles == tuple(
        (number, (number - 2) * 250_000, 187_500, 62_500, 0, 0, 0, 0, 0) for number in range(2, 6)
    )
    recorded.bus.publish(CallEnded("fit 1"))
    assert (recorded.steps[-1].number, recorded.steps[-1].count) == (10, 1)
    recorded.bus.publish(CallEnded("fit 1"))
    assert len(recorded.steps) == 4


def test_the_time_after_the_last_step_counts_for_the_last_measurement() -> None:
    recorded = Recorded()
    for number in range(1, 4):
        recorded.step("fit 1", number)
    recorded.rest("fit 1", 8.0, paused=4.0)
    last = recorded.steps[-1]
    assert last.paused == 4.0
    assert (last.count, last.seconds, last.nested, last.calls) == (2, 8.5, 8.0, {"validation": 8.0})
    # After a single step, which is measured alone, it has a measurement without steps, if it is worth one.
    recorded.step("fit 2", 1)
    recorded.rest("fit 2", 2.0)
    last = recorded.steps[-1]
    assert (last.call, last.number, last.count, last.seconds, last.began) == ("fit 2", 1, 0, 2.0, 1009.0)
    assert last.paused == 0.0
    recorded.step("fit 3", 1)
    recorded.rest("fit 3", 0.001)
    assert (recorded.steps[-1].call, recorded.steps[-1].count) == ("fit 3", 1)


def test_training_steps_that_do_not_follow_one_another_are_recorded() -> None:
    recorded = Recorded()
    for number, trained in enumerate((12, 14, 13, 20, 21, 22), 1):
        recorded.step("fit 1", number, trained=trained)
    recorded.bus.publish(CallEnded("fit 1"))
    assert [(one.number, one.trained, one.steps) for one in recorded.steps] == [
        *((1, 12, ()), (5, 21, (14, 13, 20, 21)), (6, 22, ()))
    ]


def test_workers_of_parameter_servers_record_the_same_steps_of_the_job() -> None:
    recorded = Recorded()
    taken = (1024, 1045, 1060, 2050, 2070, 4097)
    for number, trained in enumerate(taken, 1):
        recorded.step("fit 2", number, trained=trained, staleness=0)
    recorded.bus.publish(CallEnded("fit 2"))
    found = [
        step
        for one in recorded.steps
        for step in one.steps or [one.trained - one.number + single[0] for single in one.singles]
    ]
    assert found == [step for step in taken if is_single(step)] == [1024, 1060, 2050, 4097]


def test_compiled_steps_are_counted_with_the_seconds_of_their_computing() -> None:
    recorded = Recorded()
    for number in range(1, 8):
        recorded.step("fit 1", number, compiled=number in (1, 3, 4))
    recorded.bus.publish(CallEnded("fit 1"))
    assert [(one.count, one.compiled, one.compiling) for one in recorded.steps] == [
        *((1, 1, 0.0625), (4, 2, 0.125), (2, 0, 0.0))
    ]


def test_the_staleness_of_steps_is_added_up_and_the_largest_is_kept() -> None:
    recorded = Recorded()
    for number, staleness in enumerate((9, 2, 0, 5, 1, 3, 4), 1):
        recorded.step("fit 1", number, staleness=staleness)
    recorded.bus.publish(CallEnded("fit 1"))
    recorded.step("evaluate 1", 1)
    assert [(one.count, one.staleness, one.largest_staleness) for one in recorded.steps] == [
        *((1, 9, 9), (4, 8, 5), (2, 7, 4), (1, None, None))
    ]


def test_every_step_is_in_one_measurement() -> None:
    recorded = Recorded()
    for epoch in range(200):
        for number in range(1, 4):
            recorded.step("fit 1", 3 * epoch + number, 0.001)
        recorded.step(f"validation {epoch + 1} within fit 1", 1, 0.002)
    for number in range(1, 6):
        recorded.step("train_on_batch", number, 0.001)
    recorded.recorder.flush()
    counts: dict[str, int] = {}
    for one in recorded.steps:
        counts[one.call] = counts.get(one.call, 0) + one.count
    assert counts == {"fit 1": 600, "validation within fit 1": 200, "train_on_batch": 5}
    # A measurement of each name for each name's first step, for the second that has passed, and at the end.
    assert len(recorded.steps) <= 3 * 3


def test_measurements_become_rarer_as_a_run_grows_older() -> None:
    recorded = Recorded()
    hours = 24 * 30
    for number in range(1, 60 * hours + 1):
        recorded.step("fit 1", number, 60.0)
    # One per second or step in the first hour, later 3600 for each factor of e.
    assert 60 + 3600 * math.log(hours / 60) * 0.9 < len(recorded.steps) < 60 * 60 + 3600 * math.log(hours)


def test_single_steps_are_the_same_on_all_workers_and_become_rarer() -> None:
    assert all(is_single(number) for number in range(1, 1025))
    million = [number for number in range(1, 1_000_001) if is_single(number)]
    assert 1024 + 9 * 512 <= len(million) <= 1024 + 10 * 512
    later = [number for number in million if number > 1024]
    assert all(is_single((number - 1) // 16 * 16 + 1 + at) for number in later[::97] for at in range(16))


def test_metrics_are_those_of_an_earlier_step_so_nothing_is_waited_for() -> None:
    recorded = Recorded()
    for number in range(1, 10):
        recorded.step("fit 1", number, loss=float(number), accuracy=0.5)
    assert [(one.trained, one.values["loss"], one.epoch) for one in recorded.metrics] == [
        (4, 4.0, None),
        (8, 8.0, None),
    ]


def test_only_the_chief_records_metrics() -> None:
    recorded = Recorded(chief=False)
    for number in range(1, 10):
        recorded.step("fit 1", number, loss=1.0)
    assert recorded.steps
    assert not recorded.metrics


def test_metrics_of_evaluations_are_not_recorded_within_them() -> None:
    recorded = Recorded()
    for number in range(1, 10):
        recorded.step("evaluate 1", number, loss=1.0)
    assert recorded.steps
    assert not recorded.metrics


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_become_none(value: float) -> None:
    assert finite_values({"loss": value, "text": "a", "vector": [1, 2], "one": 1}) == {
        "loss": None,
        "one": 1.0,
    }
