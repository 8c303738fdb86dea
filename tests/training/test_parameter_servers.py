"""Jobs with parameter servers: one step at a time is plain Keras, and any run can be repeated."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.diff.recording import read_recording
from lockstep.diff.repetition import repeat as repeat_run
from lockstep.errors import ConfigError
from lockstep.keras.parameter_server.chief_process import ChiefProcess
from lockstep.monitoring.run_folder import RunFolder, steps_trained
from lockstep.monitoring.trace import trace_of

Launch = Callable[..., Any]
Repeat = Callable[..., Any]
ALONE = "--max-restarts 0"


def results(lines: list[str]) -> dict[str, Any]:
    return dict(json.loads(line.removeprefix("result ")) for line in lines if line.startswith("result "))


@pytest.mark.parametrize(
    ("known", "steps", "taken"),
    [(3, None, 3), (None, None, 3), (None, 2, 2), (2, None, 2), (3, 5, 3), (5, None, 3)],
)
def test_the_chief_reads_no_batch_beyond_those_that_keras_knows(
    known: int | None, steps: int | None, taken: int
) -> None:
    """A sampler that is asked for more draws another order from the loader's own generator."""
    read: list[Any] = []

    def batches() -> Iterator[int]:
        for number in range(3):
            read.append(number)
            yield number
        read.append("end")

    chief: Any = SimpleNamespace(_steps_per_epoch=steps, _counted=None, _last=False)
    for epoch in range(2):
        read.clear()
        passed = ChiefProcess.one_ahead(chief, batches(), known)
        lasts = []
        for _ in range(taken):
            assert next(passed) == len(lasts)
            lasts.append(chief._last)
        assert lasts == [False] * (taken - 1) + [True]
        # Keras asks for one more as well if there are fewer than it knows, or it does not know yet.
        ends = steps is None and (known == 5 or (known is None and not epoch))
        assert read == [*range(taken), *(["end"] if ends else [])]
        assert not ends or next(passed, None) is None


@pytest.mark.slow
@pytest.mark.ci
def test_one_step_at_a_time_is_plain_keras(
    launch: Launch, plain: Callable[..., str], quicker_backend: str
) -> None:
    run = launch("-n 1 --ps 1", "serving.py", "serial", backend=quicker_backend)
    assert run.status == 0, run.stderr
    found = [results(run.log(worker)) for worker in range(3)]
    output = plain("serving.py", "serial", backend=quicker_backend).splitlines()
    expected = results(output)
    (shown,) = (line for line in output if line.startswith("callbacks "))
    assert len(expected) == 6
    assert found[0].keys() == expected.keys()
    for other in found[1:]:
        assert [{**one, "drawn": 0} for one in other.values()] == [
            {**one, "drawn": 0} for one in found[0].values()
        ]
    for name, figures in expected.items():
        assert found[0][name].keys() == figures.keys()
        for key, values in figures.items():
            if key != "drawn":
                assert found[0][name][key] == pytest.approx(values, rel=2e-3, abs=2e-4), (name, key)
    # All processes have the state of the chief's callbacks.
    assert [run.marked(worker, "callbacks ") for worker in range(3)] == [[shown]] * 3
    # The worker computes all steps that the chief takes; the server computes none, and updates after each.
    measured = map(json.loads, (run.folder / "measurements.jsonl").read_text().splitlines())
    steps, compiled = Counter[tuple[int, str]](), Counter[str]()
    for event in measured:
        if event["event"] == "steps" and event["call"].startswith(("fit", "updates")):
            worker, call = event["worker"], event["call"]
            steps[worker, call.partition(" ")[0]] += event["count"]
            compiled[call] += event["compiled"]
            # None of several steps is in work with another one.
            assert event["staleness"] == event["largest_staleness"] == (0 if worker == 1 else None)
    taken = steps[0, "fit"]
    assert dict(steps) == {(0, "fit"): taken, (1, "fit"): taken, (2, "updates"): taken}
    # The last batches of these are smaller.
    smaller = {f"fit {number}": 1 for number in (2, 3, 4, 7)} if quicker_backend == "jax" else {}
    assert {call: count for call, count in compiled.items() if count} == smaller
    # The script draws the same after `fit` in all processes.
    assert len({one["again"]["drawn"] for one in found}) == 1


