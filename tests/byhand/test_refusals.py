"""Errors of workers started by hand appear without a wait: the cause, the expectation, the remedy."""

import json
import os
import re
import socket
from typing import Any

import pytest

from lockstep.errors import PeerStuckError
from lockstep.protocol.job_spec import TIMEOUT
from lockstep.protocol.rendezvous import Arrival, Task, refusal
from lockstep.rendezvous.waiting import WaitMessages

MEET = """
import time
from lockstep.rendezvous.take_part import take_part
begun = time.monotonic()
try:
    take_part()
finally:
    print(f"took {time.monotonic() - begun:.3f} s", flush=True)
"""
WAIT = """
import signal
print("waiting", flush=True)
signal.pause()
"""


def refused(host: Any, config: Any, *command: str) -> str:
    """Return the error with which a process exits at once, in one line without a traceback."""
    terminal = host.start(config, *(command or (host.script(MEET),)))
    assert terminal.status() == 1, terminal.text
    took = re.search(r"took ([\d.]+) s", terminal.text)
    assert took is not None
    # On a busy machine, too. A process that waited for others would do so for `TIMEOUT`.
    assert float(took[1]) < TIMEOUT / 10
    assert "Traceback" not in terminal.text
    error: str = terminal.text.splitlines()[-1]
    assert error.startswith("lockstep: ConfigError: ")
    return error


