"""The chief's side of the workers, with workers that compute nothing."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import PeerLostError, PeerStuckError
from lockstep.keras.parameter_server.dispatcher import DispatchedCall, Dispatcher
from lockstep.parameter_server.order import (
    OrderFile,
    OrderWriter,
    Record,
    RecordedOrder,
    RecordKind,
    read_order,
)
from lockstep.parameter_server.tasks import Tasks
from lockstep.protocol.parameter_server import Assigned, AtCall, Passed, Question, WorkDone
from lockstep.transport.array_channel import AnsweringEnd, AskingChannel

PATIENCE = 120.0
SHORT = 0.05
WORKERS = (1, 2, 3)
TASKS = Tasks(6, 2)
ENTER, NEXT, ENDED = AtCall(0, 0), AtCall(-1, -1), Passed(0, kind="close")
THREADS = ("lockstep-accept", "lockstep-serve", "lockstep-coordinator")

Make = Callable[..., Dispatcher]


class Listening(Dispatcher):
    """A dispatcher with the connections of its workers."""

    def start(self) -> None:
        super().start()
        self.end = AnsweringEnd(self.put)

    def close(self) -> None:
        self.end.close()
        super().close()


class Worker:
    """A worker that asks what a test tells it to."""

    def __init__(self, coordinator: Dispatcher, process: int) -> None:
        assert isinstance(coordinator, Listening)
        self._channel = AskingChannel(coordinator.end.address, process, "the chief", PATIENCE)
        self.layers: list[float] = []

    def send(self, question: Question, *arrays: float) -> None:
        self._channel.send(question, [np.array(array) for array in arrays])

    def receive(self) -> Any:
        answer, arrays = self._channel.receive(NEXT)
        self.layers = [float(array) for array in arrays]
        return answer

    def ask(self, question: Question, *arrays: float) -> Any:
        self.send(question, *arrays)
        return self.receive()

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a coordinator of one call of `fit`."""
    with contextlib.ExitStack() as stack:

        def made(
            max_staleness: int | None = None,
            path: Path | None = None,
            recorded: Sequence[Record] | None = None,
            timeout: float = PATIENCE,
            workers: tuple[int, ...] = WORKERS,
            lost: Callable[[], frozenset[int]] = frozenset,
        ) -> Dispatcher:
            writer = OrderWriter(OrderFile(path).write if path is not None else None)
            writer.add(RecordKind.CALL, 0, 1)
            order = None if recorded is None else RecordedOrder(recorded)
            coordinator = Listening(
                DispatchedCall(TASKS, "fit 1", max_staleness, writer, order, timeout, lost=lost)
            )
            coordinator.start()
            coordinator.keep(workers)
            stack.callback(close, coordinator)
            return coordinator

        yield made


@pytest.fixture
def enter() -> Iterator[Callable[..., list[Worker]]]:
    """Makes workers of a coordinator, and lets them enter."""
    with contextlib.ExitStack() as stack:

        def entered(coordinator: Dispatcher, *processes: int) -> list[Worker]:
            workers = [Worker(coordinator, process) for process in processes or WORKERS]
            for worker in workers:
                stack.callback(worker.close)
                worker.send(ENTER)
            return workers

        yield entered


def close(coordinator: Dispatcher) -> None:
    """Close a coordinator that its test has not closed."""
    if coordinator._thread.is_alive():
        coordinator.close()


def epoch_done(epoch: int, steps: int) -> AtCall:
    return AtCall(epoch + 1, steps)


def opened(epoch: int) -> Passed:
    return Passed(epoch + 1)


def done(step: int, staleness: int = 0, **arrays: float) -> tuple[Any, ...]:
    return WorkDone(
        NEXT, step, names=tuple(arrays), staleness=staleness, check=b"batch %d" % step
    ), *arrays.values()


