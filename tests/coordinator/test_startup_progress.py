"""Before the first step, notes report what the job waits for, unless there is other output."""

from lockstep.coordinator.startup_progress import Progress, preparations, prepares
from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import (
    CallStarted,
    Event,
    FirstStepEnded,
    ImportStarted,
    StepsSkipped,
    StrategyInstalled,
    WorkerExited,
    WorkerLost,
    WorkerReady,
)
from lockstep.observability.run_lines import Happening
from lockstep.observability.run_state import RunState

JOB = Happening(100.0, "job", None, {"workers": 3, "checkpoints": None})


def test_notes_explain_silence_and_stop_with_other_output() -> None:
    notes: list[str] = []
    shown = 0
    state = RunState(keeps_history=False).after(JOB)
    progress = Progress(notes.append, lambda: shown + len(notes), 100.0)

    def happens(time: float, event: Event, worker: int | None = None) -> None:
        nonlocal state
        state = state.after(PublishedEvent(time, worker, event))

    def at(now: float) -> list[str]:
        before = len(notes)
        progress.serve(now, lambda: preparations(state, now))
        return notes[before:]

    starting = "starting: importing the script's modules"
    assert (at(104.9), progress.due) == ([], 105.0)
    assert at(105.0) == [f"before the first step, 5 s: workers 0, 1 and 2: {starting}"]
    happens(105.0, WorkerReady(1))
    happens(105.0, StrategyInstalled("jax"), 2)
    happens(105.0, WorkerReady(7))
    running = "running the script, which has not compiled a model yet"
    assert (at(114.9), progress.due) == ([], 115.0)
    assert at(115.0) == [
        f"before the first step, 15 s: worker 0: {starting}; "
        f"worker 1: {running}; "
        "worker 2: preparing the first distributed call"
    ]
    happens(115.0, ImportStarted("keras"), 0)
    happens(114.9, ImportStarted("keras"), 1)
    happens(120.0, ImportStarted("jax"), 2)
    assert at(125.0) == [
        "before the first step, 25 s: workers 0 and 1: importing keras (10 s); worker 2: importing jax (5 s)"
    ]
    happens(126.0, ImportStarted(""), 0)
    happens(126.0, StepsSkipped("fit 1", 1200, 5000), 1)
    skips = "skipping the first steps of fit 1, which were taken before: 1,200 of 5,000"
    jax = "worker 2: importing jax (15 s)"
    assert at(135.0) == [f"before the first step, 35 s: worker 0: {running}; worker 1: {skips}; {jax}"]
    assert [prepares(state, worker) for worker in (2, 7)] == [True, False]
    shown = 9
    assert (at(145.0), progress.due) == ([], 150.0)
    happens(146.0, WorkerExited(2, -9))
    happens(146.0, CallStarted("fit 1"), 0)
    happens(146.0, StepsSkipped("fit 1", 5000, 5000), 1)
    compiling = "compiling and computing the first step of fit 1"
    assert at(150.0) == [f"before the first step, 50 s: workers 0 and 1: {compiling}"]
    happens(151.0, WorkerLost(1, "killed"))
    assert at(160.0) == [f"before the first step, 60 s: worker 0: {compiling}"]
    happens(161.0, FirstStepEnded(), 0)
    assert not prepares(state, 0)
    assert (at(999.0), preparations(state, 999.0)) == ([], "")


def test_a_job_that_resumes_reads_its_checkpoint_first() -> None:
    job = Happening(100.0, "job", None, {"workers": 1, "checkpoints": {"resume": "saved/step-7"}})
    assert preparations(RunState().after(job), 101.0) == (
        "worker 0: starting: importing the script's modules, and reading the checkpoint"
    )
