"""`lockstep.ray.fit` on a cluster: the value, errors and losses are those of `lockstep.launch`."""

import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from ray_cluster import RayCluster

import lockstep
import ray
from lockstep.errors import ConfigError, InputError, JobError, UnfitError
from lockstep.observability.events import StrategyInstalled
from lockstep.protocol.engine import StartCoordinator
from lockstep.ray.function_run import FunctionRun, SentFunction
from lockstep.worker import job

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

import chaos_steps

REPLICAS, STEPS = 5, 600
PATIENCE = 240.0


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two nodes; the second one has a resource of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        with closing(RayCluster(1, tmp_path_factory.mktemp("cluster"))) as cluster:
            cluster.tell("add special")
            ray.init(cluster.address, namespace="of the program", log_to_driver=False)
            yield
            ray.shutdown()


@pytest.fixture(autouse=True)
def _new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Workers cannot import the modules of tests: functions are pickled by value, as those of a notebook.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.chdir(tmp_path)
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Pace:
    """Notes the steps of a worker, and waits a moment in each until there is the file `fast`."""

    step, differs = 0, False

    def __init__(self, worker: int) -> None:
        self._made = Path(f"made-{worker}")

    def passing(self, point: str) -> None:
        if point == "after apply":
            with self._made.open("a") as made:
                made.write("made\n")
            time.sleep(0.0 if Path("fast").exists() else 0.05)


def train(config: dict[str, int]) -> str:
    current = job.current()
    current.events.publish(StrategyInstalled("none"))
    current.note_distribution()
    print("worker", current.worker)
    return chaos_steps.train(current, config["steps"], Pace(current.worker))  # type: ignore[arg-type]


EPOCHS = 10


def train_model(config: dict[str, bool]) -> dict[str, Any]:
    """Worker 0 is lost in the first epoch, and worker 1 in the last one, once worker 2 has joined."""
    import keras
    import numpy as np

    from lockstep.ray import ReportCallback

    me = job.current()

    class Losses(keras.callbacks.Callback):  # type: ignore[misc]
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            joined = 2 in me.view.workers
            if (me.worker == 0 and batch == 3) or (me.worker == 1 and self.epoch == EPOCHS - 1 and joined):
                os.kill(os.getpid(), signal.SIGKILL)
            if not joined:
                time.sleep(2.0)

    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
    callbacks = [ReportCallback(), *([Losses()] if config["lost"] else [])]
    history = model.fit(x, x[:, :1], epochs=EPOCHS, batch_size=10, callbacks=callbacks, verbose=0)
    return {"digest": lockstep.digest(model), "history": history.history, "chief": me.worker}


def fails() -> None:
    variables = os.environ["COLOR"], len(os.environ["A_TOKEN"])
    raise ValueError(f"{len(job.current().view.workers)} of 2 workers, {variables}")


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def steps(worker: int) -> int:
    path = Path(f"made-{worker}")
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill(part: str) -> None:
    """Kill the process of an actor; Ray starts that of the coordinator again."""
    named = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    name = sorted(one for one in named if one.startswith("train-") and f"/{part}" in one)[0]
    ray.kill(ray.get_actor(name, "lockstep"), no_restart=part == "agent")


@pytest.mark.ci
@pytest.mark.usefixtures("_cluster")
def test_the_bits_are_those_of_launch_though_actors_are_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ""

    def has_shown(text: str) -> bool:
        nonlocal shown
        shown += "".join(capsys.readouterr())
        return text in shown

    with ThreadPoolExecutor() as threads:
        config = {"steps": STEPS}
        running = threads.submit(lockstep.ray.fit, train, config, workers=2, replicas=REPLICAS, seed=3)
        wait_until(lambda: steps(0) > 3 and steps(1) > 3)
        kill("coordinator")
        wait_until(lambda: has_shown("taking over a job of 2 hosts whose coordinator was lost"))
        kill("agent")
        wait_until(lambda: steps(2) > 1)
        Path("fast").touch()
        result = running.result(PATIENCE)
    launched = lockstep.launch(train, (config,), workers=1, replicas=REPLICAS, seed=3)
    assert result.value == launched == chaos_steps.alone(3, REPLICAS, STEPS)[-1]
    assert (result.metrics, result.checkpoint) == ({}, None)
    assert result.path.parent == tmp_path / "runs"
    assert re.fullmatch(r"train-\d{8}-\d{6}-[0-9a-f]{4}", result.path.name)
    assert (result.path / "events.jsonl").exists()
    assert result.node == ray.util.get_node_ip_address()
    assert has_shown("worker 0\n")


