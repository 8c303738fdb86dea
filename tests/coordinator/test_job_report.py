import pytest

from lockstep.coordinator.job_report import fields_of_end, last_line
from lockstep.observability.run_state import JobTotals


@pytest.mark.parametrize(
    ("tally", "seconds", "line"),
    [
        (JobTotals(), 5.0, ""),
        (JobTotals(steps=0), 5.0, "finished in 5.0 s on 2 workers"),
        (JobTotals(steps=1, model="m"), 42.4, "finished in 42 s: 1 step on 2 workers"),
        (
            JobTotals(1, 2, 3, 4, 100, 120, "m", "1f3c"),
            192.0,
            "finished in 3 min 12 s: 120 steps, 100 of them before, on 2 workers (1 lost, 2 joined); "
            "3 checkpoints; 4 computations verified; digest 1f3c of model 'm'",
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


def test_the_steps_of_a_job_that_did_not_finish_are_those_that_are_known() -> None:
    assert fields_of_end(JobTotals(), 5.0)["steps"] is None
    tally = JobTotals(reached=20)
    assert (fields_of_end(tally, 5.0)["steps"], last_line(tally, 5.0, 2)) == (20, "")
    tally = JobTotals(steps=21, model="m", digest="1f3c", reached=22)
    assert fields_of_end(tally, 5.0)["steps"] == 21
