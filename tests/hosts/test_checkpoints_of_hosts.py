"""Without a shared file system, a job resumes from the newest checkpoint of all hosts, with the same bits."""

import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host, Running

from lockstep.transport.keys import JobKey

SCRIPT = Path(__file__).parent / "keeping_on_hosts.py"

Start = Callable[..., Running]


@pytest.fixture
def start(hosts: Sequence[Host], lean: Callable[..., dict[str, str]]) -> Start:
    """Start the training at the command of a host."""
    for host in hosts:
        shutil.copy(SCRIPT, host.work)

    def run(at: int, *arguments: str, **variables: str) -> Running:
        options = ("--backend", "jax", "--replicas", "2", "--threads-per-worker", "1", "--tee", "all")
        command = ("run", *options, *arguments)
        return hosts[at].lockstep(*command, **lean(SCRIPT, "jax"), **variables)

    return run


def digest(job: Running) -> str:
    assert job.end() == 0, job.err
    (found,) = {line.split("digest-")[-1] for line in job.out.splitlines() if "digest-" in line}
    return found


def newest(host: Host, folder: str = "kept") -> int:
    """The step of the newest checkpoint on a host; 0 if it has none."""
    return max((int(path.name[5:]) for path in (host.work / folder).glob("step-*")), default=0)


def failed(job: Running) -> str:
    assert job.end() == 1, job.err
    assert "epoch" in job.err
    return job.err


def rows(host: Host) -> list[int]:
    """The epochs in the log of a callback."""
    header, *lines = (host.work / "log.csv").read_text().splitlines()
    assert header.startswith("epoch,")
    return [int(line.partition(",")[0]) for line in lines]


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    """What a job on one host has computed for the tests so far."""
    return {}


@pytest.fixture
def wanted(start: Start, known: dict[str, str]) -> str:
    """The digest of an undisturbed training on one host; no callback changes it."""
    if not known:
        known["digest"] = digest(start(0, "-n", "2", SCRIPT.name))
    return known["digest"]


@pytest.mark.slow
def test_the_newest_checkpoint_of_all_hosts(hosts: Sequence[Host], start: Start, wanted: str) -> None:
    """The chief's host loses its workers; then the hosts are in another order, and others."""
    (hosts[1].work / "log.csv").write_text("epoch,loss\n0,of another training\n")
    kept = ("--checkpoint", "kept", "--checkpoint-every", "2", "--max-restarts", "0")
    moved = failed(start(0, "--hosts", "node1,node2", *kept, SCRIPT.name, "csv", "die:0:1", "fail:3"))
    assert "; new training with checkpoints in " in moved
    assert "files that callbacks have written so far are on node1, and new ones are on node2: " in moved
    assert f"{hosts[0].here}/work/log.csv" in moved
    assert rows(hosts[0]) == [0]
    assert rows(hosts[1]) == [1, 2]
    first, second = newest(hosts[0]), newest(hosts[1])
    assert 0 < first < second
    told = failed(start(0, "--hosts", "node1,node2", *kept, SCRIPT.name, "csv", "fail:4"))
    assert "log.csv lacks the rows that another host has written\n" in told
    assert rows(hosts[0]) == [0, 3]
    assert f"the newest checkpoint, after {second} steps, is on node2; copying it to this host\n" in told
    third = newest(hosts[0])
    assert third > second
    assert newest(hosts[1]) == second
    last = start(0, "--hosts", "node3,node2", *kept, SCRIPT.name, "csv")
    assert digest(last) == wanted
    assert f"{third} steps, is on this host; copying it to node3 and node2\n" in last.err
    assert f"/kept/step-{third:012}, checkpoints every 2 steps\n" in last.err
    assert newest(hosts[2]) == 24
    # A folder that the hosts share.
    shared = hosts[0].here.parent / "shared"
    shutil.copytree(hosts[1].work / "kept" / f"step-{second:012}", shared / f"step-{second:012}")
    try:
        options = ("--checkpoint", str(shared), "--checkpoint-every", "2")
        job = start(0, "--hosts", "node2,node1", *options, SCRIPT.name, "csv")
        assert digest(job) == wanted
        assert "copying" not in job.err
        assert newest(hosts[0], str(shared)) == 24
    finally:
        shutil.rmtree(shared)


@pytest.mark.slow
def test_a_store_has_the_checkpoints_of_all_hosts(
    hosts: Sequence[Host], start: Start, wanted: str, tmp_path: Path
) -> None:
    """The chief's host loses its workers; then other hosts resume, whose caches are empty."""
    pytest.importorskip("obstore")
    kept = ("--checkpoint", f"file://{tmp_path}/store", "--one-writer", "--checkpoint-every", "2")
    script = ("--max-restarts", "0", SCRIPT.name)
    caches = [{"XDG_CACHE_HOME": str(tmp_path / name)} for name in ("first", "second")]
    failed(start(0, "--hosts", "node1,node2", *kept, *script, "die:0:1", "fail:3", **caches[0]))
    last = start(0, "--hosts", "node1,node3", *kept, *script, **caches[1])
    assert digest(last) == wanted
    assert "resuming" in last.err
    assert list((tmp_path / "store").glob("step-000000000024-*"))


@pytest.mark.slow
def test_a_callback_resumes_from_the_newest_checkpoint_of_all_hosts(
    hosts: Sequence[Host], start: Start, wanted: str
) -> None:
    script = ("--max-restarts", "0", SCRIPT.name, "checkpoint:kept")
    failed(start(0, "--hosts", "node1,node2", *script, "die:0:1", "fail:3"))
    first, second = newest(hosts[0]), newest(hosts[1])
    assert 0 < first < second
    last = start(0, "--hosts", "node1,node2", *script, "slow")
    assert digest(last) == wanted
    assert f"the newest checkpoint, after {second} steps, is on node2; copying it to node1\n" in last.err
    assert newest(hosts[0]) == 24