TWO = ["127.0.0.1:20001", "127.0.0.1:20002"]
TASK = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{'cluster': ", "TF_CONFIG is \"{'cluster': \", which is not JSON"),
        ({"task": TASK}, "TF_CONFIG has no 'cluster'"),
        ({"cluster": {"worker": TWO}, "task": {"type": "boss", "index": 0}}, "has the type 'boss' in 'task'"),
        (
            {"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 2}},
            "has 2 for the 'index' of 'task'",
        ),
        (
            {"cluster": {"worker": [TWO[0], "no-such-host.invalid:2"]}, "task": TASK},
            "the host 'no-such-host.invalid' of worker 1's address no-such-host.invalid:2 cannot be resolved",
        ),
        (
            {"cluster": {"worker": [TWO[0], "192.0.2.1:2222"]}, "task": TASK},
            "worker 0's address 127.0.0.1:20001 cannot be reached from other hosts, such as that of worker 1 "
            "(192.0.2.1:2222); give it an address that all hosts reach",
        ),
        (
            {"cluster": {"worker": ["192.0.2.1:2222", TWO[1]]}, "task": TASK},
            "worker 0's address 192.0.2.1:2222 is not one of this host: start this task on the host that has "
            "the address, or correct the address in every TF_CONFIG",
        ),
    ],
)
def test_an_invalid_tf_config_is_refused(host: Any, config: Any, said: str) -> None:
    assert said in refused(host, config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "try:\n    take_part()\nexcept ConfigError as error:\n    print(f'caught {error}')",
            "caught TF_CONFIG",
        ),
        ("try:\n    take_part()\nexcept ConfigError:\n    1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_script_can_handle_a_refusal(host: Any, text: str, said: str) -> None:
    names = "from lockstep.errors import ConfigError\nfrom lockstep.rendezvous.take_part import take_part\n"
    terminal = host.start({"task": TASK}, host.script(names + text))
    terminal.status()
    assert terminal.text.splitlines()[-1].startswith(said)
    assert ("Traceback" in terminal.text) == ("1 / 0" in text)


@pytest.mark.ci
def test_too_many_tasks_are_refused(host: Any) -> None:
    for tasks in (1500, 4000):
        cluster = {"worker": [f"127.0.0.1:{20000 + i}" for i in range(tasks)]}
        terminal = host.start({"cluster": cluster, "task": TASK}, host.script(MEET))
        assert terminal.status() == 1, terminal.text
        said = f"lockstep: ConfigError: TF_CONFIG has {tasks} tasks that train, too many for processes"
        assert terminal.text.splitlines()[-1].startswith(said)


def test_a_port_that_another_program_uses_is_refused(host: Any) -> None:
    with socket.create_server(("127.0.0.1", host.ports[1])):
        error = refused(host, host.config(1))
    assert f"worker 1's address 127.0.0.1:{host.ports[1]} is in use by " in error
    assert f"(process {os.getpid()}): stop it, or give another port to this task" in error


SQUATS = """
import os, signal, socket, sys
os.setuid(65534)
full = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
full.bind(b"\\0lockstep/0/at/" + sys.argv[1].encode())
full.listen(0)
other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
other.connect(full.getsockname())
print("squats", flush=True)
signal.pause()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")
def test_another_user_that_holds_the_names_and_accepts_no_connection_is_named(host: Any) -> None:
    squatter = host.start(None, "-c", SQUATS, f"127.0.0.1:{host.ports[1]}")
    squatter.until("squats")
    terminal = host.start(host.config(0), host.script(MEET))
    assert terminal.status() == 1
    pid = squatter.process.pid
    assert (
        f"ConfigError: process {pid} of user 65534 (nobody) holds the name that represents" in terminal.text
    )


@pytest.mark.ci
def test_a_worker_that_does_not_match_the_others_is_refused(host: Any) -> None:
    first = host.start(host.config(0), host.script(MEET + WAIT, "first.py"))
    first.until("worker 0 waits for worker 1")
    pid = first.process.pid
    again = refused(host, host.config(0))
    assert (
        f"worker 0 (127.0.0.1:{host.ports[0]}) is already running: process {pid}. Each process needs its own"
        in again
    )
    others = [f"127.0.0.1:{port}" for port in (host.ports[2], host.ports[1])]
    other = refused(host, host.config(1, worker=others))
    assert f"worker 0 ({others[0]}) in the one, worker 0 (127.0.0.1:{host.ports[0]}) in the other" in other
    assert other.endswith("Give all tasks the same 'cluster' in TF_CONFIG")
    more = refused(host, host.config(2, 3))
    assert "worker 2 and worker 0 have different clusters: 3 tasks (" in more
    # The refusals have not affected the valid workers.
    second = host.start(host.config(1), "first.py")
    for terminal in (first, second):
        terminal.until("waiting")
    late = refused(host, host.config(1))
    assert f"worker 1 (127.0.0.1:{host.ports[1]}) is already running: process {second.process.pid}" in late


def test_a_job_that_cannot_begin_reports_why(host: Any) -> None:
    (host.folder / "runs").write_text("a file")
    script = host.script(MEET)
    for terminal in [host.start(host.config(index), script) for index in range(2)]:
        assert terminal.status() == 1
        assert "ConfigError: the run's folder runs cannot be used: File exists" in terminal.text


def test_a_tf_config_that_is_set_too_late_is_refused(host: Any) -> None:
    late = f"import os\nos.environ['TF_CONFIG'] = {json.dumps(host.config(0))!r}\n"
    first = f"from lockstep.rendezvous.take_part import take_part\ntake_part()\n{late}"
    error = refused(host, None, host.script(first + MEET))
    assert (
        "TF_CONFIG was set after the first strategy was created, so this process is a job of one worker"
        in error
    )


def test_keras_2_is_refused_in_a_job(host: Any) -> None:
    setting = "import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\n"
    error = refused(host, host.config(0), host.script(setting + MEET))
    assert "sets TF_USE_LEGACY_KERAS=1, which makes tf.keras Keras 2: each worker would train its" in error


@pytest.mark.parametrize("command", [("-c", MEET), ("-c", "import runpy; runpy.run_path('main.py')")])
def test_a_process_without_a_script_is_refused(host: Any, command: tuple[str, ...]) -> None:
    host.script(MEET)
    error = refused(host, host.config(0), *command)
    assert "there is no script" in error or "but it has no script" in error
    assert "Put the program into a file, use `lockstep run`, or call lockstep.launch" in error


def test_a_forked_process_is_refused(host: Any) -> None:
    fork = "import os, sys\nif pid := os.fork():\n    sys.exit(os.waitpid(pid, 0)[1] >> 8)\n"
    assert "but it has no script" in refused(host, host.config(0), host.script(fork + MEET))


def test_a_parameter_server_has_nothing_to_do(host: Any) -> None:
    config = host.config(0, kind="ps", worker=TWO, ps=[f"127.0.0.1:{host.ports[0]}"])
    text = host.start(config, host.script(MEET + "print('not reached')")).end()
    assert "lockstep: a parameter server has nothing to do" in text
    assert "not reached" not in text


def test_an_evaluator_and_a_single_worker_train_alone(host: Any) -> None:
    tell = "from lockstep.worker import job\nown = job.current()\n"
    tell += "print(own.task, own.view.replicas, job.is_worker())\n"
    script = host.script(MEET + tell)
    evaluator = host.config(0, kind="evaluator", worker=TWO)
    assert host.start(evaluator, script).end().splitlines()[-1] == "evaluator 1 False"
    only = host.config(0, kind="chief", chief=TWO[:1], ps=TWO[1:])
    assert host.start(only, script).end().splitlines()[-1] == "worker 1 False"


def test_a_program_that_a_worker_starts_is_not_a_worker(host: Any) -> None:
    child = host.script(MEET + "print('alone', flush=True)\n", "child.py")
    run = f"import subprocess, sys\nsubprocess.run([sys.executable, {child!r}], check=True)\n"
    text = host.start(None, "-m", "lockstep", "run", "-n", "2", "--tee", "all", host.script(run)).end()
    assert text.count("] alone") == 2


FIRST = Arrival((Task("worker", 0, "a:1", "10.0.0.1:1"),), 0, "1.0", "jax", 2, (), "a.py")


def test_versions_and_backends_must_match() -> None:
    def arrival(version: str, backend: str) -> Arrival:
        return Arrival(FIRST.tasks, 0, version, backend, 2, (), "a.py")

    assert refusal(FIRST, arrival("1.0", "jax"), None) == ""
    assert "runs Lockstep 1.1, but the job uses 1.0; use one" in refusal(FIRST, arrival("1.1", "jax"), None)
    assert "runs Keras on torch, but worker 0 on jax" in refusal(FIRST, arrival("1.0", "torch"), None)


def test_different_names_of_one_host_match() -> None:
    tasks = (Task("worker", 0, "localhost:1", "10.0.0.1:1"),)
    assert refusal(FIRST, Arrival(tasks, 0, "1.0", "jax", 2, (), "a.py"), None) == ""


def test_a_waiting_worker_reports_every_few_seconds_and_gives_up() -> None:
    patient = WaitMessages("worker 0", 100.0)
    assert patient.line(100.0) == ""
    patient.waits_for("worker 1 (a:1), worker 2 (a:2)", 100.5)
    assert patient.left(100.5) == 0.5
    assert patient.line(101.0) == "worker 0 waits for worker 1 (a:1), worker 2 (a:2), 1 s"
    assert patient.line(105.9) == ""
    assert patient.line(106.0) == "worker 0 waits for worker 1 (a:1), worker 2 (a:2), 6 s"
    patient.waits_for("worker 2 (a:2)", 107.0)
    assert patient.line(107.0) == "worker 0 waits for worker 2 (a:2), 7 s"
    assert patient.line(699.9) != ""
    with pytest.raises(
        PeerStuckError, match=r"worker 0 has waited 600 s for worker 2 \(a:2\) and gives up; start all"
    ):
        patient.line(700.0)
