"""Which nodes of a cluster run how many workers. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerNeeds:
    """What each worker needs of its node.

    Attributes:
        resources: the amount of each resource, by Ray's name for it: "CPU", "GPU", or one of the user's.
    """

    resources: Mapping[str, float]

    def fit(self, node: Mapping[str, float]) -> int:
        """Return how many workers fit on a node with these resources."""
        counts = [node.get(name, 0.0) / amount for name, amount in self.resources.items() if amount > 0]
        return int(min(counts, default=0.0) + 1e-9)

    def of(self, workers: int) -> dict[str, float]:
        """Return what so many workers need."""
        return {name: amount * workers for name, amount in self.resources.items() if amount > 0}


def places(wanted: int, room: Mapping[str, int], there: Mapping[str, int]) -> dict[str, int]:
    """Return how many workers each node without an agent gets; nodes that get none are left out.

    Args:
        wanted: number of workers of the job.
        room: for each node, how many workers fit on it.
        there: for each node that has an agent, how many workers it offers.
    """
    given = {node: 0 for node in room if node not in there}
    for _ in range(wanted - sum(there.values())):
        # Evenly; the order of the nodes decides between equal ones.
        free = [node for node, count in given.items() if count < room[node]]
        if not free:
            break
        given[min(free, key=given.__getitem__)] += 1
    return {node: count for node, count in given.items() if count}
