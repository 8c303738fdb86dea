"""Coordinator and agent of one job in one process, served by one event loop."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from lockstep.agent.agent import Agent
from lockstep.agent.host_load import LoadMeter
from lockstep.agent.lane_connections import HostNetwork
from lockstep.agent.starter import Arrivals, Starter
from lockstep.agent.worker_output import WorkerOutput
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.coordinator.coordinator import Coordinator
from lockstep.coordinator.host_agent import HostAgent
from lockstep.coordinator.notifications import notified
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.observability.event_log import recorded
from lockstep.observability.exports import NO_EXPORTS, Exports, exported
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.channel import Attachment, Channel
from lockstep.protocol.host import HostReport, Instruction, PeerAddress
from lockstep.protocol.job_spec import JobSpec
from lockstep.supervisor.state import State
from lockstep.system.clock import SystemClock
from lockstep.system.descendants import Descendants
from lockstep.system.event_loop import EventLoop
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.transport.local_channel import LocalChannel


@dataclass(frozen=True)
class LocalHost:
    """The parts that a job uses on the host of its coordinator.

    Attributes:
        output: receives the output of workers.
        starter: starts workers.
        descendants: the processes of the job.
        arrivals: the arrivals of workers that a user starts by hand; None if there can be none.
        host: the index of the host in the job.
        name: the name of the host, for messages; empty if the job has one host.
        peer: the address for workers of other hosts; None if the job has one host.
        network: how workers reach other hosts; None if the job has one host.
    """

    output: WorkerOutput
    starter: Starter
    descendants: Descendants
    arrivals: Arrivals | None = None
    host: int = 0
    name: str = ""
    peer: PeerAddress | None = None
    network: HostNetwork | None = None


def start_agent(
    local: LocalHost,
    spec: JobSpec,
    coordinator: Channel[HostReport, Instruction],
    loop: EventLoop,
    *,
    late: bool = False,
    say: Callable[[str], None] = note,
) -> Agent:
    """Return the agent of a job on this host, which `loop` serves.

    Args:
        local: this host.
        spec: the job.
        coordinator: the channel to its coordinator.
        loop: serves the agent.
        late: whether the host joins a running job.
        say: shows a note of the coordinator to the users of this host.

    Raises:
        SharedMemoryError: this machine has too little memory.
        OSError: this process has too many descriptors.
    """
    return Agent(
        spec=spec,
        coordinator=coordinator,
        loop=loop,
        starter=local.starter,
        open_exchange=ControlSegment.create,
        pool=Attachment(SharedPool.create().fd),
        state_pool=Attachment(SharedPool.create().fd) if spec.divided_update else None,
        output=local.output,
        descendants=local.descendants,
        meter=LoadMeter.of_host(local.name),
        host=local.host,
        name=local.name,
        network=local.network,
        arrivals=local.arrivals,
        late=late,
        say=say,
    )


def run_job(
    spec: JobSpec,
    state: State,
    paths: RunPaths,
    command: StopChannel,
    *,
    pid: int,
    console: Console,
    loop: EventLoop,
    local: LocalHost,
    exports: Exports = NO_EXPORTS,
) -> int:
    """Run a job of one host to its end in this process; return its exit status.

    Args:
        spec: the job.
        state: the state of supervision at the start.
        paths: the paths of the run, absolute.
        command: the channel over which the job is stopped; the job ends when its other end closes.
        pid: process id of the command.
        console: shows notes, and the output of workers.
        loop: serves everything.
        local: the host of this process.
        exports: the exports of this process.

    Raises:
        SharedMemoryError: this machine has too little memory.
        OSError: this process has too many descriptors.
    """
    clock = SystemClock()
    events = Bus(clock, complain=console.say)
    members = state.view.workers
    with (
        recorded(events, paths, console.say),
        exported(events, exports, spec.labels, len(members), note),
        notified(events, exports.notifier, paths, spec.replicas, members),
    ):
        to_agent, to_coordinator = LocalChannel.pair()
        with closing(start_agent(local, spec, to_coordinator, loop)):
            coordinator = Coordinator(
                spec=spec,
                paths=paths,
                pid=pid,
                agents=[HostAgent(to_agent, local.name, local.peer)],
                command=command,
                loop=loop,
                console=console,
                events=events,
                clock=clock,
                state=state,
            )
            return coordinator.run()
