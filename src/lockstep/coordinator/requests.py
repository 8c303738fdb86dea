"""The requests of other terminals to a running job."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.coordinator.admin_socket import AdminSocket, PendingReply
from lockstep.observability.events import StopRequested
from lockstep.protocol.admin import (
    AdminRequest,
    Refused,
    Reply,
    ScaleRequest,
    StackReply,
    StackRequest,
    Status,
    StatusRequest,
    StopRequest,
)
from lockstep.supervisor.decide import refusal
from lockstep.supervisor.events import Event
from lockstep.supervisor.state import State
from lockstep.system.event_loop import EventLoop

WAITS = "the job waits for the object store, which decides whether its coordinator leads it; try again later"


@dataclass
class Requests:
    """Receives requests, and answers them.

    Attributes:
        loop: serves the socket of the job.
        state: returns the state of supervision.
        decide: lets supervision decide on a request.
        pass_on: sends a request for a stack to the agent of its worker.
        status: returns the state of the job of this name, for other terminals.
    """

    loop: EventLoop
    state: Callable[[], State]
    decide: Callable[[Event], None]
    pass_on: Callable[[StackRequest], None]
    status: Callable[[str], Status]
    admin: AdminSocket | None = field(default=None, init=False)
    _waits: bool = field(default=False, init=False)
    _stop: StopRequest | None = field(default=None, init=False)
    _stacks: dict[int, list[PendingReply]] = field(default_factory=dict, init=False)

    def open(self, admin: AdminSocket) -> None:
        """Receive the requests of a socket."""
        self.admin = admin
        admin.answer = self.answer
        self.loop.watch(admin.fileno(), admin.serve)

    def serve_in_wait(self) -> StopRequest | None:
        """Answer requests while supervision cannot make decisions; return a stop among them, or None."""
        self._waits, self._stop = True, None
        try:
            if self.admin is not None:
                self.admin.serve()
        finally:
            self._waits = False
        return self._stop

    def close(self) -> None:
        """Stop receiving requests; safe to call more than once."""
        if self.admin is not None:
            self.loop.unwatch(self.admin.fileno())
            self.admin.close()
            self.admin = None

    def answer_stack(self, reply: StackReply) -> None:
        """Answer the requests for the stack of a worker."""
        for pending in self._stacks.pop(reply.worker, ()):
            pending.send(reply)

    def answer(self, request: AdminRequest) -> Reply | PendingReply:
        """Carry out a request; return the reply."""
        assert self.admin is not None
        state = self.state()
        match request:
            case StopRequest() if self._waits:
                self._stop = request if state.active else None
            case StackRequest() | ScaleRequest() if self._waits:
                return Refused(WAITS)
            case StackRequest(worker):
                if worker not in state.running:
                    return Refused(f"no worker {worker} is running")
                pending = PendingReply()
                self._stacks.setdefault(worker, []).append(pending)
                self.pass_on(request)
                return pending
            case ScaleRequest(workers):
                if reason := refusal(state, workers):
                    return Refused(reason)
                self.decide(request)
            case StopRequest(number, waited) if state.active:
                self.decide(StopRequested(number, round(waited, 3)))
            case StopRequest() | StatusRequest():
                # A repeated request must not shorten the end of the job.
                pass
        return self.status(self.admin.name)
