"""The numbers of workers on the nodes of a cluster. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError

_OWN = ("CPU", "GPU")


@dataclass(frozen=True)
class WorkerNeeds:
    """The resources of its node that each worker needs.

    Attributes:
        resources: the amount of each resource, by Ray's name for it: "CPU", "GPU", or one of the user's.
    """

    resources: Mapping[str, float]

    def fit(self, node: Mapping[str, float]) -> int:
        """Return the number of workers that fit on a node with these resources."""
        counts = [node.get(name, 0.0) / amount for name, amount in self.resources.items() if amount > 0]
        return int(min(counts, default=0.0) + 1e-9)

    def of(self, workers: int) -> dict[str, float]:
        """Return the resources of so many workers."""
        return {name: amount * workers for name, amount in self.resources.items() if amount > 0}


def worker_needs(cpus: float, gpus: float, custom: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of each worker, by Ray's names.

    Args:
        cpus: number of CPUs.
        gpus: number of GPUs.
        custom: amounts of the user's resources.

    Raises:
        ConfigError: an amount is not a number, or negative, or all are 0.
    """
    for name in _OWN:
        if name in custom:
            raise ConfigError(f"{name} is not a custom resource; give cpus or gpus per worker")
    needs = {"CPU": cpus, "GPU": gpus, **custom}
    for name, amount in needs.items():
        if not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise ConfigError(f"resources per worker: {amount!r} is not an amount of {name}")
    if not any(needs.values()):
        raise ConfigError("resources per worker: a worker must reserve something; give it a CPU")
    return needs


def parse_resources(texts: Sequence[str]) -> dict[str, float]:
    """Return amounts of custom resources from texts such as "tpu=2".

    Raises:
        ConfigError: a text is wrong.
    """
    amounts = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            amounts[name] = float(amount)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(f"--resource-per-worker {text}: give NAME=AMOUNT, such as tpu=2")
    return amounts


def places(wanted: int, room: Mapping[str, int], there: Mapping[str, int]) -> dict[str, int]:
    """Return the number of workers for each node without an agent; nodes without workers are omitted.

    Args:
        wanted: number of workers of the job.
        room: for each node, the number of workers that fit on it.
        there: for each node that has an agent, the number of workers that it offers.
    """
    added = {node: 0 for node in room if node not in there}
    for _ in range(wanted - sum(there.values())):
        # Workers are spread evenly; the order of the nodes decides between equal ones.
        free = [node for node, count in added.items() if count < room[node]]
        if not free:
            break
        added[min(free, key=added.__getitem__)] += 1
    return {node: count for node, count in added.items() if count}
