"""Immutable values that grow: each shares its content with the value from which it was made.

So the state of a run that gains thousands of events remains a value, without copies of its content.
"""

from array import array
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Item = TypeVar("_Item")

_FIRST_ROWS = 16
_PART = 256
_NEIGHBOURS = 32
_NO_ITEMS: Mapping[int, Any] = {}


class _Rows:
    """Room for rows that several `Columns` share; `used` of them have values."""

    __slots__ = ("numbers", "used")

    def __init__(self, numbers: "array[float]", used: int) -> None:
        self.numbers = numbers
        self.used = used


class Columns:
    """Numbers in named columns of equal length; float64."""

    __slots__ = ("_rows", "_size", "names")

    def __init__(self, *names: str) -> None:
        self.names = names
        self._rows = _Rows(array("d"), 0)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def plus(self, *values: float) -> "Columns":
        """Return these rows and another one, with a value for each column."""
        rows, size, width = self._rows, self._size, len(self.names)
        if len(values) != width:
            raise ValueError(f"a row of {width} columns has {len(values)} values")
        start = size * width
        if start == len(rows.numbers) or rows.used != size:
            # There is no room, or another value has used it.
            room = max(_FIRST_ROWS, size) * width
            rows = _Rows(rows.numbers[:start] + array("d", bytes(8 * room)), size)
        rows.numbers[start : start + width] = array("d", values)
        rows.used = size + 1
        longer = Columns.__new__(Columns)
        longer.names, longer._rows, longer._size = self.names, rows, size + 1
        return longer

    def column(self, name: str) -> "npt.NDArray[np.float64]":
        """Return the values of a column, shape (length,)."""
        # Most processes that know the state of a run do not draw charts.
        import numpy as np

        rows = np.frombuffer(self._rows.numbers, np.float64).reshape(-1, len(self.names))
        return rows[: self._size, self.names.index(name)]

    def last(self) -> dict[str, float]:
        """Return the last row by column, or an empty dict without rows."""
        if not self._size:
            return {}
        width = len(self.names)
        end = self._size * width
        return dict(zip(self.names, self._rows.numbers[end - width : end], strict=True))


class GrowingList(Generic[_Item]):
    """Items in the order in which they were added: all items, or only the newest."""

    __slots__ = ("_last", "_parts", "_skipped")

    def __init__(
        self, parts: tuple[tuple[_Item, ...], ...] = (), last: tuple[_Item, ...] = (), skipped: int = 0
    ) -> None:
        # All parts have the same length. The first `skipped` items of the first part do not count any more.
        self._parts = parts
        self._last = last
        self._skipped = skipped

    def plus(self, item: _Item, most: int | None = None) -> "GrowingList[_Item]":
        """Return the items and another one, without the oldest ones if there are more than `most`."""
        parts, last, skipped = self._parts, (*self._last, item), self._skipped
        if len(last) == _PART:
            parts, last = (*parts, last), ()
        if most is not None and len(parts) * _PART + len(last) - skipped > most:
            skipped += 1
            if skipped == _PART:
                parts, skipped = parts[1:], 0
        return GrowingList(parts, last, skipped)

    def replaced(self, index: int, item: _Item) -> "GrowingList[_Item]":
        """Return the items with another one at an index, counted from the first item ever."""
        number, at = divmod(index, _PART)
        if number == len(self._parts):
            return GrowingList(self._parts, (*self._last[:at], item, *self._last[at + 1 :]), self._skipped)
        part = self._parts[number]
        changed = (*part[:at], item, *part[at + 1 :])
        return GrowingList(
            (*self._parts[:number], changed, *self._parts[number + 1 :]), self._last, self._skipped
        )

    def __len__(self) -> int:
        return len(self._parts) * _PART + len(self._last) - self._skipped

    def __iter__(self) -> Iterator[_Item]:
        items = chain(chain.from_iterable(self._parts), self._last)
        return islice(items, self._skipped, None) if self._skipped else items

    def __getitem__(self, index: int) -> _Item:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        number, at = divmod(index % len(self) + self._skipped, _PART)
        return self._last[at] if number == len(self._parts) else self._parts[number][at]


class GrowingMap(Mapping[int, _Item], Generic[_Item]):
    """Items by the id of a worker, in the order in which they were added among some neighbours."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        # The parts are by the higher digits of the id, so an item costs the copy of one part, not of all
        # items.
        self._parts: Mapping[int, Mapping[int, _Item]] = {}

    def plus(self, key: int, item: _Item) -> "GrowingMap[_Item]":
        """Return the items with another one, which replaces the item with the same id."""
        number = key // _NEIGHBOURS
        longer: GrowingMap[_Item] = GrowingMap.__new__(GrowingMap)
        longer._parts = {**self._parts, number: {**self._parts.get(number, _NO_ITEMS), key: item}}
        return longer

    def find(self, key: int) -> _Item | None:
        """Return the item of an id, or None if there is none."""
        return self._parts.get(key // _NEIGHBOURS, _NO_ITEMS).get(key)

    def __getitem__(self, key: int) -> _Item:
        return self._parts[key // _NEIGHBOURS][key]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts.values())

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))


class Numbering:
    """Names, numbered in the order in which they were added."""

    __slots__ = ("_numbers", "_size")

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def number(self, name: str) -> int | None:
        """Return the number of a name, from 0, or None if it has none."""
        number = self._numbers.get(name)
        return number if number is not None and number < self._size else None

    def plus(self, name: str) -> "Numbering":
        """Return the names and another one."""
        longer = Numbering()
        longer._numbers = self._numbers
        if len(self._numbers) != self._size:
            # Another value has added its own names.
            longer._numbers = dict(islice(self._numbers.items(), self._size))
        longer._numbers[name] = self._size
        longer._size = self._size + 1
        return longer
