"""Checkpoints with one replica, and those that a program requests: resuming has the same bits."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.store_lock import FolderLock
from lockstep.errors import CheckpointError, ConfigError, ScopeError
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.job import Job, JobContext

HERE = Path(__file__).parent
MARKS = ("fit ", "evaluate ", "predict ", "batch ", "table ", "end ")
STATUS = {"killed": 137, "stopped": 143}
Launch = Callable[..., Any]
Undisturbed = Callable[..., list[str]]


def results(run: Any, worker: int = 0) -> list[str]:
    assert run.status == 0, run.stderr
    return [line for mark in MARKS for line in run.marked(worker, mark)]


@pytest.fixture
def undisturbed(undisturbed_run: Launch) -> Undisturbed:
    """The results of a run that saves nothing; with one replica, those of plain Keras."""

    def run(backend: str, replicas: int = 1, execution: int = 1) -> list[str]:
        arguments = ("{folder}", "0", str(execution))
        done = undisturbed_run(f"-n 1 --replicas {replicas}", "keeping.py", *arguments, backend=backend)
        figures = f"digest {done.marked(0, 'end ')[0].split()[1]} of model 'model'"
        assert done.last_line == f"{56 if execution == 1 else 66} steps on 1 worker; {figures}"
        return results(done)

    return run


@pytest.fixture
def run_and_resume(launch: Launch, tmp_path: Path) -> Callable[..., Any]:
    """Run the program twice: all workers are lost, and the second run resumes; return it.

    `fit` is the number of the call with the callback; with 0, the command saves checkpoints.
    """

    def run(backend: str, fit: int, how: str, place: str, *options: str, execution: int = 1) -> Any:
        first, last = options if options else ("--replicas 1", "--replicas 1")
        keeping = "" if fit else f"--checkpoint {tmp_path / 'kept'} --checkpoint-every 2"
        arguments = (str(tmp_path), str(fit), str(execution), how, *place.split())
        lost = launch(f"{first} {keeping}", "keeping.py", *arguments, backend=backend)
        assert lost.status == STATUS[how], lost.stderr
        assert f"new training with checkpoints in {tmp_path / 'kept'}, every 2 steps" in lost.stderr
        done = launch(f"{last} {keeping}", "keeping.py", *arguments, backend=backend)
        assert done.status == 0, done.stderr
        assert re.search(rf"resuming from {tmp_path}/kept/step-\d+, checkpoints every 2 steps", done.stderr)
        return done

    return run


# In quick tests, a job of one replica resumes in the test of the callback.
@pytest.mark.slow
def test_a_job_of_one_replica_resumes(
    run_and_resume: Callable[..., Any], backend: str, undisturbed: Undisturbed
) -> None:
    assert results(run_and_resume(backend, 0, "killed", "fit 1 step 7")) == undisturbed(backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "place"),
    [("killed", "fit 1 epoch 1"), ("stopped", "fit 2 step 4"), ("killed", "batch 3"), ("stopped", "batch 3")],
)
def test_a_job_of_one_replica_resumes_at_any_place(
    run_and_resume: Callable[..., Any], backend: str, undisturbed: Undisturbed, how: str, place: str
) -> None:
    assert results(run_and_resume(backend, 0, how, place)) == undisturbed(backend)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["fit 1 step 5", "fit 2 step 2", "batch 3"])
def test_a_job_with_several_steps_per_execution_resumes(
    run_and_resume: Callable[..., Any], backend: str, undisturbed: Undisturbed, place: str
) -> None:
    if backend == "torch":
        pytest.skip("Keras takes one step at a time there")
    assert results(run_and_resume(backend, 0, "killed", place, execution=2)) == undisturbed(
        backend, execution=2
    )


# On JAX, NumPy draws the order of a later model, so one more sample batch would show.
@pytest.mark.slow("torch", "tensorflow")
@pytest.mark.ci
def test_a_job_with_the_callback_resumes_with_one_replica(
    run_and_resume: Callable[..., Any], backend: str, undisturbed: Undisturbed
) -> None:
    done = run_and_resume(backend, 2, "killed", "fit 2 step 4")
    assert results(done) == undisturbed(backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fit", "how", "place"),
    [(1, "killed", "fit 1 step 7"), (2, "stopped", "fit 2 step 4"), (1, "killed", "batch 3")],
)
def test_a_job_with_the_callback_resumes_with_several_workers(
    run_and_resume: Callable[..., Any], backend: str, undisturbed: Undisturbed, fit: int, how: str, place: str
) -> None:
    done = run_and_resume(
        backend, fit, how, place, "-n 2 --replicas 4", "-n 3 --replicas 4 --threads-per-worker 1"
    )
    for worker in (0, 2):
        assert results(done, worker) == undisturbed(backend, 4)


@pytest.mark.ci
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("script", "message"),
    [("by_turns.py", "resuming from"), ("one_after_another.py", "training resumed after step 2 of fit 2")],
)
def test_models_that_earlier_calls_have_built_resume(
    launch: Launch,
    undisturbed_run: Launch,
    quickest_backend: str,
    tmp_path: Path,
    script: str,
    message: str,
    replicas: int,
) -> None:
    backend, options = quickest_backend, f"-n 1 --replicas {replicas}"
    right = undisturbed_run(options, script, backend=backend)
    options += f" --checkpoint {tmp_path / 'kept'} --checkpoint-every 1"
    assert launch(options, script, "0", backend=backend).status == STATUS["killed"]
    run = launch(options, script, "0", backend=backend)
    assert message in run.stderr
    assert results(run) == results(right)


@pytest.mark.ci
def test_a_worker_that_joins_has_the_weights_of_models_that_finished_calls_have_built(
    launch: Launch, undisturbed_run: Launch, thorough_backend: str
) -> None:
    right = undisturbed_run("-n 1 --replicas 2", "one_after_another.py", backend=thorough_backend)
    run = launch("-n 2 --min-workers 2", "one_after_another.py", "1", backend=thorough_backend)
    assert results(run, 2) == results(right)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "place"), [("killed", "fit 1 epoch 1"), ("stopped", "fit 2 step 4")])
def test_a_program_without_the_command_resumes_from_the_callback(
    environment: dict[str, str], backend: str, how: str, place: str, tmp_path: Path
) -> None:
    def run(folder: Path, fit: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        line = [sys.executable, str(HERE / "keeping.py"), str(folder), str(fit), "1", *arguments]
        variables = environment | {"KERAS_BACKEND": backend}
        return subprocess.run(line, env=variables, capture_output=True, text=True, timeout=1200)

    def shown(run: subprocess.CompletedProcess[str]) -> list[str]:
        assert run.returncode == 0, run.stderr
        return [line for line in run.stdout.splitlines() if line.startswith(MARKS)]

    arguments = (how, *place.split())
    lost = run(tmp_path / "a", 1, *arguments)
    assert lost.returncode == {"killed": -9, "stopped": 143}[how], lost.stderr
    done = run(tmp_path / "a", 1, *arguments)
    assert f"lockstep: new training with checkpoints in {tmp_path}/a/kept, every 2 steps" in lost.stderr
    assert f"lockstep: resuming from {tmp_path}/a/kept/step-" in done.stderr
    assert shown(done) == shown(run(tmp_path / "b", 0))


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["1", "2"])
def test_the_next_chiefs_continue_to_save_checkpoints(
    launch: Launch, undisturbed: Undisturbed, fit: str, tmp_path: Path
) -> None:
    arguments = (str(tmp_path), fit, "1", "chiefs", "fit", "1", "step", "7")
    run = launch("-n 2 --replicas 4 --min-workers 2", "keeping.py", *arguments)
    assert results(run, 2) == undisturbed("jax", 4)
    assert "a checkpoint failed" not in run.stderr
    assert Store(tmp_path / "kept").entries()[-1].step > 40


@pytest.mark.slow
def test_every_worker_reports_the_folder_of_another_job(launch: Launch, tmp_path: Path) -> None:
    claim = FolderLock(tmp_path / "kept")
    claim.acquire()
    run = launch("-n 2", "keeping.py", str(tmp_path), "1", "1")
    claim.release()
    assert run.status == 1
    message = f"ConfigError: another job saves checkpoints in {tmp_path / 'kept'}; wait for it to end"
    for worker in (0, 1):
        assert any(message in line for line in run.log(worker))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stream_is_read_again_alike(launch: Launch, backend: str, replicas: int, tmp_path: Path) -> None:
    options = f"-n 1 --replicas {replicas}"
    expected = launch(options, "restreaming.py", backend=backend)
    keeping = f"{options} --checkpoint {tmp_path} --checkpoint-every 1"
    assert launch(keeping, "restreaming.py", "killed", backend=backend).status == 137
    done = launch(keeping, "restreaming.py", "killed", backend=backend)
    assert done.status == 0, done.stderr
    assert done.marked(0, "end ") == expected.marked(0, "end ")


class TestRefusals:
    """The refusals of `begin`; in a job of one worker and three replicas."""

    @pytest.fixture
    def asking(self) -> Any:
        """A separate job, not entered, whose first `fit` has a callback."""
        pytest.importorskip("keras")
        from lockstep.keras.numbered_calls import NumberedCalls
        from lockstep.keras.state.checkpoint_callback import ScriptCheckpoints
        from lockstep.keras.state.snapshots import Snapshots

        view = place(3, (0,))
        own = Job(
            JobContext(0, Bus(SystemClock(), 0), JobSettings(seed=7, threads=1)), (view, job.by_itself(view))
        )
        calls = NumberedCalls()
        keeping = ScriptCheckpoints(own, calls, Snapshots(own, None, calls))  # type: ignore[arg-type]

        def ask(folder: Path, **options: Any) -> None:
            from lockstep.callbacks import Checkpoint

            with calls.enter("fit"):
                keeping.begin(Checkpoint(folder, **options))

        ask.job = own  # type: ignore[attr-defined]
        return ask

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"every": 0}, "Checkpoint, every=0: give a number of steps, or a time such as 30s, 10m or 1h"),
            ({"every": "often"}, "Checkpoint, every=often: give"),
            ({"keep": 0}, "Checkpoint, keep=0: give a whole number, 1 or more"),
            ({"folder": ""}, "Checkpoint, folder='': give the path of a folder"),
            ({"folder": "\udcff\0"}, r"Checkpoint, folder='\\udcff\\x00': give the path"),
            ({"folder": 5}, "Checkpoint, folder=5: give the path of a folder"),
        ],
    )
    def test_invalid_options_are_refused(
        self, asking: Any, tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            asking(**{"folder": tmp_path} | options)

    def test_the_folder_of_a_running_job_is_refused(self, asking: Any, tmp_path: Path) -> None:
        run = "import sys; from pathlib import Path; from lockstep.checkpoint.store_lock import FolderLock\n"
        run += f"FolderLock(Path({str(tmp_path)!r})).acquire(); print('taken', flush=True); sys.stdin.read()"
        other = subprocess.Popen(
            [sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(ConfigError, match=f"another job saves checkpoints in {tmp_path}; wait for it"):
            asking(tmp_path)
        other.communicate()
        claim = FolderLock(tmp_path)
        claim.acquire()
        claim.release()

    @pytest.mark.parametrize(
        ("facts", "message"),
        [
            (
                {"replicas": 4},
                "was made with 4 replicas, and this job has 3 replicas, which affects the result",
            ),
            ({"seed": 0, "threads": 2}, "with seed 0 and 2 threads, and this job has seed 7 and 1 threads"),
            ({"replicas": 4}, "to resume, use `lockstep run --replicas 4 --seed 7 --threads-per-worker 1`"),
            ({"input": "joint"}, "with joint reading of input, and this job has divided reading of input"),
            ({"backend": "none"}, "was made with the backend none, and this job has the backend"),
            ({"threads": 0}, "with the backend's own number of threads, and .* without `lockstep run`"),
        ],
    )
    def test_checkpoints_of_another_job_are_refused(
        self, asking: Any, tmp_path: Path, facts: dict[str, Any], message: str
    ) -> None:
        own = {"replicas": 3, "seed": 7, "threads": 1}
        Store(tmp_path).write(Contents(5, {"job": own | facts}, {}))
        with pytest.raises(ConfigError, match=message):
            asking(tmp_path)

    def test_checkpoints_of_another_call_are_refused(self, asking: Any, tmp_path: Path) -> None:
        training = {"journal": {}, "steps": 1, "since": 2}
        job_facts = {"replicas": 3, "seed": 7, "threads": 1}
        Store(tmp_path).write(Contents(5, {"job": job_facts, "training": training}, {}))
        message = (
            "step 5 was saved by a lockstep.callbacks.Checkpoint in call 3 of .* in call 1 of the script"
        )
        for _ in range(2):
            with pytest.raises(CheckpointError, match=message):
                asking(tmp_path)
            message = message.replace("in call 1 of", "in call 2 of")

    def test_the_callback_and_checkpoints_of_the_command_are_refused(
        self, asking: Any, tmp_path: Path
    ) -> None:
        asking.job.checkpoints.keep(object())
        with pytest.raises(
            ConfigError, match="already saved where --checkpoint says; configure checkpoints in one place"
        ):
            asking(tmp_path)

    def test_a_model_outside_a_scope_is_refused(self, asking: Any, tmp_path: Path) -> None:
        import keras

        from lockstep.callbacks import Checkpoint

        callback = Checkpoint(tmp_path)
        callback.set_model(keras.Sequential(name="outsider"))
        with pytest.raises(ScopeError, match="model 'outsider' was not compiled in the scope"):
            callback.on_train_begin()

    def test_several_callbacks_are_refused(self, asking: Any, tmp_path: Path) -> None:
        from lockstep.callbacks import Checkpoint
        from lockstep.keras.state.checkpoint_callback import checkpoint_in

        with pytest.raises(ConfigError, match="give it one"):
            checkpoint_in([Checkpoint(tmp_path), [Checkpoint(tmp_path)]])


def test_the_callback_is_found_among_others_and_removed(tmp_path: Path) -> None:
    import keras

    from lockstep.callbacks import Checkpoint
    from lockstep.keras.state.checkpoint_callback import checkpoint_in, without_checkpoint

    one, other = Checkpoint(tmp_path), keras.callbacks.EarlyStopping()
    listed = keras.callbacks.CallbackList([one, other], add_history=True)
    for callbacks in (one, [other, [one]], listed):
        assert checkpoint_in(callbacks) is one
    assert one in listed.callbacks
    assert without_checkpoint(one, one) == []
    assert without_checkpoint(one, [other, [one]]) == [other]
    assert without_checkpoint(one, listed) is listed
    assert one not in listed.callbacks
    for callbacks in (None, [other], listed):
        assert checkpoint_in(callbacks) is None
        assert without_checkpoint(None, callbacks) is callbacks
