"""Answers a person who asks for a job, or orders something of it, from another terminal."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.coordinator.admin_socket import AdminSocket
from lockstep.protocol.admin import Order, Refused, Reply, ScaleRequest, Status, StatusRequest, StopRequest
from lockstep.protocol.job_spec import JobSpec
from lockstep.supervisor import events
from lockstep.supervisor.decide import refusal
from lockstep.supervisor.state import Stage, State


@dataclass
class AdminService:
    """Hears orders about one job.

    Attributes:
        spec: the job.
        pid: of the agent.
        run_dir: the run's folder, absolute.
        since: when the job began, in seconds since 1970.
        state: returns what supervision remembers.
        decide: has it decide about an event.
        doing: the call that the workers are in.
    """

    spec: JobSpec
    pid: int
    run_dir: str
    since: float
    state: Callable[[], State]
    decide: Callable[[events.Event], None]
    doing: str = ""
    _socket: AdminSocket | None = None

    def open(self, name: str) -> AdminSocket:
        """Begin to hear orders for a job of this name.

        Raises:
            UnfitError: this machine cannot do that.
        """
        self._socket = AdminSocket.open(name, self._answer)
        return self._socket

    def close(self) -> None:
        """Hear no more."""
        if self._socket is not None:
            self._socket.close()

    def _answer(self, order: Order) -> Reply:
        match order:
            case ScaleRequest(workers):
                if reason := refusal(self.state(), workers):
                    return Refused(reason)
                self.decide(events.ScaleRequested(workers))
            case StopRequest() if self.state().stage in (Stage.RUNNING, Stage.LOOKING):
                self.decide(events.StopRequested(signal.SIGTERM))
            case StopRequest() | StatusRequest():
                # The same order once more must not cut short how the job ends.
                pass
        return self._status()

    def _status(self) -> Status:
        assert self._socket is not None
        state = self.state()
        return Status(
            job=self._socket.name,
            script=self.spec.target,
            pid=self.pid,
            run_dir=self.run_dir,
            since=self.since,
            replicas=self.spec.replicas,
            workers=tuple(worker for worker in state.members if worker in state.present),
            joining=state.joiners,
            wanted=state.size.wanted,
            where=self.doing,
        )
