"""The last call that a member has completed: its number in the job and its result. It outlives views."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from lockstep.collectives.call import CollectiveCall
from lockstep.collectives.contract import Bytes
from lockstep.collectives.layout import allocate
from lockstep.collectives.network.frames import Result
from lockstep.errors import DisagreementError, InternalError, LockstepError, SharedMemoryError

_PART = 1 << 30
"""Bytes of a total in one part of a result."""


@dataclass(frozen=True)
class KeptResult:
    """The result of a call.

    Attributes:
        call: the call.
        total: the memory of a total.
        blobs: the blobs of all members.
        parts: the parts that this member has received in an all-to-all.
        error: the error in which the call ended on all members.
    """

    call: CollectiveCall
    total: "Bytes | None" = None
    blobs: tuple[bytes, ...] = ()
    parts: tuple[Bytes, ...] = ()
    error: DisagreementError | SharedMemoryError | None = None

    def encoded(self) -> Result:
        """Return the result for a host that lacks it: without the parts of an all-to-all, which it has."""
        blobs = list(self.blobs)
        if self.total is not None:
            total = self.total
            blobs = [total[start : start + _PART].tobytes() for start in range(0, total.size, _PART)]
        differing = self.error.workers if isinstance(self.error, DisagreementError) else None
        text = None if self.error is None else str(self.error)
        call = self.call
        return Result(call.kind, call.layout, blobs, text, differing, call.what)

    @classmethod
    def of(cls, result: Result, call: CollectiveCall, size: int, parts: tuple[Bytes, ...] | None) -> Self:
        """Return the result that another host has sent, for a member that makes `call` again.

        Args:
            result: the result.
            call: the call that this member makes.
            size: bytes of the total, if it is a reduce.
            parts: the parts that this member has received, if it is an all-to-all.

        Raises:
            InternalError: it is not the result of this call.
        """
        if result.error is not None:
            if result.differing is None:
                return cls(call, error=SharedMemoryError(result.error))
            return cls(call, error=DisagreementError(result.error, result.differing))
        length = sum(map(len, result.blobs))
        completed = result.kind, result.what, result.layout
        repeated = call.kind, call.what, call.layout
        if completed != repeated or (call.kind == "reduce" and length != size):
            raise InternalError(
                f"another host has completed {result.kind} for {result.what}, but this worker repeats {call}"
            )
        if call.kind == "reduce":
            total, start = allocate(size), 0
            for blob in result.blobs:
                total[start : start + len(blob)] = np.frombuffer(blob, np.uint8)
                start += len(blob)
            return cls(call, total)
        if call.kind == "all_to_all":
            if parts is None:
                raise InternalError(f"{call} is complete on another host, but this worker lacks its parts")
            return cls(call, parts=parts)
        return cls(call, blobs=tuple(result.blobs))


class LastCall:
    """The last call that a member has completed.

    Attributes:
        number: the number of the call in the job, from 1; 0 before the first call; -1 if the member has just
            joined.
        result: None if the member has not taken part in that call.
        received: the number of the last all-to-all whose parts this member has all received, and the parts.
    """

    def __init__(self) -> None:
        self.number = -1
        self.result: KeptResult | None = None
        self.received: tuple[int, tuple[Bytes, ...]] | None = None

    def complete(self, number: int, result: KeptResult | None) -> None:
        """Record the end of a call."""
        self.number, self.result, self.received = number, result, None

    def parts(self, number: int) -> tuple[Bytes, ...] | None:
        """Return the parts received in the all-to-all with a number, or None if some are missing."""
        return self.received[1] if self.received is not None and self.received[0] == number else None


def raise_again(error: LockstepError) -> LockstepError:
    """Return a new error that equals `error`, because an error that was raised refers to its stack."""
    return type(error)(*error.args)
