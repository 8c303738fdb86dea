from typing import get_args

import pytest

from lockstep.coordinator.job_report import (
    decided,
    fields_of_end,
    headline,
    last_line,
    remedies,
    state_of,
    troubles,
)
from lockstep.observability.events import HostStrain, JobFinished, JobTotals
from lockstep.observability.growth import GrowingMap
from lockstep.observability.run_state import RunState, WorkerInfo
from lockstep.supervisor.actions import Action, ShowMessage


@pytest.mark.parametrize(
    ("tally", "seconds", "line"),
    [
        (JobTotals(), 5.0, ""),
        (JobTotals(steps=0), 5.0, "finished in 5.0 s on 2 workers"),
        (JobTotals(steps=1, model="m"), 42.4, "finished in 42 s: 1 step on 2 workers"),
        (
            JobTotals(
                lost=1, joined=2, checkpoints=3, verified=4, before=100, steps=120, model="m", digest="1f3c"
            ),
            192.0,
            "finished in 3 min 12 s: 120 steps, 100 of them before, on 2 workers (1 lost, 2 joined); "
            "3 checkpoints; 4 computations verified; digest 1f3c of model 'm'",
        ),
        (
            JobTotals(
                effective=100.0, pauses=2, paused=1.25, lost_hosts=1, retired_hosts=1, joined_hosts=2, steps=7
            ),
            200.0,
            "finished in 3 min 20 s (50 % effective training, 2 pauses of 1.2 s): 7 steps on 2 workers "
            "(1 host lost, 1 host retired, 2 hosts joined)",
        ),
        (JobTotals(effective=1.0, steps=7), 59.0, "finished in 59 s: 7 steps on 2 workers"),
        (
            JobTotals(pauses=1, paused=0.0436, steps=7),
            5.0,
            "finished in 5.0 s (1 pause of 44 ms): 7 steps on ",
        ),
        (
            JobTotals(joined=1, steps=7, checkpoints=1),
            7500.0,
            "finished in 2 h 5 min: 7 steps on 2 workers ",
        ),
    ],
)
def test_the_last_line(tally: JobTotals, seconds: float, line: str) -> None:
    said = last_line(tally, seconds, 2)
    assert said.startswith(line) if line.endswith(" ") else said == line


def test_the_last_line_repeats_that_the_script_failed_on_a_worker() -> None:
    tally = JobTotals(lost=2, joined=1, steps=7)
    assert last_line(tally, 5.0, 2, 1) == (
        "finished in 5.0 s: 7 steps on 2 workers (2 lost, 1 joined, the script failed on 1 worker)"
    )


FULL = "cannot write a checkpoint to /c: No space left on device"


@pytest.mark.parametrize(
    ("totals", "texts"),
    [
        (JobTotals(lost=1, joined=1, pauses=1, paused=1.0, checkpoints=3, saved=9, steps=9), []),
        (
            JobTotals(failed_checkpoints=22, checkpoint_failure=FULL, saved=40, steps=60),
            [f"22 checkpoints failed, the newest complete one is from step 40 of 60 ({FULL})"],
        ),
        (
            JobTotals(failed_checkpoints=1, checkpoint_failure=FULL, saved=60, steps=60),
            [f"1 checkpoint failed, the newest complete one is from step 60 ({FULL})"],
        ),
        (JobTotals(job_restarts=1), ["started again 1 time, and all figures are from the last start"]),
        (JobTotals(lost_outputs=3), ["3 outputs could not be written"]),
        (JobTotals(failed_checkpoints=2), ["2 checkpoints failed, none is complete"]),
        (
            JobTotals(removed_checkpoints=3, remaining_checkpoints=1, removal_failure="Permission denied"),
            [
                "3 older checkpoints removed early, because the disk was full",
                "1 older checkpoint could not be removed (Permission denied)",
            ],
        ),
        (
            JobTotals(failed_verifications=1, not_finite={"loss": 88, "val_loss": 90}),
            ["1 verification failed", "not finite: loss, val_loss, first seen at step 88"],
        ),
        (
            JobTotals(strained={"a": HostStrain(200, 80, 24), "b": HostStrain(200, 18, 18)}),
            ["a overloaded by other programs 40 % of the time", "a throttled 12 % of the time"],
        ),
    ],
)
def test_problems_are_counted_and_named(totals: JobTotals, texts: list[str]) -> None:
    assert troubles(totals) == texts
    if totals.steps:
        line = last_line(totals, 5.0, 2)
        assert all(f"; {text}" in line for text in texts)