@pytest.mark.ci
def test_one_step_at_a_time_has_the_bits_of_plain_keras(launch: Launch, quickest_backend: str) -> None:
    """With divided variables on two servers, and two workers in turn; one worker is plain Keras.

    The last calls read datasets that a function creates in each process. These have generators of their own,
    and begin where the call before has left them.
    """
    options = {"backend": quickest_backend, "optimized": True}
    one = launch("-n 1 --threads-per-worker 1", "serving.py", "exact", **options)
    assert one.status == 0, one.stderr
    expected = one.marked(0, "digest ")
    assert len(set(expected)) == (5 if quickest_backend == "torch" else 4)
    run = launch("-n 2 --ps 2 --threads-per-worker 1", "serving.py", "exact", **options)
    assert run.status == 0, run.stderr
    assert [run.marked(worker, "digest ") for worker in range(5)] == [expected] * 5
    data = RunFolder(run.folder)
    data.update()
    steps = range(1, steps_trained(data.state) + 1)
    slices = [event for event in trace_of(run.folder, steps) if event.get("cat") == "step"]
    named = [(event["name"], event["tid"] == 0) for event in slices]
    results, taken = ([(f"{kind} {step}", kind == "result") for step in steps] for kind in ("result", "step"))
    assert sorted(named) == sorted(results + taken)


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_lost_a_worker_and_a_server_can_be_repeated(
    launch: Launch, repeat: Repeat, thorough_backend: str
) -> None:
    """The worker ends between its pushes to two servers, the server within an update of a table."""
    run = launch(
        f"-n 3 --ps 2 {ALONE}",
        "serving.py",
        *("free", "0", "fit-3", "push", "7", "sent"),
        backend=thorough_backend,
    )
    assert "worker 2 was killed by SIGKILL; lost workers are not replaced (--max-restarts 0)" in run.stderr
    assert "parameter server 0 has ended; its log says why; its standby continues with its wei" in run.stderr
    (taken,) = run.marked(5, "lockstep: parameter server 0 is lost")
    assert taken.endswith("; this process continues with its weights after 7 updates")
    check_repeated(run, repeat, (0, 1, 3, 5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        "1 fit-1 push 20 received",
        "0 fit-2 pull 5 sent",
        "1 fit-2 push 6 confirmed",
        "0 fit-2 push 9 answered",
        "0 fit-3 read 1 received",
        "1 fit-3 read 1 sent",
        "0 fit-3 read 2 confirmed",
        "1 fit-3 read 2 answered",
        "1 fit-3 end 1 received",
    ],
)
def test_a_run_that_lost_a_server_at_any_point_can_be_repeated(
    launch: Launch, repeat: Repeat, lost: str, backend: str
) -> None:
    run = launch(f"-n 3 --ps 2 {ALONE}", "serving.py", "free", *lost.split(), backend=backend)
    check_repeated(run, repeat, (0, 1, 3, 5 - int(lost[0])))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["", pytest.param("1 fit-2 push 100 sent", marks=pytest.mark.slow)])
def test_a_run_whose_lost_workers_were_replaced_can_be_repeated(
    launch: Launch, repeat: Repeat, tmp_path: Path, thorough_backend: str, lost: str
) -> None:
    """Each worker ends between its pushes to two servers; the last one runs to the end of the script."""
    file = tmp_path / "last"
    run = launch("-n 3 --ps 2", "serving.py", "replaced", str(file), *lost.split(), backend=thorough_backend)
    for worker, replaced in ((6, 2), (7, 6)):
        assert f"fit 2: worker {worker} replaces worker {replaced}\n" in run.stderr
    check_repeated(run, repeat, (0, 1, 3, 4, 7) if lost else (0, 1, 3, 4, 5, 7), (1, 3, 4, 5), 2)


