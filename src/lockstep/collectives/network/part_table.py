"""The parts of an all-to-all: their sizes, and their places in the memory of a host. Pure."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from lockstep.collectives.plan import HostPlan


@dataclass(frozen=True)
class PartTable:
    """The sizes of the parts of an all-to-all, and their places in the shared memory of a host.

    First come the parts that the workers of this host send, then the parts that they receive from other
    hosts. Both are ordered by the ranks of the sender and of the receiver.

    Attributes:
        sizes: the size of each part, by sender and receiver.
        first: the rank in the view of the first worker of this host.
        hosts: the plan of the view.
        places: the end in memory of each part that this host sends or receives.
        room: the bytes of all these parts.
    """

    sizes: npt.NDArray[np.int64]
    first: int
    hosts: HostPlan
    places: npt.NDArray[np.int64]
    room: int

    @classmethod
    def of(cls, sizes: npt.NDArray[np.int64], hosts: HostPlan) -> Self:
        """Return the table of the parts with these sizes, for a host."""
        first = sum(map(len, hosts.hosts[: hosts.host]))
        here = slice(first, first + len(hosts.workers_here))
        concerned = np.zeros_like(sizes)
        concerned[here] = sizes[here]
        sent = int(concerned.sum())
        places = np.cumsum(concerned).reshape(sizes.shape)
        concerned[:, here] = sizes[:, here]
        concerned[here] = 0
        received = np.cumsum(concerned).reshape(sizes.shape) + sent
        received[here] = places[here]
        return cls(sizes, first, hosts, received, sent + int(concerned.sum()))

    def members(self, host: int) -> range:
        """Return the ranks of the workers of a host."""
        first = sum(map(len, self.hosts.hosts[:host]))
        return range(first, first + len(self.hosts.hosts[host]))

    def sent(self, local: int) -> list[tuple[int, int]]:
        """Return the places of the parts that a worker of this host sends, by receiver."""
        at = self.first + local
        return [(end - size, end) for end, size in self._row(at)]

    def sent_to(self, local: int, host: int) -> tuple[int, int]:
        """Return the place of the parts that a worker of this host sends to the workers of another host."""
        places = [self.sent(local)[at] for at in self.members(host)]
        return places[0][0], places[-1][1]

    def received(self, local: int) -> list[tuple[int, int]]:
        """Return the places of the parts that a worker of this host receives, by sender."""
        ends, sizes = self.places[:, self.first + local], self.sizes[:, self.first + local]
        return [(end - size, end) for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

    def received_from(self, host: int) -> tuple[int, int]:
        """Return the place of the parts that the workers of this host receive from those of another host."""
        members = self.members(host)
        first, last = self.received(0), self.received(len(self.hosts.workers_here) - 1)
        return first[members[0]][0], last[members[-1]][1]

    def _row(self, at: int) -> list[tuple[int, int]]:
        return list(zip(self.places[at].tolist(), self.sizes[at].tolist(), strict=True))
