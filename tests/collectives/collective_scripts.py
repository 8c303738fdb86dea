"""Scripts that members run in tests. Member processes import this module, so it imports little."""

import hashlib
import random
import resource
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from collective_members import Member
from reference_sums import Array, blob_of, leaves_of, reference, sha

from lockstep.collectives.contract import Leaves, Span
from lockstep.collectives.plan import ReducePlan, halves
from lockstep.errors import DisagreementError


class Reduce(NamedTuple):
    seed: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    given: str = "replicas"


class Gather(NamedTuple):
    seed: int
    sizes: tuple[int, ...]


class AllToAll(NamedTuple):
    """The size of the part of member i for member j is `sizes[i + j]`, modulo their number."""

    seed: int
    sizes: tuple[int, ...]


class Barrier(NamedTuple):
    pass


Operation = Reduce | Gather | AllToAll | Barrier


def partials_of(plan: ReducePlan, rank: int, case: Reduce) -> dict[Span, Leaves]:
    """Return a member's partials: one for each replica, for each span that it publishes, or a mixture."""
    owned = plan.owned[rank]
    replicas = {
        replica: leaves_of(case.seed, replica, case.shapes, case.dtypes)
        for replica in range(owned.start, owned.stop)
    }
    if case.given == "replicas":
        spans = [Span(replica, replica + 1) for replica in replicas]
    elif case.given == "merged":
        spans = list(plan.published[rank])
    else:
        coin = random.Random(case.seed * 97 + rank)
        spans = [part for span in plan.published[rank] for part in _divide(span, coin)]
        coin.shuffle(spans)
    return {span: reference([replicas[replica] for replica in range(*span)]) for span in spans}


def _divide(span: Span, coin: random.Random) -> list[Span]:
    if span.stop - span.start == 1 or coin.random() < 0.5:
        return [span]
    return [part for half in halves(span) for part in _divide(half, coin)]


def perform_all(member: Member, operations: Sequence[Operation]) -> list[str]:
    """Make each call, and return a digest of each result."""
    return [_perform(member, operation) for operation in operations]


def _perform(member: Member, operation: Operation) -> str:
    communicator, rank = member.communicator, member.rank
    match operation:
        case Reduce():
            return sha(reduce(member, operation))
        case Gather(seed, sizes):
            return digest(communicator.gather(blob_of(seed, rank, sizes[rank])))
        case AllToAll():
            return all_to_all_twice(member, operation)
        case Barrier():
            communicator.barrier()
            return ""


def expected(plan: ReducePlan, operation: Operation) -> str:
    """Return the digest that every member must return."""
    match operation:
        case Reduce(seed, shapes, dtypes):
            return sha(
                reference([leaves_of(seed, replica, shapes, dtypes) for replica in range(plan.replicas)])
            )
        case Gather(seed, sizes):
            return digest([blob_of(seed, rank, sizes[rank]) for rank in range(plan.members)])
        case AllToAll():
            return "right"
        case Barrier():
            return ""