def begun(
    make: Make, enter: Callable[..., list[Worker]], *processes: int, **options: Any
) -> tuple[Dispatcher, list[Worker]]:
    """Return a coordinator that assigns steps of epoch 0, and workers that have begun it."""
    coordinator = make(**options)
    workers = enter(coordinator, *processes)
    coordinator.open(0)
    assert [worker.receive() for worker in workers] == [opened(0)] * len(workers)
    coordinator.set_layers({"seen": np.array(10.0)})
    return coordinator, workers


def until(coordinator: Dispatcher, over: Callable[[], object]) -> None:
    """Wait until the coordinator has handled what makes this true."""
    with coordinator._changed:
        assert coordinator._changed.wait_for(over, PATIENCE)


def leave(worker: Worker) -> None:
    """Ask until the training has ended, and leave."""
    assert worker.ask(NEXT) == ENDED
    worker.close()


def test_workers_begin_with_the_first_epoch_that_opens(make: Make, enter: Any) -> None:
    coordinator = make()
    workers = enter(coordinator)
    coordinator.open(4)
    assert [worker.receive() for worker in workers] == [opened(4)] * 3
    coordinator.open(5)
    (late,) = enter(coordinator, 2)
    assert late.receive() == opened(4)


def test_steps_are_assigned_in_the_order_of_the_questions(make: Make, enter: Any) -> None:
    _, (one, two, three) = begun(make, enter)
    assert two.ask(NEXT) == Assigned(0, (), ("seen",))
    assert one.ask(NEXT) == Assigned(1, (0,), ("seen",))
    assert one.ask(*done(1)) == Assigned(2, (0,), ("seen",))
    assert three.ask(NEXT) == Assigned(3, (0, 2), ("seen",))
    assert two.ask(*done(0)) == Assigned(4, (2, 3), ("seen",))


def test_no_step_is_assigned_before_the_layers_have_values(make: Make, enter: Any) -> None:
    coordinator = make()
    (worker,) = enter(coordinator, 1)
    coordinator.open(0)
    assert worker.receive() == opened(0)
    worker.send(NEXT)
    coordinator.set_layers({"seen": np.array(1.0), "mean": np.array(2.0)})
    assert worker.receive() == Assigned(0, (), ("seen", "mean"))
    assert worker.layers == [1.0, 2.0]


def test_changes_of_layers_add_up_and_other_arrays_are_results_in_order(make: Make, enter: Any) -> None:
    coordinator, (one, two, _) = begun(make, enter)
    given = coordinator.layers["seen"]
    one.ask(NEXT)
    two.ask(NEXT)
    two.ask(*done(1, 3, loss=0.5, seen=1.0))
    assert two.layers == [11.0]
    one.ask(*done(0, 1, seen=2.0, loss=0.25))
    assert one.layers == [13.0]
    assert [dict(coordinator.result()) for _ in range(2)] == [{"loss": 0.5}, {"loss": 0.25}]
    assert coordinator.staleness == [3, 1]
    assert coordinator.layers == {"seen": 13.0}
    # What an answer may still send has not changed.
    assert given == 10.0


def test_values_of_layers_are_added_to_and_replaced(make: Make, enter: Any) -> None:
    coordinator, (one, *_) = begun(make, enter)
    coordinator.set_layers({"mean": np.array(2.0)})
    assert one.ask(NEXT) == Assigned(0, (), ("seen", "mean"))
    coordinator.set_layers({"seen": np.array(20.0)})
    one.ask(*done(0, mean=1.0))
    assert one.layers == [20.0, 3.0]


def test_the_hash_of_a_batch_is_taken_once(make: Make, enter: Any) -> None:
    coordinator, (one, two, _) = begun(make, enter)
    one.ask(NEXT)
    two.ask(NEXT)
    assert coordinator.pop_check(1) is None
    two.ask(*done(1))
    assert coordinator.pop_check(0) is None
    assert coordinator.pop_check(1) == (2, b"batch 1")
    assert coordinator.pop_check(1) is None


