"""Jobs with `--standby`: the first host is lost for good, or seems to be, and the bits stay."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import chaos_steps
import pytest
from host_network import Host, Running
from stepping_job import HERE, digest
from test_joining import ended
from test_losses import wait_until
from test_slurm import variables as of_slurm

from lockstep.checkpoint.object_store import is_url, name_for
from lockstep.protocol.host import LEFT_OUT

STEPS = 80
PACED = [f"{worker}:0:after apply:crawl" for worker in range(6)]
STANDBY = "the coordinator at 10.119.0.2:7001 has continued this job, so this one ends"


class StandbyJob:
    """A job on node1, node2 (the standby) and node3, with one worker each and a store on node5.

    Attributes:
        first: the command on node1.
        agents: those on node2 and node3.
        run_dir: the option of the job.
        run: the run folder, in the folder of a host.
    """

    def __init__(
        self, nodes: Sequence[Host], variables: dict[str, str], by: str = "--listen", run_dir: str = "run"
    ) -> None:
        self.nodes, self.by, store = nodes, by, nodes[4]
        self.run_dir = run_dir
        self.run = f"runs/{name_for(run_dir)}" if is_url(run_dir) else run_dir
        shutil.copy(HERE / "small_store.py", store.work)
        server = store.start(sys.executable, "small_store.py", "9000")
        server.wait_until(lambda: store.processes() and 9000 in store.listening())
        self.variables = {
            **variables,
            "AWS_ENDPOINT_URL": f"http://{store.address}:9000",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        self.first, *self.agents = [self.start(index) for index in range(1 if by == "--hosts" else 3)]
        self.first.wait_until(lambda: self.steps(nodes[0], 2) > 5)

    def start(self, index: int) -> Running:
        """Start the command of a host."""
        first, standby = self.nodes[0].address, f"--standby {self.nodes[1].address}:7001"
        options = f"--backend jax --replicas 5 --checkpoint s3://bucket/job --run-dir {self.run_dir}"
        options += "" if self.by == "--slurm" else f" {standby}"
        program, variables = ("stepping.py", str(STEPS), *PACED), self.variables
        if self.by == "--hosts":
            given = (f"--env {name}" for name in self.variables if name.startswith("AWS_"))
            words = f"run --hosts node1,node2,node3 {options} {' '.join(given)}"
        elif self.by == "--slurm":
            words, variables = f"run --slurm {options}", {**variables, **of_slurm(index, 3)}
        elif self.by == "--tf-config":
            tasks = {"worker": [f"{node.name}:7000" for node in self.nodes[:3]]}
            place = {"cluster": tasks, "task": {"type": "worker", "index": index}}
            words, variables = f"run --tf-config {options}", {**variables, "TF_CONFIG": json.dumps(place)}
        elif index:
            words, program = f"agent --join {first}:7000", ()
        else:
            words = f"run --listen {first}:7000 -n 3 {options}"
        return self.nodes[index].lockstep(*words.split(), *program, **variables)

    def steps(self, host: Host, worker: int) -> int:
        """The steps that a worker has made, as the run folder of a host shows it."""
        path = host.work / self.run / f"worker-{worker}.log"
        return path.read_text().count("made ") if path.exists() else 0

    def await_takeover(self) -> None:
        """Wait until training goes on on the other hosts."""
        standby = self.agents[0]
        standby.wait_until(lambda: "taking over a job of " in standby.err)
        standby.wait_until(lambda: any(self.steps(self.nodes[1], worker) > 2 for worker in range(6)))

    def await_continuation(self, worker: int) -> None:
        """Wait until a worker trains on the standby of a job over ssh, which has a run folder of its own."""
        self.run, host = "run-standby", self.nodes[1]
        assert wait_until(lambda: self.steps(host, worker) > 2 or not host.matching("lockstep agent"), 600.0)

    def end_ssh(self) -> None:
        """End the servers of ssh, which do not notice for hours that their client is gone."""
        for node in self.nodes[:3]:
            for pid in node.matching("sshd: "):
                os.kill(pid, signal.SIGKILL)
            node.remove_abandoned()

    def finish(self, folder: Path | None = None, url: str = "", *, agents: int = 2) -> None:
        """Let the job end; check the digest of its end, which is that of an undisturbed run.

        Args:
            folder: the last run folder; None for that of the standby.
            url: where it was uploaded to; empty for nowhere.
            agents: the number of agents whose exit status is that of the job; 0 if all run over ssh.
        """
        for host in self.nodes[:3]:
            (host.work / "fast").touch()
        statuses = ended(*self.agents)
        assert statuses == (0,) * agents, [agent.err for agent in self.agents]
        if self.by == "--hosts":
            assert wait_until(lambda: not self.nodes[1].matching("lockstep"), 600.0), self.nodes[
                1
            ].processes()
        folder = folder or self.nodes[1].work / self.run
        logs = [path.read_text() for path in folder.glob("worker-*.log")]
        digests = [digest(log) for log in logs if "\ndigest " in log]
        assert set(digests) == {chaos_steps.alone(0, 5, STEPS)[-1]}
        if url:
            shown = self.nodes[2].lockstep("logs", url, **self.variables)
            assert shown.end() == 0, shown.err
            assert f"digest {digests[0]}" in shown.out
        self.nodes[4].signal_all(signal.SIGKILL)


@contextlib.contextmanager
def standing_still(host: Host) -> Iterator[None]:
    """Stop all processes of a host, and let them continue after the block."""
    stopped = host.processes()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


Begin = Callable[..., StandbyJob]


@pytest.fixture
def begin(nodes: Sequence[Host], keyed: dict[str, str]) -> Begin:
    return lambda by="--listen", run_dir="run": StandbyJob(nodes, keyed, by, run_dir)


def test_the_first_host_is_lost_for_good(begin: Begin, nodes: Sequence[Host]) -> None:
    """Its network goes, and all its processes are killed. Its standby uploads a run folder of its own."""
    job = begin(run_dir="s3://bucket/run")
    nodes[0].cut()
    nodes[0].signal_all(signal.SIGKILL)
    job.await_takeover()
    url = re.search(r"is uploaded to (s3://bucket/run/\S+)", job.agents[0].err)
    assert url is not None
    job.finish(url=url[1])
    nodes[0].remove_abandoned()


def test_the_command_of_hosts_and_its_host_are_lost_for_good(begin: Begin, nodes: Sequence[Host]) -> None:
    """Agents over ssh go to the standby. A host that is lost after that comes back without ssh."""
    job = begin("--hosts")
    nodes[0].cut()
    nodes[0].signal_all(signal.SIGKILL)
    output = nodes[1].work / "run-standby/output.log"
    job.await_continuation(1)
    assert "taking over a job of 3 hosts whose coordinator was lost; 2 of them" in output.read_text()
    nodes[2].signal_all(signal.SIGKILL)
    words = f"agent --join {nodes[1].address}:7001"
    again = nodes[2].lockstep(*words.split(), LOCKSTEP_KEY_FILE="job.key")
    again.wait_until(lambda: job.steps(nodes[1], 3) > 2)
    listed = nodes[1].lockstep("list")
    assert listed.end() == 0
    assert "run-standby" in listed.out
    refused = nodes[3].lockstep(
        *f"run --hosts node2,node3 --standby {nodes[1].address}:7001 --checkpoint s3://bucket/job".split(),
        "stepping.py",
        **job.variables,
    )
    assert refused.end() == 2
    assert f"the job continues at {nodes[1].address}:7001, without this command" in refused.err
    job.agents = [again]
    job.finish(agents=1)
    job.end_ssh()


@pytest.mark.slow
def test_the_command_of_hosts_stands_still(begin: Begin, nodes: Sequence[Host]) -> None:
    """When it wakes up, it changes nothing, and ends by name."""
    job = begin("--hosts")
    with standing_still(nodes[0]):
        job.await_continuation(1)
    assert job.first.end() == LEFT_OUT, job.first.err
    assert STANDBY in job.first.err
    job.finish(agents=0)


@pytest.mark.slow
def test_the_command_of_hosts_that_is_run_again_begins_no_job_beside_that_of_its_standby(
    begin: Begin, nodes: Sequence[Host]
) -> None:
    """It finds no standby at first. Before it begins the job, the standby has taken the old one over."""
    job = begin("--hosts")
    nodes[0].signal_all(signal.SIGKILL)
    again = job.start(0)
    again.wait_until(lambda: "looking for checkpoints in s3://bucket/job" in again.err)
    with standing_still(nodes[0]):
        job.await_continuation(1)
    assert again.end() == 2, again.err
    assert "the job continues at 10.119.0.2:7001, without this command" in again.err
    job.finish(agents=0)
    for node in nodes[:3]:
        node.remove_abandoned()


@pytest.mark.slow
def test_the_command_of_hosts_is_run_again_at_once(begin: Begin, nodes: Sequence[Host]) -> None:
    """It begins the job anew, or the standby continues it: one of them trains, and the other one ends."""
    job = begin("--hosts")
    nodes[0].signal_all(signal.SIGKILL)
    again, standby = job.start(0), nodes[1].work / "run-standby"

    def is_decided() -> bool:
        output = standby / "output.log"
        is_over = output.exists() and "another job has begun with the same --checkpoint" in output.read_text()
        return is_over or again.process.poll() is not None

    assert wait_until(is_decided, 300.0), again.err
    for host in nodes[:3]:
        (host.work / "fast").touch()
    if again.end() == 2:
        assert "the job continues at 10.119.0.2:7001, without this command" in again.err
        job.run = "run-standby"
        job.finish(agents=0)
    else:
        job.agents = [again]
        job.finish(nodes[0].work / "run", agents=1)
    for node in nodes[:3]:
        node.remove_abandoned()


@pytest.mark.slow
def test_old_agents_end_after_the_command_of_hosts_that_is_run_again_leads(
    begin: Begin, nodes: Sequence[Host]
) -> None:
    """No coordinator can continue their job, so they wait for none, also if they come too late to hear it."""
    job = begin("--hosts")
    nodes[0].signal_all(signal.SIGKILL)
    for node in nodes[1:3]:
        node.signal_all(signal.SIGSTOP)
    old = [node.processes() for node in nodes[1:3]]
    again = job.start(0)
    again.wait_until(lambda: "logs in run" in again.err and 5 < job.steps(nodes[0], 2) < STEPS)

    def let_end(node: Host, waiting: dict[int, str]) -> None:
        node.signal_all(signal.SIGCONT)
        assert wait_until(lambda: not node.processes().keys() & waiting.keys(), 200.0), node.processes()

    # The host of the standby first, so that no coordinator is left that could end the others.
    for node, waiting in zip(nodes[1:3], old, strict=True):
        let_end(node, waiting)
    job.agents = [again]
    job.finish(nodes[0].work / "run", agents=1)
    for node in nodes[:3]:
        node.remove_abandoned()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node2", "node3"])
def test_an_agent_over_ssh_that_the_lost_command_had_lost_before_joins_the_standby(
    begin: Begin, nodes: Sequence[Host], lost: str
) -> None:
    """The record of the job has it as lost, and nobody can start another agent on its host.

    On node2, the coordinator that leaves it behind is its own, which has to continue.
    """
    job = begin("--hosts")
    (connection,) = [pid for pid, line in nodes[0].processes().items() if "ssh -F" in line and lost in line]
    os.kill(connection, signal.SIGKILL)
    job.first.wait_until(lambda: f"host {lost} was lost" in job.first.err)
    nodes[0].cut()
    nodes[0].signal_all(signal.SIGKILL)
    job.await_continuation(3)
    job.finish(agents=0)
    job.end_ssh()


@pytest.mark.slow
def test_a_broken_connection_of_ssh_to_the_standby(begin: Begin, nodes: Sequence[Host]) -> None:
    """The first command continues without its host, and starts an agent there again."""
    job = begin("--hosts")
    (connection,) = [pid for pid in nodes[0].matching("ssh -F") if "node2" in nodes[0].processes()[pid]]
    os.kill(connection, signal.SIGKILL)
    job.first.wait_until(lambda: "worker 3 joined" in job.first.err)
    # The old agent makes room for the new one: a process, and the one that watches it.
    assert wait_until(lambda: len(nodes[1].matching("lockstep agent --stdio")) == 2, 300.0)
    job.agents = [job.first]
    job.finish(nodes[0].work / "run", agents=1)


@pytest.mark.slow
def test_a_job_that_is_stopped_while_the_store_does_not_answer_ends_everywhere(
    begin: Begin, nodes: Sequence[Host]
) -> None:
    """The next view waits for the store. The standby does not continue a job that the user has stopped."""
    job = begin()
    nodes[4].signal_all(signal.SIGSTOP)
    nodes[2].signal_all(signal.SIGKILL)
    job.first.wait_until(lambda: "the object store has not answered for 5 s" in job.first.err)
    os.kill(job.first.process.pid, signal.SIGINT)
    job.first.wait_until(lambda: "stopping (SIGINT): waiting up to 20 s for" in job.first.err)
    os.kill(job.first.process.pid, signal.SIGINT)
    assert (job.first.end(), job.agents[0].end()) == (130, 130)
    assert "because the object store did not answer" in job.first.err
    assert "takes the job over" not in job.agents[0].err
    nodes[4].signal_all(signal.SIGKILL)
    nodes[2].remove_abandoned()


@pytest.mark.slow
def test_another_terminal_stops_a_job_while_the_store_does_not_answer(
    begin: Begin, nodes: Sequence[Host]
) -> None:
    job = begin()
    nodes[4].signal_all(signal.SIGSTOP)
    nodes[2].signal_all(signal.SIGKILL)
    job.first.wait_until(lambda: "the object store has not answered for 5 s" in job.first.err)
    stop = nodes[0].lockstep("stop", "run")
    assert (job.first.end(), job.agents[0].end(), stop.end()) == (143, 143, 0), stop.err
    assert "stopping (SIGTERM): waiting up to 20 s for the object store" in job.first.err
    assert "for the step and a checkpoint" not in job.first.err
    assert "takes the job over" not in job.agents[0].err
    nodes[4].signal_all(signal.SIGKILL)
    nodes[2].remove_abandoned()


@pytest.mark.slow
def test_a_coordinator_that_stands_still_is_replaced_on_its_host(begin: Begin, nodes: Sequence[Host]) -> None:
    """That takes longer than agents wait for a silent host, but its other process lives."""
    job = begin()
    (coordinator,) = nodes[0].matching("lockstep.hosts.coordinator_process")
    os.kill(coordinator, signal.SIGSTOP)
    job.first.wait_until(lambda: "another one takes over, and training continues" in job.first.err)
    made = job.steps(nodes[0], 2)
    job.first.wait_until(lambda: job.steps(nodes[0], 2) > made + 5)
    job.finish(nodes[0].work / "run")
    assert job.first.end() == 0
    assert not any("joins it again" in agent.err for agent in job.agents)


@pytest.mark.slow
def test_the_first_host_stands_still(begin: Begin, nodes: Sequence[Host]) -> None:
    """When it wakes up, it changes nothing, and ends by name. The same command joins the job again."""
    job = begin()
    with standing_still(nodes[0]):
        job.await_takeover()
    assert job.first.end() == LEFT_OUT, job.first.err
    assert STANDBY in job.first.err
    again = job.start(0)
    again.wait_until(lambda: job.steps(nodes[1], 3) > 2)
    job.finish()
    assert again.end() == 0
    assert "the job continues at 10.119.0.2:7001, and this host joins it" in again.err


@pytest.mark.slow
def test_the_second_task_of_slurm_is_the_standby(begin: Begin, nodes: Sequence[Host]) -> None:
    """It needs no option. `scancel` reaches the coordinator that it has started."""
    job = begin("--slurm")
    nodes[0].cut()
    nodes[0].signal_all(signal.SIGKILL)
    job.await_takeover()
    for agent in job.agents:
        os.kill(agent.process.pid, signal.SIGTERM)
    assert ended(*job.agents) == (143, 143), [agent.err for agent in job.agents]
    standby, third = job.agents
    assert "this host takes the job over at node2:24242" in standby.err
    assert "stopping (SIGTERM): waiting up to 20 s for the step and a checkpoint" in standby.err
    assert "takes the job over" not in third.err
    nodes[4].signal_all(signal.SIGKILL)
    nodes[0].remove_abandoned()


@pytest.mark.slow
def test_tasks_of_a_cluster_find_the_job_at_either_address(begin: Begin, nodes: Sequence[Host]) -> None:
    """The commands are those of the pods in Kubernetes, which starts a lost pod again.

    The first host comes back, and takes the job over when the standby is lost.
    """
    job = begin("--tf-config")
    nodes[0].cut()
    nodes[0].signal_all(signal.SIGKILL)
    job.await_takeover()
    nodes[0].reconnect()
    first = job.start(0)
    first.wait_until(lambda: job.steps(nodes[1], 3) > 2)
    nodes[2].signal_all(signal.SIGKILL)
    job.agents[1] = job.start(2)
    first.wait_until(lambda: job.steps(nodes[1], 4) > 2)
    nodes[1].signal_all(signal.SIGKILL)
    first.wait_until(lambda: "this host takes the job over at node1:7000" in first.err)
    job.agents[0] = job.start(1)

    def has_joined() -> bool:
        logs = nodes[0].work.glob("runs/*/worker-5.log")
        return any(log.read_text().count("made ") > 2 for log in logs)

    first.wait_until(has_joined)
    (folder,) = nodes[0].work.glob("runs/*")
    job.finish(folder)
    assert first.end() == 0, first.err
    for node in nodes[:3]:
        node.remove_abandoned()
