"""No process of a job remains after its end: neither workers nor processes that they started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gone = Callable[[list[int], float], bool]

OBEYS = "escape(); announce('worker'); stay()"
IGNORES_SIGNALS = (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + OBEYS
)
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def begin(lockstep: Any, text: str) -> tuple[Any, list[int]]:
    """Start two workers, each with a detached grandchild; return the run and all pidfds."""
    running = lockstep.start("-n", "2", lockstep.script(text))
    announced = running.announced(4)
    assert {name: len(pidfds) for name, pidfds in announced.items()} == {"worker": 2, "grandchild": 2}
    return running, announced["worker"] + announced["grandchild"]


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_ends_all_processes(lockstep: Any, is_gone: Gone, number: int, status: int) -> None:
    running, processes = begin(lockstep, OBEYS)
    running.process.send_signal(number)
    done = running.end()
    assert is_gone(processes, 0)
    assert done.status == status
    assert done.notes == [f"lockstep: stopped by {signal.Signals(number).name}"]


def test_the_workers_get_the_same_signal(lockstep: Any) -> None:
    running = lockstep.start("-n", "2", lockstep.script("try: announce('w'); stay()\nfinally: print('bye')"))
    running.announced(2)
    running.process.send_signal(signal.SIGINT)
    done = running.end()
    assert (done.status, done.out) == (130, "bye\n")
    assert [done.log(worker).splitlines()[-1] for worker in (0, 1)] == ["KeyboardInterrupt"] * 2


@pytest.mark.ci
@pytest.mark.parametrize("keeping", [(), ("--checkpoint", "kept", "--grace", "1s")])
def test_a_signal_after_the_scripts_have_finished_keeps_the_success(
    lockstep: Any, is_gone: Gone, keeping: tuple[str, ...]
) -> None:
    script = "import atexit; atexit.register(stay); atexit.register(announce, 'worker'); print('digest')"
    running = lockstep.start("-n", "2", *keeping, lockstep.script(script))
    processes = running.announced(2)["worker"]
    running.process.send_signal(signal.SIGTERM)
    done = running.end()
    assert is_gone(processes, 0)
    assert (done.status, done.out) == (0, "digest\n")
    assert done.notes[0] == "lockstep: SIGTERM arrived after the script finished: the job succeeded"
    assert done.events()[-1]["status"] == 0


@pytest.mark.ci(2)
@pytest.mark.parametrize(("number", "status"), SIGNALS[:2])
def test_workers_that_ignore_signals_are_killed_after_three_seconds(
    lockstep: Any, is_gone: Gone, number: int, status: int
) -> None:
    running, processes = begin(lockstep, IGNORES_SIGNALS)
    start = time.monotonic()
    running.process.send_signal(number)
    assert is_gone(processes, 300)
    done = running.end()
    assert done.status == status
    assert time.monotonic() - start > 2.5
    killed = "lockstep: workers 0 and 1 did not exit within 3 s after the signal: killing them"
    assert done.notes == [killed, f"lockstep: stopped by {signal.Signals(number).name}"]


def test_a_second_signal_kills_all_processes_at_once(lockstep: Any, is_gone: Gone) -> None:
    name = "signal.signal(signal.SIGTERM, lambda *_: announce('signaled'))\n" + OBEYS
    running, processes = begin(lockstep, name)
    running.process.send_signal(signal.SIGTERM)
    for pidfd in running.announced(2)["signaled"]:
        os.close(pidfd)
    running.process.send_signal(signal.SIGTERM)
    assert is_gone(processes, 300)
    done = running.end()
    assert done.status == 143
    # The second signal leaves no time to exit.
    assert "did not exit within" not in done.err


STEP = """
import numpy as np
from lockstep.checkpoint.checkpoint_files import Contents
keeper = job.current().checkpoints.scheduler
from lockstep.observability.events import LastStepEnded, StrategyInstalled
job.current().events.publish(StrategyInstalled("none"))
announce("worker")
if me == 1:
    stay()
