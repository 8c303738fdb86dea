"""The rounds of `strategy.run` between workers.

If a worker is lost in a loop that `strategy.steps` drives, the other workers repeat the call without it, as
in `fit`. In other loops no worker can join, and the work that the script itself assigned to the lost worker
would be missing: such a loop ends.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt
import xxhash

from lockstep.collectives.contract import Communicator
from lockstep.errors import DisagreementError, PeerLostError
from lockstep.keras.backends.contract import Partial, Total
from lockstep.keras.per_replica import Values, is_empty
from lockstep.keras.step_digests import recorder_of
from lockstep.keras.synchronization import AllReduce, PartialLayout, Round, Synchronization
from lockstep.keras.verification import VerifiedReduce, verifications_of
from lockstep.keras.worker_exchange import Facts, compare_all
from lockstep.topology import View
from lockstep.worker.job import Job

Array = npt.NDArray[Any]
Result = TypeVar("Result")

_ADVICE = (
    "the function passed to strategy.run must take the same path on all replicas, and leave equal values in "
    "Python attributes: return what depends on a replica's examples, or keep it in a metric or a variable"
)


class RunRounds:
    """Makes and synchronizes the rounds of `strategy.run`.

    Attributes:
        to_numpy: returns an array of the backend as NumPy sees it.
    """

    def __init__(self, job: Job, to_numpy: Callable[[Any], Array]) -> None:
        self._job = job
        self._synchronization = AllReduce(self._exchange, job.worker)
        self._verifications = verifications_of(job)
        self._verified = VerifiedReduce(self._synchronization, self._exchange, job, self._verifications)
        self._runs = 0
        self._known: set[str] = set()
        self._is_first = False
        self._digests = recorder_of(job, to_numpy)
        self.to_numpy = to_numpy
        self._compared = False

    @property
    def owned(self) -> range:
        """The replicas that this worker owns in the present view."""
        return self._job.view.replicas_of(self._job.worker)

    def begin_run(self, name: str) -> None:
        """Begin a `strategy.run` of the function `name`.

        Raises:
            DisagreementError: this worker is to join, and cannot know the others' position.
        """
        self._runs += 1
        self._is_first = name not in self._known
        self._known.add(name)
        if self._job.joins and not self._job.driven:
            raise DisagreementError(
                f"this worker, which is joining, reaches strategy.run of {name} in a custom loop "
                "and cannot know the others' position in it: let strategy.steps drive the loop, "
                "or run the job with --max-restarts 0"
            )

    def round(
        self,
        what: str,
        compute: Callable[[int], Partial],
        inputs: Sequence[Values] = (),
        seed: int = 0,
        like: Mapping[str, Array] | None = None,
        form: Callable[[], str] | None = None,
    ) -> Round:
        """Return a round of a `strategy.run`.

        Args:
            what: names it in messages.
            compute: computes a replica's partial.
            inputs: the inputs of the replicas.
            seed: 64 bits that determine the random numbers that no variable determines.
            like: a partial; None if its shapes are unknown.
            form: returns what the last computation of a replica has done besides its arrays.
        """

        def check(names: Sequence[str]) -> bytes:
            """Return a hash of the inputs and of the names of the results."""
            drawn = struct.pack("<Q", seed % 2**64)
            done = b"" if form is None else form().encode()
            parts = (drawn, ",".join(names).encode(), done, *(values.check() for values in inputs))
            return xxhash.xxh3_128_digest(b"".join(parts))

        layout = None if like is None else PartialLayout.of(like)
        settle = partial(self._job.timer.lap, "compute")

        def read(replica: int) -> list[Any]:
            """Return the leaves of the inputs of a replica."""
            return [leaf for values in inputs for leaf in values.of(replica)]

        anywhere = all(values.anywhere for values in inputs)
        return Round(
            *(what, compute, self.to_numpy, check, _ADVICE),
            layout=layout,
            settle=settle,
            inputs=read,
            anywhere=anywhere,
            form=form,
            counts=lambda replica: not is_empty(inputs, replica),
        )

    def total(self, this: Round) -> Total:
        """Return the total of a round of a function, valid until the next call.

        If replicas contribute nothing, the total is empty, and no worker waits for another.

        Raises:
            PeerLostError: a worker was lost in a loop that Lockstep does not drive.
        """
        if not this.begin(self.owned).leaves:
            return {}
        if not self._job.driven:
            # In a loop of the script, each call of strategy.run counts as a step.
            self._verifications.begin(self._runs, first=self._is_first)
        total = self._timed(this, self._verified)
        self._job.note_step()
        return total

    def synchronize(self, this: Round) -> Total:
        """Return the total of any round; see `lockstep.keras.synchronization.Synchronization`."""
        return self._timed(this, self._synchronization)

    def _timed(self, this: Round, synchronization: Synchronization) -> Total:
        timer = self._job.timer
        timer.lap("compute")
        total = synchronization.synchronize(this)
        timer.lap("exchange")
        self._digests.take_loop_round(this, total, driven=self._job.driven)
        return total

    def agree(self, what: str, facts: Facts) -> None:
        """Check that every worker calls this with equal facts; see `lockstep.keras.worker_exchange.agree`.

        On hosts that compute different bits, states differ by rounding.
        """
        if self._job.settings.allow_unlike:
            facts = {name: text for name, text in facts.items() if not name.startswith("variable ")}
        self._exchange(lambda _, communicator: compare_all(self._job, communicator, what, facts))

    def compare_hosts(self) -> None:
        """Before the first call of `strategy.run` in a loop of the script, check what hosts must share.

        Raises:
            DisagreementError: hosts differ.
        """
        if not self._compared and not self._job.driven and len(self._job.view.hosts) > 1:
            self.agree("the first strategy.run", {})
        self._compared = True

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
