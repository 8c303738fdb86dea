"""Jobs that hosts join without ssh: `lockstep run --listen` and `--tf-config`, `lockstep agent --join`."""

import json
import signal
from collections.abc import Callable, Sequence

import chaos_steps
import pytest
from host_network import Host, Running
from stepping_job import digest

from lockstep.protocol.host import LEFT_OUT
from lockstep.transport.keys import JobKey

STEPS = 12


def ended(*running: Running) -> tuple[int, ...]:
    return tuple(one.end() for one in running)


Begin = Callable[..., tuple[Running, ...]]


@pytest.fixture
def begin(nodes: Sequence[Host], keyed: dict[str, str]) -> Begin:
    """Begin a job on node1 that other hosts join: options of the job, then those of each agent."""

    def run(
        options: str, *agents: str, steps: int = STEPS, faults: Sequence[str] = ()
    ) -> tuple[Running, ...]:
        begins = (
            f"run --backend jax --listen {nodes[0].address}:7000 --run-dir run {options} stepping.py {steps}"
        )
        started = [nodes[0].lockstep(*begins.split(), *faults, **keyed)]
        for host, agent in zip(nodes[1:], agents, strict=False):
            command = f"agent --join {nodes[0].name}:7000 {agent}"
            started.append(host.lockstep(*command.split(), **keyed))
        return tuple(started)

    return run


def test_hosts_join_a_job(nodes: Sequence[Host], begin: Begin) -> None:
    """One worker here, two on node2, and one of the two that node3 offers; a lost one is replaced there."""
    faults = "0:3:after apply:crawl", "2:3:after apply:SIGKILL"
    job, *agents = begin("-n 4 --replicas 5 --min-workers 4", "-n 2", "-n 2", faults=faults)
    job.wait_until(lambda: "worker 4 joined" in job.err)
    (nodes[0].work / "fast").touch()
    assert ended(job, *agents) == (0, 0, 0), (job.err, [agent.err for agent in agents])
    logs = [(nodes[0].work / f"run/worker-{worker}.log").read_text() for worker in (0, 1, 3, 4)]
    assert {digest(log) for log in logs} == {chaos_steps.alone(0, 5, STEPS)[-1]}
    assert "4 workers on 3 hosts" in job.err
    assert all("worker 4 joined (4 workers)" in one.err for one in (job, *agents))
    # The agent that joins last gets one worker less than it offers.
    for room in ("2 workers", "1 worker"):
        begun = f"joined node1:7000, with room for {room}: 4 workers on 3 hosts, 5 replicas ("
        assert any(begun in agent.err for agent in agents)
    assert " each (elsewhere, give --threads-per-worker " in job.err


@pytest.mark.slow
def test_waits_and_latecomers_are_named(nodes: Sequence[Host], begin: Begin, keyed: dict[str, str]) -> None:
    early = nodes[1].lockstep("agent", "--join", "node1:7000", "--plain", **keyed)
    early.wait_until(lambda: "must let TCP connections to port 7000 through" in early.err)
    assert "waiting for the coordinator, " in early.err
    (job,) = begin("-n 3 --plain", faults=["0:3:after apply:hold"])
    early.wait_until(
        lambda: "joined node1:7000; waiting for other hosts to join with 1 more worker" in early.err
    )
    job.wait_until(lambda: "with 1 more worker, " in job.err)
    assert f"lockstep agent --join {nodes[0].address}:7000 --plain [-n WORKERS]" in job.err

    def refused(host: Host, *options: str, **variables: str) -> str:
        agent = host.lockstep("agent", "--join", "node1:7000", *options, **keyed | variables)
        assert agent.end() in (2, LEFT_OUT)
        return agent.err.splitlines()[-1]

    assert "already has an agent on host 10.119.0.2: start one agent on" in refused(nodes[1], "--plain")
    assert "--plain" in refused(nodes[2])
    assert "--plain for `lockstep run` and `lockstep agent`, or for neither" in job.err
    JobKey.generate().write(nodes[2].work / "other.key")
    other = refused(nodes[2], "--plain", LOCKSTEP_KEY_FILE="other.key")
    assert "it has another key or another version of Lockstep" in other
    assert "make one with lockstep key FILE" in refused(nodes[2], LOCKSTEP_KEY_FILE="")
    last = nodes[2].lockstep("agent", "--join", "node1:7000", "--plain", **keyed)
    job.wait_until((nodes[0].work / "held-3").exists)
    late = nodes[3].lockstep("agent", "--join", "node1:7000", "--plain", **keyed)
    job.wait_until(lambda: "host 10.119.0.4 has joined, with room for 1 worker" in job.err)
    (nodes[0].work / "go-3").touch()
    assert ended(job, early, last, late) == (0, 0, 0, 0), job.err
    gone = refused(nodes[3], "--plain", "--timeout", "1")
    assert "the coordinator at node1:7000 did not answer in 1 s: node1:7000 refuses connections" in gone


