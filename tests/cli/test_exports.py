"""What a job shows of itself beside its run folder, and what is refused."""

import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

LEAN = Path(__file__).parents[1] / "lean"

PUBLISHES = """
from lockstep.observability.measurements import MetricsRecorded, StepsMeasured
def publish(trained, epoch=None, **values):
    if me == 0:
        job.current().events.publish(
            MetricsRecorded(call="fit 1", epoch=epoch, trained=trained, values=values)
        )
    parts = dict(input=0.1, compute=0.3, wait=0.2, exchange=0.1, update=0.2, other=0.1 / 3)
    job.current().events.publish(
        StepsMeasured(
            call="fit 1", number=trained, trained=trained, count=3, began=0.0, examples=100 + me,
            replicas=1, seconds=sum(parts.values()), **parts,
        )
    )
"""


def measured(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "measurements.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


def test_tensorboard_gets_the_values_of_the_run_folder(
    lockstep: Any, read_tensorboard: Callable[[Path], dict[str, list[tuple[int, Any]]]]
) -> None:
    script = lockstep.script(
        PUBLISHES + "publish(1, loss=1 / 3)\npublish(5, 1, loss=0.1, val_loss=float('7e-3'), x=None)\n"
    )
    done = lockstep.run("-n", "2", "--tensorboard", "a/board", script)
    assert done.status == 0, done.err
    board = lockstep.folder / "a" / "board"
    recorded = measured(done.folder, "metrics")
    assert len(recorded) == 2
    train, validation = read_tensorboard(board / "train"), read_tensorboard(board / "validation")
    for tag, name in (("batch_loss", "loss"), ("epoch_loss", "loss")):
        lines = [line for line in recorded if line["epoch"] or tag.startswith("batch")]
        assert train[tag] == [
            (
                line["trained"] if tag.startswith("batch") else line["epoch"] - 1,
                float(np.float32(line["values"][name])),
            )
            for line in lines
        ]
    assert np.isnan([value for tag in ("batch_x", "epoch_x") for _, value in train[tag]]).all()
    assert validation["epoch_loss"] == [(0, float(np.float32(0.007)))]
    for worker in (0, 1):
        found = read_tensorboard(board / f"worker-{worker}")
        lines = [line for line in measured(done.folder, "steps") if line["worker"] == worker]
        assert len(lines) == 2
        for tag, figure in {
            "steps/seconds_per_step": lambda line: line["seconds"] / line["count"],
            "steps/examples_per_second": lambda line: line["examples"] / line["seconds"],
            "share/other": lambda line: line["other"] / line["seconds"],
        }.items():
            assert found[tag] == [(line["trained"], float(np.float32(figure(line)))) for line in lines]
    of_job = read_tensorboard(board / "job")
    assert of_job["workers"] == [(1, 2.0)]
    texts = [text for _, text in of_job["membership"]]
    assert texts[0].endswith(": the job begins with 2 workers")
    assert texts[-1].endswith(": the job ends with status 0")


def test_a_job_that_trains_nothing_leaves_no_folder(lockstep: Any) -> None:
    assert lockstep.run("-n", "1", "--tensorboard", "board", lockstep.script("")).status == 0
    assert not (lockstep.folder / "board").exists()


def test_a_missing_package_is_named_with_its_extra(lockstep: Any) -> None:
    path = os.pathsep.join(filter(None, (str(LEAN), os.environ.get("PYTHONPATH"))))
    # A folder of this name is no package.
    (lockstep.folder / "tensorboard").mkdir()
    script = lockstep.script("print('ran')")
    variables = {"PYTHONPATH": path, "HIDDEN_PACKAGES": "tensorboard"}
    done = lockstep.run("--tensorboard", "board", script, **variables)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        "lockstep: UnfitError: --tensorboard needs the package tensorboard: pip install "
        "'keras-lockstep[tensorboard]'\n"
    )
    assert sorted(path.name for path in lockstep.folder.iterdir()) == [
        "announcements",
        "script.py",
        "tensorboard",
    ]


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (
            "script.py",
            "ConfigError: the folder for TensorBoard script.py cannot be used: File exists; "
            "give another --tensorboard",
        ),
        (
            "script.py/x",
            "ConfigError: the folder for TensorBoard script.py/x cannot be used: Not a directory; "
            "give another --tensorboard",
        ),
        (
            "/proc/x",
            "ConfigError: the folder for TensorBoard /proc/x cannot be used: No such file or directory; "
            "give another --tensorboard",
        ),
        (
            "gs://bucket/x",
            "Invalid value for '--tensorboard': gs://bucket/x is not a folder of this machine.",
        ),
    ],
)
def test_an_unusable_folder_is_refused_before_anything_starts(
    lockstep: Any, folder: str, message: str
) -> None:
    done = lockstep.run("--tensorboard", folder, lockstep.script("print('ran')"))
    assert (done.status, done.out, done.err) == (2, "", f"lockstep: {message}\n")
    assert sorted(path.name for path in lockstep.folder.iterdir()) == ["announcements", "script.py"]


