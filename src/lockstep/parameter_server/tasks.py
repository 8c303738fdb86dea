"""The tasks of a job with parameter servers: pure arithmetic over the ids of its processes.

The first process is the chief, which coordinates. The last ones are the parameter servers. Those between
compute gradients.
"""

from dataclasses import dataclass
from typing import Literal

TaskType = Literal["chief", "worker", "ps"]


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
        """Return the type of a process's task, and its index among those of the type."""
        if process == 0:
            return "chief", 0
        first = self.processes - self.servers
        return ("worker", process - 1) if process < first else ("ps", process - first)

    def name(self, process: int) -> str:
        """Return the name of a process for messages, such as `worker 2` or `parameter server 0`."""
        task, index = self.of(process)
        return {"chief": "the chief", "worker": f"worker {process}", "ps": f"parameter server {index}"}[task]
