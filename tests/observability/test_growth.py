"""Values that grow: each keeps what it had, whatever is made from it; lists are their twins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observability.growth import Columns, GrowingList, GrowingMap, Numbering

choices = st.lists(st.integers(0, 10**6), max_size=80)
"""For each new value, from which of those before it is made."""


@given(choices)
def test_rows_of_any_value_remain_whatever_is_made_from_it(choices: list[int]) -> None:
    values: list[tuple[Columns, list[tuple[float, float]]]] = [(Columns("a", "b"), [])]
    for at, choice in enumerate(choices):
        columns, rows = values[choice % len(values)]
        values.append((columns.plus(at, -at), [*rows, (float(at), float(-at))]))
        first = values[0][0].column("a")
        assert first.shape == (0,)
    for columns, rows in values:
        assert len(columns) == len(rows)
        assert list(zip(columns.column("a"), columns.column("b"), strict=True)) == rows
        assert columns.last() == (dict(zip("ab", rows[-1], strict=True)) if rows else {})


def test_a_column_that_was_read_does_not_change_when_rows_are_added() -> None:
    columns = Columns("a")
    for number in range(1000):
        before = columns.column("a")
        columns = columns.plus(number)
        assert np.array_equal(before, np.arange(number))
    with pytest.raises(ValueError, match="a row of 1 columns has 2 values"):
        columns.plus(1, 2)
    assert np.array_equal(columns.column("a"), np.arange(1000))


@given(st.integers(0, 1500), st.none() | st.integers(1, 700), st.data())
def test_a_log_is_a_list_of_its_newest_items(count: int, most: int | None, data: st.DataObject) -> None:
    log: GrowingList[int] = GrowingList()
    for number in range(count):
        log = log.plus(number, most)
    items = list(range(count))[-most if most else 0 :]
    if most is None and items:
        at = data.draw(st.integers(0, count - 1))
        before, log, items[at] = log, log.replaced(at, -1), -1
        assert list(before) == list(range(count))
    assert list(log) == items
    assert (len(log), [log[at] for at in range(-len(log), len(log))]) == (len(items), items * 2)
    assert list(reversed(log)) == items[::-1]
    with pytest.raises(IndexError):
        log[len(log)]


@given(choices)
def test_items_of_any_value_remain_whatever_is_made_from_it(choices: list[int]) -> None:
    values: list[tuple[GrowingMap[int], dict[int, int]]] = [(GrowingMap(), {})]
    for at, choice in enumerate(choices):
        items, twin = values[choice % len(values)]
        added = {choice % 97 - 1: at, at: choice}
        twin = {**twin, **added}
        for key, value in added.items():
            items = items.plus(key, value)
        values.append((items, twin))
    for items, twin in values:
        assert (dict(items), len(items), 10**7 in items) == (twin, len(twin), False)
        assert all(items[key] == items.find(key) == value for key, value in twin.items())
        assert items.find(10**7) is None


@given(choices)
def test_names_of_any_value_keep_their_numbers(choices: list[int]) -> None:
    values: list[tuple[Numbering, list[str]]] = [(Numbering(), [])]
    for at, choice in enumerate(choices):
        numbering, names = values[choice % len(values)]
        values.append((numbering.plus(f"{at}"), [*names, f"{at}"]))
    for numbering, names in values:
        assert len(numbering) == len(names)
        for at in range(len(choices)):
            name = f"{at}"
            assert numbering.number(name) == (names.index(name) if name in names else None)
