"""Disagreement in a view: the calls of all members, and the error in which they end."""

from collections.abc import Sequence

from lockstep.collectives.call import CollectiveCall, compare
from lockstep.collectives.network.frames import (
    Frame,
    FrameError,
    Header,
    MemberDetails,
    decode_details,
    encode_details,
)
from lockstep.collectives.network.lane import Lane
from lockstep.collectives.plan import HostPlan
from lockstep.errors import DisagreementError, InternalError, SharedMemoryError

_LIMIT = 1 << 28
"""Bytes of the longest description of the calls of one host's members."""


def exchange_details(
    lane: Lane, call: CollectiveCall, number: int, hosts: HostPlan, local: list[MemberDetails]
) -> list[list[MemberDetails]]:
    """Return the details of the members of each host.

    Args:
        lane: the first lane.
        call: the call of this worker.
        number: the number of the call.
        hosts: how this host takes part.
        local: the details of the members of this host.

    Raises:
        PeerLostError, PeerStuckError: as `Communicator` states.
    """
    data = encode_details(local)
    header = Header(Frame.DETAILS, number=number, length=len(data))
    lane.send(header, data)
    headers = lane.headers(call, header)
    details = {hosts.host: local}
    with lane.wait(call, hosts.others) as wait:
        for host, header in headers.items():
            try:
                if header.length > _LIMIT:
                    raise FrameError(f"details of {header.length} bytes")
                details[host] = decode_details(lane.receive_blob(host, header.length, wait))
                if len(details[host]) != len(hosts.hosts[host]):
                    raise FrameError(f"details of {len(details[host])} members")
            except FrameError as error:
                raise lane.malformed(host, call, error) from error
    return [details[host] for host in sorted(details)]


def common_error(
    members: Sequence[MemberDetails], workers: Sequence[int], hosts: Sequence[str]
) -> DisagreementError | SharedMemoryError:
    """Return the error in which a call ends on all members.

    Args:
        members: their details.
        workers: their ids.
        hosts: the name of the host of each member.

    Raises:
        InternalError: all members can complete the same call.
    """
    try:
        compare([each.call for each in members], workers, lambda: [each.leaves for each in members], hosts)
    except DisagreementError as error:
        return error
    unfit = [each.unfit for each in members if each.unfit]
    if not unfit:
        raise InternalError("the members of a view do not agree, but make the same call")
    return SharedMemoryError(unfit[0])
