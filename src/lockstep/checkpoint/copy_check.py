"""Facts about an array with which a changed bit of its copy is found and corrected before it is written.

The bytes are the words of a matrix. The XOR of its rows and that of its columns show where one word has
changed, and in which bits. This corrects any change of a single word. The checksum shows whether the
correction succeeded.

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
"""The most columns. Small arrays have fewer: about as many as rows."""
_BLOCK = 1 << 17
"""The most words of a block, which remains in the cache while all facts about it are computed."""


class CopyCheck(NamedTuple):
    """Facts about an array before it was copied.

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
        return cls(*_facts(_bytes(array)))

    def correct(self, copy: Array) -> bool:
        """Correct, in place, a copy in which one word has changed; return whether it is right then."""
        data = _bytes(copy)
        rows, columns = (now ^ before for now, before in zip(_facts(data)[1:], self[1:], strict=True))
        (row, *others), (column, *other_columns) = ([*np.flatnonzero(sums), -1] for sums in (rows, columns))
        if others != [-1] or other_columns != [-1]:
            return False
        start = 8 * (int(row) * columns.size + int(column))
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


def _facts(data: npt.NDArray[np.uint8]) -> tuple[str, Words, Words]:
    """Return the facts of `CopyCheck` about bytes; the last row is padded with zeros."""
    width = min(_COLUMNS, 1 << (data.size // 8).bit_length() // 2)
    height, rest = divmod(data.size, 8 * width)
    matrix, last = data[: data.size - rest].view(np.uint64).reshape(height, width), np.zeros(width, np.uint64)
    last.view(np.uint8)[:rest] = data[data.size - rest :]
    checksum, rows, columns = xxhash.xxh3_128(), np.empty(height + 1, np.uint64), last.copy()
    size = _BLOCK // width
    for start in range(0, height, size):
        block = matrix[start : start + size]
        checksum.update(block.data)
        np.bitwise_xor.reduce(block, axis=1, out=rows[start : start + len(block)])
        columns ^= np.bitwise_xor.reduce(block, axis=0)
    checksum.update(last.view(np.uint8)[:rest].data)
    rows[-1] = np.bitwise_xor.reduce(last)
    return checksum.hexdigest(), rows, columns
