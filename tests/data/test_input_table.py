import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.batch import GlobalBatch
from lockstep.data.input_table import Rows, describe, input_table
from lockstep.topology import place


@given(st.lists(st.integers(0, 30), max_size=4), st.integers(1, 6), st.data())
def test_the_table_lists_the_rows_that_training_reads(
    sizes: list[int], replicas: int, data: st.DataObject
) -> None:
    view = place(replicas, tuple(range(data.draw(st.integers(1, replicas)))))
    steps = [Rows([7 * row for row in range(size)]) for size in sizes]
    readings = list(input_table(steps, view, "alone"))
    assert [(r.step, r.replica) for r in readings] == [
        (step + 1, replica) for step in range(len(sizes)) for replica in range(replicas)
    ]
    assert all(r.worker == view.owners[r.replica] for r in readings)
    for reading in readings:
        numbers = steps[reading.step - 1].numbers
        if not numbers:
            assert not reading.rows.numbers
            continue
        batch = GlobalBatch(len(numbers), replicas, lambda rows, numbers=numbers: numbers[rows], lambda: b"")
        assert list(reading.rows.numbers) == batch.share(reading.replica).data()


def test_the_table_has_a_line_for_each_replica_and_step() -> None:
    table = input_table([Rows(range(6)), Rows([11, 5, 12])], place(2, (0, 3)), "by hand: as a test")
    assert str(table).splitlines() == [
        "by hand: as a test",
        "step  replica  worker  examples",
        "   1        0       0  0-2",
        "   1        1       3  3-5",
        "   2        0       0  11, 5",
        "   2        1       3  12",
    ]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (Rows([]), "none"),
        (Rows(range(2, 9), 4), "2-8 of batch 4"),
        (Rows([3, 1]), "3, 1"),
        (Rows([9, 8, 7, 6, 5, 4, 3, 2, 1]), "9, 8, 7, 6, 5, 4, 3, ... 1 (9)"),
    ],
)
def test_descriptions_of_rows_are_short(rows: Rows, text: str) -> None:
    assert describe(rows) == text
