"""What users do with a job over hosts from other terminals, and how its script ends."""

import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host, Running
from stepping_job import SteppingJob

HERE = Path(__file__).parent

PACED = "0:1:after apply:crawl"


def test_list_and_scale(hosts: Sequence[Host]) -> None:
    """A job is listed where its command is; workers leave, and others join on the hosts with fewest."""
    job = SteppingJob(hosts, "--hosts node1,node2", 60, PACED)
    job.running.wait_until(lambda: job.steps(1) > 3)
    listed = [host.lockstep("list") for host in hosts[:2]]
    assert [one.end() for one in listed] == [0, 0]
    assert re.search(r"^run +\d+ +2 of 2 +5 ", listed[0].out, re.M)
    assert "no job is running" in listed[1].out
    for wanted, event, times in ((1, "left", 1), (4, "joined", 3)):
        scaling = hosts[0].lockstep("scale", "run", str(wanted))
        assert scaling.end() == 0, scaling.err
        job.running.wait_until(lambda event=event, times=times: len(job.events(event)) == times)  # type: ignore[misc]
    job.hurry()
    assert set(job.finish()) == {0, 2, 3, 4}


def test_a_job_runs_without_its_terminal(hosts: Sequence[Host]) -> None:
    """The command returns once the job has begun. A lost host does not need it either."""
    job = SteppingJob(
        hosts, "--hosts node1,node2 --detach", 30, "1:3:after apply:host", "0:20:after apply:hold"
    )
    assert job.end() == 0, job.running.err
    assert "runs without this terminal: lockstep attach run shows its output" in job.running.err
    attached = hosts[0].lockstep("attach", "run")
    attached.wait_until(lambda: (hosts[0].work / "held-20").exists())
    job.go(20)
    assert attached.end() == 0, attached.err
    assert "host node2 was lost" in attached.out + attached.err
    assert set(job.finish()) >= {0}
    hosts[1].remove_abandoned()


ENDINGS = {"stop": 143, "interrupt": 130}


@pytest.mark.parametrize("how", ENDINGS)
def test_stopping(hosts: Sequence[Host], how: str) -> None:
    job = SteppingJob(hosts, "--hosts node1,node2:2", 12, "0:3:after apply:hold")
    job.wait_held(3)
    if how == "interrupt":
        job.running.process.send_signal(signal.SIGINT)
    else:
        stop = hosts[0].lockstep("stop", "run")
        assert stop.end() == 0, stop.err
    assert job.end() == ENDINGS[how]
    assert job.digests() == {}


@pytest.mark.slow
def test_resuming(hosts: Sequence[Host], lean: Callable[..., dict[str, str]]) -> None:
    """After SIGTERM, the chief saves a checkpoint on its host within the grace; others resume from it."""
    script = HERE / "resuming_fit.py"
    variables = lean(script, "jax")
    for host in hosts[:3]:
        shutil.copy(script, host.work)

    def train(run: str, options: str) -> Running:
        command = (
            f"run --backend jax --replicas 4 --threads-per-worker 1 --run-dir {run} {options} {script.name}"
        )
        return hosts[0].lockstep(*command.split(), **variables)

    stopped = train("stopped", "--hosts node2,node1:2 --checkpoint saved --grace 120s")
    stopped.wait_until((hosts[1].work / "held").exists)
    stopped.process.send_signal(signal.SIGTERM)
    for host in hosts[:3]:
        (host.work / "go").touch()
    assert stopped.end() == 143
    assert "lockstep: checkpoint " in stopped.err
    assert "digest" not in stopped.out
    alone, resumed = (
        train("alone", "-n 2"),
        train("resumed", "--hosts node1:2,node2,node3 --checkpoint saved"),
    )
    assert (alone.end(), resumed.end()) == (0, 0), resumed.err
    # The chief may have ended the next step before it knew of the signal.
    assert re.search("training resumed after step [78]", resumed.err), resumed.err
    digests = [line for line in alone.out.splitlines() if line.startswith("digest ")]
    assert digests == [line for line in resumed.out.splitlines() if line.startswith("digest ")]
    assert digests
    assert "exited" not in resumed.err


SCRIPT = """
import os
import sys
from pathlib import Path
from lockstep.worker import job
print("hello from", job.current().worker, flush=True)
Path("seen").write_text(os.environ["COLOR"] + os.environ["A_TOKEN"])
if Path("fails").exists():
    raise RuntimeError("fails here")
if job.current().worker == 2:
    sys.stdout.write("x" * 9_999_999 + "\\n")
"""


def test_scripts_without_a_strategy(hosts: Sequence[Host]) -> None:
    """The command shows and keeps what workers on all hosts print, and names the one whose script fails.

    All have the user's variables; the value that is not on the command line is not in the run folder.
    """
    for host in hosts[:3]:
        (host.work / "script.py").write_text(SCRIPT)
    command = ("run", "--backend", "jax", "--tee", "all", "--hosts", "node1,node2,node3")
    command += ("--env", "COLOR=blue", "--env", "A_TOKEN")
    done = hosts[0].lockstep(*command, "--run-dir", "done", "script.py", A_TOKEN="unrecorded")
    assert done.end() == 0, done.err
    assert [(host.work / "seen").read_text() for host in hosts[:3]] == ["blueunrecorded"] * 3
    kept = [file.read_text() for file in (hosts[0].work / "done").rglob("*") if file.is_file()]
    assert any('"env":{"COLOR":"blue","A_TOKEN":null}' in text for text in kept)
    assert not any("unrecorded" in text for text in kept)
    logs = [(hosts[0].work / f"done/worker-{worker}.log").read_text() for worker in range(3)]
    assert logs == ["hello from 0\n", "hello from 1\n", f"hello from 2\n{'x' * 9_999_999}\n"]
    assert all(f"hello from {worker}\n" in done.out for worker in range(3))
    assert done.out.count("x") == 9_999_999
    assert "each of the 3 workers ran all of it by itself" in done.err
    (hosts[1].work / "fails").touch()
    failed = hosts[0].lockstep(*command, "--run-dir", "failed", "script.py", A_TOKEN="unrecorded")
    assert failed.end() == 1
    assert "lockstep: worker 1 exited with status 1: RuntimeError: fails here" in failed.err
    assert {path.name for path in hosts[1].work.iterdir()} == {"script.py", "fails", "seen"}