STAYS = (
    PUBLISHES
    + """
publish(3, 1, loss=0.5)
if me == 0:
    announce("ready")
    import pathlib, time
    while not pathlib.Path("continue").exists():
        time.sleep(0.01)
barrier()
"""
)


def test_metrics_are_served_while_the_job_runs(lockstep: Any) -> None:
    script = lockstep.script(STAYS)
    running = lockstep.start("-n", "2", "--metrics-port", "0", script)
    for pidfd in running.announced(1)["ready"]:
        os.close(pidfd)
    lines = iter(running.process.stderr.readline, "")
    (port,) = next(
        match.groups()
        for line in lines
        if (match := re.fullmatch(r"lockstep: metrics at http://127\.0\.0\.1:(\d+)/metrics\n", line))
    )
    # Both workers have reported before the barrier at the end of the script.
    text = ""
    while 'lockstep_worker_steps_total{worker="1"}' not in text or "lockstep_metric{" not in text:
        assert running.process.poll() is None
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as response:
            assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            text = response.read().decode()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["lockstep_job_info", "0", "2", "jax", "run", script] == 1
    assert found["lockstep_workers",] == 2
    assert found["lockstep_steps_total",] == 3
    assert found["lockstep_metric", "loss"] == 0.5
    assert found["lockstep_step_seconds_total", "1", "compute"] == 0.3
    (lockstep.folder / "continue").touch()
    assert running.end().status == 0
    with socket.socket() as closed:
        assert closed.connect_ex(("127.0.0.1", int(port))) != 0


def test_a_port_in_use_is_refused_before_anything_starts(lockstep: Any) -> None:
    script = lockstep.script("print('ran')")
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        done = lockstep.run("--metrics-port", str(port), "--tensorboard", "a/board", script)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        f"lockstep: ConfigError: --metrics-port {port} cannot be used: Address already in use; give another "
        "port, or 0 for any free one\n"
    )
    assert sorted(path.name for path in lockstep.folder.iterdir()) == ["announcements", "script.py"]


def test_metrics_are_refused_where_an_engine_chooses_the_machine(lockstep: Any) -> None:
    done = lockstep.run("--on", "ray", "-n", "2", "--metrics-port", "0", lockstep.script(""))
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        "lockstep: ConfigError: --metrics-port cannot be combined with --on: it serves on this machine "
        "alone, and the engine chooses where the coordinator runs\n"
    )


def test_a_receiver_hears_of_nan_and_of_the_end(lockstep: Any) -> None:
    script = lockstep.script(
        PUBLISHES + "publish(3, loss=None, accuracy=0.5)\nbarrier()\nraise ValueError('no')\n"
    )
    done = lockstep.run("-n", "2", "--notify", "exec:cat >> told; echo >> told", script, run="a/run")
    assert done.status == 1
    told = [json.loads(line) for line in (lockstep.folder / "told").read_text().splitlines()]
    assert [(one["what"], one["status"], one["steps"]) for one in told] == [
        ("nan", None, 3),
        ("failed", 1, 3),
    ]
    assert all(one["metrics"] == {"loss": None, "accuracy": 0.5} for one in told)
    assert {(one["job"], one["script"], one["run_dir"]) for one in told} == {
        ("run", "script.py", str(lockstep.folder / "a" / "run"))
    }
    assert told[1]["text"].startswith("run: ended with status 1: ")


@pytest.mark.parametrize(
    "killed",
    ["both", *(pytest.param(one, marks=pytest.mark.ci) for one in ("command", "job"))],
)
def test_a_receiver_hears_of_a_job_that_was_killed(lockstep: Any, killed: str) -> None:
    os.mkfifo(lockstep.folder / "told")
    script = lockstep.script("announce('worker'); stay()")
    running = lockstep.start("-n", "2", "--notify", "exec:cat > told", script)
    workers = running.announced(2)["worker"]
    # The notifier was started before.
    _, agent = running.children()
    job = os.pidfd_open(agent)
    # Stopped, neither of them can say what has become of the other.
    for process in (running.process.pid, agent) if killed == "both" else ():
        os.kill(process, signal.SIGSTOP)
    if killed != "job":
        running.process.kill()
    if killed != "command":
        signal.pidfd_send_signal(job, signal.SIGKILL)
    message = json.loads((lockstep.folder / "told").read_text())
    assert message["what"] == "failed"
    assert (
        message["text"]
        == {
            "command": "run: ended with status 137: the command was killed",
            "job": "run: ended with status 137; its process did not say why",
            "both": f"run: all processes of the job on {socket.gethostname()} were killed",
        }[killed]
    )
    for process in (*workers, job):
        os.close(process)
    running.end()
