"""Facts about an array, by which a changed bit of its copy is found and corrected before it is written.

The bytes are the words of a matrix. The XOR of its rows and that of its columns tell where one word has
changed, and by which bits: this corrects each change of a single word. The checksum shows whether it did.

The state itself may have changed since it was copied, and no other process has a copy of it. So without this,
the last checkpoint of a job would be lost.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

_COLUMNS = 1 << 12


class CopyCheck(NamedTuple):
    """Facts about an array as it was before it was copied.

    Attributes:
        checksum: see `checksum_of`.
        rows: the XOR of the words of each row.
        columns: the XOR of the words of each column.
    """

    checksum: str
    rows: Words
    columns: Words

    @classmethod
    def of(cls, array: Array) -> "CopyCheck":
        """Return the facts about an array."""
        return cls(checksum_of(array), *_sums(_bytes(array)))

    def correct(self, copy: Array) -> bool:
        """Correct a copy that has changed in one word, in place; return whether it is right then."""
        data = _bytes(copy)
        rows, columns = (now ^ before for now, before in zip(_sums(data), self[1:], strict=True))
        (row, *others), (column, *other_columns) = ([*np.flatnonzero(sums), -1] for sums in (rows, columns))
        if others != [-1] or other_columns != [-1]:
            return False
        start = 8 * (int(row) * _COLUMNS + int(column))
        word = data[start : start + 8]
        word ^= rows[row : row + 1].view(np.uint8)[: word.size]
        copy[...] = data.view(copy.dtype).reshape(copy.shape)
        return checksum_of(copy) == self.checksum


def checksum_of(array: Array) -> str:
    """Return the checksum of an array."""
    return xxhash.xxh3_128_hexdigest(_bytes(array).data)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array; a copy if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _sums(data: npt.NDArray[np.uint8]) -> tuple[Words, Words]:
    """Return the XOR of the words of each row and of each column; the last row is filled up with zeros."""
    size = 8 * _COLUMNS
    whole = data[: data.size - data.size % size].view(np.uint64).reshape(-1, _COLUMNS)
    last = np.zeros(size, np.uint8)
    last[: data.size % size] = data[whole.nbytes :]
    words = last.view(np.uint64)
    rows = np.append(np.bitwise_xor.reduce(whole, axis=1), np.bitwise_xor.reduce(words))
    return rows, np.bitwise_xor.reduce(whole, axis=0) ^ words
