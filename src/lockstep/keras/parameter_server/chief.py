"""The chief in a call, between the workers and the servers.

It hands out works, and reads and writes the variables of the servers. `chief_process.py` runs the loop of a
`fit`, and `function_chief.py` makes the calls of a `ClusterCoordinator`.
"""

from collections.abc import Sequence

from lockstep.keras.parameter_server.dispatcher import Dispatcher
from lockstep.keras.parameter_server.followed_orders import FollowedOrders
from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.servers import ServedState, Servers
from lockstep.parameter_server.partitioners import Shard
from lockstep.system.notes import note
from lockstep.system.prose import count


class Chief:
    """The dispatcher and the servers of a call.

    Args:
        process: the process in the call.
        max_staleness: see `Assignments`.
        orders: the servers of this process, which follow recorded orders, and compute the work; None if other
            processes do.
        scheduled: whether the works are functions that the program schedules.

    Attributes:
        dispatcher: answers the workers.
        servers: the servers, after the call has begun.
        orders: see above.
        served_state: the variables of the servers, as the chief last read or wrote them.
    """

    servers: Servers

    def __init__(
        self,
        process: TaskProcess,
        max_staleness: int | None,
        orders: FollowedOrders | None = None,
        *,
        scheduled: bool = False,
    ) -> None:
        self.dispatcher = Dispatcher(process.dispatched(max_staleness, orders), scheduled=scheduled)
        self.served_state = ServedState()
        self._process, self.orders = process, orders

    def begin(self, shards: Sequence[Shard] = ()) -> None:
        """Begin the call, together with the other processes. The servers have these shards.

        Raises:
            PeerLostError: a server has ended.
        """
        if self.orders is not None:
            self.servers = self.orders.servers
            self.servers.add(shards)
            return
        self.dispatcher.start()
        self._process.meet(self.dispatcher.put)
        self.dispatcher.keep(self._process.mesh.workers)
        self.servers = self._process.connect_servers(shards)
        self.dispatcher.silent = self.servers.silent

    def end(self) -> None:
        """End the call for the other processes, when no work is in progress."""
        process, dispatcher = self._process, self.dispatcher
        dispatcher.finish()
        self.servers.end_call()
        process.writer.end()
        if stale := dispatcher.staleness:
            mean, done = sum(stale) / len(stale), f"{len(stale)} {dispatcher.unit}s"
            note(
                f"{process.call.name}: staleness {mean:.1f} on average, at most {max(stale)}, over {done} of "
                f"{count(len(process.live), 'worker')}"
            )

    def close(self) -> None:
        """End the dispatcher, and write the rest of the orders."""
        self.dispatcher.close()
        if self.orders is not None:
            self.orders.close()
