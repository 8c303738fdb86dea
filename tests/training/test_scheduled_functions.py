"""Jobs whose program schedules functions: one at a time is one process, and any run can be repeated."""

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lockstep.monitoring.overview import overview
from lockstep.monitoring.run_folder import RunFolder

EXAMPLES = Path(__file__).parents[2] / "examples"
Launch = Callable[..., Any]
Repeat = Callable[..., Any]
DRAWN = 4
"""The position of a number that the script draws."""


def results(lines: list[str]) -> dict[str, Any]:
    return dict(json.loads(line.removeprefix("result ")) for line in lines if line.startswith("result "))


def flat(values: Any) -> list[float]:
    return [one for value in values for one in flat(value)] if isinstance(values, list) else [values]


@pytest.mark.slow
def test_one_function_at_a_time_is_one_process(
    launch: Launch, plain: Callable[..., str], backend: str
) -> None:
    run = launch("-n 1 --ps 1", "scheduling.py", "serial", backend=backend)
    assert run.status == 0, run.stderr
    found = [results(run.log(worker)) for worker in range(3)]
    output = plain("scheduling.py", "serial", backend=backend).splitlines()
    expected = results(output)
    assert len(expected) == 5
    # All processes have the same variables, and draw the same.
    assert found[1] == found[2] == found[0]
    for name, values in expected.items():
        for one in (values, found[0][name]):
            del one[DRAWN]
        assert flat(found[0][name]) == pytest.approx(flat(values), rel=1e-4, abs=1e-6), name
    digests = {line.split()[-1] for worker in range(3) for line in run.marked(worker, "digest ")}
    assert len(digests) == 1
    if backend != "jax":
        # The servers make the same operations; XLA compiles them into others.
        (shown,) = (line for line in output if line.startswith("digest "))
        assert digests == {shown.split()[-1]}


@pytest.mark.slow
def test_a_run_that_lost_a_worker_and_a_server_can_be_repeated(
    launch: Launch, repeat: Repeat, thorough_backend: str
) -> None:
    lost = ["free", "1", "functions-1", "push", "6", "sent"]
    run = launch("-n 3 --ps 2 --max-restarts 0", "scheduling.py", *lost, backend=thorough_backend)
    check_repeated(run, repeat, (0, 1, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        "0 functions-1 pull 5 sent",
        "1 functions-1 pull 40 confirmed",
        "0 functions-1 push 9 answered",
        "1 functions-1 read 2 sent",
        "0 functions-1 end 1 received",
    ],
)
def test_a_run_that_lost_a_server_at_any_point_can_be_repeated(
    launch: Launch, repeat: Repeat, lost: str, backend: str
) -> None:
    run = launch("-n 3 --ps 2 --max-restarts 0", "scheduling.py", "free", *lost.split(), backend=backend)
    check_repeated(run, repeat, (0, 1, 3, 5 - int(lost[0])))


def check_repeated(run: Any, repeat: Repeat, left: tuple[int, ...]) -> None:
    """Check that a run that lost a worker and a server can be repeated."""
    assert run.status == 0, run.stderr
    assert "(2 lost)" in run.last_line
    assert "functions 1: worker 2 has ended; another worker computes function " in run.stderr
    found = [results(run.log(worker)) for worker in left]
    assert all(one == found[0] for one in found)
    digests = {line for worker in left for line in run.marked(worker, "digest ")}
    assert len(digests) == 1
    again = repeat(run, (1,), left_out="several")
    assert "the states of the runs are equal at 17 recorded points" in again.stdout
    assert set(again.marked(0, "digest ")) == digests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "workers"),
    [
        ("within", (2, 5)),
        *(
            pytest.param(point, workers, marks=pytest.mark.slow)
            for point, workers in {
                "first": (2, 5),
                "between": (2, 5),
                "twice": (2, 5, 6),
                "catching-up": (2, 6),
                "reads": (2, 5),
                "fit": (2, 5),
                "after": (2, 5),
            }.items()
        ),
    ],
)
def test_a_run_whose_lost_workers_were_replaced_can_be_repeated(
    launch: Launch,
    repeat: Repeat,
    tmp_path: Path,
    thorough_backend: str,
    point: str,
    workers: tuple[int, ...],
) -> None:
    run = launch("-n 2 --ps 2", "replacing.py", point, str(tmp_path), backend=thorough_backend)
    assert run.status == 0, run.stderr
    for replaced, worker in pairwise(workers):
        call = "fit 1" if point == "fit" else "functions 2" if point == "after" else "functions 1"
        assert f"{call}: worker {worker} replaces worker {replaced}\n" in run.stderr
    assert run.stderr.count(" replaces worker ") == len(workers) - 1
    left = (0, 1, 3, 4, workers[-1])
    found = {tuple(run.marked(worker, mark)) for worker in left for mark in ("result ", "digest ")}
    assert [len(lines) for lines in found] == [1, 1]
    calls = len({line.split(":")[0] for line in run.stderr.splitlines() if ": staleness " in line})
    again = repeat(run, range(1, calls + 1), left_out="one")
    assert found == {
        tuple(again.marked(worker, mark)) for worker in range(5) for mark in ("result ", "digest ")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "why"),
    [
        (
            "differs",
            "call [0-9]+ of the ClusterCoordinator is done in this worker, which joins, but was fetch in the "
            "chief: base decisions of the script on values that are equal in all processes",
        ),
        (
            "forgets",
            "the script reads 'sparse_.*' after call [0-9]+ of functions 1, and the chief has not kept its "
            "value for this worker, which joins",
        ),
    ],
)
def test_a_worker_that_cannot_repeat_the_calls_ends(
    launch: Launch, tmp_path: Path, point: str, why: str, backend: str
) -> None:
    run = launch("-n 2 --ps 1 --max-restarts 1", "replacing.py", point, str(tmp_path), backend=backend)
    assert run.status == 0, run.stderr
    assert re.fullmatch(why, (tmp_path / "refused").read_text())