@pytest.mark.slow
def test_a_job_that_lost_its_chief_starts_again(launch: Launch, tmp_path: Path, backend: str) -> None:
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "lost"
    for one in (undisturbed, folder):
        one.mkdir()
    (undisturbed / "ended").touch()
    options = "-n 1 --ps 1 --restart-job 1"
    first, second = (
        launch(options, "serving.py", "restarted", str(one), backend=backend) for one in (undisturbed, folder)
    )
    assert (first.status, second.status) == (0, 0), second.stderr
    assert "the job has ended with status 137, and starts again in 1 s" in second.stderr
    for mark in ("losses ", "digest "):
        assert second.marked(0, mark) == first.marked(0, mark) != []


def check_repeated(
    run: Any, repeat: Repeat, left: tuple[int, ...], calls: tuple[int, ...] = (1, 2, 5), joined: int = 0
) -> None:
    """Check that a run that lost workers and servers can be repeated."""
    assert run.status == 0, run.stderr
    began = 6
    counts = f"{began + joined - len(left)} lost" + (f", {joined} joined" if joined else "")
    assert f"({counts})" in run.last_line
    digests = {line for worker in left for line in run.marked(worker, "digest ")}
    assert len(digests) == 1
    assert (
        f"equal to the last bit ({digests.pop()})"
        in repeat(run, calls, left_out="one" if joined else "").stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow"], indirect=True)
def test_the_models_of_the_tests_of_tf_keras(launch: Launch, tmp_path: Path, backend: str) -> None:
    run = launch("-n 3 --ps 2", "served_models.py", str(tmp_path / "board"), backend=backend)
    assert run.status == 0, run.stderr
    found = [run.marked(worker, "result ") for worker in range(6)]
    assert len(found[0]) == 8
    assert found == [found[0]] * 6


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow"], indirect=True)
def test_one_process_with_the_strategy_trains_several_outputs(
    plain: Callable[..., str], backend: str
) -> None:
    found = results(plain("serving.py", "alone", backend=backend).splitlines())
    assert found["scoped"]["loss"] == pytest.approx(found["plain"]["loss"], rel=1e-5)
    assert found["scoped"]["norms"] == pytest.approx(found["plain"]["norms"], rel=1e-5)


@pytest.mark.slow("raising", "lost-server", "mirrored")
@pytest.mark.ci("again", "unscoped", "faster")
@pytest.mark.parametrize(
    ("kind", "status", "shown"),
    [
        ("lost-server", 137, "worker 2 was killed by SIGKILL"),
        ("lost-chief", 137, "worker 0 was killed by SIGKILL"),
        ("raising", 1, "worker 0 exited with status 1: ValueError: this callback raises"),
        ("faster", 1, "a callback changes the learning rate within an epoch, which parameter servers do not"),
        ("differing", 1, "worker 1 has read a different batch from the chief"),
        ("again", 1, "this iterator was read by an earlier fit"),
        (
            "unscoped",
            1,
            "compile it in the scope of a lockstep.ParameterServerStrategy, or start the job without",
        ),
        (
            "mirrored",
            1,
            "compile it in the scope of a lockstep.ParameterServerStrategy, or start the job without",
        ),
    ],
)
def test_a_job_that_cannot_continue_says_why(launch: Launch, kind: str, status: int, shown: str) -> None:
    run = launch("-n 1 --ps 1", "serving.py", kind)
    assert run.status == status, run.stderr
    assert shown in run.stderr
    if kind == "lost-chief":
        with pytest.raises(ConfigError, match=r"the end of fit 1 is missing in order/chief \(the chief\)"):
            repeat_run(read_recording(run.folder), run.folder / "again")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["serving.py stopped-server", "scheduling.py stopped"])
@pytest.mark.parametrize(
    ("servers", "stopped", "shown"),
    [
        (1, "0 15 chief", r"worker 0: .* for 15 s; parameter server 0 does not answer; worker 1 computes"),
        # Server 0 waits for server 1, which is its standby, and the worker for both.
        (2, "1 40", r"worker 2: PeerStuckError: parameter server 1 has not answered 'keep' for 10 s"),
    ],
    ids=["alone", "standby"],
)
def test_a_stopped_server_is_named(
    launch: Launch, program: str, servers: int, stopped: str, shown: str
) -> None:
    run = launch(f"-n 1 --ps {servers}", *program.split(), *stopped.split())
    assert run.status == 1, run.stderr
    assert re.search(shown, run.stderr), run.stderr
