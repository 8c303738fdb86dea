"""`lockstep run --tf-distribute`: programs written for `tf.distribute` only."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.errors import ConfigError
from lockstep.worker.tf_distribute_shim import _STRATEGIES

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"
STAND_IN = Path(__file__).parent / "stand_in"
BACKENDS = ["jax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorflow", "torch"))]
"""On TensorFlow, the quick tests train in `tf_names.py`."""


@pytest.fixture
def tutorial(
    environment: dict[str, str], lean: Callable[..., dict[str, str]], tmp_path: Path
) -> Callable[..., list[list[str]]]:
    """Run a `main.py` for a few steps; return the last lines of each worker."""
    short = {"KERAS_MAX_EPOCHS": "2", "KERAS_MAX_STEPS_PER_EPOCH": "3", "PYTHONPATH": str(STAND_IN)}

    def run(script: Path, backend: str, *options: str) -> list[list[str]]:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        command = [sys.executable, "-m", "lockstep", "run", "--backend", backend, "--run-dir", str(folder)]
        done = subprocess.run(
            [*command, *options, str(script)],
            env=environment | lean(tmp_path, backend) | short,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr
        logs = [log.read_text().splitlines() for log in sorted(folder.glob("*.log"))]
        return [[line for line in log if line.startswith(("digest: ", "strategy: "))] for log in logs]

    return run


def with_lockstep_names(folder: Path) -> Path:
    """The tutorial with `lockstep` in place of `tf.distribute`."""
    shutil.copy(TUTORIAL / "mnist.py", folder)
    text = (TUTORIAL / "main.py").read_text()
    assert "lockstep." not in text
    script = folder / "main.py"
    script.write_text(
        text.replace("import tensorflow as tf", "import lockstep").replace("tf.distribute.", "lockstep.")
    )
    return script


@pytest.mark.slow("jax")
@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_unchanged_tutorial_trains(
    tutorial: Callable[..., list[list[str]]], tmp_path: Path, backend: str
) -> None:
    """It trains on two workers; with one worker and Lockstep's own names, it has the same bits."""
    pytest.importorskip(backend)
    first, second = tutorial(TUTORIAL / "main.py", backend, "--tf-distribute", "-n", "2")
    script = with_lockstep_names(tmp_path)
    (alone,) = tutorial(script, backend, "-n", "1", "--replicas", "2")
    assert first[0] == second[0] == alone[0]
    assert first[1] == second[1] == "strategy: lockstep.strategy.mirrored"
    # Without the option, nothing is replaced.
    assert alone[1].startswith("strategy: tensorflow.python.distribute.")


@pytest.fixture(
    scope="module",
    params=["tensorflow", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "torch"))],
)
def names(request: pytest.FixtureRequest, launch: Callable[..., Any]) -> Any:
    """A run of `tf_names.py`."""
    pytest.importorskip(request.param)
    run = launch("--tf-distribute -n 2", "tf_names.py", backend=request.param)
    assert run.status == 0, run.stderr
    return run


@pytest.mark.ci
def test_scripts_find_lockstep_and_keras_finds_tensorflow(names: Any) -> None:
    assert names.marked(0, "outside:") == ["outside: False False 1 1"]
    assert names.marked(0, "inside:") == ["inside: True True 2 None"]
    assert names.marked(0, "in run:") == ["in run: 6.0"]
    assert names.marked(0, "keras finds:") in ([], ["keras finds: tensorflow 1"])
    assert names.marked(0, "the script finds:") in ([], ["the script finds: lockstep 2"])


@pytest.mark.ci
def test_unsupported_names_are_refused_when_they_are_called(names: Any) -> None:
    said = names.marked(0, "refused: tf.distribute.")
    refused = ["TPUStrategy", "experimental.CentralStorageStrategy"]
    refused += ["experimental_set_strategy"]
    assert len(said) == len(refused)
    for line, name in zip(said, refused, strict=True):
        assert line.startswith(
            f"refused: tf.distribute.{name} is not supported by `lockstep run --tf-distribute`: "
        )


@pytest.mark.ci
def test_a_strategy_may_follow_devices_and_sessions(names: Any) -> None:
    assert names.marked(0, "computed:") == ["computed: 2", "computed: 3"]


