"""Reports of agents, as tests send them."""

from lockstep.observability.events import ScriptEnded, WorkerFact
from lockstep.protocol.host import WorkerSaid
from lockstep.protocol.worker import EventReport


def said(fact: WorkerFact) -> WorkerSaid:
    """Return the report of what a worker reports of itself."""
    return WorkerSaid(fact.worker, EventReport(fact))


def script_ended(worker: int) -> WorkerSaid:
    """Return the report that a worker's script has succeeded."""
    return said(ScriptEnded(worker, 0))