def test_a_host_takes_the_place_of_a_lost_one(
    nodes: Sequence[Host], begin: Begin, keyed: dict[str, str]
) -> None:
    """The job continues without a host that is lost, and with one that joins while it runs."""
    job, agent = begin("-n 2 --replicas 4", "", steps=120, faults=["0:3:after apply:crawl"])

    def steps(worker: int) -> int:
        log = nodes[0].work / f"run/worker-{worker}.log"
        return log.read_text().count("made ") if log.exists() else 0

    job.wait_until(lambda: steps(1) > 3)
    agent.process.kill()
    job.wait_until(lambda: "lost worker 1; others start when a host joins; worker 0 continues" in job.err)
    later = nodes[2].lockstep("agent", "--join", "node1:7000", "-n", "2", **keyed)
    (nodes[3].work / "stepping.py").write_text("")
    other = nodes[3].lockstep("agent", "--join", "node1:7000", **keyed)
    job.wait_until(lambda: steps(2) > 1)
    assert other.end() == LEFT_OUT
    assert "stepping.py differs between 10.119.0.1 and 10.119.0.4" in other.err
    assert nodes[0].lockstep("scale", "run", "3").end() == 0
    job.wait_until(lambda: steps(3) > 1)
    for node in nodes:
        (node.work / "fast").touch()
    assert ended(job, later) == (0, 0), job.err
    logs = [(nodes[0].work / f"run/worker-{worker}.log").read_text() for worker in (0, 2, 3)]
    assert {digest(log) for log in logs} == {chaos_steps.alone(0, 4, 120)[-1]}
    assert agent.end() == -signal.SIGKILL


@pytest.mark.ci
def test_hosts_that_stand_still_while_the_job_gathers_join_again(
    nodes: Sequence[Host], begin: Begin, keyed: dict[str, str]
) -> None:
    """So do those whose coordinator is killed, once its command runs again."""
    job, agent = begin("-n 3", "")
    waits = "joined node1:7000; waiting for other hosts to join with 1 more worker"
    agent.wait_until(lambda: waits in agent.err)
    nodes[0].signal_all(signal.SIGSTOP)
    agent.wait_until(lambda: "silent for 5 s, and this host joins it again" in agent.err)
    agent.wait_until(lambda: "silent for 5 s; this host waits for up to 600 s" in agent.err)
    nodes[0].signal_all(signal.SIGCONT)
    agent.wait_until(lambda: agent.err.count(waits) == 2)
    left = job.err.count("the agent of 10.119.0.2 has left")
    nodes[1].signal_all(signal.SIGSTOP)
    job.wait_until(lambda: job.err.count("the agent of 10.119.0.2 has left") > left)
    nodes[1].signal_all(signal.SIGCONT)
    agent.wait_until(lambda: agent.err.count(waits) == 3)
    nodes[0].signal_all(signal.SIGKILL)
    assert job.end() == -signal.SIGKILL
    agent.wait_until(lambda: "waiting for the coordinator, " in agent.err)
    (job,) = begin("-n 3")
    last = nodes[2].lockstep("agent", "--join", "node1:7000", **keyed)
    (nodes[0].work / "fast").touch()
    assert ended(job, agent, last) == (0, 0, 0), (job.err, agent.err)
    logs = [(nodes[0].work / f"run/worker-{worker}.log").read_text() for worker in range(3)]
    assert {digest(log) for log in logs} == {chaos_steps.alone(0, 3, STEPS)[-1]}


def test_a_stop_while_the_job_gathers_reaches_all_hosts(nodes: Sequence[Host], begin: Begin) -> None:
    job, agent = begin("-n 3", "")
    agent.wait_until(lambda: "waiting for other hosts to join with 1 more worker" in agent.err)
    job.process.send_signal(signal.SIGTERM)
    assert ended(job, agent) == (143, LEFT_OUT), (job.err, agent.err)
    assert agent.err.splitlines()[-1].endswith("the job was stopped before it began")


def test_both_ends_end_together(nodes: Sequence[Host], begin: Begin) -> None:
    """The fixture checks that no process is left."""
    job, agent = begin("-n 2", "", faults=["0:3:after apply:hold"])
    job.wait_until((nodes[0].work / "held-3").exists)
    job.process.send_signal(signal.SIGTERM)
    assert ended(job, agent) == (143, 143), (job.err, agent.err)


def test_a_script_that_fails_has_one_status(nodes: Sequence[Host], begin: Begin) -> None:
    for host in nodes[:2]:
        (host.work / "stepping.py").write_text("import sys\nsys.exit(7)\n")
    job, agent = begin("-n 2", "")
    assert ended(job, agent) == (7, 7)
    (why,) = [line for line in job.err.splitlines() if "exited with status 7" in line]
    assert why.endswith((" (worker 0 on 10.119.0.1)", " (worker 1 on 10.119.0.2)"))
    assert why in agent.err.splitlines()
    assert "the job ended with exit status 7; the host of its coordinator at node1:7000 has" in agent.err
    (nodes[1].work / "stepping.py").write_text("")
    job, agent = begin("-n 2", "")
    assert ended(job, agent) == (2, 2)
    for one in (job, agent):
        assert "stepping.py differs between 10.119.0.1 and 10.119.0.2; copy the same file" in one.err


