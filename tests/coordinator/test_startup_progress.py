"""Before the first step, notes report what the job waits for, unless there is other output."""

from lockstep.coordinator.startup_progress import (
    PREPARING,
    RUNNING,
    Progress,
    first_step,
    importing,
    skipping,
)


def test_notes_explain_silence_and_stop_with_other_output() -> None:
    notes: list[str] = []
    shown = 0
    progress = Progress(range(3), notes.append, lambda: shown + len(notes), 100.0)

    def at(now: float) -> list[str]:
        before = len(notes)
        progress.serve(now)
        return notes[before:]

    starting = "starting: importing the script's modules"
    assert (at(104.9), progress.due) == ([], 105.0)
    assert at(105.0) == [f"before the first step, 5 s: workers 0, 1 and 2: {starting}"]
    progress.does(1, RUNNING)
    progress.does(2, PREPARING)
    progress.does(7, RUNNING)
    assert (at(114.9), progress.due) == ([], 115.0)
    assert at(115.0) == [
        f"before the first step, 15 s: worker 0: {starting}; "
        "worker 1: running the script, which has not compiled a model yet; "
        "worker 2: preparing the first distributed call"
    ]
    progress.does(0, importing("keras"), since=115.0)
    progress.does(1, importing("keras"), since=114.9)
    progress.does(2, importing("jax"), since=120.0)
    assert at(125.0) == [
        "before the first step, 25 s: workers 0 and 1: importing keras (10 s); worker 2: importing jax (5 s)"
    ]
    progress.does(0, importing(""))
    progress.does(1, skipping("fit 1", 1200, 5000, "steps"))
    skips = "skipping the first steps of fit 1, which were taken before: 1,200 of 5,000"
    jax = "worker 2: importing jax (15 s)"
    assert at(135.0) == [f"before the first step, 35 s: worker 0: {RUNNING}; worker 1: {skips}; {jax}"]
    assert [progress.covers(worker) for worker in (2, 7)] == [True, False]
    shown = 9
    assert (at(145.0), progress.due) == ([], 150.0)
    progress.gone(2)
    for worker in (0, 1):
        progress.does(worker, first_step("fit 1"))
    compiling = "workers 0 and 1: compiling and computing the first step of fit 1"
    assert at(150.0) == [f"before the first step, 50 s: {compiling}"]
    progress.end()
    assert not progress.covers(0)
    assert (at(999.0), progress.due) == ([], None)
