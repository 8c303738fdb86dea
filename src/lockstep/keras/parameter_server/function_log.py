"""The outcomes of the calls of a `ClusterCoordinator`, for workers that join: they repeat the calls without
computing.

The chief records its calls. The script's path between two calls depends on their results, and on the
variables that it reads. So the log has all results, and those variables that the script has read before the
next call that shows variables. It has all variables only for the last call that has shown any.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# This import defines dtypes such as bfloat16.
import ml_dtypes  # noqa: F401
import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.protocol.parameter_server import Passed

Array = npt.NDArray[Any]

MOST_BYTES = 64 << 20
"""Bytes of variables of earlier calls that the logs of a process keep. The oldest ones are dropped first."""

MOST_LASTING_BYTES = 256 << 20
"""Bytes of results, and of variables at the end of functions, that logs keep. With more, no worker joins."""

_CALL_BYTES = 1 << 10
"""Bytes that a call takes in addition to its result."""

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
class CallOutcome:
    """The outcome of a call.

    Attributes:
        passed: the message that all processes have received.
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
        """The memory of the results, and of the call itself."""
        packed = sum(len(result.packed) for result in self.passed.results)
        return _CALL_BYTES + packed + sum(result.nbytes for result in self.results)


class FunctionLog:
    """The calls from the first scheduled function to the end of the functions.

    A program may make millions of calls, so the outcomes of earlier ones are encoded.

    Attributes:
        count: the number of calls.
        trials: the properties that the trial runs of functions have shown.
        below: the functions before this one are complete.
        models: the values of compiled models at the beginning, by name.
        result_bytes: the memory of the results, and of the calls.
        old_bytes: the memory of the variables of all calls but the last one that has shown any.
    """

    def __init__(self) -> None:
        self.count = self.below = self.result_bytes = self.old_bytes = 0
        self.trials: list[Mapping[str, str]] = []
        self.models: Mapping[str, Any] = {}
        self._outcomes: dict[int, bytes] = {}
        self._shown: tuple[int, CallOutcome] | None = None
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
        outcome = CallOutcome(Passed(0, state=True, variables=tuple(variables)), (), values)
        self._shown, self.models = (AT_BEGIN, outcome), models

    def add(self, label: str, outcome: CallOutcome | None = None) -> None:
        """Record the next call.

        Args:
            label: names the call.
            outcome: its outcome; None if it has no result and shows no variables.
        """
        number, self.count = self.count, self.count + 1
        if self._labels[-1:] != [label]:
            self._starts.append(number)
            self._labels.append(label)
        if outcome is None:
            return
        self.result_bytes += outcome.result_bytes
        if not outcome.passed.state:
            self._outcomes[number] = _encoded(outcome)
            return
        if self._shown is not None:
            before, shown = self._shown
            values = {key: value for key, value in shown.values.items() if key in self._read}
            reduced = replace(shown, values=values)
            self._outcomes[before] = _encoded(reduced)
            if values:
                self._old.append((before, reduced.value_bytes))
                self.old_bytes += reduced.value_bytes
        self._read.clear()
        self._shown = number, outcome

    def note_read(self, key: str) -> None:
        """Record that the script has read a variable since the last call that has shown variables."""
        self._read.add(key)

    def drop_oldest(self, least: int) -> int:
        """Drop variables of the oldest calls that take at least `least` bytes, and return their size."""
        dropped = 0
        while self._old and dropped < least:
            number, taken = self._old.popleft()
            dropped += taken
            self._outcomes[number] = _encoded(replace(_decoded(self._outcomes[number]), values={}))
        self.old_bytes -= dropped
        return dropped

    @property
    def last_bytes(self) -> int:
        """The memory of the variables of the last call that has shown any."""
        return 0 if self._shown is None else self._shown[1].value_bytes

    def outcome_of(self, number: int) -> CallOutcome | None:
        """Return the outcome of a call, by its number or `AT_BEGIN`, or None if it has none."""
        if self._shown is not None and self._shown[0] == number:
            return self._shown[1]
        return None if number not in self._outcomes else _decoded(self._outcomes[number])

    def label(self, number: int) -> str:
        """Return the label of a call, by its number."""
        return self._labels[bisect_right(self._starts, number) - 1]

    def packed(self) -> dict[str, Any]:
        """Return the log as plain values and arrays."""
        calls = msgspec.msgpack.encode((self._starts, self._labels, self.trials, self._outcomes))
        packed: dict[str, Any] = {
            "count": self.count,
            "below": self.below,
            "calls": np.frombuffer(calls, "uint8"),
            "models": dict(self.models),
        }
        if self._shown is not None:
            number, outcome = self._shown
            passed = msgspec.msgpack.encode(outcome.passed)
            packed["shown"] = number, passed, list(outcome.results), dict(outcome.values)
        return packed

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> "FunctionLog":
        """Restore the log from the result of `packed`."""
        log = cls()
        log.count, log.below, log.models = packed["count"], packed["below"], packed["models"]
        log._starts, log._labels, log.trials, log._outcomes = msgspec.msgpack.decode(
            packed["calls"].tobytes(),
            type=tuple[list[int], list[str], list[Mapping[str, str]], dict[int, bytes]],
        )
        if "shown" in packed:
            number, passed, results, values = packed["shown"]
            decoded = msgspec.msgpack.decode(passed, type=Passed)
            log._shown = number, CallOutcome(decoded, results, values)
        return log


def limit(logs: Sequence[FunctionLog]) -> bool:
    """Drop variables of the oldest calls beyond `MOST_BYTES`; return whether the rest takes too much memory.

    The variables of the last call of each log are not dropped.
    """
    total = sum(log.old_bytes for log in logs)
    for log in logs:
        total -= log.drop_oldest(total - MOST_BYTES)
    ended = sum(log.last_bytes for log in logs[:-1])
    return ended + sum(log.result_bytes for log in logs) > MOST_LASTING_BYTES


def _encoded(outcome: CallOutcome) -> bytes:
    results = [_described(array) for array in outcome.results]
    return _encoder.encode(
        (outcome.passed, results, {k: _described(array) for k, array in outcome.values.items()})
    )


def _decoded(encoded: bytes) -> CallOutcome:
    passed, results, values = _decoder.decode(encoded)
    return CallOutcome(
        passed, [_array(array) for array in results], {k: _array(v) for k, v in values.items()}
    )


def _described(array: Array) -> _Described:
    return str(array.dtype), list(array.shape), array.tobytes()


def _array(described: _Described) -> Array:
    dtype, shape, data = described
    # A copy can be written to, as PyTorch and programs expect.
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Encoded)
