"""A bounded wait that reports which workers it waits for."""

from collections.abc import Callable

from lockstep.collectives.contract import Waiting, WaitObserver, WaitPolicy
from lockstep.errors import PeerStuckError
from lockstep.system.clock import Clock
from lockstep.system.prose import name_workers

SLICE = 0.2
"""Maximum seconds that a member blocks before it checks again whether its view was aborted."""


class ObservedWait:
    """One wait of one member; reports and times out according to the policy."""

    def __init__(
        self, what: Callable[[], str], policy: WaitPolicy, observe: WaitObserver | None, clock: Clock
    ) -> None:
        self._what = what
        self._policy = policy
        self._observe = observe
        self._clock = clock
        self._start = clock.now()
        self._reports = 0

    def spend(self, missing: tuple[int, ...]) -> float:
        """Report if a report is due; return the seconds to block before the next call, at most `SLICE`.

        Args:
            missing: ids of the workers that have not arrived.

        Raises:
            PeerStuckError: the policy's timeout has passed.
        """
        waited, policy = self._clock.now() - self._start, self._policy
        if waited >= policy.timeout:
            raise PeerStuckError(
                f"waited {waited:.1f} s for {name_workers(missing)} in {self._what()}. Check what "
                f"{'it is' if len(missing) == 1 else 'they are'} doing (py-spy dump), or allow a longer wait"
            )
        if self._observe is not None and waited >= (self._reports + 1) * policy.report_every:
            self._reports = int(waited // policy.report_every)
            self._observe(Waiting(self._what(), missing, waited))
        return min(SLICE, policy.timeout - waited, policy.report_every)
