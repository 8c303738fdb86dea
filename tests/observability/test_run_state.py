"""The one fold over the events of a run: pure, and of bounded size without history."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import (
    STEP_PARTS,
    CallStarted,
    CheckpointWritten,
    Event,
    LastStepEnded,
    LoadMeasured,
    MetricsRecorded,
    ReplicasVerified,
    StepsMeasured,
    TrainingEnded,
    TrainingResumed,
    ViewStarted,
    WorkerExited,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from lockstep.observability.growth import Columns, GrowingList, Numbering
from lockstep.observability.run_lines import Happening, as_happening, happening, measurement
from lockstep.observability.run_state import JobTotals, RunState

GOLDEN = Path(__file__).parents[1] / "release" / "golden" / "run"


def steps(trained: int, call: str = "fit 1", **more: Any) -> StepsMeasured:
    sums = {"count": 5, "began": 1.0, "examples": 320, "replicas": 1, "seconds": 0.7}
    return StepsMeasured(
        call=call, number=trained, trained=trained, **(sums | dict.fromkeys(STEP_PARTS, 0.1) | more)
    )


def load(at: int) -> LoadMeasured:
    worker = WorkerLoad(worker=at % 3, cores=1.0, delayed=0.0, memory=7, faults=0.0)
    host = {"memory_used": 1, "memory_total": 2, "swapping": 0.0, "throttled": 0.0}
    return LoadMeasured(host="a", cores=2, busy=1.0, workers=(worker,), **host)


JOB = Happening(0.0, "job", None, {"workers": 2, "replicas": 2})
HAPPENED: list[tuple[int | None, Event]] = [
    (None, WorkerStarted(0, 10)),
    (None, WorkerStarted(1, 11)),
    (None, WorkerReady(0)),
    (0, TrainingResumed("a checkpoint", 100)),
    (1, TrainingResumed("a checkpoint", 100)),
    (0, CallStarted("fit 1")),
    (0, steps(105)),
    (1, steps(105)),
    (0, MetricsRecorded(call="fit 1", epoch=1, trained=106, values={"loss": 0.5, "x": None})),
    (None, load(0)),
    (0, CheckpointWritten("c/106", 106, 0.1)),
    (None, WorkerLost(1, "killed")),
    (None, ViewStarted(2, (0,), "killed")),
    (None, WorkerExited(1, -9)),
    (None, WorkerJoined(2, "for worker 1")),
    (None, ViewStarted(3, (0, 2), "for worker 1")),
    (2, TrainingResumed("worker 0", 106)),
    (0, ReplicasVerified(7, 100)),
    (0, ReplicasVerified(9, 110)),
    (0, steps(110)),
    (2, steps(110)),
    (2, LastStepEnded(111)),
    (None, WorkerLeft(0, "asked")),
    (None, ViewStarted(4, (2,), "asked")),
]
ENTRIES = [JOB, *(PublishedEvent(1.0 + at, *what) for at, what in enumerate(HAPPENED))]


def test_what_a_job_has_done() -> None:
    state = RunState(keeps_history=False)
    for entry in ENTRIES:
        state = state.after(entry)
    totals = JobTotals(lost=1, joined=1, checkpoints=1, verified=9, before=100, reached=111)
    assert (state.totals, state.left, state.saved, state.trained) == (totals, 1, 106, 110)
    assert (list(state.members), state.skipped, state.last) == ([2], 0, float(len(HAPPENED)))
    assert (state.values, state.examples.examples) == ({"loss": 0.5, "x": None}, 640)
    assert {worker: sums.count for worker, sums in state.taken.items()} == {0: 10, 1: 5, 2: 5}
    # Only the chief says what was trained. A joiner that is the chief does not resume the job.
    joiner = state.after(PublishedEvent(99.0, 2, TrainingResumed("worker 0", 111)))
    assert joiner.totals == totals
    for worker, expected in ((0, None), (2, 120)):
        ended = state.after(PublishedEvent(99.0, worker, TrainingEnded(120, "m", "1f3c")))
        assert ended.totals.steps == expected
    assert ended.totals == msgspec.structs.replace(totals, steps=120, model="m", digest="1f3c")


def read(folder: Path) -> list[PublishedEvent | Happening]:
    events = (happening(line) for line in (folder / "events.jsonl").read_bytes().splitlines())
    measured = (measurement(line) for line in (folder / "measurements.jsonl").read_bytes().splitlines())
    return sorted((one for one in (*events, *measured) if one is not None), key=lambda one: one.time)


@pytest.mark.parametrize("keeps_history", [True, False])
@pytest.mark.parametrize("entries", [ENTRIES, read(GOLDEN)], ids=["made", "recorded"])
def test_a_state_stays_what_it_is_when_events_follow(
    entries: list[PublishedEvent | Happening], keeps_history: bool
) -> None:
    states = [RunState(keeps_history=keeps_history)]
    for entry in entries:
        states.append(states[-1].after(entry))
    before = [plain(state) for state in states]
    # A second future of each of them changes none of them.
    for state, entry in zip(states, reversed(entries), strict=False):
        state.after(entry).after(PublishedEvent(5.0, 0, steps(7, call="fit 9")))
    assert [plain(state) for state in states] == before
    assert [plain(state.after(entry)) for state, entry in zip(states, entries, strict=False)] == before[1:]


def test_a_late_report_of_an_earlier_step_lowers_nothing() -> None:
    state = RunState().after(JOB)
    for event in (CheckpointWritten("c/20", 20, 0.1), steps(18), LastStepEnded(19)):
        state = state.after(PublishedEvent(1.0, 0, event))
    assert state.totals.reached == 20
    assert state.after(PublishedEvent(1.0, 1, steps(0))).totals.reached == 20


def plain(value: Any) -> Any:
    """All that a value holds, as built-in types; a text for numbers, so that NaN equals NaN."""
    match value:
        case Columns():
            return {name: plain(value.column(name).tolist()) for name in value.names}
        case Numbering():
            return len(value)
        case msgspec.Struct():
            return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        case Mapping():
            return {name: plain(part) for name, part in value.items()}
        case GrowingList() | list() | tuple() | range():
            return [plain(part) for part in value]
    return repr(value)


def test_without_history_the_size_of_a_state_is_bounded() -> None:
    state = RunState(keeps_history=False).after(JOB)
    for at in range(1, 300):
        for event in (steps(at), load(at), CheckpointWritten(f"c/{at}", at, 0.1)):
            state = state.after(PublishedEvent(float(at), at % 3, event))
        metrics = MetricsRecorded(call="fit 1", epoch=at, trained=at, values={"loss": 0.5})
        state = state.after(PublishedEvent(float(at), 0, metrics))
        state = state.after(PublishedEvent(float(at), 0, CallStarted(f"fit {at}")))
        state = state.after(PublishedEvent(float(at), None, ViewStarted(at, (0, 1, 2), "why")))
    growing = (state.events, state.checkpoints, state.calls, state.views, state.metrics)
    assert [len(one) for one in growing] == [0] * 5
    assert [len(info.steps) + len(info.load) for info in state.workers.values()] == [0] * 3
    assert (state.totals.checkpoints, state.totals.reached, state.values) == (299, 299, {"loss": 0.5})


def test_an_event_has_the_fields_of_its_line() -> None:
    published = PublishedEvent(1.5, 3, CheckpointWritten("c", 7, 0.25))
    line = b'{"time":1.5,"event":"checkpoint","path":"c","step":7,"seconds":0.25,"worker":3}'
    assert as_happening(published) == happening(line)
    assert as_happening(PublishedEvent(2.0, None, WorkerLost(4, "why"))).worker == 4


def test_a_lost_worker_is_lost_whichever_of_its_events_is_first() -> None:
    for events in (
        (WorkerLost(1, "killed"), WorkerExited(1, -9)),
        (WorkerExited(1, -9), WorkerLost(1, "killed")),
    ):
        state = RunState()
        for event in events:
            state = state.after(PublishedEvent(1.0, None, event))
        info = state.workers[1]
        assert (info.phase, info.reason, info.status, info.ended) == ("lost", "killed", -9, 1.0)
