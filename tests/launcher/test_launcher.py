"""The contract of each launcher."""

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_launcher import FakeHandle, FakeLauncher

from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.launcher.fork_server import ForkServerPlan
from lockstep.launcher.launcher import AgentChannel, Handle, Launch, Launcher, LocalLauncher
from lockstep.observability.events import ScriptEnded, WorkerReady
from lockstep.protocol.channel import Attachment, PeerGone
from lockstep.protocol.job_spec import JobSettings
from lockstep.protocol.worker import EnterView, EventReport, SharedMemoryEndpoint, Welcome
from lockstep.system.environment import WorkerIdentity, job_environment, tf_config, worker_environment
from lockstep.system.paths import RunPaths
from lockstep.system.prctl import adopt_orphans

PATIENCE = 300_000
Start = Callable[[str], Handle]

SCRIPTS = {
    "ends": "import sys; print('out'); print('err', file=sys.stderr)",
    "leaves": "import sys; sys.exit(3)",
    "stays": "import os; print('out'); os.read(os.pipe()[0], 1)",
}


def play(script: str, worker: FakeHandle) -> None:
    worker.send(EventReport(WorkerReady(0)))
    if script in ("ends", "stays"):
        worker.write(stdout=b"out\n")
    if script == "ends":
        worker.write(stderr=b"err\n")
        worker.send(EventReport(ScriptEnded(0, 0)))
    if script != "stays":
        worker.end(3 if script == "leaves" else 0)


@pytest.fixture(params=["local", "fake"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    handles, launchers = [], []
    RunPaths(tmp_path).sources.mkdir()

    def environment(control: int) -> dict[str, str]:
        identity = WorkerIdentity(0, tmp_path, os.getpid(), control)
        return worker_environment(identity, job_environment(0, 1), cluster=tf_config(0, 1))

    def start(script: str) -> Handle:
        path = tmp_path / f"{script}.py"
        path.write_text(SCRIPTS[script])
        local: Launcher = LocalLauncher(ForkServerPlan((str(path),), job_environment(0, 1)))
        fake: Launcher = FakeLauncher(lambda worker: play(script, worker))
        launcher = local if request.param == "local" else fake
        launchers.append(launcher)
        while (descriptor := launcher.prepare()) is not None:
            wait_for(descriptor)
        handle = launcher.start(Launch(0, environment))
        handles.append(handle)
        handle.channel.send(Welcome(Attachment(SharedPool.create().fd), JobSettings(threads=1, adopts=False)))
        segment = ControlSegment.create(1)
        handle.channel.send(EnterView(1, ((0,),), SharedMemoryEndpoint(Attachment.copy_of(segment.fd))))
        segment.close()
        return handle

    adopt_orphans()
    yield start
    for launcher in launchers:
        launcher.close()
    for handle in handles:
        handle.send_signal(signal.SIGKILL)
        wait_for(handle.exited)
        handle.poll()
        handle.close()


def wait_for(descriptor: int | AgentChannel) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(PATIENCE)


def read(descriptor: int, size: int) -> bytes:
    data, piece = b"", b"x"
    while piece and len(data) < size:
        wait_for(descriptor)
        data += (piece := os.read(descriptor, size - len(data)))
    return data


def receive(handle: Handle) -> Any:
    wait_for(handle.channel)
    return handle.channel.receive()


def test_stdout_and_stderr_are_separate_and_end(start: Start) -> None:
    handle = start("ends")
    assert read(handle.stdout, 100) == b"out\n"
    assert read(handle.stderr, 100) == b"err\n"


def test_messages_arrive_until_the_worker_ends(start: Start) -> None:
    handle = start("ends")
    assert [receive(handle), receive(handle), receive(handle)] == [
        EventReport(WorkerReady(0)),
        EventReport(ScriptEnded(0, 0)),
        PeerGone(),
    ]


@pytest.mark.parametrize(("script", "status"), [("ends", 0), ("leaves", 3)])
def test_poll_returns_the_exit_status(start: Start, script: str, status: int) -> None:
    handle = start(script)
    wait_for(handle.exited)
    assert [handle.poll(), handle.poll()] == [status, status]
    handle.send_signal(signal.SIGTERM)
    assert handle.poll() == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_worker(start: Start, number: int) -> None:
    handle = start("stays")
    assert read(handle.stdout, 4) == b"out\n"
    assert handle.poll() is None
    handle.send_signal(number)
    wait_for(handle.exited)
    assert handle.poll() == -number


def test_reading_does_not_block(start: Start) -> None:
    handle = start("stays")
    read(handle.stdout, 4)
    assert receive(handle) == EventReport(WorkerReady(0))
    assert handle.channel.receive() is None
    for descriptor in (handle.stdout, handle.stderr):
        with pytest.raises(BlockingIOError):
            os.read(descriptor, 1)
