"""Processes find each other and become the workers of one job, without importing a framework."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Gone = Callable[[Sequence[int], float], bool]

MEET = """
import os, sys
print("first line", flush=True)
from lockstep.worker import job
from lockstep.rendezvous.take_part import take_part
take_part()
me = job.current()
"""
TELL = """
import json
own = f"{me.worker} of {len(me.view.workers)}".encode()
gathered = me.exchange(lambda view, communicator: communicator.gather(own))
names = "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE", "OWN", "NPROC"
print(json.dumps({
    "worker": me.worker, "replicas": me.view.replicas,
    "seed": me.settings.seed, "threads": me.settings.threads,
    "gathered": [text.decode() for text in gathered],
    "arguments": sys.argv[1:], "here": os.path.basename(__file__), "pid": os.getpid(),
    "variables": [os.environ.get(name) for name in names],
    "task": json.loads(os.environ["TF_CONFIG"])["task"]["index"], "warned": sys.warnoptions,
}), flush=True)
"""
TRAINED = """
from lockstep.observability.events import StrategyInstalled, TrainingEnded
me.events.publish(StrategyInstalled("none"))
me.at_end(lambda: me.events.publish(TrainingEnded(7, "m", "ab")))
"""
WAIT = """
from lockstep.observability.events import StrategyInstalled
me.events.publish(StrategyInstalled("none"))
print("waiting", flush=True)
import signal
while True:
    signal.pause()
"""


def printed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    return found


@pytest.mark.ci("order1")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_processes_become_workers_in_any_order(host: Any, is_gone: Gone, order: tuple[int, int]) -> None:
    script = host.script(MEET + TELL)
    first, last = order
    terminals = {}
    command = ("-W", "error", script, "--epochs", "3")
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "OWN": "x", "PYTHONHASHSEED": "9"}
    terminals[first] = host.start(host.config(first), *command, **environment)
    terminals[first].until(f"lockstep: worker {first} waits for worker {last} (127.0.0.1:{host.ports[last]})")
    terminals[last] = host.start(host.config(last), *command, **environment)
    coordinators = host.coordinators()
    cores = len(os.sched_getaffinity(0))
    for index, terminal in terminals.items():
        text = terminal.end()
        assert text.count("first line") == 2
        assert f"lockstep: all workers are connected; worker {index} restarts the script" in text
        assert text.count("lockstep: 2 workers, 2 replicas (") == 1
        assert text.count("workers get PYTHONHASHSEED from the job's seed, 0, instead of 9") == 1
        assert printed(text) == {
            "worker": index,
            "replicas": 2,
            "seed": 0,
            "threads": max(1, cores // 2),
            "gathered": ["0 of 2", "1 of 2"],
            "arguments": ["--epochs", "3"],
            "here": script,
            "pid": terminal.process.pid,
            "variables": ["0", "-1", None, "x", str(max(1, cores // 2))],
            "task": index,
            "warned": ["error"],
        }
    assert len(coordinators) == 1
    assert is_gone(coordinators, 300)
    end = json.loads(host.events().splitlines()[-1])
    assert (end["event"], end["status"]) == ("finished", 0)


def test_the_chief_is_worker_0_and_a_script_may_set_its_own_task(host: Any) -> None:
    cluster = {"worker": [f"localhost:{host.ports[1]}"], "chief": [f"127.0.0.1:{host.ports[0]}"]}
    own = "import json, os, sys\nos.environ['TF_CONFIG'] = sys.argv[1]\n"
    script = host.script(own + MEET + TELL + TRAINED)
    tasks = [host.config(0, kind=kind, **cluster) for kind in ("worker", "chief")]

    def start(task: Any) -> Any:
        return host.start(None, script, json.dumps(task), CUDA_VISIBLE_DEVICES="1")

    terminals = [start(task) for task in tasks]
    ends = [terminal.end().rpartition("lockstep: ") for terminal in terminals]
    texts = [before for before, *_ in ends]
    assert [printed(text)["worker"] for text in texts] == [1, 0]
    # Both see one GPU: neither reserves all of its memory.
    assert [printed(text)["variables"][1:3] for text in texts] == [["1", "false"]] * 2
    assert "lockstep: all workers are connected; chief 0 restarts the script" in texts[1]
    assert "ignoring the TF_CONFIG" not in texts[0] + texts[1]
    lines = [line for *_, line in ends]
    assert lines[0] == lines[1]
    assert re.fullmatch("finished in .*s: 7 steps on 2 workers; digest ab of model 'm'\n", lines[0])


@pytest.mark.ci
def test_the_others_wait_again_for_a_process_that_exits(host: Any, is_gone: Gone) -> None:
    script = host.script(MEET + TELL)
    first = host.start(host.config(0, 3), script)
    first.until("waits for worker 1")
    second = host.start(host.config(2, 3), script)
    second.until("lockstep: worker 2 waits for worker 1")
    first.stop(signal.SIGINT)
    assert "KeyboardInterrupt" in first.text
    second.until(f"waits for worker 0 (127.0.0.1:{host.ports[0]}), worker 1 (127.0.0.1:{host.ports[1]}), ")
    coordinators = host.coordinators()
    second.stop()
    assert is_gone(coordinators, 300)
    assert not (host.folder / "runs").exists()


def test_no_process_remains_when_all_workers_are_killed(host: Any, is_gone: Gone) -> None:
    script = host.script(MEET + WAIT)
    terminals = [host.start(host.config(index), script) for index in range(2)]
    for terminal in terminals:
        terminal.until("waiting")
    coordinators = host.coordinators()
    for terminal in terminals:
        terminal.process.kill()
    assert is_gone(coordinators, 300)
    assert f"at/127.0.0.1:{host.ports[0]}" not in Path("/proc/net/unix").read_text()


def test_workers_exit_when_the_coordinator_is_killed(host: Any) -> None:
    script = host.script(MEET + WAIT)
    terminals = [host.start(host.config(index), script) for index in range(2)]
    for terminal in terminals:
        terminal.until("waiting")
    (coordinator,) = host.coordinators()
    signal.pidfd_send_signal(coordinator, signal.SIGKILL)
    os.close(coordinator)
    for index, terminal in enumerate(terminals):
        assert terminal.status() == 1
        assert f"has ended, so worker {index} exits; restart all workers" in terminal.text


def test_a_remaining_worker_reports_why_the_job_ends(host: Any) -> None:
    script = host.script(MEET + "print('waiting', flush=True)\nimport signal\nsignal.pause()")
    terminals = [host.start(host.config(index), script) for index in range(2)]
    for terminal in terminals:
        terminal.until("waiting")
    terminals[0].stop()
    terminals[1].until("lockstep: worker 0 ended (exit status unknown); the job ends: restart all workers")


def test_a_script_that_raises_exits_with_its_own_status(host: Any) -> None:
    script = host.script(MEET + "if me.worker == 1: raise ValueError('no')\nimport signal\nsignal.pause()")
    terminals = [host.start(host.config(index), script) for index in range(2)]
    assert [terminal.status() for terminal in terminals] == [-signal.SIGTERM, 1]
    assert "lockstep: worker 1 exited with status 1: ValueError: no; the job ends" in terminals[0].text
    assert terminals[1].text.count("Traceback") == 1


ONE_WAITS = """
import time
from lockstep.observability.events import StrategyInstalled
me.events.publish(StrategyInstalled("none"))
while me.worker == 1 and not os.path.exists("go"):
    time.sleep(0.01)
