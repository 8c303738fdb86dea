"""Without a shared file system, a job resumes from the newest checkpoint of all hosts, with the same bits."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host, Running

SCRIPT = Path(__file__).parent / "keeping_on_hosts.py"

Start = Callable[..., Running]


@pytest.fixture
def start(hosts: Sequence[Host], lean: Callable[..., dict[str, str]]) -> Start:
    """Start the training at the command of a host."""
    for host in hosts:
        shutil.copy(SCRIPT, host.work)

    def run(at: int, *arguments: str) -> Running:
        options = ("--backend", "jax", "--replicas", "2", "--threads-per-worker", "1", "--tee", "all")
        command = ("run", *options, *arguments)
        return hosts[at].lockstep(*command, **lean(SCRIPT, "jax"))

    return run


def digest(job: Running) -> str:
    assert job.end() == 0, job.err
    (found,) = {line.split()[-1] for line in job.out.splitlines() if "digest " in line}
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


def test_the_newest_checkpoint_of_all_hosts(hosts: Sequence[Host], start: Start) -> None:
    """The chief's host loses its workers; then the hosts are in another order, and others."""
    wanted = digest(start(0, "-n", "2", SCRIPT.name, "csv"))
    (hosts[0].work / "log.csv").unlink()
    (hosts[1].work / "log.csv").write_text("epoch,loss\n0,of another training\n")
    kept = ("--checkpoint", "kept", "--checkpoint-every", "2", "--max-restarts", "0")
    moved = failed(start(0, "--hosts", "node1,node2", *kept, SCRIPT.name, "csv", "die:0:1", "fail:3"))
    assert "what callbacks have written so far is on node1, and what follows is on node2: " in moved
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


def test_a_callback_resumes_from_the_newest_checkpoint_of_all_hosts(
    hosts: Sequence[Host], start: Start
) -> None:
    wanted = digest(start(0, "-n", "2", SCRIPT.name))
    script = ("--max-restarts", "0", SCRIPT.name, "checkpoint:kept")
    failed(start(0, "--hosts", "node1,node2", *script, "die:0:1", "fail:3"))
    first, second = newest(hosts[0]), newest(hosts[1])
    assert 0 < first < second
    last = start(0, "--hosts", "node1,node2", *script)
    assert digest(last) == wanted
    assert f"the newest checkpoint, after {second} steps, is on node2; copying it to node1\n" in last.err
    assert newest(hosts[0]) == 24


REFUSED = {
    "backup": "keras.callbacks.BackupAndRestore reads its folder on each host",
    "import": "own.py differs between node1 and node2; copy the same file to all hosts",
}


@pytest.mark.parametrize("what", REFUSED)
def test_files_that_must_be_equal_on_all_hosts(hosts: Sequence[Host], start: Start, what: str) -> None:
    for host in hosts:
        (host.work / "own.py").write_text(f"NAME = {host.name!r}\n")
    (hosts[1].work / "backup").mkdir()
    (hosts[1].work / "backup/latest.weights.h5").write_text("of another training")
    job = start(0, "--hosts", "node1,node2", SCRIPT.name, what)
    assert job.end() == 1
    assert REFUSED[what] in job.err
