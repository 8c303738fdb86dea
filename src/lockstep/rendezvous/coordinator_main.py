"""The main program of a job whose workers are started by hand: its coordinator and agent, in one process.

The first of the processes that are started by hand starts it (see `lockstep.rendezvous.take_part`). It waits
for a process per task, runs the job, and ends when no process remains. If the tasks are on several hosts,
each host has such a process: see `lockstep.rendezvous.over_hosts`.
"""

import os
import socket
import sys
import traceback
from collections.abc import Sequence

from lockstep.agent.worker_output import LocalOutput
from lockstep.errors import LockstepError
from lockstep.local_job.composition import LocalHost, run_job
from lockstep.protocol.job_spec import default_threads
from lockstep.protocol.rendezvous import decode_arrival
from lockstep.rendezvous.job_by_hand import job_of, stopped_by_signals
from lockstep.rendezvous.processes import ExternalProcesses, Terminals
from lockstep.rendezvous.server import RendezvousServer, RendezvousStarter
from lockstep.supervisor.state import State
from lockstep.system.event_loop import EventLoop, wait_for
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import empty_folder
from lockstep.system.standard_streams import fill_standard_descriptors


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

    Each process gives up after the limit of its own wait, so this also ends.
    """
    while not server.is_complete:
        server.serve()
        if server.is_empty:
            return False
        if not server.is_complete:
            wait_for([server.fileno()])
    return True


def _coordinate(server: RendezvousServer, terminals: Terminals) -> None:
    cores = min(process.arrival.cores for process in server.waiting.values() if process.arrival is not None)
    with (
        job_of(server, threads=default_threads([(cores, len(server.first.tasks))])) as spec,
        EventLoop() as loop,
    ):
        paths = RunPaths(spec.run_dir.absolute())
        empty_folder(paths.sources)
        for line in spec.describe("events"):
            terminals.say(line)
        _, command = stopped_by_signals()
        state = State.begin(spec, by_hand=True)
        starter = RendezvousStarter(spec, paths, os.getpid(), server)
        output, processes = LocalOutput(terminals, paths), ExternalProcesses(server.workers)
        local = LocalHost(output, starter, processes, server)
        run_job(spec, state, paths, command, pid=os.getpid(), console=terminals, loop=loop, local=local)


if __name__ == "__main__":
    fill_standard_descriptors()
    main(sys.argv[1:])