def test_two_workers_read_one_file_to_its_end(names: Any) -> None:
    """The loss and the accuracy count all 70 examples of the 5 steps of two epochs."""
    (trained,) = names.marked(0, "trained:")
    assert trained.startswith("trained: 10 70 70 ")
    assert names.marked(1, "trained:") == [trained]


def test_strategies_of_tensorflow_are_refused_by_name(launch: Callable[..., Any]) -> None:
    """Without the option, they would train outside of the job; the default strategy is allowed."""
    run = launch("-n 2", "tf_strategies.py", backend="tensorflow")
    assert run.status == 1
    assert run.marked(0, "default:") == ["default: 1 False"]
    refused = [line.split()[1].removeprefix("tf.distribute.") for line in run.marked(0, "refused:")]
    same = {"experimental.ParameterServerStrategy": "ParameterServerStrategy"}
    assert refused == [same.get(name, name) for name in _STRATEGIES]
    assert len(refused) == 9
    *_, message, _, _ = run.stderr.splitlines()
    assert re.fullmatch(
        r"lockstep: worker \d: ConfigError: tf.distribute.MirroredStrategy is TensorFlow's own and does not "
        r"know about this job: each worker would train by itself, not as a part of "
        r"the 2 replicas; run it with `lockstep run --tf-distribute`, or use lockstep.MirroredStrategy "
        r"instead \(tf_strategies.py:\d+\)",
        message,
    )


def test_the_option_alone_loads_nothing(launch: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('loaded:', 'tensorflow' in sys.modules, 'keras' in sys.modules)\n")
    run = launch("--tf-distribute -n 1", str(script))
    assert run.marked(0, "loaded:") == ["loaded: False False"]


@pytest.mark.ci
def test_the_tasks_of_a_program_with_servers_run_its_chiefs_part(launch: Callable[..., Any]) -> None:
    run = launch("--tf-distribute -n 1 --ps 1", "tf_servers.py", backend="tensorflow")
    assert run.status == 0, run.stderr
    trained = [run.marked(worker, "trained ") for worker in range(3)]
    assert trained == [trained[0]] * 3 != [[]] * 3


def test_nothing_waits_in_a_server() -> None:
    cluster = {"worker": ["a:1", "b:1"], "ps": {1: "c:1"}}
    assert lockstep.Server(cluster, "worker", 1, "http").target == "http://b:1"
    server = lockstep.Server(lockstep.ClusterSpec(cluster), "ps")
    server.start()
    with pytest.raises(ConfigError, match=r"grpc://c:1, which does not exist: start all tasks"):
        server.join()
    with pytest.raises(ValueError, match="job_name is missing: the cluster has the jobs worker, ps"):
        lockstep.Server(cluster)
    with pytest.raises(ValueError, match="task_index is missing: the job worker has 2 tasks"):
        lockstep.Server(cluster, "worker")
    with pytest.raises(ValueError, match="ps"):
        lockstep.Server(cluster, "ps", 0)


def test_steps_of_the_program_add_up_gradients_as_in_tensorflow(launch: Callable[..., Any]) -> None:
    """The mean of a replica that is not divided has the gradient of two replicas, and is named."""
    run = launch("-n 1 --replicas 2 --tf-distribute", "summing.py", backend="tensorflow")
    assert run.status == 0, run.stderr
    scaled = ("average", "constant", "scaled", "by_strategy", "by_model", "by_keras")
    assert run.marked(0, "weight ") == [*(f"weight {name} 0.8" for name in scaled), "weight unscaled 0.6"]
    named = [line for line in run.stderr.splitlines() if "per replica" in line]
    assert named == [
        "lockstep: model 'unscaled': computed per replica: train_step of Stepping, whose gradients are added "
        "up as in tf.distribute"
    ]


@pytest.mark.ci("tensorflow", "torch")
def test_losses_and_regularizers_count_once_in_steps_that_call_that_of_keras(
    launch: Callable[..., Any], backend: str
) -> None:
    run = launch("-n 1 --replicas 2 --tf-distribute --no-adopt", "penalized_steps.py", backend=backend)
    assert run.status == 0, run.stderr
    numbers = [
        {line.split()[1]: [float(number) for number in line.split()[2:]] for line in run.marked(0, kind)}
        for kind in ("plain ", "replicas ")
    ]
    assert numbers[0].keys() == {"Calling", "Keeping"}
    assert numbers[1] == {name: pytest.approx(plain, rel=1e-5) for name, plain in numbers[0].items()}
