"""The tasks of a job with parameter servers: pure arithmetic over the ids of its processes.

The first process is the chief, which coordinates. The last ones are the parameter servers. Those between
compute gradients.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

TaskType = Literal["chief", "worker", "ps"]


class ServerPlace(NamedTuple):
    """The processes that have the shards of a parameter server in a call.

    Attributes:
        process: the id of the process that has them: the server's own, or another server's if that was lost.
        standby: the id of the process that keeps the first one's messages, and takes over the shards if it is
            lost; None if no other server is left.
    """

    process: int
    standby: int | None


@dataclass(frozen=True)
class Tasks:
    """The tasks of a job.

    Attributes:
        processes: number of all processes.
        servers: number of parameter servers.
    """

    processes: int
    servers: int

    @property
    def workers(self) -> range:
        """The ids of the processes that compute gradients."""
        return range(1, self.processes - self.servers)

    def id_of_server(self, index: int) -> int:
        """Return the id of the process of a parameter server."""
        return self.processes - self.servers + index

    def of(self, process: int) -> tuple[TaskType, int]:
        """Return the type of a process's task, and its index among the tasks of this type."""
        if process == 0:
            return "chief", 0
        first = self.processes - self.servers
        return ("worker", process - 1) if process < first else ("ps", process - first)

    def places(
        self, hosts: Sequence[Collection[int]], holders: Sequence[Collection[int]] | None = None
    ) -> tuple[ServerPlace, ...]:
        """Return which processes have the shards of each server, and which process is its standby.

        The next servers in a circle replace lost ones. A standby is on another host if possible.

        Args:
            hosts: the ids of the live processes of each host. At least one server is alive.
            holders: for each server, the processes that have its rows of tables, at least one of which is
                left. Only these can take over. The second of them is the standby. None if there are no such
                rows.
        """
        host_of = {process: host for host, there in enumerate(hosts) for process in there}
        places = []
        for index in range(self.servers):
            circle = [self.id_of_server((index + k) % self.servers) for k in range(self.servers)]
            left = [candidate for candidate in circle if candidate in host_of]
            having = (
                left if holders is None else [candidate for candidate in left if candidate in holders[index]]
            )
            process = having[0]
            others = [other for other in left if other != process]
            others.sort(key=lambda other: (other not in having, host_of[other] == host_of[process]))
            places.append(ServerPlace(process, others[0] if others else None))
        return tuple(places)

    def name(self, process: int) -> str:
        """Return the name of a process for messages, such as `worker 2` or `parameter server 0`."""
        task, index = self.of(process)
        return {"chief": "the chief", "worker": f"worker {process}", "ps": f"parameter server {index}"}[task]
