"""The rounds of `strategy.run`, and what the loss of a worker means in a loop of the program's own.

Where `strategy.steps` drives the loop, the other workers make a call again without a worker that is lost, as
in `fit`. Elsewhere no worker can join, and what the program itself has given the lost one to do remains
undone: the loop ends.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar

import numpy.typing as npt
import xxhash

from lockstep.collectives.contract import Communicator
from lockstep.errors import DisagreementError, ModelError, PeerLostError
from lockstep.keras.backends.contract import Partial, Total
from lockstep.keras.consistency import Facts, gather
from lockstep.keras.per_replica import Values
from lockstep.keras.synchronization import AllReduce, PartialLayout, Round
from lockstep.topology import View
from lockstep.worker.job import Job

Result = TypeVar("Result")

_ADVICE = "the function passed to strategy.run must take the same path on all replicas"


class RunRounds:
    """What the workers of a loop of the program's own do together.

    Attributes:
        concrete: shows an array of the backend to NumPy.
    """

    def __init__(self, job: Job, concrete: Callable[[Any], npt.NDArray[Any]]) -> None:
        self._job = job
        self._synchronization = AllReduce(self._exchange, job.worker)
        self.concrete = concrete

    @property
    def own(self) -> range:
        """The replicas that this worker owns, now."""
        return self._job.view.replicas_of(self._job.worker)

    def refuse_followers(self, name: str) -> None:
        """Raise DisagreementError in a worker that is to join: it cannot know how far the others are."""
        if self._job.joins and not self._job.driven:
            raise DisagreementError(
                f"this worker, which is joining, reaches strategy.run of {name} in a loop of the program's "
                "own and cannot know the others' position in it: let strategy.steps drive the loop, "
                "or run the job with --max-restarts 0"
            )

    def round(
        self,
        what: str,
        compute: Callable[[int], Partial],
        inputs: Sequence[Values] = (),
        seed: int = 0,
        like: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Round:
        """Return a round of a run.

        Args:
            what: names it in messages.
            compute: computes a replica's partial.
            inputs: the values that each replica has its own of.
            seed: 64 bits that random numbers follow from, where that is not the state of a variable.
            like: a partial; None where its shapes are not known beforehand.
        """

        def check(names: Sequence[str]) -> bytes:
            """Return what the inputs are, and what is computed from them."""
            drawn = struct.pack("<Q", seed % 2**64)
            parts = (drawn, ",".join(names).encode(), *(values.check() for values in inputs))
            return xxhash.xxh3_128_digest(b"".join(parts))

        layout = None if like is None else PartialLayout.of(like)
        return Round(what, compute, self.concrete, check, _ADVICE, layout=layout)

    def total(self, this: Round) -> Total:
        """Return the total of a round of a function, valid until the next call.

        Where replicas contribute nothing the workers do not meet.

        Raises:
            PeerLostError: a worker was lost, and Lockstep does not drive the loop.
        """
        if not this.begin(self.own).leaves:
            return {}
        total = self.synchronize(this)
        self._job.stepped()
        return total

    def synchronize(self, this: Round) -> Total:
        """Return the total of any round; see `lockstep.keras.synchronization.Synchronization`."""
        return self._synchronization.synchronize(this)

    def agree(self, what: str, facts: Facts) -> None:
        """Return if every worker calls this with equal facts; see `lockstep.keras.consistency.agree`."""
        self._exchange(lambda view, communicator: gather(view, communicator, what, facts, b""))

    def _exchange(
        self,
        act: Callable[[View, Communicator], Result],
        catching_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Result:
        if self._job.driven:
            return self._job.exchange(act, catching_up)
        try:
            return act(self._job.view, self._job.communicator)
        except PeerLostError as lost:
            # The rest of the message is about the next view, which this loop never enters.
            who = str(lost).partition(";")[0]
            raise PeerLostError(
                f"{who}; strategy.steps does not drive this loop, so no new worker can join: restart the "
                "job to resume from the program's checkpoint, or let strategy.steps drive the loop"
            ) from None


def refuse_sum_of_booleans(name: str) -> NoReturn:
    """Raise ModelError: NumPy's sum of two booleans is whether one of them is true."""
    raise ModelError(f"{name} cannot add up booleans: cast them to integers first")
