"""One process of an all-reduce that `allreduce.py` measures.

    allreduce_member.py PROGRAM MEMBERS TURNS [POSITION ...]

In each turn it sums the arrays of each case several times, and answers with the time of each sum and a digest
of the last total. Before each sum it writes the arrays, as a backend does. A time is measured from a barrier
until this process has its total.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from lockstep.collectives.contract import Span, WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.buffers import Buffers
from lockstep.collectives.shared.communicator import SharedCommunicator
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.topology import place
from turns import PORTS, Turns, pin

LOCKSTEP, GLOO = "lockstep", "gloo"
Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Case:
    """Arrays to sum, and how often in a turn: `skipped` times without and `rounds` times with measurement."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    skipped: int
    rounds: int


CASES = (
    Case("64 KB", ((16_384,),), 10, 50),
    Case("1 MB", ((262_144,),), 5, 30),
    Case("11 MB", ((2_770_634,),), 2, 10),
    Case("11 MB, the CNN's", ((3, 3, 1, 32), (32,), (21632, 128), (128,), (128, 10), (10,)), 2, 10),
    Case("100 MB", ((25_000_000,),), 1, 3),
)


class Exchange(Protocol):
    """The sum of a program."""

    def barrier(self) -> None:
        """Return once all members have called it."""

    def sum(self, arrays: list[Array]) -> Sequence[Array]:
        """Return the sums of all members' arrays."""


class Lockstep:
    def __init__(self, position: int, members: int, segment: int, pool: int) -> None:
        plan = ReducePlan.of(place(members, tuple(range(members))))
        self._span = Span(position, position + 1)
        self._communicator = SharedCommunicator(
            ControlSegment.attach(segment),
            Buffers(SharedPool.attach(pool)),
            position,
            plan,
            WaitPolicy(600.0),
        )

    def barrier(self) -> None:
        self._communicator.barrier()

    def sum(self, arrays: list[Array]) -> Sequence[Array]:
        return self._communicator.reduce({self._span: arrays})


class Gloo:
    def __init__(self, position: int, members: int, address: str = "127.0.0.1") -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        port = os.environ[PORTS].split()[0]
        torch.distributed.init_process_group(
            "gloo", f"tcp://{address}:{port}", rank=position, world_size=members
        )
        self._torch: Any = torch

    def barrier(self) -> None:
        self._torch.distributed.barrier()

    def sum(self, arrays: list[Array]) -> Sequence[Array]:
        """Sum one array after the other; all at once, with `async_op`, is no faster."""
        for array in arrays:
            self._torch.distributed.all_reduce(self._torch.from_numpy(array))
        return arrays


class Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self._in_place, self._world = MPI.IN_PLACE, MPI.COMM_WORLD
        self.position = self._world.rank

    def barrier(self) -> None:
        self._world.Barrier()

    def sum(self, arrays: list[Array]) -> Sequence[Array]:
        for array in arrays:
            self._world.Allreduce(self._in_place, array)
        return arrays


class Member:
    """The turns of one process."""

    def __init__(self, exchange: Exchange, position: int, members: int) -> None:
        self._exchange = exchange
        random = np.random.default_rng(position)
        self._cases: list[tuple[Case, list[Array], list[Array]]] = []
        for case in CASES:
            if members == 2:
                sources = [random.standard_normal(shape, dtype=np.float32) for shape in case.shapes]
            else:
                # Sums of small integers are exact, so every order of additions gives the same bits.
                sources = [random.integers(-99, 99, shape).astype(np.float32) for shape in case.shapes]
            self._cases.append((case, sources, [np.empty_like(leaf) for leaf in sources]))

    def turn(self) -> dict[str, Any]:
        return {case.name: self._measure(case, *arrays) for case, *arrays in self._cases}

    def _measure(self, case: Case, sources: list[Array], gradients: list[Array]) -> dict[str, Any]:
        seconds, processor = [], []
        for number in range(case.skipped + case.rounds):
            for source, gradient in zip(sources, gradients, strict=True):
                np.add(source, np.float32(number), out=gradient)
            self._exchange.barrier()
            begin, used = time.perf_counter(), time.process_time()
            total = self._exchange.sum(gradients)
            seconds.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
        digest = xxhash.xxh3_128()
        for leaf in total:
            digest.update(leaf)
        measured = {"seconds": seconds[case.skipped :], "processor": processor[case.skipped :]}
        return measured | {"digest": digest.hexdigest()}


def start_lockstep(members: int, turns: int) -> None:
    """Start the members of Lockstep, which inherit their shared memory, and wait for them."""
    segment, pool = ControlSegment.create(members), SharedPool.create()
    children = []
    for position in range(members):
        words = [__file__, LOCKSTEP, members, turns, position, segment.fd, pool.fd]
        command = [sys.executable, *map(str, words)]
        children.append(subprocess.Popen(command, pass_fds=[segment.fd, pool.fd]))
    sys.exit(max(abs(child.wait()) for child in children))


def main(program: str, members: int, turns: int, position: int = -1, *descriptors: int) -> None:
    exchange: Exchange
    if program == LOCKSTEP:
        if position < 0:
            start_lockstep(members, turns)
        pin(position)
        exchange = Lockstep(position, members, *descriptors)
    elif program == GLOO:
        pin(position)
        exchange = Gloo(position, members)
    else:
        exchange = Mpi()
        position = exchange.position
    member = Member(exchange, position, members)
    driver = Turns(program, position)
    for _ in range(turns):
        driver.wait()
        driver.send(member.turn())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
