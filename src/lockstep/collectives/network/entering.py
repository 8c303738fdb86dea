"""How hosts enter a view: their hellos, and the result of the last call for a host that lacks it."""

from collections.abc import Sequence

import msgspec

from lockstep.collectives.call import CollectiveCall
from lockstep.collectives.network.frames import (
    HELLO_SIZE,
    Frame,
    FrameError,
    Header,
    Hello,
    Result,
    decode_result,
    encode_result,
)
from lockstep.collectives.network.lane import Lane
from lockstep.collectives.network.last_call import LastCall
from lockstep.collectives.plan import HostPlan
from lockstep.errors import InternalError


class Entered(msgspec.Struct, frozen=True):
    """What the first worker of a host knows after it has met the other hosts of a view.

    Attributes:
        number: the number of the last call that members of any host have completed.
        result: the result of that call, if this host lacks it.
    """

    number: int
    result: Result | None


def meet_hosts(
    lane: Lane,
    call: CollectiveCall,
    hosts: HostPlan,
    hello: Hello,
    incarnations: Sequence[int],
    names: Sequence[str],
    last: LastCall,
) -> Entered:
    """Exchange hellos with the other hosts, and the result of the last call if a host lacks it.

    Args:
        lane: the first lane.
        call: the first call of this worker in the view.
        hosts: how this host takes part.
        hello: the hello of this host.
        incarnations: the incarnation of each host.
        names: the name of each host, for messages.
        last: the last call of this worker.

    Raises:
        PeerLostError, PeerStuckError: as `Communicator` states.
        InternalError: the hosts have completed different calls.
    """
    hellos = _exchange_hellos(lane, call, hosts, hello, incarnations)
    newest = max(0, *(each.done for each in hellos.values()))
    behind = [host for host, each in sorted(hellos.items()) if 0 <= each.done < newest]
    givers = [host for host, each in sorted(hellos.items()) if each.done == newest and each.has_result]
    if not behind:
        return Entered(newest, None)
    if any(hellos[host].done < newest - 1 for host in behind) or not givers:
        numbers = {names[host]: each.done for host, each in sorted(hellos.items())}
        raise InternalError(f"hosts have completed different calls, and no result is left: {numbers}")
    if hosts.host == givers[0]:
        assert last.result is not None
        data = encode_result(last.result.encoded())
        for host in behind:
            lane.send_to(host, Header(Frame.RESULT, number=newest, length=len(data)), data)
    if hosts.host not in behind:
        return Entered(newest, None)
    header = lane.header(givers[0], call, Header(Frame.RESULT, number=newest))
    with lane.wait(call, [givers[0]]) as wait:
        data = lane.receive_blob(givers[0], header.length, wait)
    try:
        return Entered(newest, decode_result(data))
    except FrameError as error:
        raise lane.malformed(givers[0], call, error) from error


def _exchange_hellos(
    lane: Lane, call: CollectiveCall, hosts: HostPlan, hello: Hello, incarnations: Sequence[int]
) -> dict[int, Hello]:
    greeting = Header(Frame.HELLO, length=HELLO_SIZE)
    lane.send(greeting, hello.encode())
    headers = lane.headers(call, greeting)
    hellos = {hosts.host: hello}
    with lane.wait(call, hosts.others) as wait:
        for host, header in headers.items():
            lane.check_length(host, call, header.length, HELLO_SIZE)
            data = lane.receive_blob(host, HELLO_SIZE, wait)
            try:
                hellos[host] = Hello.decode(data)
            except FrameError as error:
                raise lane.malformed(host, call, error) from error
            received = hellos[host]
            if received[:4] != (hello.job, hello.term, hello.view, incarnations[host]):
                raise lane.malformed(host, call, FrameError(f"view {received.term}.{received.view}"))
    return hellos