def test_workers_wait_while_the_bound_of_staleness_is_reached(make: Make, enter: Any) -> None:
    coordinator, (one, two, _) = begun(make, enter, max_staleness=0)
    assert one.ask(NEXT).step == 0
    two.send(NEXT)
    until(coordinator, lambda: 2 in coordinator._parked)
    one.send(*done(0))
    # It has waited for longer than the worker that asks again.
    assert two.receive() == Assigned(1, (), ("seen",))
    two.send(*done(1))
    assert one.receive() == Assigned(2, (), ("seen",))


def test_the_step_of_a_lost_worker_goes_to_another(
    make: Make, enter: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    coordinator, (one, two, three) = begun(make, enter, max_staleness=1)
    assert one.ask(NEXT).step == 0
    assert two.ask(NEXT).step == 1
    three.send(NEXT)
    until(coordinator, lambda: 3 in coordinator._parked)
    one.close()
    assert three.receive() == Assigned(0, (), ("seen",))
    three.send(*done(0))
    two.send(*done(1))
    assert {two.receive().step, three.receive().step} == {2, 3}
    assert capfd.readouterr().err == "lockstep: fit 1: worker 1 has ended; another worker computes step 1\n"


def test_a_late_step_of_another_worker_counts_once(make: Make, enter: Any) -> None:
    """A worker whose connection was lost and one that has its step now: only the last holder counts."""
    coordinator, (one, two, _) = begun(make, enter)
    assert one.ask(NEXT).step == 0
    assert two.ask(*done(0, loss=1.0)).step == 1
    assert one.ask(*done(0, loss=2.0)).step == 2
    assert coordinator.result() == {"loss": 2.0}
    assert coordinator.staleness == [0]


def test_a_worker_at_the_end_of_an_epoch_gives_back_and_waits_for_the_next(make: Make, enter: Any) -> None:
    """An epoch of one step."""
    coordinator, (one, two, _) = begun(make, enter)
    assert one.ask(NEXT).step == 0
    assert two.ask(NEXT).step == 1
    two.send(epoch_done(0, 1))
    until(coordinator, lambda: 2 in coordinator._parked)
    assert coordinator._assignments.in_work() == {0: 1}
    assert one.ask(*done(0)).step == 1
    one.send(epoch_done(0, 1))
    until(coordinator, lambda: 1 in coordinator._parked)
    coordinator.open(1)
    assert [one.receive(), two.receive()] == [opened(1)] * 2
    assert two.ask(NEXT) == Assigned(1, (), ("seen",))
    assert one.ask(epoch_done(0, 1)) == opened(1)


def test_a_worker_at_the_end_of_an_epoch_computes_a_step_of_a_lost_worker(make: Make, enter: Any) -> None:
    _, (one, two, _) = begun(make, enter)
    assert one.ask(NEXT).step == 0
    assert two.ask(NEXT).step == 1
    assert two.ask(*done(1)).step == 2
    two.send(epoch_done(0, 2))
    one.close()
    assert two.receive() == Assigned(0, (), ("seen",))


def test_draining_waits_for_the_steps_in_work_and_assigns_no_more(make: Make, enter: Any) -> None:
    coordinator, (one, two, three) = begun(make, enter)
    assert one.ask(NEXT).step == 0
    assert two.ask(NEXT).step == 1
    drained = threading.Thread(target=coordinator.drain)
    drained.start()
    until(coordinator, lambda: not coordinator._assigns)
    for worker, question in ((one, done(0)), (two, done(1)), (three, (NEXT,))):
        assert drained.is_alive() or worker is three
        worker.send(*question)
    drained.join(PATIENCE)
    assert not drained.is_alive()
    until(coordinator, lambda: set(coordinator._parked) == set(WORKERS))
    assert coordinator.staleness == [0, 0]
    assert not coordinator._assignments.in_work()


def test_finishing_ends_the_call_for_all_workers(make: Make, enter: Any) -> None:
    coordinator, workers = begun(make, enter)
    workers[0].send(NEXT)
    assert workers[0].receive().step == 0
    workers[1].send(epoch_done(0, 0))
    finished = threading.Thread(target=coordinator.finish)
    finished.start()
    assert workers[1].receive() == ENDED
    workers[1].close()
    assert workers[0].ask(*done(0)) == ENDED
    workers[0].close()
    leave(workers[2])
    finished.join(PATIENCE)
    assert not finished.is_alive()
    assert coordinator.staleness == [0]


def test_a_worker_that_does_not_leave_is_named(make: Make, enter: Any) -> None:
    coordinator, (one, *_) = begun(make, enter, timeout=SHORT)
    one.close()
    until(coordinator, lambda: 1 not in coordinator._live)
    with pytest.raises(PeerStuckError) as stuck:
        coordinator.finish()
    assert str(stuck.value) == (
        "fit 1 has ended, but worker 2, worker 3 did not leave it for 0.05 s; `w` in lockstep top "
        "shows what a worker does, and --timeout sets the limit"
    )


def test_workers_that_were_lost_before_they_could_connect_are_not_expected(make: Make, enter: Any) -> None:
    coordinator, (two,) = begun(make, enter, 2)
    coordinator.keep([2, 4])
    two.close()
    with pytest.raises(PeerLostError, match="no worker is left"):
        coordinator.result()


def test_without_workers_a_result_is_lost(make: Make, enter: Any) -> None:
    coordinator, workers = begun(make, enter)
    assert workers[0].ask(NEXT).step == 0
    assert workers[0].ask(*done(0, loss=1.0)).step == 1
    for worker in workers:
        worker.close()
    assert coordinator.result() == {"loss": 1.0}
    with pytest.raises(PeerLostError) as lost:
        coordinator.result()
    assert str(lost.value) == "fit 1: no worker is left to compute gradients; their logs say why"


@pytest.mark.parametrize("wait", ["result", "drain"])
def test_a_worker_that_computes_too_long_is_named_as_stuck(make: Make, enter: Any, wait: str) -> None:
    coordinator, (_, two, _) = begun(make, enter, timeout=SHORT)
    assert two.ask(NEXT).step == 0
    with pytest.raises(PeerStuckError) as stuck:
        coordinator.result() if wait == "result" else coordinator.drain()
    assert str(stuck.value) == (
        "fit 1: no step was completed for 0.05 s; worker 2 computes step 1; `w` in lockstep top "
        "shows what a worker does, and --timeout sets the limit"
    )


@pytest.mark.parametrize(
    ("servers", "named"),
    [
        (["server 1"], "server 1 does not answer"),
        (["server 0", "server 1"], "server 0 and server 1 do not answer"),
    ],
)
def test_servers_that_do_not_answer_are_named(make: Make, enter: Any, servers: list[str], named: str) -> None:
    coordinator, (one, two, three) = begun(make, enter, timeout=SHORT)
    coordinator.silent = lambda _: servers
    assert two.ask(NEXT).step == 0
    with pytest.raises(PeerStuckError, match=rf"for 0\.05 s; {named}; worker 2 computes step 1; `w` in"):
        coordinator.result()
    with pytest.raises(PeerStuckError, match=rf"fit 1 has ended, but {named}; worker 1, .* did not leave it"):
        coordinator.finish()
    for worker in (one, two, three):
        worker.close()
    until(coordinator, lambda: not coordinator._live)
    with pytest.raises(PeerLostError, match=f"fit 1: {named}; no worker is left to compute gradients"):
        coordinator.result()


def test_workers_that_begin_nothing_are_named_as_stuck(make: Make, enter: Any) -> None:
    coordinator, _ = begun(make, enter, timeout=SHORT)
    with pytest.raises(PeerStuckError, match=r"for 0\.05 s; no worker has begun a step; `w` in lockstep top"):
        coordinator.result()


def test_an_error_of_the_thread_reaches_the_chief(make: Make, enter: Any) -> None:
    coordinator, (one, *_) = begun(make, enter)
    assert one.ask(NEXT).step == 0
    one.send(WorkDone(NEXT, 0, names=("loss", "more")), 1.0)
    with pytest.raises(ValueError, match="zip"):
        coordinator.result()


def test_the_order_of_assignments_and_completions_is_recorded(make: Make, enter: Any, tmp_path: Path) -> None:
    path = tmp_path / "order.0"
    coordinator, (one, two, _) = begun(make, enter, path=path)
    assert one.ask(NEXT).step == 0
    assert two.ask(NEXT).step == 1
    assert two.ask(*done(1)).step == 2
    one.close()
    until(coordinator, lambda: 1 not in coordinator._live)
    assert two.ask(*done(2)).step == 0
    coordinator._writer.end()
    coordinator.close()
    assert read_order(path, 1) == [
        *(Record(RecordKind.ASSIGN, 1, 0), Record(RecordKind.ASSIGN, 2, 1), Record(RecordKind.DONE, 2, 1)),
        *(Record(RecordKind.ASSIGN, 2, 2), Record(RecordKind.DONE, 2, 2), Record(RecordKind.ASSIGN, 2, 0)),
    ]


RECORDED = [
    *(Record(RecordKind.ASSIGN, 2, 0), Record(RecordKind.ASSIGN, 1, 1), Record(RecordKind.ASSIGN, 3, 2)),
    *(Record(RecordKind.DONE, 3, 2), Record(RecordKind.DONE, 1, 1), Record(RecordKind.ASSIGN, 1, 3)),
    *(Record(RecordKind.DONE, 2, 0), Record(RecordKind.DONE, 1, 3)),
]


def test_a_recorded_order_is_followed_whatever_the_order_of_arrival(
    make: Make, enter: Any, tmp_path: Path
) -> None:
    path = tmp_path / "order.0"
    coordinator, (one, two, three) = begun(make, enter, path=path, recorded=RECORDED)
    for process, worker in ((3, three), (1, one)):
        worker.send(NEXT)
        until(coordinator, lambda process=process: process in coordinator._parked)  # type: ignore[misc]
    assert not coordinator._assignments.in_work()
    assert two.ask(NEXT) == Assigned(0, (), ("seen",))
    assert one.receive() == Assigned(1, (0,), ("seen",))
    assert three.receive() == Assigned(2, (0, 1), ("seen",))
    two.send(*done(0, seen=1.0))
    one.send(*done(1, seen=2.0))
    until(coordinator, lambda: len(coordinator._arrived) == 2)
    three.send(*done(2, seen=4.0))
    assert one.receive() == Assigned(3, (0,), ("seen",))
    # The step of the slow worker has its turn after this assignment.
    assert one.layers == [16.0]
    one.send(*done(3))
    coordinator.drain()
    assert coordinator.layers == {"seen": 17.0}
    coordinator._writer.end()
    coordinator.close()
    assert read_order(path, 1) == RECORDED


def test_following_repeats_the_loss_of_a_worker_that_lives(make: Make, enter: Any) -> None:
    """What it computes counts no more once the recorded run has given its step to another."""
    recorded = [
        Record(RecordKind.ASSIGN, 1, 0),
        Record(RecordKind.ASSIGN, 2, 0),
        Record(RecordKind.DONE, 2, 0),
    ]
    coordinator, (one, two, _) = begun(make, enter, recorded=recorded)
    two.send(NEXT)
    assert one.ask(NEXT).step == 0
    assert two.receive().step == 0
    one.send(*done(0, loss=1.0))
    until(coordinator, lambda: 1 in coordinator._parked)
    two.send(*done(0, loss=2.0))
    assert coordinator.result() == {"loss": 2.0}
    coordinator.drain()


def test_following_keeps_a_step_for_a_worker_that_is_epochs_behind(make: Make, enter: Any) -> None:
    """The recorded worker had joined later; it was lost with the step, which another has computed."""
    recorded = [
        Record(RecordKind.ASSIGN, 2, 5),
        Record(RecordKind.ASSIGN, 1, 5),
        Record(RecordKind.DONE, 1, 5),
    ]
    coordinator, (one, two, _) = begun(make, enter, recorded=recorded)
    assert two.ask(NEXT).step == 5
    assert one.ask(NEXT).step == 5
    one.send(*done(5))
    coordinator.result()
    coordinator.open(1)
    coordinator.open(2)
    for epoch in (0, 1):
        assert two.ask(epoch_done(epoch, 2 * (epoch + 1))) == opened(2)
        assert two.ask(NEXT).step == 5
    two.send(*done(5))
    until(coordinator, lambda: 2 in coordinator._parked)
    assert 2 not in coordinator._followed


def test_draining_waits_for_the_end_of_the_recorded_order(make: Make, enter: Any) -> None:
    recorded = [Record(RecordKind.ASSIGN, 1, 0), Record(RecordKind.DONE, 1, 0)]
    coordinator, (one, *_) = begun(make, enter, recorded=recorded)
    completed = list[int]()

    def drain() -> None:
        coordinator.drain()
        completed.append(len(coordinator.staleness))

    drained = threading.Thread(target=drain)
    drained.start()
    until(coordinator, lambda: not coordinator._assigns)
    assert one.ask(NEXT).step == 0
    one.send(*done(0))
    drained.join(PATIENCE)
    assert completed == [1]


def test_a_turn_that_does_not_come_is_named(make: Make, enter: Any) -> None:
    coordinator, (one, _, three) = begun(make, enter, recorded=RECORDED, timeout=SHORT)
    one.send(NEXT)
    three.send(NEXT)
    with pytest.raises(PeerStuckError, match="step 1 of worker 2 is next in the recorded order"):
        coordinator.result()


def test_a_worker_that_is_lost_before_it_connects_is_not_awaited(make: Make) -> None:
    coordinator = make(workers=(1,), timeout=PATIENCE, lost=lambda: frozenset({1}))
    coordinator.finish()
    assert not coordinator._live


def test_the_servers_without_which_no_worker_is_left_are_named(make: Make) -> None:
    coordinator = make(workers=(), lost=lambda: frozenset({4, 5}))
    with pytest.raises(
        PeerLostError, match="parameter server 0 and parameter server 1 ended, and no worker is left"
    ):
        coordinator.result()


def test_a_step_that_a_lost_worker_still_takes_goes_to_another(make: Make, enter: Any) -> None:
    coordinator, (one, two, _) = begun(make, enter)
    coordinator._lose(1)
    # The worker had asked for it before it was lost.
    assert one.ask(NEXT).step == 0
    one.close()
    until(coordinator, lambda: not coordinator._assignments.in_work())
    assert two.ask(NEXT).step == 0


def test_closing_ends_all_threads_and_descriptors(closes_descriptors: None) -> None:
    coordinator = Listening(DispatchedCall(TASKS, "fit 1", None, OrderWriter(None), None, PATIENCE))
    coordinator.start()
    workers = [Worker(coordinator, process) for process in WORKERS]
    for worker in workers:
        worker.send(ENTER)
    until(coordinator, lambda: set(coordinator._parked) == set(WORKERS))
    coordinator.close()
    for worker in workers:
        with pytest.raises(PeerLostError, match="the chief has ended"):
            worker.receive()
        worker.close()
    for thread in threading.enumerate():
        if thread.name in THREADS:
            thread.join(PATIENCE)
    assert not [thread for thread in threading.enumerate() if thread.name in THREADS]
