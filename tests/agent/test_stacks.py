"""Stacks that an agent reports on request, of real processes that write them, are stopped or end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.agent.worker_handle import StackDump, WorkerHandle
from lockstep.protocol.admin import StackReply

PROGRAM = """
import sys, time
from pathlib import Path
from lockstep.worker.stack_dump import write_when_asked
write_when_asked(Path(sys.argv[1]))
def computes_here():
    print("ready", flush=True)
    while True:
        sum(range(100_000))
computes_here()
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "stack")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield running
        running.kill()


@pytest.fixture
def worker(process: "subprocess.Popen[str]", tmp_path: Path) -> WorkerHandle:
    handle: Any = SimpleNamespace(send_signal=process.send_signal)
    return WorkerHandle(3, 0, handle, None, (), tmp_path / "stack", ready=True)


def taken(worker: WorkerHandle) -> StackReply:
    """Ask for a stack, and look until it is complete, on a clock that is slow: this machine may be, too."""
    begun = time.monotonic()
    dump = worker.begin_stack(100.0)
    assert isinstance(dump, StackDump)
    while (found := dump.look(100.0 + (time.monotonic() - begun) / 10)) is None:
        pass
    return found


def test_the_stack_of_a_worker_that_computes(worker: WorkerHandle) -> None:
    for _ in range(2):
        found = taken(worker)
        assert (found.worker, found.problem) == (3, "")
        assert found.frames[0].endswith("in computes_here")


def test_a_stopped_worker_does_not_respond(worker: WorkerHandle, process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    dump = worker.begin_stack(100.0)
    assert isinstance(dump, StackDump)
    assert dump.look(101.9) is None
    found = dump.look(102.0)
    assert found is not None
    assert found.frames == ()
    assert found.problem.startswith("it has not responded within 2 s")


def test_a_worker_that_ends_meanwhile(worker: WorkerHandle, process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    dump = worker.begin_stack(100.0)
    assert isinstance(dump, StackDump)
    worker.exited = True
    assert dump.look(100.1) == StackReply(3, (), "it has ended")
    assert worker.begin_stack(100.0) == "it has ended"


def test_a_worker_that_has_not_begun_gets_no_signal(worker: WorkerHandle) -> None:
    worker.ready = False
    assert worker.begin_stack(100.0) == "it has not reached its script yet"
