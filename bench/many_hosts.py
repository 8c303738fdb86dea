"""What a change of membership costs the coordinator of a job on many hosts.

    many_hosts.py [--hosts N]

The real coordinator, in virtual time, with agents that only answer (`tests/coordinator/simulated_hosts.py`):
hosts join within 10 s, a tenth is lost at once, and another tenth falls silent at once. The processor time is
that of the coordinator. It encodes each view once here; a real channel encodes it for each host, which
the last row measures.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from programs import HERE

sys.path.insert(0, str(HERE.parent / "tests/coordinator"))

from simulated_hosts import ManyHosts

from lockstep.transport.packet_channel import encode

HOSTS = 1000
ARRIVING = 10.0
CALM = 10.0


def measure(count: int, folder: Path) -> None:
    job = ManyHosts(folder, count, 1)

    def row(what: str, holds: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        began, before = job.clock.now(), job.coordinator.state.view.number
        job.loop.take_traffic()
        yield holds
        traffic, views = job.loop.take_traffic(), job.coordinator.state.view.number - before
        sent, size = sum(traffic.sent.values()), sum(traffic.sent_bytes.values()) / 1e6
        print(
            f"  {what:24} {views:4} views  {sent:8,} messages  {size:9,.1f} MB  "
            f"{traffic.seconds:6.2f} s of a core  {job.clock.now() - began:6.2f} s",
            flush=True,
        )

    def scenario() -> Iterator[Callable[[], bool]]:
        yield lambda: job.coordinator.state.elastic
        for _ in range(count - 1):
            job.arrive(job.dice.uniform(0.0, ARRIVING))
        yield from row("all but one join", lambda: job.size == count)
        until = job.clock.now() + CALM
        yield from row(f"{CALM:g} s of training", lambda: job.clock.now() >= until)
        for host in job.hosts[1 : count // 10 + 1]:
            host.die()
        yield from row("a tenth is lost", lambda: job.size == count - count // 10)
        alive = [host for host in job.hosts if host.alive]
        for host in alive[-(count // 10) :]:
            host.fall_silent()
        yield from row("a tenth falls silent", lambda: job.size == count - 2 * (count // 10))
        view = alive[0].view
        began = time.process_time()
        size = len(encode(view)) if view is not None else 0
        spent = 1e3 * (time.process_time() - began)
        print(f"  encoding a view of {job.size:,} hosts, {size:,} bytes: {spent:.2f} ms")
        job.finish()
        yield lambda: False

    print(f"the coordinator of {count:,} hosts")
    job.run(scenario())


def main(count: int = HOSTS) -> None:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        measure(count, Path(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=HOSTS, help="at least 20")
    main(parser.parse_args().hosts)
