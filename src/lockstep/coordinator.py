"""The coordinator of a job whose workers a person starts: it waits until all are there, then watches them.

Started by the process that comes first, see `lockstep.rendezvous`; it ends when nobody is there any more.
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

from lockstep.clock import SystemClock
from lockstep.collectives.shared import Pool
from lockstep.control.adopted import AdoptedProcesses, Terminals
from lockstep.control.agent import Agent
from lockstep.control.arrivals import decode_arrival
from lockstep.control.command import fill_standard_descriptors
from lockstep.control.messages import Stop, encode
from lockstep.control.reception import AdoptingStarter, Reception
from lockstep.control.run_folder import claim_folder, empty_folder, fresh_folder, leave_folder
from lockstep.control.spec import JobSpec
from lockstep.control.state import Limits, Size, State
from lockstep.control.views import Views
from lockstep.errors import LockstepError
from lockstep.events import EventLog
from lockstep.exchanges import open_exchange
from lockstep.paths import RunPaths

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
    reception = Reception(decode_arrival(first.encode()), listeners)
    terminals = Terminals(reception.handles)
    # From here on a process that ends can take its terminal along: nobody else holds it.
    os.dup2(0, 2)
    try:
        if _gather(reception):
            _coordinate(reception, terminals)
    except LockstepError as error:
        reception.turn_away(str(error))
    except Exception as error:
        terminals.say(f"the coordinator failed: {''.join(traceback.format_exception(error))}")
        reception.turn_away(f"the coordinator failed: {error!r}")
    finally:
        reception.close()


def _gather(reception: Reception) -> bool:
    """Wait until somebody is there for each task; return whether that came to be, or all have left."""
    while not reception.is_complete:
        reception.serve()
        if reception.is_empty:
            return False
        if not reception.is_complete:
            select.select([reception], [], [])
    return True


def _coordinate(reception: Reception, terminals: Terminals) -> None:
    spec = _spec(reception)
    lock = claim_folder(spec.run_dir)
    paths, pid, clock = RunPaths(spec.run_dir.absolute()), os.getpid(), SystemClock()
    empty_folder(paths.sources)
    terminals.say(f"{spec.shape}; events in {spec.run_dir}")
    command, person = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            person.send(encode(Stop(number)), socket.MSG_DONTWAIT)

    signal.signal(signal.SIGTERM, pass_on)
    workers = frozenset(range(spec.workers))
    with person, EventLog.open(paths.events, clock, terminals.say) as events:
        agent = Agent(
            spec=spec,
            paths=paths,
            starter=AdoptingStarter(spec, paths, pid, reception, Pool.create().fd),
            views=Views(open_exchange),
            command=command,
            console=terminals,
            events=events,
            clock=clock,
            descendants=AdoptedProcesses(reception.workers),
            state=State(
                workers,
                Limits(timeout=spec.timeout),
                view=spec.view,
                size=Size(spec.workers, by_hand=True),
                next_worker=spec.workers,
            ),
            reception=reception,
        )
        agent.run()
    leave_folder(spec.run_dir)
    os.close(lock)
    if not reception.seated:
        reception.turn_away("the job could not start for the reason above")


def _spec(reception: Reception) -> JobSpec:
    first, replicas = reception.first, len(reception.first.tasks)
    cores = min(guest.arrival.cores for guest in reception.waiting.values() if guest.arrival is not None)
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
