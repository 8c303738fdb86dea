"""The desk: what becomes of a person's orders."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lockstep.control.decisions import Action, Event, Signal
from lockstep.control.desk import Desk
from lockstep.control.door import address
from lockstep.control.orders import MAX_PACKET, End, Order, Reply, Status, decode_reply, encode
from lockstep.control.spec import JobSpec
from lockstep.control.state import Stage, State
from lockstep.control.supervision import decide
from lockstep.topology import place

STATE = State(frozenset({0, 1}), view=place(4, (0, 1)), elastic=True)
SPEC = JobSpec("a.py", False, (), 2, 4, 1, 0, 60.0, Path("/runs/job"))
CHIEF, ALL = [Signal(0, signal.SIGTERM)], [Signal(0, signal.SIGTERM), Signal(1, signal.SIGTERM)]


@dataclass
class Job:
    """Supervision of a job, and the way to its desk."""

    state: State
    acted: list[Action] = field(default_factory=list)

    def decide(self, event: Event) -> None:
        decision = decide(self.state, event, 10.0)
        self.state = decision.state
        self.acted += decision.actions


@pytest.fixture
def order() -> Iterator[Callable[[Job, Order], Reply]]:
    """Give an order to a job, as another process would."""
    opened: list[Desk] = []

    def give(job: Job, order: Order) -> Reply:
        desk = Desk(SPEC, 1, "/runs/job", 5.0, lambda: job.state, job.decide)
        door = desk.open(f"desk-{os.getpid()}")
        opened.append(desk)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(10)
            client.connect(address(door.name))
            client.send(encode(order))
            door.serve()
            return decode_reply(client.recv(MAX_PACKET))

    yield give
    for desk in opened:
        desk.close()


@pytest.mark.parametrize(
    ("state", "signals", "stage"),
    [
        (replace(STATE, keeps=True), CHIEF, Stage.SAVING),
        (STATE, ALL, Stage.TERMINATING),
        (replace(STATE, stage=Stage.LOOKING), ALL, Stage.TERMINATING),
        (replace(STATE, stage=Stage.ENDING), [], Stage.ENDING),
    ],
)
def test_a_second_order_to_end_changes_nothing(
    order: Callable[[Job, Order], Reply], state: State, signals: list[Signal], stage: Stage
) -> None:
    job = Job(state)
    for _ in range(3):
        assert isinstance(order(job, End()), Status)
        told = [action for action in job.acted if isinstance(action, Signal)]
        assert (told, job.state.stage) == (signals, stage)
