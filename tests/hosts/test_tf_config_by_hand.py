"""Workers that a user starts by hand on several hosts, with `TF_CONFIG` and without a launcher."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chaos_steps
import pytest
from host_network import Host, Running
from stepping_job import CHAOS, HERE

from lockstep.system.environment import usable_cores
from lockstep.transport.keys import JobKey

FILES = (
    HERE / "stepping.py",
    HERE / "stepping_by_hand.py",
    CHAOS / "chaos_steps.py",
    CHAOS / "chaos_faults.py",
)
STEPS = 100
"""So many that a worker which asks to join at step 6 joins before the end."""
CLUSTER = {"worker": ["node1:2222", "node2:2222", "node2:2223"]}

Start = Callable[..., Running]


@pytest.fixture
def start(hosts: Sequence[Host], lean_environment: dict[str, str]) -> Start:
    """Start a worker on a host, by its number; all hosts have the same key file and the same program."""
    key = JobKey.generate()
    for host in hosts:
        key.write(host.work / "job.key")
        for file in FILES:
            shutil.copy(file, host.work)

    def run(node: int, index: int, *faults: str, cluster: Any = CLUSTER, **variables: str) -> Running:
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        command = (sys.executable, "stepping_by_hand.py", str(STEPS), *faults)
        keyed = {"LOCKSTEP_KEY_FILE": "job.key", "KERAS_BACKEND": "jax", **lean_environment, **variables}
        return hosts[node - 1].start(*command, **keyed, TF_CONFIG=config)

    return run


def digest(running: Running) -> str:
    (line,) = [line for line in running.out.splitlines() if line.startswith("digest ")]
    return line.removeprefix("digest ")


def test_workers_on_two_hosts(start: Start, hosts: Sequence[Host]) -> None:
    """Waits name tasks and addresses; a killed worker that is started again joins on its host."""
    wanted = chaos_steps.alone(0, 3, STEPS)[-1]
    second = start(2, 1)
    second.wait_until(
        lambda: "worker 1 waits for worker 0 (node1:2222): node1:2222 refuses conn" in second.err
    )
    assert "must let TCP connections to port 2222 through" in second.err
    first = start(1, 0, "0:6:after apply:hold", "0:7:after apply:crawl")
    waits = "worker 0 waits for worker 2 (node2:2223)"
    first.wait_until(lambda: waits in first.err)
    second.wait_until(lambda: waits.replace("worker 0", "worker 1", 1) in second.err)
    third = start(2, 2, "2:3:after apply:SIGKILL")
    assert third.end() == -signal.SIGKILL, third.err
    lost = "worker 2 ended (exit status unknown); start it again and it joins; workers 0 and 1 continue"
    for one in (first, second):
        one.wait_until(lambda one=one: lost in one.err)  # type: ignore[misc]
    again = start(2, 2)
    again.wait_until(lambda: "the job is running; worker 2 restarts the script as worker 3" in again.err)
    (events,) = hosts[0].work.glob("runs/*/events.jsonl")
    first.wait_until(lambda: '"event":"asks","worker":3' in events.read_text())
    (hosts[0].work / "go-6").touch()
    first.wait_until(lambda: "worker 3 joined" in first.err)
    (hosts[0].work / "fast").touch()
    for one in (first, second, again):
        assert one.end() == 0, one.err
        assert digest(one) == wanted
        # The last line of the job ends every terminal, on the other host, too.
        last = one.err.splitlines()[-1]
        assert last.startswith("lockstep: finished in ")
        assert last.endswith("7 steps on 3 workers (1 lost, 1 joined); digest ab of model 'm'")
    assert "lockstep: 3 workers on 2 hosts" in first.err
    (line,) = [line for line in second.err.splitlines() if "3 workers on 2 hosts" in line]
    assert line.endswith(" on node1")


def test_a_lost_host_whose_tasks_are_started_again(start: Start, hosts: Sequence[Host]) -> None:
    """The others continue without it, and its tasks join again, with the state over the network."""
    first = start(1, 0, "0:3:after apply:crawl")
    lost = [start(2, index) for index in (1, 2)]
    lost[0].wait_until(lambda: "made 4" in lost[0].out)
    hosts[1].signal_all(signal.SIGKILL)
    # Its processes end one after the other, so this may take two views.
    first.wait_until(lambda: "start it again and it joins; worker 0 continues" in first.err)
    again = [start(2, index) for index in (1, 2)]
    for one in again:
        one.wait_until(lambda one=one: "made " in one.out)  # type: ignore[misc]
    (hosts[0].work / "fast").touch()
    for one in (first, *again):
        assert one.end() == 0, one.err
        assert digest(one) == chaos_steps.alone(0, 3, STEPS)[-1]


def test_refusals(start: Start, hosts: Sequence[Host]) -> None:
    """What does not fit together is named on the host that is wrong; the others are not disturbed."""
    first = start(1, 0)
    first.wait_until(lambda: "no process of its host has connected to node1:2222 yet" in first.err)

    def refused(node: int, index: int, **options: Any) -> str:
        running = start(node, index, **options)
        assert running.end() == 1
        return running.err.splitlines()[-1]

    assert "worker 1's address node2:2222 is not one of this host" in refused(1, 1)
    assert "is on another host, so the job needs a key: make one with" in refused(2, 1, LOCKSTEP_KEY_FILE="")
    (hosts[1].work / "job.key").chmod(0o644)
    assert "(mode 644); run chmod 600" in refused(2, 1)
    (hosts[1].work / "job.key").chmod(0o600)
    other = {"worker": ["node1:2222", "node2:2222"]}
    assert "worker 1 and worker 0 have different clusters: 2 tasks (" in refused(2, 1, cluster=other)
    why = f"; {hosts[1].address} was refused: worker 1 and worker 0 have different clusters"
    first.wait_until(lambda: why in first.err)
    assert "runs Keras on torch, but worker 0 on jax" in refused(
        2, 1, KERAS_BACKEND="torch", HIDDEN_PACKAGES=""
    )
    assert "process" in refused(1, 0)
    local = {"worker": ["localhost:2222", "node2:2222"]}
    assert "which is 127.0.0.1:2222 here, cannot be reached from other hosts" in refused(1, 0, cluster=local)
    unknown = {"worker": ["node1:2222", "nodeX:2222"]}
    assert "the host 'nodeX' of worker 1's address nodeX:2222 cannot be resolved" in refused(
        1, 0, cluster=unknown
    )
    (hosts[1].work / "stepping_by_hand.py").write_text(
        "from lockstep.rendezvous.take_part import take_part\ntake_part()\n"
    )
    others = [start(2, index) for index in (1, 2)]
    for one in (first, *others):
        assert one.end() == 1
        assert (
            "stepping_by_hand.py differs between node1 and node2; copy the same file to all hosts" in one.err
        )


def test_lost_coordinators(start: Start, hosts: Sequence[Host]) -> None:
    """Another one takes over; if that of the first task is lost with it, the task is started again."""
    crawls = [f"{worker}:3:after apply:crawl" for worker in (0, 1)]
    workers = [start(1, 0, *crawls), start(2, 1, *crawls), start(2, 2, *crawls)]
    workers[0].wait_until(lambda: "made 4" in workers[0].out)
    (coordinator,) = hosts[0].matching("hosts.coordinator_process")
    os.kill(coordinator, signal.SIGKILL)
    for one in workers:
        one.wait_until(lambda one=one: "another one takes over, and training continues" in one.err)  # type: ignore[misc]
    hosts[0].signal_all(signal.SIGKILL)
    workers[1].wait_until(
        lambda: "so training waits for the coordinator at node1:2222: run" in workers[1].err
    )
    again = start(1, 0)
    again.wait_until(lambda: "made " in again.out)
    (hosts[1].work / "fast").touch()
    assert "taking over a job of 2 hosts whose coordinator was lost; 1 of them continued" in again.err
    assert "lost worker 0; start it again and it joins; workers 1 and 2 continue" in workers[1].err
    assert "the job is running; worker 0 restarts the script as worker 3" in again.err
    for one in (*workers[1:], again):
        assert one.end() == 0, one.err
        assert digest(one) == chaos_steps.alone(0, 3, STEPS)[-1]


def test_a_job_that_is_given_up(start: Start, hosts: Sequence[Host]) -> None:
    """Without a coordinator and without a process, nothing remains on a host: the fixture checks that."""
    workers = [start(1, 0, "0:3:after apply:hold"), start(2, 1), start(2, 2)]
    workers[0].wait_until((hosts[0].work / "held-3").exists)
    hosts[0].signal_all(signal.SIGKILL)
    for one in workers[1:]:
        one.wait_until(lambda one=one: "so training waits for the coordinator" in one.err)  # type: ignore[misc]
        one.process.kill()


@pytest.mark.parametrize("node", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_wait_for_other_hosts(
    start: Start, hosts: Sequence[Host], node: int, number: int
) -> None:
    """Node 1 coordinates the job; the fixture checks that no process is left."""
    waiting = start(node, node - 1)
    waiting.wait_until(lambda: f"worker {node - 1} waits for worker" in waiting.err)
    (process,) = hosts[node - 1].matching("rendezvous.coordinator_main")
    os.kill(process, number)
    assert waiting.end() == 1
    assert waiting.err.splitlines()[-1].endswith("the job was stopped before it began")


EXAMPLES = HERE.parents[1] / "examples"
THREADS = str(max(1, usable_cores()))
"""Of a replica: on each host, one replica has all cores."""


def printed(text: str, label: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(label)]
    return line


@pytest.mark.slow
def test_the_example_with_a_metric_trains_on_two_hosts(
    start: Start, hosts: Sequence[Host], lean: Callable[..., dict[str, str]]
) -> None:
    """On TensorFlow, such a program with its own strategy hung on two hosts: TensorFlow's issue 33531."""
    script = EXAMPLES / "two_hosts.py"
    variables = {**lean(script, "tensorflow"), "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Those for JAX end TensorFlow 2.19, which does not know all of them.
    variables["XLA_FLAGS"] = ""
    cluster = {"worker": ["node1:2222", "node2:2222"]}
    for host in hosts:
        shutil.copy(script, host.work / "stepping_by_hand.py")
    workers = [start(node, node - 1, cluster=cluster, **variables) for node in (1, 2)]
    command = "run -n 2 --backend tensorflow --threads-per-worker"
    alone = hosts[2].lockstep(*command.split(), THREADS, "stepping_by_hand.py", **variables)
    for one in (*workers, alone):
        assert one.end() == 0, one.err
        assert float(printed(one.out, "accuracy: ").split()[1]) > 0.9
    assert len({printed(one.out, "digest: ") for one in (*workers, alone)}) == 1


@pytest.mark.slow
def test_the_unchanged_tutorial_trains_in_two_pods(
    hosts: Sequence[Host],
    start: Start,
    environment: dict[str, str],
    read_tensorboard: Callable[[Path], dict[str, list[tuple[int, Any]]]],
) -> None:
    """A program for `tf.distribute` alone, with the bits of two workers on one machine."""
    pytest.importorskip("tensorflow")
    short = {"KERAS_MAX_EPOCHS": "1", "KERAS_MAX_STEPS_PER_EPOCH": "2"}
    stand_in = str(HERE.parent / "training" / "stand_in")
    variables = {**short, "PYTHONPATH": stand_in, "LOCKSTEP_KEY_FILE": "job.key", "TF_CPP_MIN_LOG_LEVEL": "3"}
    options = f"--tf-distribute --backend jax --run-dir run --threads-per-worker {THREADS}".split()
    options += ["--tensorboard", "board"]
    for host in hosts[:3]:
        for file in ("main.py", "mnist.py"):
            shutil.copy(EXAMPLES / "tutorial" / file, host.work)
    cluster = {"worker": ["node1:2222", "node2:2222"]}
    pods = [
        host.lockstep(
            "run",
            "--tf-config",
            *options,
            "main.py",
            **variables,
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
        )
        for index, host in enumerate(hosts[:2])
    ]
    assert [pod.end() for pod in pods] == [0, 0], [pod.err for pod in pods]
    alone = hosts[2].lockstep("run", "-n", "2", *options, "main.py", **variables)
    assert alone.end() == 0, alone.err
    assert len({printed(one.out, "digest: ") for one in (*pods, alone)}) == 1
    losses = [read_tensorboard(host.work / "board" / "train")["epoch_loss"] for host in (hosts[0], hosts[2])]
    assert losses[0] == losses[1] != []
