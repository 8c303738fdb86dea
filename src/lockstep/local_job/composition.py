"""Coordinator and agent of one job in one process, served by one event loop."""

import contextlib
import os

from lockstep.agent.agent import Agent
from lockstep.agent.exchange import open_shared
from lockstep.agent.starter import Arrivals, Starter
from lockstep.agent.worker_output import WorkerOutput
from lockstep.collectives.shared.pool import SharedPool
from lockstep.coordinator.coordinator import Coordinator
from lockstep.coordinator.host_agent import HostAgent
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.observability.event_log import EventLog
from lockstep.observability.events import RUN_EVENTS
from lockstep.protocol.channel import Attachment, Channel
from lockstep.protocol.host import Stop
from lockstep.protocol.job_spec import JobSpec
from lockstep.supervisor.state import State
from lockstep.system.clock import SystemClock
from lockstep.system.descendants import Descendants
from lockstep.system.event_loop import EventLoop
from lockstep.system.paths import RunPaths
from lockstep.transport.local_channel import LocalChannel


def run_job(
    spec: JobSpec,
    state: State,
    paths: RunPaths,
    command: Channel[Stop, Stop],
    *,
    console: Console,
    output: WorkerOutput,
    starter: Starter,
    descendants: Descendants,
    arrivals: Arrivals | None = None,
) -> int:
    """Run a job to its end in this process; return its exit status.

    Args:
        spec: the job.
        state: of supervision at the start.
        paths: of the run, absolute.
        command: the channel over which the job is stopped; the job ends when its other end closes.
        console: shows notes, and the output of workers.
        output: takes the output of workers on this host.
        starter: starts workers.
        descendants: the processes of the job on this host.
        arrivals: where workers that a user starts by hand arrive; None if none can.

    Raises:
        SharedMemoryError: this machine has too little memory.
        OSError: this process has too many descriptors.
    """
    clock = SystemClock()
    to_agent, to_coordinator = LocalChannel.pair()
    events = Bus(clock, complain=console.say)
    with EventLog.open(paths.events, console.say) as log, EventLoop() as loop:
        events.subscribe(log.append, *RUN_EVENTS)
        agent = Agent(
            job=paths.root.name,
            coordinator=to_coordinator,
            loop=loop,
            starter=starter,
            open_exchange=open_shared,
            pool=Attachment(SharedPool.create().fd),
            output=output,
            descendants=descendants,
            arrivals=arrivals,
        )
        coordinator = Coordinator(
            spec=spec,
            paths=paths,
            pid=os.getpid(),
            agents=(HostAgent(to_agent),),
            command=command,
            loop=loop,
            console=console,
            events=events,
            clock=clock,
            state=state,
        )
        with contextlib.closing(agent):
            return coordinator.run()
