"""The service: what becomes of a person's orders."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lockstep.coordinator.admin_service import AdminService
from lockstep.coordinator.admin_socket import address
from lockstep.protocol.admin import MAX_PACKET, Order, Reply, Status, StopRequest, decode_reply, encode
from lockstep.protocol.job_spec import JobSpec
from lockstep.supervisor.decide import decide
from lockstep.supervisor.events import Action, Event, SignalWorker
from lockstep.supervisor.state import JobSize, Shutdown, Stage, State, TimeLimits
from lockstep.topology import place

STATE = replace(State.of(place(4, (0, 1)), TimeLimits(), JobSize()), elastic=True)
SPEC = JobSpec("a.py", False, (), 2, 4, 1, 0, 60.0, Path("/runs/job"))
CHIEF, ALL = (
    [SignalWorker(0, signal.SIGTERM)],
    [SignalWorker(0, signal.SIGTERM), SignalWorker(1, signal.SIGTERM)],
)


@dataclass
class Job:
    """Supervision of a job, and the way to its service."""

    state: State
    acted: list[Action] = field(default_factory=list)

    def decide(self, event: Event) -> None:
        decision = decide(self.state, event, 10.0)
        self.state = decision.state
        self.acted += decision.actions


@pytest.fixture
def order() -> Iterator[Callable[[Job, Order], Reply]]:
    """Give an order to a job, as another process would."""
    opened: list[AdminService] = []

    def give(job: Job, order: Order) -> Reply:
        service = AdminService(SPEC, 1, "/runs/job", 5.0, lambda: job.state, job.decide)
        socket_ = service.open(f"service-{os.getpid()}")
        opened.append(service)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(10)
            client.connect(address(socket_.name))
            client.send(encode(order))
            socket_.serve()
            return decode_reply(client.recv(MAX_PACKET))

    yield give
    for service in opened:
        service.close()


@pytest.mark.parametrize(
    ("state", "signals", "stage"),
    [
        (replace(STATE, keeps=True), CHIEF, Stage.SAVING),
        (STATE, ALL, Stage.TERMINATING),
        (replace(STATE, shutdown=Shutdown(Stage.LOOKING)), ALL, Stage.TERMINATING),
        (replace(STATE, shutdown=Shutdown(Stage.ENDING)), [], Stage.ENDING),
    ],
)
def test_a_second_order_to_end_changes_nothing(
    order: Callable[[Job, Order], Reply], state: State, signals: list[SignalWorker], stage: Stage
) -> None:
    job = Job(state)
    for _ in range(3):
        assert isinstance(order(job, StopRequest()), Status)
        told = [action for action in job.acted if isinstance(action, SignalWorker)]
        assert (told, job.state.stage) == (signals, stage)