def test_the_steps_of_a_job_that_did_not_finish_are_those_that_are_known() -> None:
    assert JobTotals().known_steps is None
    tally = JobTotals(reached=20, before=8)
    assert tally.known_steps == 20
    line = "finished in 5.0 s: at least 20 steps, 8 of them before, on 2 workers"
    # `lockstep top`, the page and `--notify` have the totals from the event at the end.
    recorded = JobFinished(status=0, message="", **fields_of_end(tally, 5.0))
    assert last_line(tally, 5.0, 2) == last_line(recorded, recorded.seconds, 2) == line
    tally = JobTotals(steps=21, model="m", digest="1f3c", reached=22)
    assert tally.known_steps == 21


@pytest.mark.parametrize(
    ("finished", "totals", "said", "to_do"),
    [
        ({"status": 0}, JobTotals(lost=1, joined=1), "finished without problems", []),
        (
            {"status": 0},
            JobTotals(failed_checkpoints=1, checkpoint_failure=FULL, lost_outputs=2),
            "finished with 2 problems",
            [
                "free space on the disk of the checkpoints",
                "free space on the disk of the run folder: a part of ",
            ],
        ),
        (
            {"status": 1, "message": "worker 0 exited with status 1: ValueError: x"},
            JobTotals(saved=40),
            "failed: worker 0 exited with status 1: ValueError: x",
            ["mend the script; the same command resumes from step 40"],
        ),
        (
            {"status": 143, "message": "stopped by SIGTERM"},
            JobTotals(),
            "stopped by SIGTERM",
            ["mend the script; the same command begins again, because no checkpoint was written"],
        ),
        (
            None,
            JobTotals(failed_verifications=1, not_finite={"loss": 3}, lost_gpus=("GPU 1: it is lost",)),
            "the end is not recorded: the run was killed, its host was lost, or the disk was full",
            [
                "mend the script; the same command begins again, because no checkpoint was written",
                "look for the Xid of the GPU in the kernel's log ",
                "run lockstep doctor on the hosts that the events 'verification failed' name",
                "look for the cause in the program: -n 1 with the same --replicas ",
            ],
        ),
    ],
)
def test_how_a_run_went_and_what_to_do(
    finished: dict[str, object] | None, totals: JobTotals, said: str, to_do: list[str]
) -> None:
    workers = GrowingMap[WorkerInfo]().plus(0, WorkerInfo(0, phase="failed"))
    run = RunState(finished=finished, totals=totals, workers=workers)
    state = state_of(finished, active=False)
    assert headline(run, state) == said
    texts = remedies(run, state)
    assert len(texts) == len(to_do)
    assert all(text.startswith(start) for text, start in zip(texts, to_do, strict=True))


def test_every_action_has_words() -> None:
    for action in get_args(Action):
        text = decided("why", [action.__name__])
        assert (text == "why") == (action is ShowMessage)
        assert action.__name__ not in text


def test_what_to_do_while_a_run_goes_on() -> None:
    assert headline(RunState(), state_of(None, active=True)) == "running without problems"
    strained = {"node1": HostStrain(measured=150, overloaded=60, throttled=30)}
    full = JobTotals(failed_checkpoints=1, checkpoint_failure="a store", strained=strained)
    assert remedies(RunState(totals=full), "running") == [
        "fix the cause of the failed checkpoints; until then, only older steps are safe",
        "give node1 to this job alone, or use fewer workers there",
        "raise the CPU quota of node1, or the power or cooling of its GPUs",
    ]
