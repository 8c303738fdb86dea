"""The rounds of `strategy.run` between workers.

If a worker is lost in a loop that `strategy.steps` drives, the other workers repeat the call without it, as
in `fit`. In other loops no worker can join, and the work that the script itself assigned to the lost worker
would be missing: such a loop ends.
"""

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy.typing as npt

from lockstep.collectives.contract import Communicator
from lockstep.errors import DisagreementError, PeerLostError
from lockstep.keras.backends.contract import Total
from lockstep.keras.per_replica import Values, is_empty
from lockstep.keras.round_verification import Verifier
from lockstep.keras.rounds import PartialLayout, Round
from lockstep.keras.step_digests import recorder_of
from lockstep.keras.verification import verifications_of
from lockstep.keras.worker_exchange import Facts, compare_all
from lockstep.topology import View
from lockstep.worker.job import Job

Array = npt.NDArray[Any]
Result = TypeVar("Result")

_ADVICE = (
    "the function passed to strategy.run must take the same path on all replicas, and leave equal values in "
    "Python attributes and in variables outside of the function: return what depends on a replica's "
    "examples, or keep it in a metric or a Keras variable"
)


class RunRounds:
    """Sums the rounds of `strategy.run`.

    Attributes:
        job: the job of this worker.
        to_numpy: returns an array of the backend as NumPy sees it.
        next_seed: returns the seed of the next run. Draws from the script's random states would change its
            later draws, such as the initial weights of its next model.
    """

    def __init__(self, job: Job, to_numpy: Callable[[Any], Array], next_seed: Callable[[], int]) -> None:
        self.job = job
        self._verifications = verifications_of(job)
        self._verifier = Verifier(self._exchange, job, self._verifications)
        self._runs = 0
        self._names_run: set[str] = set()
        self._is_first = False
        self._digests = recorder_of(job, to_numpy)
        self.to_numpy = to_numpy
        self.next_seed = next_seed
        self._compared = False

    @property
    def owned(self) -> range:
        """The replicas that this worker owns in the present view."""
        return self.job.view.replicas_of(self.job.worker)

    def begin_run(self, name: str) -> None:
        """Begin a `strategy.run` of the function `name`.

        Raises:
            DisagreementError: this worker is to join, and cannot know the others' position.
        """
        self._runs += 1
        self._is_first = name not in self._names_run
        self._names_run.add(name)
        if self.job.joins and not self.job.driven:
            raise DisagreementError(
                f"this worker, which is joining, reaches strategy.run of {name} in a custom loop "
                "and cannot know the others' position in it: let strategy.steps drive the loop, "
                "or run the job with --max-restarts 0"
            )

    def begin_round(self) -> None:
        """See `Verifications.begin_round`."""
        self._verifications.begin_round()

    def total(self, round_: "FunctionRound") -> Total:
        """Return the total of a round of a function, valid until the next call.

        If replicas do not contribute, the total is empty, and no worker waits for another.

        Raises:
            PeerLostError: a worker was lost in a loop that Lockstep does not drive.
        """
        if not round_.begin(self.owned).leaves:
            return {}
        if not self.job.driven:
            # In a loop of the script, each call of strategy.run counts as a step.
            self._verifications.begin(self._runs, first=self._is_first)
        self.job.timer.lap("compute")
        total = self._summed(round_, self._verifier.sum(round_))
        self.job.note_step()
        return total

    def merged(self, round_: Round) -> Total:
        """Return the total of a round that merges values which replicas have already computed."""
        self.job.timer.lap("compute")
        return self._summed(round_, self._exchange(round_.sum, round_.catching_up))

    def _summed(self, round_: Round, total: Total) -> Total:
        self.job.timer.lap("exchange")
        self._digests.record_loop_round(round_, total, driven=self.job.driven)
        return total

    def agree(self, label: str, facts: Facts) -> None:
        """Check that every worker calls this with equal facts; see `lockstep.keras.worker_exchange.agree`.

        On hosts that compute different bits, states differ by rounding.
        """
        if self.job.settings.allow_unlike:
            facts = {name: text for name, text in facts.items() if not name.startswith("variable ")}
        self._exchange(lambda _, communicator: compare_all(self.job, communicator, label, facts))

    def compare_hosts(self) -> None:
        """Before the first `strategy.run` in a loop of the script, check the facts that hosts must share.

        Raises:
            DisagreementError: hosts differ.
        """
        if not self._compared and not self.job.driven and len(self.job.view.hosts) > 1:
            self.agree("the first strategy.run", {})
        self._compared = True

    def _exchange(
        self,
        act: Callable[[View, Communicator], Result],
        catching_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Result:
        if self.job.driven:
            return self.job.exchange(act, catching_up)
        try:
            return act(self.job.view, self.job.communicator)
        except PeerLostError as lost:
            # The rest of the message is about the next view, which this loop never enters.
            who = str(lost).partition(";")[0]
            raise PeerLostError(
                f"{who}; strategy.steps does not drive this loop, so no new worker can join: restart the "
                "job to resume from the program's checkpoint, or let strategy.steps drive the loop"
            ) from None


class FunctionRound(Round):
    """A round of `strategy.run` or `strategy.reduce`.

    Args:
        rounds: the rounds of this worker, which sum the round.
        label: names it in messages.
        sources: the values from which the replicas compute.
        seed: the seed, of 64 bits, of the random numbers that do not follow from a variable.
        layout: the layout of the partials; None if their shapes are unknown.
    """

    advice = _ADVICE

    def __init__(
        self,
        rounds: RunRounds,
        label: str,
        sources: Sequence[Values],
        seed: int = 0,
        layout: PartialLayout | None = None,
    ) -> None:
        job = rounds.job
        super().__init__(label, job.worker, layout=layout, to_numpy=rounds.to_numpy, lap=job.timer.lap)
        self.anywhere = all(values.anywhere for values in sources)
        rounds.begin_round()
        self._sources = sources
        self._seed = seed

    def counts(self, replica: int) -> bool:
        """Whether the replica has examples."""
        return not is_empty(self._sources, replica)

    def digest_of_inputs(self) -> bytes:
        """Return a hash of the values and of the seed."""
        drawn = struct.pack("<Q", self._seed % 2**64)
        return drawn + b"".join(values.check() for values in self._sources)

    def inputs(self, replica: int) -> list[Any]:
        """Return the leaves of the inputs of a replica."""
        return [leaf for values in self._sources for leaf in values.of(replica)]
