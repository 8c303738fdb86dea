"""Parameter servers, workers and the chief on several hosts."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host

TRAINING = Path(__file__).parents[1] / "training"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "server"),
    [
        ("serving.py", "0 fit-3 push 7 sent"),
        pytest.param("scheduling.py", "1 functions-1 push 6 sent", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_several_hosts_that_lost_a_worker_and_a_server_is_repeated_on_one(
    hosts: Sequence[Host], lean: Callable[..., dict[str, str]], script: str, server: str
) -> None:
    """The worker is lost between its pushes to servers of two hosts; the command runs on another host."""
    environment = lean(TRAINING / "together.py", "jax")
    for host in hosts:
        _copy(host, script)
    options = (
        "--backend",
        "jax",
        "--ps",
        "2",
        "--hosts",
        "node1:2,node2:3,node3",
        "--threads-per-worker",
        "1",
    )
    command = ("run", *options, "--run-dir", "run", script, "free", *server.split())
    job = hosts[3].lockstep(*command, **environment)
    assert job.end() == 0, job.err
    lost = 2, 4 + int(server[0])
    assert all(f"worker {worker} was killed by SIGKILL" in job.err for worker in lost)
    # A lost process may have written nothing.
    logs = [hosts[3].work / "run" / f"worker-{worker}.log" for worker in range(6) if worker not in lost]
    assert len({_digest(log.read_text()) for log in logs}) == 1
    again = hosts[3].lockstep("rerun", "run", "--run-dir", "again", **environment)
    assert again.end() == 0, again.err
    assert "the models at the end are equal to the last bit" in again.out


@pytest.mark.slow
@pytest.mark.parametrize("point", ["within", "fit"])
def test_a_worker_of_a_custom_loop_is_replaced_on_several_hosts(
    hosts: Sequence[Host], lean: Callable[..., dict[str, str]], tmp_path: Path, point: str
) -> None:
    environment = lean(TRAINING / "together.py", "jax")
    for host in hosts:
        _copy(host, "replacing.py")
    options = (
        "--backend",
        "jax",
        "--ps",
        "2",
        "--hosts",
        "node1:2,node2:3,node3",
        "--threads-per-worker",
        "1",
    )
    command = ("run", *options, "--run-dir", "run", "replacing.py", point, str(tmp_path))
    job = hosts[3].lockstep(*command, **environment)
    assert job.end() == 0, job.err
    assert "worker 6 replaces worker 2" in job.err
    logs = [hosts[3].work / "run" / f"worker-{worker}.log" for worker in (0, 1, 3, 4, 5, 6)]
    assert len({_digest(log.read_text()) for log in logs}) == 1
    again = hosts[3].lockstep("rerun", "run", "--run-dir", "again", **environment)
    assert again.end() == 0, again.err
    assert "the models at the end are equal to the last bit" in again.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "lost", "status", "said"),
    [
        (1, 1, 0, "lost workers 2 and 3; others start when a host joins"),
        (1, 2, 1, "the job cannot continue without worker 4"),
        (2, 2, 0, "its standby continues with its weights"),
        (3, 2, 0, "its standby continues with its weights"),
        (4, 2, 1, "lost workers 3, 4, 5 and 6; a lost parameter server is not replaced"),
    ],
)
def test_the_loss_of_a_host(
    hosts: Sequence[Host],
    lean: Callable[..., dict[str, str]],
    servers: int,
    lost: int,
    status: int,
    said: str,
) -> None:
    """The others continue, unless the lost host had the chief, or a server and its standby."""
    for host in hosts:
        _copy(host, "serving.py")
    shape = "node1:2,node2:1,node3:4" if servers == 4 else "node1:2,node2:2,node3"
    options = ("--backend", "jax", "--ps", str(servers), "--hosts", shape, "--threads-per-worker", "1")
    command = ("run", *options, "--run-dir", "run", "serving.py", "long", "60")
    job = hosts[0].lockstep(*command, **lean(TRAINING / "together.py", "jax"))
    job.wait_until(lambda: job.out.count("epoch") > 5)
    hosts[lost].cut()
    assert (job.end() != 0) == status, job.err
    assert said in job.err
    hosts[lost].reconnect()


@pytest.mark.slow
def test_rows_on_servers_of_several_hosts(hosts: Sequence[Host], lean: Callable[..., dict[str, str]]) -> None:
    """Validations, evaluations and callbacks read rows from other hosts; a worker and a server are lost."""
    environment = lean(TRAINING / "together.py", "jax")
    for host in hosts:
        _copy(host, "rows_on_servers.py")
    options = "--backend jax --ps 2 --hosts node1:2,node2:3,node3 --threads-per-worker 1 --run-dir run"
    script = ["rows_on_servers.py", "free", "0", "fit-1", "read-rows", "5", "received"]
    job = hosts[3].lockstep("run", *options.split(), *script, **environment)
    assert job.end() == 0, job.err
    for worker in (2, 4):
        assert f"worker {worker} was killed by SIGKILL" in job.err
    logs = [hosts[3].work / "run" / f"worker-{worker}.log" for worker in (0, 1, 3, 5)]
    assert len({_digest(log.read_text()) for log in logs}) == 1
    again = hosts[3].lockstep("rerun", "run", "--run-dir", "again", **environment)
    assert again.end() == 0, again.err
    assert "the models at the end are equal to the last bit" in again.out


@pytest.mark.slow
def test_workers_on_other_hosts_replace_lost_ones(
    hosts: Sequence[Host], lean: Callable[..., dict[str, str]]
) -> None:
    environment = lean(TRAINING / "together.py", "jax")
    for host in hosts:
        _copy(host, "serving.py")
    options = "--backend jax --ps 2 --hosts node1:1,node2:3,node3:2 --threads-per-worker 1 --run-dir run"
    job = hosts[3].lockstep("run", *options.split(), "serving.py", "replaced", "last", **environment)
    assert job.end() == 0, job.err
    for worker, replaced in ((6, 2), (7, 6)):
        assert f"fit 2: worker {worker} replaces worker {replaced}" in job.err
    logs = [hosts[3].work / "run" / f"worker-{worker}.log" for worker in (0, 1, 3, 4, 5, 7)]
    assert len({_digest(log.read_text()) for log in logs}) == 1
    shutil.copy(hosts[0].work / "last", hosts[3].work)
    again = hosts[3].lockstep("rerun", "run", "--run-dir", "again", **environment)
    assert again.end() == 0, again.err
    assert "the models at the end are equal to the last bit" in again.out


@pytest.mark.slow
def test_hosts_join_a_job_with_parameter_servers(
    nodes: Sequence[Host], lean: Callable[..., dict[str, str]]
) -> None:
    environment = {**lean(TRAINING / "together.py", "jax"), "LOCKSTEP_KEY_FILE": "job.key"}
    for host in nodes:
        _copy(host, "serving.py")
    address = f"{nodes[0].address}:7000"
    options = f"--backend jax --ps 2 -n 2 --workers-here 2 --threads-per-worker 1 --listen {address}"
    job = nodes[0].lockstep(
        "run", *options.split(), "--run-dir", "run", "serving.py", "long", "10", **environment
    )
    agents = [
        host.lockstep("agent", "--join", address, "-n", count, **environment)
        for host, count in zip(nodes[1:3], ("1", "2"), strict=True)
    ]
    assert [one.end() for one in (job, *agents)] == [0, 0, 0], job.err
    logs = [(nodes[0].work / "run" / f"worker-{worker}.log").read_text() for worker in range(5)]
    assert len({_digest(log) for log in logs}) == 1


@pytest.mark.slow
def test_the_tasks_of_tf_config_are_a_chief_workers_and_servers(
    nodes: Sequence[Host], lean: Callable[..., dict[str, str]]
) -> None:
    """Whatever the order in which they start: the last ones here are the first to start."""
    environment = {**lean(TRAINING / "together.py", "jax"), "LOCKSTEP_KEY_FILE": "job.key"}
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
    cluster = {
        "chief": ["node1:2222"],
        "worker": ["node2:2222", "node3:2222"],
        "ps": ["node4:2222", "node5:2222"],
    }
    command = "run --tf-config --ps 2 --backend jax --threads-per-worker 1 --run-dir run serving.py long 5"
    started = []
    for node, (kind, index) in reversed(list(zip(nodes, tasks, strict=True))):
        _copy(node, "serving.py")
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        started.append(node.lockstep(*command.split(), **environment, TF_CONFIG=config))
    assert [one.end() for one in started] == [0] * 5, started[-1].err
    logs = [(nodes[0].work / "run" / f"worker-{worker}.log").read_text() for worker in range(5)]
    assert len({_digest(log) for log in logs}) == 1
    first = json.loads((nodes[0].work / "run" / "events.jsonl").read_text().splitlines()[0])
    assert first["hosts"] == [[f"10.119.0.{number}", 1] for number in range(1, 6)]


def _copy(host: Host, script: str) -> None:
    for name in (script, "losing.py", "loop_gradients.py"):
        shutil.copy(TRAINING / name, host.work)


def _digest(log: str) -> str:
    *_, last = (line for line in log.splitlines() if line.startswith("digest "))
    return last
