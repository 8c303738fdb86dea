"""A collective call: its description, checks of its arguments, comparison, and the wait for other members.

This module does no I/O, and its clock is injected.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from lockstep.collectives.contract import PeerWait, WaitObserver, WaitPolicy
from lockstep.errors import DisagreementError, InternalError, LockstepError, PeerStuckError
from lockstep.system.clock import Clock
from lockstep.system.prose import name_workers

Key = TypeVar("Key")


class CollectiveCall(NamedTuple):
    """One member's description of the call that it makes.

    Attributes:
        kind: the name of the method.
        what: the caller's name for this call; not compared.
        check: must be equal on all members.
        layout: 16 bytes, the digest of the leaves' shapes and dtypes; zeros if there are no leaves.
    """

    kind: str
    what: str
    check: bytes = b""
    layout: bytes = bytes(16)

    def __str__(self) -> str:
        return self.kind if self.what == self.kind else f"{self.kind} for {self.what}"


def compare(
    calls: Sequence[CollectiveCall],
    workers: Sequence[int],
    describe: Callable[[], Sequence[Sequence[str]]],
    hosts: Sequence[str] = (),
) -> None:
    """Check that all members make the same call.

    Args:
        calls: one for each member.
        workers: the members' worker ids.
        describe: returns the leaves of each member, a line for each leaf; called only if layouts differ.
        hosts: the name of each member's host; empty if all are on one.

    Raises:
        DisagreementError: the calls differ; the message names the workers in each group and the difference.
            Its `workers` are those outside the first member's group.
    """
    if agree(calls):
        return
    kinds = _groups([call.kind for call in calls], workers)
    if len(kinds) > 1:
        raise DisagreementError(_different_calls(calls, workers, kinds), _others(kinds))
    layouts = _groups([call.layout for call in calls], workers)
    if len(layouts) > 1:
        raise DisagreementError(_different_leaves(calls[0], workers, describe()), _others(layouts))
    checks = _groups([call.check for call in calls], workers)
    if len(checks) > 1:
        texts = [f"{name_workers(ids)} from {check.hex() or 'nothing'}" for check, ids in checks]
        raise DisagreementError(
            f"the workers do not compute from the same data in {calls[0]}: {' while '.join(texts)}. "
            f"{_differing_files(dict(zip(workers, hosts, strict=False)), [ids for _, ids in checks])}"
            "Every worker must take the same step on the same batches: seed every shuffle and every "
            "generator, omit num_parallel_calls where Python code in a map of tf.data draws, and pass data "
            "that differs between workers to strategy.distribute_datasets_from_function",
            _others(checks),
        )


def _differing_files(hosts: Mapping[int, str], groups: Sequence[Sequence[int]]) -> str:
    """Return a hint that files may differ between hosts, unless workers of one host differ too."""
    places = [sorted({hosts.get(worker, "") for worker in ids}) for ids in groups]
    if not hosts or len({name for names in places for name in names}) < sum(map(len, places)):
        return ""
    return (
        f"The data files may differ between {places[0][0]} and {places[1][0]}: compare them first, for "
        "example with sha256sum. "
    )


def agree(calls: Sequence[CollectiveCall]) -> bool:
    """Whether all members make the same call; its name is not compared."""
    return all(call._replace(what=calls[0].what) == calls[0] for call in calls[1:])


def _different_calls(
    calls: Sequence[CollectiveCall], workers: Sequence[int], groups: list[tuple[str, list[int]]]
) -> str:
    texts = []
    for _, ids in groups:
        call = calls[list(workers).index(ids[0])]
        texts.append(f"{name_workers(ids)} {'calls' if len(ids) == 1 else 'call'} {call}")
    return (
        f"{' while '.join(texts)}. Every worker must run the same script along the same path: look for "
        "a branch that depends on the worker, on the time or on unseeded random numbers"
    )


def _different_leaves(
    call: CollectiveCall, workers: Sequence[int], described: Sequence[Sequence[str]]
) -> str:
    longest = max(len(lines) for lines in described)
    for leaf in range(longest):
        groups = _groups([lines[leaf] if leaf < len(lines) else "missing" for lines in described], workers)
        if len(groups) > 1:
            break
    texts = " while ".join(f"{line} on {name_workers(ids)}" for line, ids in groups)
    return (
        f"the workers give different arrays to {call}: array {leaf} is {texts}. "
        "Every worker must build the same model and feed it batches of the same shape"
    )


def _groups(keys: Sequence[Key], workers: Sequence[int]) -> list[tuple[Key, list[int]]]:
    groups: dict[Key, list[int]] = {}
    for key, worker in zip(keys, workers, strict=True):
        groups.setdefault(key, []).append(worker)
    return list(groups.items())


def _others(groups: Sequence[tuple[object, list[int]]]) -> tuple[int, ...]:
    """Return the workers outside the first member's group."""
    return tuple(sorted(worker for _, ids in groups[1:] for worker in ids))


REASON_LIMIT = 1 << 12
"""Maximum bytes of the reason for which a view ends, in shared memory and in a frame; the rest is cut."""


def abort_reason(worker: int, call: CollectiveCall, error: BaseException) -> str:
    """Return the reason with which `worker` ends the view: it leaves `call` with `error`."""
    if isinstance(error, LockstepError):
        return f"worker {worker} gave up: {error}"
    return f"worker {worker} left {call} with {type(error).__name__}: {error}"


CHECK_LIMIT = 64
"""Maximum bytes of `check`."""


def check_length(check: bytes) -> None:
    """Check that every communicator can transfer `check`.

    Raises:
        InternalError: it has more than `CHECK_LIMIT` bytes.
    """
    if len(check) > CHECK_LIMIT:
        raise InternalError(f"a check of {len(check)} bytes; at most {CHECK_LIMIT} are allowed")


def check_parts(parts: Sequence[object], members: int) -> None:
    """Check that an all-to-all has a part for each member.

    Raises:
        InternalError: the number of parts differs.
    """
    if len(parts) != members:
        raise InternalError(f"an all-to-all with {len(parts)} parts for {members} members")


MAX_BLOCK_SECONDS = 0.2
"""Maximum seconds that a member blocks before it checks again whether its view was aborted."""


class CallWait:
    """The wait of one member for the others in one call; reports and times out according to the policy."""

    def __init__(
        self, call: CollectiveCall, policy: WaitPolicy, observe: WaitObserver | None, clock: Clock
    ) -> None:
        self._call = call
        self._policy = policy
        self._observe = observe
        self._clock = clock
        self._start = clock.now()
        self._reports = 0

    def check(self, missing: tuple[int, ...]) -> float:
        """Report if a report is due; return the seconds to block before the next check.

        Args:
            missing: ids of the workers that have not arrived.

        Raises:
            PeerStuckError: the policy's timeout has passed.
        """
        waited, policy = self._clock.now() - self._start, self._policy
        if waited >= policy.timeout:
            raise PeerStuckError(
                f"waited {waited:.1f} s for {name_workers(missing)} in {self._call}. Check what "
                f"{'it is' if len(missing) == 1 else 'they are'} doing (py-spy dump), or allow a longer wait"
            )
        if self._observe is not None and waited >= (self._reports + 1) * policy.report_every:
            self._reports = int(waited // policy.report_every)
            self._observe(PeerWait(str(self._call), missing, waited))
        # The timeout may have been lowered meanwhile.
        return max(0.0, min(MAX_BLOCK_SECONDS, policy.timeout - waited, policy.report_every))
