"""Reports of agents, as tests send them."""

from lockstep.observability.events import ScriptEnded, WorkerExited, WorkerFact
from lockstep.protocol.host import ExitReport, WorkerSaid
from lockstep.protocol.worker import EventReport


def said(fact: WorkerFact) -> WorkerSaid:
    """Return the report of what a worker reports of itself."""
    return WorkerSaid(fact.worker, EventReport(fact))


def script_ended(worker: int) -> WorkerSaid:
    """Return the report that a worker's script has succeeded."""
    return said(ScriptEnded(worker, 0))


def exited(worker: int, status: int, stack: str = "") -> ExitReport:
    """Return the report that the process of a worker has ended."""
    return ExitReport(WorkerExited(worker, status), stack=stack)
