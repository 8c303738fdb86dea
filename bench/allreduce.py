"""All-reduce between two processes on one host: Lockstep's shared memory against gloo.

    pip install torch==2.13.0 . && python bench/allreduce.py

Two processes, one core each, stay alive and alternate between the two programs, because the speed of a
machine's memory changes within seconds: only neighbours are compared. The contenders get the same
gradients, written anew before each round as a backend would. A time counts from a barrier until the
slower process has its total. Every round's results must have equal bits.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.collectives.contract import Span
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared import Arena, Pool, Room, SharedCommunicator
from lockstep.topology import place

CNN = ((3, 3, 1, 32), (32,), (21632, 128), (128,), (128, 10), (10,))
CASES = {"one leaf of 11 MB": ((2_770_634,),), "leaves of the tutorial's CNN": CNN}
PLAN = ReducePlan.of(place(2, (0, 1)))
Array = np.ndarray[Any, np.dtype[np.float32]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=150, help="rounds that count")
    parser.add_argument("--member", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        Member(*options.member).measure(options.rounds)
    else:
        start(options.rounds)


def start(rounds: int) -> None:
    arena, pool = Arena.create(2), Pool.create()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    members = []
    for position in (0, 1):
        words = [__file__, "--rounds", rounds, "--member", position, arena.fd, pool.fd, port]
        members.append(subprocess.Popen([sys.executable, *map(str, words)], pass_fds=[arena.fd, pool.fd]))
    statuses = [member.wait() for member in members]
    if any(statuses):
        sys.exit(f"the members ended with {statuses}")


class Member:
    """One of the two processes."""

    def __init__(self, position: int, fd: int, pool: int, port: int) -> None:
        import torch
        import torch.distributed

        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[position % len(cores)]})
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=position, world_size=2)
        self.torch: Any = torch
        self.position = position
        self.communicator = SharedCommunicator(Arena.attach(fd), Room(Pool.attach(pool)), position, PLAN)

    def measure(self, rounds: int) -> None:
        for name, shapes in CASES.items():
            random = np.random.default_rng(self.position)
            source = [random.standard_normal(shape, dtype=np.float32) for shape in shapes]
            mine, theirs = [np.empty_like(leaf) for leaf in source], [np.empty_like(leaf) for leaf in source]
            tensors = [self.torch.from_numpy(leaf) for leaf in theirs]
            contenders: list[tuple[list[Array], Callable[[], Sequence[Any]]]] = [
                (mine, lambda mine=mine: self.ours(mine)),
                (theirs, lambda tensors=tensors: self.gloo(tensors)),
            ]
            times = []
            for number in range(rounds + 10):
                pair, totals = [0.0, 0.0], [b"", b""]
                # The order alternates too: the second finds other things in the cache than the first.
                for which in (0, 1) if number % 2 else (1, 0):
                    gradients, run = contenders[which]
                    for leaf, origin in zip(gradients, source, strict=True):
                        np.add(origin, np.float32(number), out=leaf)
                    pair[which], total = self.timed(run)
                    totals[which] = b"".join(np.asarray(leaf).tobytes() for leaf in total)
                if totals[0] != totals[1]:
                    sys.exit(f"{name}: the results differ in round {number}")
                times.append(pair)
            self.report(name, self.slower(np.array(times[10:])))
        self.torch.distributed.destroy_process_group()

    def ours(self, gradients: list[Array]) -> Sequence[Array]:
        return self.communicator.reduce({Span(self.position, self.position + 1): gradients})

    def gloo(self, tensors: list[Any]) -> Sequence[Any]:
        """One after the other; all at once, with `async_op`, is no faster."""
        for tensor in tensors:
            self.torch.distributed.all_reduce(tensor)
        return tensors

    def timed(self, run: Callable[[], Sequence[Any]]) -> tuple[float, Sequence[Any]]:
        self.communicator.barrier()
        begin = time.perf_counter()
        total = run()
        return time.perf_counter() - begin, total

    def slower(self, times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        blobs = self.communicator.gather(times.tobytes())
        return np.maximum(*(np.frombuffer(blob).reshape(times.shape) for blob in blobs))

    def report(self, name: str, times: np.ndarray[Any, Any]) -> None:
        if self.position == 0:
            ours, gloo = times.T * 1e3
            print(f"{name}: {len(times)} pairs, equal bits")
            for label, values, unit in (
                ("  lockstep", ours, "ms"),
                ("  gloo", gloo, "ms"),
                ("  gloo / lockstep", gloo / ours, "times"),
            ):
                low, middle, high = np.percentile(values, [10, 50, 90])
                print(f"{label:18} median {middle:7.2f} {unit:5} (p10 {low:.2f}, p90 {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
