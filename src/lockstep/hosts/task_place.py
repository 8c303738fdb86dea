"""The role of a process among the tasks of a cluster, which are all started with the same command."""

from dataclasses import dataclass
from enum import Enum, auto

from lockstep.protocol.rendezvous import Task


class TaskRole(Enum):
    """The role of a process."""

    COORDINATOR = auto()
    """It begins the job, and waits for the agents of the other tasks."""
    AGENT = auto()
    """It joins the coordinator."""
    ALONE = auto()
    """It is the only one that trains."""
    EVALUATOR = auto()
    """It evaluates, and trains nothing."""
    IDLE_SERVER = auto()
    """A parameter server of a job that has none: it does nothing."""


@dataclass(frozen=True)
class TaskPlace:
    """The place of a process among the tasks that another program has started on each host.

    Attributes:
        role: its role.
        name: the name of its task, for messages.
        address: the address of its task, with port 0 for any free one; empty for a task that listens nowhere.
        coordinator: the address of the coordinator; empty if there is none.
        workers: the workers of the job.
        here: the workers that this process starts.
        tasks: the tasks of the cluster, in whose order the hosts of the job are placed; empty for any order.
        task: the index of its task in `tasks`.
        standby: HOST:PORT at which another task takes over the job, unless the user names another one; empty
            if the tasks have no such port.
    """

    role: TaskRole
    name: str
    address: str
    coordinator: str
    workers: int
    here: int = 1
    tasks: tuple[Task, ...] = ()
    task: int = 0
    standby: str = ""
