"""Jobs on real clusters of Ray: the digest is that of one process, whatever is lost."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_on_ray import PATIENCE, Job, kill
from ray_cluster import RayCluster

from lockstep.checkpoint.run_files import INDEX
from webhook import SECRET, Webhook

Start = Callable[..., Job]
TRAINING = Path(__file__).parents[1] / "training"


SEEN = """
import os
from pathlib import Path
from lockstep.worker import job
Path(f"seen-{job.current().worker}").write_text(os.environ["COLOR"] + os.environ["A_TOKEN"])
"""


@pytest.mark.ci
def test_variables_of_the_script(cluster: RayCluster, tmp_path: Path) -> None:
    """Workers on all nodes have them; the value that is not on the command line is not in the run folder.

    The coordinator uploads the folder, on whatever node it runs.
    """
    pytest.importorskip("obstore")
    (tmp_path / "script.py").write_text(SEEN)
    url = f"file://{tmp_path}/store/run"
    command = f"run --on ray -n 2 --backend jax --run-dir {url} --env COLOR=blue --env A_TOKEN script.py"
    variables = os.environ | {"RAY_ADDRESS": cluster.address, "A_TOKEN": "unrecorded"}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *command.split()],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"seen-{worker}").read_text() for worker in range(2)] == ["blueunrecorded"] * 2
    (run,) = tmp_path.glob("runs/run-*")
    files = {path.name: path.read_bytes() for path in run.glob("*.json*")}
    stored = {
        path.name: path.read_bytes() for path in tmp_path.glob("store/run/*.json*") if path.name != INDEX
    }
    assert stored == files
    kept = [file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file()]
    assert any(b'"env":{"COLOR":"blue","A_TOKEN":null}' in text for text in kept)
    assert not any(b"unrecorded" in text for text in kept)


@pytest.mark.ci
def test_a_job_that_has_ended_does_not_begin_again(cluster: RayCluster, start: Start) -> None:
    """The actor of the coordinator is killed before the command has taken the status of the job."""
    job = start(cluster, 300)
    job.wait_until(lambda: job.steps(1) > 3)
    job.process.send_signal(signal.SIGSTOP)
    job.hurry()
    workers = [process for process in job.processes() if process.pid != job.process.pid]
    job.wait_until(lambda: not any(process.is_running() for process in workers))
    kill(cluster.actors("CoordinatorActor"))
    job.process.send_signal(signal.SIGCONT)
    assert job.finish() == {0, 1}
    assert len(list(job.folder.glob("runs/*"))) == 1


@pytest.mark.slow
@pytest.mark.ci
def test_losses_and_a_new_node(
    cluster: RayCluster, start: Start, monkeypatch: pytest.MonkeyPatch, webhook: Webhook
) -> None:
    """The actor of the coordinator is killed, then a node, and another node joins.

    The next coordinator has the secret URL of the receiver from the agents.
    """
    monkeypatch.setenv("HOOK", webhook.url())
    job = start(cluster, 1000, "-n 2 --notify env:HOOK")
    job.wait_until(lambda: job.steps(1) > 3)
    kill(cluster.actors("CoordinatorActor"))
    job.wait_until(lambda: "taking over a job of 2 hosts whose coordinator was lost" in job.text)
    cluster.tell("kill 1")
    job.wait_until(lambda: "was lost: the connection to its agent is closed" in job.text)
    cluster.tell("add")
    job.wait_until(lambda: job.steps(2) > 1)
    assert 2 in job.finish()
    (run,) = job.folder.glob("runs/*")
    assert [(message["job"], message["what"], message["status"]) for message in webhook.messages] == [
        (run.name, "finished", 0)
    ]
    kept = [file.read_bytes() for file in job.folder.rglob("*") if file.is_file()]
    assert not any(SECRET.encode() in text for text in kept)


@pytest.mark.slow
def test_a_node_that_is_drained(cluster: RayCluster, start: Start) -> None:
    """Its worker leaves before the node is killed, another starts on a new node, and no step is redone."""
    job, last = start(cluster, 1000), cluster.nodes - 1
    job.wait_until(lambda: job.steps(1) > 3)
    cluster.tell(f"drain {last}")
    job.wait_until(lambda: " left (1 worker)" in job.text)
    cluster.tell("add")
    job.wait_until(lambda: job.steps(2) > 1)
    cluster.tell(f"kill {last}")
    job.wait_until(lambda: ", as announced; its workers had left" in job.text)
    assert 2 in job.finish()
    assert "retires: Ray drains its node" in job.text
    for worker in range(3):
        assert job.steps(worker, "computes") == job.steps(worker)


@pytest.mark.slow
def test_parameter_servers(
    cluster: RayCluster,
    tmp_path: Path,
    environment: dict[str, str],
    lean: Callable[..., dict[str, str]],
) -> None:
    """The actor of the coordinator is killed while steps are in work; the run is repeated without Ray."""
    for name in ("serving.py", "losing.py"):
        shutil.copy(TRAINING / name, tmp_path)
    variables = os.environ | environment | lean(TRAINING / "serving.py", "jax")
    variables["RAY_ADDRESS"] = cluster.address
    options = "--on ray --cpus-per-worker 0.5 --backend jax -n 2 --ps 1 --run-dir run"

    def lockstep(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "lockstep", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)

    job = lockstep("run", *options.split(), "serving.py", "long", "40")
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(3)] == ["epoch\n"] * 3
    kill(cluster.actors("CoordinatorActor"))
    job.communicate(timeout=PATIENCE)
    assert job.returncode == 0
    logs = [(tmp_path / "run" / f"worker-{worker}.log").read_text() for worker in range(4)]
    digests = {line for log in logs for line in log.splitlines() if line.startswith("digest ")}
    assert len(digests) == 1
    again = lockstep("rerun", "run")
    shown, _ = again.communicate(timeout=PATIENCE)
    assert f"equal to the last bit ({digests.pop()})" in shown
