"""What the calls of a `ClusterCoordinator` have found, for workers that join: they repeat the calls without
computing.

The chief records its calls. What the script does between two calls depends on their results, and on the
variables that it reads. So the log has all results, and of the variables those that the script has read
before the next call that shows variables. Only of the last call that has shown variables, it has all.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# Defines dtypes such as bfloat16.
import ml_dtypes  # noqa: F401
import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.protocol.parameter_server import Passed

Array = npt.NDArray[Any]

MOST_BYTES = 64 << 20
"""Bytes of variables of earlier calls that the logs of a process keep; the oldest ones are dropped first."""

MOST_LASTING_BYTES = 256 << 20
"""Bytes of results, and of variables at the end of functions, that logs keep; with more, no worker joins."""

_CALL_BYTES = 1 << 10
"""Bytes that a call with a result takes besides."""

_Described = tuple[str, list[int], bytes]
"""The dtype, shape and bytes of an array."""

_Encoded = tuple[Passed, list[_Described], dict[str, _Described]]

AT_BEGIN = -1
"""The number under which a log has the variables at the beginning."""


def of_scope(position: int) -> str:
    """Return the key of a variable of the scope of the strategy."""
    return f"o{position}"


def of_servers(index: int) -> str:
    """Return the key of a variable that is on the servers."""
    return f"s{index}"


@dataclass(frozen=True)
class FoundByCall:
    """The outcome of a call.

    Attributes:
        passed: what all processes have learned.
        results: the arrays of its results.
        values: the values of variables that the call has shown, by key: all, or those that were read.
    """

    passed: Passed
    results: Sequence[Array] = ()
    values: Mapping[str, Array] = field(default_factory=dict)

    @property
    def value_bytes(self) -> int:
        """The memory of the values."""
        return sum(value.nbytes for value in self.values.values())

    @property
    def result_bytes(self) -> int:
        """The memory of the results, and of what belongs to the call itself."""
        packed = sum(len(one.packed) for one in self.passed.results)
        return _CALL_BYTES + packed + sum(one.nbytes for one in self.results)


class FunctionLog:
    """The calls from the first function that is scheduled to the end of the functions.

    A program may make millions of calls: what earlier ones have found is encoded.

    Attributes:
        count: the number of calls.
        trials: facts on the trial runs of functions.
        below: the functions before this one are complete.
        models: the values of compiled models at the beginning, by name.
        result_bytes: the memory of the results, and of the calls.
        old_bytes: the memory of the variables of all calls but the last one that has shown any.
    """

    def __init__(self) -> None:
        self.count = self.below = self.result_bytes = self.old_bytes = 0
        self.trials: list[Mapping[str, str]] = []
        self.models: Mapping[str, Any] = {}
        self._found: dict[int, bytes] = {}
        self._shown: tuple[int, FoundByCall] | None = None
        self._starts: list[int] = []
        self._labels: list[str] = []
        self._read: set[str] = set()
        self._old: deque[tuple[int, int]] = deque()

    def begin(self, variables: Mapping[int, Array], models: Mapping[str, Any]) -> None:
        """Record the variables at the beginning, if earlier calls have changed them.

        Args:
            variables: the variables of the scope of the strategy, by position.
            models: the values of compiled models, by name.
        """
        values = {of_scope(position): value for position, value in variables.items()}
        found = FoundByCall(Passed(0, state=True, variables=tuple(variables)), (), values)
        self._shown, self.models = (AT_BEGIN, found), models

    def add(self, label: str, found: FoundByCall | None = None) -> None:
        """Record the next call.

        Args:
            label: names the call.
            found: what it has found; None for nothing.
        """
        number, self.count = self.count, self.count + 1
        if self._labels[-1:] != [label]:
            self._starts.append(number)
            self._labels.append(label)
        if found is None:
            return
        self.result_bytes += found.result_bytes
        if not found.passed.state:
            self._found[number] = _encoded(found)
            return
        if self._shown is not None:
            before, one = self._shown
            values = {key: value for key, value in one.values.items() if key in self._read}
            reduced = replace(one, values=values)
            self._found[before] = _encoded(reduced)
            if values:
                self._old.append((before, reduced.value_bytes))
                self.old_bytes += reduced.value_bytes
        self._read.clear()
        self._shown = number, found

    def note_read(self, key: str) -> None:
        """Note that the script has read a variable since the last call that has shown variables."""
        self._read.add(key)

    def drop_oldest(self, least: int) -> int:
        """Drop variables of the oldest calls that take so many bytes, or all; return how many they took."""
        dropped = 0
        while self._old and dropped < least:
            number, taken = self._old.popleft()
            dropped += taken
            self._found[number] = _encoded(replace(_decoded(self._found[number]), values={}))
        self.old_bytes -= dropped
        return dropped

    @property
    def last_bytes(self) -> int:
        """The memory of the variables of the last call that has shown any."""
        return 0 if self._shown is None else self._shown[1].value_bytes

    def found_by(self, number: int) -> FoundByCall | None:
        """Return what a call has found, by its number, or what was so `AT_BEGIN`; None for nothing."""
        if self._shown is not None and self._shown[0] == number:
            return self._shown[1]
        return None if number not in self._found else _decoded(self._found[number])

    def label(self, number: int) -> str:
        """Return what names a call."""
        return self._labels[bisect_right(self._starts, number) - 1]

    def packed(self) -> dict[str, Any]:
        """Return the log as plain values and arrays."""
        calls = msgspec.msgpack.encode((self._starts, self._labels, self.trials, self._found))
        packed: dict[str, Any] = {
            "count": self.count,
            "below": self.below,
            "calls": np.frombuffer(calls, "uint8"),
            "models": dict(self.models),
        }
        if self._shown is not None:
            number, found = self._shown
            passed = msgspec.msgpack.encode(found.passed)
            packed["shown"] = number, passed, list(found.results), dict(found.values)
        return packed

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> "FunctionLog":
        """Restore the log from the result of `packed`."""
        log = cls()
        log.count, log.below, log.models = packed["count"], packed["below"], packed["models"]
        log._starts, log._labels, log.trials, log._found = msgspec.msgpack.decode(
            packed["calls"].tobytes(),
            type=tuple[list[int], list[str], list[Mapping[str, str]], dict[int, bytes]],
        )
        if "shown" in packed:
            number, passed, results, values = packed["shown"]
            decoded = msgspec.msgpack.decode(passed, type=Passed)
            log._shown = number, FoundByCall(decoded, results, values)
        return log


def limit(logs: Sequence[FunctionLog]) -> bool:
    """Drop variables of the oldest calls beyond `MOST_BYTES`; return whether the rest takes too much memory.

    What the last call of each log has shown is not dropped.
    """
    total = sum(log.old_bytes for log in logs)
    for log in logs:
        total -= log.drop_oldest(total - MOST_BYTES)
    ended = sum(log.last_bytes for log in logs[:-1])
    return ended + sum(log.result_bytes for log in logs) > MOST_LASTING_BYTES


def _encoded(found: FoundByCall) -> bytes:
    results = [_described(one) for one in found.results]
    return _encoder.encode((found.passed, results, {k: _described(one) for k, one in found.values.items()}))


def _decoded(encoded: bytes) -> FoundByCall:
    passed, results, values = _decoder.decode(encoded)
    return FoundByCall(passed, [_array(one) for one in results], {k: _array(v) for k, v in values.items()})


def _described(array: Array) -> _Described:
    return str(array.dtype), list(array.shape), array.tobytes()


def _array(described: _Described) -> Array:
    dtype, shape, data = described
    # A copy can be written to, as PyTorch and programs expect.
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Encoded)