def test_the_tasks_of_tf_config(nodes: Sequence[Host], keyed: dict[str, str]) -> None:
    """As in the pods of a TFJob: the chief coordinates, each pod shows the output of its worker."""
    cluster = {"chief": ["node1:2222"], "worker": ["node2:2222", "node3:2222"], "ps": ["node4:2222"]}
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    started = []
    for host, (kind, index) in zip(nodes, tasks, strict=False):
        config = json.dumps(
            {"cluster": cluster, "task": {"type": kind, "index": index}, "environment": "cloud"}
        )
        command = f"run --tf-config --backend jax --run-dir run stepping.py {STEPS}"
        started.append(host.lockstep(*command.split(), **keyed, TF_CONFIG=config))
    assert ended(*started) == (0, 0, 0, 0), [one.err for one in started]
    wanted = chaos_steps.alone(0, 3, STEPS)[-1]
    assert [digest(one.out) for one in started[:3]] == [wanted] * 3
    assert [digest((nodes[0].work / f"run/worker-{n}.log").read_text()) for n in range(3)] == [wanted] * 3
    assert "a parameter server has nothing to do" in started[3].err
    (nodes[4].work / "alone.py").write_text("import os\nprint('alone', os.environ['TF_CONFIG'])\n")
    task = {"cluster": cluster, "task": {"type": "evaluator", "index": 0}}
    evaluator = nodes[4].lockstep("run", "--tf-config", "alone.py", **keyed, TF_CONFIG=json.dumps(task))
    assert evaluator.end() == 0
    assert evaluator.out == f"alone {json.dumps(task)}\n"


def test_a_pod_that_restarts(nodes: Sequence[Host], keyed: dict[str, str]) -> None:
    """Its command joins the job again."""

    def pod(index: int, *faults: str) -> Running:
        cluster = {"worker": ["node1:2222", "node2:2222"]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        command = "run --tf-config --backend jax --run-dir run stepping.py 100"
        return nodes[index].lockstep(*command.split(), *faults, **keyed, TF_CONFIG=config)

    first, second = pod(0, "0:3:after apply:crawl"), pod(1, "0:3:after apply:crawl")
    second.wait_until(lambda: "made 4" in second.out)
    nodes[1].signal_all(signal.SIGKILL)
    first.wait_until(lambda: "worker 0 continues" in first.err)
    again = pod(1, "0:3:after apply:crawl")
    again.wait_until(lambda: "made " in again.out)
    (nodes[0].work / "fast").touch()
    assert ended(first, again) == (0, 0), first.err
    assert [digest(one.out) for one in (first, again)] == [chaos_steps.alone(0, 2, 100)[-1]] * 2


@pytest.mark.slow
def test_addresses(nodes: Sequence[Host], lean_environment: dict[str, str], keyed: dict[str, str]) -> None:
    """Loopback needs no key, and several agents may be there; other addresses are checked in one line."""
    node = nodes[0]

    def at(address: str, folder: str = "run") -> list[str]:
        job = f"run --backend jax --run-dir {folder} --listen {address} -n 3 stepping.py {STEPS}"
        return job.split()

    refusals = [
        (
            node.lockstep(*at(node.address, "run1"), **lean_environment),
            "so the job needs a key: make one with lockstep",
        ),
        (node.lockstep(*at("0.0.0.0", "run2"), **keyed), "is not an address that other hosts can connect to"),
        (node.lockstep(*at("7000", "run6"), **keyed), "7000 is a port without an address; expected ADDR"),
        (node.lockstep(*at("node2:7000", "run3"), **keyed), "node2:7000 is not an address of this host"),
        (node.lockstep(*at("node1:70000", "run4"), **keyed), "the port of node1:70000 is more than 65535"),
        (node.lockstep("run", "--listen", "node1", "stepping.py", **keyed), "give -n too"),
        (
            node.lockstep("run", "--tf-config", "stepping.py", **keyed),
            "--tf-config needs the variable TF_CONFIG",
        ),
        (node.lockstep("agent", **keyed), "give --join HOST:PORT"),
    ]
    for command, text in refusals:
        assert command.end() == 2
        assert text in command.err.splitlines()[-1]
    assert list(node.work.glob("run*")) == []
    job = node.lockstep(*at("localhost"), **lean_environment)
    job.wait_until(lambda: "run there: lockstep agent --join 127.0.0.1:" in job.err)
    assert "(only processes of this host reach 127.0.0.1; for other hosts, give --listen another" in job.err
    address = job.err.split("--join ")[1].split()[0]
    agents = [node.lockstep("agent", "--join", address, **lean_environment) for _ in range(2)]
    assert ended(job, *agents) == (0, 0, 0), job.err
    logs = [(node.work / f"run/worker-{worker}.log").read_text() for worker in range(3)]
    assert {digest(log) for log in logs} == {chaos_steps.alone(0, 3, STEPS)[-1]}