@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
def test_metrics_and_value_of_a_worker_that_has_joined() -> None:
    result = lockstep.ray.fit(train_model, {"lost": True}, workers=2, backend="jax")
    launched = lockstep.launch(train_model, ({"lost": False},), workers=1, replicas=2, backend="jax")
    assert result.value == launched | {"chief": 2}
    assert result.metrics == {name: values[-1] for name, values in launched["history"].items()}
    assert sorted(result.metrics) == ["loss", "mae"]


@pytest.mark.ci
@pytest.mark.usefixtures("_cluster")
def test_an_error_on_the_only_node_with_a_resource(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function has the variables that the program gives it; the run folder lacks the secret value."""
    monkeypatch.setenv("A_TOKEN", "unrecorded")
    with pytest.raises(JobError) as caught:
        lockstep.ray.fit(
            fails,
            workers=2,
            scaling=lockstep.ray.Scaling(resources_per_worker={"special": 1}),
            run_dir="run",
            env={"COLOR": "blue", "A_TOKEN": None},
            tags=["special"],
        )
    kept = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert any(b'"env":{"COLOR":"blue","A_TOKEN":null}' in text for text in kept)
    assert any(b'"tags":["special"]' in text for text in kept)
    assert not any(b"unrecorded" in text for text in kept)
    where = f"{tmp_path}/run/worker-0.log on {ray.util.get_node_ip_address()}"
    message = f"worker 0 exited with status 1: ValueError: 1 of 2 workers, ('blue', 10); log: {where}"
    assert str(caught.value) == f"{message}\n\n{caught.value.traceback}"
    assert caught.value.worker == 0
    assert caught.value.traceback.splitlines()[1].startswith(f'  File "{__file__}", line ')


def stay() -> None:
    with Path("started").open("a") as started:
        started.write(f"{os.getpid()}\n")
    signal.pause()


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
def test_an_interrupt_ends_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    processes: list[int] = []

    def interrupt() -> None:
        wait_until(lambda: Path("started").exists() and Path("started").read_text().count("\n") == 2)
        processes.extend(os.pidfd_open(int(pid)) for pid in Path("started").read_text().split())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        lockstep.ray.fit(stay, workers=2)
    thread.join()
    assert all(select.select([process], [], [], PATIENCE)[0] for process in processes)
    assert "lockstep: stopped by SIGINT" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.usefixtures("_cluster")
def test_what_the_coordinator_refuses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^2 workers cannot share 1 replicas: "):
        lockstep.ray.fit(fails, workers=2, replicas=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
@pytest.mark.usefixtures("_cluster")
def test_a_node_without_the_folder_is_named(tmp_path: Path) -> None:
    run = FunctionRun(SentFunction(b"", "runs/fails"), str(tmp_path), again=False)
    start = StartCoordinator("", "127.0.0.1:0", again=False)
    with pytest.raises(
        ConfigError, match="/missing, where the function runs, does not exist on the node"
    ) as caught:
        run.start(("run",), start, f"{tmp_path}/missing", {}, lambda number, data: None)
    assert run.outcome.error is caught.value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "options", "error"),
    [
        (
            {"lock": threading.Lock()},
            {},
            "lockstep.ray.fit cannot send this to its workers: config['lock'], of type ",
        ),
        (threading.Lock(), {}, "lockstep.ray.fit cannot send this to its workers: config, of type lock ("),
        ({}, {"workers": 0}, "lockstep.ray.fit, workers=0: give a whole number, 1 or more"),
        ({}, {"run_dir": "a\0b"}, r"lockstep.ray.fit, '--run-dir=a\x00b': it contains a null character"),
        (
            {},
            {"scaling": lockstep.ray.Scaling(gpus_per_worker=-1)},
            "resources per worker: -1 is not an amount of GPU",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused(tmp_path: Path, config: Any, options: Any, error: str) -> None:
    with pytest.raises(InputError, match=re.escape(error)):
        lockstep.ray.fit(print, config, **options)
    assert list(tmp_path.iterdir()) == []


def test_fit_in_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "is_worker", lambda: True)
    with pytest.raises(ConfigError, match=r"lockstep\.ray\.fit cannot be called in a worker"):
        lockstep.ray.fit(print)


def test_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "lockstep.ray.function_run", raising=False)
    with pytest.raises(UnfitError, match=re.escape("pip install 'keras-lockstep[ray]'")):
        lockstep.ray.fit(print)
