"""The connections of a job last over its calls, and what a call asks does not reach another one."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from lockstep.collectives.contract import WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import PeerLostError
from lockstep.keras.parameter_server.mesh import Mesh
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.protocol.parameter_server import Applied, Push, Question, ReadRows, ServedValues
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.transport.array_channel import QuestionArrival
from lockstep.worker.job import Job, JobContext
from thread_hub import Hub

PATIENCE = 120.0
WORKER, SERVER = 1, 2
Inbox = queue.SimpleQueue[QuestionArrival]


@pytest.fixture
def meshes() -> Iterator[list[Mesh]]:
    """The chief, a worker and a server that have met for nothing."""
    view = place(3, (0, 1, 2))
    hub = Hub(ReducePlan.of(view), WaitPolicy(timeout=PATIENCE))
    settings = JobSettings(threads=1, workers=3, replicas=3, parameter_servers=1)
    jobs = [
        Job(
            JobContext(one, Bus(SystemClock(), one), settings),
            (view, hub.member(one)),
            policy=WaitPolicy(timeout=PATIENCE),
        )
        for one in view.workers
    ]
    yield [Mesh(job) for job in jobs]
    for job in jobs:
        job.exit()


def all_of(meshes: list[Mesh], act: Callable[[Mesh], Any]) -> list[Any]:
    """Return what all processes do together."""
    with ThreadPoolExecutor(len(meshes)) as threads:
        return list(threads.map(act, meshes))


def meet(meshes: list[Mesh], call: int) -> Inbox:
    """Let all processes begin a call; return what the server is asked in it."""
    inbox: Inbox = queue.SimpleQueue()
    for mesh in meshes:
        mesh.begin(call, inbox.put)
    all_of(meshes, lambda mesh: mesh.meet(f"call {call}"))
    return inbox


def leave(meshes: list[Mesh], call: int) -> None:
    for mesh in meshes:
        mesh.leave(call)


def ask(mesh: Mesh, inbox: Inbox, question: Question) -> QuestionArrival:
    """Ask the server, and answer for it; return the question as it has arrived."""
    (server,) = mesh.servers([[SERVER]])
    server.send(question, [np.ones(2)])
    arrival = inbox.get(timeout=PATIENCE)
    assert arrival.message == question
    arrival.answer(Applied(7))
    assert server.receive() == (Applied(7), [])
    return arrival


def connections(mesh: Mesh) -> list[Any]:
    assert mesh._end is not None
    return list(mesh._end._open)


def test_all_processes_learn_what_each_one_tells(meshes: list[Mesh]) -> None:
    told = all_of(meshes, lambda mesh: mesh.meet("a meeting", b"from %d" % mesh._job.process))
    assert told == [([[0, 1, 2]], {0: b"from 0", 1: b"from 1", 2: b"from 2"})] * 3
    assert [mesh.workers for mesh in meshes] == [{0: 0, 1: 1, 2: 2}] * 3


def test_connections_last_over_calls(meshes: list[Mesh]) -> None:
    _, worker, server = meshes
    found = []
    for call in (1, 2, 3):
        inbox = meet(meshes, call)
        arrival = ask(worker, inbox, Push(call, (0,)))
        assert (arrival.call, arrival.process, arrival.server) == (call, WORKER, 0)
        found.append(connections(server))
        leave([worker], call)
        left = inbox.get(timeout=PATIENCE)
        assert (left.message, left.call, left.process) == (None, call, WORKER)
        leave(meshes, call)
    assert found == [found[0]] * 3
    assert len(found[0]) == 1


def test_a_question_of_a_call_that_a_process_has_left_has_no_answer(meshes: list[Mesh]) -> None:
    _, worker, server = meshes
    inbox = meet(meshes, 1)
    ask(worker, inbox, Push(0, (0,)))
    channel = worker.channel(SERVER, 0)
    channel.send(Push(1, (0,)))
    assert inbox.get(timeout=PATIENCE).message == Push(1, (0,))
    server.leave(1)
    with pytest.raises(PeerLostError, match="parameter server 0 has ended"):
        channel.receive(Push(1, (0,)))
    leave(meshes, 1)
    ask(worker, meet(meshes, 2), Push(2, (0,)))


def test_a_question_that_arrives_after_its_call_has_no_answer(meshes: list[Mesh]) -> None:
    _, worker, server = meshes
    inbox = meet(meshes, 1)
    ask(worker, inbox, Push(0, (0,)))
    server.leave(1)
    with pytest.raises(PeerLostError, match="parameter server 0 has ended"):
        worker.channel(SERVER, 0).ask(Push(1, (0,)))
    assert inbox.empty()


def test_a_connection_that_has_ended_between_two_calls_is_opened_again(meshes: list[Mesh]) -> None:
    """It does not count as the loss of the server, whose standby would take over."""
    _, worker, server = meshes
    ask(worker, meet(meshes, 1), Push(0, (0,)))
    leave(meshes, 1)
    server.drop(WORKER)
    inbox = meet(meshes, 2)
    assert ask(worker, inbox, Push(1, (0,))).call == 2
    assert len(connections(server)) == 1


@pytest.mark.parametrize("call", [0, 1])
def test_rows_are_read_at_any_time(meshes: list[Mesh], call: int) -> None:
    chief, worker, server = meshes
    rows = np.arange(3.0)
    server.answer_rows = lambda arrival: arrival.answer(ServedValues(), [rows])
    inbox = meet(meshes, 1)
    if not call:
        leave(meshes, 1)
    for mesh in (chief, worker):
        assert np.array_equal(mesh.channel(SERVER, 0).ask(ReadRows(1))[1][0], rows)
    assert inbox.empty() or inbox.get().message is None
    if call:
        ask(chief, inbox, ReadRows(1, in_turn=True))


def test_a_process_that_joins_takes_the_place_of_a_lost_one(meshes: list[Mesh]) -> None:
    chief, worker, _ = meshes
    inbox = meet(meshes, 4)
    peers = chief.peers() | {"lost": [WORKER]}
    joiner = worker._job
    joiner._pending, joiner.process = place(3, (0, 2, 5)), 5
    joiner._context = JobContext(5, joiner.events, joiner.settings)
    peers["workers"] = {0: 0, 2: 2}
    joined = Mesh(joiner)
    joined.replace_lost_worker(4, peers)
    arrival = ask(joined, inbox, Push(3, (0,)))
    assert (arrival.process, arrival.worker, arrival.call) == (WORKER, 5, 4)
    joined.close()


def test_who_takes_part_in_a_call_does_not_change_with_a_later_meeting(meshes: list[Mesh]) -> None:
    """The chief notes who replaces whom when a worker connects, and may meet others before."""
    meet(meshes, 1)
    for mesh in meshes:
        mesh.workers[WORKER] = 9
    all_of(meshes, lambda mesh: mesh.meet("a meeting within the call"))
    assert [mesh.workers[WORKER] for mesh in meshes] == [9] * 3
    leave(meshes, 1)
    all_of(meshes, lambda mesh: mesh.meet("a meeting after it"))
    assert [mesh.workers[WORKER] for mesh in meshes] == [WORKER] * 3
