"""The one fold over the events of a run: pure, and of bounded size without history."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import (
    CallEnded,
    CallStarted,
    CheckpointFailed,
    CheckpointNotRemoved,
    CheckpointRemoved,
    CheckpointWritten,
    Event,
    HostJoined,
    HostLost,
    HostRetired,
    HostStrain,
    JobTotals,
    LastStepEnded,
    ReplicasVerified,
    TrainingEnded,
    TrainingPaused,
    TrainingResumed,
    VerificationFailed,
    ViewStarted,
    WarningShown,
    WorkerExited,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from lockstep.observability.growth import Columns, GrowingList, Numbering
from lockstep.observability.measurements import (
    STEP_PARTS,
    GpuLoad,
    LoadMeasured,
    MetricsRecorded,
    StepsMeasured,
    WorkerLoad,
)
from lockstep.observability.run_lines import Happening, as_happening, happening, measurement
from lockstep.observability.run_state import RunState

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
    totals = JobTotals(
        lost=1,
        joined=1,
        # 5 steps of worker 0, and 5 later ones, which worker 2 has measured, too.
        effective=1.0,
        checkpoints=1,
        saved=106,
        verified=9,
        epoch=1,
        metrics={"loss": 0.5, "x": None},
        not_finite={"x": 106},
        before=100,
        reached=111,
    )
    assert (state.totals, state.left, state.trained) == (totals, 1, 110)
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


def after(state: RunState, *events: tuple[int | None, Event]) -> RunState:
    for worker, event in events:
        state = state.after(PublishedEvent(1.0, worker, event))
    return state


@pytest.mark.parametrize("keeps_history", [True, False])
def test_problems_are_counted(keeps_history: bool) -> None:
    failure = "cannot write a checkpoint to /c: No space left on device; free space there"
    wrong = VerificationFailed(step=9, replica=0, arrays=("a",), workers=(1,), verdict="worker")
    # The step is taken again before somebody is named: this is one fault.
    insisting = msgspec.structs.replace(wrong, workers=(0, 1), verdict="third")
    named = msgspec.structs.replace(wrong, part="sum")
    summed = msgspec.structs.replace(named, workers=(), verdict="repeated")
    state = after(
        RunState(keeps_history=keeps_history).after(JOB),
        (0, CheckpointWritten("c/4", 4, 0.1)),
        *[(0, CheckpointFailed(failure))] * 22,
        *[(chief, CheckpointNotRemoved(f"c/{step}", "busy")) for chief in (0, 1) for step in (1, 2)],
        # A cut upload, say.
        (1, CheckpointRemoved("c/9", "before", late=True)),
        *[(0, CheckpointRemoved(f"c/{step}", "before", late=True)) for step in (1, 2)],
        (0, insisting),
        (0, wrong),
        # The second sum may be right, so that nobody is named.
        *[(0, summed), (1, CallEnded("evaluate 1")), (0, summed), (0, named)] * 2,
        *[(0, summed), (0, CallEnded("evaluate 1")), (0, named)] * 2,
        (None, HostLost("node2", "host node2 was lost")),
        (None, HostRetired("node4", "host node4 retires")),
        (None, HostJoined("node3", 2, 8)),
        (None, WarningShown("odd")),
    )
    assert state.totals == JobTotals(
        checkpoints=1,
        failed_checkpoints=22,
        checkpoint_failure="cannot write a checkpoint to /c: No space left on device",
        saved=4,
        failed_verifications=1 + 2 * 2 + 2 * 2,
        lost_hosts=1,
        retired_hosts=1,
        joined_hosts=1,
        warnings=1,
        reached=4,
    )
    assert state.after(JOB).totals == JobTotals()


@pytest.mark.parametrize("keeps_history", [True, False])
def test_the_effective_time_is_that_of_each_training_step_once(keeps_history: bool) -> None:
    """What takes it is reading, computing, waiting, exchanging and updating, on the worker that is ahead."""
    first = steps(1, count=1)
    # A step of 0.5 s: the other parts are nested calls, and callbacks.
    state = after(RunState(keeps_history=keeps_history).after(JOB), (0, first), (1, first))
    assert (state.totals.effective, state.timed) == (0.0, 1)
    state = after(state, (0, steps(6)), (1, steps(11, count=10, compute=2.1)))
    assert state.totals.effective == pytest.approx(0.5 + 2.5 / 2)
    # What compiles does not count, nor do validations, updates of servers, and steps that others have taken.
    state = after(
        state,
        (0, steps(16, compiling=0.1)),
        (0, steps(16, call="validation within fit 1")),
        (2, steps(99, call="updates within fit 1")),
        (2, steps(99, staleness=0, largest_staleness=0)),
        (0, steps(16, count=0)),
    )
    assert state.totals.effective == pytest.approx(0.5 + 2.5 / 2 + 0.4)
    # Each worker measures its pauses: worker 1 has been ahead, so the pause was not in the step before.
    state = after(
        state,
        (1, steps(21, compute=0.3)),
        (0, TrainingPaused(2, 2.25)),
        (0, steps(21, wait=2.5, paused=2.25)),
        (0, steps(26, wait=0.2)),
        (1, steps(26, wait=2.5, paused=2.125)),
        (1, steps(31, wait=2.5, paused=2.125)),
        (0, steps(36, wait=0.1, paused=2.0)),
    )
    assert state.totals.effective == pytest.approx(0.5 + 2.5 / 2 + 0.4 + 0.7 + 0.6 + 0.775)
    assert (state.totals.pauses, state.totals.paused) == (1, 2.25)


def test_metrics_are_those_of_the_last_epoch_and_the_first_nan_is_kept() -> None:
    def recorded(trained: int, epoch: int | None, **values: float | None) -> tuple[int, Event]:
        return 0, MetricsRecorded(call="fit 1", epoch=epoch, trained=trained, values=values)

    state = after(RunState(), recorded(3, None, loss=0.9))
    assert (state.totals.epoch, state.totals.metrics) == (0, {"loss": 0.9})
    state = after(state, recorded(5, 1, loss=0.8, val_loss=None), recorded(8, None, loss=None))
    assert (state.totals.epoch, state.totals.metrics) == (1, {"loss": 0.8, "val_loss": None})
    state = after(state, recorded(10, 2, loss=None, val_loss=0.5))
    assert (state.totals.epoch, state.totals.metrics) == (2, {"loss": None, "val_loss": 0.5})
    assert state.totals.not_finite == {"val_loss": 5, "loss": 8}


def test_a_host_that_is_often_overloaded_or_throttled() -> None:
    worker = WorkerLoad(worker=0, cores=1.0, delayed=0.5, memory=7, faults=0.0)
    host = {"memory_used": 1, "memory_total": 2, "swapping": 0.0}
    gpu = {"name": "", "utilization": 1, "memory_used": 1, "memory_total": 1, "temperature": 1, "power": 1.0}
    hot = GpuLoad(index=0, throttled="thermal", processes=((10, None),), **gpu)
    of_others = GpuLoad(index=1, throttled="thermal", processes=((99, None),), **gpu)
    state = after(RunState().after(JOB), (None, WorkerStarted(0, 10)))
    for at in range(200):
        busy = 2.0 if at % 4 == 0 else 1.0
        gpus = (hot, of_others) if at % 5 == 0 else (of_others,)
        load = LoadMeasured(host="a", cores=2, busy=busy, throttled=0.0, workers=(worker,), gpus=gpus, **host)
        state = after(state, (None, load))
        assert bool(state.totals.strained) == (at >= 149)
    assert state.totals.strained == {"a": HostStrain(200, 50, 40)}
    stopped = LoadMeasured(host="b", cores=2, busy=1.0, throttled=0.2, workers=(worker,), **host)
    state = after(state, *[(None, stopped)] * 150)
    assert state.totals.strained["b"] == HostStrain(150, 0, 150)
    assert state.after(JOB).hosts["a"].strain == HostStrain()


def test_the_last_event_of_a_run_has_the_totals() -> None:
    """They are those of its coordinator, which may have had more events than the files."""
    ended = Happening(9.0, "finished", None, {"status": 0, "lost": 3, "effective": 5.5, "strained": {}})
    state = RunState().after(JOB).after(ended)
    assert state.totals == JobTotals(lost=3, effective=5.5)
    odd = Happening(9.0, "finished", None, {"status": 0, "lost": "three"})
    state = RunState().after(JOB).after(odd)
    assert (state.totals, state.skipped, state.finished) == (JobTotals(), 1, odd.fields)


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


def test_a_worker_that_is_lost_with_its_host_has_ended() -> None:
    """Nobody reports the exit of its process."""
    info = RunState().after(PublishedEvent(1.0, None, WorkerLost(1, "host b was lost"))).workers[1]
    assert (info.phase, info.status, info.ended) == ("lost", None, 1.0)