@pytest.mark.ci
def test_an_error_of_a_function_surfaces_at_the_next_call_in_all_processes(launch: Launch) -> None:
    run = launch("-n 2 --ps 1", "scheduling.py", "errors")
    assert run.status == 1, run.stderr
    caught = [run.marked(worker, "caught ") for worker in range(4)]
    expected = ["first before 1000: True", "fetched first", "Custom special", "True"]
    expected += ["before fit", "[1.0, 1.0, 1.0]"]
    assert caught == [["caught " + json.dumps(expected)]] * 4
    # Nothing joins the last function but the end of the script.
    assert "ValueError: last" in run.stderr
    assert "function " in run.stderr
    assert " raised this on worker " in run.stderr


@pytest.mark.ci
def test_a_function_that_is_refused_ends_the_job(launch: Launch) -> None:
    run = launch("-n 1 --ps 1", "scheduling.py", "assigns_weight")
    assert run.status == 1
    assert "a scheduled function assigns the weight 'weight' itself" in run.stderr


@pytest.mark.ci
def test_a_call_that_only_the_chief_makes_is_named(launch: Launch) -> None:
    run = launch("-n 1 --ps 1", "scheduling.py", "alone")
    assert run.status == 1
    assert "call 2 of the ClusterCoordinator is join in this process but fetch in the chief" in run.stderr


@pytest.mark.slow("parameter_server")
@pytest.mark.ci
@pytest.mark.parametrize("name", ["parameter_server", "parameter_server_loop"])
def test_an_example_learns(launch: Launch, name: str) -> None:
    run = launch("-n 3 --ps 2", str(EXAMPLES / f"{name}.py"), backend="tensorflow")
    assert run.status == 0, run.stderr
    shown = {tuple(run.marked(worker, mark)) for worker in range(5) for mark in ("accuracy on ", "digest: ")}
    accuracy, digest = sorted(shown)
    assert [len(accuracy), len(digest)] == [1, 1]
    assert float(accuracy[0].split()[-1]) >= 0.95
    check_measured_staleness(run)


def check_measured_staleness(run: Any) -> None:
    """Check that measurements of workers, which top shows, have the staleness of the note of the chief."""
    note = re.search(r"(\w+ 1): staleness (\S+) on average, at most (\d+), over (\d+) ", run.stderr)
    assert note is not None
    data = RunFolder(run.folder)
    data.update()
    rows = overview(data.state, "a", data.state.last, averages=True).workers
    assert [row.task for row in rows] == ["chief", "worker", "worker", "worker", "ps", "ps"]
    assert [row.staleness is None for row in rows] == [row.task != "worker" for row in rows]
    assert max(row.largest_staleness or 0 for row in rows) == int(note[3])
    measured = map(json.loads, (run.folder / "measurements.jsonl").read_text().splitlines())
    steps, staleness = Counter[str](), 0
    for line in measured:
        if line["event"] == "steps" and line["call"] in (note[1], f"updates within {note[1]}"):
            steps[rows[line["worker"]].task] += line["count"]
            staleness += line["staleness"] or 0
    assert steps["chief"] == steps["worker"] == int(note[4])
    assert f"{staleness / steps['worker']:.1f}" == note[2]
    # Both examples train for 125 steps, on two servers; functions that evaluate do not update.
    assert steps["ps"] == 2 * 125
