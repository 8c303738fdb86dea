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

import msgspec
import numpy.typing as npt

from lockstep.errors import DisagreementError
from lockstep.protocol.parameter_server import Passed

Array = npt.NDArray[Any]

MOST_BYTES = 64 << 20
"""Bytes of variables of earlier calls that the logs of a process keep; the oldest ones are dropped first."""

MOST_LASTING_BYTES = 256 << 20
"""Bytes of results, and of variables at the end of functions, that logs keep; with more, no worker joins."""

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
    """What a call has found.

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
        """The memory of the results."""
        return sum(len(one.packed) for one in self.passed.results) + sum(one.nbytes for one in self.results)


class FunctionLog:
    """The calls from the first function that is scheduled to the end of the functions.

    Attributes:
        count: the number of calls.
        trials: facts on the trial runs of functions.
        found: what calls have found, by their numbers; calls without a result are missing.
        below: the functions before this one are complete.
        models: the values of compiled models at the beginning, by name.
        shown: the number of the last call that has shown variables; None before.
        result_bytes: the memory of the results.
        old_bytes: the memory of the variables of all calls but the last one that has shown any.
    """

    def __init__(self) -> None:
        self.count = self.below = self.result_bytes = self.old_bytes = 0
        self.trials: list[Mapping[str, str]] = []
        self.found: dict[int, FoundByCall] = {}
        self.models: Mapping[str, Any] = {}
        self.shown: int | None = None
        self._starts: list[int] = []
        self._labels: list[str] = []
        self._read: set[str] = set()
        self._old: deque[int] = deque()

    def begin(self, variables: Mapping[int, Array], models: Mapping[str, Any]) -> None:
        """Record the variables at the beginning, if earlier calls have changed them.

        Args:
            variables: of the scope of the strategy, by position.
            models: the values of compiled models, by name.
        """
        values = {of_scope(position): value for position, value in variables.items()}
        self.found[AT_BEGIN] = FoundByCall(Passed(0, state=True, variables=tuple(variables)), (), values)
        self.shown, self.models = AT_BEGIN, models

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
        self.found[number] = found
        self.result_bytes += found.result_bytes
        if found.passed.state:
            if self.shown is not None:
                before = self.found[self.shown]
                values = {key: value for key, value in before.values.items() if key in self._read}
                self.found[self.shown] = reduced = replace(before, values=values)
                self.old_bytes += reduced.value_bytes
                self._old.append(self.shown)
            self._read.clear()
            self.shown = number

    def drop_oldest(self, least: int) -> int:
        """Drop variables of the oldest calls that take so many bytes, or all; return how many they took."""
        dropped = 0
        while self._old and dropped < least:
            number = self._old.popleft()
            dropped += self.found[number].value_bytes
            self.found[number] = replace(self.found[number], values={})
        self.old_bytes -= dropped
        return dropped

    def note_read(self, key: str) -> None:
        """Note that the script has read a variable since the last call that has shown variables."""
        self._read.add(key)

    def check(self, number: int, label: str) -> None:
        """Compare a call with the recorded one.

        Raises:
            DisagreementError: it is another one.
        """
        recorded = self._labels[bisect_right(self._starts, number) - 1]
        if label != recorded:
            raise DisagreementError(
                f"call {number + 1} of the ClusterCoordinator is {label} in this worker, which joins, and "
                f"was {recorded} in the chief: let the script decide by what is equal in all processes"
            )

    def packed(self) -> dict[str, Any]:
        """Return the log as plain values and arrays."""
        return {
            "count": self.count,
            "below": self.below,
            "starts": list(self._starts),
            "labels": list(self._labels),
            "trials": [dict(facts) for facts in self.trials],
            "models": dict(self.models),
            "found": {
                number: (msgspec.msgpack.encode(one.passed), list(one.results), dict(one.values))
                for number, one in self.found.items()
            },
        }

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> "FunctionLog":
        """Restore the log from the result of `packed`."""
        log = cls()
        log.count, log.below = packed["count"], packed["below"]
        log._starts, log._labels = packed["starts"], packed["labels"]
        log.trials, log.models = packed["trials"], packed["models"]
        for number, (passed, results, values) in packed["found"].items():
            log.found[number] = FoundByCall(msgspec.msgpack.decode(passed, type=Passed), results, values)
        return log


def limit(logs: Sequence[FunctionLog]) -> bool:
    """Drop variables of the oldest calls beyond `MOST_BYTES`; return whether the rest takes too much memory.

    What the last call of each log has shown is not dropped.
    """
    total = sum(log.old_bytes for log in logs)
    for log in logs:
        total -= log.drop_oldest(total - MOST_BYTES)
    ended = sum(log.found[log.shown].value_bytes for log in logs[:-1] if log.shown is not None)
    return ended + sum(log.result_bytes for log in logs) > MOST_LASTING_BYTES
