"""The chief's side of scheduled functions, with workers and a server that compute nothing."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import DisagreementError, PeerLostError, PeerStuckError
from lockstep.keras.parameter_server.dispatcher import MAX_WAITING, DispatchedCall, Dispatcher, combined
from lockstep.parameter_server.order import (
    OrderFile,
    OrderWriter,
    Record,
    RecordedOrder,
    RecordKind,
    read_order,
)
from lockstep.parameter_server.tasks import Tasks
from lockstep.protocol.parameter_server import (
    Assigned,
    AtCall,
    FunctionFailure,
    FunctionResult,
    Passed,
    Question,
    WorkDone,
)
from lockstep.transport.array_channel import AnsweringEnd, AskingChannel

PATIENCE = 120.0
SHORT = 0.05
WORKERS = (1, 2)
TASKS = Tasks(4, 1)
SERVER = 3
FAILURE = FunctionFailure("builtins", "ValueError", "wrong", b"", 0, 1)
NOTHING = Passed(0)

Make = Callable[..., Dispatcher]


class Listening(Dispatcher):
    """A dispatcher with the connections of its workers."""

    def start(self) -> None:
        super().start()
        self.end = AnsweringEnd(self.put)

    def close(self) -> None:
        self.end.close()
        super().close()


class Asking:
    """A worker or server that asks what a test tells it to."""

    def __init__(self, dispatcher: Dispatcher, process: int, worker: int | None = None) -> None:
        assert isinstance(dispatcher, Listening)
        self._channel = AskingChannel(dispatcher.end.address, process, "the chief", PATIENCE, worker=worker)
        self.arrays: list[float] = []

    def send(self, question: Question, *arrays: float) -> None:
        self._channel.send(question, [np.array(array) for array in arrays])

    def receive(self) -> Any:
        answer, arrays = self._channel.receive(at(0))
        self.arrays = [float(array) for array in arrays]
        return answer

    def ask(self, question: Question, *arrays: float) -> Any:
        self.send(question, *arrays)
        return self.receive()

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a dispatcher of functions that change one variable, `0`."""
    with contextlib.ExitStack() as stack:

        def made(
            path: Path | None = None,
            recorded: Sequence[Record] | None = None,
            timeout: float = PATIENCE,
            max_staleness: int | None = None,
            lost: Callable[[], frozenset[int]] = frozenset,
        ) -> Dispatcher:
            writer = OrderWriter(OrderFile(path).write if path is not None else None)
            writer.add(RecordKind.CALL, 0, 1)
            order = None if recorded is None else RecordedOrder(recorded)
            dispatcher = Listening(
                DispatchedCall(TASKS, "functions 1", max_staleness, writer, order, timeout, lost=lost),
                scheduled=True,
            )
            dispatcher.start()
            stack.callback(lambda: dispatcher._thread.is_alive() and dispatcher.close())
            dispatcher.add_variables({"0": np.array(10.0), "7": np.array(1.0)})
            return dispatcher

        yield made


@pytest.fixture
def connect() -> Iterator[Callable[..., list[Asking]]]:
    """Connects the processes of a dispatcher."""
    with contextlib.ExitStack() as stack:

        def connected(dispatcher: Dispatcher, *processes: int) -> list[Asking]:
            made = [Asking(dispatcher, process) for process in processes or (*WORKERS, SERVER)]
            for one in made:
                stack.callback(one.close)
            return made

        yield connected


def until(dispatcher: Dispatcher, over: Callable[[], object]) -> None:
    """Wait until the dispatcher has handled what makes this true."""
    with dispatcher._changed:
        assert dispatcher._changed.wait_for(over, PATIENCE)


def at(call: int, scheduled: int = 999) -> AtCall:
    return AtCall(call, scheduled)


def returned(call: int, step: int, change: float, result: float, start: float = 10.0) -> tuple[Any, ...]:
    done = WorkDone(at(call), step, ("0",), result=FunctionResult(b"null", ("r",)))
    return done, start, start + change, result