"""


@pytest.mark.ci
def test_a_worker_that_arrives_as_a_job_ends_begins_the_next_job(host: Any) -> None:
    script = host.script(MEET + ONE_WAITS)
    first, other = [host.start(host.config(index), script) for index in range(2)]
    assert "lockstep: the script of worker 0 has finished; the others continue, " in first.end()
    again = host.start(host.config(0), script)
    again.until("lockstep: worker 0 waits for main-")
    (host.folder / "go").touch()
    other.end()
    again.until("lockstep: worker 0 waits for worker 1 ")
    last = host.start(host.config(1), script)
    for terminal in (again, last):
        assert "all workers are connected" in terminal.end()


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments], capture_output=True, text=True, timeout=600
    )


def test_list_scale_and_stop_find_the_job(host: Any, is_gone: Gone) -> None:
    script = host.script(MEET + WAIT, f"known{host.ports[0]}.py")
    terminals = [host.start(host.config(index), script) for index in range(2)]
    for terminal in terminals:
        terminal.until("waiting")
    (line,) = [line for line in command("list").stdout.splitlines() if str(host.ports[0]) in line]
    assert line.split()[2:6] == ["2", "of", "2", "2"]
    name = line.split()[0]
    assert "3 workers cannot share 2 replicas" in command("scale", name, "3").stderr
    terminals[1].stop()
    terminals[0].until(
        "worker 1 ended (exit status unknown); start it again and it joins; worker 0 continues"
    )
    refused = command("scale", name, "2")
    assert refused.returncode == 2
    assert "the workers of this job are started by hand: start another one to add a worker" in refused.stderr
    coordinators = host.coordinators()
    assert command("stop", name).stdout.splitlines()[-1] == f"{name} has ended"
    assert terminals[0].status() == -signal.SIGTERM
    assert terminals[0].text.splitlines()[-1] == "lockstep: stopped by SIGTERM"
    assert is_gone(coordinators, 300)
