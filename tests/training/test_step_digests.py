"""Which steps are recorded, and what of them; the programs and the clock are the tests' own."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lockstep.collectives.plan import ReducePlan
from lockstep.keras.rounds import PartialLayout, Round
from lockstep.keras.step_digests import ALL_UNTIL, DigestRecorder
from lockstep.observability.bus import Bus
from lockstep.observability.digest_records import (
    WORKER_DIGESTS,
    DigestsRecorded,
    ProgramRecorded,
    StepDigests,
)
from lockstep.observability.events import Event
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker.job import Job, JobContext
from thread_hub import Hub

REPLICAS = 2
Arrays = dict[str, np.ndarray[Any, Any]]


class Weights:
    """A program with two variables; its state is a tuple of arrays that an update replaces."""

    def named_state(self, state: Any) -> Mapping[str, Any]:
        return {"a": state[0], "b": state[1]}

    def lasting_variables(self) -> Mapping[str, Any]:
        return {"a": None, "b": None}

    def lasting_values(self, state: Any, variables: Mapping[str, Any]) -> Sequence[Any]:
        return list(state)


class SummedRound(Round):
    """A round that is summed already."""

    def compute(self, replica: int) -> Any:
        raise NotImplementedError


class Recorded:
    """A recorder in a job of one worker, and what it publishes."""

    def __init__(self, wish: str = "", cost: float = 0.0) -> None:
        self.events: list[Event] = []
        bus = Bus(SystemClock(), 0)
        bus.subscribe(lambda published: self.events.append(published.event), *WORKER_DIGESTS)
        view = place(REPLICAS, (0,))
        context = JobContext(0, bus, JobSettings(threads=1, digests=wish))
        self.time, self.cost = 1000.0, cost
        self.job = Job(context, (view, Hub(ReducePlan.of(view)).member(0)))
        self.recorder = DigestRecorder(self.job, self.to_numpy, lambda: self.time)
        self.state: tuple[Any, ...] = (np.zeros(3), np.zeros(2))
        self.program: Any = Weights()
        self.taken = 0

    def to_numpy(self, array: Any) -> Any:
        self.time += self.cost
        return np.asarray(array)

    def step(self, data: Any = (), seconds: float = 0.1, gradient: float = 1.0) -> None:
        self.taken += 1
        record = self.recorder.begin(self.taken, "fit 1", self.taken, trains=True)
        self.time += seconds
        partials: dict[int, list[Any]] = {r: [np.full(3, gradient + r)] for r in range(REPLICAS)}
        layout = PartialLayout({"gradient/0": ((3,), np.dtype("float64"))})
        round_ = SummedRound("step", 0, layout=layout)
        round_.contributed = dict(partials)
        if record is not None:
            record.rows = 6
            for replica in range(REPLICAS):
                record.read(replica, data)
            record.add_round(round_, {"gradient/0": sum(part[0] for part in partials.values())})
        self.recorder.before_update(record, self.program, self.state)
        self.state = (self.state[0] + gradient, self.state[1])
        self.recorder.after_update(record, self.program, self.state)

    @property
    def steps(self) -> list[StepDigests]:
        self.recorder.end()
        return [step for event in self.events if isinstance(event, DigestsRecorded) for step in event.steps]


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def test_the_state_after_a_step_is_that_before_the_next_one(recorded: Recorded) -> None:
    for _ in range(4):
        recorded.step()
    steps = recorded.steps
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.after for step in steps[:-1]] == [step.before for step in steps[1:]]
    assert len({step.after for step in steps}) == 4
    assert all(len(step.after_parts) == 2 * 16 for step in steps)
    assert len({step.after_parts[16:] for step in steps}) == 1


def test_the_first_step_of_a_call_has_the_shapes_of_the_batch(recorded: Recorded) -> None:
    for _ in range(2):
        recorded.step((np.zeros((2, 3, 1), "float32"), np.zeros(2, "int32"), None))
    assert [step.shapes for step in recorded.steps] == [("float32[6, 3, 1]", "int32[6]"), ()]


def test_the_first_step_of_a_process_that_resumes_has_the_shapes_of_the_batch(recorded: Recorded) -> None:
    recorded.taken = 4
    for _ in range(2):
        recorded.step(np.zeros((2, 3), "float32"))
    assert [step.shapes for step in recorded.steps] == [("float32[6, 3]",), ()]


def test_a_change_between_steps_is_not_part_of_a_step(recorded: Recorded) -> None:
    recorded.step()
    recorded.state = (recorded.state[0], recorded.state[1] + 1)
    recorded.step()
    first, second = recorded.steps
    assert first.after != second.before
    assert first.after_parts[:16] == second.before_parts[:16]


def test_the_parts_of_a_step(recorded: Recorded) -> None:
    recorded.step((np.arange(6).reshape(3, 2), np.arange(3)))
    recorded.step((np.arange(6).reshape(3, 2), np.array([0, 5, 2])))
    first, second = recorded.steps
    assert first.examples == {0: 3, 1: 3}
    assert set(first.partials) == {0, 1}
    assert first.partials[0] != first.partials[1]
    assert first.total != first.partials[0]
    assert first.inputs[0] != second.inputs[0]
    rows = [[step.rows[0][at : at + 8] for at in range(0, 24, 8)] for step in (first, second)]
    assert [a == b for a, b in zip(*rows, strict=True)] == [True, False, True]


def test_texts_count_by_content_and_other_objects_are_not_recorded(recorded: Recorded) -> None:
    for word in ("b", "".join(["", "b"]), "c"):
        recorded.step([np.array(["a", word, b"x"], object)])
    recorded.step([np.array([object(), object()])])
    one, same, other, unknown = recorded.steps
    assert one.inputs == same.inputs != other.inputs
    assert one.rows == same.rows
    assert unknown.inputs == {}


def test_steps_are_recorded_at_a_stride_that_costs_little() -> None:
    recorded = Recorded(cost=0.01)
    for _ in range(3 * 1024):
        recorded.step()
    found = [step.step for step in recorded.steps]
    assert found[:ALL_UNTIL] == list(range(1, ALL_UNTIL + 1))
    late = [step for step in found if step > 2048]
    # Hashing two variables before and after a step takes 0.04 s, and a step 0.1 s: a record in 80 steps
    # takes 0.5 %.
    assert {later - earlier for earlier, later in pairwise(late)} == {128}
    assert all(step % 128 == 0 for step in late)
    (stride,) = {event.stride for event in recorded.events[-1:] if isinstance(event, DigestsRecorded)}
    assert stride == 128


def test_records_that_cost_nothing_are_made_of_every_step() -> None:
    recorded = Recorded()
    for _ in range(1000):
        recorded.step()
    assert [step.step for step in recorded.steps] == list(range(1, 1001))


def test_events_are_numbered_and_small_and_come_about_once_a_second(recorded: Recorded) -> None:
    for _ in range(100):
        recorded.step(seconds=0.1)
    recorded.recorder.end()
    events = [event for event in recorded.events if isinstance(event, DigestsRecorded)]
    assert [event.serial for event in events] == list(range(1, len(events) + 1))
    assert 9 <= len(events) <= 12


def test_a_step_that_a_joining_worker_computes_by_itself_is_not_recorded(recorded: Recorded) -> None:
    recorded.step()
    with recorded.job.detached():
        recorded.step()
    recorded.step()
    assert [step.step for step in recorded.steps] == [1, 3]


def test_wishes() -> None:
    nothing = Recorded("off")
    nothing.step()
    assert nothing.events == []
    until = Recorded("300", cost=1.0)
    for _ in range(301):
        until.step()
    assert [step.step for step in until.steps] == list(range(1, 302))
    assert [until.recorder.ends_after(step) for step in (300, 301)] == [False, True]


def test_rounds_of_other_loops_count_as_steps(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PartialLayout({"merge/0": ((1,), np.dtype("float64"))})
    for number in range(3):
        round_ = SummedRound("strategy.run of f", 0, layout=layout)
        round_.contributed = {0: [np.full(1, number)], 1: [np.ones(1)]}
        monkeypatch.setattr(round_, "inputs", lambda replica: [np.arange(4) + replica])
        recorded.recorder.record_loop_round(round_, {"merge/0": np.full(1, number + 1.0)}, driven=False)
    recorded.step()
    steps = recorded.steps
    assert [(step.step, step.call) for step in steps] == [
        *((number, "strategy.run of f") for number in (1, 2, 3)),
        (4, "fit 1"),
    ]
    assert len({step.total for step in steps[:3]}) == 3
    assert steps[0].inputs == steps[1].inputs
    assert steps[0].inputs[0] != steps[0].inputs[1]


def test_rounds_of_a_driven_loop_belong_to_its_step(recorded: Recorded) -> None:
    layout = PartialLayout({"merge/0": ((1,), np.dtype("float64"))})
    loop: Any = Weights()
    loop.named_state = lambda state: {"a": recorded.state[0]}
    for step in (1, 2):
        recorded.recorder.begin_loop_step(step, "steps 1", step, loop)
        for number in (1, 2):
            round_ = SummedRound("strategy.run of f", 0, layout=layout)
            round_.contributed = {0: [np.full(1, number)], 1: [np.ones(1)]}
            recorded.recorder.record_loop_round(round_, {"merge/0": np.full(1, number + 1.0)}, driven=True)
        recorded.state = (recorded.state[0] + 1, recorded.state[1])
        recorded.recorder.end_loop_step(loop)
    first, second = recorded.steps
    assert (first.step, second.step) == (1, 2)
    assert len(first.partial_parts[0]) == 2 * 16
    assert first.before
    assert first.after != second.after
    assert first.partials == second.partials


def test_a_step_that_does_not_fit_in_a_message_is_recorded_without_its_parts() -> None:
    recorded = Recorded("all")
    many = {f"variable {number}": np.zeros(1) for number in range(4000)}
    recorded.program.lasting_variables = lambda: many
    recorded.program.lasting_values = lambda state, variables: list(many.values())
    recorded.step()
    recorded.step()
    steps = recorded.steps
    assert [(step.step, bool(step.after), step.after_parts) for step in steps] == [
        (1, True, ""),
        (2, True, ""),
    ]


def test_a_call_records_the_configuration_of_keras_when_it_changes(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.recorder.begin_call("fit 1", 0, {})
    recorded.recorder.begin_call("fit 2", 1, {})
    monkeypatch.setattr("keras.config.epsilon", lambda: 1e-5)
    recorded.recorder.begin_call("fit 3", 2, {})
    programs = [event.keras for event in recorded.events if isinstance(event, ProgramRecorded)]
    known = {"floatx": "float32", "image_data_format": "channels_last"}
    assert programs == [{**known, "epsilon": "1e-07"}, {**known, "epsilon": "1e-05"}]