os.close(os.open("step", os.O_RDONLY))
job.current().events.publish(LastStepEnded(7))
keeper.after_step(7, lambda: Contents(7, {}, {"a": np.arange(7)}))
keeper.close(60)
sys.exit(143)
"""


@pytest.mark.ci
def test_a_step_and_its_checkpoint_have_the_grace_period(lockstep: Any, is_gone: Gone) -> None:
    """One job's step outlasts the usual time to end, the other's outlasts its grace period."""
    again = "; Ctrl-C again ends the job at once"
    name = lockstep.script(STEP)
    os.mkfifo(lockstep.folder / "step")
    first = lockstep.start("-n", "2", "--checkpoint", "kept", name)
    held = first.announced(2)["worker"]
    second = lockstep.start("-n", "2", "--checkpoint", "other", "--grace", "1s", name, run="second")
    late = second.announced(2)["worker"]
    first.process.send_signal(signal.SIGINT)
    second.process.send_signal(signal.SIGTERM)
    done = second.end()
    assert done.status == 143
    assert is_gone(late, 0)
    assert done.notes == [
        "lockstep: stopping (SIGTERM): waiting up to 1 s for the step and a checkpoint",
        "lockstep: no checkpoint: the step did not finish within 1 s (--grace)",
        "lockstep: worker 0 did not exit within 3 s after the signal: killing it",
        "lockstep: stopped by SIGTERM",
    ]
    assert done.events()[-1]["event"] == "finished"
    # A job without checkpoints ends sooner.
    assert not is_gone([os.pidfd_open(first.agent())], 2)
    os.close(os.open(lockstep.folder / "step", os.O_WRONLY))
    done = first.end()
    assert done.status == 130
    assert is_gone(held, 0)
    assert done.notes == [
        f"lockstep: stopping (SIGINT): waiting up to 20 s for the step and a checkpoint{again}",
        "lockstep: stopping: step 7 is complete; writing its checkpoint",
        f"lockstep: checkpoint {lockstep.folder}/kept/step-000000000007",
        "lockstep: checkpoint written at step 7",
        "lockstep: stopped by SIGINT",
    ]
    assert done.events()[-1]["event"] == "finished"
    assert (lockstep.folder / "kept" / "step-000000000007").is_dir()


def test_a_second_interrupt_does_not_wait_for_the_checkpoint(lockstep: Any, is_gone: Gone) -> None:
    os.mkfifo(lockstep.folder / "step")
    running = lockstep.start("-n", "2", "--checkpoint", "kept", lockstep.script(STEP))
    workers = running.announced(2)["worker"]
    running.process.send_signal(signal.SIGINT)
    while "stopping (SIGINT)" not in running.process.stderr.readline():
        assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    assert is_gone(workers, 300)
    done = running.end()
    assert done.status == 130
    assert "no checkpoint: the step did not finish" not in done.err
    assert not list((lockstep.folder / "kept").glob("step-*"))


def test_a_paused_reader_does_not_prevent_the_checkpoint(lockstep: Any, is_gone: Gone) -> None:
    step = STEP.replace('os.close(os.open("step", os.O_RDONLY))', "for n in range(64): print('x' * 65535)")
    running = lockstep.start("-n", "2", "--checkpoint", "kept", lockstep.script(step))
    workers = running.announced(2)["worker"]
    running.process.send_signal(signal.SIGTERM)
    # No process reads the chief's output until the chief has ended.
    assert is_gone(workers, 300)
    done = running.end()
    assert done.status == 143
    assert "lockstep: checkpoint written at step 7" in done.notes
    assert len(done.log(0)) == 2**22


def test_a_signal_before_the_scripts_run_ends_the_job(lockstep: Any) -> None:
    running = lockstep.start("-n", "2", lockstep.script("announce('early'); stay()"))
    line = running.process.stderr.readline()
    assert line.endswith("logs in run\n")
    running.process.send_signal(signal.SIGTERM)
    assert running.end().status in (143, -signal.SIGTERM)


def test_no_process_remains_after_a_killed_command(lockstep: Any, is_gone: Gone) -> None:
    running, processes = begin(lockstep, IGNORES_SIGNALS)
    processes.append(os.pidfd_open(running.agent()))
    running.process.kill()
    assert is_gone(processes, 300)
    assert running.end().status == -signal.SIGKILL


def test_no_process_remains_after_a_killed_agent(lockstep: Any, is_gone: Gone) -> None:
    running, processes = begin(lockstep, IGNORES_SIGNALS)
    agent = running.agent()
    os.kill(agent, signal.SIGKILL)
    done = running.end()
    assert is_gone(processes, 0)
    assert done.status == 137
    assert done.notes == [
        f"lockstep: the coordinator (process {agent}) was killed by SIGKILL, which ended the job"
    ]


def test_workers_do_not_outlive_command_and_agent(lockstep: Any, is_gone: Gone) -> None:
    running = lockstep.start("-n", "2", lockstep.script("announce('worker'); stay()"))
    workers, agent = running.announced(2)["worker"], running.agent()
    below = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    assert len(below) == 3, "the workers and their fork server"
    running.process.send_signal(signal.SIGSTOP)
    processes = [*workers, *(os.pidfd_open(int(pid)) for pid in below)]
    os.kill(agent, signal.SIGKILL)
    assert is_gone(processes, 300)


@pytest.mark.ci
def test_workers_end_though_the_agent_is_stopped(lockstep: Any, is_gone: Gone) -> None:
    running, processes = begin(lockstep, IGNORES_SIGNALS)
    os.kill(running.agent(), signal.SIGSTOP)
    running.process.send_signal(signal.SIGTERM)
    running.process.send_signal(signal.SIGINT)
    done = running.end()
    assert is_gone(processes, 0)
    assert done.status in (130, 143)


def test_workers_end_though_the_terminal_is_not_read(lockstep: Any, is_gone: Gone) -> None:
    flood = "if me == 0:\n announce('flood')\n while True: os.write(1, b'x' * 65536)\n"
    running = lockstep.start("-n", "2", lockstep.script(flood + "announce('worker'); stay()"))
    processes = [pidfd for pidfds in running.announced(2).values() for pidfd in pidfds]
    processes.append(os.pidfd_open(running.agent()))
    running.process.kill()
    assert is_gone(processes, 300)


@pytest.mark.parametrize(("text", "status"), [("escape()", 0), ("escape(); sys.exit(3)", 3)])
def test_processes_that_a_script_leaves_end_with_the_job(
    lockstep: Any, is_gone: Gone, text: str, status: int
) -> None:
    running = lockstep.start("-n", "1", lockstep.script(text))
    left = running.announced(1)["grandchild"]
    assert running.end().status == status
    assert is_gone(left, 0)


def test_existing_children_of_the_command_survive(lockstep: Any, is_gone: Gone) -> None:
    """A shell may start a process and then exec the command."""
    name = lockstep.script("escape()")
    shell = f"sleep 1000 & echo $!; exec {sys.executable} -m lockstep run -n 1 --run-dir run {name}"
    environment = {**os.environ, "ANNOUNCEMENTS": str(lockstep.folder / "announcements")}
    with subprocess.Popen(
        ["bash", "-c", shell], cwd=lockstep.folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        sleeper = os.pidfd_open(int(process.stdout.readline()))
        process.wait(timeout=300)
        assert process.returncode == 0
        signal.pidfd_send_signal(sleeper, signal.SIGKILL)
        assert is_gone([sleeper], 300)


def test_no_process_remains_after_a_killed_process_group(lockstep: Any, is_gone: Gone) -> None:
    """As a shell's `kill -9 %1` and some schedulers do: the agent is in another session."""
    running = lockstep.start("-n", "2", lockstep.script(IGNORES_SIGNALS), process_group=0)
    processes = [pidfd for pidfds in running.announced(4).values() for pidfd in pidfds]
    os.killpg(running.process.pid, signal.SIGKILL)
    assert is_gone(processes, 300)


def test_a_checkpoint_may_take_longer_than_the_end_of_the_workers() -> None:
    """After Ctrl-C, too. Here, workers have no time to end, and the checkpoint takes a second."""
    script = """
import os, signal, sys, time
from lockstep.local_job import job_process
from lockstep.system.event_loop import wait_for

job_process.AFTER_GRACE = 0.0

def serve(command):
    os.kill(os.getppid(), signal.SIGINT)
    wait_for([command.fileno()])
    time.sleep(1)
    return 7

sys.exit(job_process.run_in_job_process(serve, 600.0, None))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (7, "")
