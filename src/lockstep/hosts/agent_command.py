"""The command `lockstep agent`: an agent on another host, and the process that watches it."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

from lockstep.hosts.agent_process import MOST_QUEUED, AgentProcess
from lockstep.local_job.job_process import run_in_job_process
from lockstep.protocol.channel import Channel
from lockstep.protocol.host import RemoteInstruction, RemoteReport, Stop
from lockstep.system.clock import SystemClock
from lockstep.system.environment import ssh_address
from lockstep.system.event_loop import EventLoop
from lockstep.transport.stream_channel import StreamChannel


def run_over_pipes() -> int:
    """Run an agent that reads instructions from stdin and reports to stdout; return the exit status."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # What a library prints must not mix with messages.
    os.dup2(2, 1)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-"))

    def serve(command: Channel[Stop, Stop]) -> int:
        with EventLoop() as loop:
            channel: StreamChannel[RemoteReport, RemoteInstruction] = StreamChannel(
                RemoteInstruction, reading, writing, most_queued=MOST_QUEUED
            )
            address = ssh_address() or socket.gethostbyname(socket.gethostname())
            at = f"[{address}]:0" if ":" in address else f"{address}:0"
            try:
                return AgentProcess(channel, command, loop, SystemClock(), at, None, folder).run()
            finally:
                # Also if the process that watches this one was killed.
                shutil.rmtree(folder, ignore_errors=True)

    try:
        return run_in_job_process(serve, 0.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
