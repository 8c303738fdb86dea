"""The coordinator of a job whose workers a person starts: it waits until all are there, then watches them.

Started by the process that comes first, see `lockstep.rendezvous.join`; it ends when no process is left.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lockstep.agent.agent import Agent
from lockstep.agent.command import fill_standard_descriptors
from lockstep.agent.exchange import open_shared
from lockstep.collectives.shared.pool import SharedPool
from lockstep.coordinator.coordinator import Coordinator
from lockstep.errors import LockstepError
from lockstep.observability.bus import Bus
from lockstep.observability.event_log import EventLog
from lockstep.observability.events import RUN_EVENTS
from lockstep.protocol.channel import Attachment
from lockstep.protocol.host import Stop
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.rendezvous import decode_arrival
from lockstep.rendezvous.processes import ExternalProcesses, Terminals
from lockstep.rendezvous.server import RendezvousServer, RendezvousStarter
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import claim_folder, empty_folder, fresh_folder, leave_folder
from lockstep.transport.local_channel import LocalChannel

_TIMEOUT = 600.0


def main(arguments: Sequence[str]) -> None:
    """Coordinate one job.

    Args:
        arguments: the arrival that it begins with, and the descriptors of the sockets that listen.
    """
    if os.fork():
        # Whoever started this process need not wait for its end.
        os._exit(0)
    first, *descriptors = arguments
    listeners = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    for listener in listeners:
        listener.set_inheritable(False)
    server = RendezvousServer(decode_arrival(first.encode()), listeners)
    terminals = Terminals(server.handles)
    # From here on a process that ends can take its terminal along: nobody else holds it.
    os.dup2(0, 2)
    try:
        if _gather(server):
            _coordinate(server, terminals)
    except LockstepError as error:
        server.turn_away(str(error))
    except Exception as error:
        terminals.say(f"the coordinator failed: {''.join(traceback.format_exception(error))}")
        server.turn_away(f"the coordinator failed: {error!r}")
    finally:
        server.close()


def _gather(server: RendezvousServer) -> bool:
    """Wait until somebody is there for each task; return whether that came to be, or all have left."""
    while not server.is_complete:
        server.serve()
        if server.is_empty:
            return False
        if not server.is_complete:
            select.select([server], [], [])
    return True


def _coordinate(server: RendezvousServer, terminals: Terminals) -> None:
    spec = _spec(server)
    lock = claim_folder(spec.run_dir)
    paths, pid, clock = RunPaths(spec.run_dir.absolute()), os.getpid(), SystemClock()
    empty_folder(paths.sources)
    terminals.say(f"{spec.shape}; events in {spec.run_dir}")
    person, command = LocalChannel.pair()

    def pass_on(number: int, frame: FrameType | None) -> None:
        person.send(Stop(number))

    signal.signal(signal.SIGTERM, pass_on)
    to_agent, to_coordinator = LocalChannel.pair()
    events = Bus(clock, complain=terminals.say)
    with EventLog.open(paths.events, terminals.say) as log, EventLoop() as loop:
        events.subscribe(log.append, *RUN_EVENTS)
        agent = Agent(
            job=paths.root.name,
            coordinator=to_coordinator,
            loop=loop,
            starter=RendezvousStarter(spec, paths, pid, server),
            open_exchange=open_shared,
            pool=Attachment(SharedPool.create().fd),
            console=terminals,
            descendants=ExternalProcesses(server.workers),
            arrivals=server,
        )
        coordinator = Coordinator(
            spec=spec,
            paths=paths,
            pid=pid,
            agent=to_agent,
            command=command,
            loop=loop,
            console=terminals,
            events=events,
            clock=clock,
            state=State.of(spec.view, TimeLimits(timeout=spec.timeout), JobSize(spec.workers, by_hand=True)),
        )
        with contextlib.closing(agent):
            coordinator.run()
    leave_folder(spec.run_dir)
    os.close(lock)
    if not server.assigned:
        server.turn_away("the job could not start for the reason above")


def _spec(server: RendezvousServer) -> JobSpec:
    first, replicas = server.first, len(server.first.tasks)
    cores = min(process.arrival.cores for process in server.waiting.values() if process.arrival is not None)
    return JobSpec(
        target=first.target,
        module=False,
        arguments=(),
        workers=replicas,
        replicas=replicas,
        threads=max(1, cores // replicas),
        seed=0,
        timeout=_TIMEOUT,
        run_dir=fresh_folder(Path("runs"), Path(first.target).stem, time.time()),
        backend=first.backend,
    )


if __name__ == "__main__":
    fill_standard_descriptors()
    main(sys.argv[1:])
