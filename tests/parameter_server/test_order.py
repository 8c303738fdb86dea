"""Orders of arrivals: their files, and arrivals that follow a recorded order."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.parameter_server.order import (
    OrderedArrivals,
    OrderFile,
    OrderWriter,
    ReceivedOrders,
    Record,
    RecordedOrder,
    RecordKind,
    incomplete_orders,
    read_order,
)

RECORD_BYTES = 8

kinds = st.sampled_from([kind for kind in RecordKind if kind not in (RecordKind.CALL, RecordKind.TAKEN)])
records = st.builds(
    Record, kinds, st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**8 - 1)
)
turns = st.lists(st.integers(1, 4), max_size=12)
"""Workers, in the order in which their records are processed."""
orders_and_arrivals = turns.flatmap(lambda order: st.tuples(st.just(order), st.permutations(order)))


class Noted(OrderWriter):
    """Keeps the order of a process in memory."""

    def __init__(self) -> None:
        super().__init__(None)
        self.records: list[Record] = []

    def add(self, kind: RecordKind, worker: int, step: int, part: int = 0) -> None:
        self.records.append(Record(kind, worker, step, part))


def write(path: Path, calls: dict[int, Sequence[Record]]) -> None:
    writer = OrderWriter(OrderFile(path).write)
    for call, order in calls.items():
        writer.add(RecordKind.CALL, 0, call)
        for record in order:
            writer.add(*record)
        writer.end()
    writer.close()


def in_turn(workers: Sequence[int]) -> list[Record]:
    """Return records of workers in this order: each one pulls and pushes one step after another."""
    counts = Counter[int]()
    made = []
    for worker in workers:
        step, push = divmod(counts[worker], 2)
        made.append(Record(RecordKind.PUSH if push else RecordKind.PULL, worker, step))
        counts[worker] += 1
    return made


def refused(path: Path, call: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        read_order(path, call)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@given(calls=st.dictionaries(st.integers(1, 5), st.lists(records, max_size=6), min_size=1))
def test_each_call_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, calls: dict[int, list[Record]]
) -> None:
    path = tmp_path_factory.mktemp("order") / "order.0"
    write(path, dict(sorted(calls.items())))
    for call, order in calls.items():
        assert read_order(path, call) == order


def test_a_later_writer_adds_its_calls(tmp_path: Path) -> None:
    path = tmp_path / "made" / "order.0"
    first, second = in_turn([1, 2, 1]), in_turn([2, 2])
    write(path, {1: first})
    write(path, {2: second})
    assert read_order(path, 1) == first
    assert read_order(path, 2) == second


def test_a_call_in_which_nothing_arrives_has_an_empty_order(tmp_path: Path) -> None:
    path = tmp_path / "order.0"
    write(path, {1: [], 2: in_turn([1]), 3: []})
    assert [len(read_order(path, call)) for call in (1, 2, 3)] == [0, 1, 0]


@pytest.mark.parametrize("lost", range(1, 3 * RECORD_BYTES, 5))
def test_a_call_without_its_end_is_refused_and_a_later_writer_continues(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "order.0"
    order = in_turn([1, 2, 1, 1])
    write(path, {1: order})
    path.write_bytes(path.read_bytes()[:-lost])
    assert "only the beginning of the order of call 1" in refused(path)
    write(path, {2: order})
    assert read_order(path, 2) == order
    assert "only the beginning of the order of call 1" in refused(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.0"
    write(path, {1: in_turn([1])})
    path.write_bytes(path.read_bytes() + bytes([99] * RECORD_BYTES))
    assert "is damaged" in refused(path)


def test_a_disk_without_room_does_not_end_the_training(capfd: pytest.CaptureFixture[str]) -> None:
    writer = OrderWriter(OrderFile(Path("/dev/full")).write)
    for step in range(10**4):
        writer.add(RecordKind.PULL, 1, step)
    writer.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("(No space left on device): lockstep rerun cannot repeat this run")


@given(order=st.lists(records, max_size=40), size=st.integers(1, 40))
def test_an_order_that_arrives_in_parts_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, order: list[Record], size: int
) -> None:
    folder = tmp_path_factory.mktemp("orders")
    parts: list[bytes] = []
    writer = OrderWriter(parts.append)
    writer.add(RecordKind.CALL, 0, 1)
    for number, record in enumerate(order):
        writer.add(*record)
        if number % size == 0:
            writer.close()
    writer.end()
    writer.close()
    received = ReceivedOrders(folder)
    for number, part in enumerate(parts):
        received.append("ps-1", number, part)
    assert read_order(folder / "ps-1", 1) == order


@given(before=turns, again=st.sets(st.integers(1, 4)), data=st.data())
def test_what_a_lost_server_processed_without_an_answer_counts_once(
    tmp_path_factory: pytest.TempPathFactory, before: list[int], again: set[int], data: st.DataObject
) -> None:
    known = in_turn(before)
    last = {record.worker: position for position, record in enumerate(known)}
    # These pulls are processed again, in any order; a push is not, because its repetition is recognized.
    repeated = {
        worker: known[position]
        for worker, position in last.items()
        if worker in again and known[position].kind is RecordKind.PULL
    }
    order = data.draw(st.permutations(list(repeated.values())))
    left = [
        record for k, record in enumerate(known) if record.worker not in repeated or k != last[record.worker]
    ]
    later = [Record(RecordKind.PULL, worker, 100) for worker in range(1, 5)]
    path = tmp_path_factory.mktemp("order") / "ps-0"
    # The lost server wrote a part of its order.
    writer = OrderWriter(OrderFile(path).write)
    writer.add(RecordKind.CALL, 0, 7)
    for record in known[: len(known) // 2]:
        writer.add(*record)
    writer.close()
    write(path, {7: [*known, Record(RecordKind.TAKEN, 0, 0), *order, *later]})
    assert read_order(path, 7) == [*left, *order, *later]


def test_a_call_of_which_a_part_is_lost_is_refused_and_the_next_one_is_read(tmp_path: Path) -> None:
    received = ReceivedOrders(tmp_path)
    for call in (1, 2):
        parts: list[bytes] = []
        writer = OrderWriter(parts.append)
        for record in (Record(RecordKind.CALL, 0, call), *in_turn([1, 2])):
            writer.add(*record)
            writer.close()
        writer.end()
        writer.close()
        for number, part in enumerate(parts):
            if (call, number) != (1, 2):
                received.append("chief", number, part)
    assert "only the beginning of the order of call 1" in refused(tmp_path / "chief")
    assert read_order(tmp_path / "chief", 2) == in_turn([1, 2])


@pytest.mark.parametrize("name", ["../chief", "ps-", "ps-1/x", "", "chief\n"])
def test_only_orders_of_tasks_are_received(tmp_path: Path, name: str) -> None:
    ReceivedOrders(tmp_path / "order").append(name, 0, b"")
    assert list(tmp_path.iterdir()) == []


def begin(path: Path, call: int) -> None:
    writer = OrderWriter(OrderFile(path).write)
    writer.add(RecordKind.CALL, 0, call)
    writer.close()


def test_orders_of_a_whole_run_are_complete(tmp_path: Path) -> None:
    assert incomplete_orders(tmp_path / "order", 2) == (0, [])
    for name in ("chief", "ps-0", "ps-1"):
        write(tmp_path / name, {1: in_turn([1]), 4: []})
    assert incomplete_orders(tmp_path, 2) == (0, [])
    assert incomplete_orders(tmp_path, 2, [4]) == (0, [])


def test_the_first_call_without_its_whole_order_is_found(tmp_path: Path) -> None:
    for name in ("chief", "ps-0", "ps-1"):
        write(tmp_path / name, {1: in_turn([1, 2])})
    begin(tmp_path / "chief", 3)
    write(tmp_path / "ps-1", {3: in_turn([1])})
    begin(tmp_path / "ps-1", 4)
    assert incomplete_orders(tmp_path, 2) == (3, ["chief", "ps-0"])
    assert incomplete_orders(tmp_path, 2, [2]) == (2, ["chief", "ps-0", "ps-1"])
    (tmp_path / "ps-0").unlink()
    assert incomplete_orders(tmp_path, 2) == (1, ["ps-0"])


def test_calls_of_an_earlier_run_in_the_folder_do_not_count(tmp_path: Path) -> None:
    for name in ("chief", "ps-0"):
        write(tmp_path / name, {1: in_turn([1]), 2: in_turn([2])})
        begin(tmp_path / name, 3)
        write(tmp_path / name, {1: in_turn([1, 1])})
    assert incomplete_orders(tmp_path, 1) == (0, [])
    assert read_order(tmp_path / "chief", 1) == in_turn([1, 1])
    assert refused(tmp_path / "chief", 2).endswith("has no order of call 2")


def test_a_writer_without_a_file_writes_nothing(tmp_path: Path) -> None:
    writer = OrderWriter(None)
    writer.add(RecordKind.CALL, 0, 1)
    writer.close()
    assert not list(tmp_path.iterdir())


def test_closing_leaves_no_descriptor_open(tmp_path: Path, closes_descriptors: None) -> None:
    path = tmp_path / "order.0"
    write(path, {1: in_turn([1])})
    read_order(path, 1)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(tmp_path / "none")
    assert "cannot be read: Is a directory" in refused(tmp_path)


@pytest.mark.parametrize("data", [b"", b"lockstep", b"lockstep order 2\n" + bytes(16), bytes(64)])
def test_a_file_of_another_kind_or_version_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "order.0"
    path.write_bytes(data)
    assert "this version of Lockstep can read" in refused(path)


@pytest.mark.parametrize("calls", [(1,), (1, 3)])
def test_a_call_that_was_not_recorded_is_refused(tmp_path: Path, calls: tuple[int, ...]) -> None:
    path = tmp_path / "order.0"
    write(path, {call: in_turn([1]) for call in calls})
    assert refused(path, 2).endswith("has no order of call 2")


def test_without_an_order_arrivals_are_processed_at_once_and_recorded() -> None:
    writer, processed = Noted(), list[Record]()
    arrivals = OrderedArrivals[Record](writer)
    order = in_turn([2, 1, 1, 2, 2])
    for count, record in enumerate(order, 1):
        assert arrivals.expects(record)
        processed += arrivals.arrive(record, record)
        assert processed == writer.records == order[:count]
        assert arrivals.awaited() is None


def follow(
    recorded: Sequence[Record],
    arriving: Sequence[Record],
    check: Callable[[int, list[Record], OrderedArrivals[Record]], None],
) -> tuple[list[Record], list[Record], list[Record]]:
    """Return what is processed, ignored and recorded; `check` sees the state after each arrival."""
    writer, processed, ignored = Noted(), list[Record](), list[Record]()
    arrivals = OrderedArrivals[Record](writer, RecordedOrder(recorded))
    for count, record in enumerate(arriving, 1):
        due = arrivals.arrive(record, record)
        if arrivals.expects(record):
            processed += due
        else:
            assert due == [record]
            ignored += due
        check(count, processed, arrivals)
    return processed, ignored, writer.records


@given(orders_and_arrivals)
def test_arrivals_are_processed_in_the_recorded_order_as_soon_as_possible(
    orders: tuple[list[int], list[int]],
) -> None:
    recorded, arriving = map(in_turn, orders)

    def check(count: int, processed: list[Record], arrivals: OrderedArrivals[Record]) -> None:
        arrived = set(arriving[:count])
        possible = 0
        while possible < len(recorded) and recorded[possible] in arrived:
            possible += 1
        assert processed == recorded[:possible]
        assert arrivals.awaited() == (recorded[possible] if possible < count else None)

    assert follow(recorded, arriving, check) == (recorded, [], recorded)


@given(
    orders_and_arrivals,
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3))),
)
def test_what_the_recorded_process_never_processed_is_ignored_at_once(
    orders: tuple[list[int], list[int]], strange: list[tuple[int, int]]
) -> None:
    recorded, arriving = map(in_turn, orders)
    unknown = list[Record]()
    for place, kind in strange:
        unknown.append(
            Record(
                [RecordKind.PULL, RecordKind.PUSH, RecordKind.READ, RecordKind.DONE][kind],
                1,
                1000 + len(unknown),
            )
        )
        arriving.insert(min(place, len(arriving)), unknown[-1])

    def check(count: int, processed: list[Record], arrivals: OrderedArrivals[Record]) -> None:
        assert arrivals.awaited() is None or arrivals.awaited() in recorded

    processed, ignored, written = follow(recorded, arriving, check)
    assert processed == written == recorded
    assert ignored == [record for record in arriving if record in unknown]


def test_awaited_names_the_arrival_that_others_wait_for() -> None:
    recorded = in_turn([1, 2, 1])
    first, second, third = recorded
    arrivals = OrderedArrivals[Record](OrderWriter(None), RecordedOrder(recorded))
    assert arrivals.awaited() is None
    for record, awaited in ((second, first), (first, None), (third, None)):
        arrivals.arrive(record, record)
        assert arrivals.awaited() == awaited


def test_an_arrival_that_is_recorded_twice_is_processed_at_both_turns() -> None:
    """The chief may read twice between two steps; it waits for each answer."""
    read, push = Record(RecordKind.READ, 0, 1), Record(RecordKind.PUSH, 1, 1)
    arrivals = OrderedArrivals[str](Noted(), RecordedOrder([read, push, read]))
    assert arrivals.arrive(read, "first") == ["first"]
    assert arrivals.arrive(read, "second") == []
    assert arrivals.awaited() == push
    assert arrivals.arrive(push, "push") == ["push", "second"]


def test_following_writes_the_order_that_it_follows(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, {1: in_turn([1, 2, 3, 1, 2])})
    writer = OrderWriter(OrderFile(new).write)
    writer.add(RecordKind.CALL, 0, 1)
    arrivals = OrderedArrivals[Record](writer, RecordedOrder(read_order(old, 1)))
    for record in in_turn([3, 2, 2, 1, 1]):
        arrivals.arrive(record, record)
    writer.end()
    writer.close()
    assert new.read_bytes() == old.read_bytes()


def test_the_last_turn_is_followed_by_none() -> None:
    order = RecordedOrder(in_turn([1, 2]))
    for record in in_turn([1, 2]):
        assert order.awaited() == record
        assert order.has(record)
        order.advance()
    assert order.awaited() is None
    assert not order.has(Record(RecordKind.PUSH, 3, 0))