@pytest.mark.slow
def test_a_job_that_hosts_join_resumes(hosts: Sequence[Host], start: Start) -> None:
    """Without ssh, from the host that joins: it has the newest checkpoint, and is the next to coordinate."""
    wanted = digest(start(0, "-n", "3", "--replicas", "3", SCRIPT.name))
    key = JobKey.generate()
    for host in hosts:
        key.write(host.work / "job.key")
    keyed = {"LOCKSTEP_KEY_FILE": "job.key"}
    kept = ("--checkpoint", "kept", "--checkpoint-every", "2", "--replicas", "3", "--max-restarts", "0")

    def run(at: int, joining: int, *arguments: str) -> tuple[Running, Running]:
        listening = ("--listen", f"{hosts[at].address}:7000", "-n", "3")
        job = start(at, *listening, *kept, SCRIPT.name, *arguments, **keyed)
        return job, hosts[joining].lockstep("agent", "--join", f"{hosts[at].name}:7000", "-n", "2", **keyed)

    job, agent = run(0, 1, "die:0:1", "die:1:2", "fail:3")
    failed(job)
    assert agent.end() == 1
    first, second = newest(hosts[0]), newest(hosts[1])
    assert 0 < first < second
    job, agent = run(1, 2, "die:1:4")
    assert digest(job) == wanted
    assert agent.end() == 0
    assert f"{second} steps, is on this host; copying it to 10.119.0.3\n" in job.err


@pytest.mark.slow
def test_a_job_that_is_taken_over_keeps_its_checkpoints(
    hosts: Sequence[Host], start: Start, wanted: str
) -> None:
    """The next chief writes them on its host, and the job resumes from there, with the same history."""
    key = JobKey.generate()
    for host in hosts:
        key.write(host.work / "job.key")
    keyed = {"LOCKSTEP_KEY_FILE": "job.key"}
    address = f"{hosts[0].address}:7000"
    kept = ("--checkpoint", "kept", "--checkpoint-every", "2", "--max-restarts", "0")

    def run(*arguments: str) -> Running:
        return start(0, "--listen", address, "-n", "2", *kept, SCRIPT.name, *arguments, **keyed)

    def join() -> Running:
        return hosts[1].lockstep("agent", "--join", address, **keyed)

    job, agent = run("hold:1", "fail:4"), join()
    job.wait_until((hosts[0].work / "held").exists)
    hosts[0].signal_all(signal.SIGKILL)
    told = failed(run("hold:1", "fail:4"))
    assert "taking over a job of 2 hosts whose coordinator was lost; 1 of them" in told
    assert agent.end() == 1
    first, second = newest(hosts[0]), newest(hosts[1])
    assert 0 < first < second
    last, agent = run(), join()
    assert digest(last) == wanted
    assert agent.end() == 0
    assert f"the newest checkpoint, after {second} steps, is on 10.119.0.2; copying it to" in last.err


@pytest.mark.slow
def test_each_host_has_the_files_of_callbacks_that_a_program_reads(
    hosts: Sequence[Host], start: Start
) -> None:
    """Also if the worker is killed that would write them on its host."""
    script = ("--replicas", "3", SCRIPT.name, "best", "backup")
    failed(start(0, "-n", "1", *script, "fail:3"))
    wanted = digest(start(0, "-n", "1", *script))
    (hosts[0].work / "best.keras").unlink()
    spread = ("--hosts", "node1,node2:2", *script)
    failed(start(0, *spread, "die:1:1", "fail:3"))
    backups = [(host.work / "backup/training_metadata.json").read_text() for host in hosts[:2]]
    assert backups == ['{"epoch": 3, "batch": 0}'] * 2
    assert digest(start(0, *spread)) == wanted
    assert [(host.work / "backup").exists() for host in hosts[:2]] == [False, False]


@pytest.mark.parametrize(
    ("lost", "note"),
    [
        ("lose:0:1", "steps, is on node2; copying it to node1\n"),
        pytest.param(
            "lose:1:1",
            "node2 has lost the worker that gave the checkpoint; looking for the newest again\n",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_worker_lost_while_a_callback_copies(
    hosts: Sequence[Host], start: Start, wanted: str, lost: str, note: str
) -> None:
    """Worker 0 writes the copy, and worker 1 has the checkpoint: the others continue, with the same bits."""
    script = (SCRIPT.name, "checkpoint:kept")
    failed(start(1, "-n", "2", *script, "fail:3"))
    last = start(0, "--hosts", "node1,node2", *script, lost)
    assert digest(last) == wanted
    assert f"worker {lost[5]} was killed by SIGKILL" in last.err
    assert note in last.err


REFUSED = {
    "backup": "keras.callbacks.BackupAndRestore reads its folder on each host",
    "import": "own.py differs between node1 and node2; copy the same file to all hosts",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["backup", "import"])
def test_files_that_must_be_equal_on_all_hosts(hosts: Sequence[Host], start: Start, what: str) -> None:
    for host in hosts:
        (host.work / "own.py").write_text(f"NAME = {host.name!r}\n")
    (hosts[1].work / "backup").mkdir()
    (hosts[1].work / "backup/latest.weights.h5").write_text("of another training")
    job = start(0, "--hosts", "node1,node2", SCRIPT.name, what)
    assert job.end() == 1
    assert REFUSED[what] in job.err
