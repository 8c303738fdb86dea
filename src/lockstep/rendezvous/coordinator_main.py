"""The main program of a job whose workers are started by hand: its coordinator and agent, in one process.

The first of the processes that are started by hand starts it (see `lockstep.rendezvous.take_part`). It waits
for a process per task, runs the job, and ends when no process remains. If the tasks are on several hosts,
each host has such a process: see `lockstep.rendezvous.over_hosts`.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lockstep.agent.worker_output import LocalOutput
from lockstep.errors import LockstepError
from lockstep.local_job.composition import LocalHost, run_job
from lockstep.protocol.admin import StopRequest
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.rendezvous import decode_arrival
from lockstep.rendezvous.processes import ExternalProcesses, Terminals
from lockstep.rendezvous.server import RendezvousServer, RendezvousStarter
from lockstep.supervisor.state import State
from lockstep.system.event_loop import EventLoop, wait_for
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import RUNS, claim_folder, empty_folder, fresh_folder, leave_folder
from lockstep.system.standard_streams import fill_standard_descriptors
from lockstep.transport.local_channel import LocalChannel


def main(arguments: Sequence[str]) -> None:
    """Coordinate one job.

    Args:
        arguments: the first arrival of the job, and the descriptors of the listening sockets.
    """
    if os.fork():
        # The process that started this one waits only for this exit.
        os._exit(0)
    first, *descriptors = arguments
    listeners = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    for listener in listeners:
        listener.set_inheritable(False)
    server = RendezvousServer(decode_arrival(first.encode()), listeners)
    terminals = Terminals(server.handles)
    # Release the terminal of the first process, which must not stay open after that process has ended.
    os.dup2(0, 2)
    try:
        if server.first.here:
            from lockstep.rendezvous.over_hosts import serve_host

            serve_host(server, terminals)
        elif _gather(server):
            _coordinate(server, terminals)
    except LockstepError as error:
        server.turn_away(str(error))
    except Exception as error:
        terminals.say(f"the coordinator failed: {''.join(traceback.format_exception(error))}")
        server.turn_away(f"the coordinator failed: {error!r}")
    finally:
        server.close()


def _gather(server: RendezvousServer) -> bool:
    """Wait for a process per task; return False if all processes leave first.

    Each process gives up after the limit of its own wait, so this ends too.
    """
    while not server.is_complete:
        server.serve()
        if server.is_empty:
            return False
        if not server.is_complete:
            wait_for([server.fileno()])
    return True


def _coordinate(server: RendezvousServer, terminals: Terminals) -> None:
    spec = _spec(server)
    lock = claim_folder(spec.run_dir)
    paths = RunPaths(spec.run_dir.absolute())
    empty_folder(paths.sources)
    for line in spec.describe("events"):
        terminals.say(line)
    user, command = LocalChannel.pair()

    def pass_on(number: int, frame: FrameType | None) -> None:
        user.send(StopRequest(number))

    signal.signal(signal.SIGTERM, pass_on)
    state = State.begin(spec, by_hand=True)
    starter = RendezvousStarter(spec, paths, os.getpid(), server)
    output, processes = LocalOutput(terminals, paths), ExternalProcesses(server.workers)
    local = LocalHost(output, starter, processes, server)
    try:
        with EventLoop() as loop:
            run_job(spec, state, paths, command, pid=os.getpid(), console=terminals, loop=loop, local=local)
    finally:
        leave_folder(spec.run_dir)
        os.close(lock)
    if not server.assigned:
        server.turn_away("the job could not start for the reason above")


def _spec(server: RendezvousServer) -> JobSpec:
    first, replicas = server.first, len(server.first.tasks)
    cores = min(process.arrival.cores for process in server.waiting.values() if process.arrival is not None)
    return JobSpec(
        target=first.target,
        module=first.module,
        workers=replicas,
        replicas=replicas,
        threads=max(1, cores // replicas),
        adopts=False,
        run_dir=fresh_folder(RUNS, Path(first.target).stem, time.time()),
        backend=first.backend,
    )


if __name__ == "__main__":
    fill_standard_descriptors()
    main(sys.argv[1:])