def all_to_all_twice(member: Member, case: AllToAll) -> str:
    """Check what a member has received after another call, which uses the same shared memory."""
    cases, received = (case, case._replace(seed=case.seed + 1)), []
    for each in cases:
        parts = []
        for other in range(len(case.sizes)):
            array = np.frombuffer(part_of(each, member.rank, other), np.uint8)
            parts.append([array[: array.size // 3], array[array.size // 3 :]] if array.size else [])
        received.append(member.communicator.all_to_all(parts))
    for each, given in zip(cases, received, strict=True):
        wanted = [part_of(each, other, member.rank) for other in range(len(case.sizes))]
        if [part.tobytes() for part in given] != wanted or any(
            part.size and part.ctypes.data % 64 for part in given
        ):
            return f"wrong in {each}"
    return "right"


def part_of(case: AllToAll, sender: int, receiver: int) -> bytes:
    """Return the part of one member for another."""
    members = len(case.sizes)
    return blob_of(case.seed, sender * members + receiver, case.sizes[(sender + receiver) % members])


def digest(blobs: Sequence[bytes]) -> str:
    return " ".join(hashlib.sha256(blob).hexdigest() for blob in blobs)


def reduce(member: Member, case: Reduce, **options: Any) -> Leaves:
    return member.communicator.reduce(partials_of(member.plan, member.rank, case), **options)


def keep_total(member: Member, first: Reduce, second: Reduce) -> list[str]:
    """Member 0 hashes its total again while all other members wait in the next call."""
    total = reduce(member, first)
    digests = [sha(total)]
    if member.rank == 0:
        for _ in range(member.plan.members - 1):
            member.proceed()
        digests.append(sha(total))
    digests.append(sha(reduce(member, second)))
    return digests


def properties_of_total(member: Member, case: Reduce) -> list[tuple[bool, bool, int]]:
    total = reduce(member, case)
    return [(leaf.flags.writeable, leaf.flags.c_contiguous, leaf.ctypes.data % 64) for leaf in total]


def reduce_strided(member: Member, case: Reduce) -> str:
    """Reduce partials that are read-only, not contiguous and not aligned."""
    strided: dict[Span, Leaves] = {}
    for span, leaves in partials_of(member.plan, member.rank, case).items():
        strided[span] = [_strided(leaf) for leaf in leaves]
    return sha(member.communicator.reduce(strided))


def _strided(leaf: Array) -> Array:
    wide = np.zeros((*leaf.shape, 3), dtype=leaf.dtype)
    wide[..., 1] = leaf
    view = wide[..., 1]
    view.flags.writeable = False
    return view


def different_calls(member: Member, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Each member makes its own call; then all members make the same call."""
    kind, options = calls[member.rank]
    try:
        _call(member, kind, options)
    except DisagreementError as error:
        member.communicator.barrier()
        return f"{error.workers} differ: {error}"
    return "no error"


def _call(member: Member, kind: str, options: dict[str, Any]) -> None:
    if kind == "all_to_all":
        options = {"parts": [[]] * member.plan.members, **options}
    if kind == "reduce":
        options = dict(options)
        reduce(member, options.pop("case"), **options)
    else:
        getattr(member.communicator, kind)(**options)


def call(member: Member, calls: Sequence[tuple[str, dict[str, Any]] | None]) -> None:
    """Each member makes its own call, or waits for its release if it has none."""
    mine = calls[member.rank]
    if mine is None:
        member.proceed()
    else:
        _call(member, *mine)


def abort_twice_then_call(member: Member, calls: Sequence[tuple[str, dict[str, Any]]]) -> None:
    if member.rank == 0:
        member.communicator.abort("the first reason: ä")
        member.communicator.abort("the second reason")
    _call(member, *calls[member.rank])


def abort_after_close(member: Member) -> None:
    member.communicator.close()
    member.communicator.close()
    member.communicator.abort("closed first")


def abort_after_close_of_one(member: Member) -> None:
    if member.rank == 0:
        abort_after_close(member)
    else:
        member.proceed()
        member.communicator.gather(b"")


def call_after_close(member: Member, kind: str, options: dict[str, Any]) -> None:
    member.communicator.barrier()
    member.communicator.close()
    _call(member, kind, options)


def leave_early(member: Member) -> None:
    member.communicator.barrier()
    if member.rank == 0:
        member.communicator.close()
    else:
        member.communicator.gather(b"", what="evaluate 1")


def large_then_small(member: Member, big: Reduce, small: Reduce) -> tuple[str, str]:
    before = sha(reduce(member, small))
    try:
        reduce(member, big)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "no error"
    assert sha(reduce(member, small)) == before
    return message, before


def limited_file_size(member: Member, big: Reduce, small: Reduce, limit: int) -> tuple[str, str]:
    """Limit the file size of the member that grows the memfd."""
    if member.rank > 0:
        return large_then_small(member, big, small)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        return large_then_small(member, big, small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for_the_last(member: Member) -> tuple[float, float]:
    """Call a barrier, the last member after its release; return the seconds of waiting before and after."""
    before = member.communicator.waited
    if member.rank == member.plan.members - 1:
        member.proceed()
    member.communicator.barrier()
    return before, member.communicator.waited


def notices(member: Member, calls: int) -> list[int]:
    """Make calls; the last member waits for its release before the middle one."""
    seen = [member.communicator.notice]
    for number in range(calls):
        if number == calls // 2 and member.rank == member.plan.members - 1:
            member.proceed()
        partials = partials_of(member.plan, member.rank, Reduce(1, ((3,),), ("int32",)))
        member.communicator.reduce(partials, what=f"call {number}")
        seen.append(member.communicator.notice)
    return seen