def within(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call a function in another thread; return the thread, and where its result will be."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    return thread, found


def ended(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_workers_pass_what_the_chief_has_passed_and_run_functions_where_it_is(
    make: Make, connect: Any
) -> None:
    dispatcher = make()
    one, two, server = connect(dispatcher)
    server.send(at(0))
    for call in range(3):
        assert dispatcher.schedule(call) is None
    assert server.receive().until in (1, 2, 3)
    assert server.ask(at(0)) == Passed(3)
    assert one.ask(at(0)) == Passed(3)
    assert one.ask(at(3)) == Assigned(0, (), ())
    assert two.ask(at(1)) == Passed(3)
    assert two.ask(at(3)) == Assigned(1, (0,), ())
    # The change of the first function travels with the next one.
    assert one.ask(*returned(3, 0, 2.0, 5.0)) == Assigned(2, (1,), ("0",))
    assert one.arrays == [12.0]
    one.send(*returned(3, 2, 1.0, 6.0))
    two.send(*returned(3, 1, 4.0, 7.0))
    assert dispatcher.join(3) is None
    assert dispatcher.snapshot(3) == {"0": 17.0}
    (results, failure) = dispatcher.results(4, [2, 0])
    assert failure is None
    assert [[float(array) for array in arrays] for _, arrays in results] == [[6.0], [5.0]]
    dispatcher.publish(3, Passed(4, "join", True, (0,)), [np.array(17.0)])
    assert one.receive() == two.receive() == Passed(4, "join", True, (0,))
    assert one.arrays == [17.0]
    # The server is late, and learns it too.
    assert 3 in dispatcher._calls
    assert server.ask(at(3)) == Passed(4, "join", True, (0,))
    assert not dispatcher._calls


def test_a_call_with_a_result_is_not_passed_over(make: Make, connect: Any) -> None:
    dispatcher = make()
    (server,) = connect(dispatcher, SERVER)
    dispatcher.publish(0, Passed(1, done=True), [])
    assert dispatcher.schedule(1) is None
    dispatcher.publish(2, Passed(3, done=True), [])
    assert server.ask(at(0)) == Passed(2, done=True)
    assert server.ask(at(1)) == Passed(2)
    assert server.ask(at(2)) == Passed(3, done=True)


def test_a_server_that_is_lost_before_it_connects_is_not_awaited(make: Make, connect: Any) -> None:
    dispatcher = make(lost=lambda: frozenset({SERVER}))
    one, two = connect(dispatcher, *WORKERS)
    dispatcher.publish(0, Passed(1, "join", True), [])
    for worker in (one, two):
        assert worker.ask(at(0)) == Passed(1, "join", True)
    assert dispatcher._calls
    dispatcher.wait_until_learned()


def test_a_failure_is_raised_once_and_drops_what_no_worker_has_begun(make: Make, connect: Any) -> None:
    dispatcher = make()
    one, two, _ = connect(dispatcher)
    for call in range(5):
        assert dispatcher.schedule(call) is None
    assert [worker.ask(at(5)).step for worker in (one, two)] == [0, 1]
    one.send(WorkDone(at(5), 0, failure=FAILURE))
    until(dispatcher, lambda: dispatcher._raised)
    thread, found = within(lambda: dispatcher.schedule(5))
    two.send(*returned(5, 1, 1.0, 3.0))
    ended(thread)
    assert found == [FAILURE]
    dispatcher.publish(5, Passed(6, failure=FAILURE), [])
    assert one.receive() == two.receive() == Passed(6, failure=FAILURE)
    assert dispatcher.join(6) is None
    assert dispatcher.done(7) == (True, None)
    for step, expected in enumerate((FAILURE, None, FAILURE, FAILURE, FAILURE)):
        assert dispatcher.results(8, [step])[1] == expected
    # The next function has the number of the one that was not scheduled.
    assert dispatcher.schedule(8) is None
    assert one.ask(at(9)) == Assigned(5, (), ("0",))


def test_a_program_that_polls_lets_workers_run_functions(make: Make, connect: Any) -> None:
    dispatcher = make()
    (one,) = connect(dispatcher, 1)
    for call in range(2):
        assert dispatcher.schedule(call) is None
    for call in (2, 3):
        assert dispatcher.done(call) == (False, None)
        dispatcher.publish(call, Passed(call + 1, "done"), [])
    # The chief is ahead of the worker, which knows the functions.
    assert one.ask(at(1, 1)) == Passed(2)
    assert one.ask(at(2, 2)) == Assigned(0, (), ())
    assert one.ask(*returned(2, 0, 1.0, 1.0)) == Assigned(1, (), ("0",))
    assert one.ask(*returned(2, 1, 1.0, 1.0)) == Passed(3, "done")


@pytest.mark.parametrize("how", ["done", "results"])
def test_a_failure_ends_polling_and_fetching(make: Make, connect: Any, how: str) -> None:
    dispatcher = make()
    (one,) = connect(dispatcher, 1)
    for call in range(3):
        assert dispatcher.schedule(call) is None
    assert one.ask(at(3)) == Assigned(0, (), ())
    one.send(WorkDone(at(3), 0, failure=FAILURE))
    until(dispatcher, lambda: dispatcher._raised)
    assert (dispatcher.done(3) if how == "done" else dispatcher.results(3, [2]))[1] == FAILURE
    assert dispatcher.done(4) == (True, None)


def test_a_failure_that_was_fetched_is_known(make: Make, connect: Any) -> None:
    dispatcher = make()
    (one,) = connect(dispatcher, 1)
    assert dispatcher.schedule(0) is None
    assert one.ask(at(1)) == Assigned(0, (), ())
    one.send(WorkDone(at(1), 0, failure=FAILURE))
    until(dispatcher, lambda: dispatcher._raised)
    assert not dispatcher.was_delivered(FAILURE)
    assert dispatcher.results(1, [0])[1] == FAILURE
    assert dispatcher.was_delivered(FAILURE)
    assert dispatcher.remaining(9) == ({}, {0: FAILURE})


@pytest.mark.parametrize(
    ("value", "start", "end", "expected"),
    [
        (3e8, 3e8, 0.25, 0.25),
        (3.0, 2.0, 2.5, 3.5),
        (np.inf, np.inf, 2.0, 2.0),
        (5.0, np.inf, 2.0, 2.0),
        (np.nan, np.nan, 0.0, 0.0),
    ],
)
def test_the_end_counts_unless_another_function_has_changed_the_value(
    value: float, start: float, end: float, expected: float
) -> None:
    arrays = [np.array(one, "float32") for one in (value, start, end)]
    assert combined(*arrays) == np.float32(expected)


def test_variables_that_servers_have_do_not_travel(make: Make, connect: Any) -> None:
    dispatcher = make()
    (one,) = connect(dispatcher, 1)
    dispatcher.write(0, {"7": np.array(5.0), "0": np.array(6.0)})
    dispatcher.remove_variables(["7"])
    assert dispatcher.schedule(0) is None
    assert one.ask(at(1)) == Assigned(0, (), ("0",))
    assert dispatcher.snapshot(1) == {"0": 6.0}


def test_a_join_waits_for_a_failure_and_raises_it(make: Make, connect: Any) -> None:
    dispatcher = make()
    (one,) = connect(dispatcher, 1)
    assert dispatcher.schedule(0) is None
    assert one.ask(at(1)) == Assigned(0, (), ())
    thread, found = within(lambda: dispatcher.join(1))
    one.send(WorkDone(at(1), 0, failure=FAILURE))
    ended(thread)
    assert found == [FAILURE]
    assert dispatcher.join(2) is None


def test_too_many_functions_wait(make: Make, connect: Any) -> None:
    dispatcher = make()
    (one,) = connect(dispatcher, 1)
    count = MAX_WAITING * len(WORKERS)
    for call in range(count):
        assert dispatcher.schedule(call) is None
    thread, found = within(lambda: dispatcher.schedule(count))
    assert one.ask(at(count)) == Assigned(0, (), ())
    assert thread.is_alive()
    one.send(*returned(count, 0, 1.0, 1.0))
    ended(thread)
    assert found == [None]


def test_the_function_of_a_lost_worker_goes_to_another(
    make: Make, connect: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    dispatcher = make()
    one, two, _ = connect(dispatcher)
    assert dispatcher.schedule(0) is None
    assert one.ask(at(1)) == Assigned(0, (), ())
    two.send(at(1))
    one.close()
    assert two.receive() == Assigned(0, (), ())
    expected = "lockstep: functions 1: worker 1 has ended; another worker computes function 1\n"
    assert capfd.readouterr().err == expected


def test_a_worker_that_joins_learns_what_calls_have_found_since(
    make: Make, connect: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "order"
    dispatcher = make(path)
    one, two, server = connect(dispatcher)
    one.close()
    until(dispatcher, lambda: 1 not in dispatcher._live)
    dispatcher.hold([1])
    dispatcher.publish(0, Passed(1, "join", True), [])
    for process in (two, server):
        assert process.ask(at(0)) == Passed(1, "join", True)
    assert dispatcher._calls
    dispatcher.expect({1: 5})
    assert (dispatcher.expected, dispatcher._held) == ({1: 5}, set())
    joined = Asking(dispatcher, 1, worker=5)
    assert joined.ask(at(0)) == Passed(1, "join", True)
    assert (dispatcher.expected, dispatcher._calls) == ({}, {})
    # It has connected before the chief has looked.
    dispatcher.expect({1: 5})
    assert dispatcher.expected == {}
    assert dispatcher.schedule(1) is None
    assert joined.ask(at(2)) == Assigned(0, (), (), 5)
    joined.close()
    dispatcher._writer.end()
    dispatcher.close()
    order = read_order(path, 1)
    assert order == [Record(RecordKind.JOINED, 1, 5), Record(RecordKind.ASSIGN, 1, 0)]
    assert "functions 1: worker 5 replaces worker 1" in capfd.readouterr().err

    again = make(tmp_path / "again", order)
    (one,) = connect(again, 1)
    assert again.schedule(0) is None
    assert one.ask(at(1)) == Assigned(0, (), (), 5)


def test_a_worker_that_is_lost_before_it_connects_is_not_expected(make: Make, connect: Any) -> None:
    dispatcher = make()
    one, two, server = connect(dispatcher)
    one.close()
    until(dispatcher, lambda: 1 not in dispatcher._live)
    dispatcher.hold([1])
    dispatcher.expect({1: 5})
    dispatcher.publish(0, Passed(1, "join", True), [])
    for process in (two, server):
        assert process.ask(at(0)) == Passed(1, "join", True)
    assert dispatcher._unlearned()
    dispatcher.expect_no_longer({5})
    assert dispatcher.expected == {}
    dispatcher.wait_until_learned()


def test_a_worker_that_has_joined_before_is_in_the_order_of_the_functions(
    make: Make, connect: Any, tmp_path: Path
) -> None:
    """It may have taken the place in a `fit` that ended before it asked for a step."""
    dispatcher = make(tmp_path / "order")
    dispatcher._workers.update({0: 0, 1: 5, 2: 2, 3: 3})
    dispatcher.begin()
    # The next call does not know yet that it has this place.
    dispatcher._workers.clear()
    one = Asking(dispatcher, 1, worker=5)
    assert dispatcher.schedule(0) is None
    assert one.ask(at(1)) == Assigned(0, (), (), 5)
    one.close()
    dispatcher._writer.end()
    dispatcher.close()
    assert read_order(tmp_path / "order", 1) == [
        Record(RecordKind.JOINED, 1, 5),
        Record(RecordKind.ASSIGN, 1, 0),
    ]


def test_a_worker_that_computes_too_long_is_named_as_stuck(make: Make, connect: Any) -> None:
    dispatcher = make(timeout=SHORT)
    (one,) = connect(dispatcher, 1)
    assert dispatcher.schedule(0) is None
    assert one.ask(at(1)) == Assigned(0, (), ())
    with pytest.raises(PeerStuckError) as stuck:
        dispatcher.join(1)
    assert str(stuck.value) == (
        "functions 1: no function was completed for 0.05 s; worker 1 computes function 1; `w` in lockstep "
        "top shows what a worker does, and --timeout sets the limit"
    )


def test_without_workers_nothing_is_joined(make: Make, connect: Any) -> None:
    dispatcher = make()
    one, two, _ = connect(dispatcher)
    assert dispatcher.schedule(0) is None
    one.close()
    two.close()
    with pytest.raises(PeerLostError, match="no worker is left"):
        dispatcher.join(1)


def test_results_that_no_program_needs_are_forgotten(make: Make, connect: Any) -> None:
    dispatcher = make()
    (one,) = connect(dispatcher, 1)
    for call in range(3):
        assert dispatcher.schedule(call) is None
    assert one.ask(at(3)) == Assigned(0, (), ())
    dispatcher.forget(0)
    for step in range(3):
        one.send(*returned(3, step, 0.0, 1.0))
        if step < 2:
            assert one.receive().step == step + 1
    assert dispatcher.join(3) is None
    assert sorted(dispatcher._results) == [1, 2]
    assert sorted(dispatcher.remaining(1)[0]) == [2]


def test_a_written_variable_travels_with_the_next_function(make: Make, connect: Any) -> None:
    dispatcher = make()
    (one,) = connect(dispatcher, 1)
    assert dispatcher.schedule(0) is None
    dispatcher.write(1, {"7": np.array(5.0)})
    assert one.ask(at(1)) == Assigned(0, (), ("7",))
    assert one.arrays == [5.0]
    assert dispatcher.snapshot(1) == {"7": 5.0}


def test_a_failure_that_only_the_recorded_run_had_is_a_difference(make: Make, connect: Any) -> None:
    dispatcher = make(recorded=[Record(RecordKind.RAISE, 0, 0)])
    connect(dispatcher)
    with pytest.raises(DisagreementError, match="has failed in the recorded run, and not in the new one"):
        dispatcher.schedule(0)


def test_a_recorded_order_is_followed(make: Make, connect: Any, tmp_path: Path) -> None:
    """In the recorded run worker 2 was faster, the first poll came early, and a function failed."""
    path = tmp_path / "order"
    dispatcher = make(path)
    one, two, _ = connect(dispatcher)
    for call in range(3):
        dispatcher.schedule(call)
    assert two.ask(at(3)).step == 0
    assert one.ask(at(3)).step == 1
    assert dispatcher.done(3) == (False, None)
    assert two.ask(*returned(3, 0, 1.0, 1.0)).step == 2
    two.send(WorkDone(at(3), 2, failure=FAILURE))
    until(dispatcher, lambda: dispatcher._raised)
    one.send(*returned(3, 1, 2.0, 1.0))
    assert dispatcher.join(4) == FAILURE
    assert dispatcher.snapshot(4) == {"0": 13.0}
    dispatcher._writer.end()
    dispatcher.close()
    order = read_order(path, 1)

    again = make(tmp_path / "again", order)
    one, two, _ = connect(again)
    for call in range(3):
        again.schedule(call)
    one.send(at(3))
    until(again, lambda: 1 in again._parked)
    two.send(at(3))
    assert (one.receive().step, two.receive().step) == (1, 0)
    # The first one returns too early, and is held.
    one.send(*returned(3, 1, 2.0, 1.0))
    until(again, lambda: again._arrived)
    thread, found = within(lambda: again.done(3))
    ended(thread)
    assert found == [(False, None)]
    assert again.layers["0"] == 10.0
    assert two.ask(*returned(3, 0, 1.0, 1.0)).step == 2
    thread, found = within(lambda: again.join(4))
    two.send(WorkDone(at(3), 2, failure=FAILURE))
    ended(thread)
    assert found == [FAILURE]
    assert again.snapshot(4) == {"0": 13.0}
    again._writer.end()
    again.close()
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
